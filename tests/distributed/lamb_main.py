"""`python -m tests.distributed.lamb_main FOLDER CASE ...`: steps of LAMB with given gradients.

Leaves in FOLDER/CASE, as `save_state` writes it:
    straight: the state after all steps
    resumed: with bias correction, the same of a fresh engine that loaded the state after half
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.train import TrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from tests.distributed.engine_main import as_rank
from tests.support.checkpoints import save_state

NUM_STEPS = 20
NUM_MICRO_BATCHES = 4
WEIGHT_DECAY = 0.1
# Matrices across the borders of 2 and of 4 equal parts, and smaller than a part; one starts at 0.
SHAPES = {"embedding": (37, 6), "bias": (7,), "query": (6, 6), "zero": (5, 3), "gain": (3,),
          "tiny": (1, 2), "output": (11, 6), "three": (9, 7)}  # fmt: skip
# Matrices stored as one.
STACKED = {"three": 3}
# Norms, and so ratios, of different sizes; vectors have none.
SCALES = {"embedding": 0.3, "query": 3.0, "output": 10.0}


@dataclass(frozen=True)
class Case:
    precision: str
    bias_correction: bool
    zero_stage: int = 1

    @property
    def name(self) -> str:
        kind = "corrected" if self.bias_correction else "plain"
        return f"{self.precision}-{kind}-stage-{self.zero_stage}"

    def config(self) -> TrainConfig:
        """Nothing of it but the optimizer matters."""
        values: dict[str, Any] = {"precision": self.precision}
        return TrainConfig(optimizer="lamb", lamb_bias_correction=self.bias_correction,
                           num_steps=NUM_STEPS, warmup_steps=1, weight_decay=WEIGHT_DECAY,
                           grad_clip=0.0, zero_stage=self.zero_stage, **values)  # fmt: skip


CASES = [Case("fp32", bias_correction=True), Case("bf16", bias_correction=True),
         Case("bf16", bias_correction=False, zero_stage=2),
         Case("bf16", bias_correction=True, zero_stage=0)]  # fmt: skip


def learning_rate(step: int) -> float:
    return 1e-2 * (1 + step % 3)


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
    """fp32 gradient of a micro-batch that bf16 can hold; what starts at 0 has none at first."""
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made = {name: each.bfloat16().float() for name, each in drawn.items()}
    if step < 2:
        made["zero"].zero_()
    return made


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacked = STACKED
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


def _run(case: Case, process: ProcessInfo, steps: range, engine: Engine) -> None:
    for step in steps:
        numbers = range(process.rank, NUM_MICRO_BATCHES, process.world_size)
        batches = [micro_batch(number) for number in numbers]
        result = engine.train_step(batches, _Products(step), learning_rate(step))
        assert result.applied, (case, step)


def main(folder: Path, case: Case, process: ProcessInfo) -> None:
    """Runs one case straight, and one resumed if the number of updates matters to it."""
    engine = Engine(_Model(), case.config(), process, torch.device("cpu"))
    _run(case, process, range(NUM_STEPS // 2), engine)
    save_state(engine, folder / "half")
    _run(case, process, range(NUM_STEPS // 2, NUM_STEPS), engine)
    save_state(engine, folder / "straight")
    if not case.bias_correction:
        return
    engine = Engine(_Model(), case.config(), process, torch.device("cpu"))
    engine.load_files(folder / "half")
    _run(case, process, range(NUM_STEPS // 2, NUM_STEPS), engine)
    save_state(engine, folder / "resumed")


if __name__ == "__main__":
    with as_rank() as this:
        for case in (case for case in CASES if case.name in sys.argv[2:]):
            main(Path(sys.argv[1]) / case.name, case, this)
