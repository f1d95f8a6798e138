"""Line breaks as tokens: a plain-Python reading of the rule, and every way into the tokenizer."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import transformers

from data_prep.clean.normalise import normalise
from data_prep.word_boundaries import word_starts
from pipeline.data.format import MASK_ID
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer, keep_line_breaks, tidied, train
from pipeline.use.hf_tokenizer import write_hf_tokenizer
from tests.support import near_texts

POEM = "Two roads diverged\nin a yellow wood,\n\nand sorry I could not\n床前明月光\n疑是地上霜"
_BLANKS = " \t\u00a0\u3000\u200b\u2003\x02"
_BREAKS = ["\n", "\r\n", "\r", "\u2028", "\u2029", "\x85"]
_LETTERS = "a床é.\u0301[ｱ1-"


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer]:
    """The same pieces with line breaks as spaces, and as tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    texts = [*near_texts.english()[:200], *near_texts.chinese(np.random.default_rng(1), 40)]
    lines = [line for text in [*texts, *[POEM] * 5] for line in text.split("\n")]
    model = train(iter(lines), vocab_size=1600, model_type=request.param, character_coverage=0.9995)
    (folder / "space.model").write_bytes(model)
    (folder / "token.model").write_bytes(keep_line_breaks(model))
    assert keep_line_breaks(keep_line_breaks(model)) == keep_line_breaks(model)
    return Tokenizer(folder / "space.model"), Tokenizer(folder / "token.model")


def _odd_texts(number: int) -> list[str]:
    rng = random.Random(number)
    kinds = [list(_BLANKS), _BREAKS, list(_LETTERS)]
    return ["".join(rng.choice(rng.choice(kinds)) for _ in range(14)) for _ in range(number)]


def _by_hand(text: str) -> str:
    """The rule, character by character: of a run of white space only one or two breaks are left."""
    result = ""
    text = text.replace("\r\n", "\n")
    for is_white, run in itertools.groupby(text, lambda c: c in _BLANKS or c in _BREAKS):
        part = "".join(run)
        breaks = sum(character in _BREAKS for character in part)
        result += "\n" * min(2, breaks) if is_white and breaks else part
    return result


def test_runs_of_white_space_with_breaks_become_one_or_two() -> None:
    assert tidied("a \r\n\t b\r\n \r\n\r\n  c\n") == "a\nb\n\nc\n"
    for text in _odd_texts(3000):
        assert tidied(text) == _by_hand(text)
    assert tidied("a" + " " * 1_000_000 + "b") == "a" + " " * 1_000_000 + "b"


def test_every_break_is_one_token_and_one_word(pair: tuple[Tokenizer, Tokenizer]) -> None:
    space, token = pair
    [newline] = [i for i in range(token.vocab_size) if token.piece(i) == "\n"]
    assert (token.vocab_size, token.encode(POEM).count(newline)) == (space.vocab_size, 5)
    assert token.decode(token.encode(POEM)) == POEM
    assert space.decode(space.encode(POEM)) == " ".join(POEM.split())
    lines = [space.encode(line) for line in POEM.split("\n")]
    assert token.encode(POEM) == [i for line in lines for i in (*line, newline)][:-1]
    assert not token.is_byte[newline]
    assert space.is_byte[newline]
    assert int(token.is_byte.sum()) == 255
    ids, spelling = token.spell(POEM)
    starts = word_starts(spelling, ids.astype(np.uint16))
    [places] = np.nonzero([token.piece(i) == "\n" for i in ids.tolist()])
    assert starts[places].all()
    assert starts[places + 1].all()
    assert token.normalise(POEM) == POEM
    text, offsets = spelling.surface(ids.astype(np.uint16))
    assert text == POEM
    assert [text[offsets[place]] for place in places] == ["\n"] * 5
    raw = "  Two  roads\t\r\n   diverged\u2028in\u3000a \r\r\n\n\n wood,  床前"
    for tokenizer in pair:
        assert tokenizer.encode(raw) == tokenizer.encode(normalise(raw))


def test_all_ways_in_agree(pair: tuple[Tokenizer, Tokenizer]) -> None:
    token = pair[1]
    for text in [POEM, f"  {POEM} \n", *_odd_texts(500)]:
        ids = token.encode(text)
        assert list(token.spell(text)[0]) == ids
        with_offsets, offsets = token.encode_with_offsets(text)
        assert with_offsets == ids
        for i, (start, end) in zip(ids, offsets, strict=True):
            assert 0 <= start < end <= len(text)
            if token.piece(i) == "\n":
                assert set(text[start:end]) & set("".join(_BREAKS))
    masked = token.encode_with_masks("roads\n[MASK] \n wood\n\n[MASK]")
    assert masked == [*token.encode("roads\n"), MASK_ID, *token.encode("\nwood\n\n"), MASK_ID]


def test_exported_tokenizer_has_its_ids(pair: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    write_hf_tokenizer(pair[1], tmp_path)
    written = FastTokenizer(tmp_path / "tokenizer.json")
    texts = [POEM, f"\n {POEM} \r\n", *_odd_texts(2000)]
    assert [t for t in texts if written.encode(t) != pair[1].encode(t)] == []
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs([POEM], add_special_tokens=False).input_ids == [pair[1].encode(POEM)]
    for text in ("a\n[MASK] b", "a [MASK] \n\n b\n[MASK]\n", "[MASK]\n\n\n[MASK]"):
        assert written.encode_with_masks(text) == pair[1].encode_with_masks(text)
    assert written.decode(written.encode(POEM)) == POEM
