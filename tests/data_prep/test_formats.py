"""Parquet, WET and WARC, and WikiExtractor's output."""

import gzip
import io
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warcio.warcwriter import WARCWriter

from data_prep.config import SourceConfig
from data_prep.documents import read_file
from data_prep.inputs import find
from data_prep.types import Document, Rejected
from pipeline.errors import DataError
from tests.support.prepare import read_source, reasons_of, texts_of


@pytest.mark.parametrize("kind", [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
    pa.dictionary(pa.int32(), pa.string()),
], ids=str)  # fmt: skip
def test_parquet_columns(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"n": [1, 2, 3], "body": pa.array(["一", None, "b\nc"]).cast(kind),
                      "key": ["k1", "k2", None]})  # fmt: skip
    pq.write_table(table, path, row_group_size=2)
    items = read_source(path, text_field="body", id_field="key")
    assert items == [
        Document("s/k1", "一"),
        Rejected("s/a.parquet@1", "no text in column 'body'", b"", "columns there: n, body, key"),
        Document("s/a.parquet@2", "b\nc"),
    ]
    assert [item.id for item in read_source(path, text_field="body")] == [
        "s/a.parquet@0", "s/a.parquet@1", "s/a.parquet@2"
    ]  # fmt: skip
    [item] = read_source(path, text_field="n")
    assert isinstance(item, Rejected)
    assert item.reason == "no text in column 'n'"
    assert (item.rows, item.detail) == (3, "columns there: n, body, key")


def test_parquet_that_is_broken_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"good", b"one\nbad \xff\ntwo", b"\xff"])
    strings = pa.Array.from_buffers(pa.string(), 3, raw.buffers())  # unchecked, as many writers do
    pq.write_table(pa.table({"text": strings, "id": pa.array([7, 8, 9])}), path)
    assert read_source(path) == [
        Document("s/7", "good"), Rejected("s/8", "invalid UTF-8 line", b"bad \xff", rows=0),
        Document("s/8", "one\ntwo"), Rejected("s/9", "invalid UTF-8 line", b"\xff", rows=0),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"document s/a\.parquet@1 .*clean\.max_document_mb"):
        read_source(path, max_bytes=10)
    texts = [f"text {i} {i**7}" for i in range(4000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000, use_dictionary=False)
    data = path.read_bytes()
    whole = read_source(path)
    assert texts_of(whole) == texts
    for broken in (b"", b"nothing of the kind", data[: len(data) // 2], data[:-1]):
        path.write_bytes(broken)
        assert read_source(path) == [Rejected("s/a.parquet", "file damaged", b"")]
    middle = len(data) // 2
    path.write_bytes(data[: middle - 5000] + b"\xff" * 10_000 + data[middle + 5000 :])
    items = read_source(path)
    assert isinstance(items[-1], Rejected)
    assert (items[-1].reason, items[:1000]) == ("file damaged", whole[:1000])


def test_a_parquet_page_with_another_checksum_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {i:04d}" for i in range(300)]})
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True, **options)
    data = bytearray(path.read_bytes())
    data[data.index(b"text 0150")] ^= 1
    path.write_bytes(data)
    items = read_source(path)
    assert texts_of(items) == [f"text {i:04d}" for i in range(100)]
    assert reasons_of(items) == ["file damaged"]


@pytest.mark.long
def test_parquet_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    size = 60_000_000
    table = pa.table({"text": [f"{i:08d}" * 250 for i in range(size // 2000)]})
    pq.write_table(table, path, row_group_size=10**6, compression="none", use_dictionary=False)
    del table
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    source = SourceConfig(name="s", inputs=(str(path),))
    tracemalloc.start()
    largest = count = 0
    for _ in read_file(find(source).files[0], source, 1_000_000):
        largest = max(largest, pool.bytes_allocated() - before)
        count += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == size // 2000
    assert largest < size / 4
    assert peak < size / 4


def _warc(compressed: bool, texts: list[bytes]) -> bytes:
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=compressed)
    writer.write_record(writer.create_warcinfo_record("a.wet", {"software": "x"}))
    for i, text in enumerate(texts):
        record = writer.create_warc_record(
            f"http://example.com/{i}", "conversion", payload=io.BytesIO(text),
            warc_headers_dict={"WARC-Record-ID": f"<urn:uuid:{i}>"}, warc_content_type="text/plain",
        )  # fmt: skip
        writer.write_record(record)
    return out.getvalue()


TEXTS = ["第一\n\npage".encode(), b"WARC/1.0\r\n\r\n", b"", b"good\n\xff\nline", b"last"]
WET_ITEMS = [Document("s/urn:uuid:0", "第一\n\npage"), Document("s/urn:uuid:1", "WARC/1.0\r\n\r\n"),
             Document("s/urn:uuid:2", ""),
             Rejected("s/urn:uuid:3", "invalid UTF-8 line", b"\xff", rows=0),
             Document("s/urn:uuid:3", "good\nline"), Document("s/urn:uuid:4", "last")]  # fmt: skip


@pytest.mark.parametrize("name", ["a.warc.wet", "a.warc.wet.gz", "a.wet", "a.warc.gz"])
def test_wet_records(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(_warc(name.endswith(".gz"), TEXTS))
    assert read_source(tmp_path / name) == WET_ITEMS
    with pytest.raises(DataError, match=r"document s/urn:uuid:0 .*clean\.max_document_mb"):
        read_source(tmp_path / name, max_bytes=5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.wet", "a.wet.gz"])
def test_wet_cut_anywhere(tmp_path: Path, name: str) -> None:
    data = _warc(name.endswith(".gz"), TEXTS)
    boundaries = 0
    for cut in range(len(data)):
        (tmp_path / name).write_bytes(data[:cut])
        items = read_source(tmp_path / name)
        breaks = [item for item in items if isinstance(item, Rejected) and "file" in item.reason]
        boundaries += not breaks
        assert items == [*WET_ITEMS[: len(items) - len(breaks)], *breaks]
        assert len(breaks) <= 1
        if breaks and name.endswith(".gz"):
            assert breaks[0].reason == "file cut short"
    # Between records nothing tells that more were to come: before and in the 4 bytes of line ends
    # behind each of the 6, and behind the header of the empty one; nor in a file of 0 or 1 bytes.
    assert boundaries <= (6 if name.endswith(".gz") else 6 * 5 - 1 + 4 + 2)


def test_damaged_wet_and_records_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "a.wet"
    path.write_bytes(b"<html>no archive</html>")
    assert read_source(path) == [Rejected("s/a.wet", "file damaged", b"")]
    data = _warc(False, [b"first", b"second one", b"third"])
    wrong = data.replace(b"Content-Length: 10", b"Content-Length: 4")
    assert wrong != data
    path.write_bytes(wrong)
    items = read_source(path)
    assert items[0] == Document("s/urn:uuid:0", "first")
    assert items[-1] == Rejected("s/a.wet", "file damaged", b"")
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=True)
    for kind, start in (("request", b"GET / HTTP/1.1"), ("response", b"HTTP/1.1 200 OK")):
        payload = io.BytesIO(start + b"\r\n\r\n<html>" + b"x" * 200_000)
        writer.write_record(writer.create_warc_record("http://e.com/a", kind, payload=payload))
    (tmp_path / "a.warc.gz").write_bytes(out.getvalue() + _warc(True, [b"text"]))
    *rejected, document = read_source(tmp_path / "a.warc.gz", max_bytes=1000)
    assert [(item.reason, item.raw) for item in rejected if isinstance(item, Rejected)] == [
        ("WARC request record, which holds no extracted text", b"http://e.com/a"),
        ("WARC response record, which holds no extracted text", b"http://e.com/a"),
    ]
    assert document == Document("s/urn:uuid:0", "text")


WIKI = b"""\
<doc id="12" url="https://zh.wikipedia.org/wiki?curid=12" title="A "quoted" &lt;title&gt;">
A "quoted" &lt;title&gt;

First paragraph.
bad \xff

Second {paragraph}.

</doc>

stray
<doc id="13" url="u" title="open">
never closed
<doc id="14" url="u" title="last">
last
</doc>
{"id": "15", "url": "u", "title": "t", "text": "t\\n\\njson form"}
{broken
<doc id="16" url="u" title="cut">
cut
"""


@pytest.mark.parametrize("name", ["AA/wiki_00", "AA/wiki_123.gz"])
def test_wikiextractor(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(gzip.compress(WIKI) if name.endswith(".gz") else WIKI)
    place = f"s/{name}@"
    assert read_source(tmp_path) == [
        Rejected(f"{place}{WIKI.index(b'bad')}", "invalid UTF-8 line", b"bad \xff", rows=0),
        Document(
            "s/12", 'A "quoted" &lt;title&gt;\n\nFirst paragraph.\n\nSecond {paragraph}.\n'
        ),
        Rejected(f"{place}{WIKI.index(b'stray')}", "line outside <doc>", b"stray"),
        Rejected("s/13", "no </doc>", b"never closed"),
        Document("s/14", "last"),
        Document("s/15", "t\n\njson form"),
        Rejected(f"{place}{WIKI.index(b'{broken')}", "invalid JSON line", b"{broken"),
        Rejected("s/16", "no </doc>", b"cut"),
    ]  # fmt: skip


def test_carriage_returns_alone_make_no_document_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\rtwo\r\rthree\r")
    for mode in ("line", "blank_line"):
        with pytest.raises(DataError, match=r"a\.txt has no line feed: carriage returns"):
            read_source(path, txt_documents=mode)
    assert len(texts_of(read_source(path, txt_documents="file"))) == 1
    path.write_bytes(b"10%\r20%\r30%\r\ndone\r\n")
    assert texts_of(read_source(path, txt_documents="line")) == ["10%\r20%\r30%", "done"]
    # A range that begins within the last line.
    path.write_bytes(b"line\n" * 100 + b"last\rfoo" * 9)
    source = SourceConfig(name="s", inputs=(str(path),), txt_documents="line")
    [file] = find(source).files
    assert list(read_file(replace(file, start=510, end=None), source, 1000)) == []


def test_what_a_record_may_hold_beside_its_text(tmp_path: Path) -> None:
    deep = "[" * 600 + "]" * 600
    lines = ['{"text": "caf\\u00e9", "x": ' + deep + "}", '{"\\ud800": "x"}',
             '{"text": "good", "m": {"\\udfff": 1}}']  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    items = read_source(path, metadata=("m",))
    assert items[-1] == Document("s/a.jsonl@" + str(len("\n".join(lines[:2])) + 1), "good",
                                 {"m": {"\ufffd": 1}})  # fmt: skip
    assert all(item.to_json().encode() for item in items if isinstance(item, Rejected))
    table = pa.table({"text": ["good"], "when": pa.array([1_700_000_000_123_456_789],
                                                          pa.timestamp("ns", "UTC"))})  # fmt: skip
    pq.write_table(table, tmp_path / "b.parquet")
    [item] = read_source(tmp_path / "b.parquet", metadata=("when",))
    assert isinstance(item, Document)
    assert str(item.metadata["when"]).startswith("2023-11-14 22:13:20.123456")
    # Of several texts a number rejects its row, in a table as in JSON.
    rows = [{"title": "a", "year": 1998}, {"title": "b", "year": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("c.parquet", "c.jsonl"):
        items = read_source(tmp_path / name, text_field=("title", "year"))
        assert (texts_of(items), len(items)) == (["b"], 2)


def test_an_own_reader_that_yields_what_json_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import datetime\ndef read(path):\n"
        "    yield '1', 'text', {'date': datetime.date(2020, 1, 2)}\n"
    )
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"own\.py.*behind document 0 of .*a\.txt.*date"):
        read_source(tmp_path / "a.txt", reader=f"{tmp_path}/own.py:read", metadata=("date",))
