"""When the doctor tells that a run has diverged: healthy runs, rates too high, struck runs.

`python -m benchmarks.doctor OUT --rule divergence`. No run goes back (spikes.rewind=false), so that
each shows what becomes of it. The truth is in a run's log lines alone: *diverged* runs end a nat or
more above the least mean of a line, and their divergence begins with the first line from which on
all lines are a nat above the least line before. Runs of the healthy grid are *healthy* else,
whatever they learned; of the others, all of which have something wrong, those that end near their
best *came back*, and may be told or not. The doctor must tell the diverged runs at most 50 log
lines after the beginning, and no healthy one.

- healthy: a grid of depth, start, rate, warm-up and batch, with warm-ups that are too short.
- rates: ten to a thousand times too high, from the start or from update 150 on.
- a bad batch: one update at a thousand times the rate.
- struck: a checkpoint of update 150 whose first moments are 1e4 times as large, or whose second
  moments are 1e-8 times as large, or whose weights have noise of five times their own size, or in
  bf16 weights of a layer 1e30 times as large; a run goes on from it.
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.machine import versions
from benchmarks.sweep import postnorm, run_sweep
from experiments.read import outcome
from pipeline.checkpoints.manifest import state_file
from pipeline.checkpoints.state import KINDS, MASTER, MOMENTS, SavedState, TensorShard, write_part
from pipeline.config.load import git_revision
from pipeline.runtime.checkpoints import FOLDER, MANIFEST_FILE, name_of, read_manifest, signed
from pipeline.runtime.files import read_json_lines, sha256_file
from pipeline.runtime.run_folder import RunFolder
from pipeline.sinks.glance import MetricLines

STEPS, STRUCK = 300, 150
_INTERVAL = 5
_ABOVE = 1.0
MOST_LINES = 50
_RATE = 3e-3
_STARTS = {
    "unit": {"model.init": "unit"},
    "rsqrt": {"model.init": "rsqrt_depth"},
    "deepnorm": {"model.init": "deepnorm", "model.residual": "deepnorm"},
}
Truth = Literal["diverged", "not finite", "came back", "healthy"]
Overrides = dict[str, Any]


def _healthy() -> dict[str, Overrides]:
    grid = product((2, 6), _STARTS, (1e-3, _RATE, 1e-2), (10, 40), (4, 16))
    return {
        f"healthy-{depth}-{start}-{lr:g}-{warmup}-{batch}": {
            "model.num_layers": depth,
            "train.lr": lr,
            "train.warmup_steps": warmup,
            "train.global_batch": batch,
            "train.micro_batch": batch,
            **_STARTS[start],
        }
        for depth, start, lr, warmup, batch in grid
    }


def _bad() -> dict[str, Overrides]:
    runs: dict[str, Overrides] = {
        f"rate-{start}-{times}": {"train.lr": _RATE * times, **_STARTS[start]}
        for start, times in product(_STARTS, (10, 100, 1000))
    }
    later = {"train.schedule": "stages"}
    for times in (10, 100, 1000):
        stages = [
            {"name": "good", "steps": STRUCK},
            {"name": "high", "steps": STEPS - STRUCK, "train": {"lr": _RATE * times}},
        ]
        runs[f"later-{times}"] = later | {"stages": stages}
    for start in _STARTS:
        stages = [
            {"name": "good", "steps": STRUCK},
            {"name": "bad", "steps": 1, "train": {"lr": 1000 * _RATE}},
            {"name": "rest", "steps": STEPS - STRUCK - 1, "train": {"lr": _RATE}},
        ]
        runs[f"batch-{start}"] = later | {"stages": stages} | _STARTS[start]
    return runs


def _noise(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    scale = 5 * float(values.square().mean().sqrt())
    return values + scale * torch.randn(values.shape, generator=generator)


# By name: the kind of tensors that are changed, part of their names, the change, and the precision.
_STRIKES: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "moments": (MOMENTS[0], "", lambda values: values * 1e4, "fp32"),
    "squares": (MOMENTS[1], "", lambda values: values * 1e-8, "fp32"),
    "weights": (MASTER, "", _noise, "fp32"),
    "bf16": (MASTER, "layers.1.", lambda values: values * 1e30, "bf16"),
}


def base(dataset: Path) -> dict[str, Any]:
    """Return the config that all runs share."""
    return {
        "run_dir": "unset",
        "model": {
            "hidden_size": 48, "num_heads": 2, "ffn_size": 192, "num_layers": 4,
            "init": "rsqrt_depth", "dropout": 0.0, "attention_dropout": 0.0,
        },
        "data": {"dir": str(dataset), "seq_len": 64, "mask_prob": 0.3},
        "train": {
            "num_steps": STEPS, "warmup_steps": 40, "zero_stage": 0, "lr": _RATE,
            "global_batch": 16, "micro_batch": 16, "rate_may_rise": True, "precision": "fp32",
        },
        "spikes": {"rewind": False},
        "checkpoint": {"every_steps": STRUCK, "keep": 9},
        "monitor": {"log_every_steps": _INTERVAL, "eval_every_steps": STEPS},
    }  # fmt: skip


def strike(run: Path, kind: str, part: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change tensors of a kind in the checkpoint of update `STRUCK`, saved by one rank."""
    folder = run / FOLDER / name_of(STRUCK)
    saved, manifest = SavedState(folder), read_manifest(folder)
    parts = []
    for name, shape in saved.shapes.items():
        tensors = {each: saved.read(each, name) for each in KINDS}
        if part in name:
            tensors[kind] = change(tensors[kind])
        parts.append(TensorShard(name, shape, 0, tensors))
    write_part(folder, 0, 1, parts, saved.counters)
    path = folder / state_file(0, 1)
    body = asdict(manifest)
    body["files"][state_file(0, 1)] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (folder / MANIFEST_FILE).write_text(json.dumps(signed(body)))


@dataclass(frozen=True)
class Finding:
    """A run, what became of it, and when it was told."""

    name: str
    truth: Truth
    begin: int | None
    """Step of the log line with which the divergence begins."""
    told: int | None
    """Step of the line at which it was told first."""
    first_cause: str
    ended: bool
    """Whether it trained to its last step; a loss that is not finite ends a run, and says so."""

    @property
    def lines_late(self) -> int | None:
        """Log lines from the beginning to the report."""
        if self.begin is None or self.told is None:
            return None
        return (self.told - self.begin) // _INTERVAL


def diverges_from(losses: list[float]) -> int | None:
    """Return the log line, counted from 0, from which on all are far above the least before."""
    least, high = losses[0], [False]
    for loss in losses[1:]:
        high.append(loss > least + _ABOVE)
        least = min(least, loss)
    return max(place for place, is_high in enumerate(high) if not is_high) + 1 if high[-1] else None


def read(run: Path) -> Finding | None:
    """Read what became of a run; None if it has not ended, by its last step or by its numbers."""
    folder = RunFolder(run)
    if not folder.attempts.exists():
        return None
    lines = MetricLines(folder).update(read_json_lines(folder.attempts))
    train = [line for line in lines if line["kind"] == "train" and line["loss"] is not None]
    if not train:
        return None
    place = diverges_from([line["loss"] for line in train])
    told = [line["step"] for line in lines if line["kind"] == "divergence"]
    ended = folder.done.exists()
    if not ended:
        if outcome(run) != "diverged":
            return None
        # Steps whose loss is not finite have no line with a loss.
        place = len(train) - 1 if place is None else place
    others: Truth = "healthy" if run.name.startswith("healthy-") else "came back"
    return Finding(
        name=run.name,
        truth=others if place is None else "diverged" if ended or told else "not finite",
        begin=None if place is None else train[place]["step"],
        told=told[0] if told else None,
        first_cause=_first_cause(folder),
        ended=ended,
    )


def _first_cause(folder: RunFolder) -> str:
    text = "".join(path.read_text(errors="replace") for path in folder.logs.glob("rank-*.log"))
    after = text.partition("The run has diverged")[2].partition("\n1. ")[2]
    return after.partition(":")[0].partition("\n")[0][:60]


def summary(found: list[Finding]) -> dict[str, Any]:
    """Count runs by what became of them and whether they were told."""
    told = Counter((each.truth, each.told is not None) for each in found)
    late = [each.lines_late for each in found if each.lines_late is not None]
    return {
        "runs": len(found),
        "matrix": {
            truth: {"told": told[truth, True], "not_told": told[truth, False]}
            for truth in ("diverged", "not finite", "came back", "healthy")
        },
        "most_lines_late": max(late, default=None),
        "ended_by_not_finite": sum(not each.ended for each in found),
    }


def page(found: list[Finding], counts: Mapping[str, Any]) -> str:
    """Write the tables."""
    matrix = "\n".join(
        f"| {truth} | {row['told']} | {row['not_told']} |"
        for truth, row in counts["matrix"].items()
    )
    rows = "\n".join(
        f"| {each.name} | {each.truth} | {'' if each.begin is None else each.begin} "
        f"| {'' if each.told is None else each.told} "
        f"| {'' if each.lines_late is None else each.lines_late} "
        f"| {each.first_cause if each.ended else 'not finite: the run ended'} |"
        for each in found
        if each.truth != "healthy" or each.told is not None
    )
    shown = ", ".join(f"{name} {version}" for name, version in counts["versions"].items())
    last = counts["most_lines_late"]
    return f"""# The divergence's doctor over {len(found)} small real runs

`python -m benchmarks.doctor OUT --rule divergence --table benchmarks/results/divergence.md`: width
48, {STEPS} updates, a log line every {_INTERVAL}, the embedded corpus; {shown}. No run goes back.
Diverged: the last log line is {_ABOVE:g} nat or more above the least before, or the loss is not
finite. Not finite: the run ended by that before the rule was asked. Healthy: runs of the grid that
did not diverge. Came back: the others, which end near their best
though something is wrong with them; to tell them is no false alarm.

| the run | told | not told |
|---|---:|---:|
{matrix}

Log lines from the beginning of a divergence to its report, at most: {last}. Below 0 it was told at
its first rise; the loss came back for some lines, and rose again.

| run | became | begins at step | told at step | lines late | first cause |
|---|---|---:|---:|---:|---|
{rows}

`rate-START-TIMES`: that many times {_RATE:g}. `later-TIMES`: from update {STRUCK} on.
`batch-START`: one update at 1000 times the rate. `struck-WHAT`: goes on from a checkpoint of update
{STRUCK} whose first moments are 1e4 times as large (moments), second moments 1e-8 times (squares),
whose weights have noise of five times their size (weights), or in bf16 a layer of 1e30 times its
size (bf16).
"""


def measure(out: Path, dataset: Path, only: str, jobs: int, table: Path | None) -> int:
    """Run what is missing, and report; 1 if a run is missing."""
    config = base(dataset)
    chosen = {
        name: overrides for name, overrides in (_healthy() | _bad()).items() if fnmatch(name, only)
    }
    run_sweep(out, config, chosen, jobs)
    struck = {f"struck-{name}": strike for name, strike in _STRIKES.items()}
    struck = {name: each for name, each in struck.items() if fnmatch(name, only)}
    good = {
        each[3]: {"train.num_steps": STRUCK, "train.precision": each[3]} for each in struck.values()
    }
    run_sweep(out / "good", config, good, jobs)
    for name, (kind, part, change, precision) in struck.items():
        run = out / "struck" / name
        if not run.exists():
            shutil.copytree(out / "good/runs" / precision, run)
            RunFolder(run).done.unlink()
            strike(run, kind, part, change)
        if not RunFolder(run).done.exists():
            settings = f"run_dir={run}", f"train.precision={precision}"
            postnorm("pretrain", str(out / "base.yaml"), *settings, check=False)
    folders = [out / "runs" / name for name in chosen] + [out / "struck" / name for name in struck]
    found = [each for folder in folders if (each := read(folder))]
    counts = {"benchmark": "divergence", **summary(found)}
    counts["versions"] = versions() | {"revision": git_revision()}
    if table:
        table.write_text(page(found, counts))
    sys.stdout.write(json.dumps(counts) + "\n")
    return int(len(found) < len(chosen) + len(struck))
