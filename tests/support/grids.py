"""Grids of cases: CI runs the first ones, `make test-slow` the rest at night."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_in_ci(cases: Iterable[Any], num: int = 1) -> list[Any]:
    """Mark all cases but the first `num` as slow; a tuple has a value for each argument."""
    return [
        case
        if number < num
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
