"""Readers on made-up rows in the shape of published files, with the traps of those files."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import build
from pipeline.errors import ConfigError, DataError
from pipeline.tasks.readers import Answer, Example, TaskData, read_file, read_task
from pipeline.tasks.scores import Span
from pipeline.tasks.task import TaskConfig, load_task


class Folder:
    """Writes files and reads them as a task."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: Any) -> None:
        """Rows become JSON lines; text stays."""
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (self.path / name).write_bytes(content.encode())

    def task(self, kind: str, **data: Any) -> TaskConfig:
        return build(
            TaskConfig,
            {
                "task": {"kind": kind},
                "data": {"root": str(self.path), **data},
                "input": {"max_length": 512},
            },
            "test",
        )

    def read(self, kind: str, content: Any, name: str = "a.json", **data: Any) -> TaskData:
        """Write train and read it."""
        self.write(name, content)
        return read_task(self.task(kind, train=[name], **data))

    def rows(self, kind: str, content: Any, name: str = "a.json", **data: Any) -> list[Example]:
        return list(self.read(kind, content, name, **data).splits["train"])


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


SENTENCE = {"fields": {"text": "sentence"}}
NLI = {"fields": {"text": "sentence1", "text_b": "sentence2"}}


# Classes


def test_rows_without_gold_are_dropped_and_counted(folder: Folder) -> None:
    rows = [{"sentence1": "甲", "sentence2": "乙", "label": y} for y in ("neutral", "-", "-")]
    data = folder.read("pair", rows, drop_labels=["-"], **NLI)
    assert [(row.text, row.text_b, row.gold) for row in data.splits["train"]] == [
        ("甲", "乙", "neutral")
    ]
    assert data.counts["train"] == {"dropped: label '-'": 2, "rows": 1}


def test_labels_may_be_numbers_and_are_in_order(folder: Folder) -> None:
    rows = [{"sentence": "x", "label": y} for y in (116, 100, "9", 100)]
    data = folder.read("classify", rows, **SENTENCE)
    assert data.labels == ("9", "100", "116")
    assert data.splits["train"][0].gold == "116"


def test_ids_are_the_file_s_or_row_numbers(folder: Folder) -> None:
    row = {"sentence": "x", "label": "a"}
    rows = folder.rows("classify", [{**row, "id": 3000}, {**row, "id": "7"}, row], **SENTENCE)
    assert [row.id for row in rows] == ["3000", "7", "2"]


def test_only_a_line_feed_ends_a_line(folder: Folder) -> None:
    text = '\ufeff{"sentence": "a\u2028b\\r", "label": "0"}\r\n\r\n{"sentence": "c", "label": "1"}'
    rows = folder.rows("classify", text, **SENTENCE)
    assert [(row.text, row.where.rpartition(":")[2]) for row in rows] == [
        ("a\u2028b\r", "1"),
        ("c", "3"),
    ]


def test_label_that_train_lacks_is_refused_with_its_line(folder: Folder) -> None:
    row = {"sentence": "x", "label": "a"}
    folder.write("t.json", [row])
    folder.write("d.json", [row, {"sentence": "x", "label": "b"}])
    task = folder.task("classify", train=["t.json"], dev=["d.json"], **SENTENCE)
    with pytest.raises(DataError, match=r"d\.json:2: label 'b' is not one of the 1 of data\.train"):
        read_task(task)


def test_keywords_given_as_a_list_are_joined(folder: Folder) -> None:
    row = {"abst": "摘要", "keyword": ["甲", "乙"], "label": "1", "id": 1}
    fields = {"text": "keyword", "text_b": "abst"}
    assert folder.rows("pair", [row], fields=fields)[0].text == "甲；乙"
    assert folder.rows("pair", [row], fields=fields, joiner=" ")[0].text == "甲 乙"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\r\n \n", "is empty"),
        ('{"sentence": "x", "label": "a"}\n{"sentence": ', r"a.json:2: not valid JSON"),
        ('{"sentence"\n{}', r"a.json:1: not valid JSON"),
        ('{"text": "x", "label": "a"}', r"a.json:1: no 'sentence', named by data.fields.text"),
        ('{"sentence": "x"}', r"a.json:1: no 'label', the gold of task.kind=classify"),
        ('{"sentence": "x", "label": {"a": 1}}', r"must be a text or a number"),
        ('{"sentence": "x", "label": "a"}\n[1]', r"a.json:2: expected a JSON object"),
    ],
)
def test_wrong_files_are_refused_with_their_line(
    folder: Folder, content: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        folder.read("classify", content, **SENTENCE)


def test_missing_file_and_other_bytes_are_refused(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"no\.json does not exist.*data\.root"):
        read_task(folder.task("classify", train=["no.json"], **SENTENCE))
    (folder.path / "b.json").write_bytes('{"sentence": "中"}'.encode("gb18030"))
    with pytest.raises(DataError, match=r"b\.json is not UTF-8"):
        read_task(folder.task("classify", train=["b.json"], **SENTENCE))


def test_fields_must_be_named(folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"needs data\.fields\.text: .*a\.json"):
        folder.read("classify", [{"sentence": "x", "label": "a"}])


def test_test_may_be_without_labels(folder: Folder) -> None:
    folder.write("t.json", [{"sentence": "x", "label": "a"}])
    folder.write("u.json", [{"sentence": "y", "id": 5}])
    task = folder.task("classify", train=["t.json"], test=["u.json"], **SENTENCE)
    [row] = read_task(task).splits["test"]
    assert (row.id, row.gold) == ("5", None)
    with pytest.raises(DataError, match="no 'label'"):
        read_file(task, "u.json", needs_gold=True)


# Tables


def test_quotes_in_tsv_are_text(folder: Folder) -> None:
    text = 'label\ttext_a\n1\t"好\n0\t差"\n1\t"全"部\n'
    rows = folder.rows("classify", text, "a.tsv", fields={"text": "text_a"})
    assert [row.text for row in rows] == ['"好', '差"', '"全"部']


def test_quotes_in_csv_are_quotes(folder: Folder) -> None:
    text = 'label,text\r\n1,"a, ""b""\nc"\r\n0,d\r\n'
    rows = folder.rows("classify", text, "a.csv", fields={"text": "text"})
    assert [row.text for row in rows] == ['a, "b"\nc', "d"]
    assert rows[1].where.endswith("a.csv:4")


def test_cola_has_a_header_in_test_only(folder: Folder) -> None:
    columns = ["source", "label", "star", "sentence"]
    folder.write("train.tsv", 'gj04\t1\t\tShe "left".\ngj04\t0\t*\tLeft she.\n')
    folder.write("test.tsv", "index\tsentence\n0\tBill left.\n")
    files = {"train": ["train.tsv"], "test": ["test.tsv"]}
    data = read_task(folder.task("classify", columns=columns, **files, **SENTENCE))
    assert [(row.text, row.gold) for row in data.splits["train"]] == [
        ('She "left".', "1"),
        ("Left she.", "0"),
    ]
    assert [(row.text, row.gold) for row in data.splits["test"]] == [("Bill left.", None)]


def test_mrpc_s_header(folder: Folder) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    task = load_task("mrpc", (f"data.root={folder.path}", "data.train=[m.tsv]"))
    folder.write("m.tsv", header + '1\t70\t72\tHe said "so\tHe said so"\r\n')
    [row] = read_file(task, "m.tsv", needs_gold=True)
    assert (row.text, row.text_b, row.gold) == ('He said "so', 'He said so"', "1")


def test_scores_are_numbers(folder: Folder) -> None:
    text = "index\tsentence1\tsentence2\tscore\n0\ta\tb\t5.000\n1\tc\td\t0.25\n"
    data = folder.read("regress", text, "a.tsv", fields={**NLI["fields"], "label": "score"})
    assert [row.gold for row in data.splits["train"]] == [5.0, 0.25]
    assert data.labels == ()
    for wrong in ("x", "nan", "inf"):
        with pytest.raises(DataError, match=r"a\.tsv:2: .* number"):
            folder.read("regress", f"sentence\tlabel\na\t{wrong}\n", "a.tsv", **SENTENCE)


def test_short_rows_are_refused_or_counted(folder: Folder) -> None:
    text = "sentence\tlabel\na\t1\nb\nc\t0\n"
    with pytest.raises(DataError, match=r"a\.tsv:3: 1 cells, expected the 2"):
        folder.read("classify", text, "a.tsv", **SENTENCE)
    data = folder.read("classify", text, "a.tsv", short_rows="drop", **SENTENCE)
    assert data.counts["train"] == {"dropped: cells missing": 1, "rows": 2}


def test_table_without_a_header_says_so(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"no 'sentence'.*needs data\.columns"):
        folder.read("classify", "good film\t1\nbad film\t0\n", "a.tsv", **SENTENCE)


def test_several_labels(folder: Folder) -> None:
    data = folder.read("multilabel", 'sentence,label\nx,"b,a"\ny,\n', "a.csv", **SENTENCE)
    assert [row.gold for row in data.splits["train"]] == [("a", "b"), ()]
    assert data.labels == ("a", "b")
    rows = folder.rows("multilabel", [{"sentence": "x", "label": ["b", 1]}], **SENTENCE)
    assert rows[0].gold == ("1", "b")


# Entities


def test_cluener_ends_are_inclusive_and_entities_repeat(folder: Folder) -> None:
    row = {
        "text": "“金庸”谈金庸，《金庸传》",
        "label": {"name": {"金庸": [[1, 2], [5, 6]]}, "book": {"《金庸传》": [[8, 12]]}},
    }
    data = folder.read("spans", [row], fields={"text": "text"})
    [example] = data.splits["train"]
    assert example.gold == (Span("name", 1, 3), Span("name", 5, 7), Span("book", 8, 13))
    assert [example.text[s.start : s.end] for s in example.gold] == ["金庸", "金庸", "《金庸传》"]
    assert data.labels == ("book", "name")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"name": {"金庸": [[0, 1]]}}, r"a\.json:1: character 0 should start '金庸', but '“金'"),
        ({"name": {"金庸": [[1, 3]]}}, "has 2 characters, but its place has 3"),
        ({"name": ["金庸"]}, "is not a list of"),
        ([["name", 1, 9]], r"name at \[1, 9\) is not inside the text of 3 characters"),
        ([["name", 1, 1]], "or is empty"),
        ([{"type": "name", "start": 0, "end": 2, "text": "金庸"}], "should start '金庸'"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(folder: Folder, label: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        folder.read("spans", [{"text": "“金庸", "label": label}], fields={"text": "text"})


def test_spans_in_lists(folder: Folder) -> None:
    entity = {"type": "name", "start": 1, "end": 3, "text": "金庸"}
    fields = {"text": "text", "spans": "entities"}
    rows = [{"text": "“金庸", "entities": x} for x in ([entity], [["name", 1, 3]], [])]
    golds = [row.gold for row in folder.rows("spans", rows, fields=fields)]
    assert golds == [(Span("name", 1, 3),), (Span("name", 1, 3),), ()]
    inclusive = [{"text": "“金庸", "entities": [["name", 1, 2]]}]
    [row] = folder.rows("spans", inclusive, fields=fields, span_ends="inclusive")
    assert row.gold == (Span("name", 1, 3),)


def test_bmes_of_characters(folder: Folder) -> None:
    text = "吴 B-NAME\n重 M-NAME\n阳 E-NAME\n， O\nA S-ORG\n\n任 O\n董 M-ORG\n事 E-ORG\n"
    data = folder.read("tag", text, "train.char.bmes")
    first, second = data.splits["train"]
    assert (first.text, first.gold) == ("吴重阳，A", (Span("NAME", 0, 3), Span("ORG", 4, 5)))
    assert (second.text, second.gold) == ("任董事", (Span("ORG", 1, 3),))
    assert data.counts["train"]["tags that continue no entity"] == 1
    assert second.where.endswith(":7")


def test_conll_of_words_is_joined_by_spaces(folder: Folder) -> None:
    text = "-DOCSTART- -X- O\n\nU.N. NNP I-ORG\nofficial NN O\nEkeus NNP I-PER\n"
    [row] = folder.rows("tag", text, "a.conll")
    assert row.text == "U.N. official Ekeus"
    assert row.words == ((0, 4), (5, 13), (14, 19))
    assert row.gold == (Span("ORG", 0, 4), Span("PER", 14, 19))


@pytest.mark.parametrize(
    ("line", "message"), [("word", "a word and its tag"), ("word X-ORG", "'X-ORG' is neither O")]
)
def test_wrong_tags_are_refused(folder: Folder, line: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.bio:2: .*{message}"):
        folder.read("tag", f"a O\n{line}\n", "a.bio")


# Answers


def _squad(folder: Folder, *answers: dict[str, Any], **question: Any) -> TaskData:
    context = "它建于一九九八年，一九九九年开放。"
    qas = [{"id": "Q1", "question": "何时？", "answers": list(answers), **question}]
    whole = {"version": "v1.0", "data": [{"paragraphs": [{"context": context, "qas": qas}]}]}
    return folder.read("qa", json.dumps(whole, indent=2))


@pytest.mark.parametrize(
    ("text", "stated", "start", "count"),
    [
        ("一九九九年", 9, 9, {}),
        ("一九九九年", 10, 9, {"answers moved to where their text is": 1}),
        ("一九九八年", 9, None, {"questions whose answers are not in their text": 1}),
        ("一九九九年", -1, None, {"questions whose answers are not in their text": 1}),
        (" 一九九九年 ", 9, 9, {}),
        ("二〇〇〇年", 3, None, {"questions whose answers are not in their text": 1}),
    ],
)
def test_answers_and_their_offsets(
    folder: Folder, text: str, stated: int, start: int | None, count: dict[str, int]
) -> None:
    data = _squad(folder, {"text": text, "answer_start": stated})
    [row] = data.splits["train"]
    assert row.gold == (Answer(text, start),), "gold is the text of the file"
    assert (row.id, row.text_b) == ("Q1", "何时？")
    assert data.counts["train"] == {"rows": 1, **count}


def test_unanswerable_questions(folder: Folder) -> None:
    plausible = [{"text": "它", "answer_start": 0}]
    data = _squad(folder, is_impossible=True, plausible_answers=plausible)
    assert data.splits["train"][0].gold == ()


def test_cmrc_s_own_form_has_no_offsets(folder: Folder) -> None:
    question = {"query_id": "Q1", "query_text": "何时？", "answers": ["九年", "七年"]}
    rows = [{"context_id": "C", "context_text": "八年，九年。", "qas": [question]}]
    [row] = folder.rows("qa", json.dumps(rows))
    assert (row.id, row.gold) == ("Q1", (Answer("九年", 3), Answer("七年", None)))


def test_dev_held_out_of_train_shares_no_passage(folder: Folder) -> None:
    rows = [
        {"context_text": f"第{i}段", "qas": [{"query_id": f"{i}-{n}", "query_text": "？",
                                            "answers": ["段"]} for n in range(3)]}
        for i in range(10)
    ]  # fmt: skip
    data = folder.read("qa", json.dumps(rows), hold_out=0.2)
    train, dev = data.splits["train"], data.splits["dev"]
    assert (len(train), len(dev)) == (24, 6)
    assert not {row.text for row in train} & {row.text for row in dev}
    again = folder.read("qa", json.dumps(rows[::-1]), hold_out=0.2)
    assert {row.id for row in again.splits["dev"]} == {row.id for row in dev}


# Choices


def test_c3(folder: Folder) -> None:
    question = {"question": "几块？", "choice": ["六块", "五块", "五块"], "answer": "五块"}
    items = [
        [["男：好。", "女：行。"], [question], "7-65"],
        [["一段。"], [{"question": "？", "choice": ["甲", "乙"], "answer": "甲", "id": 9}], "m1"],
    ]
    first, second = folder.rows("choice", json.dumps(items, ensure_ascii=False, indent=1))
    assert (first.text, first.text_b, first.id) == ("男：好。||女：行。", "几块？", "7-65-0")
    assert (first.gold, first.distinct) == (1, (True, True, False)), "the second 五块 is masked"
    assert (second.id, second.choices, second.gold) == ("9", ("甲", "乙"), 0)
    question["answer"] = "七块"
    with pytest.raises(DataError, match=r"item 0, question 0: answer '七块' is neither one of"):
        folder.read("choice", json.dumps(items))


def test_fewclue_s_blank(folder: Folder) -> None:
    row = {"id": 1, "content": "他#idiom#地来。", "candidates": ["甲", "乙"], "answer": 1}
    fields = {"text": "content", "choices": "candidates", "label": "answer"}
    [example] = folder.rows("cloze", [row], fields=fields)
    assert (example.marks, example.gold) == ((Span("blank", 1, 8),), 1)
    with pytest.raises(DataError, match=r"a\.json:1: no blank"):
        folder.read("cloze", [{**row, "content": "他来。"}], fields=fields)
    with pytest.raises(DataError, match=r"a\.json:1: answer 2 is neither"):
        folder.read("cloze", [{**row, "answer": 2}], fields=fields)


def test_chid_makes_a_row_of_each_blank(folder: Folder) -> None:
    passages = ["甲#idiom000001#乙#idiom000002#", "#idiom000003#"]
    folder.write("a_answer.json", '{"#idiom000001#": 2, "#idiom000002#": 0, "#idiom000003#": 1}')
    rows = folder.rows("cloze", [{"candidates": ["一", "二", "三"], "content": passages}])
    assert [(row.id, row.gold) for row in rows] == [
        ("#idiom000001#", 2), ("#idiom000002#", 0), ("#idiom000003#", 1),
    ]  # fmt: skip
    assert rows[1].marks == (Span("blank", 15, 28), Span("blank", 1, 14)), "its own is first"
    assert len({row.group for row in rows}) == 1
    (folder.path / "a_answer.json").unlink()
    with pytest.raises(DataError, match=r"answers are missing; expected them in .*a_answer\.json"):
        folder.read("cloze", [{"candidates": ["一", "二"], "content": passages}])


def test_wsc_marks_are_checked_against_the_text(folder: Folder) -> None:
    target = {"span1_text": "树叶", "span1_index": 0, "span2_text": "他", "span2_index": 4}
    row = {"target": target, "idx": 7, "label": "false", "text": "树叶落在他身上"}
    fields = {"text": "text", "id": "idx"}
    rows = folder.rows("coref", [row, {**row, "label": True}], fields=fields)
    assert rows[0].marks == (Span("span1", 0, 2), Span("span2", 4, 5))
    assert [(row.id, row.gold) for row in rows] == [("7", "false"), ("7", "true")]
    target["span2_index"] = 3
    with pytest.raises(DataError, match="character 3 should start '他', but '在' is there"):
        folder.read("coref", [row], fields=fields)


# Samples and repeats


def test_a_smaller_sample_is_part_of_a_larger_one(folder: Folder) -> None:
    rows = [{"sentence": str(i), "label": "a"} for i in range(50)]
    small, large = (
        [row.text for row in folder.rows("classify", rows, train_rows=n, **SENTENCE)]
        for n in (10, 20)
    )
    assert len(small) == 10
    assert set(small) < set(large)
    assert large == sorted(large, key=int), "in the order of the file"
    assert small != [str(i) for i in range(10)]


def test_a_sample_has_the_classes_of_all_rows(folder: Folder) -> None:
    folder.write("t.json", [{"sentence": str(i), "label": i % 25} for i in range(50)])
    folder.write("d.json", [{"sentence": "d", "label": i} for i in range(25)])
    task = folder.task("classify", train=["t.json"], dev=["d.json"], train_rows=5, **SENTENCE)
    assert read_task(task).labels == tuple(map(str, range(25)))


def test_texts_that_are_in_train_are_counted(folder: Folder) -> None:
    folder.write("t.json", [{"sentence": x, "label": "a"} for x in "xyz"])
    folder.write("d.json", [{"sentence": x, "label": "a"} for x in "ywx"])
    data = read_task(folder.task("classify", train=["t.json"], dev=["d.json"], **SENTENCE))
    assert data.in_train("dev") == [True, False, True]
    assert data.counts["dev"] == {"rows": 3, "texts that are in train, too": 2}


def test_format_that_does_not_fit_the_kind_is_refused(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"looks like c3, which is for task\.kind choice, not pair"):
        folder.read("pair", json.dumps([[["x"], [], "1"]]), **NLI)


@pytest.mark.parametrize(
    ("kind", "form", "content"),
    [
        ("qa", "squad", {"x": []}),
        ("qa", "cmrc", [{"context": "", "qas": [{}]}]),
        ("choice", "c3", [[[], ["x"]]]),
    ],
)
def test_file_in_another_form_is_refused(
    folder: Folder, kind: str, form: str, content: Any
) -> None:
    with pytest.raises(DataError, match=rf"a\.json is not in the form of {form} files"):
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
