"""Runs of one test, in folders below its own, on the dataset that tests share."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.reader import BlockReader
from pipeline.data.run_order import DataRank
from tests.support.processes import ROOT
from tests.support.ranks import CONFIG, Ranks, Starter, finish
from tests.support.steps import train_loader


class Train:
    """Starts runs by the name of their folder; overrides and options are those of `Ranks`."""

    def __init__(self, folder: Path, dataset: DatasetIndex, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._dataset, self._patch = folder, dataset, patch

    def set(self, **variables: str) -> None:
        """Set variables of runs that start later, for as long as the test lasts."""
        for name, value in variables.items():
            self._patch.setenv(name, value)

    def hashes(self, batches: range) -> str:
        """Hashes of the first of two ranks' micro-batches."""
        path = self.folder / "hashes.yaml"
        path.write_text(CONFIG)
        config = load(PretrainConfig, path, [f"data.dir={self._dataset.folder}"]).config
        loader = train_loader(self._dataset, config, DataRank(0, 2))
        found = [loader.step_batches(config.batches.number(batch).cursor) for batch in batches]
        return ",".join(str(each.hash) for step in found for each in step)

    def start(self, name: str, *overrides: str, fault: str = "", **options: Any) -> Ranks:
        """With one of the faults of `faulty_main`, if any."""
        if fault:
            options["module"] = ("-m", "tests.distributed.faulty_main", fault)
        return Ranks(self.folder / name, self._dataset, *overrides, **options)

    def __call__(self, name: str, *overrides: str, code: int | list[int] = 0,
                 timeout_s: float = 120, **options: Any) -> Ranks:  # fmt: skip
        """Wait for its end, which must come with an exit code, or with one of each rank."""
        return self.start(name, *overrides, **options).ended(code, timeout_s)

    def copied(self, run_dir: Path) -> Path:
        """A copy of a run, named `run`, to be continued."""
        return Path(shutil.copytree(run_dir, self.folder / "run"))


@pytest.fixture
def read(dataset: DatasetIndex) -> DatasetIndex:
    """What the runs of `train` read; a file may have another dataset."""
    return dataset


@pytest.fixture
def train(
    tmp_path: Path, read: DatasetIndex, monkeypatch: pytest.MonkeyPatch, start_ranks: type[Ranks]
) -> Train:
    return Train(tmp_path, read, monkeypatch)


def documents_of(index: DatasetIndex) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens of each document of a dataset."""
    reader, found = BlockReader(index), {}
    for row in range(len(index.blocks)):
        block = reader.block(row)
        parts = np.split(block.tokens, block.doc_ends[:-1])
        found |= dict(zip(block.document_ids, parts, strict=True))
    return found


def tensorboard(run_dir: Path) -> EventAccumulator:
    """All that a run's TensorBoard has."""
    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    return events


LeftBy = Callable[..., Path]


@pytest.fixture(scope="module")
def left_by(tmp_path_factory: pytest.TempPathFactory, start_command: Starter) -> LeftBy:
    """Runs a module of this folder, such as `norms_main`, on ranks that get a new folder."""

    def run(module: str, *words: str, ranks: int = 2, timeout_s: float = 240) -> Path:
        folder = tmp_path_factory.mktemp(module)
        command = [sys.executable, "-m", f"tests.distributed.{module}", str(folder), *words]
        finish(start_command(command, ranks, folder / "output"), folder / "output", timeout_s)
        return folder

    return run


def with_small_disk(folder: Path, code: str) -> str:
    """What Python code prints for which a new folder is a disk of 1.6 MB.

    That holds one checkpoint of a run (0.85 MB), not a second.
    """
    folder.mkdir()
    script = f'mount -t tmpfs -o size=1600k none {folder}; exec "$@"'
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    command = [*mounted, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout + done.stderr
