"""Storage that fails for a moment, for long, or not at all as it should."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.data import reader as reading
from pipeline.data.format import DatasetIndex
from pipeline.data.reader import BlockReader
from pipeline.data.staging import stage
from pipeline.errors import EXIT_FAILED_RETRY, DataError, StorageError
from pipeline.runtime import files


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[float]]:
    """Makes the next reads fail as a file server's would; gives the list of pauses made."""

    def fail(number: int, times: int) -> list[float]:
        pauses: list[float] = []
        left = [times]
        real = os.preadv

        def preadv(*args: object) -> int:
            if left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(files.time, "sleep", pauses.append)
        return pauses

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_moment_s_failure_is_tried_again(
    dataset: DatasetIndex, failing: Callable[[int, int], list[float]], number: int,
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    expected = BlockReader(dataset).block(1)
    reader = BlockReader(dataset)
    pauses = failing(number, 3)
    assert (reader.block(1).tokens == expected.tokens).all()
    assert pauses == list(files.PAUSES_S[:3])
    staging = failing(number, 2)
    stage(dataset, tmp_path)
    assert staging == list(files.PAUSES_S[:2])
    assert f"member {dataset.block_key(1)[:6]}" in caplog.text
    assert os.strerror(number) in caplog.text


def test_lasting_failure_names_the_member_and_asks_for_another_start(
    dataset: DatasetIndex, failing: Callable[[int, int], list[float]]
) -> None:
    reader = BlockReader(dataset)
    reader.block(0)
    pauses = failing(errno.EIO, 99)
    key = dataset.block_key(1)
    with pytest.raises(StorageError, match=rf"member {key}\.\*") as found:
        reader.block(1)
    assert found.value.exit_code == EXIT_FAILED_RETRY
    assert pauses == list(files.PAUSES_S)
    with pytest.raises(StorageError, match=rf"member {key}\.docs\.npy"):
        reader.doc_ends(1)


def test_other_errors(dataset: DatasetIndex, failing: Callable[[int, int], list[float]]) -> None:
    pauses = failing(errno.EISDIR, 1)
    with pytest.raises(DataError, match="Is a directory"):
        BlockReader(dataset).block(0)
    assert not pauses


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
