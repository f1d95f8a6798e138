"""Scores of pairs against scipy and scikit-learn, the files they come from, and the commands."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from pipeline.commands import VERBS
from pipeline.data.format import DatasetIndex
from pipeline.errors import CheckpointError, ConfigError, DataError, PostnormError
from pipeline.runtime import cli
from pipeline.use.model import load
from pipeline.use.vectors import TextPairs, cosines, evaluate_pairs, read_pairs
from pipeline.use.whiten import Whitening
from tests.use.test_model import BERT, write

ROWS = [
    ("a class", "a kind of object", 1.0), ("a class", "a class", 5.0), ("functions", "a way", 0.5),
    ("the statement", "statements", 4.0), ("assert", "objects too", 1.0), ("too", "too", 4.5),
    ("objects are", "functions are objects", 3.0), ("a", "the assert statement is", 0.0),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_compressed_files_of_pairs(packed: bool, tmp_path: Path) -> None:
    lines = "".join(f"{first}\t{second}\t{gold}\n" for first, second, gold in ROWS)
    path = tmp_path / ("pairs.tsv.gz" if packed else "pairs.tsv")
    path.write_bytes(gzip.compress(lines.encode()) if packed else lines.encode())
    found = read_pairs(str(path))
    assert (found.first, found.gold.tolist()) == (tuple(_columns()[0]), _columns()[2].tolist())


def _columns(binary: bool = False) -> tuple[list[str], list[str], np.ndarray]:
    first, second, gold = zip(*ROWS, strict=True)
    values = np.array(gold)
    return list(first), list(second), (values > 2).astype(float) if binary else values


def _pairs(binary: bool = False) -> TextPairs:
    first, second, gold = _columns(binary)
    return TextPairs("pairs", tuple(first), tuple(second), gold)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex) -> Path:
    return write(tmp_path_factory.mktemp("models") / "bert", dataset, pooler=True, **BERT)


def _write(path: Path, form: str, label: str = "label", rows: list[Any] = ROWS) -> Path:
    path = path / f"pairs.{form}"
    names = ("sentence1", "sentence2", label)
    if form == "jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    elif form == "csv":
        lines = [",".join(map(str, row)) for row in (names, *rows)]
    else:
        lines = ["\t".join(map(str, row)) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def run_verb(*words: object) -> None:
    """As `postnorm` with these words, in this process."""
    arguments = cli.parse(cli.parser_of("pipeline", "", {"": VERBS}), [str(word) for word in words])
    arguments.run(arguments)


def test_cosines_are_those_of_numpy_and_zeros_are_counted() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 50, 7)).astype(np.float32)
    first[3], second[4] = 0, 0
    second[5] = 3 * first[5]
    found, num_zero = cosines(first, second)
    assert (num_zero, found[3], found[4], found[5]) == (2, 0, 0, 1)
    one, other = first[6].astype(np.float64), second[6].astype(np.float64)
    assert found[6] == pytest.approx(one @ other / np.sqrt((one @ one) * (other @ other)))


@pytest.mark.parametrize("binary", [False, True], ids=["graded", "binary"])
@pytest.mark.parametrize("pooling", ["cls", "pooler", "mean", "first_last_avg"])
def test_scores_are_those_of_scipy(pooling: Any, binary: bool, folder: Path) -> None:
    model = load(folder)
    first, second, gold = _columns(binary)
    found = evaluate_pairs(model, _pairs(binary), [pooling])
    expected, _ = cosines(model.encode(first, pooling), model.encode(second, pooling))
    [score] = found.scores
    # Vectors depend on the batch in their last bits, and so may the cosines of equal texts.
    expected = np.where(np.array(first) == np.array(second), 1.0, expected)
    assert score.spearman == pytest.approx(spearmanr(expected, gold).statistic, abs=1e-12)
    assert score.size == 32
    if binary:
        assert score.auc == pytest.approx(roc_auc_score(gold, expected), abs=1e-12)
    else:
        assert score.auc is None


def test_vectors_of_zeros_are_said(folder: Path) -> None:
    model = load(folder)
    whitening = model.fit_whitening([row[0] for row in ROWS], 2)
    nothing = Whitening(**{**vars(whitening), "weight": whitening.weight * 0})
    found = evaluate_pairs(model, _pairs(), whitening=nothing)
    scores = [(score.spearman != 0, score.num_zero) for score in found.scores]
    assert scores == [(True, 0), (False, 8)]
    assert len(found.notes) == 1


def test_a_model_that_has_diverged_has_no_score(folder: Path) -> None:
    """Its cosines would count as 0, and the correlation of a constant is 0."""
    model = load(folder)
    with torch.no_grad():
        model.module.encoder.token_embedding.weight.fill_(math.nan)
    with pytest.raises(CheckpointError, match=r"the vector of texts\[0\] is not finite"):
        evaluate_pairs(model, _pairs())
    with pytest.raises(CheckpointError, match="take an earlier checkpoint"):
        model.fit_whitening(_pairs().first)


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "txt"])
def test_pairs_are_read_from_any_file(form: str, tmp_path: Path) -> None:
    pairs = read_pairs(str(_write(tmp_path, form)))
    first, second, gold = _columns()
    assert (list(pairs.first), list(pairs.second)) == (first, second)
    assert np.array_equal(pairs.gold, gold)
    assert not pairs.is_binary


def test_other_names_and_tasks_are_read(tmp_path: Path) -> None:
    path = _write(tmp_path, "csv", label="score")
    pairs = read_pairs(str(path), None, ["data.fields.label=score"])
    assert len(pairs.gold) == 8
    task = tmp_path / "task.yaml"
    rows = [(one, other, str(int(gold > 2))) for one, other, gold in ROWS]
    _write(tmp_path, "jsonl", rows=rows).rename(tmp_path / "dev.json")
    (tmp_path / "test.json").write_text('{"sentence1": "a", "sentence2": "b"}\n')
    task.write_text(
        "task: {kind: pair}\n"
        "data: {dev: [dev.json], test: [test.json], fields: {text: sentence1, text_b: sentence2}}\n"
    )
    pairs = read_pairs(str(task))
    assert (pairs.name, pairs.is_binary, pairs.gold.sum()) == (f"{task} (dev)", True, 4)
    with pytest.raises(DataError, match="test has gold for all rows; choose another --split"):
        read_pairs(str(task), "test")


WRONG: dict[str, tuple[list[Any], str]] = {
    "no number": ([("a", "b", 1), ("a", "b", "entailment")], r"pairs.tsv:2: 'entailment' is not a"),
    "infinite": ([("a", "b", "inf"), ("a", "b", 1)], "pairs.tsv:1: 'inf' is not a finite number"),
    "constant": ([("a", "b", 1)] * 3, "gold of all 3 pairs is 1; a correlation needs different"),
    "cells": ([("a", "b", 1), ("a", "b")], "pairs.tsv:2: 2 cells, expected the 3"),
    "empty": ([], "pairs.tsv is empty"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_name_file_and_line(mistake: str, tmp_path: Path) -> None:
    rows, message = WRONG[mistake]
    path = _write(tmp_path, "tsv", rows=rows)
    with pytest.raises(DataError, match=message):
        read_pairs(str(path))


def test_tasks_without_similarity_are_refused(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("a\tb\tentailment\n")
    fields = "{text: one, text_b: two, label: gold}"
    task = "task: {kind: %s}\ndata: {test: [test.tsv], columns: [one, two, gold], fields: %s}\n"
    path = tmp_path / "task.yaml"
    path.write_text(task % ("pair", fields))
    with pytest.raises(DataError, match=r"test.tsv:1: gold 'entailment' is not a number"):
        read_pairs(str(path))
    path.write_text(task % ("classify", "{text: one}"))
    with pytest.raises(ConfigError, match=r"task\.kind=classify without pairs"):
        read_pairs(str(path))
    with pytest.raises(ConfigError, match="is one file, without splits"):
        read_pairs(str(tmp_path / "test.tsv"), "dev")


def test_the_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, gold = _columns(binary=True)
    rows = list(zip(first, second, map(int, gold), strict=True))
    pairs, texts = _write(tmp_path, "tsv", rows=rows), tmp_path / "texts.txt"
    more = [" ".join(side[at : at + 3]) for side in (first, second) for at in range(6)]
    more += [f"{text} {n}" for n in range(3) for text in more]
    texts.write_text("\n".join([*first, "", *second, *more]) + "\n")
    run_verb("whiten", folder, "--texts", texts, "--size", 99, "--out", tmp_path / "w.npz")
    printed = capsys.readouterr()
    # A layer norm leaves 31 dimensions of 32.
    assert "32 to 31 dimensions, fit on 64 texts, pooling mean" in printed.out
    assert "size 99 was cut to 31" in printed.err
    run_verb("sts", folder, pairs, "--whiten", tmp_path / "w.npz", "--pooling", "all", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["num_pairs"], found["notes"]) == (str(folder), 8, [])
    poolings = ["cls", "pooler", "mean", "mean", "first_last_avg"]
    assert [score["pooling"] for score in found["scores"]] == poolings
    whitened = found["scores"][3]
    assert (whitened["whitening"], whitened["size"]) == ("texts.txt", 31)
    model, whitening = load(folder), Whitening.load(tmp_path / "w.npz")
    expected = cosines(*[model.encode(side, whitening=whitening) for side in (first, second)])[0]
    assert whitened["auc"] == pytest.approx(roc_auc_score(gold, expected.round(6)), abs=1e-9)
    run_verb("sts", folder, pairs, "--whiten-on-pairs", 20)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["pooling", "whitening", "size", "spearman", "auc"]
    assert lines[2].split()[:3] == ["mean", "-", "32"]
    assert lines[3].split()[:4] == ["mean", "these", "pairs", "12"]
    assert "20" in lines[4] and "12" in lines[4]  # noqa: PT018
    assert "transductive" in lines[5]
    with pytest.raises(PostnormError, match="pooling=cls, but the whitening was fit with mean"):
        run_verb("sts", folder, pairs, "--whiten", tmp_path / "w.npz", "--pooling", "cls")
