"""Storage that fails for a moment, for long, or not at all as it should."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.data import reader as reading
from pipeline.data.format import DatasetIndex
from pipeline.data.reader import BlockReader
from pipeline.data.staging import stage
from pipeline.errors import EXIT_FAILED_RETRY, DataError, StorageError
from pipeline.runtime.files import PAUSES_S
from tests.support.storage import FailingStorage


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> FailingStorage:
    return FailingStorage(monkeypatch.setattr)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_moment_s_failure_is_tried_again(
    dataset: DatasetIndex, storage: FailingStorage, number: int,
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    expected = BlockReader(dataset).block(1)
    reader = BlockReader(dataset)
    storage.fail("preadv", number, 3)
    assert (reader.block(1).tokens == expected.tokens).all()
    assert storage.pauses == list(PAUSES_S[:3])
    storage.fail("preadv", number, 2)
    stage(dataset, tmp_path)
    assert storage.pauses[3:] == list(PAUSES_S[:2])
    assert f"member {dataset.block_key(1)[:6]}" in caplog.text
    assert os.strerror(number) in caplog.text


def test_lasting_failure_names_the_member_and_asks_for_another_start(
    dataset: DatasetIndex, storage: FailingStorage
) -> None:
    reader = BlockReader(dataset)
    reader.block(0)
    storage.fail("preadv", errno.EIO, 99)
    key = dataset.block_key(1)
    with pytest.raises(StorageError, match=rf"member {key}\.\*") as found:
        reader.block(1)
    assert found.value.exit_code == EXIT_FAILED_RETRY
    assert storage.pauses == list(PAUSES_S)
    with pytest.raises(StorageError, match=rf"member {key}\.docs\.npy"):
        reader.doc_ends(1)


def test_other_errors(dataset: DatasetIndex, storage: FailingStorage) -> None:
    storage.fail("preadv", errno.EISDIR, 1)
    with pytest.raises(DataError, match="Is a directory"):
        BlockReader(dataset).block(0)
    assert not storage.pauses


def test_files_are_read_whole_and_closed(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = BlockReader(dataset)
    for row in range(len(dataset.blocks)):
        reader.block(row)
    assert len(os.listdir("/proc/self/fd")) == before
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)))
    real = os.preadv
    # A request may be answered in part.
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
    assert reading.read_range(path, 10, 100, str).tobytes() == bytes(range(10, 110))
    assert reading.read_range(path, 250, 100, str).tobytes() == bytes(range(250, 256))
