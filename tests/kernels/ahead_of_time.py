"""What would be launched on GPUs that are not there: compiled, and what its machine code does."""

from collections.abc import Iterable, Iterator

import torch

from pipeline.kernels import carried_triton as launches
from pipeline.kernels import rows_triton
from pipeline.kernels.choose import padded_width
from pipeline.kernels.common_triton import Launch
from tests.support.machine_code import compiled, found_in


def machine_code(of: Iterable[Launch], capability: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Name of each kernel, and the counts of its instructions."""
    for launch in of:
        yield launch.kernel.fn.__name__, found_in(compiled(launch, capability))


def norm(size: int, dropout: float, dtype: torch.dtype) -> Iterator[Launch]:
    """Of a forward and a backward pass over tensors that have no memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = empty(4096, size, dtype=dtype)
    shared = {"y": rows, "rstd": empty(4096), "alpha": empty(),
              "seed": empty(1, dtype=torch.int64) if dropout else None}  # fmt: skip
    yield rows_triton.forward({**shared, "x": rows, "update": rows}, 1.0, 1e-12, dropout)
    gradients = {"d_y": rows, "d_x": rows, "d_update": rows}
    yield rows_triton.backward({**shared, **gradients}, 1.0, dropout)


def carried(
    longest: int, head_size: int, capability: tuple[int, int], dropout: float, dtype: torch.dtype
) -> Iterator[Launch]:
    heads, tokens, width = 12, 8 * longest, padded_width(longest)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide = dtype == torch.float32
    qkv = empty(tokens, 3, heads, head_size)
    turned = empty(tokens, 2, heads, head_size)
    (q, k), (dq, dk, dv) = turned.unbind(1), qkv.unbind(1)
    angles = empty(tokens, head_size // 2, dtype=torch.float32)
    scores = empty(heads, tokens, width, dtype=torch.float32 if wide else torch.float16)
    gradient = empty(heads, tokens, width, dtype=torch.float32 if wide else torch.bfloat16)
    lse = empty(heads, tokens, dtype=torch.float32)
    spans, bounds = empty(tokens, 4, dtype=torch.int32), empty(9, dtype=torch.int32)
    seed = empty(1, dtype=torch.int64) if dropout else None
    numbers = launches.Numbers(longest, head_size**-0.5, 0.5, dropout)
    rows = empty(tokens, heads, head_size)
    tensors = {"q": q, "k": k, "v": dv, "carry": scores, "scores": scores, "out": rows, "lse": lse,
               "spans": spans, "bounds": bounds, "seed": seed, "d_out": rows, "d_scores": gradient,
               "dq": dq, "dk": dk, "dv": dv, "d_carry": gradient, "qkv": qkv, "turned": turned,
               "cos": angles, "sin": angles, "token_scale": None}  # fmt: skip
    yield launches.turn_launch(tensors)
    yield launches.forward(tensors, numbers)
    yield from launches.backward(tensors, numbers, capability)
