"""Which kernels compute attention by carried scores, with which tiles: all that is launched.

Letters as in `carried_kernels`. A launch is data, so that the same can be compiled ahead of time
for a GPU that is not there.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.kernels import carried_kernels as kernels
from pipeline.kernels.dropping import RANDOM_VALUES
from pipeline.kernels.launch import Launch
from pipeline.kernels.turn_kernels import turn_kernel
from pipeline.kernels.windows import WINDOW_LIMIT

Tensors = Mapping[str, Tensor | None]
"""By the names that the kernels give them."""
_LOG2_E = math.log2(math.e)


class Numbers(NamedTuple):
    """What is not a tensor."""

    longest: int
    """Tokens of the longest window, or more."""
    scale: float
    """Of q k^T."""
    temperature: float
    """The softmax is over scores times this."""
    dropout: float
    """Probability of dropping a probability."""


class Tile(NamedTuple):
    """What a program works on at a time, and with what."""

    queries: int
    keys: int
    warps: int
    stages: int


def turn(tensors: Tensors) -> Launch:
    """Fills `turned`.

    Args:
        tensors: `qkv`, `turned`, `cos` and `sin` or None, `token_scale` or None.
    """
    num_tokens, _, num_heads, head_size = _shape(tensors, "qkv")
    constants = _of_turn(tensors) | {"H": head_size, "BLOCK": 16}
    known = {**tensors, "num_tokens": num_tokens, "num_heads": num_heads}
    arguments = {name: known[name] for name in turn_kernel.arg_names if name not in constants}
    return Launch(turn_kernel, -(-num_tokens // 16), arguments, constants, 4, 3)


def forward(tensors: Tensors, numbers: Numbers) -> Launch:
    """Fills `scores`, `out` and `lse`.

    Args:
        tensors: `q`, `k`, `v`, `carry` or None, `scores`, `out`, `lse`, `spans`, `bounds`, and
            `seed`, None without dropout.
        numbers: of the layer.
    """
    constants = {"HAS_CARRY": tensors["carry"] is not None, "DROPS": numbers.dropout > 0}
    width, head_size = _shape(tensors, "scores")[-1], _shape(tensors, "q")[-1]
    tile = _forward_tile(width, head_size)
    return _by_blocks(kernels.forward_kernel, tensors, numbers, constants, tile, tile.queries)


def backward(tensors: Tensors, numbers: Numbers, capability: tuple[int, int]) -> Iterator[Launch]:
    """Fills `dq`, `dk`, `dv` and `d_carry`, one launch after another.

    Args:
        tensors: those of `forward` and of `turn`, of whose `carry` only counts whether there is
            one, with `d_out`, `d_scores` or None, `dq`, `dk`, `dv`, which are parts of one
            (T, 3, N, H), and `d_carry`, which in a first layer that `takes_window` stays as it is.
        numbers: of the layer.
        capability: compute capability of the GPU.
    """
    constants: dict[str, Any] = {
        "HAS_D": tensors["d_scores"] is not None,
        "DROPS": numbers.dropout > 0,
    }
    turns = _of_turn(tensors)
    width, head_size = _shape(tensors, "scores")[-1], _shape(tensors, "q")[-1]
    if takes_window(width, head_size, numbers.dropout, capability):
        constants |= turns | {"HAS_CARRY": tensors["carry"] is not None, "BLOCK": width}
        programs = _shape(tensors, "lse")[0] * (_shape(tensors, "bounds")[0] - 1)
        kernel = kernels.backward_window_kernel
        yield _launch(kernel, tensors, numbers, constants, programs, 8 if width > 64 else 4, 1)
        return
    lse = tensors["lse"]
    assert lse is not None
    tensors = {**tensors, "delta": torch.empty_like(lse)}
    programs = -(-lse.numel() // 64)
    yield _launch(kernels.delta_kernel, tensors, numbers, {"BLOCK": 64}, programs, 4, 1)
    tile = _keys_tile(width, head_size, capability)
    kernel = kernels.backward_keys_kernel
    constants |= {"TURNS": turns["TURNS"]}
    yield _by_blocks(kernel, tensors, numbers, constants, tile, tile.keys)
    tile = _queries_tile(width, head_size)
    kernel = kernels.backward_queries_kernel
    yield _by_blocks(kernel, tensors, numbers, turns, tile, tile.queries)


def takes_window(width: int, head_size: int, dropout: float, capability: tuple[int, int]) -> bool:
    """Whether backward takes a window in one program: where its registers suffice."""
    if head_size == 128 or width > WINDOW_LIMIT:
        return False
    return width <= 64 or (dropout == 0 and _is_hopper(capability))


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; the interpreter goes Hopper's way."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _of_turn(tensors: Tensors) -> dict[str, bool]:
    return {
        "TURNS": tensors["cos"] is not None,
        "SCALES": tensors["token_scale"] is not None,
    }


def _is_hopper(capability: tuple[int, int]) -> bool:
    """Whether matrix instructions take operands from shared memory, 64 rows or more at a time."""
    return capability[0] in (9, 10)


# Without spilled registers for bf16 on sm_80 and sm_90, with and without dropout.
def _forward_tile(width: int, head_size: int) -> Tile:
    if head_size == 128:
        return Tile(128, min(width, 32), 8, 2)
    return Tile(width, width, 4, 1) if width <= 64 else Tile(128, 64, 8, 2)


def _keys_tile(width: int, head_size: int, capability: tuple[int, int]) -> Tile:
    queries = min(width, 64)
    if head_size == 128:
        return Tile(queries, min(width, 32), 8, 1)
    if _is_hopper(capability):
        return Tile(queries, min(width, 64), 8, 2)
    return Tile(queries, min(width, 32), 4, 2)


def _queries_tile(width: int, head_size: int) -> Tile:
    keys = min(width, 64)
    return Tile(128, keys, 8, 2) if head_size == 128 else Tile(128, keys, 4, 3)


def _by_blocks(
    kernel: Any, tensors: Tensors, numbers: Numbers, constants: dict[str, Any], tile: Tile,
    block: int,
) -> Launch:  # fmt: skip
    """A program for each head and block of a window, as many as the longest window has."""
    num_blocks = -(-numbers.longest // block)
    programs = num_blocks * _shape(tensors, "lse")[0] * (_shape(tensors, "bounds")[0] - 1)
    constants = constants | {"BLOCK_Q": tile.queries, "BLOCK_K": tile.keys}
    return _launch(kernel, tensors, numbers, constants, programs, *tile[2:], num_blocks)


def _launch(
    kernel: Any, tensors: Tensors, numbers: Numbers, constants: dict[str, Any], programs: int,
    warps: int, stages: int, num_blocks: int = 1,
) -> Launch:  # fmt: skip
    """Gives a kernel what it names."""
    num_heads, num_tokens = _shape(tensors, "lse")
    known: dict[str, Any] = {
        **tensors,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "num_blocks": num_blocks,
        "width": _shape(tensors, "scores")[-1],
        "scale": numbers.scale,
        "temperature": numbers.temperature,
        "log2_temperature": numbers.temperature * _LOG2_E,
        "threshold": round(numbers.dropout * RANDOM_VALUES),
        "keep_scale": 1.0 / (1.0 - numbers.dropout),
    }
    for name in ("q", "k", "v"):
        tensor = tensors[name]
        assert tensor is not None
        known |= {f"{name}_token": tensor.stride(0), f"{name}_head": tensor.stride(1)}
    constants = {**constants, "H": _shape(tensors, "q")[-1]}
    arguments = {name: known[name] for name in kernel.arg_names if name not in constants}
    return Launch(kernel, programs, arguments, constants, warps, stages)


def _shape(tensors: Tensors, name: str) -> torch.Size:
    tensor = tensors[name]
    assert tensor is not None, name
    return tensor.shape
