"""Exported tokenizers: the ids of sentencepiece, in transformers without sentencepiece and us."""

import dataclasses
import json
import os
import pydoc_data.topics
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from pipeline.data.format import CLS_ID, MASK_ID, SEP_ID, SPECIAL_TOKENS
from pipeline.errors import CheckpointError, DataError
from pipeline.tokenizer.fast import FastTokenizer, build_tokenizer_json
from pipeline.tokenizer.sentencepiece import Definition, Tokenizer, train
from pipeline.use.hf_tokenizer import write_hf_tokenizer
from tests.support import warm

PARAGRAPHS = [
    paragraph
    for _, topic in sorted(pydoc_data.topics.topics.items())
    for paragraph in topic.split("\n\n")
]
TIES = 0.01
"""Share of paragraphs with a rule of "=" or "-" that Unigram may split in another order."""

_IN_TRANSFORMERS = """
import json, sys
sys.modules["sentencepiece"] = sys.modules["pipeline"] = None
from transformers import AutoTokenizer
jobs, out = json.load(open(sys.argv[1], encoding="utf-8")), {}
for folder, texts in jobs.items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder + "-again")
    again = AutoTokenizer.from_pretrained(folder + "-again")
    pair = tokenizer("a [MASK] b", "c")
    out[folder] = {
        "ids": tokenizer(texts).input_ids,
        "again": again(texts).input_ids,
        "pair": [pair.input_ids, pair.token_type_ids],
        "padded": tokenizer(["a", "a b c d e"], padding=True).input_ids[0][-1],
        "limit": tokenizer.model_max_length,
        "mask": [tokenizer.mask_token, tokenizer.mask_token_id],
        "decoded": tokenizer.decode(tokenizer("some  text, 中文").input_ids, True),
    }
json.dump(out, open(sys.argv[2], "w"))
"""


def _synthetic(number: int) -> list[str]:
    """Rows of Chinese characters, words, emoji, combining letters and spaces."""
    rng = random.Random(number)
    characters = [chr(0x4E00 + 7 * i) for i in range(150)]
    other = [*"，。！？ a,1\n\t", " the ", "  ", "😀", "👩‍👧",
             "e\u0301", "e\u0323\u0302", "ｶﾞ", "가", "～"]  # fmt: skip
    return [
        "".join(rng.choice(characters if rng.random() < 0.7 else other) for _ in range(60))
        for _ in range(number)
    ]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    lines = [line for paragraph in PARAGRAPHS for line in paragraph.split("\n")]
    model = train(iter([*lines, *_synthetic(400)]), vocab_size=1500, model_type=request.param,
                  character_coverage=0.9995)  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = Tokenizer(folder / "tokenizer.model")
    write_hf_tokenizer(tokenizer, folder / "hf", max_length=512)
    return tokenizer, folder / "hf"


def _differing(exported: tuple[Tokenizer, Path], texts: list[str]) -> list[str]:
    tokenizer, folder = exported
    written = FastTokenizer(folder / "tokenizer.json")
    return [text for text in texts if tokenizer.encode(text) != written.encode(text)]


def test_ids_on_real_text_are_those_of_sentencepiece(exported: tuple[Tokenizer, Path]) -> None:
    definition = exported[0].definition()
    differing = _differing(exported, PARAGRAPHS)
    if definition.model_type == "bpe":
        assert not differing
    assert len(differing) <= TIES * len(PARAGRAPHS)
    assert all(set(text) & set("=*-~.") for text in differing)


def test_ids_on_odd_unicode_are_those_of_sentencepiece(exported: tuple[Tokenizer, Path]) -> None:
    marks = [chr(c) for c in range(0x300, 0x370)] + [chr(c) for c in range(0x1100, 0x1200)]
    bases = [chr(c) for c in (*range(1, 0x250), *range(0x2000, 0x2070), *range(0xFF00, 0xFFE0))]
    kinds = [marks, bases, list("aeouAEOU \u3000"), [chr(c) for c in range(0x3040, 0x3190)]]
    rng = random.Random(0)
    texts = [
        "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 12)))
        for _ in range(5000)
    ]
    assert sum(unicodedata.normalize("NFKC", text) != text for text in texts) > 3000
    # Names of specials and bytes are plain text. Not [MASK]: K is no piece here.
    names = ["<0x41>", "a<0x00>b", "[SEP]", "a [CLS] b"]
    assert not _differing(exported, [*texts, *_synthetic(500), *names])
    assert min(token for text in names for token in exported[0].encode(text)) > MASK_ID


def test_offsets_are_those_of_our_own_tokenizer(exported: tuple[Tokenizer, Path]) -> None:
    """Spans of an exported model's answers stand where they stood in training."""
    tokenizer, folder = exported
    written, rng, differing = FastTokenizer(folder / "tokenizer.json"), random.Random(0), []
    # Characters without a piece, alone and side by side, beside some with one.
    kinds = ["the list of a", "北京上海的字", "😀👍🏽", "éüñ", " ", ",.()"]
    drawn = ["".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 20)))
             for _ in range(2000)]  # fmt: skip
    texts = ["ab 北京 cd", "北京", *drawn, *PARAGRAPHS[::40]]
    # Of several spaces side by side the exported token has the first.
    for text in (re.sub(r"\s+", " ", text) for text in texts):
        ids, offsets = tokenizer.encode_with_offsets(text)
        found, places = written.encode_with_offsets(text)
        if ids == found and offsets != places:
            differing.append(text)
    assert differing == []


@pytest.fixture(scope="module")
def texts() -> list[str]:
    plain = [text for text in PARAGRAPHS[::40] if not set(text) & set("=*-~")]
    masked = ["a [MASK] b", " [MASK]x [MASK][MASK]  y [MASK] ", "中文[MASK]，[MASK] 😀", "[MASK]",
              ""]  # fmt: skip
    return [*masked, *plain, *(f"{text}[MASK] {text}" for text in plain)]


@pytest.mark.usefixtures("processes")
def test_transformers_alone_loads_it(
    exported: tuple[Tokenizer, Path], texts: list[str], tmp_path: Path
) -> None:
    tokenizer, folder = exported
    (tmp_path / "in.json").write_text(json.dumps({str(folder): texts}))
    paths, variables = (tmp_path / "in.json", tmp_path / "out.json"), {"HF_HUB_OFFLINE": "1"}
    done = warm.run_script(
        _IN_TRANSFORMERS, *paths, cwd=tmp_path, variables={**os.environ, **variables}
    )
    done.check_returncode()
    out: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())[str(folder)]
    assert out["ids"] == [[CLS_ID, *tokenizer.encode_with_masks(t), SEP_ID] for t in texts]
    assert out["again"] == out["ids"]
    first, second = tokenizer.encode_with_masks("a [MASK] b"), tokenizer.encode("c")
    assert out["pair"][0] == [CLS_ID, *first, SEP_ID, *second, SEP_ID]
    assert out["pair"][1] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert (out["padded"], out["limit"]) == (tokenizer.pad_id, 512)
    assert (out["mask"], out["decoded"]) == (["[MASK]", MASK_ID], "some text, 中文")


def test_a_fast_tokenizer_stays_as_it_is(exported: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    original = FastTokenizer(exported[1] / "tokenizer.json")
    write_hf_tokenizer(original, tmp_path / "new", token_types=False)
    assert FastTokenizer(tmp_path / "new/tokenizer.json").to_json() == original.to_json()
    config = json.loads((tmp_path / "new/tokenizer_config.json").read_text())
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    assert config["cls_token"] == "[CLS]"


def test_word_piece_is_written_for_transformers(tmp_path: Path) -> None:
    words = [*SPECIAL_TOKENS, "the", "value", "##s", "of", "中", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    content = build_tokenizer_json(tmp_path)
    assert content is not None
    (tmp_path / "built.json").write_text(content)
    write_hf_tokenizer(FastTokenizer(tmp_path / "built.json"), tmp_path / "hf", max_length=64)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    both = loaded("The values中 [MASK]", "of it.")
    assert both.input_ids == [2, 5, 6, 7, 9, 4, 3, 8, 1, 10, 3]
    assert both.token_type_ids == [0] * 7 + [1] * 4


@pytest.mark.parametrize("lower", [True, False])
def test_rules_of_word_piece_are_written_for_classes_that_make_them_anew(
    tmp_path: Path, lower: bool
) -> None:
    words = [*SPECIAL_TOKENS, "A", "##B", "##c", "a", "##b", "e", "é"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    ours = FastTokenizer(tmp_path / "x", (build_tokenizer_json(tmp_path) or "").encode())
    write_hf_tokenizer(ours, tmp_path / "hf")
    for of in (transformers.AutoTokenizer, transformers.BertTokenizer):
        found = of.from_pretrained(tmp_path / "hf", local_files_only=True)
        assert found("ABc é", add_special_tokens=False).input_ids == ours.encode("ABc é")


def test_rows_of_tasks_are_one_segment(exported: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    trained = tokenizers.ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(PARAGRAPHS, vocab_size=500, special_tokens=specials)
    (tmp_path / "bytes").mkdir()
    trained.save_model(str(tmp_path / "bytes"))
    content = build_tokenizer_json(tmp_path / "bytes")
    assert content is not None
    (tmp_path / "built.json").write_text(content, encoding="utf-8")
    originals = {"sentencepiece": exported[0], "bytes": FastTokenizer(tmp_path / "built.json")}
    for name, tokenizer in originals.items():
        write_hf_tokenizer(tokenizer, tmp_path / name, max_length=8, one_segment=True, cut="left")
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / name, local_files_only=True)
        both = loaded("the value", "of it", truncation=False, return_offsets_mapping=True)
        first, second = tokenizer.encode("the value"), tokenizer.encode("of it")
        cls, sep = tokenizer.cls_id, tokenizer.sep_id
        assert both["input_ids"] == [cls, *first, sep, *second, sep]
        assert "token_type_ids" not in both
        long = loaded("the value of it and of the same " * 3, truncation=True)["input_ids"]
        assert long == [cls, *tokenizer.encode("the value of it and of the same " * 3)[-6:], sep]
        if name == "bytes":  # no space belongs to a word
            offsets = both["offset_mapping"][1 : len(first) + 1]
            assert "".join("the value"[start:end] for start, end in offsets) == "thevalue"


class _WithOtherScores(Tokenizer):
    def definition(self) -> Definition:
        right = super().definition()
        return dataclasses.replace(right, scores=tuple(-abs(score) % 7 for score in right.scores))


def test_a_difference_is_noticed(exported: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    tokenizer = _WithOtherScores(exported[1].parent / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json splits"):
        write_hf_tokenizer(tokenizer, tmp_path)


def test_model_trained_otherwise_is_refused(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(PARAGRAPHS[:200]), model_prefix=str(tmp_path / "other"),
        vocab_size=600, byte_fallback=True, pad_id=0, unk_id=1, bos_id=2, eos_id=3,
        pad_piece="[PAD]", unk_piece="[UNK]", bos_piece="[CLS]", eos_piece="[SEP]",
        control_symbols=["[MASK]"], normalization_rule_name="nmt_nfkc", minloglevel=2,
    )  # fmt: skip
    with pytest.raises(DataError, match="add_dummy_prefix 1"):
        write_hf_tokenizer(Tokenizer(tmp_path / "other.model"), tmp_path / "out")
