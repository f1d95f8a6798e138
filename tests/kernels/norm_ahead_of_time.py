"""`python -m tests.kernels.norm_ahead_of_time`: the fused residual and norm for GPUs not there.

Prints JSON: for each GPU, hidden size, dropout, dtype and kernel, what the machine code does.
"""

import json
import sys
from collections.abc import Iterator

import torch

from pipeline.kernels import rows_triton as kernels
from pipeline.kernels.common_triton import Launch
from tests.support.machine_code import compiled, found_in


def launched(size: int, dropout: float, dtype: torch.dtype) -> Iterator[Launch]:
    """Of a forward and a backward pass over tensors that have no memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = empty(4096, size, dtype=dtype)
    shared = {
        "y": rows, "rstd": empty(4096), "alpha": empty(),
        "seed": empty(1, dtype=torch.int64) if dropout else None,
    }  # fmt: skip
    yield kernels.forward({**shared, "x": rows, "update": rows}, 1.0, 1e-12, dropout)
    gradients = {"d_y": rows, "d_x": rows, "d_update": rows}
    yield kernels.backward({**shared, **gradients}, 1.0, dropout)


def main(cases: list[str]) -> dict[str, dict[str, int]]:
    """By case and kernel; a case is CAPABILITY-SIZE-DROPOUT-DTYPE."""
    results = {}
    for case in cases:
        capability, size, dropout, dtype = case.split("-")
        for launch in launched(int(size), float(dropout), getattr(torch, dtype)):
            name = f"{case} {launch.kernel.fn.__name__}"
            results[name] = found_in(compiled(launch, int(capability)))
    return results


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout)
