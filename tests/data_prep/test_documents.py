"""Reading files: documents, ids, bad lines, limits, encodings, which files are found."""

import json
import os
import socket
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import SourceConfig
from data_prep.documents import read_file
from data_prep.inputs import encoding_of, find, pieces
from data_prep.types import Document, Rejected
from pipeline.errors import DataError
from tests.support.prepare import read_source, reasons_of, texts_of

TXT = "first line\nsecond line\n\n\nsecond document\r\n\nlast"


@pytest.mark.parametrize(("mode", "texts"), [
    ("blank_line", ["first line\nsecond line", "second document", "last"]),
    ("line", ["first line", "second line", "second document", "last"]),
    ("file", ["first line\nsecond line\n\n\nsecond document\n\nlast"]),
])  # fmt: skip
def test_txt_documents(tmp_path: Path, mode: str, texts: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TXT.encode())
    items = read_source(path, txt_documents=mode)
    assert texts_of(items) == texts
    assert items[0].id == "s/a.txt@0"
    assert len({item.id for item in items}) == len(items)


def test_markdown_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title\n\ntext\n")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "page.md").write_text("# Page\n")
    folder, one = (str(tmp_path),), (f"{tmp_path}/README*",)
    found = find(SourceConfig(name="s", inputs=folder))
    assert [file.name for file in found.files] == ["a.txt", "page.md"]
    assert found.ignored == (f"{tmp_path}/README.md",)
    (tmp_path / "page.md").unlink()
    for inputs, kind in ((folder, "md"), (one, "auto")):
        source = SourceConfig(name="s", inputs=inputs, format=kind, txt_documents="line")  # type: ignore[arg-type]
        [file] = find(source).files
        assert texts_of(list(read_file(file, source, 1000))) == ["# Title\n\ntext"]


def test_bad_lines_cost_themselves_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "good 1"}', b'{"text": "bad \xff byte"}', b'{"text": "good 2"}',
             b"{not json", b'{"other": 1}', b"[1, 2]", b"", '{"text": "好 3", "id": "x7"}'.encode(),
             b'{"text": "lone \\ud800 surrogate"}']  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    items = read_source(path)
    assert texts_of(items) == ["good 1", "good 2", "好 3", "lone \ufffd surrogate"]
    assert reasons_of(items) == ["invalid UTF-8 line", "invalid JSON line",
                                 "no text in field 'text'",
                                 "array where an object was expected"]  # fmt: skip
    rejected = [item for item in items if isinstance(item, Rejected)]
    assert (rejected[0].id, rejected[0].raw) == (f"s/a.jsonl@{len(lines[0]) + 1}", lines[1])
    assert "raw_base64" in json.loads(rejected[0].to_json())
    assert json.loads(rejected[1].to_json())["raw"] == "{not json"
    assert [item.id for item in items if isinstance(item, Document)][2] == "s/x7"


def test_bad_lines_of_text_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo \xff\nthree\n\nfour")
    items = read_source(path)
    assert texts_of(items) == ["one\nthree", "four"]
    assert reasons_of(items) == ["invalid UTF-8 line"]
    bad = "坏".encode("gb18030") + b"\xff"
    path.write_bytes("一二三\n".encode("gb18030") + bad + "\n四𠀀\n".encode("gb18030"))
    items = read_source(path, encoding="gb18030")
    assert texts_of(items) == ["一二三\n四𠀀"]
    assert items[0] == Rejected("s/a.txt@7", "invalid GB18030 line", bad, rows=0)


@pytest.mark.parametrize(("name", "content", "place", "mode"), [
    ("a.jsonl", b'{"text": "' + b"x" * 5000 + b'"}\n', 0, "blank_line"),
    ("a.json", b'["' + b"x" * 5000, 1, "blank_line"),
    ("a.csv", b"text\n" + b"x" * 5000, 5, "blank_line"),
    ("wiki_00", b'<doc id="1" url="" title="">\n' + b"some words\n" * 500, 29, "blank_line"),
    ("a.txt", b"x" * 5000, 0, "line"), ("a.txt", b"some words\n" * 500, 0, "file"),
    ("a.txt", b"some words\n" * 500, 0, "blank_line"),
])  # fmt: skip
def test_too_long_text_names_limit(
    tmp_path: Path, name: str, content: bytes, place: int, mode: str
) -> None:
    (tmp_path / name).write_bytes(content)
    said = rf"{name}: document s/{name}@{place} .*clean\.max_document_mb"
    with pytest.raises(DataError, match=said):
        read_source(tmp_path / name, max_bytes=4000, txt_documents=mode)


def test_folder_glob_and_list_are_found_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.jsonl", "b/d.txt.gz", "b/notes.pdf", "e.zst", "b/wiki_07",
                 "b/f.snappy.parquet", "b/g.warc.wet.gz", "b/h.parquet.gz",
                 "b/i.JSON.XZ"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    inputs = (str(tmp_path), f"{tmp_path}/b/*.jsonl", f"{tmp_path}/a.txt")
    found = find(SourceConfig(name="s", inputs=inputs))
    assert [file.name for file in found.files] == ["a.txt", "b/c.jsonl", "b/d.txt.gz",
                                                   "b/f.snappy.parquet", "b/g.warc.wet.gz",
                                                   "b/i.JSON.XZ", "b/wiki_07"]  # fmt: skip
    assert sorted(Path(path).name for path in found.ignored) == [
        "e.zst", "h.parquet.gz", "notes.pdf"
    ]  # fmt: skip
    assert _names(f"{tmp_path}/*/*.jsonl") == ["b/c.jsonl"]


def _names(*inputs: object, **settings: Any) -> list[str]:
    source = SourceConfig(name="s", inputs=tuple(map(str, inputs)), **settings)
    return [file.name for file in find(source).files]


def test_a_set_format_reads_named_files_whatever_they_are_called(tmp_path: Path) -> None:
    for name in ("part-0", "part-1", "_SUCCESS", "x.jsonl"):
        (tmp_path / name).write_bytes(b'{"text": "a"}\n')
    assert _names(f"{tmp_path}/part-*", format="jsonl") == ["part-0", "part-1"]
    # Spark's files have no suffix: of other files in a folder the name decides.
    assert _names(tmp_path, format="jsonl") == ["part-0", "part-1", "x.jsonl"]
    assert _names(tmp_path) == ["x.jsonl"]
    assert texts_of(read_source(tmp_path / "part-0", format="jsonl")) == ["a"]


def test_folders_that_a_glob_fits_are_read(tmp_path: Path) -> None:
    names = ("crawl-1/a.jsonl", "crawl-1/sub/b.jsonl", "crawl-2/part.0.parquet", "crawl-3.jsonl",
             "crawl-4.jsonl/part-00000", "crawl-5/1.part")  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b'{"text": "a"}\n')
    assert _names(f"{tmp_path}/crawl-*") == [*names[:-1]]
    assert _names(f"{tmp_path}/**") == [*names[:-1]]
    assert _names(f"{tmp_path}/crawl-[45]*", format="jsonl") == [*names[-2:]]
    assert texts_of(read_source(tmp_path / "crawl-4.jsonl")) == ["a"]


@pytest.mark.parametrize("given", ["", "/*", "/**"])
def test_what_is_not_a_file_is_named(tmp_path: Path, given: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n')
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        with pytest.raises(DataError, match=r"3 files .*cannot be read.*gone\.jsonl"):
            _names(f"{tmp_path}{given}")
        listing = find(SourceConfig(name="s", inputs=(f"{tmp_path}{given}",), on_unreadable="skip"))
    assert [file.name for file in listing.files] == ["a.jsonl"]
    assert {Path(text.split(" (")[0]).name for text in listing.unreadable} == {
        "gone.jsonl", "pipe", "socket"
    }  # fmt: skip


def test_files_of_one_name_get_different_ids(tmp_path: Path) -> None:
    for name in ("a/x/0.txt", "a/y/0.txt", "b/1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    inputs = (tmp_path / folder for folder in ("a/x", "a/y", "b"))
    assert _names(*inputs) == ["1.txt", "x/0.txt", "y/0.txt"]


def test_missing_unknown_and_misnamed_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").touch()
    (tmp_path / "\udcff.txt").touch()
    for given, message in (("nothing*", r"nothing\*' matches no file"),
                           ("a.pdf", r"a\.pdf .*expected \.txt"),
                           ("", r"udcff\.txt': .*rename")):  # fmt: skip
        with pytest.raises(DataError, match=message):
            _names(f"{tmp_path}/{given}")


def test_a_package_by_its_version_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names that the package's own list has, tests left out; wherever it is installed."""

    def names(*inputs: str) -> list[str]:
        source = SourceConfig(name="s", kind="embedded", inputs=inputs)
        return [file.name for file in find(source).files]

    of = distribution("pyyaml")
    listed = {str(file) for file in of.files or () if file.suffix == ".py"}
    found = names(f"pyyaml=={of.version}")
    assert {name for name in found if name.endswith(".py")} == {f"packages/{n}" for n in listed}
    assert len(listed) > 10
    assert found == sorted(found)
    assert any(name.endswith("/METADATA") for name in found)
    assert not any("/tests/" in name for name in names(f"numpy=={distribution('numpy').version}"))
    both = names("stdlib/ast*", f"pyyaml=={of.version}")
    assert "stdlib/ast.py" in both
    assert set(found) < set(both)
    for asked, state in (("pyyaml==0.1", f"as {of.version}"), ("no-such==1", "not installed")):
        with pytest.raises(DataError, match=rf"{asked}.*{state}.*pip install '{asked}'"):
            names(asked)
    monkeypatch.syspath_prepend(tmp_path)
    about = tmp_path / "torn-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n\ntext\n")
    (about / "RECORD").write_text("torn-1.dist-info/METADATA,,\n")
    with pytest.raises(DataError, match=r"torn==1.*no Python file.*pip install .*'torn==1'"):
        names("torn==1")
    (about / "RECORD").write_text("torn-1.dist-info/METADATA,,\ntorn/gone.py,,\n")
    with pytest.raises(DataError, match=r"torn==1.*lacks .*gone\.py"):
        names("torn==1")


def test_files_are_grouped_by_size(tmp_path: Path) -> None:
    for i, size in enumerate([10, 10, 50, 10, 10, 10]):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * size)
    source = SourceConfig(name="s", inputs=(str(tmp_path),))
    groups = [[f.name for f in p.files] for p in pieces(source, find(source).files, 30)]
    assert groups == [["0.txt", "1.txt"], ["2.txt"], ["2.txt"], ["3.txt", "4.txt", "5.txt"]]


CHINESE = "天地玄黄，宇宙洪荒。日月盈昃\n\n辰宿列张，寒来暑往\n"


@pytest.mark.parametrize(("data", "taken"), [
    (b"x" * (2**18 - 1) + CHINESE.encode(), "utf-8"),  # the head ends in a character
    (b"x" * 2**20 + b"\n" + CHINESE.encode("gb18030") * 2000, "gb18030"),
    (bytes(range(128, 256)) * 9, None), (b"", "utf-8"),
])  # fmt: skip
def test_encoding_is_found(tmp_path: Path, data: bytes, taken: str | None) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    source = SourceConfig(name="s", inputs=(str(tmp_path),), encoding="auto")
    assert encoding_of(find(source).files[0], source) == taken


def test_odd_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content in (b"", b"\n \n\r\n\t\n", b"\xef\xbb\xbf\n"):
        path.write_bytes(content)
        for mode in ("blank_line", "line", "file"):
            assert read_source(path, txt_documents=mode) == []
    path.write_bytes(b"a\x00b")
    assert texts_of(read_source(path)) == ["a\0b"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\u0000", "id": "x\\ud800"}\n{"text": "b", "id": ""}')
    assert read_source(path) == [Document("s/x\ufffd", "a\0"), Document("s/a.jsonl@40", "b")]
