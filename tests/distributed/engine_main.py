"""`python -m tests.distributed.engine_main FOLDER PRECISION`: steps whose micro-batches change.

Leaves in the folder, each as `save_state` writes it:
    straight/0 .. 6: the state before the first step and after each of them
    resumed/K: the last state of a fresh engine that loaded straight/K and took the other steps
    skipped: the state after straight/3 and a step with a NaN, of four micro-batches after one
    poisoned: the last state after that and steps four to six
and results-RANK.json, what `train_step` returned.
"""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.train import TrainConfig
from pipeline.data.loader import MicroBatch, document_bounds
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.env import ProcessInfo, process_info
from pipeline.train.engine import Engine, close_process_group, init_process_group
from tests.support.checkpoints import save_state

ACCUMULATION = (2, 3, 1, 4, 4, 2)
LENGTHS = (16, 16, 40, 40, 16, 40)
RESUMED_AFTER = (1, 3, 5)
POISONED_STEP = 3
GRAD_CLIP = 3.0
MODEL = ModelConfig(vocab_size=97, num_layers=2, hidden_size=32, num_heads=2, ffn_size=64,
                    score_residual="sum", bias=True, norm_affine=True, dropout=0.0,
                    attention_dropout=0.0)  # fmt: skip


def learning_rate(step: int) -> float:
    return 1e-3 * (1 + step)


def model(seed: int) -> nn.Module:
    """Weights that bf16 cannot hold: the master weights of both precisions start as these."""
    torch.manual_seed(seed)
    return MaskedLanguageModel(MODEL)


def train_config(precision: str) -> TrainConfig:
    """Clips some of the steps; batch sizes in it are not those of the steps."""
    return TrainConfig(
        num_steps=6, warmup_steps=1, global_batch=128, micro_batch=64, grad_clip=GRAD_CLIP,
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip


def micro_batches(step: int, world_size: int) -> list[MicroBatch]:
    """Those of all ranks, of 1 to 4 sequences; the first of the second step has nothing masked."""
    numbers = range(ACCUMULATION[step] * world_size)
    return [micro_batch(step, number, rows=1 + (step + number) % 4) for number in numbers]


def micro_batch(step: int, number: int, rows: int, length: int | None = None) -> MicroBatch:
    """`rows` sequences of which some slots are masked; other ones for each step and number."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    length = LENGTHS[step] if length is None else length
    slots = rows * length
    ids = torch.randint(MODEL.vocab_size or 0, (slots,), generator=generator)
    num_masked = 0 if (step, number) == (1, 0) else 1 + (3 * step + 5 * number) % (slots // 2)
    masked = torch.randperm(slots, generator=generator)[:num_masked].sort().values
    # Few targets, so that there is something to learn.
    targets = ids[masked] % 7
    shape = (rows, length)
    return MicroBatch(input_ids=ids.view(shape), documents=torch.ones(shape, dtype=torch.int32),
                      positions=torch.arange(length).expand(shape).contiguous(), segments=None,
                      inputs={"masked_index": masked, "targets": targets},
                      weights={"loss": float(len(targets))}, counts={},
                      cu_seqlens=torch.from_numpy(document_bounds(np.ones(shape, np.int32))),
                      num_tokens=slots, hash=0)  # fmt: skip


class Poisoned(MaskedLanguageModeling):
    """Gives an infinite loss with finite gradients in some of its calls, numbered from 1."""

    def __init__(self, which: set[int]) -> None:
        self.calls = 0
        self._which = which

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        self.calls += 1
        sums = super().__call__(model, batch)
        if self.calls not in self._which:
            return sums
        return {**sums, "loss": Sum(sums["loss"].total + float("inf"), sums["loss"].weight)}


class _Run:
    def __init__(self, precision: str, process: ProcessInfo, seed: int) -> None:
        self._process = process
        self.engine = Engine(model(seed), train_config(precision), process, torch.device("cpu"))

    def step(self, step: int, *, poisoned: bool = False) -> dict[str, float | bool]:
        batches = micro_batches(step, self._process.world_size)
        mine = batches[self._process.rank :: self._process.world_size]
        is_last = self._process.rank == self._process.world_size - 1
        objective = Poisoned({2} if poisoned and is_last else set())
        result = self.engine.train_step(mine, objective, learning_rate(step))
        assert objective.calls == ACCUMULATION[step]
        total, weight = (each.item() for each in result.sums["loss"])
        return {"applied": result.applied, "grad_norm": result.grad_norm, "loss": total,
                "weight": weight}  # fmt: skip


def main(folder: Path, precision: str, process: ProcessInfo) -> None:
    num_steps = len(ACCUMULATION)

    straight = _Run(precision, process, seed=1)
    save_state(straight.engine, folder / "straight/0")
    results: dict[str, list[dict[str, float | bool]]] = {"straight": [], "poisoned": []}
    for step in range(num_steps):
        results["straight"].append(straight.step(step))
        save_state(straight.engine, folder / f"straight/{step + 1}")

    for done in RESUMED_AFTER:
        resumed = _Run(precision, process, seed=2)
        resumed.engine.load_files(folder / f"straight/{done}")
        for step in range(done, num_steps):
            resumed.step(step)
        save_state(resumed.engine, folder / f"resumed/{done}")

    poisoned = _Run(precision, process, seed=2)
    poisoned.engine.load_files(folder / f"straight/{POISONED_STEP}")
    results["poisoned"].append(poisoned.step(POISONED_STEP, poisoned=True))
    save_state(poisoned.engine, folder / "skipped")
    for step in range(POISONED_STEP, num_steps):
        results["poisoned"].append(poisoned.step(step))
    save_state(poisoned.engine, folder / "poisoned")

    (folder / f"results-{process.rank}.json").write_text(json.dumps(results))


@contextmanager
def as_rank() -> Iterator[ProcessInfo]:
    """Be a rank of a process group while the block runs."""
    this = process_info()
    init_process_group(this)
    # DeepSpeed collects garbage a dozen times for each bf16 engine: not among all that is imported.
    gc.freeze()
    yield this
    close_process_group()


if __name__ == "__main__":
    with as_rank() as this:
        main(Path(sys.argv[1]), sys.argv[2], this)
