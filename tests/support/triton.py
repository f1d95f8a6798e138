"""Triton without a GPU: its interpreter must be asked for before it is imported.

So what is interpreted runs in a process of its own.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.support.processes import python

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


Interpreter = Callable[..., None]  # of the fixture `interpreter`: `run_interpreted`


def run_interpreted(*files: str, marked: str = "") -> None:
    """Runs tests of files under the interpreter, those that pytest's -m names; all must pass."""
    options = ("-q", "-p", "no:cacheprovider", "-m", marked)
    asked = {**os.environ, "TRITON_INTERPRET": "1"}
    assert " passed" in python("-m", "pytest", *options, *files, env=asked)
