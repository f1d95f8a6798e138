"""Compressed files: whole, of several members, cut anywhere, damaged."""

import bz2
import gzip
import json
import lzma
import random
import subprocess
from functools import partial
from pathlib import Path

import pytest
from backports import zstd

from data_prep import ingest
from data_prep.config import PrepConfig, SourceConfig
from data_prep.inputs import find, pieces
from data_prep.pieces import read_documents, read_lines
from data_prep.types import Rejected
from tests.support.prepare import read_source, texts_of


def _gzip(data: bytes) -> bytes:
    """The same bytes at any time: test processes must agree on the names of tests."""
    return gzip.compress(data, mtime=0)


COMPRESS = {".gz": gzip.compress, ".zst": zstd.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
TEXTS = [f"text {i} {i**7}" for i in range(5000)]
RECORDS = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_compression_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    compress = COMPRESS.get(suffix, bytes)
    # Two members, as `cat a.zst b.zst` makes them, the first one ending inside a line.
    data = b"".join(RECORDS)
    path.write_bytes(compress(data[:70_001]) + compress(data[70_001:]))
    whole = read_source(path)
    assert texts_of(whole) == TEXTS
    assert whole[1].id == f"s/a.jsonl{suffix}@{len(RECORDS[0])}"


@pytest.mark.parametrize(("name", "data"), [
    ("padded.txt.gz", _gzip(b"a\n") + b"\0" * 40_000 + _gzip(b"b\n") + b"\0"),
    ("padded.txt.xz", lzma.compress(b"a\n") + b"\0" * 400 + lzma.compress(b"b\n") + b"\0" * 4),
    ("skip.txt.zst", zstd.compress(b"a\n") + bytes.fromhex("502a4d1803000000") + b"xyz"
     + zstd.compress(b"b\n")),
    # As of `zstd --long=31`: a window of 2 GB.
    ("long.txt.zst", (_wide := zstd.ZstdCompressor(
        options={zstd.CompressionParameter.window_log: 31})).compress(b"a\nb\n") + _wide.flush()),
    ("empty.txt.gz", _gzip(b"a\n") + _gzip(b"") + _gzip(b"b\n")),
])  # fmt: skip
def test_padding_and_frames_to_skip(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    items = read_source(tmp_path / name, txt_documents="line")
    assert (texts_of(items), len(items)) == (["a", "b"], 2)


@pytest.mark.parametrize(("mode", "suffix"), [
    pytest.param(mode, suffix, marks=[] if (i - j) % 4 == 0 else pytest.mark.slow)
    for i, mode in enumerate(("jsonl", "line", "blank_line", "file", "wikiextractor"))
    for j, suffix in enumerate(COMPRESS)
])  # fmt: skip
def test_cut_file_gives_its_text_and_one_rejection(tmp_path: Path, suffix: str, mode: str) -> None:
    path = tmp_path / f"a{'.jsonl' if mode == 'jsonl' else '.txt'}{suffix}"
    settings = {"txt_documents": mode} if mode in ("line", "blank_line", "file") else {}
    if mode == "wikiextractor":
        settings["format"] = mode
    article = b'<doc id="%d" url="" title="">\n%d\nb\n\n</doc>\n\n'
    text = b"".join(RECORDS if mode == "jsonl" else [article % (i, i**7) for i in range(6000)])
    data = COMPRESS[suffix](text)
    path.write_bytes(data)
    whole = read_source(path, **settings)
    assert not any(isinstance(item, Rejected) for item in whole)
    draw = random.Random(0)
    got = 0
    for cut in [0, 1, 5, len(data) // 2, len(data) - 1, *(draw.randrange(len(data)) for _ in "12")]:
        path.write_bytes(data[:cut])
        *documents, last = read_source(path, **settings)
        assert documents == whole[: len(documents)]
        got = max(got, len(documents))
        assert isinstance(last, Rejected)
        assert (last.id, last.reason) == (f"s/{path.name}", "file cut short")
        # What was not finished is kept aside: with the documents it is all that could be read.
        if cut == len(data) // 2 and mode != "wikiextractor":
            held = _held(data[:cut], suffix)
            assert held.endswith(last.raw)
            assert documents or held == last.raw
    # A block is all or nothing: 128 KiB of text in zstd, 900 kB in bz2.
    share = {".zst": 0.5, ".bz2": 0}.get(suffix, 0.9)
    assert got >= (0 if mode == "file" else share * len(whole))


def _held(data: bytes, suffix: str) -> bytes:
    """What another decoder, fed byte by byte, gets out of a cut stream."""
    if suffix == ".gz":
        return subprocess.run(["gzip", "-dc"], input=data, capture_output=True).stdout
    makers = {".zst": zstd.ZstdDecompressor, ".xz": lzma.LZMADecompressor,
              ".bz2": bz2.BZ2Decompressor}  # fmt: skip
    decoder = makers[suffix]()
    return b"".join(decoder.decompress(bytes([byte])) for byte in data)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_file_gives_what_stands_before(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    half = COMPRESS[suffix](b"".join(RECORDS[:2500]))
    path.write_bytes(half + b"this is no compressed data at all" + half)
    *documents, last = read_source(path)
    assert len(documents) == 2500
    assert last == Rejected(f"s/a.jsonl{suffix}", "file damaged", b"", rows=last.rows)
    assert 2400 < last.rows < 2600, "as many as half of the file had"
    path.write_bytes(b"no compressed data at all")
    assert read_source(path) == [Rejected(f"s/a.jsonl{suffix}", "file damaged", b"")]
    # Bytes changed in the middle: whatever the decoder makes of them, it is told once.
    data = COMPRESS[suffix](b"".join(RECORDS))
    draw = random.Random(0)
    for _ in range(20):
        position = draw.randrange(len(data))
        path.write_bytes(data[:position] + bytes(8) + data[position + 8 :])
        reasons = [item.reason for item in read_source(path) if isinstance(item, Rejected)]
        assert len([reason for reason in reasons if reason.startswith("file ")]) == 1


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_damaged_member_gives_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    compress = partial(zstd.compress, options=checked) if suffix == ".zst" else COMPRESS[suffix]
    whole = compress(b"".join(RECORDS))
    # All of its text decodes without an error, and what stands behind it for a check is wrong.
    flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    path.write_bytes(compress(b"".join(RECORDS[:100])) + flipped + whole)
    *documents, last = read_source(path)
    assert texts_of(documents) == TEXTS[:100]
    assert last == Rejected(f"s/a.jsonl{suffix}", "file damaged", b"", rows=last.rows)
    assert 0.5 < last.rows / (2 * len(RECORDS)) < 2, "estimated by a hundred of them"


def test_breaks_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(RECORDS))[:-100])
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x", "id": 1}\n{"text": "y", "id": "1"}\n')
    (tmp_path / "c.txt").write_bytes("天地之间有很多人，也有大海\n".encode("gb18030"))
    source = SourceConfig(name="s", inputs=(str(tmp_path),), encoding="auto")
    [piece] = pieces(source, find(source).files, 10**9)
    [task] = ingest.tasks([piece], PrepConfig(output_dir="", sources=(source,)), tmp_path / "out")
    task.folder.mkdir()
    result, paths = ingest.run(task)
    assert result["ingest"]["rejected"]["file cut short"][0] == 1
    assert result["notes"]["documents with the id of another"] == 1
    assert result["notes"]["files read as gb18030"] == 1
    [kept] = read_lines(paths[3])
    assert (kept["id"], kept["reason"]) == ("s/a.jsonl.gz", "file cut short")
    texts = [document["text"] for document in read_documents(paths[0])]
    assert texts[-3:] == ["x", "y", "天地之间有很多人,也有大海"]
    assert len(texts) > 4500
