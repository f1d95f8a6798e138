"""False alarms and misses of the doctor over small real runs; a table and one JSON line.

    python -m benchmarks.doctor OUT [--rule divergence] [--jobs 2] [--only '24-*']
        [--dataset DATASET] [--table benchmarks/results/doctor.md]

Example, the published tables, about two hours of two cores, and less than one:

    python -m benchmarks.doctor runs/doctor --table benchmarks/results/doctor.md
    python -m benchmarks.doctor runs/divergence --rule divergence \\
        --table benchmarks/results/divergence.md

What follows is the rule of plateaus; `benchmarks/divergence.py` has the other one.

The runs are a full grid of depth, start, learning rate and batch, width 48, on the corpus that is
embedded in `configs/prep/demo.yaml`: a sweep, which a second call continues. A run has *learned* if
its held-out loss ends 0.1 nats or more below the unigram entropy. Those that have not are run again
with three times the steps: if that learns the run is *late*, else *stuck*. The doctor must tell the
stuck runs, and none that learned or is late. The grid judges its first advice, too: whether the run
that differs in this alone learned.
"""

import argparse
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, Literal

from benchmarks import divergence
from benchmarks.machine import versions
from benchmarks.sweep import postnorm, run_sweep
from pipeline.checkpoints.state import LossHistory
from pipeline.config.load import build, git_revision
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import read_index
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder
from pipeline.sinks.glance import MetricLines
from pipeline.train.doctor import Doctor, LastStep, Plateau, reach
from pipeline.train.metrics import GroupNorms

_DEMO = Path(__file__).parents[1] / "configs/prep/demo.yaml"
_STARTS = {
    "unit": {"model.init": "unit"},
    "alpha": {"model.init": "unit", "train.alpha_warmup_steps": 200},
    "rsqrt": {"model.init": "rsqrt_depth"},
    "deepnorm": {"model.init": "deepnorm", "model.residual": "deepnorm"},
}
_DEPTHS, _RATES, _BATCHES = (4, 12, 24), (3e-4, 3e-3, 2e-2), (4, 16)
_LEARNED_NATS = 0.1
_STEPS, _TIMES = 600, 3
Truth = Literal["learned", "late", "stuck"]


@dataclass(frozen=True, order=True)
class Point:
    """One run of the grid."""

    depth: int
    start: str
    lr: float
    batch: int

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.depth}-{self.start}-{self.lr:g}-{self.batch}"

    def overrides(self) -> dict[str, Any]:
        """Return what it changes in the base config."""
        sizes = {"train.global_batch": self.batch, "train.micro_batch": self.batch}
        return {"model.num_layers": self.depth, "train.lr": self.lr} | _STARTS[self.start] | sizes


GRID = [Point(*values) for values in product(_DEPTHS, _STARTS, _RATES, _BATCHES)]


def base(dataset: str, num_steps: int = _STEPS) -> dict[str, Any]:
    """Return the config that all runs of a length share."""
    return {
        "run_dir": "unset",
        "model": {
            "hidden_size": 48, "num_heads": 2, "ffn_size": 192,
            "dropout": 0.0, "attention_dropout": 0.0,
        },
        "data": {"dir": dataset, "seq_len": 64, "mask_prob": 0.3},
        "train": {"num_steps": num_steps, "warmup_steps": 40, "zero_stage": 0},
        "checkpoint": {"every_steps": num_steps, "keep": 1},
        "monitor": {"log_every_steps": 5, "eval_every_steps": 50, "eval_sequences": 256},
    }  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """What a run logged."""

    lines: list[list[float]]
    """Step, loss, accuracy, alpha, learning rate, gradient norm, the first layer's over the last
    layer's, and tokens of each log line."""
    held_out: list[list[float]]
    """Step and loss of each evaluation."""

    def has_learned(self, entropy: float) -> bool:
        """Tell by its end whether the run knows more than frequencies."""
        return self.held_out[-1][1] <= entropy - _LEARNED_NATS

    def told(self, config: PretrainConfig, entropy: float, guess: float) -> tuple[int, str] | None:
        """Return step and text of the plateau that the doctor tells of these numbers."""
        doctor = Doctor(config, config.data.dir, unigram_entropy=entropy, uniform_guess=guess)
        losses = LossHistory()
        evaluations = {int(step): loss for step, loss in self.held_out}
        before = 0
        for number, loss, accuracy, alpha, lr, norm, ratio, tokens in self.lines:
            step = int(number)
            layers = {"layer_00": GroupNorms(ratio, 0.0), "layer_01": GroupNorms(1.0, 0.0)}
            # Each step of a log line is taken for its mean.
            for batch in range(before, step):
                losses.add(batch, loss, config.spikes, guess)
            last = LastStep(step, step - 1, alpha, lr, norm, layers, tokens / (step - before))
            found = doctor.look({"loss": loss, "accuracy": accuracy}, last, losses)
            if isinstance(found, Plateau):
                return step, found.advice
            if step in evaluations:
                doctor.evaluated(step, evaluations[step])
            before = step
        return None


def config_of(point: Point, dataset: str) -> PretrainConfig:
    """Return the config of a run."""
    overrides = [f"{key}={value}" for key, value in point.overrides().items()]
    return build(PretrainConfig, base(dataset), point.name, overrides)


def read(run: Path) -> Curve | None:
    """Read a run's numbers, rounded; None if it has not ended."""
    folder = RunFolder(run)
    if not folder.done.exists():
        return None
    lines: list[list[float]] = []
    held_out: list[list[float]] = []
    for record in MetricLines(folder).update(read_json_lines(folder.attempts)):
        if record["kind"] == "eval":
            held_out.append([record["step"], round(record["loss"], 4)])
        if record["kind"] == "train":
            layers = {
                name.removeprefix("grad_norm_"): GroupNorms(value, 0.0)
                for name, value in record.items()
                if name.startswith("grad_norm_layer_")
            }
            numbers = (*(record[name] for name in ("alpha", "lr", "grad_norm")), reach(layers))
            values = [float(f"{number:.4g}") for number in numbers]
            loss, accuracy = round(record["loss"], 4), round(record["accuracy"], 5)
            lines.append([record["step"], loss, accuracy, *values, record["tokens"]])
    return Curve(lines, held_out)


@dataclass(frozen=True)
class Finding:
    """A run, and what the doctor said of it."""

    point: Point
    truth: Truth
    told_step: int | None
    advice: str | None
    """Its first change: start, learning rate, batch or duplicates."""
    freed: list[str]
    """Single changes in the grid that let a stuck run learn."""


def findings(
    curves: dict[str, Curve],
    longer: dict[str, Curve],
    dataset: str,
    *,
    entropy: float,
    guess: float,
) -> list[Finding]:
    """Ask the doctor about all runs whose truth is known, and the grid about its advice.

    Args:
        curves: by the names of runs.
        longer: of those that did not learn, with more steps.
        dataset: its folder, whose report advice may quote.
        entropy: of unigrams, nats.
        guess: loss of a uniform guess, nats.
    """
    truths: dict[Point, Truth] = {}
    for point in GRID:
        curve, later = curves.get(point.name), longer.get(point.name)
        if curve and curve.has_learned(entropy):
            truths[point] = "learned"
        elif curve and later:
            truths[point] = "late" if later.has_learned(entropy) else "stuck"
    found = []
    for point in truths:
        told = curves[point.name].told(config_of(point, dataset), entropy, guess)
        first = told[1].split("\n1. ")[1].split(":")[0] if told else None
        freed = {
            what
            for other, truth in truths.items()
            if truth == "learned" and (what := _only_change(point, other))
        }
        stuck = truths[point] == "stuck"
        step = told[0] if told else None
        found.append(Finding(point, truths[point], step, first, sorted(freed) if stuck else []))
    return found


def _only_change(one: Point, other: Point) -> str | None:
    if other == replace(one, start=other.start):
        return "start"
    if other == replace(one, lr=other.lr):
        return "learning rate"
    return "batch" if one.batch < other.batch and other == replace(one, batch=other.batch) else None


def summary(found: list[Finding]) -> dict[str, Any]:
    """Count runs by what they are and whether they were told, and the advice that helps."""
    told = Counter((each.truth, each.told_step is not None) for each in found)
    stuck = [each for each in found if each.truth == "stuck" and each.told_step is not None]
    can_be_freed = [each for each in stuck if each.freed]
    return {
        "runs": len(found),
        "matrix": {
            truth: {"told": told[truth, True], "not_told": told[truth, False]}
            for truth in ("stuck", "late", "learned")
        },
        "told_at_step": sorted(each.told_step or 0 for each in stuck),
        "first_advice_frees": sum(each.advice in each.freed for each in can_be_freed),
        "of_those_that_one_change_frees": len(can_be_freed),
    }


def page(found: list[Finding], entropy: float, counts: dict[str, Any]) -> str:
    """Write the table."""
    matrix = "\n".join(
        f"| {truth} | {row['told']} | {row['not_told']} |"
        for truth, row in counts["matrix"].items()
    )
    rows = "\n".join(
        f"| {each.point.depth} | {each.point.start} | {each.point.lr:g} | {each.point.batch} "
        f"| {each.truth} | {each.told_step or ''} | {each.advice or ''} "
        f"| {', '.join(each.freed)} |"
        for each in found
    )
    shown = ", ".join(f"{name} {version}" for name, version in counts["versions"].items())
    return f"""# The plateau's doctor over {len(found)} small real runs

`python -m benchmarks.doctor OUT --table benchmarks/results/doctor.md`: width 48, {_STEPS} updates
of 4 or 16 sequences of 64, the embedded corpus, unigram entropy {entropy:.3f} nats; {shown}.
Learned: held-out loss at the end {_LEARNED_NATS} nats or more below the entropy. Late: not, but
with {_TIMES} times the updates. Stuck: neither. These runs shaped the rule; docs/faults.md has what
it told of others.

| the run | told | not told |
|---|---:|---:|
{matrix}

Of {counts["of_those_that_one_change_frees"]} stuck runs that the doctor told and that a single
change of the grid lets learn, its first advice is such a change in {counts["first_advice_frees"]}.

| layers | start | rate | batch | the run | told at step | first advice | changes that free it |
|---:|---|---:|---:|---|---:|---|---|
{rows}

Starts: `unit` is model.init=unit alone, `alpha` with 200 steps of alpha warm-up, `rsqrt`
model.init=rsqrt_depth, `deepnorm` init and residual.
"""


def main() -> int:
    """Run what is missing, and report; 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rule", choices=("plateau", "divergence"), default="plateau")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*", help="names of runs, such as '24-*'")
    parser.add_argument("--dataset", type=Path, help="in place of the embedded corpus")
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    dataset = arguments.dataset or out / "data"
    if not arguments.dataset:
        postnorm("prep", "run", str(_DEMO), f"output_dir={dataset}")
    if arguments.rule == "divergence":
        return divergence.measure(out, dataset, arguments.only, arguments.jobs, arguments.table)
    chosen = [point for point in GRID if fnmatch(point.name, arguments.only)]
    if not chosen:
        parser.error(f"--only {arguments.only!r}: no such run; names are like {GRID[0].name}")
    index = read_index(dataset)
    entropy = index.unigram_entropy_nats
    curves = _run(out, base(str(dataset)), chosen, arguments.jobs)
    open_ones = [p for p in chosen if p.name in curves and not curves[p.name].has_learned(entropy)]
    longer_base = base(str(dataset), _TIMES * _STEPS)
    # Only how they end is asked.
    longer_base["monitor"]["eval_every_steps"] = _TIMES * _STEPS
    longer = _run(out / "longer", longer_base, open_ones, arguments.jobs) if open_ones else {}
    guess = math.log(index.vocab_size)
    found = findings(curves, longer, str(dataset), entropy=entropy, guess=guess)
    counts = {"benchmark": "doctor", **summary(found)}
    counts["versions"] = versions() | {"revision": git_revision()}
    if arguments.table:
        arguments.table.write_text(page(found, entropy, counts))
    sys.stdout.write(json.dumps(counts) + "\n")
    return int(len(found) < len(chosen))


def _run(out: Path, config: dict[str, Any], points: list[Point], jobs: int) -> dict[str, Curve]:
    """Run what is missing of the grid in a folder, and read what has ended."""
    run_sweep(out, config, {point.name: point.overrides() for point in points}, jobs)
    curves = {point.name: read(out / "runs" / point.name) for point in points}
    return {name: curve for name, curve in curves.items() if curve}


if __name__ == "__main__":
    sys.exit(main())
