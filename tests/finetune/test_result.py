"""Stored predictions: rows there and back, what is refused, scores, warnings, several seeds."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import sklearn.metrics

from pipeline.errors import DataError
from pipeline.finetune import result
from pipeline.finetune.result import Scored, read_runs, score_run
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import PredictionRow
from tests.finetune.result_folders import LABELS, class_rows, write_run, write_seeds


def _config(tmp_path: Path, kind: str, **task: str) -> TaskConfig:
    words = "".join(f", {name}: {value}" for name, value in task.items())
    fields = {"target": "g"} | {name: name[-1] for name in KINDS[kind].fields}
    text = f"task: {{kind: {kind}{words}}}\ndata: {{train: [a], fields: {json.dumps(fields)}}}\n"
    text += "input: {max_length: 256}\n"
    (tmp_path / f"{kind}.yaml").write_text(text)
    return load_task(str(tmp_path / f"{kind}.yaml"))


def _score(
    config: TaskConfig, pairs: list[tuple[Any, Any]], labels: tuple[str, ...] = (), **options: Any
) -> Scored:
    rows = [PredictionRow(str(i), *pair, **options) for i, pair in enumerate(pairs)]
    return score_run(config, labels, {"dev": rows})


@pytest.mark.parametrize(("kind", "labels", "rows"), [
    ("classify", ("否", "是"), [PredictionRow("1", "是", "否", [0.25, -1.5])]),
    ("multilabel", ("a", "b"), [PredictionRow("1", ["a", "b"], [], [-1.0, -2.0])]),
    ("regress", (), [PredictionRow("x", 2.5, 3)]),
    ("spans", ("ORG",), [PredictionRow("1", [], [["ORG", 0, 2]])]),
    ("qa", (), [PredictionRow("Q\u2028", ["二\u2028", "2"], 'a "b"\n')]),
    ("choice", (), [PredictionRow("1", 2, 0, [0.5, None, 1.0])]),
    ("cloze", (), [PredictionRow("#idiom1#", None, 1, [0.5, 2.0])]),
    ("rank", (), [PredictionRow("1,2", [2.0, 0.0], [-0.5, 3]), PredictionRow("3", None, [1.5])]),
])  # fmt: skip
def test_rows_are_read_as_they_were_written(
    tmp_path: Path, kind: str, labels: tuple[str, ...], rows: list[PredictionRow]
) -> None:
    path = tmp_path / "predictions-dev.jsonl"
    result.write_predictions(path, rows)
    assert result.read_predictions(path, KINDS[kind], labels) == rows


def test_scores_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "predictions-dev.jsonl"
    result.write_predictions(path, [PredictionRow("1", "a", "a")])
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"row '7' is not finite .*lower train\.lr"):
        result.write_predictions(path, [PredictionRow("7", "a", "a", [math.nan, 0.0])])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


_GOOD = {
    "classify": PredictionRow("1", "a", "b"), "spans": PredictionRow("1", [], []),
    "qa": PredictionRow("1", [], ""), "regress": PredictionRow("1", 0.5, 0.5),
    "choice": PredictionRow("1", 0, 0, [1.0, None]), "rank": PredictionRow("1", [1.0], [0.5]),
}  # fmt: skip
_NO_OBJECT = "expected a JSON object with id, gold and prediction"
_FINITE = "are not finite numbers"
_BAD: list[tuple[str, Any, str]] = [
    # kind; a line, or gold, prediction and perhaps scores; what is said
    ("classify", '{"id": "2", "gold": "a", ', _NO_OBJECT),
    ("classify", "", _NO_OBJECT),
    ("classify", "[1]", _NO_OBJECT),
    ("classify", '{"id": "2", "prediction": "a"}', _NO_OBJECT),
    ("classify", ("a", "c"), "label 'c' of prediction is not"),
    ("classify", ("c", "a"), "label 'c' of gold is not one"),
    ("classify", ("a", None), "'None' does not fit"),
    ("classify", ("a", 1), "does not fit task.kind=classify"),
    ("classify", ("a", "a", [1.0]), "1 scores, expected one for each of 2 labels"),
    ("classify", ("a", "a", [1.0, math.nan]), _FINITE),
    ("classify", ("a", "a", [1.0, None]), _FINITE),
    ("classify", ("a", "a", 1), _FINITE),
    ("spans", ([], [["c", 0, 1]]), "label 'c' of prediction"),
    ("spans", ([], [["a", 0]]), '[["type", 0, 1]]'),
    ("qa", ("x", "x"), 'such as ["answer"]'),
    ("regress", (1, math.inf), "does not fit task.kind"),
    ("choice", (0, 0), "scores are missing"),
    ("choice", (0, 1, [0.5, None]), "prediction 1 has no score"),
    ("choice", (0, -1, [0.5, 0.5]), "prediction -1 has no score"),
    ("rank", ([1.0, 0.0], [0.5]), "1 scores for 2 relevances"),
    ("rank", ([1.0], 0.5), "does not fit task.kind=rank"),
    ("rank", ([1.0], [math.nan]), "does not fit task.kind=rank"),
]


@pytest.mark.parametrize(("kind", "row", "message"), _BAD)
def test_a_bad_row_is_told_with_its_line(tmp_path: Path, kind: str, row: Any, message: str) -> None:
    path = tmp_path / "predictions-dev.jsonl"
    result.write_predictions(path, [_GOOD[kind]])
    names = ("gold", "prediction", "scores")
    line = row if isinstance(row, str) else json.dumps({"id": 2, **dict(zip(names, row))})  # noqa: B905
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(DataError) as caught:
        result.read_predictions(path, KINDS[kind], ("a", "b"))
    assert f"{path}:2: " in str(caught.value)
    assert message in str(caught.value)


def test_scores_agree_with_scikit_learn(tmp_path: Path) -> None:
    dev, test = class_rows(1, 50), class_rows(2, 80)
    scored = score_run(_config(tmp_path, "classify"), LABELS, {"dev": dev, "test": test})
    for split, rows in (("dev", dev), ("test", test)):
        sides = [row.gold for row in rows], [row.prediction for row in rows]
        body = scored.body[split]
        assert body["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(*sides))
    golds = [row.gold for row in test]
    assert scored.body["protocol"] == {"scored_on": "test"}
    assert scored.body["majority"] == max(map(golds.count, LABELS)) / 80
    assert scored.body["chance"] == pytest.approx(1 / 3)
    assert scored.body["rows"] == {"dev": 50, "test": 80}
    assert scored.table.score == scored.body["test"]["accuracy"]
    assert scored.body["warnings"] == []


def test_rows_without_gold_are_left_out_and_dev_reported_for_test(tmp_path: Path) -> None:
    rows = class_rows(1, 50)
    whole = score_run(_config(tmp_path, "classify"), LABELS, {"dev": rows[10:]}).body["dev"]
    rows[:10] = [row._replace(gold=None) for row in rows[:10]]
    body = score_run(_config(tmp_path, "classify"), LABELS, {"dev": rows}).body
    assert body["dev"] == whole
    assert body["warnings"] == ["dev: 10 of 50 rows have no gold"]
    test = [row._replace(gold=None, prediction="news") for row in class_rows(2, 80)]
    splits = {"dev": class_rows(1, 50), "test": test}
    body = score_run(_config(tmp_path, "classify"), LABELS, splits).body
    assert body["test"] is None
    assert body["warnings"] == ['test: all 80 predictions are "news"']
    assert body["protocol"] == {"scored_on": "dev"}
    assert body["rows"] == {"dev": 50, "test": 80}
    with pytest.raises(DataError, match="neither dev nor test has a row with gold"):
        score_run(_config(tmp_path, "classify"), LABELS, {"test": test})


def test_chance_scorer_and_metric_are_the_tasks(tmp_path: Path) -> None:
    scores = ([0.5, 0.1, None, None], [0.5, 0.7, 0.1, 0.1])
    rows = [PredictionRow(str(number), number, number, row) for number, row in enumerate(scores)]
    body = score_run(_config(tmp_path, "choice"), (), {"dev": rows}).body
    assert body["chance"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert body["dev"] == {"accuracy": 1.0}
    # CMRC compares characters, SQuAD words: "中国。" and "中国" are equal for the first alone.
    pairs: list[tuple[Any, Any]] = [(["中国。"], "中国"), (["b"], "b")]
    cmrc = _score(_config(tmp_path, "qa", scorer="cmrc", metric="em"), pairs)
    assert (cmrc.body["metric"], cmrc.table.score) == ("em", 1.0)
    squad = _score(_config(tmp_path, "qa"), pairs)
    assert (squad.body["metric"], squad.body["dev"]["em"]) == ("f1", 0.5)


_MAJORITY = "accuracy 0.6667 is not above majority, 0.6667"
_WARNED: list[tuple[str, str, list[Any], str]] = [
    # kind, labels, pairs of gold and prediction, how the one warning begins; "" if there is none
    ("pair", "01", ["00", "00", "10"], f'dev: all 3 predictions are "0": {_MAJORITY}'),
    ("pair", "01", ["01", "00", "10"], "dev: accuracy 0.3333 is not above majority, 0.6667"),
    ("spans", "A", [([["A", 0, 1]], []), ([["A", 2, 3]], [])], "dev: all 2 predictions are []: f1"),
    ("qa", "", [([], ""), ([], "")], 'dev: all 2 predictions are "": f1 1.0000 is not above'),
    ("pair", "abc", ["aa", "bb", "bb", "cb"], ""),  # a class that is never predicted
]


@pytest.mark.parametrize(("kind", "labels", "pairs", "warning"), _WARNED)
def test_scores_that_need_no_model_are_warned_of(
    tmp_path: Path, kind: str, labels: str, pairs: list[Any], warning: str
) -> None:
    found = _score(_config(tmp_path, kind), pairs, tuple(labels)).body["warnings"]
    assert len(found) == bool(warning)
    assert "".join(found).startswith(warning)


def test_seeds_are_combined_and_widen_the_interval(tmp_path: Path) -> None:
    config = _config(tmp_path, "classify")
    rows = [class_rows(seed, 400, skill=0.8) for seed in (1, 2, 3)]
    runs = [score_run(config, LABELS, {"dev": each}) for each in rows]
    about = {"task": "t", "rows": {"train": 7}, "protocol": {"model": "m"}, "counts": {"x": 1}}
    body = result.combine(runs, [1, 2, 3], about)
    scores = [run.table.score for run in runs]
    assert body["scores"] == scores
    assert (body["mean"], body["sd"]) == (statistics.mean(scores), statistics.stdev(scores))
    macro = statistics.mean(run.body["dev"]["macro_f1"] for run in runs)
    assert body["dev"]["macro_f1"] == pytest.approx(macro)
    assert body["rows"] == {"train": 7, "dev": 400, "test": 0}
    assert body["protocol"] == {"model": "m", "scored_on": "dev"}
    assert (body["task"], body["counts"], body["test"]) == ("t", {"x": 1}, None)
    of_seeds = scipy.stats.t.ppf(0.975, 2) * body["sd"] / math.sqrt(3)
    low, high = body["interval"]
    assert (low + high) / 2 == pytest.approx(body["mean"])
    assert (high - low) / 2 >= of_seeds
    assert (body["method"], "seeds" in body["how_sure"]) == ("rows and t", True)
    json.dumps(body, allow_nan=False)


def test_the_interval_of_one_seed_is_that_of_a_share_of_rows(tmp_path: Path) -> None:
    # By rows alone accuracy has the variance p (1 - p) / (n - 1), with Student's t of n - 1.
    run = score_run(_config(tmp_path, "classify"), LABELS, {"dev": class_rows(5, 400, skill=0.8)})
    body = result.combine([run], [5])
    share = body["mean"]
    half = scipy.stats.t.ppf(0.975, 399) * math.sqrt(share * (1 - share) / 399)
    # A thousand draws know a deviation to 2.2%.
    assert body["interval"] == pytest.approx([share - half, share + half], abs=0.09 * half)
    assert (body["method"], "other seeds" in body["how_sure"]) == ("rows", True)
    assert body["sd"] == 0.0
    assert body["dev"] == run.body["dev"], "of one seed nothing is averaged"


def test_one_seed_and_one_row_have_no_interval(tmp_path: Path) -> None:
    run = _score(_config(tmp_path, "pair"), [("a", "a")], ("a", "b"))
    body = result.combine([run], [1])
    assert (body["interval"], body["method"]) == ([None, None], "none")
    json.dumps(body, allow_nan=False)
    body = result.combine([run, run], [1, 2])
    assert (body["interval"], body["method"]) == ([1.0, 1.0], "t")


def test_seeds_are_averaged_and_their_warnings_joined(tmp_path: Path) -> None:
    config = _config(tmp_path, "pair")
    good = _score(config, [("a", "a"), ("b", "b")], ("a", "b"))
    bad = _score(config, [("a", "b"), ("b", "b")], ("a", "b"))
    assert result.combine([bad], [4])["warnings"][0].startswith("dev: all 2 predictions")
    (warning,) = result.combine([good, bad], [3, 4])["warnings"]
    assert warning.startswith("seed 4, dev: all 2 predictions")
    assert result.combine([bad, bad], [3, 4])["warnings"] == bad.body["warnings"], (
        "all say it: once"
    )
    one = {"a": 1, "b": {"c": 2.0, "d": None}, "e": "x"}
    other = {"a": 2, "b": {"c": 4.0, "d": 5.0}, "e": "x"}
    assert result.averaged([one, other]) == {"a": 1.5, "b": {"c": 3.0, "d": 5.0}, "e": "x"}
    assert result.averaged([one]) == one


def test_folders_of_seeds_are_read_by_their_number(tmp_path: Path) -> None:
    write_seeds(tmp_path, [10, 2])
    (tmp_path / "seed-notes").mkdir()
    runs = read_runs(tmp_path)
    assert [run.seed for run in runs] == [2, 10]
    assert runs[1].predictions["dev"] == class_rows(10, 40)
    assert runs[1].scored.body["dev"] == runs[1].stored["dev"]
    assert [run.seed for run in read_runs(tmp_path / "seed-10")] == [10]


@pytest.mark.parametrize("other", ["fewer", "another file's"])
def test_seeds_of_different_rows_are_refused(tmp_path: Path, other: str) -> None:
    write_seeds(tmp_path, [1])
    splits = {"dev": class_rows(2, 40), "test": class_rows(2, 60)}
    if other == "fewer":
        splits["test"] = class_rows(2, 59)
        message = r"seed-2/predictions-test\.jsonl has 59 rows, .*has 60"
    else:
        splits["dev"][5] = splits["dev"][5]._replace(id="other")
        message = r"predictions-dev\.jsonl:6: row 'other'.*has '5'"
    write_run(tmp_path / "seed-2", 2, splits)
    with pytest.raises(DataError, match=message):
        read_runs(tmp_path)


_BROKEN: list[tuple[str, Callable[[str], str | None], str]] = [
    # file, what becomes of its text (None: it is removed), and what is said
    ("result.json", lambda _: None, "not a finished folder"),
    ("result.json", lambda _: "{", "result.json is not valid JSON"),
    ("result.json", lambda _: "[]", "expected a JSON object"),
    ("predictions-test.jsonl", lambda _: None, "predictions-test.jsonl does not exist"),
    ("predictions-dev.jsonl", lambda text: text[: text.rindex("{")], "has 39 rows, result.json"),
    ("predictions-dev.jsonl", lambda _: "", "predictions-dev.jsonl is empty"),
    ("task.yaml", lambda text: text.replace("[news, sport, tech]", "auto"), "data.labels is auto"),
    ("task.yaml", lambda text: text.replace("tech", "art"), "label 'tech'"),
]


@pytest.mark.parametrize(("name", "changed", "message"), _BROKEN)
def test_folders_that_are_not_whole_are_refused(
    tmp_path: Path, name: str, changed: Callable[[str], str | None], message: str
) -> None:
    folder = tmp_path / "run"
    write_run(folder, 1, {"dev": class_rows(1, 40), "test": class_rows(2, 60)})
    text = changed((folder / name).read_text())
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(DataError) as caught:
        read_runs(folder)
    assert message in str(caught.value)
