"""What a save costs a run, in the foreground and in the background; one JSON line.

    python -m benchmarks.saving DATASET [--ranks 1] [--hidden 768] [--steps 24] [--every 6]

DATASET is a folder written by `python -m data_prep run`. Real runs of `pipeline pretrain`, one
after another: "none" saves only at its end, "foreground" and "background" every `--every` steps.
"step_s": median time of a step; "save_s": median time for which training stands still for a save,
the first save left out, which takes its memory; "written_s": the same until all is hashed;
"per_save_s": by how much the loop's time grew for each save, against "none": that is the whole
price, slower steps while files are written included.
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
from typing import Any

KINDS = ("none", "foreground", "background")


def _run(arguments: argparse.Namespace, folder: Path, kind: str) -> dict[str, float]:
    config = folder / f"{kind}.yaml"
    run_dir = folder / kind
    every = 10 * arguments.steps if kind == "none" else arguments.every
    config.write_text(
        f"run_dir: {run_dir}\ndata: {{dir: {arguments.dataset}, seq_len: 64}}\n"
        f"model: {{num_layers: 12, hidden_size: {arguments.hidden}, num_heads: 12, "
        f"ffn_size: {4 * arguments.hidden}}}\n"
        f"train: {{num_steps: {arguments.steps}, global_batch: {2 * arguments.ranks}, "
        "micro_batch: 2, warmup_steps: 1}\n"
        f"checkpoint: {{every_steps: {every}, keep: 1, "
        f"background: {str(kind == 'background').lower()}}}\n"
        "monitor: {log_every_steps: 1, eval_every_steps: 100000, eval_sequences: 2}\n"
    )
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={arguments.ranks}", "-m", "pipeline", "pretrain", str(config)],
        check=True, stdout=subprocess.DEVNULL, env=variables,
    )  # fmt: skip
    lines = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    # The save at the end of a run is waited for.
    saves = [line for line in lines if line["kind"] == "save"][1:-1]
    found = {
        "step_s": statistics.median(line["step_s_median"] for line in train[1:]),
        "loop_s": train[-1]["elapsed_s"] - train[0]["elapsed_s"],
        "bytes": sum(
            path.stat().st_size for path in run_dir.glob("checkpoints/step-*/**/*.safetensors")
        ),
        "num_saves": sum(line["step"] < arguments.steps for line in lines
                         if line["kind"] == "save"),
    }  # fmt: skip
    if saves:
        found["save_s"] = statistics.median(line["save_s"] for line in saves)
        found["written_s"] = statistics.median(line["save_written_s"] for line in saves)
    return found


def main() -> None:
    """Prints the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            results[kind] = _run(arguments, Path(folder), kind)
    for kind in KINDS[1:]:
        more_s = results[kind]["loop_s"] - results["none"]["loop_s"]
        results[kind]["per_save_s"] = more_s / results[kind]["num_saves"]
    rounded = {kind: {name: round(value, 3) for name, value in found.items()}
               for kind, found in results.items()}  # fmt: skip
    found = {
        "benchmark": "saving", **rounded, "ranks": arguments.ranks, "torch": version("torch"),
        "safetensors": version("safetensors"), "python": platform.python_version(),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
