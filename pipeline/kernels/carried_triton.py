"""Triton kernels of attention by carried scores, S = scale q k^T + S of the layer below.

Letters: T tokens end to end, N heads, H head size (32, 64 or 128), W slots of a row of scores.

A window is a range of tokens that see nothing outside it. Its scores are (N, T, W): column c of a
token is the c-th token of its window. `spans` (T, 4) int32 holds the keys that each token sees,
first and one past the last, and likewise the queries that see it. Scores are defined where a query
sees a key; elsewhere they and their gradient may be anything, including NaN.

Queries and keys are those of `turn_triton`, turned; their gradients are turned back here.

The functions after the kernels choose which of them to launch, with which tiles. A launch is data,
so that it can be compiled ahead of time for a GPU that is not there.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pipeline.kernels.common_triton import INTERPRETED, RANDOM_VALUES, Launch, is_kept, narrow
from pipeline.kernels.tiles import Shape, Target, Tile, tile_of
from pipeline.kernels.turn_triton import Tensors, load_angles, of_turn, turn

FP16_MAX = tl.constexpr(65504.0)
LOG2_E = tl.constexpr(math.log2(math.e))


# The interpreter multiplies bits of bf16 as whole numbers: repaired here, there only.
@triton.jit
def _dot(a, b):
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    # Or fp32 would be rounded to TF32, 10 bits.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _load_rows(base, row, head, token_stride, head_stride, real, H: tl.constexpr):
    """Load (rows, H) of a (T, N, H) tensor; 0 where not real."""
    offset = row.to(tl.int64)[:, None] * token_stride + head * head_stride
    return tl.load(base + offset + tl.arange(0, H)[None, :], mask=real[:, None], other=0.0)


@triton.jit
def _store_rows(base, row, head, token_stride, value, real, H: tl.constexpr):
    """Store (rows, H) of a (T, N, H) tensor whose heads lie side by side."""
    offset = row.to(tl.int64)[:, None] * token_stride + head * H
    value = narrow(value, base.dtype.element_ty)
    tl.store(base + offset + tl.arange(0, H)[None, :], value, mask=real[:, None])


# Offsets of 32 bits: one of 64 more in this epilogue spilled a register (sm_90, windows of 128).
@triton.jit
def _store_gradient(
    base, row, head, num_heads, value, real, cos, sin, TURNS: tl.constexpr, H: tl.constexpr
):
    """Turn (rows, H) of queries' or keys' gradient back, and store it."""
    if TURNS:
        cosine, sine = load_angles(cos, sin, row, real, H)
        value = turn(value, cosine, -sine)
    _store_rows(base, row, head, 3 * num_heads * H, value, real, H)


@triton.jit
def _scaled_queries(value, token_scale, row, real, scale, SCALES: tl.constexpr):
    """Multiply (rows, H) by the factors of `turn_kernel` and of the product."""
    value *= scale
    if SCALES:
        value *= tl.load(token_scale + row, mask=real, other=0.0).to(tl.float32)[:, None]
    return value


@triton.jit
def _score_offsets(row, column, head, num_tokens, width):
    # 64 bits, as heads times tokens times slots may exceed 2^31.
    return (head.to(tl.int64) * num_tokens + row)[:, None] * width + column[None, :]


@triton.jit
def _load_spans(spans, token, real, SIDE: tl.constexpr):
    """Load the first key (or query) and one past the last; both 0 where not real."""
    first = tl.load(spans + token * 4 + SIDE, mask=real, other=0)
    stop = tl.load(spans + token * 4 + SIDE + 1, mask=real, other=0)
    return first, stop


@triton.jit
def _common_range(first, stop, window_start, window_stop, STEP: tl.constexpr):
    """Return offsets in the window, in whole steps, between which all spans lie."""
    some = first < stop
    lowest = tl.min(tl.where(some, first, window_stop), axis=0) - window_start
    highest = tl.max(tl.where(some, stop, window_start), axis=0) - window_start
    return lowest // STEP * STEP, highest


@triton.jit
def forward_kernel(
    q, k, v, carry, scores, out, lse, spans, bounds, seed, num_summed,
    q_token, q_head, k_token, k_head, v_token, v_head,
    num_tokens, width, num_heads, num_blocks, scale, threshold, keep_scale,
    HAS_CARRY: tl.constexpr, DROPS: tl.constexpr,
    H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the softmax online (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).

    One program for a block of queries of one head. `lse` (N, T) fp32 is the binary logarithm of the
    softmax's denominator, +inf for a query that sees nothing, whose output is 0.
    """
    block = tl.program_id(0) % num_blocks
    head = (tl.program_id(0) // num_blocks) % num_heads
    window = tl.program_id(0) // num_blocks // num_heads
    start, end = tl.load(bounds + window), tl.load(bounds + window + 1)
    if block * BLOCK_Q >= end - start:
        return
    row = start + block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = row < end
    first, stop = _load_spans(spans, row, real, 0)
    lowest, highest = _common_range(first, stop, start, end, BLOCK_K)
    q_QH = _load_rows(q, row, head, q_token, q_head, real, H)
    log2_temperature = LOG2_E / tl.load(num_summed)
    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out_QH = tl.zeros([BLOCK_Q, H], tl.float32)
    for offset in range(lowest, highest, BLOCK_K):
        column = offset + tl.arange(0, BLOCK_K)
        key = start + column
        k_KH = _load_rows(k, key, head, k_token, k_head, key < end, H)
        s_QK = _dot(q_QH, tl.trans(k_KH)) * scale
        at = _score_offsets(row, column, head, num_tokens, width)
        if HAS_CARRY:
            # A whole tile: a mask of the columns on the load would split it into accesses of 2
            # bytes.
            s_QK += tl.load(carry + at, mask=real[:, None], other=0.0).to(tl.float32)
        # Beyond 65,504 a score would be stored as infinity, and inf - inf makes its row NaN.
        if scores.dtype.element_ty == tl.float16:
            s_QK = tl.minimum(tl.maximum(s_QK, -FP16_MAX), FP16_MAX)
        stored_QK = s_QK.to(scores.dtype.element_ty)
        tl.store(scores + at, stored_QK, mask=real[:, None])
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        # Of the rounded scores, so that backward, which reads the stored ones, is the gradient of
        # what was computed.
        x_QK = tl.where(seen, stored_QK.to(tl.float32) * log2_temperature, float("-inf"))
        new_most = tl.maximum(most, tl.max(x_QK, axis=1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_most == float("-inf"), 0.0, new_most)
        p_QK = tl.exp2(x_QK - shift[:, None])
        shrink = tl.exp2(most - shift)
        total = total * shrink + tl.sum(p_QK, axis=1)
        # Behind the sum: dropout drops probabilities, their denominator keeps every key.
        if DROPS:
            p_QK = tl.where(is_kept(seed, row, column, head, threshold), p_QK, 0.0)
        v_KH = _load_rows(v, key, head, v_token, v_head, key < end, H)
        out_QH = out_QH * shrink[:, None] + _dot(narrow(p_QK, v_KH.dtype), v_KH)
        most = new_most
    none = total == 0.0
    out_QH = out_QH * (keep_scale / tl.where(none, 1.0, total))[:, None]
    _store_rows(out, row, head, num_heads * H, out_QH, real, H)
    logarithm = tl.where(none, float("inf"), most + tl.log2(tl.where(none, 1.0, total)))
    tl.store(lse + head.to(tl.int64) * num_tokens + row, logarithm, mask=real)


@triton.jit
def delta_kernel(out, d_out, delta, num_tokens, num_heads, H: tl.constexpr, BLOCK: tl.constexpr):
    """Fill (N, T) fp32 sums of out * d_out over H, which the softmax's gradient subtracts."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = number < num_tokens * num_heads
    at = number[:, None] * H + tl.arange(0, H)[None, :]
    product = tl.load(out + at, mask=real[:, None], other=0.0).to(tl.float32)
    product *= tl.load(d_out + at, mask=real[:, None], other=0.0).to(tl.float32)
    to = number % num_heads * num_tokens + number // num_heads
    tl.store(delta + to, tl.sum(product, axis=1), mask=real)


@triton.jit
def _probabilities(scores, at, seen, real, logarithm, log2_temperature):
    """Compute the softmax again from stored scores; 0 where not seen."""
    s_QK = tl.load(scores + at, mask=real[:, None], other=0.0).to(tl.float32)
    return tl.exp2(tl.where(seen, s_QK * log2_temperature - logarithm[:, None], float("-inf")))


@triton.jit
def _through_softmax(
    p_QK, dp_QK, delta, d_scores, at, seen, real, temperature, HAS_D: tl.constexpr
):
    """Add the gradient through this layer's softmax and the one that the layer above hands down."""
    ds_QK = p_QK * (dp_QK - delta[:, None]) * temperature
    if HAS_D:
        above_QK = tl.load(d_scores + at, mask=real[:, None], other=0.0).to(tl.float32)
        ds_QK += tl.where(seen, above_QK, 0.0)
    return ds_QK


@triton.jit
def backward_window_kernel(
    q, k, v, scores, lse, d_out, d_scores, dq, dk, dv, d_carry, spans, bounds, seed,
    num_summed, cos, sin, token_scale, q_token, q_head, k_token, k_head, v_token, v_head,
    num_tokens, width, num_heads, scale, threshold, keep_scale,
    HAS_CARRY: tl.constexpr, HAS_D: tl.constexpr, DROPS: tl.constexpr,
    TURNS: tl.constexpr, SCALES: tl.constexpr,
    H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one head of a window of at most BLOCK_K tokens, in one program."""
    head = tl.program_id(0) % num_heads
    window = tl.program_id(0) // num_heads
    start, end = tl.load(bounds + window), tl.load(bounds + window + 1)
    column = tl.arange(0, BLOCK_K)
    key = start + column
    real_key = key < end
    v_KH = _load_rows(v, key, head, v_token, v_head, real_key, H)
    if BLOCK_Q < BLOCK_K:
        k_KH = _load_rows(k, key, head, k_token, k_head, real_key, H)
    dk_KH = tl.zeros([BLOCK_K, H], tl.float32)
    dv_KH = tl.zeros([BLOCK_K, H], tl.float32)
    length = end - start
    if BLOCK_Q == BLOCK_K:
        length = BLOCK_K
    for offset in range(0, length, BLOCK_Q):
        row = start + offset + tl.arange(0, BLOCK_Q)
        real = row < end
        first, stop = _load_spans(spans, row, real, 0)
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        at = _score_offsets(row, column, head, num_tokens, width)
        by_row = head.to(tl.int64) * num_tokens + row
        logarithm = tl.load(lse + by_row, mask=real, other=float("inf"))
        do_QH = _load_rows(d_out, row, head, num_heads * H, H, real, H)
        # Read again below: kept meanwhile it would spill registers.
        log2_temperature = LOG2_E / tl.load(num_summed)
        p_QK = _probabilities(scores, at, seen, real, logarithm, log2_temperature)
        dp_QK = _dot(do_QH, tl.trans(v_KH))
        used_QK = p_QK
        if DROPS:
            kept = is_kept(seed, row, column, head, threshold)
            used_QK = tl.where(kept, p_QK * keep_scale, 0.0)
            dp_QK = tl.where(kept, dp_QK * keep_scale, 0.0)
        dv_KH += _dot(tl.trans(narrow(used_QK, do_QH.dtype)), do_QH)
        # Rows are whole here, so this is `delta_kernel` without its pass over out and d_out.
        delta = tl.sum(p_QK * dp_QK, axis=1)
        temperature = 1.0 / tl.load(num_summed)
        ds_QK = _through_softmax(p_QK, dp_QK, delta, d_scores, at, seen, real, temperature, HAS_D)
        if HAS_CARRY:
            tl.store(d_carry + at, narrow(ds_QK, d_carry.dtype.element_ty), mask=real[:, None])
        q_QH = _load_rows(q, row, head, q_token, q_head, real, H)
        narrow_QK = narrow(ds_QK, q_QH.dtype)
        dk_KH += _dot(tl.trans(narrow_QK), q_QH)
        if BLOCK_Q == BLOCK_K:
            k_KH = _load_rows(k, key, head, k_token, k_head, real_key, H)
        dq_QH = _scaled_queries(_dot(narrow_QK, k_KH), token_scale, row, real, scale, SCALES)
        _store_gradient(dq, row, head, num_heads, dq_QH, real, cos, sin, TURNS, H)
    _store_gradient(dk, key, head, num_heads, dk_KH * scale, real_key, cos, sin, TURNS, H)
    _store_rows(dv, key, head, 3 * num_heads * H, dv_KH, real_key, H)


@triton.jit
def backward_keys_kernel(
    q, v, scores, lse, delta, d_out, d_scores, dk, dv, d_carry, spans, bounds, seed,
    num_summed, cos, sin, q_token, q_head, v_token, v_head,
    num_tokens, width, num_heads, num_blocks, scale, threshold, keep_scale,
    HAS_D: tl.constexpr, DROPS: tl.constexpr, TURNS: tl.constexpr,
    H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a block of keys, their values and their column of scores."""
    block = tl.program_id(0) % num_blocks
    head = (tl.program_id(0) // num_blocks) % num_heads
    window = tl.program_id(0) // num_blocks // num_heads
    start, end = tl.load(bounds + window), tl.load(bounds + window + 1)
    if block * BLOCK_K >= end - start:
        return
    column = block * BLOCK_K + tl.arange(0, BLOCK_K)
    key = start + column
    real_key = key < end
    by_first, by_stop = _load_spans(spans, key, real_key, 2)
    lowest, highest = _common_range(by_first, by_stop, start, end, BLOCK_Q)
    temperature = 1.0 / tl.load(num_summed)
    log2_temperature = temperature * LOG2_E
    v_KH = _load_rows(v, key, head, v_token, v_head, real_key, H)
    dk_KH = tl.zeros([BLOCK_K, H], tl.float32)
    dv_KH = tl.zeros([BLOCK_K, H], tl.float32)
    for offset in range(lowest, highest, BLOCK_Q):
        row = start + offset + tl.arange(0, BLOCK_Q)
        real = row < end
        first, stop = _load_spans(spans, row, real, 0)
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        at = _score_offsets(row, column, head, num_tokens, width)
        by_row = head.to(tl.int64) * num_tokens + row
        logarithm = tl.load(lse + by_row, mask=real, other=float("inf"))
        p_QK = _probabilities(scores, at, seen, real, logarithm, log2_temperature)
        do_QH = _load_rows(d_out, row, head, num_heads * H, H, real, H)
        used_QK = p_QK
        if DROPS:
            kept = is_kept(seed, row, column, head, threshold)
            used_QK = tl.where(kept, p_QK * keep_scale, 0.0)
        dv_KH += _dot(tl.trans(narrow(used_QK, do_QH.dtype)), do_QH)
        dp_QK = _dot(do_QH, tl.trans(v_KH))
        if DROPS:
            dp_QK = tl.where(kept, dp_QK * keep_scale, 0.0)
        subtracted = tl.load(delta + by_row, mask=real, other=0.0)
        ds_QK = _through_softmax(
            p_QK, dp_QK, subtracted, d_scores, at, seen, real, temperature, HAS_D
        )
        tl.store(d_carry + at, narrow(ds_QK, d_carry.dtype.element_ty), mask=real[:, None])
        q_QH = _load_rows(q, row, head, q_token, q_head, real, H)
        dk_KH += _dot(tl.trans(narrow(ds_QK, q_QH.dtype)), q_QH)
    _store_gradient(dk, key, head, num_heads, dk_KH * scale, real_key, cos, sin, TURNS, H)
    _store_rows(dv, key, head, 3 * num_heads * H, dv_KH, real_key, H)


@triton.jit
def backward_queries_kernel(
    k, d_carry, dq, spans, bounds, cos, sin, token_scale, k_token, k_head,
    num_tokens, width, num_heads, num_blocks, scale,
    TURNS: tl.constexpr, SCALES: tl.constexpr,
    H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries from the scores' by `backward_keys_kernel`.

    A second pass instead of atomic additions: the same bits each time.
    """
    block = tl.program_id(0) % num_blocks
    head = (tl.program_id(0) // num_blocks) % num_heads
    window = tl.program_id(0) // num_blocks // num_heads
    start, end = tl.load(bounds + window), tl.load(bounds + window + 1)
    if block * BLOCK_Q >= end - start:
        return
    row = start + block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = row < end
    first, stop = _load_spans(spans, row, real, 0)
    lowest, highest = _common_range(first, stop, start, end, BLOCK_K)
    dq_QH = tl.zeros([BLOCK_Q, H], tl.float32)
    for offset in range(lowest, highest, BLOCK_K):
        column = offset + tl.arange(0, BLOCK_K)
        key = start + column
        at = _score_offsets(row, column, head, num_tokens, width)
        # As it was rounded for the layer below: one tensor in place of a second one for this pass.
        ds_QK = tl.load(d_carry + at, mask=real[:, None], other=0.0)
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        k_KH = _load_rows(k, key, head, k_token, k_head, key < end, H)
        dq_QH += _dot(narrow(tl.where(seen, ds_QK, 0.0).to(tl.float32), k_KH.dtype), k_KH)
    dq_QH = _scaled_queries(dq_QH, token_scale, row, real, scale, SCALES)
    _store_gradient(dq, row, head, num_heads, dq_QH, real, cos, sin, TURNS, H)


"""Arguments of kernels by their names there."""


class Numbers(NamedTuple):
    """Arguments of a layer that are not tensors."""

    longest: int
    """Tokens of the longest window, or more."""
    scale: float
    dropout: float
    """Probability of dropping an attention probability."""


def forward(tensors: Tensors, numbers: Numbers, gpu: Target) -> Launch:
    """Fill `scores`, `out` and `lse`.

    Tensors are `q`, `k`, `v`, `carry` or None, `scores`, `out`, `lse`, `spans`, `bounds`, `seed`,
    None without dropout, and `num_summed`, () fp32: the softmax is over scores divided by it.
    """
    constants = {"HAS_CARRY": tensors["carry"] is not None, "DROPS": numbers.dropout > 0}
    tile = tile_of("forward", _tiled(tensors, numbers), gpu)
    assert tile is not None
    return _by_blocks(forward_kernel, tensors, numbers, constants, tile, tile.queries)


def backward(tensors: Tensors, numbers: Numbers, gpu: Target) -> Iterator[Launch]:
    """Fill `dq`, `dk`, `dv` and `d_carry`, one launch after another.

    Args:
        tensors: those of `forward` and of `turn_launch`, where `carry` only tells whether there is
            one; `d_out`; `d_scores` or None; `dq`, `dk`, `dv`, which are parts of one (T, 3, N, H);
            and `d_carry`, which stays unchanged in a first layer whose windows are one tile each.
        numbers: of the layer.
        gpu: what the kernels are for.
    """
    constants: dict[str, Any] = {
        "HAS_D": tensors["d_scores"] is not None,
        "DROPS": numbers.dropout > 0,
    }
    turns, shape = of_turn(tensors), _tiled(tensors, numbers)
    if tile := tile_of("backward_window", shape, gpu):
        constants |= turns | {"HAS_CARRY": tensors["carry"] is not None}
        kernel = backward_window_kernel
        # One block: a program takes its window block by block.
        yield _by_blocks(kernel, tensors, numbers, constants, tile, shape.width)
        return
    lse = tensors["lse"]
    assert lse is not None
    tensors = {**tensors, "delta": torch.empty_like(lse)}
    programs = -(-lse.numel() // 64)
    yield _launch(delta_kernel, tensors, numbers, {"BLOCK": 64}, programs, 4, 1)
    of_keys, of_queries = (
        tile_of("backward_keys", shape, gpu),
        tile_of("backward_queries", shape, gpu),
    )
    assert of_keys is not None
    assert of_queries is not None
    kernel = backward_keys_kernel
    constants |= {"TURNS": turns["TURNS"]}
    yield _by_blocks(kernel, tensors, numbers, constants, of_keys, of_keys.keys)
    kernel = backward_queries_kernel
    yield _by_blocks(kernel, tensors, numbers, turns, of_queries, of_queries.queries)


def _tiled(tensors: Tensors, numbers: Numbers) -> Shape:
    return Shape(_shape(tensors, "scores")[-1], _shape(tensors, "q")[-1], numbers.dropout > 0)


def _by_blocks(
    kernel: Any,
    tensors: Tensors,
    numbers: Numbers,
    constants: dict[str, Any],
    tile: Tile,
    block: int,
) -> Launch:
    """Launch a program for each head and block of a window, as many as the longest window has."""
    num_blocks = -(-numbers.longest // block)
    programs = num_blocks * _shape(tensors, "lse")[0] * (_shape(tensors, "bounds")[0] - 1)
    constants = constants | {"BLOCK_Q": tile.queries, "BLOCK_K": tile.keys}
    return _launch(kernel, tensors, numbers, constants, programs, *tile[2:], num_blocks)


def _launch(
    kernel: Any,
    tensors: Tensors,
    numbers: Numbers,
    constants: dict[str, Any],
    programs: int,
    warps: int,
    stages: int,
    num_blocks: int = 1,
) -> Launch:
    """Pass a kernel the arguments that it names."""
    num_heads, num_tokens = _shape(tensors, "lse")
    known: dict[str, Any] = {
        **tensors,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "num_blocks": num_blocks,
        "width": _shape(tensors, "scores")[-1],
        "scale": numbers.scale,
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
