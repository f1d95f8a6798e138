"""Results from stored predictions: the rows of `predictions-SPLIT.jsonl`, their scores, and seeds.

Nothing here needs a model, so every number can be computed again from a folder of `finetune`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pipeline.errors import ConfigError, DataError
from pipeline.runtime.files import write_atomic
from pipeline.tasks.config import TaskTrainConfig
from pipeline.tasks.intervals import HOW_SURE, score_interval
from pipeline.tasks.kinds.base import Kind
from pipeline.tasks.scores import Table
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import PredictionRow

SPLITS = ("dev", "test")
RESULT = "result.json"
BEFORE = {name: getattr(TaskTrainConfig, name) for name in ("optimizer", "beta2", "eps")}
"""Settings that the protocol of older runs does not name."""


# Rows


def predictions_file(folder: Path, split: str) -> Path:
    """Return where a split's predictions are."""
    return folder / f"predictions-{split}.jsonl"


def write_predictions(path: Path, rows: Sequence[PredictionRow]) -> None:
    """Write a row a line, atomically (DataError: a score or a number is infinite or NaN)."""
    lines = []
    for row in rows:
        values = {name: value for name, value in row._asdict().items() if name != "scores"}
        if row.scores is not None:
            values["scores"] = list(row.scores)
        try:
            lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")
        except ValueError:
            raise DataError(
                f"the prediction for row {row.id!r} is not finite ({row.prediction!r}, scores "
                f"{row.scores!r}); the model has diverged: lower train.lr"
            ) from None
    write_atomic(path, "".join(lines).encode())


def read_predictions(path: Path, kind: Kind, labels: Sequence[str]) -> list[PredictionRow]:
    """Read a file of predictions.

    Raises:
        DataError: the file is missing, empty or damaged, or a row does not fit the kind of task or
            its labels; names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines also cuts inside texts
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; expected a folder of `finetune`, with its predictions"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); get the file again") from None
    rows = []
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        try:
            values = json.loads(line)
            row = PredictionRow(
                str(values["id"]), values["gold"], values["prediction"], values.get("scores")
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(
                f"{path}:{number}: expected a JSON object with id, gold and prediction, got "
                f"{line[:80]!r}; get the file again"
            ) from None
        problem = _problem(kind, labels, row)
        if problem:
            raise DataError(f"{path}:{number}: {problem}")
        rows.append(row)
    if not rows:
        raise DataError(f"{path} is empty; get the file again")
    return rows


def _is_like(value: Any, form: Any) -> bool:
    if isinstance(form, tuple):
        return isinstance(value, list) and [type(item) for item in value] == [str, int, int]
    if isinstance(form, list):
        return isinstance(value, list) and all(_is_like(item, form[0]) for item in value)
    if isinstance(form, float):
        # Not isinstance: JSON's true would be a number.
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is type(form)


def _problem(kind: Kind, labels: Sequence[str], row: PredictionRow) -> str:
    """Describe what is wrong with a row; "" if nothing is."""
    for field, value in (("prediction", row.prediction), ("gold", row.gold)):
        form = kind.gold_form if field == "gold" and kind.gold_form is not None else kind.form
        if not _is_like(value, form) and (field == "prediction" or value is not None):
            shown = f"{field} {str(value)[:80]!r} does not fit task.kind={kind.name}"
            return f"{shown}; expected such as {json.dumps(form)}"
        for name in kind.labels_in(value):
            if name not in labels:
                return (
                    f"label {name!r} of {field} is not one of {', '.join(labels[:20])}; this is "
                    "another task's file, or data.labels in task.yaml has changed"
                )
    if row.scores is not None:
        known: Any = row.scores
        if kind.masks_scores and isinstance(known, list):
            known = [score for score in known if score is not None]
        if not _is_like(known, [0.5]):
            return f"scores {str(row.scores)[:80]} are not finite numbers"
    return kind.problem(labels, row)


# Scores


@dataclass(frozen=True)
class Scored:
    """The scores of one seed's predictions."""

    body: dict[str, Any]
    """What `result.json` says of them."""
    table: Table
    """The metric over the rows that are reported; tables of two models give paired draws."""


def tables_of(
    config: TaskConfig, labels: Sequence[str], rows: Sequence[PredictionRow]
) -> dict[str, Table]:
    """Return the metrics of rows that all have gold, by name; see `Kind.score`.

    Raises:
        DataError: there are no rows.
    """
    golds, answers = [row.gold for row in rows], [row.prediction for row in rows]
    return config.kind.score(golds, answers, labels=labels, scorer=config.task.scorer)


def score_run(
    config: TaskConfig, labels: Sequence[str], predictions: Mapping[str, Sequence[PredictionRow]]
) -> Scored:
    """Score the predictions of one seed for dev and test (either may be absent or unlabelled).

    Reported are the rows of test if it has gold, else of dev. Rows without gold in a file that has
    some are not scored, which is among the warnings.

    Raises:
        DataError: no row has gold.
    """
    kind, metric, warnings = config.kind, config.metric, []
    body: dict[str, Any] = {"kind": kind.name, "metric": metric}
    reported: tuple[Table, dict[str, Any]] | None = None
    for split in SPLITS:
        rows = predictions.get(split) or ()
        scored = [row for row in rows if row.gold is not None]
        constant = _constant(split, rows)
        body[split] = None
        if scored:
            golds = [row.gold for row in scored]
            options: dict[str, Any] = {"labels": labels, "scorer": config.task.scorer}
            every = tables_of(config, labels, scored)
            body[split] = {name: table.score for name, table in every.items()}
            choices = [sum(score is not None for score in row.scores or ()) for row in scored]
            least = {
                "majority": kind.majority(golds, **options)[metric],
                "chance": kind.chance(golds, labels=labels, num_choices=choices)[metric],
            }
            reported = every[metric], {**least, "protocol": {"scored_on": split}}
            low = _low(split, metric, every[metric].score, least)
            warnings += [constant + low] if constant else [f"{split}{low}"] * bool(low)
            if len(scored) < len(rows):
                missing = len(rows) - len(scored)
                warnings.append(f"{split}: {missing:,} of {len(rows):,} rows have no gold")
        elif constant:
            warnings.append(constant)
    if reported is None:
        raise DataError("neither dev nor test has a row with gold: there is nothing to score")
    sizes = {split: len(predictions.get(split) or ()) for split in SPLITS}
    return Scored(body | reported[1] | {"rows": sizes, "warnings": warnings}, reported[0])


def _constant(split: str, rows: Sequence[PredictionRow]) -> str:
    """Warn if all predictions are equal; "" if they are not."""
    values = {json.dumps(row.prediction, ensure_ascii=False) for row in rows}
    if len(rows) < 2 or len(values) > 1:
        return ""
    return f"{split}: all {len(rows):,} predictions are {values.pop()}"


def _low(split: str, metric: str, score: float, least: dict[str, float]) -> str:
    """Compare a score with what needs no model; "" if it is above."""
    name = max(least, key=lambda each: least[each])
    if score > least[name]:
        return ""
    return f": {metric} {score:.4f} is not above {name}, {least[name]:.4f}"


def combine(
    runs: Sequence[Scored], seeds: Sequence[int], about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the body of `result.json` for runs of one seed or several on the same rows.

    `scores` are those of the metric on the reported rows, `dev` and `test` means over the seeds,
    `interval` holds the limits of `mean` at 95%, None where nothing is known of chance; `method`
    names what it is of, as in `Interval`, and `how_sure` says it in words. `about` has what
    predictions cannot tell (task, counts, prior, protocol, rows of train), which stays as it is.
    """
    bodies = [run.body for run in runs]
    scores = [run.table.score for run in runs]
    interval = score_interval([run.table for run in runs])
    # JSON has no NaN.
    limits = [None if math.isnan(limit) else limit for limit in (interval.low, interval.high)]
    old = dict(about or {})
    computed = {
        **averaged(bodies),
        "seeds": list(seeds),
        "scores": scores,
        "mean": fmean(scores),
        "sd": stdev(scores) if len(scores) > 1 else 0.0,
        "interval": limits,
        "method": interval.method,
        "how_sure": HOW_SURE[interval.method],
        "rows": old.pop("rows", {}) | bodies[0]["rows"],
        "warnings": joined(seeds, [body["warnings"] for body in bodies]),
    }
    protocol = old.pop("protocol", {}) | bodies[0]["protocol"]
    return {"task": None} | old | computed | {"protocol": protocol}


def averaged(values: Sequence[Any]) -> Any:
    """Average the numbers of equally built mappings; what is not a number is the first one's."""
    first = values[0]
    if isinstance(first, dict):
        return {name: averaged([each[name] for each in values]) for name in first}
    numbers = [each for each in values if isinstance(each, (int, float))]
    return fmean(numbers) if numbers and len(values) > 1 else first


def joined(seeds: Sequence[int], warnings: Sequence[Sequence[str]]) -> list[str]:
    """Merge warnings: one line for a warning of all seeds, "seed N, ..." for the others."""
    common = [text for text in warnings[0] if all(text in each for each in warnings)]
    return common + [
        f"seed {seed}, {text}"
        for seed, each in zip(seeds, warnings, strict=True)
        for text in each
        if text not in common
    ]


# Folders


@dataclass(frozen=True)
class SeedRun:
    """One seed's folder of `finetune`, read and scored again."""

    folder: Path
    seed: int
    config: TaskConfig
    labels: tuple[str, ...]
    stored: dict[str, Any]
    """Its `result.json`."""
    predictions: dict[str, list[PredictionRow]]
    scored: Scored


def read_runs(folder: Path) -> list[SeedRun]:
    """Read the predictions of a folder of `finetune`, a run for each seed of its result.

    Without a result it is all seeds that have a folder.

    Raises:
        DataError: a file is missing, damaged or does not fit the others; names it.
    """
    found = {
        int(path.name[5:]): path for path in folder.glob("seed-*") if path.name[5:].isdecimal()
    }
    seeds = sorted(found)
    if found and (folder / RESULT).is_file():
        seeds = read_result(folder).get("seeds") or seeds
        if not set(seeds) <= set(found):
            raise DataError(
                f"{folder / RESULT} is of seeds {seeds}, but there are predictions of "
                f"{sorted(found)}; put the missing folders back, or remove the file"
            )
    runs = [read_run(found[seed]) for seed in seeds] or [read_run(folder)]
    for run in runs[1:]:
        for split, rows in run.predictions.items():
            _require_same_rows(runs[0], run, split, rows)
    return runs


def seed_folders(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """Name the folders that `finetune` gives the runs of its seeds."""
    return [folder] if len(seeds) == 1 else [folder / f"seed-{seed}" for seed in seeds]


def require_layout(out: Path, *, several: bool) -> None:
    """Refuse to put the run of one seed over those of several, or the other way round.

    Raises:
        ConfigError: it would be.
    """
    has_several = any(out.glob("seed-*"))
    if several and (out / "task.yaml").is_file():
        raise ConfigError(
            f"{out} holds the run of one seed, and several were asked for; choose another --out"
        )
    if has_several and not several:
        raise ConfigError(
            f"{out} holds runs of several seeds, and one was asked for; choose another --out, or "
            f"see {out}/seed-N/{RESULT}"
        )


def read_result(folder: Path) -> dict[str, Any]:
    """Read a folder's `result.json` (DataError: it is missing or damaged)."""
    path = folder / RESULT
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not a finished folder of `finetune` (no {RESULT}, no seed-N folders); "
            "pass its --out once it has finished"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); get the file again") from None
    if not isinstance(body, dict):
        raise DataError(f"{path}: expected a JSON object; get the file again")
    protocol = body.get("protocol")
    if isinstance(protocol, dict) and "weight_decay" in protocol:
        body["protocol"] = {**BEFORE, **protocol}
    return body


def read_run(folder: Path) -> SeedRun:
    """Read and score the folder of one seed; `read_runs` says what it raises."""
    stored = read_result(folder)
    path = folder / "task.yaml"
    config = load_task(str(path))
    kind, labels = config.kind, config.data.labels
    if labels == "auto":
        if kind.has_labels:
            raise DataError(f"{path}: data.labels is auto; expected the labels of the model")
        labels = ()
    labels = kind.types(labels)
    has_split = {split: bool(config.data.splits[split][0]) for split in SPLITS}
    has_split["dev"] |= config.data.hold_out > 0
    predictions = {
        split: read_predictions(predictions_file(folder, split), kind, labels)
        for split, is_there in has_split.items()
        if is_there
    }
    for split, rows in predictions.items():
        wanted = stored.get("rows", {}).get(split, len(rows))
        if len(rows) != wanted:
            raise DataError(
                f"{predictions_file(folder, split)} has {len(rows):,} rows, {RESULT} beside it says"
                f" {wanted:,}; get the file again"
            )
    seed = (stored.get("seeds") or [0])[0]
    if folder.name.startswith("seed-"):
        seed = int(folder.name.removeprefix("seed-"))
    scored = score_run(config, labels, predictions)
    return SeedRun(folder, seed, config, labels, stored, predictions, scored)


def _require_same_rows(
    first: SeedRun, run: SeedRun, split: str, rows: Sequence[PredictionRow]
) -> None:
    others = first.predictions.get(split, [])
    paths = [predictions_file(each.folder, split) for each in (first, run)]
    if len(others) != len(rows):
        raise DataError(
            f"{paths[1]} has {len(rows):,} rows, {paths[0]} has {len(others):,}; the seeds of one "
            "result need predictions for the same rows"
        )
    for number, (one, other) in enumerate(zip(others, rows, strict=True), start=1):
        if (one.id, one.gold) != (other.id, other.gold):
            raise DataError(
                f"{paths[1]}:{number}: row {other.id!r} with gold {other.gold!r}, but "
                f"{paths[0]} has {one.id!r} with {one.gold!r} there; the seeds of one result need "
                "predictions for the same rows"
            )
