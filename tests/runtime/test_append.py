"""Files that grow by whole records, against a disk that is full in the middle of one."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.runtime.files import AppendedFile


@contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    """The system writes what fits and refuses the rest, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_record_that_does_not_fit_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file"
    file = AppendedFile(path)
    file.append(b"one\n", b"first\n", b"\n")
    with _largest_file(12):
        with pytest.raises(OSError, match="File too large"):
            file.append(b"three\n", b"first\n", b"\n")
        assert path.read_bytes() == b"first\none\n"
        file.append(b"2\n", b"first\n", b"\n")
    file.append(b"four\n", b"first\n", b"\n")
    assert path.read_bytes() == b"first\none\n2\nfour\n"


def test_a_file_that_was_put_back_is_not_cut(tmp_path: Path) -> None:
    path, aside = tmp_path / "file", tmp_path / "aside"
    file = AppendedFile(path)
    file.append(b"one\n")
    path.rename(aside)
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        file.append(b"two\n")
    path.unlink()
    aside.rename(path)
    file.append(b"three\n")
    assert path.read_bytes() == b"one\nthree\n"
