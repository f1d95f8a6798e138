"""ZeRO stage 0: every rank has all master weights and optimizer state, and updates all of them.

DeepSpeed 0.19.8 lacks such an engine for bf16 with fp32 accumulation, and in fp32 it applies
gradients that are not finite. This one has those methods of DeepSpeed's engine that
`pipeline/train/engine.py` uses, and computes the same as stages 1 and 2.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.train import TrainConfig
from pipeline.runtime import dist
from pipeline.train.optimizer import TensorSlice


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
        self._grad_clip = config.grad_clip
        self._applied, self._norm = False, 0.0
        self._groups = [_Group(group) for group in optimizer.param_groups]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def zero_optimization_stage(self) -> int:
        """Return 0, the stage."""
        return 0

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank, in fp32."""
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients over the ranks, clip them, and update. Collective.

        If the mean is not finite, no rank changes anything: all ranks see the same mean.
        """
        for group in self._groups:
            dist.sum_over_ranks(group.sums).div_(self._num_ranks)
        norms = [torch.linalg.vector_norm(group.sums) for group in self._groups]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item()  # sync
        self._applied = norm < float("inf")
        self._norm = norm if self._applied else float("inf")
        self.global_steps += 1
        if self._applied:
            # The same factor as DeepSpeed's if the norm is above the limit.
            too_long = (norm + 1e-6) / self._grad_clip if self._grad_clip else 0.0
            for group in self._groups:
                group.master.grad = group.sums.div_(max(1.0, too_long))
            self.optimizer.step()
            self.round_masters()
        else:
            self.skipped_steps += 1
        for group in self._groups:
            group.sums.zero_()

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
        parameter.grad = None
