"""The fused kernels in Triton's interpreter: one process, since its start takes seconds."""

import pytest

from tests.support.grids import first_in_ci
from tests.support.triton import NEEDS_TRITON, Interpreter

FILES = ("interpreted_carried.py", "interpreted_norm.py", "test_loss.py")


@NEEDS_TRITON
@pytest.mark.parametrize("marked", first_in_ci(["not slow", "slow"]))
def test_in_the_interpreter(interpreter: Interpreter, marked: str) -> None:
    interpreter(*(f"tests/kernels/{name}" for name in FILES), marked=marked)
