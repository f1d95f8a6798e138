"""Tokenizer: specials, bytes, masks in text, word starts, and vocabularies that do not fit."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig
from pipeline.data.format import MASK_ID, NUM_SPECIAL, SPECIAL_TOKENS, DatasetIndex
from pipeline.errors import DataError
from pipeline.tokenizer.sentencepiece import Tokenizer, train


@pytest.fixture(scope="module")
def tokenizer(dataset: DatasetIndex) -> Tokenizer:
    return Tokenizer(dataset.folder / dataset.tokenizer_file)


def test_special_tokens_and_characters_without_a_piece_are_text(tokenizer: Tokenizer) -> None:
    for written in (*SPECIAL_TOKENS, "中文和 English, 😀 mixed\u0301"):
        ids = tokenizer.encode(f"before {written} after")
        assert min(ids) >= NUM_SPECIAL
        assert tokenizer.decode(ids) == f"before {written} after"


def test_masks_stand_where_they_are_written(tokenizer: Tokenizer) -> None:
    with_mask = tokenizer.encode_with_masks("Return the [MASK] of the list, or [MASK]s.")
    assert with_mask.count(MASK_ID) == 2
    plain = tokenizer.encode("Return the value of the list")
    first = with_mask.index(MASK_ID)
    # What stands behind the mask keeps its leading space: the same tokens as in running text.
    behind = tokenizer.encode("x of the list")[len(tokenizer.encode("x")) :]
    assert with_mask[:first] == plain[: len(tokenizer.encode("Return the"))]
    assert with_mask[first + 1 : first + 1 + len(behind)] == behind
    assert tokenizer.piece(with_mask[first + 1]).startswith(" ")
    assert tokenizer.encode_with_masks("[MASK]") == [MASK_ID]


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = np.array(tokenizer.encode(text), dtype=np.uint16)
    bounds = [*np.flatnonzero(tokenizer.word_starts(ids)).tolist(), len(ids)]
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def test_words_start_at_spaces_punctuation_and_chinese_characters(tokenizer: Tokenizer) -> None:
    text = "An extraordinarily unusual word, (quoted) 模型训练"
    expected = ["An", "extraordinarily", "unusual", "word", ",", "(", "quoted", ")",
                "模", "型", "训", "练"]  # fmt: skip
    assert [word for word in _words(tokenizer, text) if word] == expected
    assert len(tokenizer.word_starts(np.zeros(0, dtype=np.uint16))) == 0


def test_vocabularies_and_models_that_cannot_be_used(tmp_path: Path) -> None:
    def sentences() -> Iterator[str]:
        yield from ("to be or not to be", "that is the question")

    with pytest.raises(DataError, match=r"tokenizer\.vocab_size=5000 does not fit.*<= \d+"):
        train(sentences(), vocab_size=5000, model_type="unigram", character_coverage=0.9995)
    with pytest.raises(DataError, match=r"Raise tokenizer\.vocab_size"):
        train(sentences(), vocab_size=265, model_type="unigram", character_coverage=0.9995)
    (tmp_path / "x.model").write_bytes(b"no model")
    for name in ("x.model", "missing.model"):
        with pytest.raises(DataError, match="cannot be loaded"):
            Tokenizer(tmp_path / name)


@pytest.mark.parametrize(("text", "read"), [
    ("a\nb", "a b"), ("a\t\n b", "a b"), ("a\u200cb", "a b"), ("a\u200db", "a\u200db"),
    ("a\u200bb", "ab"), ("a\ufeffb", "ab"), ("a\u00adb", "ab"), ("a\u2060b", "ab"),
])  # fmt: skip
def test_line_breaks_and_zero_width_characters(tokenizer: Tokenizer, text: str, read: str) -> None:
    assert tokenizer.decode(tokenizer.encode(normalise(text, CleanConfig()))) == read
