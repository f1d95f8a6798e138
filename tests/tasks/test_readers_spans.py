"""Readers of entities and of answers that are parts of a text, in their published shape."""

import json
from typing import Any

import pytest

from pipeline.errors import DataError
from pipeline.tasks.readers import read_file
from pipeline.tasks.types import Answer, Span
from tests.support.task_folder import Folder

TEXT = {"fields": {"text": "text"}}
QA = {"fields": {"text": "context", "text_b": "question"}}


# Entities


def test_spans_of_cluener_and_in_lists(folder: Folder) -> None:
    row = {
        "text": "“金庸”谈金庸，《金庸传》",
        "label": {"name": {"金庸": [[1, 2], [5, 6]]}, "book": {"《金庸传》": [[8, 12]]}},
    }
    data = folder.read("spans", [row], **TEXT)
    [example] = data.splits["train"]
    assert example.gold == (Span("name", 1, 3), Span("name", 5, 7), Span("book", 8, 13))
    assert [example.text[s.start : s.end] for s in example.gold] == ["金庸", "金庸", "《金庸传》"]
    assert data.labels == ("book", "name")
    entity = {"type": "name", "start": 1, "end": 3, "text": "金庸"}
    fields = {"text": "text", "spans": "entities"}
    rows = [{"text": "“金庸", "entities": x} for x in ([entity], [["name", 1, 3]], [])]
    golds = [row.gold for row in folder.rows("spans", rows, fields=fields)]
    assert golds == [(Span("name", 1, 3),), (Span("name", 1, 3),), ()]
    inclusive = [{"text": "“金庸", "entities": [["name", 1, 2]]}]
    [row] = folder.rows("spans", inclusive, fields=fields, span_ends="inclusive")
    assert row.gold == (Span("name", 1, 3),)


@pytest.mark.parametrize("key", ["label", "entities"])
@pytest.mark.parametrize("span", [
    ["name", 1, 3], [1, 3, "name"], [1, "name", 3], ["name", "1", "3"], ["1", "3", "name"],
    {"label": "name", "start_offset": 1, "end_offset": 3, "id": 7},
])  # fmt: skip
def test_the_type_of_a_span_may_stand_anywhere(folder: Folder, span: Any, key: str) -> None:
    fields = {"text": "text", "spans": key}
    rows = [{"text": "“金庸", key: [span]}, {"text": "“", key: [["1", 0, 1]]}]
    golds = [row.gold for row in folder.rows("spans", rows, fields=fields)]
    assert golds == [(Span("name", 1, 3),), (Span("1", 0, 1),)]
    for wrong in ([1, 1, 3], ["a", "b", 1], ["1", "1", "3"], [1, 3], ["name", 1, 3, 4]):
        with pytest.raises(DataError, match=r"a\.json:1: .* data\.fields\.spans"):
            folder.read("spans", [{"text": "“金庸", key: [wrong]}], fields=fields)


TOKENS = {"fields": {"text": "tokens", "spans": "ner_tags"}}
TAGS = ["O", "B-LOC", "I-LOC", "B-ORG"]


@pytest.mark.parametrize("kind", ["tag", "spans"])
@pytest.mark.parametrize("numbers", [False, True])
def test_words_with_a_tag_each(folder: Folder, kind: str, numbers: bool) -> None:
    rows = [
        {"tokens": ["New", "York", "is"], "ner_tags": ["B-LOC", "I-LOC", "O"]},
        {"tokens": ["a", "b"], "ner_tags": ["I-LOC", "B-ORG"]},
    ]
    labels = {"labels": TAGS} if numbers else {}
    if numbers:
        rows = [{**row, "ner_tags": [TAGS.index(tag) for tag in row["ner_tags"]]} for row in rows]
    folder.write("b.json", rows[1:])
    folder.write("c.json", [{"tokens": rows[0]["tokens"]}])
    folder.write_parquet("d.parquet", rows)
    files = {"dev": ["b.json"], "test": ["c.json", "d.parquet"]}
    data = folder.read(kind, rows, **files, **labels, **TOKENS)
    [first, second], [dev] = data.splits["train"], data.splits["dev"]
    assert (first.text, first.gold) == ("New York is", (Span("LOC", 0, 8),))
    assert first.words == ((0, 3), (4, 8), (9, 11))
    assert (second.text, second.gold) == ("a b", (Span("LOC", 0, 1), Span("ORG", 2, 3)))
    assert (dev.text, dev.gold) == (second.text, second.gold), "joined as train is"
    assert (data.labels, data.joiner) == (("LOC", "ORG"), " ")
    assert data.counts["train"]["tags that continue no entity"] == 1
    golds = [(row.text, row.gold) for row in data.splits["test"]]
    assert golds == [("New York is", None), *((row.text, row.gold) for row in (first, second))]
    spaced = [{"tokens": ["in", " New", " York", " is"], "ner_tags": ["O", "B-LOC", "I-LOC", "O"]}]
    [row] = folder.rows(kind, spaced, joiner="", **TOKENS)
    assert (row.text, row.gold) == ("in New York is", (Span("LOC", 3, 11),))
    assert row.words == ((0, 2), (3, 6), (7, 11), (12, 14)), "as tokens are"
    rows = [{"tokens": ["北", "京"], "ner_tags": ["B-LOC", "I-LOC"]}]
    assert folder.rows(kind, rows, **TOKENS)[0].text == "北京"
    assert folder.rows(kind, rows, joiner="_", **TOKENS)[0].gold == (Span("LOC", 0, 3),)


@pytest.mark.parametrize(("tags", "labels", "message"), [
    ([0, 1], {}, r"tag 0 is a number, .* data\.labels"),
    ([0, 1], {"labels": ["LOC", "ORG"]}, r"tag 0 is a number, .* data\.labels"),
    ([0, 4], {"labels": TAGS}, r"tag 4 is a number, .* data\.labels"),
    (["O", "LOC"], {}, "tag 'LOC' is neither O nor a prefix"), ("O O", {}, "expected a list with"),
    (["O"], {}, r"a tag for each of the 2 words in 'tokens': .* data\.fields\.spans"),
])  # fmt: skip
def test_tags_that_do_not_fit(folder: Folder, tags: Any, labels: Any, message: str) -> None:
    rows = [{"tokens": ["a", "b"], "ner_tags": tags}]
    with pytest.raises(DataError, match=rf"a\.json:1: .*{message}"):
        folder.read("tag", rows, **labels, **TOKENS)


@pytest.mark.parametrize(("label", "message"), [
    ({"name": {"金庸": [[0, 1]]}}, r"a\.json:1: character 0 should start '金庸', but '“金'"),
    ({"name": {"金庸": [[1, 3]]}}, "has 2 characters, but its place has 3"),
    ({"name": ["金庸"]}, "is not a list of"),
    ([{"start": 1, "end": 3, "label": 7}], "of which the type is a text"),
    ([["name", 1, 9]], r"name at \[1, 9\) is not inside the text of 3 characters"),
    ([["name", 1, 1]], "or is empty"),
    ([{"type": "name", "start": 0, "end": 2, "text": "金庸"}], "should start '金庸'"),
])  # fmt: skip
def test_offsets_that_do_not_fit_are_refused(folder: Folder, label: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        folder.read("spans", [{"text": "“金庸", "label": label}], **TEXT)


def test_bmes_of_characters_and_conll_of_words(folder: Folder) -> None:
    # U+3000 is a character of the text, as in files that have every character on a line.
    text = "吴 B-NAME\n重 M-NAME\n阳 E-NAME\n\u3000 O\nA\tS-ORG\n\n任 O\n董 M-ORG\n事 E-ORG\n"
    data = folder.read("tag", text, "train.char.bmes")
    first, second = data.splits["train"]
    assert (first.text, first.gold) == ("吴重阳\u3000A", (Span("NAME", 0, 3), Span("ORG", 4, 5)))
    assert (second.text, second.gold) == ("任董事", (Span("ORG", 1, 3),))
    assert data.counts["train"]["tags that continue no entity"] == 1
    assert second.where.endswith(":7")
    text = "-DOCSTART- -X- O\n\nU.N. NNP I-ORG\nofficial NN  O\nEkeus NNP I-PER\n"
    [row] = folder.rows("tag", text, "a.conll")
    assert row.text == "U.N. official Ekeus"
    assert row.words == ((0, 4), (5, 13), (14, 19))
    assert row.gold == (Span("ORG", 0, 4), Span("PER", 14, 19))
    [row] = folder.rows("tag", "New York\tB-LOC\nis \tO\n", "b.conll")
    assert (row.text, row.words, row.gold) == ("New York is", ((0, 8), (9, 11)),
                                               (Span("LOC", 0, 8),))  # fmt: skip


# Answers


CONTEXT = "它建于一九九八年，一九九九年开放。"
LOST = {"questions whose answers are not in their text": 1}


def _squad(*answers: dict[str, Any], **question: Any) -> str:
    qas = [{"id": "Q1", "question": "何时？", "answers": list(answers), **question}]
    whole = {"version": "v1.0", "data": [{"paragraphs": [{"context": CONTEXT, "qas": qas}]}]}
    return json.dumps(whole, indent=2)


@pytest.mark.parametrize(("text", "stated", "start", "count"), [
    ("一九九九年", 9, 9, {}), ("一九九九年", 10, 9, {"answers moved to where their text is": 1}),
    ("一九九八年", 9, None, LOST), ("一九九九年", -1, None, LOST), (" 一九九九年 ", 9, 9, {}),
    ("二〇〇〇年", 3, None, LOST),
])  # fmt: skip
def test_answers_and_their_offsets(
    folder: Folder, text: str, stated: int, start: int | None, count: dict[str, int]
) -> None:
    data = folder.read("qa", _squad({"text": text, "answer_start": stated}))
    [row] = data.splits["train"]
    assert row.gold == (Answer(text, start),), "gold is the text of the file"
    assert (row.id, row.text_b) == ("Q1", "何时？")
    assert data.counts["train"] == {"rows": 1, **count}


def test_questions_without_answers(folder: Folder) -> None:
    squad = _squad(is_impossible=True, plausible_answers=[{"text": "它", "answer_start": 0}])
    assert folder.rows("qa", squad)[0].gold == (), "none is right"
    # Test files of CLUE's cmrc2018 fill the place of answers, which would all be missed.
    fake = [{"text": f"FAKE_ANSWER_{n}", "answer_start": -1} for n in (1, 2, 3)]
    folder.write("t.json", _squad(*fake))
    assert read_file(folder.task("qa"), "t.json", needs_gold=False)[0].gold is None


@pytest.mark.parametrize("flag", ["false", "False", "0", 0, False, None, "no", ""])
@pytest.mark.parametrize("other", ["true", "TRUE", 1, True, "yes"])
def test_a_flag_is_read_by_its_word(folder: Folder, flag: Any, other: Any) -> None:
    answers = [{"text": "甲", "answer_start": 0}]
    asked = [{"id": "a", "question": "q", "is_impossible": flag, "answers": answers},
             {"id": "b", "question": "q", "is_impossible": other, "answers": answers}]  # fmt: skip
    whole = {"data": [{"paragraphs": [{"context": "甲乙", "qas": asked}]}]}
    data = folder.read("qa", json.dumps(whole))
    assert [len(row.gold) for row in data.splits["train"]] == [1, 0]  # type: ignore[arg-type]
    assert data.counts["train"]["unanswerable questions with answers"] == 1
    asked[0]["is_impossible"] = "maybe"
    with pytest.raises(DataError, match=r"question a: is_impossible is 'maybe'"):
        folder.read("qa", json.dumps(whole))


@pytest.mark.parametrize(("answers", "gold"), [
    ({"text": ["九年"], "answer_start": [3]}, (Answer("九年", 3),)),
    ({"text": [], "answer_start": []}, ()), ([""], ()), ([{"text": "", "answer_start": -1}], ()),
    (["九年", {"text": "八年"}], (Answer("九年", 3), Answer("八年", 0))), ("九年", None),
    ({"text": ["九年"], "answer_start": [3.0]}, (Answer("九年", 3),)),
    ([{"text": "九年", "answer_start": "3"}], (Answer("九年", 3),)),
    ([{"text": "九年", "answer_start": "third"}], None),
    ({"text": ["九年"]}, None), ([{"answer_start": 3}], None), ([3], None),
])  # fmt: skip
def test_forms_of_answers(folder: Folder, answers: Any, gold: Any) -> None:
    row = {"context": "八年，九年。", "question": "？", "answers": answers}
    if gold is not None:
        assert folder.rows("qa", [row], **QA)[0].gold == gold
        return
    with pytest.raises(DataError, match=r"a\.json:1: .* is not a list of {text, answer_start}"):
        folder.read("qa", [row], **QA)


def test_other_forms_of_squad(folder: Folder) -> None:
    qas = [{"question": f"{n}？", "answers": []} for n in range(2)]
    whole = json.dumps({"version": "1", "data": [{"paragraphs": [{"context": "x", "qas": qas}]}]})
    rows = folder.rows("qa", whole.replace(', "data"', ',\n"data"'))
    assert [(row.id, row.text_b) for row in rows] == [("0-0-0", "0？"), ("0-0-1", "1？")]
    question = {"query_id": "Q1", "query_text": "何时？", "answers": ["九年", "七年"]}
    rows = [{"context_id": "C", "context_text": "八年，九年。", "qas": [question]}]
    [row] = folder.rows("qa", json.dumps(rows))
    assert (row.id, row.gold) == ("Q1", (Answer("九年", 3), Answer("七年", None)))


def test_dev_held_out_of_train_shares_no_passage(folder: Folder) -> None:
    rows = [
        {"context": f"第{i}段", "question": "？", "answers": ["段"], "id": f"{i}-{n}"}
        for i in range(10)
        for n in range(3)
    ]
    data = folder.read("qa", rows, hold_out=0.2, **QA)
    train, dev = data.splits["train"], data.splits["dev"]
    assert (len(train), len(dev)) == (24, 6)
    assert not {row.text for row in train} & {row.text for row in dev}
    again = folder.read("qa", rows[::-1], hold_out=0.2, **QA)
    assert {row.id for row in again.splits["dev"]} == {row.id for row in dev}
    with pytest.raises(DataError, match=r"data\.hold_out=0\.2 leaves train without a text"):
        folder.read("qa", rows[:3], hold_out=0.2, **QA)
