"""Vocabularies of words that jieba cuts, against transformers' RoFormerTokenizer."""

import json
import pickle
import random
import re
from pathlib import Path

import pytest
import transformers

from pipeline.tokenizer.fast import BertOptions, FastTokenizer, build_tokenizer_json, word_piece
from pipeline.tokenizer.load import load_tokenizer
from pipeline.tokenizer.wordpiece import WordPieceTokenizer, build, read_tokenizer_json
from pipeline.use.hf_tokenizer import write_hf_tokenizer
from tests.support import bert_vocabulary, near_texts, words

TEXTS = [*words.texts(120), *list(dict.fromkeys(near_texts.english()))[:80]]
ODD = [
    "今天天气非常好。Hello WORLD 3.14，价格是5%！", "\u3000全角\u3000空格 and\ttabs",
    "\uff21㐀𠀀é \ufb01 \u0130stanbul",
    "研究生命的起源 GPT-4 卡拉OK", "", " ", "\x00a\u200b中", "naïve café 中文", "[MASK] [CLS] 中国",
]  # fmt: skip


PIECES = words.rows(TEXTS, words=60)  # of about 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published."""
    path = tmp_path_factory.mktemp("words")
    bert_vocabulary.write(path / "vocab.txt", PIECES)
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "RoFormerTokenizer"}')
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> WordPieceTokenizer:
    text = build_tokenizer_json(folder)
    assert text is not None
    (folder / "made.json").write_text(text)
    loaded = load_tokenizer(folder / "made.json")
    assert isinstance(loaded, WordPieceTokenizer)
    return loaded


@pytest.fixture(scope="module")
def reference() -> transformers.RoFormerTokenizer:
    # Not from_pretrained: transformers 5.23 takes the path of a vocab.txt for the vocabulary, and
    # a word is whole if its letters stand in that path.
    return transformers.RoFormerTokenizer(vocab={p: i for i, p in enumerate(PIECES)})


def _texts(tokenizer: FastTokenizer) -> list[str]:
    rng, pieces = random.Random(0), [piece or "" for piece in tokenizer.pieces()]
    drawn = ["".join(rng.choices([*pieces, " ", "，"], k=rng.randint(1, 30))) for _ in range(2000)]
    return [*TEXTS, *ODD, *(text.replace("##", "") for text in drawn)]


def test_ids_are_those_of_transformers(
    tokenizer: WordPieceTokenizer, reference: transformers.RoFormerTokenizer
) -> None:
    whole = 0
    for text in _texts(tokenizer):
        # A special token in a text is text here.
        if re.search(r"\[[A-Z]+\]|<[ST]>", text):
            continue
        ids = tokenizer.encode(text)
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
        whole += sum(
            len(tokenizer.piece(token)) > 1 and tokenizer.piece(token) > "\u4e00" for token in ids
        )
    assert whole > 1000  # words of several characters


def test_a_corpus_is_spelled_alike(tokenizer: WordPieceTokenizer) -> None:
    left = 0
    for text in _texts(tokenizer):
        ids, spelling = tokenizer.spell(text)
        expected, spans = tokenizer.encode_with_offsets(text)
        assert ids.tolist() == expected, text
        surface, places = spelling.surface(ids)
        assert surface == text
        assert places.tolist() == [start for start, _ in spans], text
        left += tokenizer._jieba_table.spell(text) is None  # type: ignore[union-attr]
    assert 0 < left < 300  # what normalisation makes longer or shorter


def test_what_is_written_and_pickled_cuts_words(
    tokenizer: WordPieceTokenizer, folder: Path, tmp_path: Path
) -> None:
    copies = [
        FastTokenizer(tmp_path, tokenizer.to_json().encode()), pickle.loads(pickle.dumps(tokenizer))
    ]  # fmt: skip
    pieces, options = read_tokenizer_json(json.loads(tokenizer.to_json()), folder)
    assert options == BertOptions(words="jieba")
    assert build(pieces, options, folder) == word_piece(pieces, options, folder)
    copies.append(FastTokenizer(tmp_path, build(pieces, options, folder).encode()))
    for copy in copies:
        assert copy.words == "jieba"
        for text in (*TEXTS[:20], *ODD[:-1]):  # the last one has a mask of its own
            assert copy.encode(text) == tokenizer.encode(text)
            masked = copy.encode_with_masks(f"{text}[MASK]{text}")
            assert masked == [*tokenizer.encode(text), tokenizer.mask_id, *tokenizer.encode(text)]


def test_transformers_loads_the_export(
    tokenizer: WordPieceTokenizer, reference: transformers.RoFormerTokenizer, tmp_path: Path
) -> None:
    write_hf_tokenizer(tokenizer, tmp_path / "hf")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    loaded.save_pretrained(tmp_path / "saved")
    again = build_tokenizer_json(tmp_path / "saved")
    assert again is not None
    ours = FastTokenizer(tmp_path / "saved", again.encode())
    for text in TEXTS:
        expected = reference(text)["input_ids"]
        assert loaded(text)["input_ids"] == expected
        assert [ours.cls_id, *ours.encode(text), ours.sep_id] == expected


def test_which_words_text_can_have(tokenizer: WordPieceTokenizer) -> None:
    possible = set(tokenizer.vocabulary.in_text.tolist())
    seen = {token for text in TEXTS for token in tokenizer.encode(text)}
    assert seen - {tokenizer.unk_id} <= possible
    names = {
        tokenizer.piece(token) for token in range(tokenizer.vocab_size) if token not in possible
    }
    assert "[unused1]" in names
