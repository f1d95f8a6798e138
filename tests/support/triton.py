"""Triton without a GPU: its interpreter must be asked for before it is imported.

So what is interpreted runs in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def python(*arguments: str, **environment: str) -> str:
    """What Python prints in the project's folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


MARKED = pytest.mark.parametrize(
    "marked",
    [
        pytest.param("smoke and not slow", marks=pytest.mark.smoke),
        "not smoke and not slow",
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
"""Runs of a file in the interpreter: those of `make test`, the rest of CI, and the night's."""


Interpreter = Callable[..., None]
"""Of the fixture `interpreter`: `run_interpreted`."""


def run_interpreted(tests: str, marked: str = "") -> None:
    """Runs tests of a file under the interpreter, those that pytest's -m names; all must pass."""
    options = ("-q", "-p", "no:cacheprovider", "-m", marked)
    out = python("-m", "pytest", *options, tests, TRITON_INTERPRET="1")
    assert " passed" in out
