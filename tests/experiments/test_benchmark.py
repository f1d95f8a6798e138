"""Benchmarks over folders written by hand, whose scores, differences and intervals are known."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import benchmark, benchmark_text
from experiments.benchmark import BenchmarkPlan, read_plan
from experiments.read import difference, read_scores
from pipeline.config.load import to_yaml
from pipeline.errors import ConfigError, DataError, PreemptedError, StoppedError
from pipeline.finetune.result import RESULT, combine
from pipeline.finetune.run import finetune
from pipeline.runtime.files import write_json_atomic
from pipeline.tasks.readers import read_task
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import Example, PredictionRow
from tests.finetune.result_folders import write_run
from tests.support import warm
from tests.support.tiny_tasks import write_rows, write_tiny_model

ROWS = 400
SUITE = """\
tasks: [topic.yaml, names.yaml, which.yaml]
published:
  - {model: P, split: test, protocol: "one run, best epoch on dev", source: s,
     scores: [61.5, 50, null]}
  - {model: Q, split: dev, protocol: one run, source: s, scores: [61.5, 50, 40]}
  - {model: R, split: test, protocol: median of many seeds, source: s,
     scores: [61.5, null, null]}
"""
FILES = "data: {train: [T.train.jsonl], dev: [T.dev.jsonl], test: [T.test.jsonl], fields: {F}}\n"


def _suite(folder: Path) -> Path:
    """Three kinds of task: classes, entities, and a choice whose test file has no gold."""
    fields = {"topic": ("classify", "text: t"), "names": ("spans", "text: t"),
              "which": ("choice", "choices: c")}  # fmt: skip
    for name, (kind, of) in fields.items():
        files = FILES.replace("T.", f"{name}.").replace("F", of)
        (folder / f"{name}.yaml").write_text(f"task: {{kind: {kind}}}\n{files}")
        for split, num in (("train", 20), ("dev", ROWS), ("test", ROWS)):
            rows = [_row(name, split, i) for i in range(num)]
            write_rows(folder / f"{name}.{split}.jsonl", rows)
    (folder / "mine.yaml").write_text(SUITE)
    return folder / "mine.yaml"


def _row(name: str, split: str, number: int) -> dict[str, Any]:
    if name == "topic":
        return {"t": f"about {number}", "label": "ab"[number % 4 == 0]}
    if name == "names":
        return {"t": f"Ann of row {number}", "label": [["person", 0, 3]]}
    return {"c": [f"yes {number}", "no", "no"]} | ({"label": 0} if split != "test" else {})


Judge = Callable[[str, int, int], bool]
"""Whether a model (source, seed) is right about the row of a number."""


class Finetune:
    """Writes what `finetune` writes."""

    def __init__(self, is_right: Judge, selected_on: str = "dev") -> None:
        self.fails: dict[tuple[str, str], Exception] = {}
        self._is_right, self._selected_on = is_right, selected_on

    def __call__(
        self, config: TaskConfig, *, name: str, source: str, out: Path,
        seeds: Sequence[int] | None = None, tokens: Path | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        if (name, source) in self.fails:
            raise self.fails[name, source]
        assert seeds is not None
        assert tokens is not None
        data = read_task(config)
        config = replace(config, data=replace(config.data, labels=data.labels or "auto"))
        about = {
            "task": name,
            "rows": {"train": len(data.splits["train"])},
            "counts": data.counts,
            "train_s": 30.0,
            "protocol": {
                "model": source, "weights_sha256": f"sha of {source}",
                "selected_on": self._selected_on, "lr": 1e-5,
            },
        }  # fmt: skip
        scored = []
        for seed in seeds:
            found = {
                split: [self._answer(config, source, seed, *row) for row in enumerate(rows)]
                for split, rows in data.splits.items()
                if split != "train"
            }
            part = out / f"seed-{seed}" if len(seeds) > 1 else out
            scored.append(write_run(part, seed, found, to_yaml(config), about))
        result = combine(scored, seeds, {**about, "train_s": 30.0 * len(seeds)})
        write_json_atomic(out / RESULT, result)
        return result

    def _answer(
        self, config: TaskConfig, source: str, seed: int, number: int, row: Example
    ) -> PredictionRow:
        wrong: dict[str, Any] = {"classify": "a" if row.gold == "b" else "b", "spans": []}
        is_right = self._is_right(source, seed, number)
        if config.task.kind == "choice":
            index = int(not is_right)
            return PredictionRow(row.id, row.gold, index, [1.0 - index, float(index), None])
        return PredictionRow(row.id, row.gold, row.gold if is_right else wrong[config.task.kind])


def _plan(
    folder: Path, *overrides: str, models: Sequence[str] = ("runs/a",),
    seeds: tuple[int, ...] = (1,),
) -> BenchmarkPlan:  # fmt: skip
    suite = folder / "mine.yaml"
    if not suite.exists():
        _suite(folder)
    return read_plan(
        str(suite), [*models], folder / "out", seeds, [*overrides], with_random=True,
        with_ngrams=False,
    )  # fmt: skip


def _table(plan: BenchmarkPlan, finetune: Callable[..., Any]) -> tuple[dict[str, Any], int]:
    return benchmark.run(plan, finetune, partial(benchmark_text.write, plan))


def _half_better(source: str, seed: int, number: int) -> bool:
    """A model is right about 3 of 4 rows, its random twin about 1 of 4, of which it shares half."""
    return number % 8 in ((0, 1) if source.startswith("random") else (1, 2, 3, 4, 5, 6))


def test_numbers_of_the_table(tmp_path: Path) -> None:
    body, code = _table(_plan(tmp_path), Finetune(_half_better))
    assert code == 0
    topic, names, which = body["tasks"]
    assert topic["columns"]["runs/a"]["mean"] == 0.75
    assert topic["columns"]["random:runs/a"]["mean"] == 0.25
    # Micro F1 of 300 right entities of 400 with no wrong ones: 2 * 300 / (300 + 400).
    assert names["columns"]["runs/a"]["mean"] == pytest.approx(6 / 7)
    assert which["scored_on"] == "dev"
    # Of 8 rows the model alone is right about 5, its twin about 1: the moments of the difference.
    spread = np.sqrt(6 / 8 - (4 / 8) ** 2) / np.sqrt(ROWS)
    [found] = topic["differences"]
    assert found["mean"] == pytest.approx(0.5)
    assert found["low"] == pytest.approx(0.5 - 1.96 * spread, abs=0.006)
    assert found["high"] == pytest.approx(0.5 + 1.96 * spread, abs=0.006)
    assert (found["method"], found["stands"]) == ("rows", True)
    assert found["p"] < 1e-10
    assert "3 of 3 decisions" in body["how_sure"]
    assert body["mean"] == {
        "tasks": ["topic", "names", "which"], "chance": pytest.approx((0.5 + 0 + 0.5) / 3),
        "majority": pytest.approx((0.75 + 0 + 1) / 3),
        "runs/a": pytest.approx((0.75 + 6 / 7 + 0.75) / 3),
        "random:runs/a": pytest.approx((0.25 + 0.4 + 0.25) / 3),
    }  # fmt: skip
    assert body == json.loads((tmp_path / "out/table.json").read_text())


def test_seeds_widen_the_interval(tmp_path: Path) -> None:
    # Seed 1 is right about 7 of 8 rows, seed 2 about 5: means differ more than rows explain.
    judge: Judge = lambda source, seed, i: i % 8 < (7 if seed == 1 else 5)  # noqa: E731
    body, _ = _table(_plan(tmp_path, seeds=(1, 2)), Finetune(judge))
    cell = body["tasks"][0]["columns"]["runs/a"]
    assert (cell["scores"], cell["n"]) == ([7 / 8, 5 / 8], 2)
    assert cell["sd"] == pytest.approx(np.sqrt(2) / 8)
    # Student's quantile of two seeds, 12.7, by their standard error; the rows are little beside it.
    half = 12.706 * np.sqrt(2) / 8 / np.sqrt(2)
    assert cell["high"] - cell["mean"] == pytest.approx(half, rel=0.01)
    assert cell["mean"] - cell["low"] == pytest.approx(half, rel=0.01)
    assert "75.0 ± 17.7 (2)" in benchmark_text.markdown(body)


def test_markdown(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "data.train_rows=10", models=("runs/a", "runs/b"))
    finetune = Finetune(lambda source, seed, i: source.endswith("a") or i % 2 == 0)
    finetune.fails["names", "runs/b"] = DataError("row 7 has no text")
    body, code = _table(plan, finetune)
    text = benchmark_text.markdown(body)
    assert code == 2
    [topic] = [line for line in text.splitlines() if line.startswith("| topic")]
    cells = [cell.strip() for cell in topic.strip("|").split("|")]
    assert cells[:6] == ["topic", "classify", "accuracy", "10 sampled / 400 / 400", "50.0", "75.0"]
    same = "+0.0 [+0.0, +0.0]"
    assert cells[6:12] == ["100.0", "100.0", "50.0 [1]", "50.0 [2]", same, same]
    assert cells[12].startswith("+50.0 [+45.")
    assert cells[12].endswith("]!"), "it stands after Holm"
    assert cells[13] == "not counted"
    assert "failed: row 7 has no text" in text
    [which] = [line for line in text.splitlines() if line.startswith("| which")]
    assert "| 100.0* [" in which, "dev chose the epoch and is reported"
    for fact in ("sha of runs/a", "lr 1e-05"):
        assert fact in text
    card = benchmark_text.card(body, "runs/b")
    assert "| b |" in card and "| a |" not in card  # noqa: PT018
    assert "failed: row 7 has no text" in card


def test_published_scores_only_of_the_same_protocol(tmp_path: Path) -> None:
    body, _ = _table(_plan(tmp_path), Finetune(_half_better))
    one, other, third = body["published"]
    assert (one["scores"], one["left_out"]) == ({"topic": 0.615, "names": 0.5}, {})
    assert other["scores"] == {}
    test = "of dev, here test"
    best = "protocol: here best epoch on dev"  # and reported on it, which the other was not
    assert other["left_out"] == {"topic": test, "names": test, "which": best}
    last, _ = _table(replace(_plan(tmp_path, "train.keep=last"), out=tmp_path / "last"),
                     Finetune(_half_better, selected_on="last"))  # fmt: skip
    assert last["published"][1]["scores"] == {"which": 0.4}
    assert third["left_out"] == {"topic": "protocol: median of many seeds"}
    assert "topic 61.50, names 50.00" in benchmark_text.markdown(body)
    sampled_plan = replace(_plan(tmp_path, "data.train_rows=10"), out=tmp_path / "other")
    sampled, _ = _table(sampled_plan, Finetune(_half_better))
    assert sampled["published"][0]["left_out"]["topic"] == "here train is a sample"
    other_task = replace(_plan(tmp_path, "data.drop_labels=[c]"), out=tmp_path / "dropped")
    changed, _ = _table(other_task, Finetune(_half_better))
    assert changed["published"][0]["left_out"]["topic"] == "here data.drop_labels=[c]"
    words = ("topic.data.drop_labels=[c]", "names.train.epochs=3")
    of_one = replace(_plan(tmp_path, *words), out=tmp_path / "of-one")
    only, _ = _table(of_one, Finetune(_half_better))
    assert only["published"][0]["left_out"] == {
        "topic": f"here {words[0]}", "names": f"here {words[1]}"
    }  # fmt: skip


@pytest.mark.parametrize("stop", [PreemptedError("SIGTERM"), StoppedError("STOP")])
def test_an_interrupted_benchmark_has_a_partial_table(stop: Exception, tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    seen: list[dict[str, Any]] = []

    def write(body: dict[str, Any]) -> None:
        seen.append(body)
        benchmark_text.write(plan, body)

    first = Finetune(_half_better)
    first.fails["names", "random:runs/a"] = stop
    with pytest.raises(type(stop)):
        benchmark.run(plan, first, write)
    partial = json.loads((tmp_path / "out/table.json").read_text())
    assert partial == seen[-1]
    assert partial["partial"]
    assert [len(line["columns"]) for line in partial["tasks"]] == [2, 1, 0]
    body, code = benchmark.run(plan, Finetune(_half_better), write)
    assert (len(seen), code, body["partial"]) == (9, 0, False)


def test_other_rows_give_no_difference(tmp_path: Path) -> None:
    one = _table(_plan(tmp_path), Finetune(_half_better))[0]["tasks"][0]
    cell = read_scores(tmp_path / "out/runs-a/topic", one)
    assert difference(cell, cell._replace(rows=cell.rows[::-1])) is None
    same = difference(cell, cell)
    assert same is not None
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    assert difference(cell, cell._replace(seeds=[9])) is None, "no pair of seeds"


def test_a_missing_file_and_a_bug_fail_their_task_only(tmp_path: Path) -> None:
    plan, finetune = _plan(tmp_path), Finetune(_half_better)
    finetune.fails["topic", "runs/a"] = ValueError("a bug that nobody expects")
    (tmp_path / "names.dev.jsonl").unlink()
    body, code = _table(plan, finetune)
    assert code != 0
    failed = [line["columns"]["runs/a"].get("failed", "") for line in body["tasks"]]
    assert "a bug" in failed[0]
    assert "names.dev.jsonl" in failed[1]
    assert body["mean"]["tasks"] == ["which"]


@pytest.mark.usefixtures("processes")
def test_overlap_is_counted_without_a_task_that_cannot_be_read(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "data.test_rows=5")
    (tmp_path / "names.dev.jsonl").unlink()
    # Which of a row is the text is not said.
    fields = replace(plan.tasks["which"].data.fields, choices=None)
    which = plan.tasks["which"]
    plan.tasks["which"] = replace(which, data=replace(which.data, fields=fields))
    (tmp_path / "corpus.txt").write_text("about everything")
    found = benchmark.count_overlap(plan, [str(tmp_path / "corpus.txt")])
    assert found["sets"] == {"topic": {"rows": 5, "shared": 0, "too_short": 5}}


def test_models_that_would_share_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share a folder"):
        _plan(tmp_path, models=("runs/a", "runs-a"))
    with pytest.raises(ConfigError, match="share a folder"):
        read_plan(str(tmp_path / "mine.yaml"), ["ngrams"], tmp_path, (), [], with_ngrams=True)


@pytest.mark.usefixtures("processes")
def test_real_models_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    """The real fine-tuning, n-grams and overlap; a last time as a command that trains nothing."""
    model = str(write_tiny_model(tmp_path / "tiny"))
    limits = ["data.test_rows=24", "data.dev_rows=24", "train.epochs=1", "input.max_length=24"]
    plan = replace(_plan(tmp_path, *limits, models=(model,), seeds=(1, 2)), with_ngrams=True)
    calls = 0

    def interrupted(config: TaskConfig, **options: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise PreemptedError("stopped")
        return finetune(config, **options)

    with pytest.raises(PreemptedError):
        _table(plan, interrupted)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")}
    assert len(before) == 2 + 3 * 3, "n-grams of two tasks; two seeds and both, three times"
    body, code = _table(plan, finetune)
    assert (code, len(list((tmp_path / "out").rglob("result.json")))) == (0, 3 + 6 * 3)
    of_seeds = {path: time for path, time in before.items() if path.parent.name.startswith("seed")}
    assert of_seeds.items() <= {path: path.stat().st_mtime_ns for path in of_seeds}.items()
    assert body["mean"]["tasks"] == ["topic", "names", "which"]
    assert len({cell["mean"] for cell in body["tasks"][1]["columns"].values()}) > 1
    weights = [body["tasks"][0]["columns"][name]["protocol"]["weights_sha256"]
               for name in (model, f"random:{model}")]  # fmt: skip
    assert weights[0] != weights[1]

    corpus = tmp_path / "corpus.jsonl"
    documents = ["nothing in common", "so I wrote about 6, Ann of row 17 and others"]
    write_rows(corpus, [{"text": text} for text in documents])
    command = ["postnorm", "benchmark", tmp_path / "mine.yaml"]
    command += [*limits, "--from", model, "--out", str(plan.out), "--seeds", "1,2"]
    command += ["--overlap", str(corpus)]
    done = warm.run(*command)
    assert done.returncode == 0, done.stderr
    assert "step 1/" not in done.stdout
    assert model not in done.stdout.splitlines()[1], "a short name in the header"
    again = json.loads((plan.out / "table.json").read_text())
    assert [line["columns"] for line in again["tasks"]] == [
        line["columns"] for line in body["tasks"]
    ]
    # The texts are shorter than what is searched for.
    assert again["tasks"][0]["overlap"] == {"rows": 24, "shared": 0, "too_short": 24}
    assert plan.folder("card.md", model).read_text().startswith("## Evaluation\n")
    (tmp_path / "names.dev.jsonl").write_text(json.dumps(_row("names", "dev", 1)))
    changed, code = _table(plan, finetune)
    assert code == 2
    assert "data_sha256" in changed["tasks"][1]["columns"][model]["failed"]
    assert changed["tasks"][0] == {**again["tasks"][0], "overlap": None}
