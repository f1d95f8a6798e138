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


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Values of the parameters of this module's selected tests that have these and no others.

    A fixture that starts the whole grid at once starts the cases that will be looked at, no more.
    """
    cases = (
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
        if hasattr(item, "callspec") and set(names) == set(item.callspec.params)
    )
    values = (tuple(case[name] for name in names) for case in cases)
    return list(dict.fromkeys(value if len(names) > 1 else value[0] for value in values))
