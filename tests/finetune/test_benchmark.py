"""Benchmarks over folders written by hand, whose scores, differences and intervals are known."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import to_yaml
from pipeline.errors import ConfigError, DataError, StoppedError
from pipeline.finetune import benchmark_text, scores
from pipeline.finetune.baselines import plain
from pipeline.finetune.benchmark import Plan, read_plan, run
from pipeline.finetune.readers import Example, read_task
from pipeline.finetune.task import TaskConfig

ROOT = Path(__file__).parents[2]
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
    fields = {
        "topic": ("classify", "text: t"),
        "names": ("spans", "text: t"),
        "which": ("choice", "choices: c"),
    }
    for name, (kind, of) in fields.items():
        files = FILES.replace("T.", f"{name}.").replace("F", of)
        (folder / f"{name}.yaml").write_text(f"task: {{kind: {kind}}}\n{files}")
        for split, num in (("train", 20), ("dev", ROWS), ("test", ROWS)):
            rows = [_row(name, split, i) for i in range(num)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.{split}.jsonl").write_text(text)
    (folder / "mine.yaml").write_text(SUITE)
    return folder / "mine.yaml"


def _row(name: str, split: str, number: int) -> dict[str, Any]:
    if name == "topic":
        return {"t": f"about {number}", "label": "ab"[number % 4 == 0]}
    if name == "names":
        return {"t": f"Ann of row {number}", "label": [["person", 0, 3]]}
    return {"c": [f"yes {number}", "no", "no"]} | ({"label": 0} if split != "test" else {})


def _wrong(config: TaskConfig, row: Example) -> Any:
    return {"classify": "c", "spans": [], "choice": 1}[config.task.kind]


Judge = Callable[[str, int, int], bool]
"""Whether a model (source, seed) is right about the row of a number."""


class Finetune:
    """Writes what `finetune` writes, and notes its calls."""

    def __init__(self, is_right: Judge) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fails: dict[tuple[str, str], Exception] = {}
        self._is_right = is_right

    def __call__(
        self, config: TaskConfig, *, name: str, source: str, out: Path,
        seeds: Sequence[int] | None = None, tokens: Path | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        self.calls.append((name, source))
        if (name, source) in self.fails:
            raise self.fails[name, source]
        assert seeds is not None
        assert tokens is not None
        data = read_task(config)
        scored_on = "test" if data.splits["test"][0].gold is not None else "dev"
        rows = data.splits[scored_on]
        found = []
        for seed in seeds:
            part = out / f"seed-{seed}" if len(seeds) > 1 else out
            part.mkdir(parents=True, exist_ok=True)
            predictions = [
                plain(row.gold) if self._is_right(source, seed, i) else _wrong(config, row)
                for i, row in enumerate(rows)
            ]
            lines = [
                {"id": row.id, "gold": plain(row.gold), "prediction": prediction}
                for row, prediction in zip(rows, predictions, strict=True)
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (part / f"predictions-{scored_on}.jsonl").write_text(text)
            golds = [plain(row.gold) for row in rows]
            tables = scores.tables(config.task.kind, golds, predictions, labels=data.labels)
            found.append(tables[config.metric].score)
        labelled = replace(config.data, labels=data.labels or "auto")
        (out / "task.yaml").write_text(to_yaml(replace(config, data=labelled)))
        result = {
            "task": name, "kind": config.task.kind, "metric": config.metric, "majority": 0.25,
            "chance": 0.5, "seeds": list(seeds), "scores": found, "mean": float(np.mean(found)),
            "rows": {split: len(of) for split, of in data.splits.items()}, "counts": data.counts,
            "warnings": ["all predictions are one class"] if source.startswith("random") else [],
            "protocol": {"model": source, "weights_sha256": f"sha of {source}",
                         "selected_on": "dev", "scored_on": scored_on, "lr": 1e-5},
        }  # fmt: skip
        (out / "result.json").write_text(json.dumps(result))
        return result


def _plan(
    folder: Path,
    *overrides: str,
    models: Sequence[str] = ("runs/a",),
    seeds: tuple[int, ...] = (1,),
) -> Plan:
    suite = folder / "mine.yaml"
    if not suite.exists():
        _suite(folder)
    return read_plan(
        str(suite), [*models], folder / "out", seeds, [*overrides], with_random=True,
        with_ngrams=False,
    )  # fmt: skip


def _half_better(source: str, seed: int, number: int) -> bool:
    """A model is right about 3 of 4 rows, its random twin about 1 of 4, of which it shares half."""
    return number % 8 in ((0, 1) if source.startswith("random") else (1, 2, 3, 4, 5, 6))


def test_numbers_of_the_table(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    body, code = run(plan, Finetune(_half_better), lambda body: None)
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
    assert body["mean"] == {
        "tasks": ["topic", "names", "which"], "chance": 0.5, "majority": 0.25,
        "runs/a": pytest.approx((0.75 + 6 / 7 + 0.75) / 3),
        "random:runs/a": pytest.approx((0.25 + 0.4 + 0.25) / 3),
    }  # fmt: skip
    assert body == json.loads((tmp_path / "out/table.json").read_text())


def test_seeds_widen_the_interval(tmp_path: Path) -> None:
    # Seed 1 is right about 7 of 8 rows, seed 2 about 5: means differ more than rows explain.
    judge: Judge = lambda source, seed, i: i % 8 < (7 if seed == 1 else 5)  # noqa: E731
    body, _ = run(_plan(tmp_path, seeds=(1, 2)), Finetune(judge), lambda body: None)
    cell = body["tasks"][0]["columns"]["runs/a"]
    assert (cell["scores"], cell["n"]) == ([7 / 8, 5 / 8], 2)
    assert cell["sd"] == pytest.approx(np.sqrt(2) / 8)
    # A draw takes seed 1 twice, or seed 2 twice, in a quarter of the cases each.
    assert cell["low"] == pytest.approx(5 / 8, abs=0.06)
    assert cell["high"] == pytest.approx(7 / 8, abs=0.06)
    assert "75.0 ± 17.7 (2)" in benchmark_text.markdown(body)


def test_markdown(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "data.train_rows=10", models=("runs/a", "runs/b"))
    finetune = Finetune(lambda source, seed, i: source.endswith("a") or i % 2 == 0)
    finetune.fails["names", "runs/b"] = DataError("row 7 has no text")
    body, code = run(plan, finetune, lambda body: None)
    text = benchmark_text.markdown(body)
    assert code == 2
    [topic] = [line for line in text.splitlines() if line.startswith("| topic")]
    cells = [cell.strip() for cell in topic.strip("|").split("|")]
    assert cells[:6] == ["topic", "classify", "accuracy", "10 sampled / 400 / 400", "50.0", "25.0"]
    assert cells[6:12] == ["100.0", "100.0 [1]", "50.0", "50.0 [2]", "+0.0 [+0.0, +0.0]",
                           "+0.0 [+0.0, +0.0]"]  # fmt: skip
    assert cells[12].startswith("+50.0 [+45.")
    assert cells[13] == "not counted"
    assert "[1] topic, random a: all predictions are one class" in text
    assert "failed: row 7 has no text" in text
    assert "The mean is plain, over what all columns have: topic, which." in text
    [which] = [line for line in text.splitlines() if line.startswith("| which")]
    assert "| 100.0* |" in which, "dev chose the epoch and is reported"
    assert "- runs/a: weights sha of runs/a" in text
    assert "lr 1e-05" in text
    card = benchmark_text.card(body, "runs/b")
    assert "| b |" in card and "| a |" not in card  # noqa: PT018
    assert "failed: row 7 has no text" in card


def test_published_scores_only_of_the_same_protocol(tmp_path: Path) -> None:
    body, _ = run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    one, other, third = body["published"]
    assert (one["scores"], one["left_out"]) == ({"topic": 0.615, "names": 0.5}, {})
    assert other["scores"] == {"which": 0.4}
    assert other["left_out"] == {"topic": "of dev, here test", "names": "of dev, here test"}
    assert third["left_out"] == {"topic": "protocol: median of many seeds"}
    text = benchmark_text.markdown(body)
    assert "- P (test, one run, best epoch on dev; s): topic 61.50, names 50.00" in text
    sampled, _ = run(
        replace(_plan(tmp_path, "data.train_rows=10"), out=tmp_path / "other"),
        Finetune(_half_better), lambda body: None,
    )  # fmt: skip
    assert sampled["published"][0]["left_out"]["topic"] == "here train is a sample"


def test_an_interrupted_benchmark_runs_only_what_is_missing(tmp_path: Path) -> None:
    plan, seen = _plan(tmp_path), []
    first = Finetune(_half_better)
    first.fails["names", "random:runs/a"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        run(plan, first, seen.append)
    partial = json.loads((tmp_path / "out/table.json").read_text())
    assert partial["partial"]
    assert [len(line["columns"]) for line in partial["tasks"]] == [2, 1, 0]
    assert ", partial: 3 scores of 3 tasks" in benchmark_text.markdown(partial)
    second = Finetune(_half_better)
    body, code = run(plan, second, seen.append)
    places = [("names", "random:runs/a"), ("which", "runs/a"), ("which", "random:runs/a")]
    assert (second.calls, code, body["partial"]) == (places, 0, False)
    assert body["tasks"][0]["columns"]["runs/a"]["minutes"] == pytest.approx(
        partial["tasks"][0]["columns"]["runs/a"]["minutes"]
    )
    third = Finetune(_half_better)
    again, _ = run(plan, third, seen.append)
    assert third.calls == []
    assert again == body
    more = Finetune(_half_better)
    run(_plan(tmp_path, seeds=(1, 2)), more, seen.append)
    assert len(more.calls) == 6, "every folder lacks a seed"


def test_a_folder_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    finetune = Finetune(_half_better)
    body, code = run(_plan(tmp_path, "train.lr=1e-3"), finetune, lambda body: None)
    assert (finetune.calls, code) == ([], 2)
    failed = body["tasks"][0]["columns"]["runs/a"]["failed"]
    assert "train.lr is 2e-05 there, 0.001 here; remove the folder" in failed


def test_changed_data_is_noticed(tmp_path: Path) -> None:
    run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    with (tmp_path / "names.dev.jsonl").open("a") as file:
        file.write(json.dumps(_row("names", "dev", 1)) + "\n")
    body, code = run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    assert code == 2
    assert "files of names have changed" in body["tasks"][1]["columns"]["runs/a"]["failed"]
    assert body["tasks"][0]["columns"]["runs/a"]["mean"] == 0.75


def test_other_rows_give_no_difference(tmp_path: Path) -> None:
    run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    path = tmp_path / "out/random-runs-a/topic/predictions-test.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-8]))
    body, _ = run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    assert body["tasks"][0]["differences"][0]["mean"] is None
    assert "other rows" in benchmark_text.markdown(body)
    path.write_text("no json\n")
    body, code = run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    assert code == 2
    assert "is damaged" in body["tasks"][0]["columns"]["random:runs/a"]["failed"]


def test_a_missing_file_fails_its_task_only(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    (tmp_path / "names.dev.jsonl").unlink()
    body, code = run(plan, Finetune(_half_better), lambda body: None)
    assert code != 0
    assert "names.dev.jsonl" in body["tasks"][1]["columns"]["runs/a"]["failed"]
    assert body["mean"]["tasks"] == ["topic", "which"]


def test_a_person_stops_it(tmp_path: Path) -> None:
    finetune = Finetune(_half_better)
    finetune.fails["names", "runs/a"] = StoppedError("STOP")
    with pytest.raises(StoppedError):
        run(_plan(tmp_path), finetune, lambda body: None)


def test_models_that_would_share_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share a folder"):
        _plan(tmp_path, models=("runs/a", "runs-a"))


@pytest.mark.usefixtures("processes")
def test_the_command(tmp_path: Path) -> None:
    """Finished folders, n-grams and the overlap by the real command; it trains nothing."""
    out = tmp_path / "out"
    run(_plan(tmp_path), Finetune(_half_better), lambda body: None)
    corpus = tmp_path / "corpus.jsonl"
    documents = ["nothing in common", f"We met Ann of row 17, and {'Ann of row 5 ' * 3}"]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    command = [sys.executable, "-m", "pipeline", "benchmark", str(tmp_path / "mine.yaml"),
               "--from", "runs/a", "--out", str(out), "--overlap", str(corpus)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "runs/a" not in done.stdout.splitlines()[1], "short names in the header"
    body = json.loads((out / "table.json").read_text())
    assert body["tasks"][1]["columns"]["ngrams"]["mean"] == 1.0, "one name, always the same"
    assert body["tasks"][1]["overlap"]["rows"] == ROWS
    assert (out / "runs-a/card.md").read_text().startswith("## Evaluation\n")
    assert (out / "ngrams/topic/predictions-test.jsonl").is_file()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout
