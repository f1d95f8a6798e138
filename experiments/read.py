"""From finished folders to numbers: scores of tasks by row, and what is known of a study's runs.

Nothing is kept in memory between calls: outcomes come from the runs' folders, and what was measured
in a finished model lies in OUT/readings, so that a study goes on where it was stopped.
"""

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.probes import PROBES, ProbeResult, read_masks
from experiments.study import MEAN_SCORE, PartConfig, StudyPlan, StudyRun, fits, safe_name
from pipeline.config.load import build
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data.record import read_batches
from pipeline.errors import (
    EXIT_FAILED_DO_NOT_RETRY,
    EXIT_FINISHED,
    EXIT_PREEMPTED,
    ConfigError,
    DataError,
)
from pipeline.finetune.result import read_result, read_runs
from pipeline.model.architecture import TASK_FILE
from pipeline.runtime.files import read_json_lines, write_json_atomic
from pipeline.runtime.run_folder import RunFolder
from pipeline.tasks.intervals import Interval, interval_of, row_draws, row_variance
from pipeline.tasks.scores import Floats

logger = logging.getLogger(__name__)

Outcome = Literal["finished", "diverged", "failed", "running", "missing"]
STUCK_NATS = 0.1
"""A model this little below the unigram entropy has learnt frequencies and no more."""
_VERSIONS = ("git_revision", "python", "torch", "host", "fingerprint")
_LOG_TAIL = 4096


@dataclass(frozen=True)
class Reading:
    """One run as far as it has come."""

    outcome: Outcome
    seconds: float = 0.0
    """Seconds of training, all attempts together, evaluations and saves included."""
    values: dict[str, float] = field(default_factory=dict)
    """Values by metric; empty unless the run is finished."""
    profiles: dict[str, list[float]] = field(default_factory=dict)
    stuck: bool = False
    """Whether it finished about at the unigram entropy."""
    told: bool | None = None
    """Whether its own warning `plateau` said so; None: in older pages, and of one log line."""
    versions: dict[str, Any] = field(default_factory=dict)
    tasks: "dict[str, TaskScores]" = field(default_factory=dict)
    """Its fine-tunings that have predictions, by task; not written into the page's JSON."""

    def plain(self) -> dict[str, Any]:
        """Return what a page's JSON says of the run."""
        said = {of.name: getattr(self, of.name) for of in fields(self) if of.name != "tasks"}
        return {name: value for name, value in said.items() if value is not None}


def runs_folder(out: Path) -> Path:
    """Return the folder of the pre-training runs of a study."""
    return out / "runs"


def tasks_folder(out: Path) -> Path:
    """Return the folder of its fine-tunings."""
    return out / "tasks"


def task_name(run: str, task: str, draw: int = 0) -> str:
    """Return the folder of a fine-tuning below that, of a draw of the task's classes."""
    return f"{run}/{safe_name(task)}" + (f"+{draw}" if draw else "")


def outcome(folder: Path) -> Outcome:
    """Describe how a pre-training run stands."""
    run = RunFolder(folder)
    if run.done.is_file():
        return "finished"
    if run.is_locked():
        return "running"
    exits = sorted(folder.glob("exit/*/rank-00000"), key=lambda path: path.stat().st_mtime_ns)
    code = int(exits[-1].read_text()) if exits else 0
    if code != EXIT_FAILED_DO_NOT_RETRY:
        return "missing" if code in (EXIT_FINISHED, EXIT_PREEMPTED) else "failed"
    log = run.log(0)
    said = log.read_bytes()[-_LOG_TAIL:] if log.is_file() else b""
    # One that gave up because of its numbers has diverged, and would again; any other
    # failure may be a full disk, and is tried again, also after steps that were skipped.
    last = said.rpartition(b"error: ")[2]
    told = (b"is not finite", b"had no finite gradient", b"(spikes.max_rewinds)")
    lost = any(text in last for text in told)
    return "diverged" if lost else "failed"


def read(plan: StudyPlan, run: StudyRun, out: Path) -> Reading:
    """Read one run; measure what has not been measured in it.

    Raises:
        DataError: a finished run lacks its numbers, or the data does not fit a probe.
    """
    folder = runs_folder(out) / run.name
    state = outcome(folder)
    seen = RunFolder(folder)
    records = read_json_lines(seen.metrics)
    train = [record for record in records if record["kind"] == "train"]
    seconds = float(train[-1]["elapsed_s"]) if train else 0.0
    attempts = read_json_lines(seen.attempts)
    versions = {name: attempts[-1].get(name) for name in _VERSIONS} if attempts else {}
    if state == "missing" and run.start is not None:
        # It cannot start: its start gave up.
        state = "diverged" if outcome(runs_folder(out) / run.start) == "diverged" else state
    if state != "finished":
        return Reading(state, seconds, versions=versions)
    steps = run.config.train.num_steps
    last = [r for r in records if r["kind"] == "eval" and r["step"] == steps]
    if not last:
        raise DataError(
            f"{seen.metrics} has no held-out evaluation at step {steps}, the last; restore the "
            "file, or remove the run's folder to train it again"
        )
    values = {"held_out_loss": last[-1]["loss"], "accuracy": last[-1]["accuracy"]}
    values["tokens_per_s"] = statistics.median(record["tokens_per_s"] for record in train)
    limit = last[-1]["unigram_entropy"] - STUCK_NATS
    measured = _measured(plan, run, folder, out)
    for each in measured:
        values |= each.values
    scores, tasks = _scores(plan, run, out)
    values |= scores
    return Reading(
        state,
        seconds,
        {name: float(value) for name, value in values.items() if value is not None},
        {name: of for each in measured for name, of in each.profiles.items()},
        stuck=values["held_out_loss"] is None or values["held_out_loss"] > limit,
        # A run of one line, which stands for fresh weights, has nothing to be told by.
        told=any(record["kind"] == "plateau" for record in records) if len(train) > 1 else None,
        versions=versions,
        tasks=tasks,
    )


class TaskScores(NamedTuple):
    """A finished folder of a task, scored again from its predictions."""

    result: dict[str, Any]
    """Its `result.json`."""
    rows: list[tuple[str, Any]]
    """Id and gold of each scored row."""
    seeds: list[int]
    scores: list[float]
    """Scores of the seeds."""
    draws: Floats
    """[draws, seeds], as `row_draws` makes them."""


def read_scores(folder: Path, result: dict[str, Any]) -> TaskScores:
    """Score the predictions of a folder of `finetune` again.

    Raises:
        DataError: predictions are missing, damaged, or of other rows from seed to seed.
    """
    runs = read_runs(folder)
    predictions = runs[0].predictions[runs[0].scored.body["protocol"]["scored_on"]]
    rows = [(row.id, row.gold) for row in predictions if row.gold is not None]
    tables = [run.scored.table for run in runs]
    scores = [table.score for table in tables]
    return TaskScores(result, rows, [run.seed for run in runs], scores, row_draws(tables))


def joined(parts: Sequence[TaskScores]) -> TaskScores:
    """Put the seeds of several folders side by side, all scored on the same rows.

    Raises:
        DataError: they are of other rows.
    """
    if any(part.rows != parts[0].rows for part in parts):
        raise DataError(
            f"the seeds {[part.seeds for part in parts]} were scored on different rows; remove "
            "their folders and call again"
        )
    return TaskScores(
        parts[0].result,
        parts[0].rows,
        [seed for part in parts for seed in part.seeds],
        [score for part in parts for score in part.scores],
        np.concatenate([part.draws for part in parts], axis=1),
    )


def difference(model: TaskScores, against: TaskScores) -> Interval | None:
    """Compare two models by the seeds that both have; None where the rows are not the same."""
    shared = [seed for seed in model.seeds if seed in against.seeds]
    if model.rows != against.rows or not shared:
        return None
    mine, theirs = ([of.seeds.index(seed) for seed in shared] for of in (model, against))
    values = [model.scores[i] - against.scores[j] for i, j in zip(mine, theirs, strict=True)]
    draws = model.draws[:, mine] - against.draws[:, theirs]
    return interval_of(values, row_variance(draws, len(model.rows)))


def read_page(path: Path) -> tuple[dict[str, Any], dict[str, Reading]]:
    """Read a results page's NAME.json; return what it holds, and what it says of each run.

    Raises:
        DataError: there is no such file, or it is not one of these.
    """
    names = {of.name for of in fields(Reading)}
    try:
        body = json.loads(path.read_bytes())
        runs = {
            name: Reading(**{key: run[key] for key in names & run.keys()})
            for name, run in body["runs"].items()
        }
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: leave out --report to run the study") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} has no results of a study ({error}); get the file again") from None
    return body, runs


def _measured(plan: StudyPlan, run: StudyRun, folder: Path, out: Path) -> list[ProbeResult]:
    """Measure a finished model, or take what was measured before."""
    cells = [cell for cell, runs in plan.of_cells.items() if run.name in runs.values()]
    parts = [plan.parts[cell.part] for cell in cells]
    arms = {cell.arm: plan.study.arms[cell.arm] for cell in cells}
    wanted = {probe: dict(plan.study.extra) for part in parts for probe in part.probes}
    for name, arm in product(_reads_of(plan, parts), arms.values()):
        last = {} if arm.mean is None else {"mean": arm.mean}
        wanted[arm.read_as(f"read {name}")] = asdict(plan.study.reads[name]) | last
    path = out / "readings" / f"{run.name.replace('/', '+')}.json"
    known = json.loads(path.read_bytes()) if path.is_file() else {}
    done = json.loads(RunFolder(folder).done.read_bytes())
    if known.get("done") != done:
        known = {"done": done}
    for name, settings in wanted.items():
        settings = json.loads(json.dumps(settings))
        if known.get(name, {}).get("settings") != settings:
            logger.info("measuring %s of %s", name, run.name)
            found = _measure(name, settings, folder, run.config)
            known[name] = {"settings": settings, **asdict(found)}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(path, known)
    return [ProbeResult(known[name]["values"], known[name]["profiles"]) for name in wanted]


def _reads_of(plan: StudyPlan, parts: Sequence[PartConfig]) -> list[str]:
    """Name what finished models of some parts are read on."""
    probed = [name for part in parts for probe in part.probes for name in PROBES[probe].metrics]
    reads = {
        metric.partition("@")[2]
        for part in parts
        for metric in part.metrics
        if "@" in metric
        and metric.rpartition(".")[2] not in plan.tasks
        and not any(fits(metric, pattern) for pattern in probed)
    }
    return sorted(reads)


def check_reads(plan: StudyPlan) -> None:
    """Refuse what `reads` cannot read in a run (ConfigError), before anything is trained."""
    for cell, runs in plan.of_cells.items():
        for name in _reads_of(plan, [plan.parts[cell.part]]):
            config = plan.runs[next(iter(runs.values()))].config
            config_of_read(config, name, asdict(plan.study.reads[name]))


def config_of_read(
    config: PretrainConfig, name: str, settings: Mapping[str, Any]
) -> PretrainConfig:
    """Return a run's config with the masks and the length of a `ReadConfig`, given as values.

    Raises:
        ConfigError: what `reads.NAME.set` says does not fit the run.
    """
    if config.objective.kind == "rtd":
        raise ConfigError(
            f"reads.{name}: a discriminator (objective.kind=rtd) predicts no words; leave its arm "
            "out of parts with metrics of reads"
        )
    if (kind := settings["set"].get("objective.kind", "mlm")) != "mlm":
        raise ConfigError(
            f"reads.{name}.set: objective.kind={kind}; a read is of mlm, leave it out"
        )
    words = [f"{path}={json.dumps(value)}" for path, value in settings["set"].items()]
    words.append("objective.kind=mlm")  # whatever else the run trains
    if settings["seq_len"] is not None:
        words.append(f"data.seq_len={settings['seq_len']}")
    values = json.loads(json.dumps(asdict(as_read(config))))
    try:
        return build(PretrainConfig, values, "the run", words)
    except ConfigError as error:
        raise ConfigError(f"reads.{name}: {error}") from None


def as_read(config: PretrainConfig) -> PretrainConfig:
    """Return a run's config with the data that it is evaluated on as its own, without stages."""
    of, monitor = config.eval_data, replace(config.monitor, eval_mask_prob=None)
    train = TrainConfig(global_batch=of.micro_batch, micro_batch=of.micro_batch)
    return replace(config, data=of.data, train=train, stages=(), phases=(), monitor=monitor)


def _measure(
    name: str, settings: dict[str, Any], folder: Path, config: PretrainConfig
) -> ProbeResult:
    if name in PROBES:
        return PROBES[name].measure(folder, as_read(config), settings)
    of, _, mean = name.removeprefix("read ").partition(",")
    config = config_of_read(config, of, settings)
    with TemporaryDirectory() as made:
        model = folder if not mean else Path(made, "mean")
        if mean:
            from pipeline.use.average import average

            average([folder], model, last=settings["mean"])
        values = read_masks(model, config, settings["source"])
    return ProbeResult({f"{what}@{of}{mean and ','}{mean}": v for what, v in values.items()})


def _scores(
    plan: StudyPlan, run: StudyRun, out: Path
) -> tuple[dict[str, float], dict[str, TaskScores]]:
    """Read the scores of the fine-tunings that are finished, and what else is asked of them."""
    values: dict[str, float] = {}
    tasks: dict[str, TaskScores] = {}
    for task in plan.tasks:
        folders = [tasks_folder(out) / task_name(run.name, task, d) for d in plan.draws(task)]
        if not all((folder / "result.json").is_file() for folder in folders):
            continue
        found = [_score(task, folder) for folder in folders]
        values |= {name: statistics.fmean(of[name] for of in found) for name in found[0]}
        if len(folders) == 1 and (folders[0] / TASK_FILE).is_file():  # with its predictions
            tasks[task] = read_scores(folders[0], read_result(folders[0]))
    if plan.tasks and all(task in values for task in plan.tasks):
        values[MEAN_SCORE] = statistics.fmean(values[task] for task in plan.tasks)
    return values, tasks


def _score(task: str, folder: Path) -> dict[str, float]:
    lines = read_json_lines(RunFolder(folder).metrics)
    last = [line for line in lines if line["kind"] == "train"][-1]
    return {task: float(read_result(folder)["mean"]), f"train_loss.{task}": last["loss"]}


def check_batches(plan: StudyPlan, out: Path) -> str:
    """Compare the batches of runs that are to see the same ones, as far as both have come.

    Returns:
        What was compared, for the page.

    Raises:
        DataError: two runs saw other batches.
    """
    first: dict[str, tuple[str, list[int]]] = {}
    runs = batches = 0
    for run in plan.runs.values():
        folder = runs_folder(out) / run.name
        if not RunFolder(folder).batches.is_file():
            continue
        hashes = [record.hash for record in read_batches(folder)]
        other, seen = first.setdefault(run.batches, (run.name, hashes))
        common = min(len(seen), len(hashes))
        wrong = next((i for i in range(common) if seen[i] != hashes[i]), None)
        if wrong is not None:
            raise DataError(
                f"{run.name} and {other} have the same data settings and seed, but saw other "
                f"batches from batch {wrong} on: the dataset changed between them, or files of a "
                "run were moved; remove the older of the two folders, and run the study again"
            )
        if other != run.name:
            runs, batches = runs + 1, batches + common
        if len(hashes) > len(seen):
            first[run.batches] = (run.name, hashes)
    return (
        f"{batches:,} batches of {runs} runs were compared by hash with those of another run of "
        "their seed, masks included: all equal"
        if runs
        else "no two runs had batches to compare"
    )
