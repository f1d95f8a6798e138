"""The folder that tests of readers write into."""

from pathlib import Path

import pytest

from tests.support.task_folder import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)
