"""`python -m tests.distributed.norms_main FOLDER`: gradient norms of a step with given gradients.

Leaves FOLDER/PRECISION-STAGE-RANK.json: the global norm, and those of groups of layers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.config.train import TrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from pipeline.train.metrics import LayerNorms
from tests.distributed.engine_main import as_rank
from tests.distributed.optimizers_main import micro_batch

# As an embedding's: of 3 M squares, a sum in fp32 from end to end is wrong by 6e-5.
SHAPES = {"embeddings": (3000, 1000), "head": (101, 3)}
CASES = [(precision, stage) for precision in ("fp32", "bf16") for stage in range(4)]


def gradient(group: str) -> npt.NDArray[np.float32]:
    """Draw values that bf16 holds."""
    drawn = np.random.default_rng(len(group)).integers(-128, 128, SHAPES[group])
    return (drawn / 2**14).astype(np.float32)


class _Part(nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPES[group]))
        self._gradient = torch.from_numpy(gradient(group))

    def forward(self) -> Tensor:
        return (self.weight * self._gradient.to(self.weight.dtype)).sum()


class _Given(nn.Module):
    """A model whose gradient is `gradient`, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.token_embedding = _Part("embeddings")
        self.head = _Part("head")

    def forward(self) -> Tensor:
        return self.encoder.token_embedding() + self.head()  # type: ignore[operator]


class _Sum(MaskedLanguageModeling):
    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        return {"loss": Sum(model(), torch.ones(()))}


def main(folder: Path, process: ProcessInfo) -> None:
    for precision, stage in CASES:
        given: dict[str, Any] = {"precision": precision, "zero_stage": stage}
        config = TrainConfig(num_steps=2, warmup_steps=1, grad_clip=1.0, **given)
        engine = Engine(_Given(), config, process, torch.device("cpu"))
        layers = LayerNorms(engine, config.grad_clip)
        layers.measure()
        result = engine.train_step([micro_batch(0)], _Sum(), lr=1e-3)
        norms = layers.norms(dist.sum_over_ranks(layers.sums.clone()).tolist(), result.grad_norm)
        left = {"all": result.grad_norm} | {name: each.gradient for name, each in norms.items()}
        (folder / f"{precision}-{stage}-{process.rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    with as_rank() as this:
        main(Path(sys.argv[1]), this)
