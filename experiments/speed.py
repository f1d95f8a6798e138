"""The study of speed: runs of `benchmarks.step`, and where their ratios come from.

Its starts are the pairs: in each, every subject is a new process and has turns on the same
batches. Turns of one process agree better than two processes of one program do.
"""

import json
import math
import subprocess
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments import page
from experiments.page import Point, draw_points, svg
from experiments.study import PRESETS, StudyArguments, StudyConfig
from experiments.study_run import embedded_corpus
from pipeline.config.load import build, git_revision
from pipeline.config.schema import REQUIRED, param
from pipeline.errors import ConfigError, DataError
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_json_atomic
from pipeline.tasks.intervals import LEVEL, Interval, interval_of, judged

# Of a subject at one length, the first time, on two cores: an estimate.
_COMPILE_S = 90.0
# Of a subject in each start: its process, its model, its first steps.
_PREPARE_S = 12.0
_MACHINE = "device", "cpus", "versions"
_NOTE = "Marks: geometric means over starts. Bars: 95% interval (Student's t over starts)."


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """What is measured: `set` of a preset."""

    data: str | None = param(None, "prepared dataset; null takes the embedded corpus")
    kernels: tuple[str, ...] = param(REQUIRED, "auto, reference")
    runs: tuple[str, ...] = param(REQUIRED, "plain, compile")
    compiled: tuple[str, ...] = param((), "models that are compiled; empty: all")
    large: tuple[str, ...] = param((), "further models")
    layers: int | None = param(None, "of all models, to fit into memory; null: their own", ge=1)
    models: tuple[str, ...] = param((), "of the ladder, these alone; empty: all")
    seq_len: tuple[int, ...] = param(REQUIRED, "lengths", unit="tokens")
    tokens: int = param(REQUIRED, "slots of a micro-batch", ge=8)
    vocab_size: int = param(REQUIRED, "rows of the token embedding", ge=6)
    starts: int = param(REQUIRED, "times that all subjects are started; two for an interval", ge=1)
    rounds: int = param(REQUIRED, "turns of each subject in a start", ge=1)
    seconds: float = param(REQUIRED, "of a turn", gt=0)
    limit_s: float = param(REQUIRED, "to compile one subject at one length", gt=0)
    budget_s: float = param(REQUIRED, "for a start", gt=0)
    tiny: bool = param(False, "models of two layers, to try it out")

    @property
    def change(self) -> str:
        """What stands behind the name of each model."""
        return f"+num_layers={self.layers}" if self.layers else ""


def speed(name: str, study: StudyConfig, arguments: StudyArguments, out: Path) -> int:
    """Measure the starts that were not measured yet, and write the page; return 0.

    Raises:
        ConfigError: an override is wrong, `out` has starts of other settings, or benchmarks are
            not there.
        DataError: nothing could be timed, or starts are missing that `--report` needs.
    """
    if arguments.part or arguments.seeds or arguments.cluster:
        raise ConfigError(f"{name} has neither parts nor seeds, and runs here: leave them out")
    if arguments.dry_run:
        for preset in PRESETS:
            config = _config(study, preset, arguments.overrides)
            subjects = _subjects(study, config)
            turns = config.starts * config.rounds * len(config.seq_len)
            compiles = sum("/compile/" in each for each in subjects) * len(config.seq_len)
            prepared = config.starts * len(subjects) * _PREPARE_S + compiles * _COMPILE_S
            least = len(subjects) * turns * config.seconds + prepared
            most = config.starts * config.budget_s
            print(
                f"{name}, preset {preset}: {len(subjects)} subjects, {config.starts} starts, "
                f"about {least / 3600:.2f} hours, {most / 3600:.2f} at most"
            )
            if preset == arguments.preset:
                print("\n".join(f"  {each}" for each in subjects))
        return 0
    config = _config(study, arguments.preset, arguments.overrides)
    folder: Path = (arguments.results or out).resolve()
    written = folder / f"{name}.json"
    if arguments.report and not (out / "setting.json").is_file() and written.is_file():
        measured = json.loads(written.read_bytes())["measured"]
    else:
        measured = _starts(study, config, out, is_report=arguments.report)
    machines = [[start["machine"][key] for key in _MACHINE] for start in measured]
    changed = next((number for number, of in enumerate(machines, 1) if of != machines[0]), None)
    if changed:
        raise DataError(
            f"start {changed} in {out} was measured on another machine or with other versions than "
            f"start 1: remove start-{changed}.json to measure it again, or give another --out"
        )
    body = analyse(study, measured, config.change)
    for subject, error in body["absent"].items():
        print(f"not measured: {subject}: {error}")
    if body["absent"]:
        print(f"remove a start's file from {out} to measure that start again")
    lines = _page(name, study, arguments, body, measured)
    figures = {f"{name}.svg": _figure(study, body["rows"])}
    page.write(folder, name, {**body, "measured": measured}, lines, figures)
    print(f"{folder / name}.md")
    return 0


def _starts(
    study: StudyConfig, config: SpeedConfig, out: Path, *, is_report: bool
) -> list[dict[str, Any]]:
    """Read what each start measured; measure those that were not."""
    if not is_report or (out / "setting.json").is_file():
        _check_setting(out / "setting.json", config)
    measured = []
    for start in range(1, config.starts + 1):
        file = out / f"start-{start}.json"
        if not file.is_file() and is_report:
            raise DataError(f"{file} does not exist: leave out --report to measure")
        if not file.is_file():
            print(f"start {start} of {config.starts}", flush=True)
            _measure(_subjects(study, config), config, out, file)
        measured.append(json.loads(file.read_bytes()))
        measured[-1]["setting"]["data"] = config.data or "embedded corpus"
    return measured


def _config(study: StudyConfig, preset: str, overrides: list[str]) -> SpeedConfig:
    words = [text.replace("data.dir=", "data=", 1) for text in overrides]
    return build(SpeedConfig, dict(study.presets[preset].set), f"preset {preset}", words)


def _check_setting(file: Path, config: SpeedConfig) -> None:
    """Write down what is measured, or compare it with what was."""
    setting = json.loads(json.dumps(asdict(config)))
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(file, setting)
    before = json.loads(file.read_bytes())
    if before != setting:
        others = {k: before.get(k) for k in setting if before.get(k) != setting[k]}
        changed = [f"{key}={json.dumps(value)}" for key, value in others.items()]
        raise ConfigError(
            f"{file.parent} has starts measured with {', '.join(changed)}: give these settings, "
            "or another --out"
        )


def _subjects(study: StudyConfig, config: SpeedConfig) -> list[str]:
    """Name what is measured, as `benchmarks.step_subjects` does."""
    ladder = [model for model, *_ in study.extra["ladder"]]
    models = [m for m in ladder if m in config.models or not config.models] + list(config.large)
    return [
        f"ours/{model}{config.change}/{kernels}/{run}/zero0"
        for run in config.runs
        for kernels in config.kernels
        for model in models
        if run == "plain" or not config.compiled or model in config.compiled
    ]


def _measure(subjects: list[str], config: SpeedConfig, out: Path, file: Path) -> None:
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / "step.py").is_file():
        raise ConfigError(
            f"the study of speed runs benchmarks/step.py, which the package in {root} does not "
            "have: install from a checkout with `make setup`"
        )
    data = Path(config.data) if config.data else embedded_corpus(out)
    out.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    values: dict[str, list[object]] = {
        "data": [data.resolve()],
        "out": [unfinished],
        "subjects": [*subjects],
        "seq-len": [*config.seq_len],
        "tokens": [config.tokens],
        "vocab-size": [config.vocab_size],
        "rounds": [config.rounds],
        "seconds": [config.seconds],
        "limit-s": [config.limit_s],
        "budget-s": [config.budget_s],
        "at-once": [1],
    }
    words = [word for name, of in values.items() for word in (f"--{name}", *map(str, of))]
    words += ["--tiny"] * config.tiny
    command = [*module_command("benchmarks.step"), *words]
    if subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, check=False).returncode:
        raise DataError("no subject could be timed, see above")
    found = json.loads(unfinished.read_bytes())
    found["machine"]["versions"]["revision"] = git_revision()
    write_json_atomic(file, found)
    unfinished.unlink()


def analyse(
    study: StudyConfig, found: Sequence[Mapping[str, Any]], change: str = ""
) -> dict[str, Any]:
    """Compare each subject with RoBERTa of its size, and with what the ladder names.

    Args:
        study: with the ladder.
        found: what `benchmarks.step` wrote in each start.
        change: what stands behind the name of each model.

    Returns:
        `rows`, one a subject and case: `median` in tokens/s, `ratio` to RoBERTa's and `step` to
        that of the model before it (`mean`, and from two starts on the limits `low` and `high`, the
        `p` of 1 and whether it `stands` after Holm; None without a pair). `how_sure`: a sentence on
        all ratios. `absent`: errors of subjects and cases, by name.
    """
    before_of = {model: before for model, _, before in study.extra["ladder"]}
    rows = []
    ratios: dict[Hashable, Interval] = {}
    for name in dict.fromkeys(name for start in found for name in start["subjects"]):
        _, changed, kernels, run, engine = name.split("/")
        model = changed.removesuffix(change)
        size = model.partition("-")[2].partition("+")[0]
        first = study.extra["against"].replace("base", size)
        before = before_of.get(model)
        for case, mine in _rates(found, name).items():
            every = [rate for start in mine.values() for rate in start]
            row = {"subject": name, "model": model, "case": case, "median": median(every)}
            for column, other in (("ratio", first), ("step", before)):
                peer = f"ours/{other}{change}/{kernels}/{run}/{engine}"
                ratio = row[column] = _ratio(mine, _rates(found, peer).get(case, {}))
                if ratio is not None and peer != name:
                    ratios[name, peer, case] = ratio
                row[f"{column} to"] = (name, peer, case)
            rows.append(row)
    absent: dict[str, str] = {}
    for start, each in enumerate(found, 1):
        for name, of in each["subjects"].items():
            failed = {f"{name}, start {start}": of}
            cases = of.get("cases", {}).items()
            failed |= {f"{name}, {case}, start {start}": at for case, at in cases}
            absent |= {where: at["error"] for where, at in failed.items() if "error" in at}
    stands, how_sure = judged(ratios)
    for row in rows:
        for column in ("ratio", "step"):
            row[column] = _plain(row[column], stands.get(row.pop(f"{column} to")))
    return {"level": LEVEL, "how_sure": how_sure, "rows": rows, "absent": absent}


def _rates(found: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[int, list[float]]]:
    """Return the tokens a second of a subject's turns, by case and start."""
    rates: dict[str, dict[int, list[float]]] = {}
    for start, each in enumerate(found):
        for case, at in each["subjects"].get(name, {}).get("cases", {}).items():
            if at["tokens_per_s"]:
                rates.setdefault(case, {})[start] = at["tokens_per_s"]
    return rates


def _ratio(mine: Mapping[int, list[float]], theirs: Mapping[int, list[float]]) -> Interval | None:
    """Return the interval of the logarithm of the ratio, over the starts; None without a pair."""
    pairs = [
        fmean(map(math.log, mine[start])) - fmean(map(math.log, theirs[start]))
        for start in sorted(mine.keys() & theirs.keys())
    ]
    return interval_of(pairs) if pairs else None


def _plain(of: Interval | None, stands: bool | None) -> dict[str, Any] | None:
    """Return the geometric mean of the starts' ratios; from two starts on with its interval."""
    if of is None:
        return None
    ratio: dict[str, Any] = {"mean": math.exp(of.mean)}
    if of.method != "none":
        limits = {"low": math.exp(of.low), "high": math.exp(of.high)}
        ratio |= {**limits, "p": of.p, "stands": stands}
    return ratio


def _page(
    name: str,
    study: StudyConfig,
    arguments: StudyArguments,
    body: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    meaning = {model: (said, before) for model, said, before in study.extra["ladder"]}
    yield f"# {name}: {study.question}\n"
    yield study.conclusion.strip() or "No conclusion has been written yet; the numbers themselves:"
    yield ""
    for row in body["rows"]:
        if row["model"] == "roformer_v2-base" and row["ratio"]:
            yield (
                f"- RoFormerV2 base, {row['case']}, {_how(row['subject'])}: "
                f"{_shown(row['ratio'])} times RoBERTa's tokens/s"
            )
    changed = f" {' '.join(arguments.overrides)}" if arguments.overrides else ""
    on = found[0]["machine"]
    versions = [f"{of} {on['versions'].get(of, 'not recorded')}" for of in ("torch", "revision")]
    yield (
        f"\n`postnorm study {name} --preset {arguments.preset}{changed}`, {on['device']}, "
        f"{on['cpus']} CPU cores, {', '.join(versions)}. Ratios are "
        f"geometric means over {len(found)} starts of all processes, with {LEVEL:.0%} intervals of "
        f"their logarithms; !: stands after Holm. {body['how_sure']}\n"
    )
    yield f"What this cannot say: {study.limits.strip()}\n"
    yield from (f"- Published: {e['says']} ({e['source']})" for e in study.extra["published"])
    yield f"\n![{name}]({name}.svg)\n"
    head = "length, slots", "model", "changes", "run", "tokens/s", "of RoBERTa"
    rows = [
        (
            row["case"],
            row["model"].partition("+")[0],
            meaning.get(row["model"], ("",))[0],
            _how(row["subject"]),
            f"{row['median']:,.0f}",
            _shown(row["ratio"]),
            _shown(row["step"]),
        )
        for row in body["rows"]
    ]
    yield from page.table("llllrrr", (*head, "of what it changes"), rows)
    for subject, error in body["absent"].items():
        yield f"\nNot measured: {subject}: {error}"


def _figure(study: StudyConfig, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the ratios to RoBERTa with their intervals as SVG: a panel a case, a colour a run."""
    said = {model: changes for model, changes, _ in study.extra["ladder"]}
    cases, ways, models = (
        list(dict.fromkeys(of))
        for of in zip(
            *((row["case"], _how(row["subject"]), row["model"]) for row in rows), strict=True
        )
    )

    names = [said.get(model, model) for model in models]

    def draw(axes: Any) -> None:
        for panel, case in zip(axes[0], cases, strict=True):
            panel.axvline(1.0, color="0.6", lw=0.8)
            lines: dict[str, list[Point]] = {}
            for row in rows:
                if row["case"] == case and (of := row["ratio"]):
                    limits = (of["low"], of["high"]) if "low" in of else None
                    place = said.get(row["model"], row["model"])
                    lines.setdefault(_how(row["subject"]), []).append(
                        Point(place, of["mean"], limits)
                    )
            draw_points(panel, lines, ways, names)
            length, slots = case.removeprefix("s").split()
            panel.set_title(f"rows of {length}, {slots} slots a micro-batch")
            panel.set_xlabel(f"tokens/s, times those of {study.extra['against']}")
        for panel in axes[0][1:]:
            panel.set_yticklabels([])

    inches = (2.0 + 2.8 * len(cases), 1.4 + 0.28 * len(models))
    return svg(1, len(cases), inches, _NOTE, draw)


def _how(subject: str) -> str:
    return ", ".join(subject.split("/")[2:4])


def _shown(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return ""
    if "low" not in ratio:
        return f"{ratio['mean']:.2f}"
    mark = "!" * bool(ratio.get("stands"))
    return f"{ratio['mean']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]{mark}"
