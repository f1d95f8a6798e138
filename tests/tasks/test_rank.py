"""Ranking: both layouts of files, the loss, and scores against independent ones."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch

from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError, DataError
from pipeline.finetune.heads.base import make_head
from pipeline.tasks.kinds.rank import ndcg, reciprocal_rank
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.readers import TaskData, read_task
from pipeline.tasks.task import load_task
from pipeline.tasks.types import HeadSpec
from tests.support.tiny_tasks import write_rows

ROWS = [
    {"id": 7, "query": "苹果 价格", "title": "苹果多少钱", "label": "2"},
    {"id": 8, "query": "北京", "title": "去上海", "label": "0"},
    {"id": 9, "query": "苹果 价格", "title": "苹果树", "label": "1"},
    {"id": 10, "query": "苹果 价格", "title": "梨", "label": "0"},
    {"id": 11, "query": "北京", "title": "在南京", "label": "0"},
]


def _read(folder: Path, rows: list[dict[str, Any]], fields: str, **data: Any) -> TaskData:
    write_rows(folder / "a.json", rows)
    more = "".join(f", {name}: {json.dumps(value)}" for name, value in data.items())
    path = folder / "task.yaml"
    path.write_text(f"task: {{kind: rank}}\ndata: {{train: [a.json], fields: {{{fields}}}{more}}}")
    return read_task(load_task(str(path)), ("train",))


SINGLE = "text: query, text_b: title"


def test_rows_of_a_query_become_one_example(tmp_path: Path) -> None:
    data = _read(tmp_path, ROWS, SINGLE)
    first, second = data.splits["train"]
    assert (first.id, first.text, first.gold) == ("7,9,10", "苹果 价格", (2.0, 1.0, 0.0))
    assert first.choices == ("苹果多少钱", "苹果树", "梨")
    assert (second.id, second.gold, second.choices) == ("8,11", (0.0, 0.0), ("去上海", "在南京"))
    assert data.counts["train"]["queries without a relevant candidate, not scored"] == 1
    assert data.counts["train"]["rows"] == 2


def test_both_layouts_are_the_same(tmp_path: Path) -> None:
    lists = []
    for query in ("苹果 价格", "北京"):
        of_query = [row for row in ROWS if row["query"] == query]
        labels = [int(str(row["label"])) for row in of_query]
        lists.append(
            {"query": query, "titles": [row["title"] for row in of_query], "label": labels}
        )
    whole = _read(tmp_path, lists, "text: query, choices: titles").splits["train"]
    for one, other in zip(whole, _read(tmp_path, ROWS, SINGLE).splits["train"], strict=True):
        assert (one.text, one.choices, one.gold) == (other.text, other.choices, other.gold)


def test_labels_may_drop_rows(tmp_path: Path) -> None:
    data = _read(tmp_path, ROWS, SINGLE, drop_labels=["1"])
    assert data.splits["train"][0].choices == ("苹果多少钱", "梨")
    assert data.counts["train"]["dropped: label '1'"] == 1


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"label": "-1"}, ["a.json:1", "-1", "from 0"]),
        ({"label": 2000}, ["a.json:1", "2000", "to 1000"]),
        ({"label": "good"}, ["a.json:1", "good"]),
        ({"label": None}, ["a.json:1", "3 rows", "'label'"]),
        ({"title": None}, ["a.json:1", "data.fields.text_b"]),
    ],
)
def test_a_bad_row_is_named(change: dict[str, Any], facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        _read(tmp_path, [ROWS[0] | change, *ROWS[1:]], SINGLE)
    assert all(fact in str(error.value) for fact in facts), error.value


@pytest.mark.parametrize("fields", ["text: query", f"{SINGLE}, choices: titles"])
def test_candidates_have_one_place(fields: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"either data\.fields\.text_b"):
        _read(tmp_path, ROWS, fields)


def test_relevances_need_one_for_each_candidate(tmp_path: Path) -> None:
    row = {"query": "a", "titles": ["b", "c"], "label": [1]}
    with pytest.raises(DataError, match=r"a\.json:1: 2 candidates"):
        _read(tmp_path, [row], "text: query, choices: titles")


@pytest.mark.parametrize("levels", [2, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_ndcg_is_that_of_scikit_learn(levels: int, ties: bool) -> None:
    rng = np.random.default_rng(levels)
    for _ in range(50):
        size = int(rng.integers(2, 30))
        gold = rng.integers(levels, size=size).astype(float)
        scores = rng.integers(5, size=size) / 4 if ties else rng.normal(size=size)
        expected = sklearn.metrics.ndcg_score([2**gold - 1], [scores], k=10)
        assert ndcg(gold.tolist(), scores.tolist()) == pytest.approx(expected)


def test_reciprocal_rank_is_the_mean_over_all_orders_of_ties() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        gold, scores = rng.integers(2, size=5).tolist(), rng.integers(3, size=5).tolist()
        ranks = []
        for order in itertools.permutations(range(5)):
            ordered = sorted(order, key=lambda place: -scores[place])  # stable
            first = next((n for n, place in enumerate(ordered) if gold[place]), None)
            ranks.append(0.0 if first is None else 1 / (first + 1))
        assert reciprocal_rank(gold, scores) == pytest.approx(np.mean(ranks))


def test_queries_without_relevance_are_not_scored() -> None:
    golds, predictions = [[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]], [[2.0, 1.0], [5.0, 1.0], [2.0, 1.0]]
    every = KINDS["rank"].score(golds, predictions)
    assert every["mrr"].score == pytest.approx((1 + 1 / 2) / 2)
    assert every["ndcg"].lines.shape == (3, 2), "a line a query, so that draws are of queries"
    assert KINDS["rank"].majority(golds)["mrr"] == pytest.approx(3 / 4)
    assert KINDS["rank"].chance(golds, ())["mrr"] == pytest.approx(3 / 4)


def test_loss_is_the_cross_entropy_of_shares() -> None:
    spec = HeadSpec("t", "rank", (), "cls", 0.0, "softmax", "bio", 32, 30, None)
    head = make_head(ModelConfig(vocab_size=8, num_layers=1, hidden_size=8, num_heads=1), spec)
    scores = torch.tensor([[1.0, 2.0, 0.5], [3.0, 1.0, -torch.inf], [1.0, 2.0, 0.0]])
    inputs = {
        "choices": torch.isfinite(scores),
        "labels": torch.tensor([[2 / 3, 1 / 3, 0], [0, 1, 0], [0, 0, 0]]),
    }
    first = torch.log_softmax(scores[0], 0)
    expected = [-(2 * first[0] + first[1]) / 3, -torch.log_softmax(scores[1, :2], 0)[1], 0.0]
    assert head.losses(scores, inputs).tolist() == pytest.approx([float(v) for v in expected])
