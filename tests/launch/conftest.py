"""Fixtures of tests that start processes, and SLURM's commands for those that do not."""

from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.processes import processes as processes


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """First in this process's PATH."""
    made = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", made.environment["PATH"])
    return made
