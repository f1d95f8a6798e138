"""`python -m tests.kernels.ahead_of_time`: compiles what would be launched, for GPUs not there.

Prints JSON: for each GPU, kind of batch and kernel, what the machine code does.
"""

import json
import sys
from collections.abc import Iterator

import torch

from pipeline.kernels import carried_triton as launches
from pipeline.kernels.choose import padded_width
from pipeline.kernels.common_triton import Launch
from tests.support.machine_code import compiled, found_in


def launched(
    longest: int, head_size: int, capability: tuple[int, int], dropout: float, dtype: torch.dtype
) -> Iterator[Launch]:
    """Of a forward and a backward pass over tensors that have no memory."""
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
    tensors = {
        "q": q, "k": k, "v": dv, "carry": scores, "scores": scores,
        "out": rows, "lse": lse, "spans": spans, "bounds": bounds, "seed": seed, "d_out": rows,
        "d_scores": gradient, "dq": dq, "dk": dk, "dv": dv, "d_carry": gradient,
        "qkv": qkv, "turned": turned, "cos": angles, "sin": angles,
        "token_scale": None,
    }  # fmt: skip
    yield launches.turn_launch(tensors)
    yield launches.forward(tensors, numbers)
    yield from launches.backward(tensors, numbers, capability)


def main(cases: list[str]) -> dict[str, dict[str, int]]:
    """By GPU, case and kernel; a case is CAPABILITY-LONGEST-HEAD_SIZE-DROPOUT-DTYPE."""
    results = {}
    for case in cases:
        capability, longest, head_size, dropout, dtype = case.split("-")
        for launch in launched(
            int(longest), int(head_size), divmod(int(capability), 10), float(dropout),
            getattr(torch, dtype),
        ):  # fmt: skip
            name = f"{case} {launch.kernel.fn.__name__}"
            results[name] = found_in(compiled(launch, int(capability)))
    return results


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout)
