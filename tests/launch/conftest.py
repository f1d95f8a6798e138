"""Fixtures of tests that start processes."""

from collections.abc import Iterator

import pytest

from tests.support.processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes that end with the test."""
    started = Processes()
    yield started
    started.end()
