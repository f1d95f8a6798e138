"""`python -m tests.distributed.faulty_main FAULT pretrain ...`: training with a fault in it.

breaking: after a step with a micro-batch whose hash is in BREAK_HASHES (separated by commas), an
    element of a moment on the rank that has it is NaN.
clock: each look at the clock takes 1 s, and on rank 1 2 s: ranks that went by their own clocks
    would not agree.
dying: rank 1 dies when it saves; its file is written by then, it has trained on, and nothing is
    published.
flipping: FLIP is RANK STEP TIMES; after that step on that rank, the first so many times that it is
    taken, a low bit of an element of FLIPPED differs.
frozen: in the second step all ranks write the timeouts of their process groups to a file beside the
    run's folder; in the third, rank 1 stops itself with SIGSTOP when its gradient is computed,
    before the ranks add theirs.
poisoned: POISON_RANK computes a NaN in its POISON_CALLS-th micro-batches (separated by commas, or
    `all`), as the loss, or in the gradients of POISON_PARAMETERS (separated by commas).
saving: rank 1 waits for the file GATE before it ends a save; files of the save after SPOILED
    updates change on the disk after they were written and hashed.
spiking: a step with a micro-batch whose hash is in SPIKE_HASHES (separated by commas) is taken with
    a learning rate that is a thousand times as high, whichever step it is.
storage: each rank's flushes and renames of what is in checkpoints/ or the ledger fail with ESTALE,
    EIO and ETIMEDOUT in turn, STORAGE_TIMES times from the first save after step STORAGE_FROM on;
    the pauses before another try are not made.
slow: rank 1 says that it computed for days. What ranks measure of themselves is replaced, so no
    test depends on how fast they really were.
"""

import errno
import json
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from pipeline.checkpoints import background
from pipeline.checkpoints.background import Described, RankFiles
from pipeline.checkpoints.manifest import state_file
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist, files
from pipeline.train.engine import Engine
from pipeline.train.timing import Clock, LocalComputeTimer

SLOW_S, FAST_S = 1e6, 1e3
NAN = float("nan")
FLIPPED = "encoder.token_embedding.weight"


def _rank() -> int:
    return int(os.environ["RANK"])


def _break(original: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(self: Engine, batches: Any, *rest: Any) -> Any:
        result = original(self, batches, *rest)
        parts, _ = self.state_parts()
        wanted = {int(text) for text in os.environ["BREAK_HASHES"].split(",")}
        if any(batch.hash in wanted for batch in batches):
            parts[0].tensors["exp_avg"][3] = NAN
        return result

    return train_step


def _flip(original: Callable[..., Any]) -> Callable[..., Any]:
    flips = 0

    def train_step(self: Engine, *rest: Any) -> Any:
        nonlocal flips
        result = original(self, *rest)
        rank, step, times = map(int, os.environ["FLIP"].split())
        steps_taken = self.state_parts()[1]["global_steps"]
        if rank == _rank() and steps_taken == step and flips < times:
            flips += 1
            flat = dict(self.replicas())[FLIPPED].view(-1)
            bits = flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int16)
            bits[7] ^= 1 << 3
        return result

    return train_step


def _spike(original: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(self: Engine, batches: Any, objective: Any, lr: float, *rest: Any) -> Any:
        wanted = {int(text) for text in os.environ["SPIKE_HASHES"].split(",")}
        if any(dist.gather(any(batch.hash in wanted for batch in batches))):
            lr *= 1000
        return original(self, batches, objective, lr, *rest)

    return train_step


def _start_clock(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, elapsed_s: setattr(self, "_start_s", elapsed_s)


def _read_clock(_: Callable[..., Any]) -> Callable[..., Any]:
    def read_s(self: Clock) -> float:
        self._start_s += 1.0 + _rank()
        return self._start_s

    return read_s


def _die(original: Callable[..., Any]) -> Callable[..., Any]:
    assert RankFiles.write.__globals__["_described"] is original

    def described(path: object) -> object:
        if _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path)

    return described


def _freeze(original: Callable[..., Any]) -> Callable[..., Any]:
    steps = 0

    def end(self: LocalComputeTimer) -> None:
        nonlocal steps
        original(self)
        steps += 1  # once a step at ZeRO stage 1
        if steps == 2:
            found = [
                group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                for group in distributed_c10d._world.pg_map
            ]
            [run_dir] = [Path(text[8:]) for text in sys.argv if text.startswith("run_dir=")]
            name = f"timeouts-{run_dir.name}-{_rank()}"
            (run_dir.parent / name).write_text(json.dumps(found))
        if steps == 3 and _rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    return end


def _poison(original: Callable[..., Any]) -> Callable[..., Any]:
    calls, hooks = 0, []

    def call(self: MaskedLanguageModeling, model: torch.nn.Module, batch: Any) -> Sums:
        nonlocal calls
        while hooks:
            hooks.pop().remove()
        sums = original(self, model, batch)
        calls += torch.is_grad_enabled()
        wanted = os.environ["POISON_CALLS"]
        here = torch.is_grad_enabled() and os.environ["POISON_RANK"] == str(_rank())
        if not here or (wanted != "all" and str(calls) not in wanted.split(",")):
            return sums
        if names := os.environ.get("POISON_PARAMETERS"):
            named = dict(getattr(model, "module", model).named_parameters())
            hooks.extend(named[n].register_hook(lambda g: g * NAN) for n in names.split(","))
            return sums
        return {**sums, "loss": Sum(sums["loss"].total * NAN, sums["loss"].weight)}

    return call


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    def write(files: RankFiles) -> Described:
        written = original(files)
        if str(files.counters["updates"]) == os.environ.get("SPOILED"):
            path = files.folder / state_file(files.rank, files.world_size)
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        while "GATE" in os.environ and files.rank == 1 and not Path(os.environ["GATE"]).exists():
            time.sleep(0.01)
        return written

    return write


def _fail_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    left = int(os.environ["STORAGE_TIMES"])
    files.PAUSES_S = (0.0,) * 4

    def failing(first: Any, *rest: Any) -> Any:
        nonlocal left
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        step = re.search(r"saving-step-(\d+)", path)
        is_meant = (step and int(step[1]) >= int(os.environ["STORAGE_FROM"])) or "ledger" in path
        if left and is_meant:
            left -= 1
            number = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)[left % 3]
            raise OSError(number, os.strerror(number), path)
        return original(first, *rest)

    return failing


def _slow_down(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: SLOW_S if _rank() == 1 else FAST_S


# By the name of a fault: what is replaced, and how that is made of the original.
FAULTS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "breaking": [(Engine, "train_step", _break)],
    "clock": [(Clock, "__init__", _start_clock), (Clock, "read_s", _read_clock)],
    "dying": [(background, "_described", _die)],
    "flipping": [(Engine, "train_step", _flip)],
    "frozen": [(LocalComputeTimer, "end", _freeze)],
    "poisoned": [(MaskedLanguageModeling, "__call__", _poison)],
    "storage": [(os, "fsync", _fail_storage), (os, "replace", _fail_storage)],
    "saving": [(RankFiles, "write", _save)], "slow": [(LocalComputeTimer, "take_s", _slow_down)],
    "spiking": [(Engine, "train_step", _spike)],
}  # fmt: skip


if __name__ == "__main__":
    for owner, name, make in FAULTS[sys.argv.pop(1)]:
        setattr(owner, name, make(getattr(owner, name)))
    runpy.run_module("pipeline", run_name="__main__")
