"""Fixtures of tests that start processes, and SLURM's commands for those that do not."""

from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.processes import processes as processes
from tests.support.recorded_slurm import RecordedSlurm
from tests.support.run_folder import RunFolder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """First in this process's PATH."""
    made = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", made.environment["PATH"])
    return made


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedSlurm:
    """First in this process's PATH, with what real commands printed."""
    made = RecordedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", made.path)
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")
