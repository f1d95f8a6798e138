"""The fused kernels in Triton's interpreter: one process, since its start takes seconds."""

from tests.support.triton import MARKED, NEEDS_TRITON, Interpreter

FILES = ("interpreted_carried.py", "interpreted_norm.py", "test_loss.py")


@NEEDS_TRITON
@MARKED
def test_in_the_interpreter(interpreter: Interpreter, marked: str) -> None:
    interpreter(*(f"tests/kernels/{name}" for name in FILES), marked=marked)
