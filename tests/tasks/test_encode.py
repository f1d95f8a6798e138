"""Rows of tokens: what each kind looks like, and spans from characters to tokens and back."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import build as build_config
from pipeline.errors import ConfigError
from pipeline.tasks.readers import encode
from pipeline.tasks.rows import text_spans
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import Answer, Example, Span, TokenRow, TokenSpan
from pipeline.tokenizer.fast import BertOptions
from pipeline.tokenizer.sentencepiece import Tokenizer, train
from pipeline.tokenizer.wordpiece import WordPieceTokenizer, build
from tests.support import bert_vocabulary

CHINESE = "浙商银行企业信贷部叶老桂博士则从另一个角度对五道门槛进行了解读"
BACK = CHINESE[::-1]
ENGLISH = "the old man and the sea is read by 3,000 people in U.S. cities"
STRANGE = "“叶老桂”　Ａ ﬁne　𠮷野 \u200b西\u0301 É 1998年—x\ttab"


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> WordPieceTokenizer:
    path = tmp_path_factory.mktemp("wordpiece") / "tokenizer.json"
    pieces = bert_vocabulary.rows([CHINESE * 3, f"{ENGLISH} " * 3])
    path.write_text(build(pieces, BertOptions(), path))
    return WordPieceTokenizer(path)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    lines = [f"{CHINESE[i:]} {ENGLISH[i:]}" for i in range(30)] * 20
    path.write_bytes(
        train(iter(lines), vocab_size=320, model_type="unigram", character_coverage=1.0)
    )
    return Tokenizer(path)


@pytest.fixture(params=["wordpiece", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def _config(kind: str, **given: Any) -> TaskConfig:
    return build_config(TaskConfig, {"task": {"kind": kind}, "input": given}, "test")


def _encode(
    tokenizer: Any, config: TaskConfig, **fields: Any
) -> tuple[list[TokenRow], dict[str, int]]:
    return encode(config, tokenizer, [Example(id="0", where="a.json:1", **fields)])


@pytest.mark.parametrize("text", [CHINESE, ENGLISH, STRANGE, "", " ", f" {CHINESE} {ENGLISH} "])
def test_offsets_are_those_of_the_ids(tokenizer: Any, text: str) -> None:
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert len(offsets) == len(ids)
    assert all(0 <= start < end <= len(text) for start, end in offsets)
    assert offsets == sorted(offsets)
    covered = {place for start, end in offsets for place in range(start, end)}
    lost = "".join(char for place, char in enumerate(text) if place not in covered)
    # White space, and what normalisation removes.
    assert not lost.replace("\u200b", "").replace("\u0301", "").strip(), lost


def test_characters_without_a_piece_keep_their_place(tokenizer: Any) -> None:
    gold = (Span("name", 1, 4), Span("name", 12, 14))
    assert [STRANGE[s.start : s.end] for s in gold] == ["叶老桂", "𠮷野"]
    [row], counts = _encode(tokenizer, _config("spans"), text=STRANGE, gold=gold)
    assert text_spans(row, row.spans) == list(gold)
    assert counts == {}


def test_every_entity_of_whole_characters_survives(tokenizer: Any) -> None:
    gold = tuple(Span("x", i, j) for i in range(31) for j in range(i + 1, min(i + 5, 32)))
    [row], counts = _encode(tokenizer, _config("spans"), text=CHINESE, gold=gold)
    expressed = text_spans(row, row.spans)
    num_lost = counts.get("entities that begin or end inside a token", 0)
    assert len(expressed) + num_lost == len(gold)
    assert set(expressed) <= set(gold)
    if isinstance(tokenizer, WordPieceTokenizer):
        assert expressed == list(gold), "a character is a token"


def test_entities_that_are_lost_are_counted(wordpiece: WordPieceTokenizer) -> None:
    gold = (Span("x", 4, 7), Span("x", 5, 7))
    [row], counts = _encode(wordpiece, _config("spans"), text="the old man", gold=gold)
    assert text_spans(row, row.spans) == [Span("x", 4, 7)]
    assert counts == {"entities that begin or end inside a token": 1}
    [row], counts = _encode(
        wordpiece, _config("spans"), text="the old man", gold=(Span("x", 3, 7),)
    )
    assert text_spans(row, row.spans) == [Span("x", 4, 7)]
    assert counts == {"entities with white space at an end": 1}
    gold = (Span("x", 0, 2), Span("x", 5, 7), Span("x", 10, 12))
    [row], counts = _encode(wordpiece, _config("spans", max_length=8), text=CHINESE, gold=gold)
    assert text_spans(row, row.spans) == [Span("x", 0, 2)], "six characters are left"
    assert counts == {"rows that were cut": 1, "entities behind the cut": 2}
    gold = (Span("company", 0, 4), Span("place", 0, 2), Span("name", 9, 12))
    [row], counts = _encode(wordpiece, _config("tag"), text=CHINESE, gold=gold)
    assert text_spans(row, row.spans) == [gold[0], gold[2]]
    assert counts == {"entities inside others, which tags cannot hold": 1}
    [row], _ = _encode(wordpiece, _config("spans"), text=CHINESE, gold=gold)
    assert set(text_spans(row, row.spans)) == set(gold)


# Rows of each kind


def _words(tokenizer: WordPieceTokenizer, row: TokenRow) -> str:
    return tokenizer.decode(row.ids.tolist())


class _Letters:
    """A codec whose tokens are characters."""

    cls_id, sep_id = 1, 2

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]


def _sizes(kind: str, room: int, *texts: str) -> list[int]:
    """How much is left of texts that are rows of one letter, a letter each."""
    config = _config(kind, max_length=room + 1 + len(texts))
    fields: dict[str, Any] = {"text": texts[0], "text_b": texts[1], "gold": 0}
    if kind == "choice":
        fields["choices"] = texts[2:]
    [row], _ = _encode(_Letters(), config, **fields)
    return [row.ids.tolist().count(ord(text[0])) for text in texts]


def test_texts_are_cut_as_bert_cuts_them() -> None:
    """BERT takes a token of the first while that is the longer one, else one of the second."""
    for room in (5, 6, 9):
        for first in range(1, 15):
            for second in range(1, 15):
                a, b = first, second
                while a + b > room:
                    a, b = (a - 1, b) if a > b else (a, b - 1)
                assert _sizes("pair", room, "a" * first, "b" * second) == [a, b]
    for room in (4, 5, 10):
        for first, second, third in product(range(1, 8), repeat=3):
            left = [first, second, third]
            while sum(left) > room:
                left[[at for at in range(3) if left[at] == max(left)][-1]] -= 1
            assert _sizes("choice", room, "a" * first, "b" * second, "c" * third) == left


@pytest.mark.parametrize(("truncate", "text_b", "expected"), [
    # Of 20 tokens 18 are left for one text and 17 for two; a quarter of each is head.
    ("tail", "", [CHINESE[:18]]),
    ("head", "", [CHINESE[-18:]]),
    ("head_tail", "", [CHINESE[:4] + CHINESE[-14:]]),
    ("tail", BACK, [CHINESE[:9], BACK[:8]]),
    ("head", BACK, [CHINESE[-9:], BACK[-8:]]),
    ("head_tail", BACK, [CHINESE[:2] + CHINESE[-7:], BACK[:2] + BACK[-6:]]),
    ("head_tail", "五道门", [CHINESE[:3] + CHINESE[-11:], "五道门"]),
])  # fmt: skip
def test_what_is_kept_of_long_texts(
    wordpiece: WordPieceTokenizer, truncate: str, text_b: str, expected: list[str]
) -> None:
    config = _config("pair", max_length=20, truncate=truncate)
    [row], counts = _encode(wordpiece, config, text=CHINESE, text_b=text_b, gold="a")
    assert len(row.ids) == 20
    words = _words(wordpiece, row).replace(" ", "").removeprefix("[CLS]")
    assert words.split("[SEP]")[:-1] == expected
    assert counts == {"rows that were cut": 1}


def test_offsets_are_those_of_the_text_that_is_kept(wordpiece: WordPieceTokenizer) -> None:
    config = _config("tag", max_length=8, truncate="head")
    gold = (Span("x", 0, 2), Span("x", len(CHINESE) - 4, len(CHINESE) - 2))
    [row], counts = _encode(wordpiece, config, text=CHINESE, gold=gold)
    assert row.offsets[1:-1, 0].tolist() == list(range(len(CHINESE) - 6, len(CHINESE)))
    assert text_spans(row, row.spans) == [gold[1]]
    assert counts == {"rows that were cut": 1, "entities behind the cut": 1}
    [row], _ = _encode(wordpiece, _config("spans"), text="the sea", gold=())
    assert row.offsets.tolist() == [[-1, -1], [0, 3], [4, 7], [-1, -1]]
    assert text_spans(row, [TokenSpan("x", 0, 2), TokenSpan("x", 1, 3)]) == [Span("x", 0, 7)]


def test_choices_are_rows_and_repeats_have_none(wordpiece: WordPieceTokenizer) -> None:
    fields = {"text": "博士", "text_b": "一个", "choices": ("读", "行", "行"), "gold": 1}
    rows, _ = _encode(wordpiece, _config("choice"), **fields)
    assert [row.part for row in rows] == [0, 1]
    assert _words(wordpiece, rows[1]) == "[CLS] 博 士 [SEP] 一 个 [SEP] 行 [SEP]"


def test_candidate_stands_in_its_blank(wordpiece: WordPieceTokenizer) -> None:
    text = "#a#博士#b#银行#a#"
    marks = (Span("blank", 5, 8), Span("blank", 0, 3), Span("blank", 10, 13))
    fields = {"text": text, "marks": marks, "choices": ("企业", "信贷"), "gold": 0}
    rows, _ = _encode(wordpiece, _config("cloze"), **fields)
    masks = "[MASK] [MASK] [MASK] [MASK]"
    assert (
        _words(wordpiece, rows[1]) == f"[CLS] {masks} 博 士 [SEP] 信 贷 [SEP] 银 行 {masks} [SEP]"
    )
    rows, counts = _encode(wordpiece, _config("cloze", max_length=10), **fields)
    assert _words(wordpiece, rows[0]) == "[CLS] 博 士 [SEP] 企 业 [SEP] 银 行 [SEP]"
    assert counts == {"rows that were cut": 2}
    fields["choices"] = (CHINESE, "信贷")
    rows, _ = _encode(wordpiece, _config("cloze", max_length=10), **fields)
    assert _words(wordpiece, rows[0]) == "[CLS] [SEP] 浙 商 银 行 企 业 [SEP] [SEP]"


@pytest.mark.parametrize(("first", "second", "words"), [
    ((4, 6), (0, 1), "[ 浙 ] 商 银 行 _ 企 业 _"), ((0, 2), (2, 3), "_ 浙 商 _ [ 银 ] 行 企 业"),
    ((2, 3), (0, 2), "[ 浙 商 ] _ 银 _ 行 企 业"), ((0, 4), (2, 4), "_ 浙 商 [ 银 行 ] _ 企 业"),
    ((0, 2), (0, 4), "[ _ 浙 商 _ 银 行 ] 企 业"), ((0, 1), (1, 2), "_ 浙 _ [ 商 ] 银 行 企 业"),
])  # fmt: skip
def test_both_spans_of_coref_are_marked(
    wordpiece: WordPieceTokenizer, first: tuple[int, int], second: tuple[int, int], words: str
) -> None:
    marks = (Span("span1", *first), Span("span2", *second))
    [row], _ = _encode(wordpiece, _config("coref"), text="浙商银行企业", marks=marks, gold="true")
    assert _words(wordpiece, row) == f"[CLS] {words} [SEP]"
    _, counts = _encode(
        wordpiece, _config("coref", max_length=8), text="浙商银行企业", marks=marks, gold="true"
    )
    is_lost = max(first[1], second[1]) + 4 > 6  # of ten characters six are left
    assert counts.get("marked spans behind the cut", 0) == is_lost


# Windows


def test_windows_cover_the_passage_and_find_the_answer(tokenizer: Any) -> None:
    text = f"{CHINESE}。{ENGLISH}。" * 3
    start = text.index("角度", 150)
    config = _config("qa", max_length=24, stride=8)
    gold = (Answer(" 角度", start),)
    rows, counts = _encode(tokenizer, config, text=text, text_b="博士", gold=gold)
    assert counts == {}
    assert [row.part for row in rows] == list(range(len(rows)))
    assert max(len(row.ids) for row in rows) == 24
    ids, _ = tokenizer.encode_with_offsets(text)
    places = np.concatenate([row.offsets for row in rows])
    assert len(np.unique(places[places[:, 0] >= 0], axis=0)) <= len(ids)
    covered = {place for s, e in places.tolist() if s >= 0 for place in range(s, e)}
    assert {place for place, char in enumerate(text) if char != " "} <= covered
    answers = [text_spans(row, row.spans) for row in rows if row.spans]
    assert answers
    assert all(span == [Span("answer", start, start + 2)] for span in answers)


@pytest.mark.parametrize("length", [5, 9, 10, 14, 23, 33])
@pytest.mark.parametrize("stride", [1, 4, 9])
def test_most_context_scores(wordpiece: WordPieceTokenizer, length: int, stride: int) -> None:
    config = _config("qa", max_length=14, stride=stride)
    rows, _ = _encode(wordpiece, config, text=(CHINESE * 2)[:length], text_b="博士")
    found: dict[int, int] = {}
    for row in rows:
        for slot in range(*row.starts):
            assert found.setdefault(int(row.offsets[slot, 0]), row.part) == row.part
    for place in range(length):
        contexts = {}
        for row in rows:
            places = [start for start, _ in row.offsets.tolist() if start >= 0]
            if place in places:
                at = places.index(place)
                contexts[row.part] = min(at, len(places) - 1 - at) + 0.01 * len(places)
        # As run_squad.py's _check_is_max_context: of equals the first.
        assert found[place] == max(contexts, key=lambda part: (contexts[part], -part))


def test_windows_train_on_answers_they_hold(wordpiece: WordPieceTokenizer) -> None:
    config = _config("qa", max_length=14, stride=9)
    gold = (Answer(CHINESE[2:4], 2), Answer(CHINESE[20:22], 20), Answer("none", None))
    rows, _ = _encode(wordpiece, config, text=CHINESE, text_b="博士", gold=gold)
    assert [text_spans(row, row.spans) for row in rows] == [
        [Span("answer", 2, 4)], [], [Span("answer", 20, 22)], [],
    ]  # fmt: skip
    config = _config("qa", max_length=16, stride=12)
    with pytest.raises(ConfigError, match=r"a\.json:1: windows have room for 9 tokens"):
        _encode(wordpiece, config, text=CHINESE, text_b="博士进行", gold=())


def test_answers_that_are_lost_are_counted(wordpiece: WordPieceTokenizer) -> None:
    fields = {"text": CHINESE, "text_b": "博士", "gold": (Answer(CHINESE[:31], 0),)}
    _, counts = _encode(wordpiece, _config("qa", max_length=40, stride=8), **fields)
    assert counts == {"answers longer than head.max_answer": 1}, "30 tokens"
    config = _config("qa", max_length=12, stride=4)
    gold = (Answer(CHINESE[2:20], 2),)
    rows, counts = _encode(wordpiece, config, text=CHINESE, text_b="博士", gold=gold)
    assert not any(row.spans for row in rows)
    assert counts == {"answers that no window holds": 1}
    config = _config("qa", max_length=40, max_question=2, stride=8)
    _, counts = _encode(wordpiece, config, text="博士", text_b=CHINESE)
    assert counts == {"questions that were cut": 1}
    gold = (Answer("ld", 5),)
    config = _config("qa", max_length=32, stride=16)
    [row], _ = _encode(wordpiece, config, text="the old man", text_b="man", gold=gold)
    assert text_spans(row, row.spans) == [Span("answer", 4, 7)]
