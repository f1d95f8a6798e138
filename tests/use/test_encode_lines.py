"""`encode` of streams: bad bytes, kills and order, against the vectors of single texts."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import DataError
from pipeline.use.model import Model, batches_of, load
from pipeline.use.vectors import TextLines, encode_lines
from tests.support.tiny_tasks import write_tiny_model
from tests.use.test_sts import run_verb

WORDS = ["the", "film", "is", "good", "a", "book", "and", "poor", "red", "zebras"]
BAD = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder, device="cpu")


def _stream() -> list[bytes]:
    """100 lines of 0 to 19 words, the tenth of them not UTF-8."""
    numbers = np.random.default_rng(0)
    sizes = numbers.integers(0, 20, 100)
    lines = [" ".join(numbers.choice(WORDS, size)).encode() + b"\n" for size in sizes]
    lines[BAD] = b"caf\xe9\n"
    return lines


def _write(
    model: Model,
    out: Path,
    stream: Iterator[bytes],
    *,
    pooling: str = "mean",
    max_length: int = 64,
    skip_bad: bool = False,
) -> TextLines:
    lines = TextLines(stream, skip_bad=skip_bad)
    encode_lines(model, lines, out, pooling, 1, max_length, None)  # type: ignore[arg-type]
    return lines


def _failing(after: int) -> Iterator[bytes]:
    yield from _stream()[:after]
    raise OSError("the source of lines is gone")


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_line_that_is_not_utf8_is_named_and_ends_nothing(
    skip_bad: bool, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream, out = _stream(), tmp_path / "v.npy"
    lines = TextLines(stream, skip_bad=skip_bad)
    assert encode_lines(model, lines, out, "mean", 1, 64, None) == (99 if skip_bad else 100)
    done = "left out" if skip_bad else "its vector is NaN"
    assert f"line 10 is not UTF-8 (byte 0xe9 at 3): {done}" in caplog.text
    assert lines.num_bad == 1
    expected = [model.encode([line.decode().rstrip()])[0] for line in [*stream[:BAD], *stream[10:]]]
    found = np.load(out)
    if not skip_bad:
        assert np.isnan(found[BAD]).all()
        found = np.delete(found, BAD, axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["v.npy"]


def test_batches_end_at_texts_and_at_tokens() -> None:
    lengths = [9, 9, 4, 4, 4, 2, 2, 2, 2, 2, 30]
    order = sorted(range(11), key=lambda number: -lengths[number])
    assert list(batches_of(order, lengths, 4, 20)) == [[10], [0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert list(batches_of(order, lengths, 4, None)) == [[10, 0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]
    assert list(batches_of([], [], 4, 20)) == []


def test_a_killed_command(model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, out = tmp_path / "whole.npy", tmp_path / "v.npy"
    _write(model, whole, iter(_stream()))
    with pytest.raises(OSError, match="is gone"):
        _write(model, out, _failing(80))
    assert json.loads((tmp_path / "v.npy.partial.json").read_text())["rows"] == 64
    with (tmp_path / "v.npy.partial").open("ab") as file:
        file.write(b"a row that was not yet recorded")
    assert not out.exists()
    with caplog.at_level(logging.INFO):
        lines = _write(model, out, iter(_stream()))
    assert "goes on after line 64" in caplog.text
    assert (lines.num_rows, lines.num_bad) == (100, 1)
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.npy", "whole.npy"]


def test_texts_that_were_cut_before_a_kill_are_counted(folder: Path, tmp_path: Path) -> None:
    whole, killed, again = (load(folder, device="cpu") for _ in range(3))
    _write(whole, tmp_path / "whole.npy", iter(_stream()), max_length=12)
    with pytest.raises(OSError, match="is gone"):
        _write(killed, tmp_path / "v.npy", _failing(80), max_length=12)
    _write(again, tmp_path / "v.npy", iter(_stream()), max_length=12)
    assert 0 < killed.num_cut < again.num_cut == whole.num_cut


def test_what_does_not_go_on_is_refused(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    with pytest.raises(OSError, match="is gone"):
        _write(model, out, _failing(40))
    with pytest.raises(DataError, match=r"vectors of another pooling; remove .*v\.npy\.partial"):
        _write(model, out, iter(_stream()), pooling="cls")
    with pytest.raises(DataError, match="vectors of another bad_lines"):
        _write(model, out, iter(_stream()), skip_bad=True)
    with pytest.raises(DataError, match="of 32 lines that are not the first ones given now"):
        _write(model, out, iter(_stream()[1:]))
    (tmp_path / "v.npy.partial.json").write_text("{")
    with pytest.raises(DataError, match=r"partial\.json is damaged"):
        _write(model, out, iter(_stream()))
    with pytest.raises(DataError, match="no text to encode"):
        _write(model, tmp_path / "none.npy", iter([]))
    assert not list(tmp_path.glob("none*"))


def test_lines_as_json_keep_their_order(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = b"\xef\xbb\xbf" + b"".join(_stream())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stream)))
    run_verb("encode", folder)
    shown = capsys.readouterr()
    rows = [json.loads(line) for line in shown.out.splitlines()]
    assert len(rows) == 100
    assert [number for number, row in enumerate(rows) if row is None] == [BAD]
    first = model.encode([_stream()[0].decode().rstrip()])[0]
    np.testing.assert_allclose(rows[0], first, rtol=1e-4, atol=1e-5)
    assert "100 texts, vectors of 32; 0 were cut at 512 tokens; 1 lines were not UTF" in shown.err
