"""Runs of one test, in folders below its own, on the dataset that tests share."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.format import DatasetIndex
from tests.support.ranks import Ranks


class Train:
    """Starts runs by the name of their folder; overrides and options are those of `Ranks`."""

    def __init__(self, folder: Path, dataset: DatasetIndex) -> None:
        self.folder, self._dataset = folder, dataset

    def start(self, name: str, *overrides: str, **options: Any) -> Ranks:
        return Ranks(self.folder / name, self._dataset, *overrides, **options)

    def __call__(self, name: str, *overrides: str, code: int | list[int] = 0,
                 timeout_s: float = 120, **options: Any) -> Ranks:  # fmt: skip
        """Wait for its end, which must come with an exit code, or with one of each rank."""
        return self.start(name, *overrides, **options).ended(code, timeout_s)

    def copied(self, run_dir: Path) -> Path:
        """A copy of a run, named `run`, to be continued."""
        return Path(shutil.copytree(run_dir, self.folder / "run"))


@pytest.fixture
def train(tmp_path: Path, dataset: DatasetIndex, start_ranks: type[Ranks]) -> Train:
    return Train(tmp_path, dataset)
