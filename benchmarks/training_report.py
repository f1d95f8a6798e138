"""What a training run's metrics say of its speed; one JSON object.

    python -m benchmarks.training_report RUN OUT.json

RUN is a run folder of `python -m pipeline pretrain`. Log lines of the first tenth of the run, which
compile and warm up, are left out, but for the first loss.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import write_json


def report(run_dir: Path) -> dict[str, Any]:
    """Reads metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    if len(train) < 2:
        raise SystemExit(f"{run_dir}/metrics.jsonl has {len(train)} log lines, expected 2 or more")
    warm = train[max(1, len(train) // 10) :]
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "steps": train[-1]["step"],
        "seconds": float(train[-1]["elapsed_s"]),
        "tokens_per_s": float(statistics.median(record["tokens_per_s"] for record in warm)),
        # Shares of equal numbers of steps: the mean is that of the whole time.
        "data_wait": float(statistics.fmean(record["data_wait"] for record in warm)),
        "loss_first": float(train[0]["loss"]),
        "loss_last": float(train[-1]["loss"]),
        "event_files": len(list(run_dir.rglob("events.out.tfevents*"))),
    }
    mfu = [record["mfu"] for record in warm if "mfu" in record]
    if mfu:
        found["mfu"] = float(statistics.median(mfu))
    if evaluations:
        found["eval_loss_first"] = float(evaluations[0]["loss"])
        found["eval_loss_last"] = float(evaluations[-1]["loss"])
    return found


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), report(Path(sys.argv[1])))
