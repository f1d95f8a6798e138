"""Watches a run's health: norms by layer, and slow ranks.

Straggler: in each of three log intervals in a row, a rank's own work (waiting for data, and forward
and backward passes until the first collective) takes more than 1.25 times
the median of the other ranks, and at least a hundredth of the step longer.

Norms of gradient, update and weights by group of layers: on each rank the optimizer's hooks see the
summed and clipped gradient of its own part of the master weights. Sums of squares of the parts add
up over the ranks, so nothing is gathered and nothing waits for the GPU.
"""

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.model.architecture import OBJECTIVE_PARTS
from pipeline.train.engine import Engine
from pipeline.train.optimizer import squared_norm

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class GroupNorms:
    """Norms of one update in a group of layers."""

    gradient: float
    """L2 norm before clipping."""
    update_ratio: float
    """Norm of the change (with the learning rate) over the norm of the weights before it."""


def group_of(parameter: str) -> str:
    """Return `embeddings`, `layer_00` and so on, `head` for all after the last layer, or
    `objective` for what an objective has of its own.
    """
    layer = _LAYER.match(parameter)
    if layer:
        return f"layer_{int(layer[1]):02d}"
    if parameter.startswith(OBJECTIVE_PARTS):
        return "objective"
    return "embeddings" if parameter.startswith("encoder.") and "embedding" in parameter else "head"


class LayerNorms:
    """Measures the update after `measure`, at the cost of a copy of this rank's master weights."""

    def __init__(self, engine: Engine, grad_clip: float) -> None:
        """Hook into the optimizer; without partitions there are no groups."""
        partitions = engine.partitions()
        # Names inside DeepSpeed's engine begin with `module.`.
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
        # DeepSpeed divides the gradient by this if the norm is above the limit.
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
        # DeepSpeed updates one group of parameters at a time, with this list cut to that group.
        return [group["params"][0] for group in optimizer.param_groups] if self._wanted else []

    @torch.no_grad()
    def _add(self, column: int, flat: Tensor, values: Tensor) -> None:
        for group, start, stop in self._spans.get(id(flat), []):
            self.sums[group, column] += squared_norm(values[start:stop])


_STRAGGLER_FACTOR = 1.25
"""How many times the median of the other ranks a slow one takes. Below it, ranks that share a node
with other work would be named."""
_SLOW_INTERVALS = 3
_LEAST_SHARE = 0.01


class Stragglers:
    """Follows the ranks of one attempt, and warns of slow ones."""

    def __init__(self, hosts: list[str]) -> None:
        self._hosts = hosts
        self._slow = [0] * len(hosts)
        """Number of intervals in a row in which each rank was slow."""

    def look(
        self, wait_s: npt.NDArray[np.float64], compute_s: npt.NDArray[np.float64], step_s: float
    ) -> list[tuple[int, float, str]]:
        """Return the ranks to warn about, each with its factor and the text of the warning.

        A rank is in the list once, until it was as fast as the others for an interval.

        Times are (ranks,) seconds of a step: waiting for data, and passes until the first
        collective.
        """
        if len(self._hosts) < 2:
            return []
        own_s = wait_s + compute_s
        stragglers = []
        for rank, slow in enumerate(self._slow):
            others_s = float(np.median(np.delete(own_s, rank)))
            late_s = float(own_s[rank]) - others_s
            is_slow = late_s > (_STRAGGLER_FACTOR - 1) * others_s and late_s > _LEAST_SHARE * step_s
            self._slow[rank] = slow + 1 if is_slow else 0
            if self._slow[rank] == _SLOW_INTERVALS:
                factor = float(own_s[rank]) / others_s if others_s else float("inf")
                cause = "waiting for data" if wait_s[rank] > compute_s[rank] else "computing"
                text = (
                    f"rank {rank} on {self._hosts[rank]} needs {factor:.2f} times as long as the "
                    f"median of the other ranks, most of it {cause}: {own_s[rank] * 1e3:.1f} ms a "
                    f"step against {others_s * 1e3:.1f} ms, {_SLOW_INTERVALS} log intervals in a "
                    f"row. The others wait for it about {late_s / step_s:.0%} of the run's time. "
                    "Check the temperature, clock, other processes and storage of that node, or "
                    "exclude it"
                )
                stragglers.append((rank, factor, text))
        return stragglers
