"""The ways in which activation checkpointing may call layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def checkpoint_ways(operator: Any) -> dict[str, tuple[Callable[..., Any], int]]:
    """How to call a layer with its inputs, and how often that runs an operator in both passes.

    Args:
        operator: overload of it; selective checkpointing keeps what it returns.
    """

    def policy(_: Any, called: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = called == operator
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    selective = partial(
        checkpoint, use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )  # fmt: skip
    return {
        "plain": (lambda layer, *inputs: layer(*inputs), 1),
        "not reentrant": (partial(checkpoint, use_reentrant=False), 2),
        "reentrant": (partial(checkpoint, use_reentrant=True), 2),
        "selective": (selective, 1),
    }
