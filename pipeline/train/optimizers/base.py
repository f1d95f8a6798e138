"""What a training engine asks of every optimizer, whatever stretches of parameters it holds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipeline.checkpoints.state import MOMENTS
from pipeline.config.train import TrainConfig
from pipeline.runtime import dist
from pipeline.train.optimizers.slices import TensorSlice


class PartitionedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of flat tensors, each of which holds stretches of parameters, and padding.

    State of each tensor: `step` (updates), and averages of the gradient by the names of `MOMENTS`.
    """

    hidden_apart: ClassVar[bool] = False
    """Whether the matrices inside layers have a rule of their own: their groups are `is_apart`."""

    def __init__(self, groups: list[dict[str, Any]], config: TrainConfig) -> None:
        """Take groups of `parameter_groups`."""
        betas = (config.adam_beta1, config.adam_beta2)
        super().__init__(groups, {"lr": config.lr, "betas": betas, "eps": config.adam_eps})
        self._matrices: dict[str, tuple[int, ...]] = {}
        self._index: dict[str, int] = {}
        self._pieces: dict[Tensor, list[TensorSlice]] = {}
        self._is_divided = False

    def bind(
        self, matrices: dict[str, tuple[int, ...]], pieces: list[TensorSlice], *, is_divided: bool
    ) -> None:
        """Set which matrices the groups' tensors are pieces of; before the first step. Collective.

        Args:
            matrices: shapes by name, in the same order on all ranks.
            pieces: this rank's pieces of them.
            is_divided: whether other ranks hold the other pieces, or every rank holds all.
        """
        self._matrices = matrices
        self._index = {name: number for number, name in enumerate(matrices)}
        self._pieces = {}
        for piece in pieces:
            self._pieces.setdefault(piece.partition, []).append(piece)
        self._is_divided = is_divided
        self._bound()

    def _bound(self) -> None:
        """Prepare what follows from the pieces. Collective."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient. Collective, without host synchronisation.

        DeepSpeed calls it once a step, or once a group.
        """
        assert closure is None, "no closure is used with DeepSpeed"
        assert self._matrices, "bind comes before the first step"
        self._update(self.param_groups)

    @abstractmethod
    def _update(self, groups: list[dict[str, Any]]) -> None:
        """Update the tensors of groups."""

    def moments_of(self, group: dict[str, Any]) -> Sequence[str]:
        """Name the averages that tensors of a group have, of `MOMENTS`."""
        return MOMENTS

    def state_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the state of a tensor; before the first update, what it begins with."""
        state: dict[str, Tensor] = self.state[flat]
        if not state:
            # At ZeRO stage 3 a group has its tensors only while it is updated.
            of_flat = (g for g in self.param_groups if any(flat is each for each in g["params"]))
            group: dict[str, Any] = next(of_flat, {})
            state["step"] = self._counter(flat, group)
            for kind in self.moments_of(group):
                state[kind] = torch.zeros_like(flat, requires_grad=False)
        return state

    def _counter(self, flat: Tensor, group: dict[str, Any]) -> Tensor:
        """Make the 0-dimensional count of updates: on the host, where it is read."""
        return torch.zeros(())

    def _squared_norms(self, held: Sequence[tuple[Tensor, Sequence[Tensor]]], num: int) -> Tensor:
        """Compute the squared norms of whole matrices, (num, matrices) float64. Collective.

        Args:
            held: tensors of this optimizer, each with `num` tensors laid out like it. A rank may
                hold no piece of a matrix; what is held nowhere counts as 0.
            num: norms of each matrix.
        """
        # All are on one device.
        [device] = {flat.device for group in self.param_groups for flat in group["params"]}
        squares = torch.zeros(num, len(self._matrices), dtype=torch.float64, device=device)
        for flat, tensors in held:
            for piece in self._pieces.get(flat, []):
                for row, tensor in zip(squares, tensors, strict=True):
                    norm = torch.linalg.vector_norm(piece.of(tensor), dtype=torch.float64)
                    row[self._index[piece.name]] += norm.square()
        return dist.sum_over_ranks(squares) if self._is_divided else squares


def update_averages(
    state: dict[str, Tensor], gradient: Tensor, betas: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Count an update, and take a gradient into the averages of it and of its square."""
    mean, square = (state[kind] for kind in MOMENTS)
    state["step"] += 1
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return mean, square
