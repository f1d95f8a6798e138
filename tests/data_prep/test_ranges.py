"""A file in ranges gives what the whole file gives: documents, ids, rejected lines, their order."""

import random
from pathlib import Path

import pytest

from data_prep.config import SourceConfig
from data_prep.documents import read_file
from data_prep.inputs import find, pieces
from data_prep.types import Document, Rejected
from pipeline.errors import DataError

PARTS = [b"\n", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b" ", b"\t \n", "\u3000\n".encode(),
         b"a", b"some words", "好的".encode(), "𠀀".encode(), b"\xff", b"\xe5\xa5", b"\x00",
         b"\xef\xbb\xbf", b"two\nlines", b'{"text": "a"}\n', b'{"text": "b", "id": "x"}\r\n',
         b'{"text": "\xff"}\n']  # fmt: skip


def _source(path: Path, **settings: str) -> SourceConfig:
    return SourceConfig(name="s", inputs=(str(path),), **settings)  # type: ignore[arg-type]


def _in_pieces(path: Path, piece_bytes: int, **settings: str) -> list[Document | Rejected]:
    source = _source(path, **settings)
    encoding = "gb18030" if source.encoding == "gb18030" else "utf-8"
    return [
        item for piece in pieces(source, find(source).files, piece_bytes) for file in piece.files
        for item in read_file(file, source, 10_000, encoding)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), [
    ("a.txt", {"txt_documents": "blank_line"}),
    ("a.txt", {"txt_documents": "blank_line", "encoding": "gb18030"}),
    ("a.txt", {"txt_documents": "line"}), ("a.txt", {"txt_documents": "file"}), ("a.jsonl", {}),
])  # fmt: skip
def test_any_piece_size_gives_the_same(tmp_path: Path, name: str, settings: dict[str, str]) -> None:
    path = tmp_path / name
    draw = random.Random(0)
    documents = rejected = 0
    for _ in range(60):
        data = b"".join(draw.choices(PARTS, k=draw.randint(1, 40)))
        path.write_bytes(data)
        whole = _in_pieces(path, 1_000_000, **settings)
        ids = [item.id for item in whole if isinstance(item, Document) and item.id != "s/x"]
        assert len(ids) == len(set(ids))
        for item in whole:
            if isinstance(item, Document) and item.id != "s/x":
                # The id says where the document's text stands in the file.
                encoding = settings.get("encoding", "utf-8")
                begin = data[int(item.id.partition("@")[2]) :]
                if encoding == "utf-8":
                    begin = begin.removeprefix(b"\xef\xbb\xbf")
                first = item.text.partition("\n")[0].encode(encoding)
                assert name == "a.jsonl" or begin.startswith(first)
        for piece_bytes in {1, 2, 3, len(data) - 1, *(draw.randint(1, len(data)) for _ in "123")}:
            assert _in_pieces(path, max(1, piece_bytes), **settings) == whole
        documents += sum(isinstance(item, Document) for item in whole)
        rejected += sum(isinstance(item, Rejected) for item in whole)
    assert documents > 50
    assert rejected > 50


def test_what_is_split_and_what_is_not(tmp_path: Path) -> None:
    names = ["a.txt", "b.jsonl", "c.txt.gz", "d.wet", "e.parquet", "wiki_00"]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 100)
    found = pieces(_source(tmp_path), find(_source(tmp_path)).files, 30)
    ranges = [(f.name, f.start, f.end) for piece in found for f in piece.files]
    bounds = [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert ranges == [
        *(("a.txt", start, end) for start, end in bounds),
        *(("b.jsonl", start, end) for start, end in bounds),
        *((name, 0, None) for name in names[2:]),
    ]
    whole = _source(tmp_path / "a.txt", txt_documents="file")
    assert len(pieces(whole, find(whole).files, 30)) == 1


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_too_long_line_is_an_error_in_every_range(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\n" + b"x" * 300_000 + b"\n")
    source = _source(path)
    found = pieces(source, find(source).files, 50_000)
    assert len(found) == 7
    for piece in found:
        with pytest.raises(DataError, match=rf"{name}@\d+ .*clean\.max_document_mb"):
            list(read_file(piece.files[0], source, 10_000))
