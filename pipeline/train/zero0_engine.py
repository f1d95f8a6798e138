"""ZeRO stage 0: every rank has all master weights and optimizer state, and updates all of them.

DeepSpeed 0.19.8 lacks such an engine for bf16 with fp32 accumulation, and in fp32 it applies
gradients that are not finite. This one has those methods of DeepSpeed's engine that
`pipeline/train/engine.py` uses, and computes the same as stages 1 and 2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.train import TrainConfig
from pipeline.runtime import dist
from pipeline.train.optimizers.slices import BLOCK, TensorSlice, squared_norm


class Replicated(nn.Module):
    """A model in bf16 or fp32, fp32 master weights and sums of gradients, and their optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        """Copy rank 0's weights to every rank; the optimizer then updates flat master weights."""
        super().__init__()
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.module = model.to(device, dtype)
        self.optimizer = optimizer
        self.global_steps = self.skipped_steps = 0
        self._num_ranks = num_ranks
        self.grad_clip = config.grad_clip
        self._applied, self._norm = False, 0.0
        self._groups = [_Group(group) for group in optimizer.param_groups]
        self._tasks: TaskGradients | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def zero_optimization_stage(self) -> int:
        """Return 0, the stage."""
        return 0

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank, in fp32."""
        loss.backward()  # type: ignore[no-untyped-call]

    def task_gradients(self, is_shared: Callable[[str], bool]) -> "TaskGradients":
        """Begin a step whose tasks' gradients are weighted one by one."""
        if self._tasks is None:
            self._tasks = TaskGradients(self.module, self._groups, self._num_ranks, is_shared)
        self._tasks.begin()
        return self._tasks

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients over the ranks, clip them, and update. Collective."""
        if self._tasks is None or not self._tasks.are_averaged:
            _average(self._groups, self._num_ranks)
        squares = [squared_norm(group.sums) for group in self._groups]
        norm = torch.stack(squares).sum().sqrt().item()  # sync
        # False for NaN, too.
        self._applied = norm < float("inf")
        self._norm = norm if self._applied else float("inf")
        self.global_steps += 1
        # All ranks see the same mean: if it is not finite, no rank changes anything.
        if self._applied:
            # The same factor as DeepSpeed's if the norm is above the limit.
            too_long = (norm + 1e-6) / self.grad_clip if self.grad_clip else 0.0
            for group in self._groups:
                group.master.grad = group.sums.div_(max(1.0, too_long))
            self.optimizer.step()
            self.round_masters()
        else:
            self.skipped_steps += 1
        for group in self._groups:
            group.sums.zero_()
        if self._tasks is not None:
            self._tasks.are_averaged = False

    def get_global_grad_norm(self) -> float:
        """Return the norm of the last step before clipping; infinite if it was skipped."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Return whether the last step changed the weights."""
        return self._applied

    @torch.no_grad()
    def round_masters(self) -> None:
        """Copy the master weights, rounded, into the weights of forward passes."""
        for group in self._groups:
            group.weights.copy_(group.master)

    def slices(self, shapes: dict[str, tuple[int, ...]]) -> list[TensorSlice]:
        """Return a slice for each whole parameter."""
        return [
            TensorSlice(name, shapes[name], 0, parameter.numel(), group.master, offset)
            for name, parameter in self.module.named_parameters()
            for group in self._groups
            if (offset := group.offsets.get(parameter)) is not None
        ]


class _Group:
    """The parameters of an optimizer's group, end to end."""

    def __init__(self, group: dict[str, Any]) -> None:
        parameters: list[nn.Parameter] = group["params"]
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.weights = dist.tensor_from_first(flat)
        """(elements,): the memory that the parameters are views of."""
        # In fp32 these are the weights themselves.
        self.master = flat.detach().float().requires_grad_()
        self.sums = torch.zeros_like(self.master, requires_grad=False)
        self.offsets: dict[nn.Parameter, int] = {}
        offset = 0
        for parameter in parameters:
            parameter.data = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._take_gradient
            )
            self.offsets[parameter] = offset
            offset += parameter.numel()
        group["params"] = [self.master]

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.sums.narrow(0, self.offsets[parameter], parameter.numel()).add_(
            parameter.grad.flatten()
        )
        # At once: autograd would add the next micro-batch's in bf16, and keep both in memory.
        parameter.grad = None


def _average(groups: Sequence[_Group], num_ranks: int) -> None:
    if num_ranks == 1:
        return
    for group in groups:
        dist.sum_over_ranks(group.sums).div_(num_ranks)


_BLOCKS = 1 << 8
"""Blocks of several tasks that are stacked at once."""


def _products(rows: Sequence[Tensor]) -> Tensor:
    """(n, n) float64 products of n flat tensors of equal size."""
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    whole = rows[0].numel() // BLOCK * BLOCK
    for at in range(0, whole, BLOCK * _BLOCKS):
        stop = min(whole, at + BLOCK * _BLOCKS)
        blocks = torch.stack([row[at:stop].view(-1, BLOCK) for row in rows], 1)
        gram += (blocks @ blocks.mT).double().sum(0)
    rest = torch.stack([row[whole:] for row in rows]).double()
    gram += rest @ rest.T
    return gram


class TaskGradients:
    """The gradients of the tasks of a step, one after another or side by side.

    Between `begin` and `finish` the sums of the groups hold the gradient of one task.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[_Group],
        num_ranks: int,
        is_shared: Callable[[str], bool],
    ) -> None:
        """Find the shared parameters: norms and products are theirs alone."""
        self.are_averaged = False
        """Whether the sums are means over the ranks already."""
        self._groups, self._num_ranks = groups, num_ranks
        self._totals = [torch.zeros_like(group.sums) for group in groups]
        self._kept: list[list[Tensor]] = []
        self._shared: list[list[tuple[int, int]]] = [[] for _ in groups]
        """(start, stop) of the shared elements of each group."""
        for name, parameter in module.named_parameters():
            for group, places in zip(groups, self._shared, strict=True):
                offset = group.offsets.get(parameter)
                if offset is None or not is_shared(name):
                    continue
                stop = offset + parameter.numel()
                if places and places[-1][1] == offset:
                    offset = places.pop()[0]
                places.append((offset, stop))

    def begin(self) -> None:
        """Begin a step."""
        self.are_averaged = False
        self._kept = []

    def average(self) -> None:
        """Make the task's gradient the mean over the ranks. Collective."""
        _average(self._groups, self._num_ranks)
        self.are_averaged = True

    @torch.no_grad()
    def norm(self) -> Tensor:
        """0-dimensional float64 norm of the task's gradient of the shared parameters."""
        squares = [
            squared_norm(group.sums[start:stop])
            for group, places in zip(self._groups, self._shared, strict=True)
            for start, stop in places
        ]
        return torch.stack(squares).sum().sqrt()

    @torch.no_grad()
    def add(self, weight: Tensor) -> None:
        """Add the task's gradient to the step's, times a 0-dimensional weight on the device."""
        for group, total in zip(self._groups, self._totals, strict=True):
            total.addcmul_(group.sums, weight.to(total.dtype))
            group.sums.zero_()

    def keep(self) -> None:
        """Put the task's gradient aside."""
        self._kept.append([group.sums.clone() for group in self._groups])
        for group in self._groups:
            group.sums.zero_()

    @torch.no_grad()
    def products(self) -> Tensor:
        """(tasks, tasks) float64 products of the gradients put aside, of shared parameters."""
        parts = [
            _products([kept[which][start:stop] for kept in self._kept])
            for which, places in enumerate(self._shared)
            for start, stop in places
        ]
        return torch.stack(parts).sum(0)

    @torch.no_grad()
    def combine(self, coefficients: Sequence[float], others: float) -> None:
        """Make the step's gradient of those put aside.

        Args:
            coefficients: of the tasks, for shared parameters.
            others: of all tasks, for the parameters of their heads.
        """
        for which, places in enumerate(self._shared):
            total = self._totals[which]
            for kept, coefficient in zip(self._kept, coefficients, strict=True):
                gradient = kept[which]
                at = 0
                for start, stop in [*places, (total.numel(), total.numel())]:
                    total[at:start].add_(gradient[at:start], alpha=others)
                    total[start:stop].add_(gradient[start:stop], alpha=coefficient)
                    at = stop
        self._kept = []

    @torch.no_grad()
    def finish(self, factor: Tensor | float = 1.0) -> None:
        """Give the step's gradient, times a factor, to the update."""
        for which, group in enumerate(self._groups):
            # Exchanged, not copied: the sums were zeroed behind the last task, and are the next
            # step's totals.
            group.sums, self._totals[which] = self._totals[which].mul_(factor), group.sums
