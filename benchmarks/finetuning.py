"""Speed of fine-tuning beside that of pre-training, by the same loop; one JSON line.

    python -m benchmarks.finetuning RUN TASK [--steps 60] [--rounds 3] [section.key=value ...]

RUN is a finished or stopped pre-training run, whose model, precision and dataset both sides take;
TASK is a task file or the name of a shipped one. By turns, as real runs of their own processes:
"pretrain" continues nothing and trains the run's config for some steps with the task's batch,
"finetune" trains the task from RUN. "tokens_per_s": median over the log lines of all rounds but
each run's first, real tokens without padding; "ratio": fine-tuning over pre-training. Sequences of
pre-training are as long as the task's rows are in the mean, so that steps have equally many tokens.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.finetune.prepare import prepare
from pipeline.tasks.task import load_task


def _speeds(run_dir: Path) -> list[float]:
    lines = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["tokens_per_s"] for line in lines if line["kind"] == "train"][1:]


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("task")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    run = load(PretrainConfig, arguments.run / "resolved.yaml").config
    task = load_task(arguments.task, tuple(arguments.overrides))
    batch, steps = task.train.batch, arguments.steps
    rows = prepare(task, str(task.name), str(arguments.run), None).rows["train"].rows
    length = max(8, round(statistics.mean(len(row.ids) for row in rows)))
    found: dict[str, list[float]] = {"pretrain": [], "finetune": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            words = {
                "pretrain": [
                    str(arguments.run / "resolved.yaml"), f"run_dir={out}/pretrain",
                    f"train.num_steps={steps}", "train.warmup_steps=1",
                    "train.alpha_warmup_steps=0", f"train.global_batch={batch}",
                    f"train.micro_batch={batch}", f"data.seq_len={length}",
                    "phases=[]", "stages=[]", "train.optimizer=adamw",
                    "train.muon_momentum=0.95",
                    "monitor.log_every_steps=5", f"monitor.eval_every_steps={10 * steps}",
                    "monitor.eval_sequences=8", f"checkpoint.every_steps={10 * steps}",
                ],
                "finetune": [
                    arguments.task, "--from", str(arguments.run), "--out", f"{out}/finetune",
                    *arguments.overrides, f"train.steps={steps}",
                    f"train.precision={run.train.precision}", "data.dev_rows=64",
                    "data.test_rows=64",
                ],
            }  # fmt: skip
            for kind, rest in words.items():
                command = [sys.executable, "-m", "postnorm", kind, *rest]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found[kind] += _speeds(out / kind)
    speeds = {kind: round(statistics.median(values)) for kind, values in found.items()}
    body = {
        "tokens_per_s": speeds,
        "ratio": round(speeds["finetune"] / speeds["pretrain"], 3),
        "lines": {kind: len(values) for kind, values in found.items()},
        "task": task.name,
        "batch": batch,
        "tokens_a_row": length,
        "precision": run.train.precision,
        "layers": run.model.num_layers,
        "hidden_size": run.model.hidden_size,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    sys.stdout.write(json.dumps(body) + "\n")


if __name__ == "__main__":
    main()
