"""What tests of interpreted kernels share: buffers full of NaN, dropout's rule, checkpointing."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

_WORD = 0xFFFFFFFF


def fill_buffers_with_nan(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a module's operators get buffers that are full of NaN."""

    def full(make: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(
            torch.full_like(each, torch.nan) if each.device.type == "cpu" else each
            for each in make(*arguments)
        )

    for name in ("_empty_results", "_empty_gradients"):
        monkeypatch.setattr(module, name, partial(full, getattr(module, name)))


def assert_neighbours_are_independent(kept: np.ndarray[Any, Any]) -> None:
    """Of masks that keep 9 of 10, along every axis."""
    centred = (kept - 0.9) / 0.3
    for axis in range(kept.ndim):
        one, other = np.delete(centred, 0, axis), np.delete(centred, -1, axis)
        assert abs((one * other).mean()) <= 5 / np.sqrt(one.size)


def checkpoint_ways(operator: Any) -> dict[str, tuple[Callable[..., Any], int]]:
    """How to call a layer with its inputs, and how often that runs an operator in both passes."""

    def policy(_: Any, called: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
        kinds = torch_checkpoint.CheckpointPolicy
        return kinds.MUST_SAVE if called == operator else kinds.PREFER_RECOMPUTE

    contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    return {
        "plain": (lambda layer, *inputs: layer(*inputs), 1),
        "not reentrant": (partial(checkpoint, use_reentrant=False), 2),
        "reentrant": (partial(checkpoint, use_reentrant=True), 2),
        "selective": (partial(checkpoint, use_reentrant=False, context_fn=contexts), 1),
    }


def assert_all_bits_are_the_same(found: dict[str, list[Tensor]]) -> None:
    """Of results in each of the ways."""
    for name, results in found.items():
        for one, other in zip(found["plain"], results, strict=True):
            assert torch.equal(one, other), name


def kept_by_rule(seed: int, rows: int, columns: int, dropout: float, head: int = 0) -> np.ndarray:
    """(rows, columns) bool: Philox4x32-7 for each row, then MurmurHash3's finaliser, keyed."""
    kept = np.zeros((rows, columns), bool)
    steps = np.arange(columns, dtype=np.uint64) * 0x9E3779B9
    for row in range(rows):
        c, key = [row, head, 0, 0], [seed & _WORD, seed >> 32]
        for _ in range(7):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ key[0], b & _WORD, (a >> 32) ^ c[3] ^ key[1], a & _WORD]
            key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
        bits = (c[0] + steps) & _WORD
        bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _WORD
        bits ^= c[1]
        bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _WORD
        kept[row] = (bits >> 8) >= round(dropout * (1 << 24))
    return kept
