"""The demo: from raw text to an exported encoder on this machine, with one rank killed half-way.

Everything runs as a user would run it, each step as its own process: prepare, pre-train with two
ranks, kill one with SIGKILL, let the launcher start both again, export, fill a mask.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.config.runs import load_run
from pipeline.errors import EXIT_INTERRUPTED, ConfigError, PostnormError
from pipeline.runtime.env import module_command, multiplies_bf16
from pipeline.runtime.files import read_json_lines, write_json_atomic
from pipeline.runtime.run_folder import RunFolder

_CONFIG = "demo"
"""Name of the shipped configs, of the data and of the run."""
_QUICK = (
    "train.num_steps=120",
    "train.warmup_steps=10",
    "train.alpha_warmup_steps=10",
    "checkpoint.every_steps=10",
    "monitor.log_every_steps=2",
    "monitor.eval_every_steps=30",
)
_NUM_RANKS = 2
_KILLED_RANK = 1
_TO_END_S = 30.0
_TEXT = "Returns a [MASK] of all the files in the directory."


class DemoError(PostnormError):
    """A step of the demo failed."""


def demo(out: str, *, corpus: str | None, quick: bool = False) -> int:
    """Run the demo and write `OUT/summary.json`; an earlier demo in `out` is replaced.

    `quick` is less training, which shows that everything works.
    Without a `corpus`, a file, folder or glob of text, the embedded one is taken.
    """
    folder = Path(out)
    _clear(folder)
    overrides = [f"run_dir={folder}/train", f"data.dir={folder}/data", *(_QUICK if quick else ())]
    if not multiplies_bf16():
        print("this processor does not multiply bf16: train.precision=fp32", flush=True)
        overrides.append("train.precision=fp32")
    config = load_run(_CONFIG, overrides).config
    prep_overrides = [f"output_dir={folder}/data"]
    if corpus:
        inputs = json.dumps([corpus], ensure_ascii=False)
        prep_overrides.append(f"sources=[{{name: corpus, inputs: {inputs}}}]")
    _step("prepare", ["prep", "run", _CONFIG, *prep_overrides])
    killed_at_step = _train_and_kill(config.folder.path, config.train.num_steps, overrides)
    _step("export", ["export", config.run_dir, f"{folder}/export"])
    _step("fill a mask", ["fill-mask", f"{folder}/export", _TEXT])
    summary = _summary(folder, config.folder.path, killed_at_step)
    write_json_atomic(folder / "summary.json", summary)
    print(f"\n== {folder}/summary.json")
    for name, value in summary.items():
        print(f"{name:<22}{value:,}" if isinstance(value, int) else f"{name:<22}{value:.6g}")
    print(f"\nLook at the curves: {sys.executable} -m tensorboard.main --logdir {config.run_dir}")
    print("and open http://localhost:6006")
    return 0


def _clear(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    marker = folder / "demo-folder"
    if folder.exists() and any(folder.iterdir()):
        if not marker.exists():
            raise ConfigError(f"{folder} is not the folder of a demo; choose another --out")
        print(f"removing the earlier demo in {folder}")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _step(title: str, arguments: list[str]) -> None:
    print(f"\n== {title}: {shlex.join(['postnorm', *arguments])}", flush=True)
    with _started(arguments) as process:
        code = process.wait()
    if code:
        raise DemoError(f"{title} failed with exit code {code}; see above")


@contextmanager
def _started(arguments: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Start `postnorm` on a step, which does not outlive the block."""
    process = subprocess.Popen([*module_command("postnorm"), *arguments])
    try:
        yield process
    except KeyboardInterrupt:
        # A terminal interrupts the step as well, which ends and says what it leaves.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TO_END_S)
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        process.terminate()
        process.wait()


def _train_and_kill(run_dir: Path, num_steps: int, overrides: list[str]) -> int:
    """Train with two ranks, kill one half-way, and return the step it had logged by then."""
    arguments = ["submit", _CONFIG, "--local", f"--ranks={_NUM_RANKS}", *overrides]
    print(f"\n== pre-train: {shlex.join(['postnorm', *arguments])}", flush=True)
    with _started(arguments) as process:
        step = _wait_for_step(run_dir, num_steps // 2, process)
        victim = _find_rank(process.pid, _KILLED_RANK)
        victim.send_signal(signal.SIGKILL)
        killed = f"rank {_KILLED_RANK} (pid {victim.pid}) killed with SIGKILL at step {step}"
        print(f"== {killed}", flush=True)
        code = process.wait()
    if code:
        raise DemoError(f"pre-training failed with exit code {code}; see {run_dir}/logs")
    return step


def _wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> int:
    while process.poll() is None:
        reached = [line["step"] for line in _metrics(run_dir) if line["kind"] == "train"]
        if reached and reached[-1] >= step:
            return int(reached[-1])
        time.sleep(0.2)
    raise DemoError(f"pre-training ended with exit code {process.returncode} before step {step}")


def _find_rank(parent: int, rank: int) -> psutil.Process:
    for child in psutil.Process(parent).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise DemoError(f"no process of rank {rank} exists")


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_json_lines(RunFolder(run_dir).metrics)


def _summary(folder: Path, run_dir: Path, killed_at_step: int) -> dict[str, int | float]:
    report = json.loads((folder / "data" / "report.json").read_text())
    attempts = read_json_lines(RunFolder(run_dir).attempts)
    metrics = _metrics(run_dir)
    train = [line for line in metrics if line["kind"] == "train"]
    evaluations = [line for line in metrics if line["kind"] == "eval"]
    if attempts[-1]["resumed_from_step"] is None:
        raise DemoError(f"the run did not resume from a checkpoint; see {run_dir}/logs")
    exported = json.loads((folder / "export" / "config.json").read_text())
    speeds = sorted(line["tokens_per_s"] for line in train)
    return {
        "documents": sum(split["documents"] for split in report["totals"].values()),
        "corpus_bytes": sum(split["text_bytes"] for split in report["totals"].values()),
        "tokens": sum(split["tokens"] for split in report["totals"].values()),
        "vocab_size": report["vocab_size"],
        "steps": train[-1]["step"],
        "loss_first": train[0]["loss"],
        "loss_last": train[-1]["loss"],
        "unigram_entropy": report["unigram_entropy_nats"],
        "eval_loss": evaluations[-1]["loss"],
        "eval_accuracy": evaluations[-1]["accuracy"],
        "killed_at_step": killed_at_step,
        "resumed_from_step": attempts[-1]["resumed_from_step"],
        "tokens_per_s": speeds[len(speeds) // 2],
        "export_max_abs_diff": exported["max_abs_diff"],
    }
