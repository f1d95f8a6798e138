"""A tiny model, and task files of every kind that it can learn."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import processes as processes
from tests.support.tiny_tasks import write_task, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: 2 layers of 32, random weights."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def task_file(tmp_path: Path) -> Any:
    """Makes the file of a task whose dev and test are its train."""
    return partial(write_task, tmp_path)
