"""Readers of choices: in lists, columns and objects, cloze passages, and marks to be checked."""

import json
from typing import Any

import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.readers import read_file
from pipeline.tasks.types import Span
from tests.support.task_folder import Folder


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
    for wrong in ("七块", "2"):  # an answer is a text, not an index
        question["answer"] = wrong
        with pytest.raises(DataError, match=rf"item 0, question 0: answer '{wrong}' is neither"):
            folder.read("choice", json.dumps(items))


COLUMNS = {"text": "q", "choices": ["A", "B", "C", "D"]}


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json", "a.parquet"])
def test_choices_in_columns(folder: Folder, name: str) -> None:
    answers = [("B", 1), ("d", 3), ("0", 0), ("x3", 2)]
    rows = [
        {"q": f"{i}", **{key: f"x{n}" for n, key in enumerate("ABCD", 1)}, "label": answer}
        for i, (answer, _) in enumerate(answers)
    ]
    rows += [{"q": "5", "A": "x", "B": "y", "C": "", "D": "", "label": "B"}]  # of two choices
    if name == "a.parquet":
        folder.write_parquet(name, rows)
    elif name == "a.json":
        folder.write(name, rows)
    else:
        apart = "\t" if name == "a.tsv" else ","
        lines = [apart.join(row.values()) for row in rows]
        folder.write(name, "\n".join([apart.join(rows[0]), *lines]))
    found = read_file(folder.task("choice", fields=COLUMNS), name, needs_gold=True)
    assert [row.gold for row in found] == [gold for _, gold in answers] + [1]
    assert [row.choices for row in found[-2:]] == [("x1", "x2", "x3", "x4"), ("x", "y")]
    fields = {**COLUMNS, "choices": ["A", "E"]}
    with pytest.raises(
        DataError, match=r"row 0|item 0|:[12]: .*keys: q, A, B.*data\.fields\.choices"
    ):
        read_file(folder.task("choice", fields=fields), name, needs_gold=True)


NESTED = {"text": "q", "choices": "choices", "label": "answerKey"}


@pytest.mark.parametrize(("labels", "texts", "answer", "gold"), [
    ("ABCD", "wxyz", "C", 2), ("ABCD", "wxyz", "c", 2), ("ABCD", "wxyz", "z", 3),
    ("1234", "wxyz", "1", 0), ("1234", "wxyz", "4", 3), ("1234", "wxyz", "B", 1),
    ("1234", "2345", "2", 1), ("BADC", "wxyz", "A", 1), ("ABCD", "BADC", "A", 0),
    ("ABCD", "wxyz", 3, 3), ("ABCD", "wwyz", "B", 0), ([1, 2, 3, 4], "wxyz", 4, 3),
    ([1, 2, 3, 4], "wxyz", 1, 0), ("ABCDE", "vwxyz", "e", 4),
])  # fmt: skip
def test_choices_by_name(folder: Folder, labels: Any, texts: str, answer: Any, gold: int) -> None:
    both = {"label": list(labels), "text": list(texts)}
    pairs = [{"label": one, "text": other} for one, other in zip(labels, texts, strict=True)]
    rows = [{"q": "?", "choices": choices, "answerKey": answer} for choices in (both, pairs)]
    found = folder.rows("choice", rows, fields=NESTED)
    assert [(row.choices, row.gold) for row in found] == [(tuple(texts), gold)] * 2


@pytest.mark.parametrize(("choices", "answer", "meant"), [
    (["B", "A", "C"], "A", "the text of choice 1, and as a name choice 0"),
    (["B", "A", "C"], "c", None), (["5", "1", "2"], "1", None),
    ({"label": ["1", "2", "3"], "text": ["x", "y", "z"]}, 1, "as a name choice 0, and as an index"),
    (["1", "0"], "0", "the text of choice 1, and as an index choice 0"),
    (["x", "y"], "C", "neither one of the choices"), (["x", "y"], 2, "neither one of the choices"),
    ([12, 7, 3, 2], 3, "the text of choice 2, and as an index choice 3"),
    ([12, 7, 3, 2], 7, None), ([1.5, 1, 4], 2, None),
    (["x", "y"], "", None), (["x", "y"], -1, "neither one of the choices"),
])  # fmt: skip
def test_answers_that_mean_two_things_or_none(
    folder: Folder, choices: Any, answer: Any, meant: str | None
) -> None:
    rows = [{"q": "?", "choices": choices, "answerKey": answer}]
    if meant is None and answer:
        texts = choices if isinstance(choices, list) else choices["text"]
        gold = texts.index(answer) if answer in texts else 2
        assert folder.rows("choice", rows, fields=NESTED)[0].gold == gold
        return
    pattern = (
        rf"a\.json:1: answer {answer!r} is {meant}.*data\.fields\.label" if meant else ":1: no"
    )
    with pytest.raises(DataError, match=pattern):
        folder.read("choice", rows, fields=NESTED)


@pytest.mark.parametrize(
    "choices", [None, [], ["x"], "x", {"label": ["A"]}, [["x"], ["y"]], [1, None]]
)
def test_choices_that_cannot_be_read(folder: Folder, choices: Any) -> None:
    rows = [{"q": "?", "choices": choices, "answerKey": "A"}]
    with pytest.raises(DataError, match=r"a\.json:1: choices is .*data\.fields\.choices"):
        folder.read("choice", rows, fields=NESTED)


CLOZE = {"text": "article", "choices": "options", "label": "answers"}


def test_a_row_for_each_blank_of_a_passage(folder: Folder) -> None:
    row = {"article": "a _ b _ c", "options": ["x", "y", "z"], "answers": [2, "x"], "id": "p"}
    data = folder.read("cloze", [row, {**row, "id": None}], blank="_", fields=CLOZE)
    first, second, *others = data.splits["train"]
    assert [(row.id, row.gold) for row in (first, second)] == [("p-0", 2), ("p-1", 0)]
    assert first.marks == (Span("blank", 2, 3), Span("blank", 6, 7))
    assert second.marks == (Span("blank", 6, 7), Span("blank", 2, 3)), "its own is first"
    assert [row.id for row in others] == ["2", "3"]
    assert "ids that stand before" not in data.counts["train"]
    row["options"] = [["x", "y"], ["u", "v"]]
    row["answers"] = ["B", "A"]
    rows = folder.rows("cloze", [row], blank="_", fields=CLOZE)
    assert [(row.choices, row.gold) for row in rows] == [(("x", "y"), 1), (("u", "v"), 0)]
    del row["answers"]
    folder.write("b.json", [row])
    with pytest.raises(ConfigError, match=r"data.blank='\(' is not a regular expression"):
        folder.rows("cloze", [row], blank="(", fields=CLOZE)
    task = folder.task("cloze", blank="_", fields=CLOZE)
    assert [row.gold for row in read_file(task, "b.json", needs_gold=False)] == [None, None]
    one = {"article": ["a", "_"], "options": ["x", "y"], "answers": [1], "id": "p"}
    [example] = folder.rows("cloze", [one], blank="_", fields=CLOZE)
    assert (example.text, example.id, example.gold) == ("a；_", "p", 1)


@pytest.mark.parametrize("change", [
    {"answers": [1]}, {"answers": 1}, {"answers": [1, 0, 1]}, {"options": [["x", "y"]]},
])  # fmt: skip
def test_blanks_without_an_answer_each(folder: Folder, change: dict[str, Any]) -> None:
    row = {"article": "a _ b _", "options": ["x", "y"], "answers": [1, 0], **change}
    with pytest.raises(DataError, match=r"a\.json:1: 2 blanks, but '.*in the order .*data\.blank"):
        folder.read("cloze", [row], blank="_", fields=CLOZE)


def test_blanks_of_fewclue_and_chid(folder: Folder) -> None:
    row = {"id": 1, "content": "他#idiom#地来。", "candidates": ["甲", "乙"], "answer": 1}
    fields = {"text": "content", "choices": "candidates", "label": "answer"}
    [example] = folder.rows("cloze", [row], fields=fields)
    assert (example.marks, example.gold) == ((Span("blank", 1, 8),), 1)
    with pytest.raises(DataError, match=r"a\.json:1: no blank"):
        folder.read("cloze", [{**row, "content": "他来。"}], fields=fields)
    with pytest.raises(DataError, match=r"a\.json:1: answer 2 is neither"):
        folder.read("cloze", [{**row, "answer": 2}], fields=fields)
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
