"""Vocabularies of Hugging Face models: the same ids as transformers, masks, specials, errors."""

import json
import pickle
import pydoc_data.topics
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from pipeline.errors import DataError
from pipeline.tokenizer.fast import FastTokenizer, build_tokenizer_json

TOPICS = [topic for _, topic in sorted(pydoc_data.topics.topics.items())][::3]
ODD = [
    "", " ", "Crème brûlée, naïve ÀÉÎ ﬁ", "中文标点,和 English 混排。", "emoji 😀 👩‍👩‍👧",
    "tabs\tand\r\nlines\u2028 \u3000\u00a0x", "\x00\x01\ufffd\u200b",
    "don't ##x [unused1] a" + "b" * 200,
]  # fmt: skip
BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def _write_vocabulary(folder: Path, **options: Any) -> Path:
    """A vocab.txt of the topics' commonest words, all their letters, and some Chinese."""
    words = Counter(re.findall(r"\w+|[^\w\s]", " ".join(TOPICS)))
    letters = sorted(set("".join(words)) | set("中文标点和eéèàÀÉ"))
    rows = [*BERT_SPECIALS, *letters, *(f"##{letter}" for letter in letters)]
    rows += [word for word, _ in words.most_common(600)]
    rows += [f"##{ending}" for ending in ("ing", "ed", "s", "er", "ion")]
    (folder / "vocab.txt").write_text("".join(f"{row}\n" for row in dict.fromkeys(rows)))
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def _write_byte_level(folder: Path, **options: Any) -> Path:
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TOPICS, vocab_size=1200, special_tokens=ROBERTA_SPECIALS)
    trained.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def _load(folder: Path) -> FastTokenizer:
    content = build_tokenizer_json(folder)
    assert content is not None
    path = folder / "built.json"
    path.write_text(content, encoding="utf-8")
    return FastTokenizer(path)


def _assert_ids_of(reference: Any, tokenizer: FastTokenizer) -> None:
    texts = [*ODD, *TOPICS]
    expected = reference(texts, add_special_tokens=False).input_ids
    assert sum(map(len, expected)) > 10_000
    assert [tokenizer.encode(text) for text in texts] == expected
    with_specials = reference("one", "two").input_ids
    built = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    assert built.encode("one", "two").ids == with_specials


@pytest.mark.parametrize("options", [
    {}, {"do_lower_case": False}, {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
])  # fmt: skip
def test_word_piece_has_the_ids_of_transformers(tmp_path: Path, options: dict[str, bool]) -> None:
    folder = _write_vocabulary(tmp_path, **options)
    reference = transformers.BertTokenizer.from_pretrained(folder, local_files_only=True)
    _assert_ids_of(reference, _load(folder))


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_byte_level_bpe_has_the_ids_of_transformers(tmp_path: Path, add_prefix_space: bool) -> None:
    folder = _write_byte_level(tmp_path, add_prefix_space=add_prefix_space)
    reference = transformers.RobertaTokenizer.from_pretrained(folder, local_files_only=True)
    _assert_ids_of(reference, _load(folder))


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", [transformers.BertTokenizer, transformers.RobertaTokenizer])
def test_added_tokens_have_the_ids_of_transformers(tmp_path: Path, kind: Any, file: str) -> None:
    is_bert = kind is transformers.BertTokenizer
    folder = (_write_vocabulary if is_bert else _write_byte_level)(tmp_path)
    first = _load(folder).vocab_size

    def add(start: int) -> None:
        ids = {"[MASK]" if is_bert else "<mask>": 4, "the value": start, "zzzyx": start + 1}
        flags: dict[str, Any] = {"special": False, "normalized": True}
        decoder = {token: {"content": content, **flags} for content, token in ids.items()}
        body = ids if file == "added_tokens.json" else {"added_tokens_decoder": decoder}
        (folder / file).write_text(json.dumps(body))

    add(first)
    tokenizer = _load(folder)
    _assert_ids_of(kind.from_pretrained(folder, local_files_only=True), tokenizer)
    assert tokenizer.vocab_size == first + 2
    found = tokenizer.encode("the value of zzzyx")
    assert [token for token in found if token >= first] == [first, first + 1]
    add(first + 1)
    with pytest.raises(DataError, match=f"has id {first + 1}, expected {first}"):
        build_tokenizer_json(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return _load(_write_vocabulary(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return _load(_write_byte_level(tmp_path_factory.mktemp("roberta")))


def test_specials_are_plain_text_in_text(bert: FastTokenizer, roberta: FastTokenizer) -> None:
    for tokenizer, expected in ((bert, [0, 1, 2, 3, 4]), (roberta, [1, 3, 0, 2, 4])):
        ids = [tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id]
        assert [*ids, tokenizer.mask_id] == expected
        assert tokenizer.special_ids == frozenset(range(5))
    for tokenizer, specials in ((bert, BERT_SPECIALS), (roberta, ROBERTA_SPECIALS)):
        for special in specials:
            for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
                ids = copy.encode(f"the {special} name")
                assert len(ids) > 3
                assert not copy.special_ids & set(ids)


def test_masks_and_readable_text(bert: FastTokenizer, roberta: FastTokenizer) -> None:
    for tokenizer, name in ((bert, "[MASK]"), (roberta, "<mask>")):
        # RoBERTa's mask has the space before it inside.
        expected = [*tokenizer.encode("the"), tokenizer.mask_id, *tokenizer.encode("x of")[1:]]
        assert tokenizer.encode("x of")[:1] == tokenizer.encode("x")
        assert tokenizer.encode_with_masks(f"the {name} of") == expected
        assert tokenizer.encode_with_masks("the [MASK] of") == expected
        assert tokenizer.encode_with_masks("[MASK][MASK]") == [tokenizer.mask_id] * 2
        others = set(tokenizer.encode_with_masks("a [SEP] </s> [CLS] <s> b"))
        assert not others & tokenizer.special_ids - {tokenizer.unk_id}
    ids = bert.encode("Theed value.")
    assert [bert.piece(i) for i in ids] == ["the", "##ed", "value", "."]
    assert bert.decode([bert.cls_id, *ids, bert.mask_id]) == "[CLS] theed value. [MASK]"
    ids = roberta.encode("in the façade")
    assert [roberta.piece(i) for i in ids][:2] == ["in", " the"]
    assert roberta.decode([*ids, roberta.mask_id]) == "in the façade<mask>"


def test_a_mask_of_byte_bpe_has_its_space_whatever_the_file_says(
    tmp_path: Path, roberta: FastTokenizer
) -> None:
    body = json.loads(roberta.to_json())
    for token in body["added_tokens"]:
        token["lstrip"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    text = "the <mask> of [MASK]"
    other = FastTokenizer(tmp_path / "tokenizer.json")
    assert other.encode_with_masks(text) == roberta.encode_with_masks(text)


def test_capitals_of_a_lone_vocabulary_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    """Google's zips of cased models have no tokenizer_config.json."""
    letters = [*"aAbB", *(f"##{letter}" for letter in "aAbB")]
    for name, capitals in (("cased", True), ("uncased", False)):
        pieces = [*BERT_SPECIALS, *(p for p in letters if capitals or p == p.lower()), "Ba", "ba"]
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vocab.txt").write_text("\n".join(pieces))
        (folder / "config.json").write_text("{}")
        made = FastTokenizer(folder, str(build_tokenizer_json(folder)).encode())
        assert [made.piece(token) for token in made.encode("Ba")] == ["ba"]
    assert [record.args[0] for record in caplog.records] == [tmp_path / "cased/vocab.txt"]
    # What transformers wrote decides.
    for text, piece in (("{}", "ba"), ('{"do_lower_case": false}', "Ba")):
        (tmp_path / "cased/tokenizer_config.json").write_text(text)
        made = FastTokenizer(tmp_path, str(build_tokenizer_json(tmp_path / "cased")).encode())
        assert [made.piece(token) for token in made.encode("Ba")] == [piece]
    assert len(caplog.records) == 1


def test_tokenizer_json_is_taken_without_its_limit(tmp_path: Path, bert: FastTokenizer) -> None:
    limited = tokenizers.Tokenizer.from_str(bert.to_json())
    limited.enable_truncation(8)
    limited.enable_padding(length=8)
    limited.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.txt").write_text("another\n")
    content = build_tokenizer_json(tmp_path)
    assert content == (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    loaded = FastTokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(TOPICS[0]) == bert.encode(TOPICS[0])
    assert loaded.encode("a") == bert.encode("a")


def test_specials_that_a_file_does_not_mark(tmp_path: Path, bert: FastTokenizer) -> None:
    body = json.loads(bert.to_json())
    body.update(added_tokens=[], post_processor=None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    loaded = FastTokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode_with_masks("a [MASK] b") == bert.encode_with_masks("a [MASK] b")
    written = tokenizers.Tokenizer.from_str(loaded.to_json())
    assert written.encode("a").ids == [2, *bert.encode("a"), 3]


def test_unusable_vocabularies_are_refused(tmp_path: Path, bert: FastTokenizer) -> None:
    assert build_tokenizer_json(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        build_tokenizer_json(tmp_path)
    (tmp_path / "damaged.json").write_text('{"model": 1}')
    for name in ("damaged.json", "missing.json"):
        with pytest.raises(DataError, match=f"{name} cannot be loaded"):
            FastTokenizer(tmp_path / name)
    path = tmp_path / "tokenizer.json"
    path.write_text(bert.to_json().replace("[MASK]", "[OTHER]"), encoding="utf-8")
    with pytest.raises(DataError, match=r"\[MASK\] nor <mask>"):
        FastTokenizer(path)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(DataError, match=r"vocab\.txt has no \[MASK\]"):
        build_tokenizer_json(tmp_path / "bert")


@pytest.mark.parametrize("options", [
    {"do_lower_case": False}, {"do_lower_case": True, "strip_accents": False},
    {"tokenize_chinese_chars": False}, {},
], ids=str)  # fmt: skip
def test_the_config_beside_a_tokenizer_json_decides(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    content = build_tokenizer_json(_write_vocabulary(tmp_path))
    assert content is not None
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    assert build_tokenizer_json(tmp_path) == content
    config = {"tokenizer_class": "BertTokenizer", **options}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    body = json.loads(build_tokenizer_json(tmp_path) or "")
    names = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
    for key, value in options.items():
        assert body["normalizer"][names.get(key, key)] is value
    # A class without rules of its own leaves them.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **options}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert build_tokenizer_json(tmp_path) == content


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_classes_with_other_rules_are_refused_wherever_they_stand(
    tmp_path: Path, where: str
) -> None:
    _write_vocabulary(tmp_path)
    for name, message in (("BertJapaneseTokenizer", "MeCab"), ("HerbertTokenizerFast", "Herbert")):
        (tmp_path / where).write_text(json.dumps({"tokenizer_class": name}))
        with pytest.raises(DataError, match=message):
            build_tokenizer_json(tmp_path)
    (tmp_path / where).write_text(json.dumps({"tokenizer_class": "ElectraTokenizerFast"}))
    assert build_tokenizer_json(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    _write_byte_level(tmp_path, tokenizer_class="HerbertTokenizerFast")
    with pytest.raises(DataError, match=r"rules are not known.*RobertaTokenizer"):
        build_tokenizer_json(tmp_path)
