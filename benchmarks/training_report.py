"""What the metrics of `benchmarks/train_gpu.sh` say; one JSON object.

    python -m benchmarks.training_report RUNS OUT.json

RUNS has three run folders of `python -m pipeline pretrain`: `run`, the long one, and `gpu` and
`cpu`, the first steps of one model on both; what is not there is left out. Log lines of the first
tenth of the long run, which compile and warm up, are left out, but for the first loss.
"""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import write_json


def report(runs: Path) -> dict[str, Any]:
    """Reads all that is there."""
    values: dict[str, Any] = {"machine": machine.describe()}
    if (runs / "run/metrics.jsonl").exists():
        values |= long_run(runs / "run")
    losses = {
        name: [record["loss"] for record in records(runs / name, "train")]
        for name in ("gpu", "cpu")
        if (runs / name / "metrics.jsonl").exists()
    }
    if losses:
        values["first_losses"] = losses
    if len(losses) == 2:
        pairs = list(zip(losses["gpu"], losses["cpu"], strict=False))
        values["first_steps"] = len(pairs)
        values["first_steps_difference"] = max(abs(a - b) / b for a, b in pairs)
    return values


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a kind, such as train or eval."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def long_run(run: Path) -> dict[str, Any]:
    """Speed, data wait, losses and memory of a run."""
    train, evaluations = records(run, "train"), records(run, "eval")
    if len(train) < 2:
        raise SystemExit(f"{run}/metrics.jsonl has {len(train)} log lines, expected 2 or more")
    warm = train[max(1, len(train) // 10) :]
    values: dict[str, Any] = {
        "steps": train[-1]["step"],
        "seconds": float(train[-1]["elapsed_s"]),
        "tokens_per_s": statistics.median(record["tokens_per_s"] for record in warm),
        # Shares of equal numbers of steps: the mean is that of the whole time.
        "data_wait": statistics.fmean(record["data_wait"] for record in warm),
        "loss_first": float(train[0]["loss"]),
        "loss_last": float(train[-1]["loss"]),
    }
    peaks = {name: value for name, value in warm[-1].items() if name.endswith("_gb")}
    values |= {name: float(value) for name, value in peaks.items()}
    planned = planned_gb(run / "resolved.yaml")
    if planned is not None:
        values["planned_gb"] = planned
    if evaluations:
        values["eval_loss_first"] = float(evaluations[0]["loss"])
        values["eval_loss_last"] = float(evaluations[-1]["loss"])
    return values


def planned_gb(config: Path) -> float | None:
    """Activations and state of a run by `python -m pipeline model`; None if it does not say."""
    command = [sys.executable, "-m", "pipeline", "model", str(config)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    row = re.search(r"^\s*activations and state\s+([\d,.]+)", done.stdout, re.MULTILINE)
    return None if row is None else float(row[1].replace(",", "")) * 2**20 / 1e9


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), report(Path(sys.argv[1])))
