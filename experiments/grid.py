"""Sweeps: runs that differ by overrides, as one job array or side by side on this machine.

`DIR/NAME` is the folder of a run, named by its overrides or by the file, and `DIR/NAME/config.yaml`
the config that it starts from, written once. `DIR/sweep.json` records the runs. A run is submitted,
restarted and judged as one that is submitted alone, so that `status`, `logs` and `cancel` work with
its folder.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from os.path import commonpath
from pathlib import Path
from typing import Any, Literal

from launch import control, submit
from launch.cluster import ClusterConfig
from launch.local import run_side_by_side
from launch.queue import UNKNOWN, JobFacts, jobs_of
from launch.records import CONFIG_FILE, FINETUNE, PRETRAIN, submissions
from launch.slurm import SlurmError
from launch.status import RunReport, headline, report_of
from pipeline.config import schema
from pipeline.config.load import digest, find_config, load, resolved_text
from pipeline.config.runs import PretrainConfig, load_run
from pipeline.config.schema import REQUIRED, param, section
from pipeline.errors import ConfigError, DataError, PostnormError
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import FolderSummary, number, table
from pipeline.tasks.task import TaskConfig, load_task

logger = logging.getLogger(__name__)

SWEEP_RECORD = "sweep.json"
"""In the folder of a sweep: its verb, what it compares, and the overrides of its runs."""
_RESULT = "result.json"
CANCELLED_MARK = "sweep.cancelled"
"""Beside it, for a submission that waits for room."""
HOME = "sweep"
_FOLDER_KEY = "folder"
_SAFE_NAME = re.compile(r"[\w+=][\w.+=-]*(/[\w+=][\w.+=-]*)*")
_LONGEST_NAME = 100
_DIFFERENCES = 3
Point = Mapping[str, Any]
"""Overrides of one run, by dotted path; beside them `config` and `folder`, if it has its own."""


@dataclass(frozen=True)
class SweepVerb:
    """A verb that does one run, as far as a sweep has to know it."""

    config: type[Any]
    folder: str
    """Field of the config that names the run's folder."""
    metrics: tuple[str, ...]
    """Names of what `status` can compare, fields of the run's own status."""
    prepare: Callable[[Any, ClusterConfig, submit.Origin], submit.SubmissionPlan]
    """Drafts the job of a run; refuses one that cannot start."""
    check_here: Callable[[Any, int, str], None]
    """Refuses a run that cannot start with so many ranks of this machine in a folder."""
    load: Callable[[Path, Sequence[str]], Any]
    """Reads the config of a run, with overrides."""
    value: Callable[[Path, RunReport, str], float | None]
    """Reads a metric of a run; None: not yet."""
    finished: str = "done.json"
    """The file that a finished run has."""
    appendable_field: str = ""
    """A field that may get more values later; the run then does what it lacks."""
    is_complete: Callable[[Path, Any], bool] = lambda folder, config: True
    """Whether a finished run in a folder has all that its config asks for now."""
    options: Callable[[Path], tuple[str, ...]] = lambda folder: ()
    """Options of the verb in the sweep of a folder."""


def _check_training_here(config: PretrainConfig, ranks: int, work_dir: str) -> None:
    config.batches.require_split(ranks)
    submit.require_data(config, work_dir)


def _check_task_here(config: TaskConfig, ranks: int, work_dir: str) -> None:
    submit.require_task(config, work_dir)
    if config.train.batch % (config.train.accumulate * ranks):
        raise ConfigError(
            f"train.batch={config.train.batch} must be a multiple of train.accumulate="
            f"{config.train.accumulate} times {ranks} ranks; change one of them"
        )


def _has_seeds(folder: Path, config: TaskConfig) -> bool:
    try:
        found = json.loads((folder / _RESULT).read_bytes())["seeds"]
    except (OSError, ValueError, KeyError):
        return False
    return set(config.train.seeds) <= set(found)


def _score(folder: Path, report: RunReport, metric: str) -> float | None:
    try:
        body = json.loads((folder / _RESULT).read_bytes())
    except (OSError, ValueError):
        return None
    found = body["mean"] if metric == "score" else (body["dev"] or {}).get(body["metric"])
    return None if found is None else float(found)


KINDS: dict[str, SweepVerb] = {
    PRETRAIN: SweepVerb(
        config=PretrainConfig,
        folder="run_dir",
        metrics=("held_out_loss", "loss", "tokens", "tokens_per_s"),
        prepare=submit.prepare_training,
        check_here=_check_training_here,
        load=lambda path, words: load_run(path, words).config,
        value=lambda folder, report, metric: getattr(report.run, metric, None),
    ),
    FINETUNE: SweepVerb(
        config=TaskConfig,
        folder="run_dir",
        metrics=("score", "dev"),
        prepare=submit.prepare_finetuning,
        check_here=_check_task_here,
        load=lambda path, words: load_task(str(path), tuple(words)),
        value=_score,
        finished=_RESULT,
        appendable_field="train.seeds",
        is_complete=_has_seeds,
        options=lambda folder: ("--tokens", str(folder / "tokens")),
    ),
}


@dataclass(frozen=True)
class MetricConfig:
    """The number that runs are compared by."""

    name: str = param("", "of the run's status, such as held_out_loss; empty shows none")
    best: Literal["min", "max"] | None = param(None, "list the best run first; null: as written")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Many runs of one kind: every combination of `grid`, or each of `runs`."""

    verb: str = param(REQUIRED, "kind of the runs, such as pretrain")
    config: str | None = param(None, "start of runs without their own; beside this file or shipped")
    dir: str = param(REQUIRED, "folder of the runs' folders; resumed if it exists")
    grid: dict[str, tuple[Any, ...]] | None = param(
        None, "values by dotted path, such as {train.lr: [1e-3, 3e-4]}; a run each combination"
    )
    runs: tuple[dict[str, Any], ...] | None = param(
        None, "overrides of each run and its own `config` or `folder` below dir; in place of grid"
    )
    jobs: int = param(1, "runs at the same time", ge=1)
    metric: MetricConfig = section(MetricConfig, "what `status` compares")

    def __post_init__(self) -> None:
        kind = KINDS.get(self.verb)
        if kind is None:
            raise ConfigError(f"verb = {self.verb!r}: expected one of {', '.join(KINDS)}")
        if self.metric.name and self.metric.name not in kind.metrics:
            raise ConfigError(
                f"metric.name = {self.metric.name!r}: runs of {self.verb} have "
                f"{', '.join(kind.metrics)}; choose one of them"
            )
        if self.metric.best and not self.metric.name:
            raise ConfigError(f"metric.best = {self.metric.best}: of what? set metric.name")
        if (self.grid is None) == (self.runs is None):
            raise ConfigError("a sweep has either grid or runs; write one of them")
        if not self.points:
            raise ConfigError(
                f"{'runs' if self.grid is None else 'grid'} names no run; expected at least one "
                "value for each key"
            )

    @property
    def kind(self) -> SweepVerb:
        """What there is to know of the verb."""
        return KINDS[self.verb]

    @property
    def points(self) -> list[Point]:
        """Overrides of each run, in the order of the file; the last key of a grid runs fastest."""
        if self.grid is None:
            return list(self.runs or ())
        combinations = product(*self.grid.values()) if self.grid else ()
        return [dict(zip(self.grid, values, strict=True)) for values in combinations]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, as its file has it now."""

    name: str
    point: Point
    folder: Path
    """Absolute path."""
    config: Any

    @property
    def config_file(self) -> Path:
        """The config that the run starts from."""
        return self.folder / CONFIG_FILE


def name_of(point: Point) -> str:
    """Name a run by its overrides, such as `model.num_layers=4+train.lr=0.001`.

    The order of the keys and other runs do not matter. A name that would be too long or unsafe in a
    path is shortened, and ends in a hash.
    """
    shown = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in sorted(point.items())
    )
    text = "+".join(shown) or "unchanged"
    name = re.sub(r"[^\w.+=-]+", "_", text, flags=re.ASCII).lstrip(".-")
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    mark = sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[:_LONGEST_NAME]}-{mark}"


def read_sweep(
    path: str, overrides: Sequence[str], work_dir: str
) -> tuple[SweepConfig, list[SweepRun]]:
    """Read a sweep's file and the config of each of its runs.

    Raises:
        ConfigError: tells all runs that are the same, that the run's own config refuses, or that
            are not what they were when they were started.
    """
    sweep = load(SweepConfig, path, overrides).config
    beside = Path(path).parent
    return sweep, made(sweep, work_dir, lambda name, point: _config_of(sweep, name, point, beside))


def made(
    sweep: SweepConfig, work_dir: str, config_of: Callable[[str, Point], Any]
) -> list[SweepRun]:
    """Make the runs of a sweep, with their configs by name and point; see `read_sweep`."""
    runs: list[SweepRun] = []
    mistakes: list[str] = []
    same: dict[str, str] = {}
    for point in sweep.points:
        name = str(point.get(_FOLDER_KEY) or name_of(point))
        try:
            config = config_of(name, point)
        except ConfigError as error:
            mistakes.append(f"{name}: {error}")
            continue
        run = SweepRun(name, point, Path(work_dir, sweep.dir, name), config)
        first = same.setdefault(digest(replace(config, **{sweep.kind.folder: ""})), name)
        near = [one.name for one in runs if commonpath((name, one.name)) in (name, one.name)]
        if first != name:
            mistakes.append(f"{name} is the same run as {first}: leave one of them out")
        elif near:
            mistakes.append(f"{name} is, holds or lies in the folder of another run, {near[0]}")
        mistakes += changes(run, sweep.kind)
        runs.append(run)
    refuse(mistakes)
    return runs


def _config_of(sweep: SweepConfig, name: str, point: Point, beside: Path) -> Any:
    """Read the config of a run; paths start `beside` the sweep's file."""
    kind, values = sweep.kind, {key: point[key] for key in point if key != _FOLDER_KEY}
    text = values.pop("config", sweep.config)
    if kind.folder in values:
        raise ConfigError(f"{kind.folder} is the sweep's to choose; leave it out")
    if not _SAFE_NAME.fullmatch(name) or name.split("/")[0] == HOME:
        raise ConfigError(
            f"{_FOLDER_KEY} = {name!r}: expected a path below dir of letters, digits and _.+=-, "
            f"not in {HOME}"
        )
    if not isinstance(text, str):
        raise ConfigError(f"config = {text!r}: expected a file; set it for the sweep or the run")
    base = find_config(text, getattr(kind.config, "SHIPPED", ()), beside)
    if not base.is_file():
        raise ConfigError(f"config = {text!r}: {base} does not exist; correct the path")
    values[kind.folder] = f"{sweep.dir}/{name}"
    return kind.load(base, [f"{key}={json.dumps(value)}" for key, value in values.items()])


def refuse(mistakes: Sequence[str]) -> None:
    """Refuse a sweep for all of its mistakes at once (ConfigError)."""
    if mistakes:
        lines = "".join(f"\n- {mistake}" for mistake in mistakes)
        raise ConfigError(f"nothing was done, {len(mistakes)} mistake(s):{lines}")


def changes(run: SweepRun, kind: SweepVerb, ignored: Sequence[str] = ()) -> list[str]:
    """Return why a run that was started earlier is another one now; empty if it is the same."""
    held = {path.name for path in run.folder.iterdir()} if run.folder.is_dir() else set()
    if held <= {CONFIG_FILE, "logs"}:
        return []  # it was prepared at most
    if not run.config_file.is_file():
        # A folder that the file names, such as a benchmark's, may be finished without a sweep.
        is_finished = _FOLDER_KEY in run.point and (run.folder / kind.finished).is_file()
        why = f"{run.folder} exists and holds no run of a sweep (no {CONFIG_FILE}): move it away"
        return [] if is_finished else [why]
    try:
        before = kind.load(run.config_file, ())
    except ConfigError as error:
        return [f"{run.config_file} cannot be read any more: {error}"]
    apart = {kind.folder, *ignored}
    old = {path: value for path, _, value in schema.walk(before) if path not in apart}
    now = {path: value for path, _, value in schema.walk(run.config) if path not in apart}
    paths = [path for path in old if path in now and old[path] != now[path]]
    if paths == [kind.appendable_field] and set(old[kind.appendable_field]) <= set(
        now[kind.appendable_field]
    ):
        paths = []
    if not paths:
        return []
    shown = [f"{path} was {old[path]!r} and is {now[path]!r}" for path in paths[:_DIFFERENCES]]
    if len(paths) > _DIFFERENCES:
        shown.append(f"and {len(paths) - _DIFFERENCES} more")
    return [
        f"{run.name} was started with another config ({'; '.join(shown)}): undo the change, take "
        f"a new folder (`dir` of a sweep, --out of a study), or remove {run.folder}"
    ]


@dataclass(frozen=True)
class Todo:
    """The runs of a sweep that have something left to do, and why the others are left alone."""

    every: list[SweepRun]
    runs: list[SweepRun]
    """Runs to start."""
    left: dict[str, str]
    """Reasons by name."""
    alive: list[JobFacts]
    """Elements of earlier arrays that wait or run."""


def todo(runs: Sequence[SweepRun], kind: SweepVerb) -> Todo:
    """Look at the folders of the runs, and at the queue if some were submitted before."""
    jobs = queued_jobs([run.folder for run in runs])
    left: dict[str, str] = {}
    alive: list[JobFacts] = []
    for run in runs:
        folder, job = RunFolder(run.folder), jobs.get(run.folder)
        if (run.folder / kind.finished).exists() and kind.is_complete(run.folder, run.config):
            left[run.name] = "finished"
        elif job is not None and job.is_alive:
            left[run.name] = f"in the queue as job {job.job}"
            alive.append(job)
        elif folder.is_locked():
            left[run.name] = "running"
        elif folder.stop.exists():
            left[run.name] = f"stopped; remove {folder.stop} to continue"
    return Todo(list(runs), [run for run in runs if run.name not in left], left, alive)


def queued_job(run_dir: Path) -> str:
    """Return the id of the newest job that did the run; empty if it was never submitted."""
    every = [one for one in submissions(run_dir) if one.kind in KINDS]
    return every[-1].job if every else ""


def queued_jobs(run_dirs: Sequence[Path]) -> dict[Path, JobFacts]:
    """Ask the queue for the newest job of each run.

    Raises:
        SlurmError, ConfigError: it cannot be asked.
    """
    names = {folder: queued_job(folder) for folder in run_dirs}
    facts = {job.job: job for job in jobs_of(sorted(set(filter(None, names.values()))))}
    known = {folder: facts[name] for folder, name in names.items() if name in facts}
    # An id may come again after years. An element has the comment of its array until `submit` has
    # given it the run's.
    return {
        folder: job
        for folder, job in known.items()
        if any(job.is_of(place) for place in (folder, *folder.parents))
    }


def write_run(run: SweepRun) -> None:
    """Make the folder of a run with its config; `read_sweep` has refused what would change it."""
    (run.folder / "logs").mkdir(parents=True, exist_ok=True)
    text = resolved_text(run.config).encode()
    if not run.config_file.is_file() or run.config_file.read_bytes() != text:
        write_atomic(run.config_file, text)


def record(sweep: SweepConfig, folder: Path, runs: Sequence[SweepRun]) -> None:
    """Add runs to the record of a sweep; those that were in its file earlier stay in it."""
    path = folder / SWEEP_RECORD
    known = sweep_record(folder)["runs"] if path.is_file() else {}
    metric = {"name": sweep.metric.name, "best": sweep.metric.best}
    points = {**known, **{run.name: dict(run.point) for run in runs}}
    write_json_atomic(path, {"verb": sweep.verb, "metric": metric, "runs": points})


def sweep_record(folder: Path) -> dict[str, Any]:
    """Read the record of a sweep: `verb`, `metric`, and the overrides of `runs` by name."""
    path = folder / SWEEP_RECORD
    try:
        found = json.loads(path.read_bytes())
        verb, metric, runs = str(found["verb"]), dict(found["metric"]), dict(found["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a record of a sweep ({type(error).__name__}: {error}); remove it and "
            "submit the sweep again, which changes no run"
        ) from None
    return {"verb": verb, "metric": metric, "runs": runs}


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (folder / SWEEP_RECORD).is_file()


def run_here(
    sweep: SweepConfig, what: Todo, jobs: int, ranks: int, cluster: str | None, work_dir: str
) -> dict[str, int]:
    """Run what is left to do on this machine, `jobs` runs at a time; return exit codes by name.

    Raises:
        ConfigError: some runs cannot start as configured.
        KeyboardInterrupt: see `run_side_by_side`.
    """
    mistakes = []
    for run in what.runs:
        try:
            sweep.kind.check_here(run.config, ranks, work_dir)
        except PostnormError as error:
            mistakes.append(f"{run.name}: {error}")
    refuse(mistakes)
    for run in what.runs:
        write_run(run)
    folder = Path(work_dir, sweep.dir)
    record(sweep, folder, what.every)
    profile = ["--cluster", cluster] if cluster else []
    options, own = ["--local", "--ranks", str(ranks), *profile], sweep.kind.options(folder)
    commands = {}
    for run in what.runs:
        program = [*module_command("pipeline"), sweep.verb, str(run.config_file), *own]
        words = ["submit", "--program", str(run.folder), *options, "--", *program]
        commands[run.name] = ([*module_command("launch"), *words], run.folder / "logs/local.log")
    return run_side_by_side(commands, jobs, ranks)


# Status and end


@dataclass(frozen=True)
class SweepReport:
    """The runs of a sweep, best first. The keys of `status SWEEP --json`."""

    dir: str
    verb: str
    metric: dict[str, Any]
    queue_problem: str
    """Why SLURM could not be asked, or empty."""
    runs: list[dict[str, Any]]
    """`name`, `run_dir`, `overrides`, `state`, `job`, `step`, `num_steps` and `value`, that of the
    metric; None: not known, or not yet."""


def sweep_report(folder: Path) -> SweepReport:
    """Look at all runs of a sweep, an absolute folder."""
    found = sweep_record(folder)
    kind, metric, problem = KINDS[found["verb"]], found["metric"], ""
    jobs = {name: queued_job(folder / name) for name in found["runs"]}
    try:
        facts = queued_jobs([folder / name for name in jobs])
    except (SlurmError, ConfigError) as error:
        facts, problem = {}, str(error)
    runs = []
    for name, point in found["runs"].items():
        unknown = JobFacts(jobs[name], jobs[name].partition("_")[0], UNKNOWN, "")
        job = facts.get(folder / name, unknown)
        report = report_of(folder / name, [job] if jobs[name] else [], "")
        value = kind.value(folder / name, report, metric["name"]) if metric["name"] else None
        runs.append(
            {
                "name": name,
                "run_dir": str(folder / name),
                "overrides": point,
                "state": _state(report, kind.finished),
                "job": jobs[name] or None,
                "step": report.run.step if report.run else None,
                "num_steps": report.run.num_steps if report.run else None,
                "value": value,
            }
        )
    sign = {"min": 1, "max": -1}.get(metric["best"], 0)
    if sign:
        runs.sort(key=lambda run: (run["value"] is None, sign * (run["value"] or 0)))
    return SweepReport(str(folder), found["verb"], metric, problem, runs)


def _state(report: RunReport, finished: str) -> str:
    """Give the state in a word; a run that goes on without SLURM is running."""
    folder = Path(report.run_dir)
    if report.job is None or not report.job.is_alive:
        if RunFolder(folder).is_locked():
            return "running"
        if (folder / finished).is_file():
            return "finished"
    return headline(report)


def sweep_summary(report: SweepReport) -> FolderSummary:
    """Summarise a sweep, a run a line."""
    states = [run["state"] for run in report.runs]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    name = report.metric["name"]
    rows = [("run", "state", "step", name or "-", "job")]
    for run in report.runs:
        step = "-" if run["step"] is None else f"{run['step']:,}/{run['num_steps']:,}"
        value = "-" if run["value"] is None else number(run["value"], ".6g")
        rows.append((run["name"], run["state"], step, value, run["job"] or "-"))
    problem = [("queue", report.queue_problem)] if report.queue_problem else []
    return FolderSummary(report.dir, counted, [*problem, *table(rows, right=(2, 3))])


def cancel_sweep(folder: Path, *, save: bool, save_s: float) -> Iterator[str]:
    """Cancel all jobs of a sweep, an absolute folder; yield what was done.

    With `save`, runs that train may first save and end, one after the other.
    """
    with suppress(OSError):  # a full disk hinders no cancellation
        (folder / CANCELLED_MARK).touch()
    jobs = queued_jobs([folder / name for name in sweep_record(folder)["runs"]])
    alive = {run: job for run, job in jobs.items() if job.is_alive}
    if not alive:
        yield f"no job of {folder} is in the queue"
        return
    if save:
        waiting = {run: job for run, job in alive.items() if job.is_waiting}
        yield from control.cancel_jobs([job.job for job in waiting.values()])
        for run, job in alive.items():
            if run in waiting:
                control.note_cancelled(run, job)
            else:
                yield f"{run.relative_to(folder)}:"
                yield from control.cancel(run, save=True, save_s=save_s)
    else:
        yield from control.cancel_jobs(sorted({job.array for job in alive.values()}, key=int))
        for run, job in alive.items():
            control.note_cancelled(run, job)
    yield "submit the same sweep again to continue"
