"""The least that Triton can be asked to do, to find out whether it can."""

import torch
import triton
import triton.language as tl


@triton.jit
def _answer(out):
    tl.store(out, 42)


def try_triton(device: torch.device) -> None:
    """Compiles and runs a kernel that stores a number.

    Raises:
        Exception: whatever Triton fails with: no C compiler, no headers of Python, a driver that is
            too old.
    """
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _answer[(1,)](out)
    if out.item() != 42:
        raise RuntimeError(f"a kernel was to store 42 and stored {out.item()}")
