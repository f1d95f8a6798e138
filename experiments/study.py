"""A study as a file: arms x levels x seeds, what is read of each run, and two presets.

`plan` lays a study out as runs. Everything a run computes is in its config, so that equal configs
are one run, whichever parts of the study ask for it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from experiments.probes import PROBES
from launch.cluster import ClusterConfig, HardwareConfig
from launch.plan import RunPlan
from launch.plan import plan as plan_run
from pipeline.config.load import build, digest, load
from pipeline.config.runs import PretrainConfig
from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.data.format import INDEX_FILE, read_index
from pipeline.errors import ConfigError
from pipeline.runtime import cli
from pipeline.runtime.cli import argument, at_least, option
from pipeline.tasks.task import TaskConfig, load_task

HOME = Path(__file__).parents[1] / "postnorm" / "configs" / "studies"
"""Folder of the shipped studies."""
PRESETS = ("small", "gpu")
OF_RUNS = ("held_out_loss", "accuracy", "tokens_per_s")
"""Metrics that every pre-training run has."""
MEAN_SCORE = "mean_score"
"""The mean of a run's scores over all tasks of the study; absent while one of them is."""
HARDWARE = {
    # Two shared cores: narrow models reach about that, 4 layers by 128 in bf16 reach 0.09.
    "small": HardwareConfig(tflops=0.06, utilisation=1.0),
    "gpu": HardwareConfig(gpu="H100"),
}
VOCABULARY = 4096
"""The embedded corpus', where the data is not there yet."""
CONTINUED_SEED = 1000
"""Added to the seed of a run that goes on from another one, which has seen the order of its own."""
_TIMES = re.compile(r"\*(\d+(?:\.\d+)?)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?) of ([\w.]+)")
_NO_SEED = "seed is not set here: seeds of a preset, or of a part, say it for all arms alike"
_OF_TASKS = "tasks."
Values = Mapping[str, Any]
"""Overrides by dotted path; `*0.5` stands for half of the value below, `0.5 of train.num_steps` for
half of that one."""


@dataclass(frozen=True, kw_only=True)
class GrowConfig:
    """How a finished run is made larger, as `postnorm grow` does."""

    width: int = param(1, "factor on the width, a power of 2", ge=1)
    depth: int | None = param(None, "layers, a multiple of those there are; null keeps them", ge=1)
    noise: float = param(0.0, "share of each matrix' own deviation", ge=0)


@dataclass(frozen=True, kw_only=True)
class ArmConfig:
    """One of the things that are compared."""

    set: dict[str, Any] = section(dict, "overrides of its runs by dotted path")
    start: str | None = param(
        None, "arm whose finished run of the same seed and levels it goes on from; null: at random"
    )
    grow: GrowConfig | None = param(None, "what makes the start larger; null: its size")
    flops_of: str | None = param(
        None, "arm whose FLOPs it has, those of that arm's start included: sets train.num_steps"
    )
    mean: int | None = param(
        None,
        "newest checkpoints whose mean is read, as `postnorm average --last`; null: the last one",
        ge=2,
    )

    def read_as(self, name: str) -> str:
        """Return the name of a metric, or of a run, as it is read here."""
        return name if self.mean is None else f"{name}, mean of {self.mean}"


@dataclass(frozen=True, kw_only=True)
class StatementConfig:
    """What somebody published, to stand beside the numbers."""

    says: str = param(REQUIRED, "the statement")
    source: str = param(REQUIRED, "where it stands")


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """Held-out text that a finished run is evaluated on, besides its own: `loss@NAME`."""

    seq_len: int | None = param(None, "null: the run's", ge=8)
    source: str | None = param(None, "of this source of the data alone; null: of all")
    set: dict[str, Any] = section(dict, "masks, such as {data.mask_prob: 0.15}")


@dataclass(frozen=True, kw_only=True)
class ClassesConfig:
    """A subset of a task's classes, drawn anew for each seed."""

    number: int = param(REQUIRED, "classes", ge=2)
    rows_a_class: int | None = param(None, "rows of train of each class", ge=1)
    rows: int | None = param(None, "rows of train in all, in place of rows_a_class", ge=2)
    draws: int = param(1, "draws for each seed; a model's score is the mean over them", ge=1)

    def __post_init__(self) -> None:
        if (self.rows_a_class is None) == (self.rows is None):
            raise ConfigError(
                f"classes: rows_a_class={self.rows_a_class} and rows={self.rows}; set one of them"
            )


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """A task that finished runs are fine-tuned on; its score is the metric of that name."""

    file: str = path_param(REQUIRED, "task file, or name of a shipped task")
    set: dict[str, Any] = section(dict, "overrides by dotted path")
    classes: ClassesConfig | None = param(None, "some of its classes; null takes all")


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """One question of a study: its arms at all combinations of levels."""

    asks: str = param(REQUIRED, "the question")
    arms: tuple[str, ...] = param(REQUIRED, "the first is what the others are compared with")
    grid: tuple[str, ...] = param((), "factors, all combinations of whose levels are run")
    levels: dict[str, tuple[str, ...]] = section(
        dict, "of factors of its grid; of those that are not named the preset's"
    )
    set: dict[str, Any] = section(dict, "overrides of its runs, below those of levels and arms")
    metrics: tuple[str, ...] = param(
        ("held_out_loss", "accuracy"), "what is compared; the first one decides"
    )
    probes: tuple[str, ...] = param((), "what is measured in finished models")
    tasks: tuple[str, ...] = param((), "tasks that finished runs are fine-tuned on")
    other_batches: str = param(
        "", "why arms of a seed see other batches; empty: they must see the same ones"
    )
    regress: bool = param(
        False, "fit each seed's differences of metrics NAME@X to log X; interval of the slopes"
    )
    pooled: bool = param(
        False, "compare the arms over all levels of the grid, too: means of a seed's differences"
    )
    target: str = param(
        "", "arm whose end at the grid's first levels the others are to reach with fewer FLOPs"
    )
    seeds: tuple[int, ...] = param((), "of its runs; empty: the preset's")
    published: tuple[StatementConfig, ...] = param((), "statements about it")


@dataclass(frozen=True, kw_only=True)
class PresetConfig:
    """A size of a study."""

    set: dict[str, Any] = section(dict, "overrides of all runs")
    seeds: tuple[int, ...] = param(REQUIRED, "of the runs; they are paired by them")
    parts: tuple[str, ...] = param((), "empty takes all")
    levels: dict[str, tuple[str, ...]] = section(
        dict, "of factors; all of those that are not named"
    )


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """A study, `configs/studies/NAME.yaml`."""

    SHIPPED: ClassVar = ("studies",)

    question: str = param(REQUIRED, "what a user wants to know")
    kind: Literal["runs", "speed"] = param("runs", "training runs, or timed steps")
    conclusion: str = param("", "what a user should do differently, written by a person")
    limits: str = param("", "what the numbers cannot say")
    base: dict[str, Any] = section(dict, "pre-training config that all runs start from")
    corpus: str = param("demo", "prep config of the text that is prepared unless data.dir is given")
    fingerprint: str | None = param(
        None,
        "of the dataset that the corpus must become; null: it may differ from one machine to "
        "the next",
    )
    arms: dict[str, ArmConfig] = section(dict, "by name")
    factors: dict[str, dict[str, dict[str, Any]]] = section(dict, "overrides by level, by factor")
    reads: dict[str, ReadConfig] = section(dict, "held-out text besides the runs' own, by name")
    tasks: dict[str, TaskEntry] = section(dict, "by name")
    parts: dict[str, PartConfig] = section(dict, "questions, by name")
    presets: dict[str, PresetConfig] = param(REQUIRED, "`small` and `gpu`")
    extra: dict[str, Any] = section(dict, "values for the study's own file of analysis")

    def __post_init__(self) -> None:
        missing = [name for name in PRESETS if name not in self.presets]
        if missing:
            raise ConfigError(f"presets lacks {', '.join(missing)}; a study has both presets")
        for name, arm in self.arms.items():
            if arm.start is not None:
                known_name("arms", self.arms, arm.start, f"arms.{name}.start")
                source = self.arms[arm.start]
                if source.start is not None or source.mean is not None:
                    raise ConfigError(
                        f"arms.{name}.start={arm.start}, which has a start or a mean itself; a "
                        "chain has one link, of a run's last checkpoint"
                    )
            elif arm.grow is not None:
                raise ConfigError(f"arms.{name}.grow has nothing to grow; set its start")
            if arm.flops_of is not None:
                known_name("arms", self.arms, arm.flops_of, f"arms.{name}.flops_of")
                if self.arms[arm.flops_of].flops_of is not None or arm.start is not None:
                    raise ConfigError(
                        f"arms.{name}.flops_of={arm.flops_of}: an arm with flops_of begins at "
                        "random, and names an arm that has its own train.num_steps"
                    )
        for name, part in self.parts.items():
            if "/" in name:
                raise ConfigError(f"parts: {name!r} is to be the name of a file; leave out /")
            self._check(f"parts.{name}", part)
        if self.kind == "runs" and not self.parts:
            raise ConfigError("parts is empty; a study asks at least one question")
        for name, preset in self.presets.items():
            if not preset.seeds:
                raise ConfigError(f"presets.{name}.seeds is empty; give at least one")
            for part_name in preset.parts:
                known_name("parts", self.parts, part_name, f"presets.{name}.parts")
            self._check_levels(f"presets.{name}.levels", tuple(self.factors), preset.levels)

    def parts_of(self, preset: str) -> tuple[str, ...]:
        """Name the parts of a preset."""
        return self.presets[preset].parts or tuple(self.parts)

    def _check_levels(
        self, where: str, factors: tuple[str, ...], levels: Mapping[str, tuple[str, ...]]
    ) -> None:
        for factor, of_factor in levels.items():
            known_name("factors", factors, factor, where)
            for level in of_factor:
                known_name(f"factor {factor}", self.factors[factor], level, where)

    def _check(self, where: str, part: PartConfig) -> None:
        for field in ("arms", "grid", "metrics"):
            names = getattr(part, field)
            if len(set(names)) < len(names) or not (names or field == "grid"):
                raise ConfigError(f"{where}.{field}={list(names)}; expected names, each once")
        for arm in part.arms:
            known_name("arms", self.arms, arm, f"{where}.arms")
        for factor in part.grid:
            known_name("factors", self.factors, factor, f"{where}.grid")
            if not self.factors[factor]:
                raise ConfigError(f"factors.{factor} has no level; {where}.grid names it")
        self._check_levels(f"{where}.levels", part.grid, part.levels)
        if part.pooled and not part.grid:
            raise ConfigError(
                f"{where}.pooled=true, but grid names no factor; pooled averages over levels"
            )
        if part.target:
            known_name("arms of the part", part.arms, part.target, f"{where}.target")
        for task in part.tasks:
            known_name("tasks", self.tasks, task, f"{where}.tasks")
        for probe in part.probes:
            known_name("probes", PROBES, probe, f"{where}.probes")
        reads = [f"{what}@{name}" for name in self.reads for what in ("loss", "accuracy")]
        for metric in part.metrics:
            if any(self.arms[arm].mean for arm in part.arms):
                known_name("reads, as a mean has no run's metrics", reads, metric, where)
        known = [*OF_RUNS, *part.tasks]
        known += [MEAN_SCORE] if part.tasks and set(part.tasks) == set(self.tasks) else []
        known += reads
        known += [f"train_loss.{task}" for task in part.tasks]  # of its last log line
        known += [metric for probe in part.probes for metric in PROBES[probe].metrics]
        for metric in part.metrics:
            at = metric.partition("@")[2]
            if part.regress and at and not re.fullmatch(r"\d*\.?\d*[1-9]\d*", at):
                raise ConfigError(
                    f"{where}.regress=true, and {metric}: {at} is not a number above 0"
                )
            if not any(fits(metric, one) for one in known):
                known_name("metrics", known, metric, f"{where}.metrics")


def fits(metric: str, pattern: str) -> bool:
    """Return whether a metric is one of a pattern that may end in `*`."""
    return metric.startswith(pattern[:-1]) if pattern.endswith("*") else metric == pattern


def safe_name(text: str) -> str:
    """Return a text as the name of a folder of a sweep."""
    return re.sub(r"[^\w.+=-]+", "_", text, flags=re.ASCII).lstrip(".-")


def known_name(kind: str, known: Mapping[str, Any] | Sequence[str], name: str, where: str) -> None:
    """Refuse a name that is not one of those there are (ConfigError)."""
    if name not in known:
        raise ConfigError(f"{where}: {name!r} is not of {kind}: {', '.join(known) or 'none'}")


def read_study(name: str) -> tuple[str, StudyConfig]:
    """Read a study by its name or the path of its file; return its name, too.

    Raises:
        ConfigError: there is no such study, or it is wrong.
    """
    return Path(name).stem, load(StudyConfig, name).config


_KNOWN = ", ".join(sorted(path.stem for path in HOME.glob("*.yaml")))


@dataclass(frozen=True)
class StudyArguments:
    """The command line of `study`."""

    study: str = argument(f"a YAML file, or one of: {_KNOWN}", "STUDY")
    preset: str = option("size of the study (default small)", choices=PRESETS, default="small")
    out: Path | None = option("folder of runs; default runs/NAME-PRESET", "DIR")
    results: Path | None = option("folder of page and figures; default: OUT", "DIR")
    part: list[str] = option("only this part; repeatable", "NAME", action="append", default=[])
    seeds: int | None = option("at most N seeds", "N", type=at_least(1))
    local: bool = option("run here, which is the default", one_of="where")
    cluster: str | None = option("submit to SLURM with this profile", "FILE", one_of="where")
    jobs: int = option("runs at the same time (default 1)", "N", type=at_least(1), default=1)
    dry_run: bool = option("list runs and hours; change nothing", one_of="what")
    report: bool = option("start nothing; write the page from what is there", one_of="what")
    overrides: list[str] = cli.overrides(
        "of all runs, such as data.dir=data/mine; tasks.section.key=value is of all tasks"
    )


@dataclass(frozen=True)
class StudyCell:
    """A place of a part: an arm at a combination of levels."""

    part: str
    arm: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class StudyRun:
    """One pre-training run of a study."""

    name: str
    """Its folder below the study's."""
    cell: StudyCell
    """The first that asks for it."""
    seed: int
    config: PretrainConfig
    start: str | None
    """Name of the run that it goes on from."""
    grow: GrowConfig | None

    @property
    def batches(self) -> str:
        """All that decides which batches it sees, but for how many."""
        config = self.config
        stages = [(s.cursor, s.data) for s in config.timeline.stages if s.data != config.data]
        given = config.data, config.seed, config.batches.stretches, config.objective, *stages
        return " ".join(map(str, given))


@dataclass(frozen=True)
class StudyPlan:
    """All runs of a study, and which run each cell has for each seed."""

    study: StudyConfig
    name: str
    preset: str
    seeds: tuple[int, ...]
    parts: dict[str, PartConfig]
    runs: dict[str, StudyRun]
    of_cells: dict[StudyCell, dict[int, str]]
    tasks: dict[str, TaskConfig]
    overrides: tuple[str, ...]
    most_seeds: int | None
    """Of the preset and of parts with seeds of their own; None: all."""

    def levels(self, part: str) -> list[tuple[str, ...]]:
        """Combinations of levels of a part."""
        return list(dict.fromkeys(cell.levels for cell in self.of_cells if cell.part == part))

    def is_sweep(self, part: str) -> bool:
        """Return whether a part looks for the best levels by single runs, and compares no arms."""
        return len(self.parts[part].seeds) == 1 and len(self.levels(part)) > 1

    @property
    def fine_tunings(self) -> list[tuple[str, str, int]]:
        """Runs with the tasks that they are fine-tuned on, and the number of the classes' draw."""
        asked = {
            (run, task, draw): None
            for cell, runs in self.of_cells.items()
            for run in runs.values()
            for task in self.parts[cell.part].tasks
            for draw in self.draws(task)
        }
        return list(asked)

    def draws(self, task: str) -> range:
        """Numbers of the draws of a task's classes; 0 alone for a task that has all of them."""
        classes = self.study.tasks[task].classes
        return range(1 if classes is None else classes.draws)

    def waves(self) -> list[list[StudyRun]]:
        """Runs that start at random, then those that go on from them; an empty wave is left out."""
        first = [run for run in self.runs.values() if run.start is None]
        second = [run for run in self.runs.values() if run.start is not None]
        return [wave for wave in (first, second) if wave]


def plan(
    name: str,
    study: StudyConfig,
    preset: str,
    *,
    out: Path,
    overrides: Sequence[str] = (),
    parts: Sequence[str] = (),
    most_seeds: int | None = None,
) -> StudyPlan:
    """Lay a study out.

    Overrides are of all runs, `tasks.section.key=value` of all tasks; over them win parts, arms and
    levels, in this order.

    Raises:
        ConfigError: an override, or a run that follows, is wrong; names the run.
    """
    known_name("presets", study.presets, preset, "--preset")
    chosen = study.presets[preset]
    for part in parts:
        known_name(f"parts of preset {preset}", study.parts_of(preset), part, "--part")
    seeds = chosen.seeds[:most_seeds]
    given = [text for text in overrides if not text.startswith(_OF_TASKS)]
    of_tasks = tuple(
        text.removeprefix(_OF_TASKS) for text in overrides if text.startswith(_OF_TASKS)
    )
    paths = [text.partition("=")[0] for text in given]
    if "seed" in paths:
        raise ConfigError(_NO_SEED)
    # Of the preset, too, shares come last, unless the command line has another value.
    shares = {p: v for p, v in chosen.set.items() if _is_share(v) and p not in paths}
    layout = _Layout(study, _base(study, chosen, out, given), shares)
    runs, of_cells = layout.runs, dict[StudyCell, dict[int, str]]()
    for cell in _cells(study, chosen):
        for seed in study.parts[cell.part].seeds[:most_seeds] or seeds:
            run = layout.add(cell, seed)
            if not parts or cell.part in parts:
                of_cells.setdefault(cell, {})[seed] = run.name
    _require_same_batches(study, runs, of_cells)
    wanted = {run for of_seeds in of_cells.values() for run in of_seeds.values()}
    wanted |= {start for run in wanted if (start := runs[run].start) is not None}
    kept = dict.fromkeys(cell.part for cell in of_cells)
    asked = {task for part in kept for task in study.parts[part].tasks}
    return StudyPlan(
        study=study,
        name=name,
        preset=preset,
        seeds=seeds,
        parts={part: study.parts[part] for part in kept},
        runs={run: runs[run] for run in runs if run in wanted},
        of_cells=of_cells,
        tasks={
            task: load_task(
                entry.file,
                (*(f"{path}={json.dumps(value)}" for path, value in entry.set.items()), *of_tasks),
            )
            for task, entry in study.tasks.items()
            if task in asked
        },
        overrides=tuple(overrides),
        most_seeds=most_seeds,
    )


def run_plan(config: PretrainConfig, preset: str = "gpu") -> RunPlan:
    """Plan a run as `postnorm plan` does, on the device of a preset."""
    size = config.model.vocab_size
    if size is None and (Path(config.data.dir) / INDEX_FILE).is_file():
        size = read_index(config.data.dir).vocab_size
    config = replace(config, model=replace(config.model, vocab_size=size or VOCABULARY))
    profile = ClusterConfig(hardware=HARDWARE[preset])
    return plan_run(config, profile, counts_activations=False)


def _base(
    study: StudyConfig, preset: PresetConfig, out: Path, overrides: Sequence[str]
) -> PretrainConfig:
    """Build what all runs have in common."""
    values = {**study.base, "run_dir": str(out)}
    values["data"] = {"dir": str(out / "data"), **(values.get("data") or {})}
    values["spikes"] = {"rewind": False, **(values.get("spikes") or {})}  # it leaves batches out
    config = build(PretrainConfig, values, "base of the study")
    return build(PretrainConfig, _changed(config, [preset.set]), "the preset", overrides)


def _changed(config: PretrainConfig, layers: Sequence[Values]) -> dict[str, Any]:
    """Lay overrides over a config, one layer after the other; return plain values."""
    tree, shares = asdict(config), dict[str, str]()
    for values, path, value in ((of, *item) for of in layers for item in of.items()):
        place, last = _place(tree, path, f"{path} = {value!r}")
        if path == "seed":
            raise ConfigError(_NO_SEED)
        if isinstance(value, dict) and is_dataclass(attrgetter(path)(config)):
            raise ConfigError(
                f"{path} = {value!r} would reset what it leaves out; write {path}.FIELD for each"
            )
        share, times = _SHARE.fullmatch(shares.pop(path, "")), _TIMES.fullmatch(str(value))
        if share and times:
            # A share of what is multiplied beside it is multiplied already.
            by = 1.0 if _TIMES.fullmatch(str(values.get(share[2]))) else float(times[1])
            value = f"{by * float(share[1]):.9f} of {share[2]}"
        if _is_share(value):
            shares[path] = value
        else:
            place[last] = _computed(tree, path, value, place[last])
    # Shares of other values come last, when these are what they will be.
    for path, value in shares.items():
        place, last = _place(tree, path, path)
        place[last] = _computed(tree, path, value, place[last])
    plain: dict[str, Any] = json.loads(json.dumps(tree))  # lists in place of tuples
    return plain


def _is_share(value: Any) -> bool:
    return _SHARE.fullmatch(str(value)) is not None


def _place(tree: dict[str, Any], path: str, what: str) -> tuple[dict[str, Any], str]:
    *above, last = path.split(".")
    place: Any = tree
    for key in above:
        place = place.get(key) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        raise ConfigError(f"{what}: a pre-training run has no field {path}")
    return place, last


def _computed(tree: dict[str, Any], path: str, value: Any, below: Any) -> Any:
    """Compute a value that is said as a share of another; a whole number stays one, and above 0."""
    text = value if isinstance(value, str) else ""
    match, of = _TIMES.fullmatch(text), path
    if match is None:
        match = _SHARE.fullmatch(text)
        if match is None:
            return value
        of = match[2]
        place, last = _place(tree, of, f"{path} = {value!r}")
        below = place[last]
    if isinstance(below, bool) or not isinstance(below, (int, float)):
        raise ConfigError(f"{path} = {value!r}: {of} is {below!r}, not a number")
    found = float(match[1]) * below
    return max(min(1, below), round(found)) if isinstance(below, int) else found


def _cells(study: StudyConfig, preset: PresetConfig) -> Iterator[StudyCell]:
    for name, part in study.parts.items():
        if preset.parts and name not in preset.parts:
            continue
        chosen = {**study.factors, **preset.levels, **part.levels}
        levels = [tuple(chosen[factor]) for factor in part.grid]
        for combination in product(*levels):
            for arm in part.arms:
                yield StudyCell(name, arm, combination)


def _require_same_batches(
    study: StudyConfig,
    runs: Mapping[str, StudyRun],
    of_cells: Mapping[StudyCell, Mapping[int, str]],
) -> None:
    """Refuse a part whose arms would see other batches, unless it says why (ConfigError)."""
    for cell, of_seeds in of_cells.items():
        part = study.parts[cell.part]
        first = of_cells[replace(cell, arm=part.arms[0])]
        other = [s for s, run in of_seeds.items() if runs[run].batches != runs[first[s]].batches]
        if other and not part.other_batches:
            raise ConfigError(
                f"parts.{cell.part}: {cell.arm} and {part.arms[0]} would see other batches: their "
                "data, batch sizes or starts differ; make them the same, or say why in "
                "other_batches"
            )


class _Layout:
    """The runs of a study while it is laid out."""

    def __init__(self, study: StudyConfig, base: PretrainConfig, shares: Values) -> None:
        self.runs: dict[str, StudyRun] = {}
        self._study, self._base, self._shares = study, base, shares
        self._names: dict[str, str] = {}
        """Names of runs, by what they compute."""
        self._configs: dict[StudyCell, PretrainConfig] = {}
        """Without their seeds."""

    def add(self, cell: StudyCell, seed: int) -> StudyRun:
        """Add the run of a cell and a seed, and the one that it starts from, unless they are there.

        Raises:
            ConfigError: the run's config is wrong.
        """
        arm, start = self._study.arms[cell.arm], None
        if arm.start is not None:
            start = self.add(replace(cell, arm=arm.start), seed).name
        if cell not in self._configs:
            self._configs[cell] = self._config(cell, seed)
        of_run = seed if start is None else seed + CONTINUED_SEED
        config = replace(self._configs[cell], seed=of_run)
        key = digest((config, start, arm.grow)) if start else digest(config)
        if key not in self._names:
            name = f"{safe_name(self._shown(cell))}/seed-{seed}"
            if name in self.runs:  # of a part with other settings of its own
                name = f"{safe_name(f'{self._shown(cell)}-{cell.part}')}/seed-{seed}"
            if name in self.runs:  # no hash: another data.dir or revision would change it
                raise ConfigError(
                    f"parts.{cell.part}: {self._shown(cell)} has the folder of another run, "
                    f"{name}; give one of their arms or levels another name"
                )
            self._names[key] = name
            self.runs[name] = StudyRun(name, cell, seed, config, start, arm.grow)
        return self.runs[self._names[key]]

    def _shown(self, cell: StudyCell) -> str:
        grid = self._study.parts[cell.part].grid
        levels = (f"{factor}={level}" for factor, level in zip(grid, cell.levels, strict=True))
        return "+".join((cell.arm, *levels))

    def _config(self, cell: StudyCell, seed: int) -> PretrainConfig:
        study, part, arm = self._study, self._study.parts[cell.part], self._study.arms[cell.arm]
        levels = zip(part.grid, cell.levels, strict=True)
        layers = [self._shares, part.set, arm.set]
        layers += (study.factors[factor][level] for factor, level in levels)
        where = f"{cell.part}, {self._shown(cell)}"
        config = build(PretrainConfig, _changed(self._base, layers), where)
        if config.checkpoint.keep < (arm.mean or 1):
            raise ConfigError(
                f"arms.{cell.arm}.mean={arm.mean}, and its runs keep {config.checkpoint.keep} "
                "checkpoints; raise checkpoint.keep"
            )
        if arm.flops_of is None:
            return config
        if config.phases or config.stages:
            raise ConfigError(
                f"{where}: flops_of sets train.num_steps, and phases and stages have slots of "
                "their own; leave them out"
            )
        like = self.add(replace(cell, arm=arm.flops_of), seed)
        chain = [like, self.runs[like.start]] if like.start else [like]
        whole = sum(run_plan(run.config).flops for run in chain)
        steps = round(whole / run_plan(config).flops * config.train.num_steps)
        layers.append({"train.num_steps": steps})
        return build(PretrainConfig, _changed(self._base, layers), where)
