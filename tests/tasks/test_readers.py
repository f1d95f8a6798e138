"""Readers on made-up rows in the shape of published files, with the traps of those files."""

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from backports import zstd

from pipeline.errors import ConfigError, DataError
from pipeline.tasks import formats
from pipeline.tasks.readers import read_file, read_task
from pipeline.tasks.task import load_task
from tests.support.task_folder import Folder

SENTENCE = {"fields": {"text": "sentence"}}
NLI = {"fields": {"text": "sentence1", "text_b": "sentence2"}}
TEXT = {"fields": {"text": "text"}}
ROW = {"sentence": "x", "label": "a"}


# Classes


def test_rows_without_gold_or_cells_are_dropped_and_counted(folder: Folder) -> None:
    rows = [{"sentence1": "甲", "sentence2": "乙", "label": y} for y in ("neutral", "-", "-", "")]
    data = folder.read("pair", rows, drop_labels=["-", ""], **NLI)
    [row] = data.splits["train"]
    assert (row.text, row.text_b, row.gold) == ("甲", "乙", "neutral")
    assert data.counts["train"] == {"dropped: label '-'": 2, "dropped: label ''": 1, "rows": 1}
    text = "sentence\tlabel\na\t1\nb\nc\t0\n"
    data = folder.read("classify", text, "a.tsv", short_rows="drop", **SENTENCE)
    assert data.counts["train"] == {"dropped: cells missing": 1, "rows": 2}


def test_labels_may_be_numbers_and_several_and_are_in_order(folder: Folder) -> None:
    rows = [{"sentence": "x", "label": y} for y in (116, 100, "9", 100)]
    data = folder.read("classify", rows, **SENTENCE)
    assert data.labels == ("9", "100", "116")
    rows = [{"sentence": "x", "label": y} for y in ("1", "-1", "10", "1.5", "b", "-2")]
    assert folder.read("classify", rows, **SENTENCE).labels == ("-2", "-1", "1", "1.5", "10", "b")
    assert data.splits["train"][0].gold == "116"
    data = folder.read("multilabel", 'sentence,label\nx,"b,a"\ny,\n', "a.csv", **SENTENCE)
    assert [row.gold for row in data.splits["train"]] == [("a", "b"), ()]
    assert data.labels == ("a", "b")
    data = folder.read("multilabel", 'sentence,label\nx,"b, a, "\ny," "\n', "a.csv", **SENTENCE)
    assert (data.splits["train"][0].gold, data.labels) == (("a", "b"), ("a", "b"))
    rows = [{"sentence": "x", "label": label} for label in (["b", 1], 7)]
    assert [row.gold for row in folder.rows("multilabel", rows, **SENTENCE)] == [("1", "b"), ("7",)]


def test_ids_are_the_file_s_or_row_numbers_and_keywords_joined(folder: Folder) -> None:
    rows = folder.rows("classify", [{**ROW, "id": 3000}, {**ROW, "id": "7"}, ROW], **SENTENCE)
    assert [row.id for row in rows] == ["3000", "7", "2"]
    fields = {"text": "sentence", "id": "idx"}
    rows = folder.rows("classify", [{**ROW, "idx": 3}, {**ROW, "id": 4}], fields=fields)
    assert [row.id for row in rows] == ["3", "4"], "as CLUEWSC names it in train and in test"
    with pytest.raises(DataError, match=r"a\.json:1: neither 'idx', named by data\.fields\.id"):
        folder.read("classify", [ROW], fields=fields)
    row = {"abst": "摘要", "keyword": ["甲", "乙"], "label": "1", "id": 1}
    fields = {"text": "keyword", "text_b": "abst"}
    assert folder.rows("pair", [row], fields=fields)[0].text == "甲；乙"
    assert folder.rows("pair", [row], fields=fields, joiner=" ")[0].text == "甲 乙"


def test_labels_of_zeros_and_ones(folder: Folder) -> None:
    rows = [{"sentence": str(i), "label": each} for i, each in
            enumerate(([1, 1, 0], [0, 0, 1], [True, False, True], [0, 0, 0]))]  # fmt: skip
    found = folder.rows("multilabel", rows, labels=["x", "y", "z"], **SENTENCE)
    assert [row.gold for row in found] == [("x", "y"), ("z",), ("x", "z"), ()]
    with pytest.raises(DataError, match=r"a\.json:1: \[1, 1, 0\] .* data\.labels"):
        folder.read("multilabel", rows, **SENTENCE)
    # Numbers of labels, and labels that stand twice.
    rows = [{"sentence": "x", "label": [0, 1]}, {"sentence": "y", "label": ["b", "b", "1"]}]
    data = folder.read("multilabel", rows, **SENTENCE)
    assert [row.gold for row in data.splits["train"]] == [("0", "1"), ("1", "b")]
    assert data.counts["train"]["rows with a label twice"] == 1


def test_numbers_and_halves_of_characters(folder: Folder) -> None:
    rows = [{"sentence": f"a{i}", "label": label} for i, label in enumerate((1, 1.0, 0, 0.5))]
    data = folder.read("classify", rows, **SENTENCE)
    assert data.labels == ("0", "0.5", "1")
    text = '{"sentence": "a\\ud83d b \\ud83d\\ude00", "label": "x\\udc00"}\n'
    for content in (text, f"[{text}]"):
        data = folder.read("classify", content, **SENTENCE)
        assert data.splits["train"][0].text == "a\ufffd b \U0001f600"
        assert data.labels == ("x\ufffd",)
        assert data.counts["train"]["texts with half a character, now U+FFFD"] == 2


def test_an_index_that_is_the_text_of_another_choice(folder: Folder) -> None:
    fields = {"fields": {"text": "context", "text_b": "question", "choices": "choices"}}

    def rows(answer: Any) -> list[dict[str, Any]]:
        return [{"context": "c", "question": "q", "choices": ["2", "3", "1"], "label": answer}]

    assert [folder.rows("choice", rows(x), **fields)[0].gold for x in (1, "3")] == [1, 1]
    with pytest.raises(DataError, match=r"'2' is the text of choice 0, and as an index choice 2"):
        folder.rows("choice", rows("2"), **fields)


@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_tables_without_a_header(folder: Folder, suffix: str) -> None:
    apart = "\t" if suffix == "tsv" else ","
    lines = [apart.join((f"text {i}", "ab"[i % 2])) for i in range(8)]
    folder.write(f"train.{suffix}", "\n".join(lines))
    folder.write(f"test.{suffix}", "\n".join(line.split(apart)[0] for line in lines))
    given = {"columns": ["sentence", "label"], "train": [f"train.{suffix}"]}
    data = read_task(folder.task("classify", **given, test=[f"test.{suffix}"], **SENTENCE))
    assert [row.gold for row in data.splits["test"]] == [None] * 8
    assert data.splits["test"][3].text == "text 3"
    folder.write(f"train.{suffix}", "\n".join([f"review{apart}rating", *lines]))
    with pytest.raises(DataError, match=r"first row looks like a header, \['review', 'rating'\]"):
        read_task(folder.task("classify", **given, **SENTENCE))
    folder.write(f"train.{suffix}", "\n".join([f"sentence{apart}label", *lines]))
    assert len(read_task(folder.task("classify", **given, **SENTENCE)).splits["train"]) == 8


def test_words_are_joined_alike_in_all_files(folder: Folder) -> None:
    folder.write("train.conll", "New B-LOC\nYork I-LOC\n\nis O\n")
    folder.write("dev.conll", "a O\nb O\n")  # of characters, by itself
    data = read_task(folder.task("tag", train=["train.conll"], dev=["dev.conll"]))
    assert [row.text for rows in data.splits.values() for row in rows] == ["New York", "is", "a b"]
    assert data.joiner == " "
    folder.write("dev.conll", "ab O\nb O\n")
    folder.write("train.conll", "甲 B-LOC\n乙 I-LOC\n")
    data = read_task(folder.task("tag", train=["train.conll"], dev=["dev.conll"]))
    assert data.splits["dev"][0].text == "abb"


def test_only_a_line_feed_ends_a_line(folder: Folder) -> None:
    text = '\ufeff{"sentence": "a\u2028b\\r", "label": "0"}\r\n\r\n{"sentence": "c", "label": "1"}'
    rows = folder.rows("classify", text, **SENTENCE)
    lines = [(row.text, row.where.rpartition(":")[2]) for row in rows]
    assert lines == [("a\u2028b\r", "1"), ("c", "3")]


TABLE = "s,label\n"


@pytest.mark.parametrize(("kind", "name", "content", "message"), [
    ("classify", "a.json", "", "is empty"), ("classify", "a.json", "\r\n \n", "is empty"),
    ("classify", "a.json", '{"s": "x", "label": "a"}\n{"s": ', ":2: not valid JSON"),
    ("classify", "a.json", '{"s"\n{}', ":1: not valid JSON"),
    ("classify", "a.json", '{"text": "x"}', ":1: no 's', named by data.fields.text"),
    ("classify", "a.json", '{"s": "x"}', ":1: no 'label' .* of task.kind=classify"),
    ("classify", "a.json", '{"s": "x", "label": NaN}', ":1: no 'label'"),
    ("classify", "a.json", '{"s": "x", "label": {"a": 1}}', "must be a text or a number"),
    ("classify", "a.json", '{"s": {"x": 1}, "label": "a"}', "'s' must be a text"),
    ("classify", "a.json", '{"s": "x", "label": "a"}\n[1]', ":2: expected a JSON object"),
    ("multilabel", "a.json", '{"s": "x", "label": {"a": 1}}', "must be a text or a number"),
    ("qa", "a.json", '{"s": ["x"], "b": "q"}', "'s' must be a text"),
    ("spans", "a.json", '{"s": ["x"], "label": []}', r"'label' is '\[\]'; expected .* a tag"),
    ("classify", "a.csv", f"{TABLE}x,a\ny,\n", ":3: no 'label' .or an empty one"),
    ("classify", "a.csv", f'{TABLE}"a\nb",1\n"x" y,a\n', ":4: not valid CSV"),
    ("classify", "a.tsv", "s\tlabel\na\t1\nb\n", ":3: 1 cells, expected the 2"),
    ("classify", "a.tsv", "good film\t1\nbad film\t0\n", "no 's'.*needs data.columns"),
    ("regress", "a.csv", f"{TABLE}a,x\n", ":2: 'x' is not a number"),
    ("regress", "a.csv", f"{TABLE}a,nan\n", ":2: 'nan' is not a finite number"),
    ("regress", "a.csv", f"{TABLE}a,inf\n", ":2: 'inf' is not a finite number"),
    ("tag", "a.bio", "a O\nword\n", ":2: expected a word and its tag"),
    ("tag", "a.bio", "a O\nword X-ORG\n", ":2: tag 'X-ORG' is neither O"),
    ("pair", "a.json", '[[["x"], [], "1"]]', "looks like c3, which is for task.kind choice"),
])  # fmt: skip
def test_wrong_files(folder: Folder, kind: str, name: str, content: str, message: str) -> None:
    fields = {"text": "s"} | ({"text_b": "b"} if kind in ("pair", "qa") else {})
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        folder.read(kind, content, name, fields=fields)


def test_missing_files_labels_fields_and_other_bytes_are_refused(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"no\.json does not exist.*data\.root"):
        read_task(folder.task("classify", train=["no.json"], **SENTENCE))
    for name in ("b.json", "b.csv", "b.tsv"):
        (folder.path / name).write_bytes("sentence,label\n中,1".encode("gb18030"))
        with pytest.raises(DataError, match=rf"{name} is not UTF-8"):
            read_task(folder.task("classify", train=[name], **SENTENCE))
    with pytest.raises(ConfigError, match=r"needs data\.fields\.text: .*a\.json"):
        folder.read("classify", [ROW])
    folder.write("t.json", [ROW])
    folder.write("d.json", [ROW, {"sentence": "x", "label": "b"}])
    task = folder.task("classify", train=["t.json"], dev=["d.json"], **SENTENCE)
    with pytest.raises(DataError, match=r"d\.json:2: label 'b' is not one of the 1 of data\.train"):
        read_task(task)


def test_test_may_be_without_labels_and_with_a_header_of_its_own(folder: Folder) -> None:
    folder.write("t.json", [ROW])
    folder.write("u.csv", "id,sentence,label\n5,y,\n")
    folder.write("v.json", [{"sentence": "y", "id": 6}])
    task = folder.task("classify", train=["t.json"], test=["u.csv", "v.json"], **SENTENCE)
    rows = read_task(task).splits["test"]
    assert [(row.id, row.gold) for row in rows] == [("5", None), ("6", None)]
    with pytest.raises(DataError, match="no 'label'"):
        read_file(task, "v.json", needs_gold=True)
    folder.write("w.bio", "a\nb\n\nc O\n")
    rows = read_file(folder.task("tag"), "w.bio", needs_gold=False)
    assert [(row.text, row.gold) for row in rows] == [("ab", None), ("c", ())]
    columns = ["source", "label", "star", "sentence"]
    folder.write("train.tsv", 'gj04\t1\t\tShe "left".\ngj04\t0\t*\tLeft she.\n')
    folder.write("test.tsv", "index\tsentence\n0\tBill left.\n")
    files = {"train": ["train.tsv"], "test": ["test.tsv"]}
    data = read_task(folder.task("classify", columns=columns, **files, **SENTENCE))
    train = [(row.text, row.gold) for row in data.splits["train"]]
    assert train == [('She "left".', "1"), ("Left she.", "0")]
    assert [(row.text, row.gold) for row in data.splits["test"]] == [("Bill left.", None)]


# Files


PACK = {".gz": gzip.compress, ".zst": zstd.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def _pack(folder: Folder, suffix: str, *names: str) -> list[str]:
    for name in names:
        path = folder.path / name
        Path(f"{path}{suffix}").write_bytes(PACK[suffix](path.read_bytes()))
        path.unlink()
    return [name + suffix for name in names]


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_are_read_as_plain_ones(folder: Folder, suffix: str) -> None:
    files = {"train": "a.json", "dev": "b.csv", "test": "c.tsv"}
    folder.write("a.json", [{"sentence": "甲\u2028", "label": label} for label in "ab"])
    folder.write("b.csv", 'sentence,label\n"乙, b",a\n')
    folder.write("c.tsv", "sentence\n丙\n")
    plain = read_task(folder.task("classify", **{k: [v] for k, v in files.items()}, **SENTENCE))
    packed = _pack(folder, suffix, *files.values())
    task = folder.task(
        "classify", **{k: [v] for k, v in zip(files, packed, strict=True)}, **SENTENCE
    )
    found = read_task(task)
    for name, rows in plain.splits.items():
        assert [(row.text, row.gold) for row in found.splits[name]] == [
            (row.text, row.gold) for row in rows
        ]
    folder.write("d.bio", "甲 B-LOC\n乙 I-LOC\n")
    assert read_file(folder.task("tag"), *_pack(folder, suffix, "d.bio"), needs_gold=True)[0].words
    folder.write(
        "e.json",
        json.dumps([{"context_text": "甲", "qas": [{"query_id": "1", "query_text": "?"}]}]),
    )
    task = folder.task("qa")
    assert read_file(task, *_pack(folder, suffix, "e.json"), needs_gold=False)[0].id == "1"
    folder.write("f.json", [{"candidates": ["一", "二"], "content": ["#idiom1#"]}])
    folder.write("f_answer.json", '{"#idiom1#": 1}')
    _pack(folder, suffix, "f.json", "f_answer.json")
    assert read_file(folder.task("cloze"), f"f.json{suffix}", needs_gold=True)[0].gold == 1
    whole = (folder.path / packed[0]).read_bytes()
    for content in (whole[: len(whole) // 2], b"no such thing" * 9):
        (folder.path / packed[0]).write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.json{suffix} is damaged, cut short or not what"):
            read_file(folder.task("classify", **SENTENCE), packed[0], needs_gold=True)
    (folder.path / packed[0]).write_bytes(PACK[suffix](b"\r\n"))
    with pytest.raises(DataError, match=rf"a\.json{suffix} is empty"):
        read_file(folder.task("classify", **SENTENCE), packed[0], needs_gold=True)


ROWS = [{"s": f"{i} [{{", "data": [{"data": [i]}]} for i in range(9)]
PARAGRAPHS = [{"paragraphs": [], "title": str(i)} for i in range(9)]


@pytest.mark.parametrize(("content", "form"), [
    (ROWS, "jsonl"), (json.dumps(ROWS), "json"), (json.dumps(ROWS, indent=1), "json"),
    (json.dumps({"version": [1], "data": ROWS}), "json"),
    (json.dumps({"version": [1], "data": ROWS}, indent=1), "json"),
    (json.dumps({"version": "1", "data": PARAGRAPHS}), "squad"),
    (json.dumps({"version": "1", "data": PARAGRAPHS}, indent=1), "squad"),
    (json.dumps([{"id": 1, "context_text": "x"}] * 9), "cmrc"),
    (json.dumps([{"s": '"context_text": '}] * 9), "json"),
    (json.dumps([[["x"], []]] * 9, indent=1), "c3"), ('{"s": 1\n{"s": 2}\n', "jsonl"),
    ([{"candidates": [], "content": []}] * 9, "chid"), ("{\n}", "json"), ("nothing", "json"),
])  # fmt: skip
@pytest.mark.parametrize("head", [40, 1 << 20])
def test_the_beginning_tells_the_form(
    folder: Folder, content: Any, form: str, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("a.json", content)
    if head < 100:  # what follows is not looked at, nor need it be there
        monkeypatch.setattr(formats, "_HEAD_CHARS", (folder.path / "a.json").stat().st_size // 2)
    assert formats.detect(folder.path / "a.json", has_words=False) == form


def test_a_large_file_is_not_read_to_tell_its_form(folder: Folder) -> None:
    rows = [{"context_text": "甲" * 1000, "qas": [], "id": i} for i in range(4000)]
    whole = gzip.compress(json.dumps(rows, ensure_ascii=False).encode(), compresslevel=0)
    (folder.path / "a.json.gz").write_bytes(whole[: len(whole) // 2])  # the rest would be missed
    assert formats.detect(folder.path / "a.json.gz", has_words=False) == "cmrc"


def test_parquet(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"text": "s", "text_b": "q", "choices": "choices", "label": "answerKey"}
    choices = {"text": ["甲", "乙"], "label": ["A", "B"]}
    row = {"s": "一\u2028", "q": b"\xe4\xb8\xad", "choices": choices, "answerKey": "B", "id": "x"}
    folder.write_parquet("a.parquet", [row, {**row, "id": "y", "answerKey": "a"}] * 300)
    rows = read_file(folder.task("choice", fields=fields), "a.parquet", needs_gold=True)
    assert [(row.id, row.gold, row.text, row.text_b) for row in rows[:2]] == [
        ("x", 1, "一\u2028", "中"), ("y", 0, "一\u2028", "中"),
    ]  # fmt: skip
    assert [len(rows), rows[-1].where.rpartition(", ")[2]] == [600, "row 599"]
    with pytest.raises(DataError, match=r"a\.parquet, row 0: no 'label'"):
        read_file(folder.task("choice", fields={**fields, "label": "label"}), "a.parquet",
                  needs_gold=True)  # fmt: skip
    folder.write_parquet("b.parquet", [{"s": b"\xff", "label": 1}])
    task = folder.task("classify", fields={"text": "s"})
    with pytest.raises(DataError, match=r"b\.parquet is not UTF-8"):
        read_file(task, "b.parquet", needs_gold=True)
    (folder.path / "c.parquet").write_bytes((folder.path / "a.parquet").read_bytes()[:-20])
    for kind in ("classify", "tag"):
        broken = folder.task(kind, train=["c.parquet"], fields={"text": "s"})
        with pytest.raises(DataError, match=r"c\.parquet is damaged"):
            read_task(broken)
    folder.write_parquet("d.parquet", [], s=pa.string())
    with pytest.raises(DataError, match=r"d\.parquet holds no row"):
        read_file(task, "d.parquet", needs_gold=True)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"a\.parquet: .* pip install pyarrow"):
        read_file(task, "a.parquet", needs_gold=True)


@pytest.mark.parametrize(("name", "content"), [
    ("a.csv", 'sentence,label\r"a, b",0\rc,1\r'), ("a.tsv", "sentence\tlabel\ra, b\t0\rc\t1"),
    ("a.json", '{"sentence": "a, b", "label": 0}\r\r{"sentence": "c", "label": 1}\r'),
])  # fmt: skip
def test_a_carriage_return_ends_lines_where_there_is_no_line_feed(
    folder: Folder, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for head in (8, 1 << 20):
        monkeypatch.setattr(formats, "_HEAD_CHARS", max(head, content.index("\r") + 1))
        data = folder.read("classify", content, name, **SENTENCE)
        rows = data.splits["train"]
        assert [(row.text, row.gold) for row in rows] == [("a, b", "0"), ("c", "1")]
        assert data.counts["train"]["rows of files whose lines end in CR alone"] == 2
    assert rows[1].where.endswith(":3")
    data = folder.read("classify", "sentence\tlabel\na\rb\t0\n", "b.tsv", **SENTENCE)
    assert [row.text for row in data.splits["train"]] == ["a\rb"]
    assert data.counts["train"] == {"rows": 1}


# Tables


@pytest.mark.parametrize(("name", "content", "texts", "last"), [
    ("a.tsv", 'label\ttext\n1\t"好\n0\t差"\n1\t"全"部\n', ['"好', '差"', '"全"部'], 4),
    ("a.csv", 'label,text\r\n1,"a, ""b""\nc"\r\n0,d\r\n', ['a, "b"\nc', "d"], 4),
    ("a.csv", '\nlabel,text\n\n1,"a\nb"\n', ["a\nb"], 4),
    ("a.tsv", "\nlabel\ttext\n\n1\ta\n", ["a"], 4),
])  # fmt: skip
def test_quotes_are_text_in_tsv_and_quotes_in_csv(
    folder: Folder, name: str, content: str, texts: list[str], last: int
) -> None:
    rows = folder.rows("classify", content, name, **TEXT)
    assert [row.text for row in rows] == texts
    assert rows[-1].where.endswith(f"{name}:{last}"), "where the row begins"


def test_cells_that_mean_two_things_or_nothing(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"a\.csv:1: two columns are named 'label'"):
        folder.read("classify", "sentence,label,label\na,x,y\n", "a.csv", **SENTENCE)
    rows = folder.rows("classify", "sentence,label,,\na,x,,\n", "a.csv", **SENTENCE)
    assert rows[0].gold == "x", "other columns may be alike"
    for text in ("NaN", "null"):
        with pytest.raises(DataError, match=r"a\.json:1: no 'sentence'"):
            folder.read("classify", f'{{"sentence": {text}, "label": 1}}\n', **SENTENCE)
    long = "a" * (1 << 18)  # more than the csv module takes by itself
    assert (
        folder.rows("classify", f"sentence,label\n{long},x\n", "a.csv", **SENTENCE)[0].text == long
    )


def test_white_space_alone_is_a_row_as_ids_count_rows(folder: Folder) -> None:
    folder.write("t.tsv", "sentence\nfirst\n\n   \nfourth\n")
    rows = read_file(folder.task("classify", **SENTENCE), "t.tsv", needs_gold=False)
    assert [(row.id, row.text.strip()) for row in rows] == [
        ("0", "first"),
        ("1", ""),
        ("2", "fourth"),
    ]


# Samples and repeats


def test_samples_are_parts_of_larger_ones_and_have_all_classes(folder: Folder) -> None:
    rows = [{"sentence": str(i), "label": "a"} for i in range(50)]
    small, large = (
        [row.text for row in folder.rows("classify", rows, train_rows=n, **SENTENCE)]
        for n in (10, 20)
    )
    assert len(small) == 10
    assert set(small) < set(large)
    assert large == sorted(large, key=int), "in the order of the file"
    assert small != [str(i) for i in range(10)]
    folder.write("t.json", [{"sentence": str(i), "label": i % 25} for i in range(50)])
    folder.write("d.json", [{"sentence": "d", "label": i} for i in range(25)])
    task = folder.task("classify", train=["t.json"], dev=["d.json"], train_rows=5, **SENTENCE)
    assert read_task(task).labels == tuple(map(str, range(25)))


def test_repeats_are_counted(folder: Folder) -> None:
    train = [{"sentence": x, "label": y, "id": i} for x, y, i in ("xa0", "ya1", "xa0", "xb3")]
    folder.write("t.json", train)
    folder.write("d.json", [{"sentence": x, "label": "a"} for x in ("y", "w", "x", "")])
    data = read_task(folder.task("classify", train=["t.json"], dev=["d.json"], **SENTENCE))
    assert data.in_train("dev") == [True, False, True, False]
    assert data.counts == {
        "train": {
            "rows": 4, "texts that stand before": 2, "texts with several golds": 1,
            "ids that stand before": 1,
        },
        "dev": {"rows": 4, "texts that are in train, too": 2, "texts that are empty": 1},
        "test": {},
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "form", "content"), [
    ("qa", "squad", {"x": []}), ("qa", "cmrc", [{"context": "", "qas": [{}]}]),
    ("choice", "c3", [[[], ["x"]]]),
])  # fmt: skip
def test_other_forms_are_refused(folder: Folder, kind: str, form: str, content: Any) -> None:
    message = rf"a\.json is not in the form of {form} files behind .*data\.format"
    with pytest.raises(DataError, match=message):
        folder.read(kind, json.dumps(content), format=form)


# Shipped tasks on rows in the shape of their published files


def _table(header: str, *rows: str) -> str:
    return "".join(f"{line}\n" for line in (header, *rows)).replace("|", "\t")


NLI_COLUMNS = "index|sentence1|sentence2"
MNLI_COLUMNS = (
    "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|"
    "sentence2_parse|sentence1|sentence2|label1|gold_label"
)
STS_COLUMNS = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score"
QQP_COLUMNS = "id|qid1|qid2|question1|question2|is_duplicate"
TARGET = {"span1_text": "a", "span1_index": 0, "span2_text": "b", "span2_index": 2}
CLASSIFIED = {"sentence": "a", "label": "100", "label_desc": "news_story", "keywords": ""}
PAIR = {"sentence1": "a", "sentence2": "b", "label": "0"}
INFERRED = {**PAIR, "label": "neutral", "label0": None, "genre": "tv", "prem_id": "tv_1", "id": 0}
CHECKED = {"id": 1, "abst": "b", "keyword": ["a"], "label": "0"}
PUBLISHED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cola": ("gj04|1||a\n".replace("|", "\t"), ("0", "a", "", "1")),
    "sst2": (_table("sentence|label", "a |0"), ("0", "a ", "", "0")),
    "stsb": (_table(STS_COLUMNS, "7|g|f|2012|1|n|n|a|b|2.5"), ("7", "a", "b", 2.5)),
    "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t70\t72\ta\tb\r\n",
             ("0", "a", "b", "1")),
    "qqp": (_table(QQP_COLUMNS, "9|1|2|a|b|1", "8|1|2|a"), ("9", "a", "b", "1")),
    "mnli": (_table(MNLI_COLUMNS, "3|1|1n|g|(|(|(|(|a|b|x|neutral"), ("3", "a", "b", "neutral")),
    "qnli": (_table("index|question|sentence|label", "5|a|b|entailment"),
             ("5", "a", "b", "entailment")),
    "rte": (_table(f"{NLI_COLUMNS}|label", "0|a|b|entailment"), ("0", "a", "b", "entailment")),
    "wnli": (_table(f"{NLI_COLUMNS}|label", "4|a|b|1"), ("4", "a", "b", "1")),
    "afqmc": ([PAIR], ("0", "a", "b", "0")),
    "tnews": ([CLASSIFIED], ("0", "a", "", "100")),
    "iflytek": ([{"label": "11", "label_des": "x", "sentence": "a"}], ("0", "a", "", "11")),
    "cmnli": ([{**PAIR, "label": "-"}, {**PAIR, "label": "neutral"}], ("1", "a", "b", "neutral")),
    "ocnli": ([INFERRED], ("0", "a", "b", "neutral")),
    "csl": ([CHECKED], ("1", "a", "b", "0")),
    "cluewsc": ([{"target": TARGET, "idx": 3, "label": "true", "text": "a b"}],
                ("3", "a b", "", "true")),
    "fewclue-tnews": ([{**CLASSIFIED, "label": 100, "id": "6"}], ("6", "a", "", "100")),
    "fewclue-iflytek": ([{"label": 1, "label_des": "x", "sentence": "a", "id": 4}],
                        ("4", "a", "", "1")),
    "fewclue-csldcp": ([{"content": "a", "label": "数学", "id": 2}], ("2", "a", "", "数学")),
    "fewclue-eprstmt": ([{"id": 5, "sentence": "a", "label": "Positive"}],
                        ("5", "a", "", "Positive")),
    "fewclue-bustm": ([{"id": 5, **PAIR}], ("5", "a", "b", "0")),
    "fewclue-ocnli": ([INFERRED], ("0", "a", "b", "neutral")),
    "fewclue-csl": ([CHECKED], ("1", "a", "b", "0")),
    "fewclue-cluewsc": ([{"target": TARGET, "idx": 3, "label": "true", "text": "a b"}],
                        ("3", "a b", "", "true")),
    "sst2-sentences": ("a\t1\n", ("0", "a", "", "1")),
    "chnsenticorp": (_table("label|text_a", "1|a"), ("0", "a", "", "1")),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_task_reads_its_published_form(folder: Folder, name: str) -> None:
    content, expected = PUBLISHED[name]
    task = load_task(name, (f"data.root={folder.path}",))
    file = f"train{Path(task.data.train[0]).suffix}"
    folder.write(file, content)
    [row] = read_file(task, file, needs_gold=True)
    assert (row.id, row.text, row.text_b, row.gold) == expected
