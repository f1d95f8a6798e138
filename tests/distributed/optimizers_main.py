"""`python -m tests.distributed.optimizers_main FOLDER JOB ...`: steps with given gradients.

A job is the name of a case, which leaves in FOLDER/CASE, as `save_state` writes it:
    straight: the state after all steps
    resumed: the same of a fresh engine that loaded the state of the step before the last ones
or CASE:FROM:TO, which loads FOLDER/FROM (or nothing) and leaves FOLDER/TO, whose name is the number
of its steps.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.checkpoints.state import MASTER, SavedState
from pipeline.config.train import Optimizer, TrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from pipeline.train.optimizers import muon
from tests.distributed.engine_main import as_rank
from tests.support.checkpoints import save_state

NUM_MICRO_BATCHES = 4
WEIGHT_DECAY = 0.1
# Matrices across the borders of 2 and of 4 equal parts, and smaller than a part; one starts at 0,
# one has no gradient, as a pooler without a loss.
SHAPES = {"embedding": (37, 6), "bias": (7,), "query": (6, 6), "zero": (5, 3), "gain": (3,),
          "tiny": (1, 2), "output": (11, 6), "three": (9, 7), "unused": (4, 3)}  # fmt: skip
# Those inside layers, with the number of matrices that are stored as one.
HIDDEN = {"query": 1, "zero": 1, "tiny": 1, "output": 1, "three": 3}
NUM_HIDDEN = sum(HIDDEN.values())
# Rates of their own, as in fine-tuning.
LR_SCALES = {"query": 0.5, "bias": 0.5}
# Norms, and so ratios, of different sizes; vectors have none.
SCALES = {"embedding": 0.3, "query": 3.0, "output": 10.0}


@dataclass(frozen=True)
class Case:
    optimizer: Optimizer
    precision: str
    zero_stage: int = 1
    lamb_bias_correction: bool | None = None
    muon_momentum_warmup_steps: int = 0
    num_steps: int = 20

    @property
    def name(self) -> str:
        kind = {True: "-corrected", False: "-plain", None: ""}[self.lamb_bias_correction]
        kind += "-warmup" * bool(self.muon_momentum_warmup_steps)
        return f"{self.optimizer}{kind}-{self.precision}-stage-{self.zero_stage}"

    def config(self) -> TrainConfig:
        """Nothing of it but the optimizer matters."""
        values: dict[str, Any] = {"precision": self.precision}
        return TrainConfig(optimizer=self.optimizer, num_steps=self.num_steps, warmup_steps=1,
                           lamb_bias_correction=self.lamb_bias_correction,
                           muon_momentum_warmup_steps=self.muon_momentum_warmup_steps,
                           weight_decay=WEIGHT_DECAY, grad_clip=0.0, zero_stage=self.zero_stage,
                           **values)  # fmt: skip


CASES = [Case("lamb", "bf16", lamb_bias_correction=True),
         Case("muon", "fp32", 2, muon_momentum_warmup_steps=30, num_steps=100),
         Case("muon", "bf16"), Case("muon", "fp32", 0), Case("stable_adamw", "bf16"),
         Case("stable_adamw", "fp32", 0, num_steps=100), Case("muon", "bf16", 0),
         Case("muon", "bf16", 2), Case("muon", "fp32"), Case("stable_adamw", "bf16", 2),
         Case("lamb", "bf16", 2, lamb_bias_correction=False),
         Case("lamb", "bf16", 0, lamb_bias_correction=True),
         Case("lamb", "fp32", lamb_bias_correction=True)]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def learning_rate(step: int) -> float:
    return 1e-2 * (1 + step % 3)


def lr_scale(name: str) -> float:
    return LR_SCALES.get(name, 1.0)


def weights() -> dict[str, Tensor]:
    """Initial fp32 weights that bf16 can hold."""
    generator = torch.Generator().manual_seed(1)
    made = {
        name: torch.randn(shape, generator=generator).mul(SCALES.get(name, 0.1)).bfloat16().float()
        for name, shape in SHAPES.items()
    }
    made["zero"].zero_()
    made["three"][:3] *= 16  # the first of three
    return made


def gradient(step: int, micro_batch: int) -> dict[str, Tensor]:
    """fp32 gradient of a micro-batch; what starts at 0 has none at first, one of three jumps.

    Multiples of 1/16, so that sums are exact in any order, and in bf16.
    """
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    made = {
        name: torch.randint(-48, 49, shape, generator=generator) / 16
        for name, shape in SHAPES.items()
    }
    if step < 2:
        made["zero"].zero_()
    made["unused"].zero_()
    if step % 10 == 9:
        made["three"][:3] *= 8
    return made


def mean_gradient(step: int) -> dict[str, Tensor]:
    """float64 gradient of a step."""
    parts = [gradient(step, number) for number in range(NUM_MICRO_BATCHES)]
    return {name: torch.stack([each[name].double() for each in parts]).mean(0) for name in SHAPES}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_matrices = HIDDEN
        for name, value in weights().items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        products = [(w * gradients[n].to(w.dtype)).sum() for n, w in self.named_parameters()]
        return torch.stack(products).sum()


class _Products(MaskedLanguageModeling):
    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        loss = model(gradient(self._step, int(batch.input_ids)))
        return {"loss": Sum(loss, torch.ones(()))}


def micro_batch(number: int) -> MicroBatch:
    """Its number and one target: four of them make a scale that is exact."""
    nothing = torch.zeros(1, 1, dtype=torch.int32)
    return MicroBatch(input_ids=torch.tensor([[number]]), documents=nothing, positions=nothing,
                      segments=None, inputs={}, weights={"loss": 1.0}, counts={},
                      cu_seqlens=torch.zeros(1), num_tokens=1, hash=0)  # fmt: skip


def _engine(case: Case, process: ProcessInfo) -> Engine:
    return Engine(_Model(), case.config(), process, torch.device("cpu"), lr_scale)


def _run(case: Case, process: ProcessInfo, steps: range, engine: Engine) -> None:
    for step in steps:
        numbers = range(process.rank, NUM_MICRO_BATCHES, process.world_size)
        batches = [micro_batch(number) for number in numbers]
        result = engine.train_step(batches, _Products(step), learning_rate(step))
        assert result.applied, (case, step)
        # Not that of the update.
        norm = torch.cat([each.flatten() for each in mean_gradient(step).values()]).norm().item()
        assert result.grad_norm == pytest.approx(norm, rel=1e-6), (case, step)
    _require_no_padding(engine)


def _require_no_padding(engine: Engine) -> None:
    """What no parameter is of must stay zero, or norms of a partition would not be the model's."""
    held: dict[Tensor, dict[str, Tensor]] = {}
    for each in engine._slices():
        state = {MASTER: each.partition.detach()} | engine._optimizer.state_of(each.partition)
        left = held.setdefault(each.partition, {k: v.clone() for k, v in state.items() if v.ndim})
        for tensor in left.values():
            each.of(tensor).zero_()
    for kinds in held.values():
        assert not any(tensor.any() for tensor in kinds.values())


def main(folder: Path, case: Case, process: ProcessInfo) -> None:
    """Runs one case straight, and one resumed."""
    engine = _engine(case, process)
    last = range(case.num_steps - 5, case.num_steps)
    _run(case, process, range(last.start), engine)
    save_state(engine, folder / "before")
    _run(case, process, last, engine)
    save_state(engine, folder / "straight")
    engine = _engine(case, process)
    engine.load_files(folder / "before")
    _run(case, process, last, engine)
    save_state(engine, folder / "resumed")


def go_on(folder: Path, case: Case, loaded: str, saved: str, process: ProcessInfo) -> None:
    """Goes on from what any number of ranks left; counts who made a matrix orthogonal."""
    engine, calls = _engine(case, process), list[int]()
    if loaded:
        engine.load_files(folder / loaded)
    first = SavedState(folder / loaded).counters["updates"] if loaded else 0
    stop = int(Path(saved).name)
    original = muon.orthogonal

    def counted(matrix: Tensor, num_iterations: int) -> Tensor:
        calls.append(matrix.numel())
        return original(matrix, num_iterations)

    muon.orthogonal = counted
    _run(case, process, range(first, stop), engine)
    muon.orthogonal = original
    save_state(engine, folder / saved)
    of_ranks = dist.gather(len(calls))
    assert sum(of_ranks) == (stop - first) * NUM_HIDDEN, of_ranks
    assert max(of_ranks) < (stop - first) * NUM_HIDDEN or process.world_size == 1, of_ranks


if __name__ == "__main__":
    with as_rank() as this:
        for job in sys.argv[2:]:
            name, *more = job.split(":")
            if more:
                go_on(Path(sys.argv[1]), BY_NAME[name], *more, this)
            else:
                main(Path(sys.argv[1]) / name, BY_NAME[name], this)
