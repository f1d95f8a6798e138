"""Reading files: documents, ids, bad lines, compression, limits."""

import gzip
import json
from pathlib import Path

import pytest
from backports import zstd

from data_prep.config import SourceConfig
from data_prep.documents import Document, Rejected, read_file
from data_prep.inputs import find, pieces
from data_prep.normalise import normalise
from pipeline.errors import DataError


def _read(path: Path, max_bytes: int = 1_000_000, **settings: str) -> list[Document | Rejected]:
    source = SourceConfig(name="s", inputs=(str(path),), **settings)  # type: ignore[arg-type]
    [file] = find(source).files
    return list(read_file(file, source, max_bytes))


def _texts(items: list[Document | Rejected]) -> list[str]:
    return [item.text for item in items if isinstance(item, Document)]


TXT = "first line\nsecond line\n\n\nsecond document\r\n\nlast"


@pytest.mark.parametrize(
    ("mode", "texts"),
    [
        ("blank_line", ["first line\nsecond line", "second document", "last"]),
        ("line", ["first line", "second line", "second document", "last"]),
        ("file", ["first line\nsecond line\n\n\nsecond document\n\nlast"]),
    ],
)
def test_txt_documents(tmp_path: Path, mode: str, texts: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TXT.encode())
    items = _read(path, txt_documents=mode)
    assert _texts(items) == texts
    assert items[0].id == "s/a.txt:1"
    assert len({item.id for item in items}) == len(items)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compression_is_read(tmp_path: Path, suffix: str) -> None:
    data = b"".join(json.dumps({"text": f"text {i}"}).encode() + b"\n" for i in range(5))
    if suffix == ".gz":
        data = gzip.compress(data)
    if suffix == ".zst":
        # Two frames, as `cat a.zst b.zst` makes them.
        half = data.index(b"\n", 40) + 1
        compress = zstd.compress
        data = compress(data[:half]) + compress(data[half:])
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data)
    assert _texts(_read(path)) == [f"text {i}" for i in range(5)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_cut_compressed_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    data = b"".join(json.dumps({"text": f"text {i} {i**7}"}).encode() + b"\n" for i in range(5000))
    data = gzip.compress(data) if suffix == ".gz" else zstd.compress(data)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} is damaged or cut short"):
        _read(path)
    path.write_bytes(b"no compressed data at all")
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} is damaged or cut short"):
        _read(path)


def test_bad_lines_cost_themselves_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "good 1"}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "good 2"}',
        b"{not json",
        b'{"other": 1}',
        b"[1, 2]",
        b"",
        '{"text": "好 3", "id": "x7"}'.encode(),
        b'{"text": "lone \\ud800 surrogate"}',
    ]
    path.write_bytes(b"\n".join(lines))
    items = _read(path)
    assert _texts(items) == ["good 1", "good 2", "好 3", "lone \ufffd surrogate"]
    rejected = [item for item in items if isinstance(item, Rejected)]
    assert [item.reason for item in rejected] == [
        "invalid UTF-8 line", "invalid JSON line", "no text in field 'text'",
        "no text in field 'text'",
    ]  # fmt: skip
    assert rejected[0].id == "s/a.jsonl:2"
    assert rejected[0].raw == lines[1]
    assert "raw_base64" in json.loads(rejected[0].to_json())
    assert json.loads(rejected[1].to_json())["raw"] == "{not json"
    assert [item.id for item in items if isinstance(item, Document)][2] == "s/x7"


def test_bad_line_of_txt_is_left_out_of_its_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo \xff\nthree\n\nfour")
    items = _read(path)
    assert _texts(items) == ["one\nthree", "four"]
    assert [item.reason for item in items if isinstance(item, Rejected)] == ["invalid UTF-8 line"]


@pytest.mark.parametrize(
    ("name", "content", "mode"),
    [
        ("a.jsonl", b'{"text": "' + b"x" * 5000 + b'"}\n', "blank_line"),
        ("a.txt", b"x" * 5000, "line"),
        ("a.txt", b"some words\n" * 500, "file"),
    ],
)
def test_too_long_document_names_the_limit(
    tmp_path: Path, name: str, content: bytes, mode: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}, line 1: .*clean\.max_document_mb"):
        _read(tmp_path / name, max_bytes=4000, txt_documents=mode)


def test_folder_glob_and_list_are_found_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.jsonl", "b/d.txt.gz", "b/notes.pdf", "e.zst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    inputs = (str(tmp_path), f"{tmp_path}/b/*.jsonl", f"{tmp_path}/a.txt")
    found = find(SourceConfig(name="s", inputs=inputs))
    assert [file.name for file in found.files] == ["a.txt", "b/c.jsonl", "b/d.txt.gz"]
    assert len(found.ignored) == 2
    by_glob = find(SourceConfig(name="s", inputs=(f"{tmp_path}/*/*.jsonl",)))
    assert [file.name for file in by_glob.files] == ["b/c.jsonl"]


def test_missing_or_unknown_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\*' matches no file"):
        find(SourceConfig(name="s", inputs=(f"{tmp_path}/nothing*",)))
    (tmp_path / "a.pdf").touch()
    with pytest.raises(DataError, match=r"a\.pdf is of an unknown kind; expected \.txt"):
        find(SourceConfig(name="s", inputs=(f"{tmp_path}/a.pdf",)))


def test_files_are_grouped_by_size(tmp_path: Path) -> None:
    for i, size in enumerate([10, 10, 50, 10, 10, 10]):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * size)
    source = SourceConfig(name="s", inputs=(str(tmp_path),))
    groups = [[f.name for f in p.files] for p in pieces(source, find(source).files, 30)]
    assert groups == [["0.txt", "1.txt"], ["2.txt"], ["3.txt", "4.txt", "5.txt"]]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("ＡＢＣ　１２３", "ABC 123"),
        ("ﬁne\u00ad\u200bness", "fineness"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("a \t b\x00\x07c", "a bc"),
        ("one  \n \n\n\n  two ", "one\n\ntwo"),
        ("  \n\t ", ""),
        ("中文，没有空格。", "中文,没有空格。"),
        ("e\u0301", "é"),
    ],
)
def test_normalise(raw: str, expected: str) -> None:
    assert normalise(raw) == expected
    assert normalise(expected) == expected
