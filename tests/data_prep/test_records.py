"""Records: JSON arrays, tables, nested fields, metadata, the export of them, and long documents."""

import csv
import io
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.config import CleanConfig, SourceConfig
from data_prep.documents import ReadStats, read_piece
from data_prep.export import export
from data_prep.ingest import FieldCounts, count, merged, shown
from data_prep.inputs import find, pieces
from data_prep.pieces import read_lines
from data_prep.readers import records
from data_prep.run import run, run_part
from data_prep.show import document_text, rejected_text
from data_prep.types import Document, InputPiece, Rejected
from pipeline.errors import ConfigError, DataError
from tests.support.prepare import config_of, read_source, reasons_of, texts_of, write_texts

_AWKWARD = ["", 'a "quote", a \\ and a \\" b', "[x], {y}", "雪\u2028,\n", "\\", "]}", "😀\ud800"]


@pytest.mark.parametrize("step", [1, 2, 7, 1 << 16])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_of_any_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, indent: int | None
) -> None:
    monkeypatch.setattr(records, "_STEP", step)
    draw = random.Random(step)
    texts = ["".join(draw.choices(_AWKWARD, k=draw.randrange(4)))
             .encode("utf-16", "surrogatepass").decode("utf-16", "replace")
             for _ in range(40)]  # fmt: skip
    rows = [{"n": [i, {"x": text}], "text": text} for i, text in enumerate(texts)]
    path = tmp_path / "a.json"
    data = " " + json.dumps(rows, indent=indent, ensure_ascii=step == 2) + "\n"
    path.write_text(data)
    items = read_source(path)
    assert texts_of(items) == texts
    places = [int(item.id.rpartition("@")[2]) for item in items]
    assert [json.JSONDecoder().raw_decode(data.encode()[at:].decode())[0] for at in places] == rows


@pytest.mark.parametrize(("data", "texts", "reason"), [
    (b'[{"text": "a"}, {"text": 1}]', ["a"], "no text in field 'text'"),
    (b'[{"text": "a"}, {"text": "b"', ["a"], "file cut short"),
    (b'[{"text": "a"}] {"text": "b"}', ["a"], "file damaged"),
    (b'[{"text": "a"}, "\xff"]', ["a"], "invalid UTF-8 line"),
    (b'[{"text": "a"}, {"text" "b"}]', ["a"], "invalid JSON line"),
])  # fmt: skip
def test_arrays_with_mistakes(tmp_path: Path, data: bytes, texts: list[str], reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    items = read_source(path)
    assert texts_of(items) == texts
    assert reasons_of(items) == [reason]


def test_a_json_file_of_lines_is_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [item.id for item in read_source(path)] == ["s/a.json@0", "s/a.json@14"]


def test_tables(tmp_path: Path) -> None:
    cells = ["plain", 'with "quotes", and commas', "two\nlines", "雪", " "]
    rows = [{"text": cell, "id": f"k{i}", "more": "x"} for i, cell in enumerate(cells)]
    file = io.StringIO()
    writer = csv.DictWriter(file, ["more", "id", "text"])
    writer.writeheader()
    writer.writerows(rows)
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" + file.getvalue().encode() + b"\r\nx,short\r\n")
    *documents, short = read_source(path, metadata=("more",))
    assert documents == [Document(f"s/k{i}", cell, {"more": "x"}) for i, cell in enumerate(cells)]
    assert isinstance(short, Rejected)
    assert (short.reason, short.detail) == ("row of another length", "2 cells, 3 columns")
    assert short.id == f"s/a.csv@{3 + len(file.getvalue().encode()) + 2}"

    for name, encoding in (("b.tsv", "utf-8"), ("c.tsv", "gb18030")):
        path = tmp_path / name
        path.write_bytes('id\ttext\n1\t"雪\n2\t山"\n'.encode(encoding) + b"3\t\xff\xff\xff\n")
        *documents, bad = read_source(path, encoding=encoding)
        assert documents == [Document("s/1", '"雪'), Document("s/2", '山"')]
        assert isinstance(bad, Rejected)
        assert bad.reason.startswith("invalid ")

    path.write_text('text\n"never closed\nmore\n')
    [broken] = read_source(path, format="csv")
    assert isinstance(broken, Rejected)
    assert (broken.reason, broken.raw) == ("file damaged", b'"never closed\nmore')
    path.write_text("body\nx\n")
    [none] = read_source(path)
    assert isinstance(none, Rejected)
    assert none.reason == "no text in column 'text'"


def test_nested_fields_of_json_and_parquet(tmp_path: Path) -> None:
    rows = [
        {"doc": {"body": "a", "key": "k"}, "meta": {"url": "u", "n": 3}, "x.y": "whole"},
        {"doc": {"body": None, "key": "l"}, "meta": None, "x.y": "whole"},
        {"doc": None, "meta": {"url": "v", "n": None}, "x.y": None},
        {"doc": {"body": "b", "key": None}, "meta": {"url": "v", "n": None}, "x.y": None},
    ]
    settings: dict[str, Any] = {"text_field": "doc.body", "id_field": "doc.key",
                                "metadata": ("meta.url", "meta.n", "x.y")}  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        first, *rejected, last = read_source(tmp_path / name, **settings)
        assert first == Document("s/k", "a", {"meta.url": "u", "meta.n": 3, "x.y": "whole"})
        assert all(isinstance(item, Rejected) for item in rejected)
        assert len(rejected) == 2
        assert isinstance(last, Document)
        assert (last.text, last.metadata) == ("b", {"meta.url": "v"})
        assert last.id.startswith(f"s/{name}@")


def test_a_dataset_of_the_hub_with_its_metadata(tmp_path: Path, prep_config: Path) -> None:
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "README.md").write_text("A card.")
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(300)]
    rows = [
        {"text": " ".join(draw.choices(words, k=60)), "url": f"http://x/{i}", "n": i}
        for i in range(400)
    ]
    rows[7]["text"] = "x"
    for part in range(2):
        pq.write_table(
            pa.Table.from_pylist(rows[part::2]), folder / f"train-0000{part}-of-00002.parquet"
        )
    settings = ("sources.0.name=hub", "sources.0.metadata=[url,n]", "clean.min_chars=5",
                "dedup.lines=true", "tokenizer.vocab_size=400")  # fmt: skip
    config = config_of(prep_config, tmp_path / "out", folder.parent, *settings)
    run(config)
    first = "hub/data/train-00000-of-00002.parquet@0"
    assert "characters, url http://x/0, n 0:" in document_text(config, first)
    assert "url http://x/7, n 7" in rejected_text(config, "shorter", 5)

    page = (tmp_path / "out" / "datasheet.md").read_text()
    assert "| hub | 100%: 0 to 99 | 100%: http\\://x/0 to http\\://x/99 |" in page
    found = {}
    for form in ("jsonl", "parquet"):
        count, files = export(tmp_path / "out", tmp_path / form, form)  # type: ignore[arg-type]
        assert count == 399
        found[form] = [
            record for path in files for record in
            (pq.read_table(path).to_pylist() if form == "parquet" else read_lines(path))
        ]  # fmt: skip
    by_url = {record["url"]: record for record in found["jsonl"]}
    assert {url: record["text"] for url, record in by_url.items()} == {
        row["url"]: row["text"] for row in rows if row["text"] != "x"
    }
    assert by_url["http://x/2"]["n"] == 2
    assert found["parquet"] == [{**record, "n": str(record["n"])} for record in found["jsonl"]]
    index = json.loads((tmp_path / "out" / "index.json").read_bytes())
    splits = [record["split"] for record in found["jsonl"]]
    for split, total in index["totals"].items():
        assert splits.count(split) == total["documents"] > 0

    with pytest.raises(ConfigError, match="choose an empty folder"):
        export(tmp_path / "out", tmp_path / "jsonl", "parquet")
    mask = tmp_path / "out" / "work" / "dedup" / "00000.keep.npy"
    mask.write_bytes(mask.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataError, match="does not hold the 399 documents"):
        export(tmp_path / "out", tmp_path / "again", "jsonl")


def test_an_export_knows_documents_without_tokens_and_changed_masks(
    tmp_path: Path, prep_config: Path
) -> None:
    texts = [f"document {n} has {n * 7} words and a few more" for n in range(50)]
    path = write_texts(tmp_path / "a.jsonl", [*texts, "\u200d", texts[3]])
    pieces = sorted({piece for text in texts for piece in text.split()} | set("0123456789"))
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    config = config_of(prep_config, tmp_path / "out", path, "clean.min_chars=1",
                       f"tokenizer={{file: {tmp_path}/vocab.txt}}")  # fmt: skip
    report = run(config)
    assert report["stages"]["shards"]["rejected"] == {"no tokens": [1, 3]}
    assert export(tmp_path / "out", tmp_path / "made", "jsonl")[0] == 51
    mask = tmp_path / "out" / "work" / "dedup" / "00000.keep.npy"
    keep = np.load(mask)
    keep[[3, -1]] = keep[[-1, 3]]  # as many documents, and others
    np.save(mask, keep)
    with pytest.raises(
        DataError, match=r"00000\.keep\.npy is not what .* remove .*all\.done\.json"
    ):
        export(tmp_path / "out", tmp_path / "again", "jsonl")


def test_a_part_is_shown_as_its_source_splits_documents(tmp_path: Path, prep_config: Path) -> None:
    text = "\n".join(f"line {i} {'word ' * 40}" for i in range(6000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text, "id": "long"}) + "\n")
    own = "sources.0.clean={max_document_mb: 1, on_long_document: split}"
    config = config_of(prep_config, tmp_path / "out", tmp_path / "a.jsonl", own)
    run_part(config, "ingest")
    shown = document_text(config, "topics/long#2")
    assert "original, " in shown
    assert "ingested as:" in shown


def test_long_documents(tmp_path: Path) -> None:
    lines = ["雪" * 99_999 + "x"] * 9
    texts = ["\n".join(lines), "short", "山" * 1_000_000]
    path = write_texts(tmp_path / "a.jsonl", texts)
    source = SourceConfig(name="s", inputs=(str(path),))
    piece = InputPiece(source, find(source).files)

    def read(how: Any) -> tuple[list[Document | Rejected], ReadStats]:
        remarks = ReadStats()
        clean = CleanConfig(max_document_mb=1, on_long_document=how)
        return list(read_piece(piece, clean, remarks)), remarks

    with pytest.raises(DataError, match=r"on_long_document.*split.*reject"):
        read("stop")
    items, remarks = read("split")
    assert [item.id for item in items] == [
        "s/0", "s/0#2", "s/0#3", "s/1", "s/2", "s/2#2", "s/2#3", "s/2#4"
    ]  # fmt: skip
    documents = [item for item in items if isinstance(item, Document)]
    assert max(len(item.text.encode()) for item in documents) <= 1_000_000
    assert "".join(item.text for item in documents) == "".join(texts)
    assert all(item.text.endswith("x\n") for item in documents[:2])
    assert remarks.num_split == 2
    items, _ = read("reject")
    long = "longer than 1 MB"
    assert [getattr(item, "reason", "") for item in items] == [long, "", long]


_LINES = ["short", "山 水 " * 300_000, "雪" * 900_000, "last"]  # 2.4 MB and 2.7 MB


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "wiki_00", "a.wet"])
@pytest.mark.parametrize("how", ["reject", "split"])
def test_what_is_longer_than_is_read_is_split_or_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: Any
) -> None:
    monkeypatch.setattr("data_prep.documents.MOST_BYTES", 2_000_000)
    rows = [{"text": line, "id": str(i)} for i, line in enumerate(_LINES)]
    encoded = [line.encode() for line in _LINES]
    (tmp_path / name).write_bytes({
        "a.txt": b"\n".join(encoded) + b"\n",
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "a.json": json.dumps(rows, ensure_ascii=False).encode(),
        "a.csv": b"id,text\n" + b"".join(b"%d,%s\n" % pair for pair in enumerate(encoded)),
        "wiki_00": b"".join(b'<doc id="%d">\n%s\n</doc>\n' % pair for pair in enumerate(encoded)),
        "a.wet": b"".join(
            b"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Record-ID: <%d>\r\n"
            b"Content-Length: %d\r\n\r\n%s\r\n\r\n" % (i, len(line), line)
            for i, line in enumerate(encoded)
        ),
    }[name])  # fmt: skip
    source = SourceConfig(name="s", inputs=(str(tmp_path),), txt_documents="line")
    clean = CleanConfig(max_document_mb=1, on_long_document=how)
    for piece_bytes in (10**9, 700_000):
        items = [item for piece in pieces(source, find(source).files, piece_bytes)
                 for item in read_piece(piece, clean, ReadStats())]  # fmt: skip
        texts = texts_of(items)
        rejected = [item for item in items if isinstance(item, Rejected)]
        if name == "a.txt" and how == "split":
            assert not rejected
            assert max(len(text.encode()) for text in texts) <= 1_000_000
            assert "".join(texts) == "".join(_LINES)
            assert len({item.id for item in items}) == len(items) == 8
            continue
        assert texts == ["short", "last"]
        assert reasons_of(items) == ["longer than 2 MB"] * 2
        assert not any(item.is_lost for item in rejected)  # it was asked for
        assert all(len(item.raw) <= 1000 for item in rejected)


_NESTED = {"段落": [{"内容": "一", "行号": 0}, {"内容": "二"}, {"行号": 2}], "title": "头"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_fields_of_lists_and_joined_fields(tmp_path: Path, name: str) -> None:
    rows = [
        {**_NESTED, "body": ["b", "c"], "id": "0"},
        {"段落": [], "title": None, "body": [], "id": "1"},
        {"段落": None, "title": "only", "body": ["d", None, "e"], "id": "2"},
    ]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = f"[{','.join(lines)}]" if name == "a.json" else "\n".join(lines)
        (tmp_path / name).write_text(text, encoding="utf-8")

    def texts(*fields: str) -> dict[str, str]:
        given = fields if len(fields) > 1 else fields[0]
        items = read_source(tmp_path / name, text_field=given)
        return {item.id: item.text for item in items if isinstance(item, Document)}

    assert texts("段落.内容") == {"s/0": "一\n二"}
    assert texts("body") == {"s/0": "b\nc", "s/2": "d\ne"}
    assert texts("title", "段落.内容") == {"s/0": "头\n一\n二", "s/2": "only"}
    assert texts("body", "title", "nosuch") == {"s/0": "b\nc\n头", "s/2": "d\ne\nonly"}
    if name != "a.parquet":  # there the column is none of text, which a warning says
        assert texts("title", "段落") == {"s/2": "only"}, "objects are not lost without a word"
    [refused] = read_source(tmp_path / name, text_field="段落")[:1]
    assert isinstance(refused, Rejected)  # objects are no text
    assert {"段落", "title", "body"} <= set(refused.detail.partition(": ")[2].split(", "))


def test_strings_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["one", "two\\ud800", 3, ["x"]]')
    (tmp_path / "b.jsonl").write_text('"one"\n"two\\ud800"\n3\n["x"]\n')
    for name in ("a.json", "b.jsonl"):
        items = read_source(tmp_path / name)
        assert texts_of(items) == ["one", "two\ufffd"]
        array = "array where an object was expected"
        assert reasons_of(items) == ["no text in field 'text'", array]


def test_a_column_that_is_there_twice_and_numbers_of_many_digits(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id,text\na,1,b\nc,2,d\n")
    [refused] = read_source(tmp_path / "a.csv")
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.rows) == ("two columns 'text'", 2)
    (tmp_path / "b.jsonl").write_text('{"text": "a", "n": ' + "7" * 5000 + "}\n")
    assert texts_of(read_source(tmp_path / "b.jsonl")) == ["a"]


def test_counts_of_metadata_add_up_in_any_order() -> None:
    draw = random.Random(1)
    values = [("en" if draw.random() < 0.8 else "zh", f"u{i}") for i in range(3000)]
    parts = []
    for size in (7, 900, 2093):
        counts: dict[str, FieldCounts] = {}
        for language, url in [values.pop() for _ in range(size)]:
            count(counts, {"language": language, "url": url})
        parts.append({name: asdict(each) for name, each in counts.items()})
    one, other = merged(parts), merged(parts[::-1])
    assert one == other
    assert one["language"].documents == one["url"].documents == 3000
    assert shown(one["language"]).startswith("en (79.2%), zh (")
    assert one["url"].values is None
    assert shown(one["url"]) == "u0 to u999"
