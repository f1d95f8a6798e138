"""How large gradient, update and weights are in each group of layers, from the ranks' partitions.

The optimizer's hooks see, on each rank, the summed and clipped gradient of its own part of the
master weights. Sums of squares of the parts add up over the ranks: nothing is gathered, and nothing
waits for the GPU.
"""

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pipeline.train.engine import Engine

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class GroupNorms:
    """Of one update."""

    gradient: float
    """L2 norm before clipping."""
    update_ratio: float
    """Norm of the change over that of the weights before it; the learning rate is in it."""


def group_of(parameter: str) -> str:
    """Return `embeddings`, `layer_00` and so on, or `head` for all after the last layer."""
    layer = _LAYER.match(parameter)
    if layer:
        return f"layer_{int(layer[1]):02d}"
    return "embeddings" if parameter.startswith("encoder.") and "embedding" in parameter else "head"


class LayerNorms:
    """Measures the update after `measure`, at the cost of a copy of this rank's master weights."""

    def __init__(self, engine: Engine, grad_clip: float) -> None:
        """Hook into the optimizer; without partitions there are no groups."""
        partitions = engine.partitions()
        # Within DeepSpeed's engine.
        names = {
            group_of(name.removeprefix("module.")) for name, _ in engine.model.named_parameters()
        }
        self.groups = sorted(names) if partitions else []
        self.sums = torch.zeros(len(self.groups), 3, dtype=torch.float64, device=engine.device)
        """(groups, 3) this rank's sums of squares: clipped gradient, update, weights before."""
        self._grad_clip = grad_clip
        self._spans = {id(flat): self._group_spans(places) for flat, places in partitions}
        self._before: dict[int, Tensor] = {}
        self._wanted = False
        if partitions:
            engine.optimizer.register_step_pre_hook(self._before_step)
            engine.optimizer.register_step_post_hook(self._after_step)

    def measure(self) -> None:
        """Measure the next update that is applied."""
        self.sums.zero_()
        self._wanted = True

    def done(self) -> None:
        """End a measurement after the step."""
        self._wanted = False

    def norms(self, sums: list[list[float]], grad_norm: float) -> dict[str, GroupNorms]:
        """Compute norms by group from `sums` over all ranks and the global norm before clipping."""
        # DeepSpeed scales the gradient by this where the norm is above the limit.
        clipped = max(1.0, (grad_norm + 1e-6) / self._grad_clip) if self._grad_clip else 1.0
        return {
            group: GroupNorms(gradient**0.5 * clipped, (update / weights) ** 0.5 if weights else 0)
            for group, (gradient, update, weights) in zip(self.groups, sums, strict=True)
        }

    def _group_spans(self, places: dict[str, tuple[int, int]]) -> list[tuple[int, int, int]]:
        """List (group, start, stop) of a partition, with neighbours of one group joined."""
        parts = sorted((*place, self.groups.index(group_of(n))) for n, place in places.items())
        spans = []
        for group, of_group in groupby(parts, key=lambda part: part[2]):
            run = list(of_group)
            spans.append((group, run[0][0], run[-1][1]))
        return spans

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for flat in self._wanted_of(optimizer):
            assert flat.grad is not None
            self._before[id(flat)] = flat.detach().clone()
            self._add(0, flat, flat.grad)
            self._add(2, flat, flat)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for flat in self._wanted_of(optimizer):
            self._add(1, flat, flat.detach() - self._before.pop(id(flat)))

    def _wanted_of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        # DeepSpeed takes the groups of parameters one by one, with this list cut to one of them.
        return [group["params"][0] for group in optimizer.param_groups] if self._wanted else []

    @torch.no_grad()
    def _add(self, column: int, flat: Tensor, values: Tensor) -> None:
        for group, start, stop in self._spans.get(id(flat), []):
            norm = torch.linalg.vector_norm(values[start:stop])
            self.sums[group, column] += norm.double().square()
