"""Byte-level BPE as a dataset's tokenizer: ids of tokenizers, text, words, pieces, errors."""

import itertools
import json
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rjieba
import tokenizers

from data_prep.config import TokenizerConfig
from data_prep.tokenizer.existing_tokenizer import read_given
from data_prep.word_boundaries import word_starts
from pipeline.errors import ConfigError, DataError
from pipeline.tokenizer.byte_bpe import ByteBpeTokenizer
from pipeline.tokenizer.load import load_tokenizer
from tests.support import byte_bpe, near_texts

ENGLISH, CHINESE = near_texts.english()[::12], near_texts.chinese(np.random.default_rng(0), 4)
TEXTS = [*ENGLISH, *CHINESE, "", " ", "\n", "我们在北京大学学习计算机,他喜欢喝咖啡。",
         "Crème Brûlée, A\u0301\u0302 e\u0301 naïve ﬁ", "def f(x):\n    return  [x]\n\n\n\tpass",
         "emoji 😀 👩‍👩‍👧 tabs\tand\r\nlines\u2028 \u3000\u00a0x" + "b" * 200,
         "[unused0] [UNK] <unk>"]  # fmt: skip


@pytest.fixture(scope="module", params=byte_bpe.KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    # Few merges are of Chinese: most of its characters are two or three tokens.
    path = byte_bpe.write(folder / "tokenizer.json", request.param, [*ENGLISH, *CHINESE[:1]])
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, ByteBpeTokenizer)
    reference = tokenizers.Tokenizer.from_file(str(path))
    reference.encode_special_tokens = True
    return request.param, tokenizer, reference


def _random_texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    common = [
        *"的一是在北京大学 abcABC,.!？。éüñ\t\n\xa0'",
        "  ",
        "\u0301",
        "\u200d",
        " the",
        "中文",
    ]
    planes = ((0, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000))
    return ["".join(
                draw.choice(common) if draw.random() < 0.8
                else chr(draw.randrange(*draw.choice(planes)))
                for _ in range(draw.randrange(60))
            )
            for _ in range(count)]  # fmt: skip


def test_ids_are_those_of_the_package_and_spell_its_normalised_text(loaded: Any) -> None:
    kind, tokenizer, reference = loaded
    parts = 0
    for text in [*TEXTS, *_random_texts(0, 400)]:
        ids, spelling = tokenizer.spell(text)
        assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids, ascii(text)
        assert tokenizer.encode(text) == ids.tolist()
        expected = reference.normalizer.normalize_str(text) if reference.normalizer else text
        # A published file may put a space before the text that has none.
        prefix = " " * (kind == "lower" and text[:1] not in ("", " "))
        surface, offsets = spelling.surface(ids)
        assert surface == prefix + expected, ascii(text)
        continues = spelling.continues(ids)
        assert len(offsets) == len(continues) == len(ids)
        # The package's own decoder, of the tokens before each place that is between characters.
        for place in np.flatnonzero(~continues)[:50].tolist():
            assert surface[: offsets[place]] == reference.decode(ids[:place], False)
        parts += int(continues.sum())
    assert parts > 1000


def test_pieces_that_text_has(loaded: Any) -> None:
    kind, tokenizer, reference = loaded
    in_text = set(tokenizer.vocabulary.in_text.tolist())
    seen = {token for text in [*TEXTS, *_random_texts(1, 400)] for token in tokenizer.encode(text)}
    assert seen <= in_text
    assert len(seen) > 800
    special = {reference.token_to_id(name) for name in ("[CLS]", "<s>", "[MASK]", "<mask>")}
    assert not in_text & special
    assert tokenizer.vocabulary.kind == "byte_bpe"
    # Bytes that UTF-8 never has, by GPT-2's table: 0xc0, 0xc1, 0xf5 to 0xff.
    assert not in_text & {reference.token_to_id(name) for name in "ÀÁõö÷øùúûüýþÿ"}
    assert (reference.token_to_id("A") in in_text) == (kind != "lower")
    assert tokenizer.is_byte[reference.token_to_id("ä")]  # 0xe4
    assert not tokenizer.is_byte[reference.token_to_id("Ġ")]


def test_a_token_without_a_merge_is_in_no_text(tmp_path: Path) -> None:
    path = byte_bpe.write(tmp_path / "tokenizer.json", "roberta", ENGLISH, size=400)
    body = json.loads(path.read_text())
    for token in ("qzqz", "Ġqz"):
        body["model"]["vocab"][token] = len(body["model"]["vocab"])
    path.write_text(json.dumps(body))
    tokenizer = ByteBpeTokenizer(path)
    absent = set(range(tokenizer.vocab_size)) - set(tokenizer.vocabulary.in_text.tolist())
    assert absent == {*range(5), 400, 401, *(body["model"]["vocab"][c] for c in "ÀÁõö÷øùúûüýþÿ")}


def test_words_of_random_text_are_those_of_its_characters(loaded: Any) -> None:
    _, tokenizer, _ = loaded
    assert len(word_starts(tokenizer.spell("")[1], np.zeros(0, dtype=np.uint16))) == 0
    draw = random.Random(2)
    pool = [*"今天天气很好我们在北京大学学习计算机他喜欢喝咖啡模型训练数据语言的是和龘é,。.!'"]
    pool += [" the", " Mod", "el", "\n", " x"]
    chinese = others = 0
    for _ in range(300):
        ids, spelling = tokenizer.spell("".join(draw.choices(pool, k=draw.randint(1, 40))))
        surface, offsets = spelling.surface(ids)
        begins = {0, *itertools.accumulate(len(word) for word in rjieba.cut(surface))}
        starts, continues = word_starts(spelling, ids), spelling.continues(ids)
        rows = zip(offsets.tolist(), starts.tolist(), continues.tolist(), strict=True)
        for number, (offset, start, inside) in enumerate(rows):
            if inside:
                assert not start
            elif "\u3400" <= surface[offset] <= "\u9fff":
                assert start == (offset in begins), (surface, offset)
                chinese += 1
            else:
                before = surface[offset - 1] if number else "\n"
                joined = re.fullmatch(r"[\w ]\w", before + surface[offset]) is not None
                joined &= not any("\u3400" <= c <= "\u9fff" for c in before)
                assert start == (not joined), (surface, offset)
                others += 1
    assert min(chinese, others) > 1000


def test_masks_and_decoded_text(loaded: Any) -> None:
    kind, tokenizer, _ = loaded
    for text in TEXTS:
        expected = tokenizer.normalise(text)
        assert tokenizer.decode(tokenizer.encode(text)).strip() == expected.strip()
    # The space before a mask is part of it.
    ids = tokenizer.encode_with_masks("the [MASK] of")
    assert ids == [*tokenizer.encode("the"), tokenizer.mask_id, *tokenizer.encode("x of")[-1:]]
    assert tokenizer.piece(tokenizer.encode("a the")[-1]) == " the"
    assert unicodedata.normalize("NFC", "e\u0301") == tokenizer.normalise("e\u0301") or kind in (
        "roberta", "split", "lower")  # fmt: skip


def _changed(path: Path, change: Any) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def _without_bytes(body: dict[str, Any]) -> None:
    model = body["model"]
    for name in "ä¸":
        del model["vocab"][name]
    model["merges"] = [pair for pair in model["merges"] if not set("ä¸") & set("".join(pair))]
    model["vocab"] = {k: v for k, v in model["vocab"].items() if not set("ä¸") & set(k)}


@pytest.mark.parametrize(("change", "words"), [
    (lambda body: body.update(pre_tokenizer={"type": "Whitespace"}), ["Whitespace", "ByteLevel"]),
    (lambda body: body.update(decoder=None), ["decoder null"]),
    (lambda body: body["model"].update(dropout=0.1), ["dropout 0.1"]),
    (_without_bytes, ["2 of 256 bytes", "0xb8", "0xe4", "initial_alphabet"]),
    (lambda body: body["added_tokens"].pop() and body["model"]["vocab"].pop("<mask>"), ["MASK"]),
    (lambda body: body.update(
        model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}, added_tokens=[]),
     ["BERT"]),
], ids=["words", "decoder", "dropout", "bytes", "mask", "unigram"])  # fmt: skip
def test_unusable_files(change: Any, words: list[str], tmp_path: Path) -> None:
    path = byte_bpe.write(tmp_path / "tokenizer.json", "roberta", ENGLISH, size=400)
    _changed(path, change)
    with pytest.raises(DataError) as raised:
        read_given(TokenizerConfig(file=str(path)))
    for word in [*words, str(path)]:
        assert word in str(raised.value)


def test_published_forms(tmp_path: Path) -> None:
    path = byte_bpe.write(tmp_path / "tokenizer.json", "roberta", ENGLISH, size=400)
    for newline in ("space", "token"):
        given = read_given(TokenizerConfig(file=str(path)), newline)
        assert (given.suffix, given.content) == (".json", path.read_bytes())
    with pytest.raises(ConfigError, match="lowercase"):
        read_given(TokenizerConfig(file=str(path), lowercase=True))
    tokenizers.Tokenizer.from_file(str(path)).model.save(str(tmp_path))
    given = read_given(TokenizerConfig(file=str(tmp_path / "vocab.json")))
    (tmp_path / "made.json").write_bytes(given.content)
    pair = load_tokenizer(tmp_path / "made.json"), load_tokenizer(path)
    assert [pair[0].encode(text) for text in TEXTS] == [pair[1].encode(text) for text in TEXTS]
    _changed(tmp_path / "vocab.json", lambda vocabulary: vocabulary.pop("ä"))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=rf"{tmp_path}/vocab\.json has no tokens for 1 of 256"):
        read_given(TokenizerConfig(file=str(tmp_path / "vocab.json")))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"merges\.txt"):
        read_given(TokenizerConfig(file=str(tmp_path / "vocab.json")))
