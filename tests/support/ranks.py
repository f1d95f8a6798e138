"""Starts the ranks of a training run as plain processes over gloo, and reads what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.state import SavedState
from pipeline.data.format import DatasetIndex
from tests.support import warm
from tests.support.processes import free_port
from tests.support.warm import Process

# Two ranks, two micro-batches each; dropout is on, so that its random numbers must be resumed too.
# A CPU that does not multiply bf16 takes twice as long for it; cases of its own are in bf16.
CONFIG = """
run_dir: unset
seed: 3
model:
  {num_layers: 2, hidden_size: 32, num_heads: 2, ffn_size: 64, score_residual: sum, init: unit}
data: {dir: unset, seq_len: 64, window_blocks: 2}
train:
  {num_steps: 40, global_batch: 8, micro_batch: 2, lr: 3e-3, warmup_steps: 5,
   alpha_warmup_steps: 10, precision: fp32, rate_may_rise: true}
checkpoint: {every_steps: 15, keep: 2}
monitor: {log_every_steps: 1, eval_every_steps: 20, eval_sequences: 16}
"""


Starter = Callable[..., list[Process]]  # of the fixture `start_command`: `start`, below


class Ranks:
    """The processes of one attempt."""

    def __init__(self, run_dir: Path, dataset: DatasetIndex, *overrides: str, world_size: int = 2,
                 module: tuple[str, ...] = ("-m", "pipeline"), prefix: tuple[str, ...] = (),
                 is_cold: bool = False) -> None:  # fmt: skip
        self.run_dir = run_dir
        config = run_dir.with_suffix(".yaml")
        config.write_text(CONFIG)
        self._output = run_dir.with_suffix(".out")
        arguments = [*module, "pretrain", str(config), f"run_dir={run_dir}"]
        arguments += [f"data.dir={dataset.folder}", *overrides]
        command = [*prefix, sys.executable, *arguments]
        self.processes = start(command, world_size, self._output, is_cold=is_cold)

    @property
    def output(self) -> str:
        """What all ranks of all attempts printed."""
        return self._output.read_text()

    def wait(self, timeout_s: float = 120) -> list[int]:
        deadline = time.monotonic() + timeout_s
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        finally:
            self.kill()

    def ended(self, code: int | list[int] = 0, timeout_s: float = 120) -> "Ranks":
        """Waits for all ranks, which must end with a code, or each with its own."""
        found = self.wait(timeout_s)
        assert found == (code if isinstance(code, list) else [code] * len(found)), self.output
        return self

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(record["step"] >= step for record in records(self.run_dir)):
            assert all(p.poll() is None for p in self.processes), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_checkpoint(self, step: int, timeout_s: float = 120) -> None:
        """Waits until that of a step, or a later one, is published, while training goes on."""
        deadline = time.monotonic() + timeout_s
        latest = self.run_dir / "checkpoints/latest"
        while not (latest.exists() and int(latest.read_text()[5:]) >= step):
            assert all(p.poll() is None for p in self.processes), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def signal(self, number: signal.Signals, rank: int | None = None) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            process.send_signal(number)


def start(
    command: list[str], world_size: int, output: Path, *, is_cold: bool = False
) -> list[Process]:
    """Starts a command on every rank, with the variables of its process group set.

    Ranks are forked with their imports done (`tests.support.warm`) where that is the same, unless
    `is_cold`.
    """
    port = free_port()
    processes: list[Process] = []
    for rank in range(world_size):
        variables = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                     "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        with output.open("a") as file:
            if not is_cold and warm.can_fork(command, variables):
                processes.append(warm.start(command, variables, file.fileno()))
                continue
            processes.append(
                subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
            )
    return processes


def finish(processes: list[Process], output: Path, timeout_s: float = 240) -> None:
    """Waits for the end of a command that `start` started, with 0 on every rank."""
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), output.read_text()


def records(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl of one kind."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
    return [record for record in found if record["kind"] == kind]


def losses(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(run_dir)}


def newest_state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, weights and optimizer state of all ranks, by name."""
    return state_of(sorted((run_dir / "checkpoints").glob("step-*"))[-1])


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that an engine saved below a folder, put together from its parts, by name."""
    saved = SavedState(folder)
    return {
        f"{kind} {name}": saved.read(kind, name).view(shape)
        for name, shape in saved.shapes.items()
        for kind in saved.kinds[name]
    }


def assert_same_bits(one: Path, other: Path) -> None:
    """Compare two saved states; that of a run is its newest checkpoint's."""
    first, second = (newest_state(folder) if (folder / "checkpoints").exists() else state_of(folder)
                     for folder in (one, other))  # fmt: skip
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
