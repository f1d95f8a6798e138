"""Fixtures of tests that start processes."""

from tests.support.processes import processes as processes
