"""WordPiece as a dataset's tokenizer: transformers' ids, special tokens, pieces, words, errors."""

import hashlib
import itertools
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rjieba
import transformers

from data_prep.word_boundaries import word_starts
from pipeline.config.data import DataConfig
from pipeline.data.format import DatasetIndex, Source, Vocabulary, index_bytes, read_index
from pipeline.data.masking import Sequences, mask_tokens
from pipeline.data.random import Purpose
from pipeline.errors import DataError
from pipeline.tokenizer import wordpiece
from pipeline.tokenizer.fast import BertOptions, FastTokenizer
from pipeline.tokenizer.wordpiece import WordPieceTokenizer, build, read_vocab_txt
from tests.support import bert_vocabulary, near_texts

TEXTS = [
    *near_texts.english()[::12], *near_texts.chinese(np.random.default_rng(0), 4),
    "我们在北京大学学习计算机,他喜欢喝咖啡。", "龘的训练 中文 模型",
    "今天天气很好!模型训练需要很多数据,语言模型尤其如此。",
    "Crème Brûlée, ÀÉÎ naïve ﬁ", "用 PyTorch 2.0 训练BERT-base模型,效果(很)好;don't ##x",
    "emoji 😀 tabs\tand\r\nlines\u2028 \u3000\u00a0x" + "b" * 200,
]  # fmt: skip
OPTIONS = [BertOptions(), BertOptions(do_lower_case=False), BertOptions(strip_accents=False),
           BertOptions(tokenize_chinese_chars=False)]  # fmt: skip


def _tokenizer(folder: Path, options: BertOptions) -> WordPieceTokenizer:
    pieces = bert_vocabulary.rows(TEXTS, lowercase=options.do_lower_case)
    path = bert_vocabulary.write(folder / "vocab.txt", pieces)
    (folder / "tokenizer.json").write_text(
        build(read_vocab_txt(path.read_bytes(), path), options, path), encoding="utf-8"
    )
    return WordPieceTokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def uncased(tmp_path_factory: pytest.TempPathFactory) -> WordPieceTokenizer:
    return _tokenizer(tmp_path_factory.mktemp("uncased"), BertOptions())


@pytest.mark.parametrize("options", OPTIONS)
def test_ids_are_those_of_transformers(tmp_path: Path, options: BertOptions) -> None:
    tokenizer = _tokenizer(tmp_path, options)
    (tmp_path / "reference").mkdir()
    bert_vocabulary.write(tmp_path / "reference/vocab.txt", bert_vocabulary.rows(
        TEXTS, lowercase=options.do_lower_case))  # fmt: skip
    (tmp_path / "reference/tokenizer_config.json").write_text(json.dumps(vars(options)))
    reference = transformers.BertTokenizerFast.from_pretrained(
        tmp_path / "reference", local_files_only=True
    )
    expected = reference(TEXTS, add_special_tokens=False).input_ids
    assert [tokenizer.spell(text)[0].tolist() for text in TEXTS] == expected
    assert [tokenizer.encode(text) for text in TEXTS] == expected
    flat = list(itertools.chain(*expected))
    assert len(flat) > 10_000
    assert 0.001 < flat.count(tokenizer.unk_id) / len(flat) < 0.2
    ids = {name: getattr(tokenizer.vocabulary, name) for name in bert_vocabulary.IDS}
    assert ids == bert_vocabulary.IDS


_MARKS = [
    *"的一是 abc,.!？。éüñ\t\n\xa0\0",
    "\u0301",
    "\u200d",
    "\u0130",
    "\u1fef",
    "\u2260",
    "\uf900",
]


_PLANES = ((0, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000))


@pytest.mark.parametrize("options", OPTIONS)
def test_ids_and_places_of_random_text_are_those_of_the_package(
    tmp_path: Path, options: BertOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wordpiece, "_MOST_CHARS", 10_000)  # so words are forgotten now and then
    tokenizer = _tokenizer(tmp_path, options)
    draw = random.Random(0)
    for _ in range(600):
        parts = [draw.choice(_MARKS) if draw.random() < 0.7
                 else chr(draw.randrange(*draw.choice(_PLANES)))
                 for _ in range(draw.randrange(60))]  # fmt: skip
        text = "".join(parts) * draw.choice((1, 1, 1, 3))
        ids, spans = tokenizer.encode_with_offsets(text)
        found, spelling = tokenizer.spell(text)
        assert found.tolist() == ids, ascii(text)
        assert spelling.surface(found)[1].tolist() == [start for start, _ in spans], ascii(text)


def test_special_tokens_in_text_are_plain_text(uncased: WordPieceTokenizer) -> None:
    special = set(range(106))  # all rows before the first character's
    for name in ("[MASK]", "[CLS]", "[SEP]", "[PAD]", "[UNK]", "[unused1]", "<S>"):
        ids, _ = uncased.spell(f"the {name} of{name}")
        assert not set(ids) & special
        plain = name.lower()
        assert uncased.decode(ids).replace(" ", "") == f"the{plain}of{plain}"
    assert uncased.encode_with_masks("the [MASK]")[-1] == 103


def test_pieces_that_no_text_has(tmp_path: Path) -> None:
    pieces = [*bert_vocabulary.SPECIALS, "a", "##a", "A", "##A", "é", "中", "##中", "...", ".",
              "##.", "\u2028", "ab", "##", "#", "1", "##1", "a b"]  # fmt: skip
    absent = {"A", "##A", "é", "##中", "...", "##.", "\u2028", "##", "a b"}
    absent |= set(bert_vocabulary.SPECIALS)
    path = bert_vocabulary.write(tmp_path / "vocab.txt", pieces)
    cased = BertOptions(do_lower_case=False, tokenize_chinese_chars=False)
    for options, there in ((BertOptions(), set[str]()), (cased, {"A", "##A", "é", "##中"})):
        (tmp_path / "t.json").write_text(build(pieces, options, path), encoding="utf-8")
        vocabulary = WordPieceTokenizer(tmp_path / "t.json").vocabulary
        expected = [piece for piece in pieces if piece not in absent - there]
        assert [pieces[i] for i in vocabulary.in_text] == expected


def test_texts_and_random_tokens_have_possible_pieces(uncased: WordPieceTokenizer) -> None:
    possible = {*uncased.vocabulary.in_text.tolist(), uncased.unk_id}
    assert len(possible) < uncased.vocab_size - 106  # ## before Chinese characters
    assert {token for text in TEXTS for token in uncased.encode(text)} <= possible
    whole = [i for i in sorted(possible) if not uncased.piece(i).startswith("##")]
    assert all(uncased.encode(uncased.piece(i)) == [i] for i in whole if i != uncased.unk_id)
    vocabulary = uncased.vocabulary
    config = DataConfig(dir="unused", masking="token", replace_mask_prob=0.0,
                        replace_random_prob=1.0, mask_prob=0.5)  # fmt: skip
    tokens = np.random.default_rng(0).choice(vocabulary.in_text, (2000, 64))
    every = np.ones(tokens.shape, dtype=bool)
    one, zero = np.ones(tokens.shape, np.int32), np.zeros(2000, dtype=np.int64)
    batch = Sequences(tokens, every, every, one, np.arange(2000), zero)
    corrupted, selected, _ = mask_tokens(
        batch, config=config, vocabulary=vocabulary, key=(3, Purpose.MASK)
    )
    drawn = corrupted[selected]
    counts = np.bincount(drawn, minlength=vocabulary.size)
    assert set(np.flatnonzero(counts)) <= set(vocabulary.in_text.tolist())
    # Uniform: chi-square within 4.5 standard deviations of its mean.
    counts, freedom = counts[vocabulary.in_text], len(vocabulary.in_text) - 1
    expected = len(drawn) / len(counts)
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 4.5 * np.sqrt(2 * freedom)
    masked, selected, _ = mask_tokens(
        batch, config=replace(config, replace_mask_prob=1.0, replace_random_prob=0.0),
        vocabulary=vocabulary, key=(3, Purpose.MASK),
    )  # fmt: skip
    assert (masked[selected] == 103).all()


def test_random_text_as_jieba_and_transformers(uncased: WordPieceTokenizer) -> None:
    """An unknown character, 龘, is one token; a space, for which none stands, ends a word."""
    assert len(word_starts(uncased.spell("")[1], np.zeros(0, dtype=np.uint16))) == 0
    rng = random.Random(1)
    pool = "今天天气很好我们在北京大学学习计算机他喜欢喝咖啡模型训练数据语言的是和龘 the MODEL.,!"
    unknown = 0
    for _ in range(300):
        text = "".join(rng.choices(pool, k=rng.randint(1, 40)))
        ids, spelling = uncased.spell(text)
        starts = word_starts(spelling, np.array(ids, dtype=np.uint16))
        _, offsets = spelling.surface(np.array(ids))
        begins = {0, *itertools.accumulate(len(word) for word in rjieba.cut(text))}
        for token, offset, start in zip(ids, offsets.tolist(), starts.tolist(), strict=True):
            if "\u4e00" <= text[offset] <= "\u9fff":
                assert start == (offset in begins), (text, offset)
            else:
                before = text[offset - 1] if offset else " "
                assert start == (re.fullmatch("[a-zA-Z]{2}", before + text[offset]) is None)
            unknown += token == uncased.unk_id
    assert unknown > 100


def test_published_forms_are_read_alike(uncased: WordPieceTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    pieces, options = wordpiece.read_tokenizer_json(json.loads(uncased.to_json()), path)
    assert build(pieces, options, path) == uncased.to_json()
    # As transformers saves it: the same pieces and options.
    bert_vocabulary.write(tmp_path / "vocab.txt", pieces)
    reference = transformers.BertTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    reference.save_pretrained(tmp_path / "saved")
    saved = (tmp_path / "saved/tokenizer.json").read_text(encoding="utf-8")
    assert wordpiece.read_tokenizer_json(json.loads(saved), path) == (pieces, options)
    path.write_text(uncased.to_json(), encoding="utf-8")
    assert wordpiece.difference_of_ids(FastTokenizer(path).pieces(), uncased.pieces()) == ""
    other = [*pieces[:200], pieces[201], pieces[200], *pieces[202:]]
    path.write_text(build(other, options, path), encoding="utf-8")
    found = wordpiece.difference_of_ids(FastTokenizer(path).pieces(), uncased.pieces())
    assert "200" in found
    assert repr(pieces[201]) in found
    path.write_text(build(pieces[:-1], options, path), encoding="utf-8")
    found = wordpiece.difference_of_ids(FastTokenizer(path).pieces(), uncased.pieces())
    assert "pieces there" in found


@pytest.mark.parametrize(("content", "message"), [
    (b"[PAD]\n[UNK]\n[CLS]\na\n", r"has 4 pieces, but no \[SEP\], \[MASK\]"),
    (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nb\na\nb\na\n",
     r"has 'b' in lines 6 and 8, and 1 other pieces more than once"),
    ("\ufeff[PAD]\n[UNK]\n".encode(), "byte-order mark of UTF-8"),
    ("[PAD]\n中\n".encode("utf-16"), "byte-order mark of UTF-16"),
    ("[PAD]\n[UNK]\n中文\n".encode("gb18030"), r"vocab.txt, line 3: not valid UTF-8"),
    (b"[PAD]\n\n[UNK]\n", "line 2, is empty"),
], ids=["special", "twice", "BOM", "UTF-16", "GB18030", "empty line"])  # fmt: skip
def test_unusable_vocabularies(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    with pytest.raises(DataError, match=message):
        build(read_vocab_txt(content, path), BertOptions(), path)


def test_line_ends_of_windows_are_no_part_of_pieces(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    assert read_vocab_txt(b"[PAD]\r\n[UNK]\r\na\r\n", path) == ["[PAD]", "[UNK]", "a"]
    assert read_vocab_txt("a\n\u2028\n##\u2028".encode(), path) == ["a", "\u2028", "##\u2028"]


@pytest.mark.parametrize(("change", "message"), [
    ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer 'Whitespace', not 'BertPreT"),
    ({"normalizer": {"type": "NFC"}}, "not the tokenizer.json of a BERT model: KeyError"),
    ({"added_tokens": [{"content": "<new>", "id": 999999}]}, r"added tokens \['<new>'\]"),
    ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "not the tokenizer.json of a BERT"),
])  # fmt: skip
def test_other_tokenizer_json_is_refused(
    uncased: WordPieceTokenizer, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    body = {**json.loads(uncased.to_json()), **change}
    with pytest.raises(DataError, match=message):
        wordpiece.read_tokenizer_json(body, tmp_path / "tokenizer.json")


def test_index_carries_special_ids_and_sources_and_its_first_version_is_read(
    dataset: DatasetIndex, uncased: WordPieceTokenizer, tmp_path: Path
) -> None:
    assert dataset.vocabulary == Vocabulary(1000)
    assert dataset.vocabulary.in_text.tolist() == list(range(5, 1000))
    assert dataset.sources == (Source("topics", 1.0),)
    assert dataset.block_source.tolist() == [0] * len(dataset.blocks)
    body = json.loads((dataset.folder / "index.json").read_text())
    for name in ("fingerprint", "vocabulary", "sources", "source_runs"):
        del body[name]
    body["format_version"] = 1
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    body["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "index.json").write_text(json.dumps(body))
    shutil.copy(dataset.folder / "index.npz", tmp_path)
    first = read_index(tmp_path)
    assert first.vocabulary == dataset.vocabulary
    assert first.sources == (Source("", 1.0),)
    assert first.block_source.tolist() == dataset.block_source.tolist()
    written = index_bytes(vocabulary=uncased.vocabulary, tokenizer_file="tokenizer.json",
                          tokenizer_sha256="", unigram_entropy_nats=1.0, totals={}, shards=[],
                          blocks=dataset.blocks,
                          sources=([Source("a", 2.0), Source("b", 1.0)], [0, 0, 1]))  # fmt: skip
    body = json.loads(written)
    assert (body["format_version"], body["source_runs"]) == (2, [[0, 2], [1, 1]])
    assert (body["vocabulary"]["kind"], body["vocabulary"]["mask"]) == ("wordpiece", 103)
