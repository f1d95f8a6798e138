"""The study of speed: one run of `benchmarks.step`, and where its ratios come from.

Its rounds are the pairs: in each, every subject had a turn on the same batches.
"""

import argparse
import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.load import build
from pipeline.config.schema import REQUIRED, param
from pipeline.errors import ConfigError, DataError
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_atomic, write_json_atomic
from studies.analysis import LEVEL, Interval, interval_of
from studies.config import HOME, PRESETS, StudyConfig
from studies.run import embedded_corpus

_COMPILE_S = 90.0
"""Of a subject at one length, on two cores: an estimate."""


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
    rounds: int = param(REQUIRED, "turns of each subject", ge=2)
    seconds: float = param(REQUIRED, "of a turn", gt=0)
    limit_s: float = param(REQUIRED, "to compile one subject at one length", gt=0)
    budget_s: float = param(REQUIRED, "for everything", gt=0)
    tiny: bool = param(False, "models of two layers, to try it out")

    @property
    def change(self) -> str:
        """What stands behind the name of each model."""
        return f"+num_layers={self.layers}" if self.layers else ""


def speed(name: str, study: StudyConfig, arguments: argparse.Namespace, out: Path) -> int:
    """Measure what was not measured yet, and write the page; return 0.

    Raises:
        ConfigError: an override is wrong, or benchmarks are not there.
        DataError: nothing could be timed.
    """
    if arguments.part or arguments.seeds or arguments.cluster:
        raise ConfigError(f"{name} has neither parts nor seeds, and runs here: leave them out")
    if arguments.dry_run:
        for preset in PRESETS:
            config = _config(study, preset, arguments.overrides)
            subjects, turns = _subjects(study, config), config.rounds * len(config.seq_len)
            compiles = sum("/compile/" in each for each in subjects) * len(config.seq_len)
            least = 2 * len(subjects) * turns * config.seconds + compiles * _COMPILE_S
            print(
                f"{name}, preset {preset}: {len(subjects)} subjects, about {least / 3600:.2f} "
                f"hours, {config.budget_s / 3600:.2f} at most"
            )
            if preset == arguments.preset:
                print("\n".join(f"  {each}" for each in subjects))
        return 0
    config = _config(study, arguments.preset, arguments.overrides)
    file = out / "step.json"
    if not file.is_file() and arguments.report:
        raise DataError(f"{file} does not exist: leave out --report to measure")
    if not file.is_file():
        _measure(_subjects(study, config), config, out, file)
    found = json.loads(file.read_bytes())
    folder: Path = (arguments.results or out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    body = analyse(study, found, config.change)
    write_json_atomic(folder / f"{name}.json", {**body, "measured": found})
    page = "\n".join(_page(name, study, arguments, body, found)) + "\n"
    write_atomic(folder / f"{name}.md", page.encode())
    print(f"{folder / name}.md")
    return 0


def _config(study: StudyConfig, preset: str, overrides: list[str]) -> SpeedConfig:
    words = [text.replace("data.dir=", "data=", 1) for text in overrides]
    return build(SpeedConfig, dict(study.presets[preset].set), f"preset {preset}", words)


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
    root = HOME.parent
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
    unfinished.replace(file)


def analyse(study: StudyConfig, found: Mapping[str, Any], change: str = "") -> dict[str, Any]:
    """Compare each subject with RoBERTa of its size, and with what the ladder names.

    Args:
        study: with the ladder.
        found: what `benchmarks.step` wrote.
        change: what stands behind the name of each model.
    """
    before_of = {model: before for model, _, before in study.extra["ladder"]}
    rows = []
    for name, of in found["subjects"].items():
        _, changed, kernels, run, engine = name.split("/")
        model = changed.removesuffix(change)
        size = model.partition("-")[2].partition("+")[0]
        first = study.extra["against"].replace("base", size)
        before = before_of.get(model)
        for case, at in of.get("cases", {}).items():
            row = {"subject": name, "model": model, "case": case, "median": at.get("median")}
            for column, other in (("ratio", first), ("step", before)):
                peer = found["subjects"].get(f"ours/{other}{change}/{kernels}/{run}/{engine}", {})
                rates = peer.get("cases", {}).get(case, {}).get("tokens_per_s", [])
                row[column] = _ratio(at["tokens_per_s"], rates)
            rows.append(row)
    absent = {name: of["error"] for name, of in found["subjects"].items() if "error" in of}
    return {"level": LEVEL, "rows": rows, "absent": absent}


def _ratio(mine: list[float], theirs: list[float]) -> dict[str, float] | None:
    """Return the geometric mean of the rounds' ratios, and its interval."""
    both = [math.log(a / b) for a, b in zip(mine, theirs, strict=False)]
    if len(both) < 2:
        return None
    of: Interval = interval_of(both)
    return {"mean": math.exp(of.mean), "low": math.exp(of.low), "high": math.exp(of.high)}


def _page(
    name: str,
    study: StudyConfig,
    arguments: argparse.Namespace,
    body: Mapping[str, Any],
    found: Mapping[str, Any],
) -> Iterator[str]:
    meaning = {model: (said, before) for model, said, before in study.extra["ladder"]}
    yield f"# {name}: {study.question}"
    yield ""
    yield study.conclusion.strip() or "No conclusion has been written yet; the numbers themselves:"
    yield ""
    for row in body["rows"]:
        if row["model"] == "roformer_v2-base" and row["ratio"]:
            yield (
                f"- RoFormerV2 base, {row['case']}, {_how(row['subject'])}: "
                f"{_shown(row['ratio'])} times RoBERTa's tokens/s"
            )
    yield ""
    changed = f" {' '.join(arguments.overrides)}" if arguments.overrides else ""
    yield (
        f"`postnorm study {name} --preset {arguments.preset}{changed}`, "
        f"{found['machine']['device']}, {found['machine']['cpus']} CPU cores. Ratios "
        f"are geometric means over rounds, with {LEVEL:.0%} intervals of their logarithms."
    )
    yield ""
    yield f"What this cannot say: {study.limits.strip()}"
    yield ""
    yield from (f"- Published: {e['says']} ({e['source']})" for e in study.extra["published"])
    yield ""
    yield "| length, slots | model | changes | run | tokens/s | of RoBERTa | of what it changes |"
    yield "|---|---|---|---|---:|---:|---:|"
    for row in body["rows"]:
        median = "" if row["median"] is None else f"{row['median']:,.0f}"
        yield (
            f"| {row['case']} | {row['model'].partition('+')[0]} | "
            f"{meaning.get(row['model'], ('',))[0]} | {_how(row['subject'])} | {median} | "
            f"{_shown(row['ratio'])} | {_shown(row['step'])} |"
        )
    for subject, error in body["absent"].items():
        yield ""
        yield f"Not measured: {subject}: {error}"


def _how(subject: str) -> str:
    return ", ".join(subject.split("/")[2:4])


def _shown(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio['mean']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
