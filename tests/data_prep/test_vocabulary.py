"""Stage tokenizer: given tokenizers, the weighted sample, the report."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.config import PrepConfig, TokenizerConfig
from data_prep.run import run
from data_prep.tokenizer.existing_tokenizer import read_given
from data_prep.tokenizer.vocabulary import allot, script
from pipeline.config.load import load
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, DataError
from pipeline.tokenizer.fast import FastTokenizer
from tests.support import bert_vocabulary, near_texts
from tests.support.prepare import config_of, write_texts

TEXTS = [*near_texts.english()[:60], *near_texts.chinese(np.random.default_rng(1), 20)]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return bert_vocabulary.write(tmp_path / "vocab.txt", bert_vocabulary.rows(TEXTS))


def _config(prep_config: Path, output: Path, sources: str, *overrides: str) -> PrepConfig:
    return load(
        PrepConfig, prep_config, [f"output_dir={output}", f"sources={sources}", *overrides]
    ).config


# A given tokenizer


@pytest.mark.parametrize(("beside", "options", "lowercase", "warning"), [
    (None, {}, True, "tokenizer.lowercase"), (None, {"lowercase": True}, True, ""),
    (None, {"lowercase": False}, False, "words with capitals become"),
    ({"do_lower_case": False}, {}, False, "words with capitals become"),
    ({"do_lower_case": False}, {"lowercase": True}, True, ""),
    ({"tokenizer_class": "BertTokenizer"}, {}, True, ""),
])  # fmt: skip
def test_options_come_from_config_file_and_vocabulary(
    vocab: Path, caplog: pytest.LogCaptureFixture,
    beside: dict[str, Any] | None, options: dict[str, Any], lowercase: bool, warning: str,
) -> None:  # fmt: skip
    if beside is not None:
        (vocab.parent / "tokenizer_config.json").write_text(json.dumps(beside))
    with caplog.at_level(logging.WARNING):
        given = read_given(TokenizerConfig(file=str(vocab), **options))
    assert json.loads(given.content)["normalizer"]["lowercase"] == lowercase
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


def test_cased_vocabulary_is_recognised(vocab: Path, caplog: pytest.LogCaptureFixture) -> None:
    bert_vocabulary.write(vocab, bert_vocabulary.rows(TEXTS, lowercase=False))
    given = read_given(TokenizerConfig(file=str(vocab)))
    assert json.loads(given.content)["normalizer"]["lowercase"] is False
    assert "lowercase=False" in caplog.text


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b'{"model": {}}', b"a\nb\n"])
def test_unusable_files(prep_config: Path, corpus: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "given").write_bytes(content)
    with pytest.raises(DataError, match="/given"):
        run(config_of(prep_config, tmp_path / "d", corpus, f"tokenizer={{file: {tmp_path}/given}}"))
    assert not (tmp_path / "d").exists()


def test_missing_and_foreign_files(vocab: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.file = .*nothing"):
        read_given(TokenizerConfig(file=str(tmp_path / "nothing")))
    beside = tmp_path / "tokenizer_config.json"
    beside.write_text('{"tokenizer_class": "BertJapaneseTokenizer"}')
    with pytest.raises(DataError, match="splits words with MeCab"):
        read_given(TokenizerConfig(file=str(vocab)))
    beside.write_text('{"tokenizer_class": "RoFormerTokenizer"}')
    given = read_given(TokenizerConfig(file=str(vocab)))
    assert FastTokenizer(vocab, given.content).words == "jieba"


@pytest.mark.parametrize(("options", "message"), [
    ({"file": "x", "vocab_size": 300}, r"vocab_size = 300 with tokenizer\.file = x: a given"),
    ({"file": "x", "model_type": "bpe"}, "model_type = bpe with"),
    ({"lowercase": True}, r"lowercase = True with tokenizer\.file = None: only a vocab"),
])  # fmt: skip
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(**options)


def test_another_vocabulary_is_noticed(prep_config: Path, vocab: Path, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t.jsonl", TEXTS)
    config = config_of(prep_config, tmp_path / "data", source, f"tokenizer={{file: {vocab}}}",
                       "shards.block_tokens=2000")  # fmt: skip
    run(config)
    bert_vocabulary.write(vocab, bert_vocabulary.rows(TEXTS, words=100))
    with pytest.raises(DataError, match="other inputs"):
        run(config)


# The sample


@pytest.mark.parametrize(("sizes", "weights", "budget", "expected"), [
    ({"a": 600, "b": 300}, {"a": 1, "b": 1}, 90, {"a": 60, "b": 30}),
    ({"a": 600, "b": 300}, {"a": 1, "b": 2}, 90, {"a": 45, "b": 45}),
    ({"a": 600, "b": 20}, {"a": 1, "b": 60}, 90, {"a": 70, "b": 20}),
    # What b cannot give goes to a and c as 1 to 3, then c has too little as well.
    ({"a": 600, "b": 10, "c": 40}, {"a": 1, "b": 99, "c": 45}, 90, {"a": 40, "b": 10, "c": 40}),
    ({"a": 5, "b": 7}, {"a": 1, "b": 1}, 90, {"a": 5, "b": 7}),
    ({"a": 0, "b": 7}, {"a": 1, "b": 1}, 5, {"a": 0, "b": 5}),
])  # fmt: skip
def test_shares_of_sources(
    sizes: dict[str, int], weights: dict[str, float], budget: int, expected: dict[str, int]
) -> None:
    assert allot(sizes, weights, budget) == expected


def _sampled(prep_config: Path, output: Path, sources: str, *overrides: str) -> tuple[Any, bytes]:
    tokenizer = "tokenizer={vocab_size: 1500, sample_mb: 1, model_type: bpe}"
    settings = (tokenizer, "shards.block_tokens=20000")
    report = run(_config(prep_config, output, sources, *settings, *overrides))
    return report["tokenizer_sample"], (output / "tokenizer.model").read_bytes()


@pytest.mark.usefixtures("processes")
def test_weighted_sample_depends_on_no_order_and_no_task(prep_config: Path, tmp_path: Path) -> None:
    chinese, english = near_texts.chinese(np.random.default_rng(2), 700), near_texts.english()
    half = len(english) // 2
    for name, number in (("1", "2"), ("2", "1")):
        (tmp_path / name).mkdir()
        write_texts(tmp_path / name / f"{number}.jsonl", english[:half])
        write_texts(tmp_path / name / f"{name}.jsonl", english[half:], half)
    zh = write_texts(tmp_path / "zh.jsonl", chinese)

    def sources(folder: str) -> str:
        return (f"[{{name: zh, inputs: [{zh}]}}, "
                f"{{name: en, inputs: [{tmp_path}/{folder}], weight: 10}}]")  # fmt: skip

    counts, model = _sampled(prep_config, tmp_path / "one", sources("1"))
    sizes = {name: count["source_bytes"] for name, count in counts.items()}
    weighted = {"zh": sizes["zh"], "en": 10 * sizes["en"]}
    # Ten times its size is more than English has: it gives all, Chinese the rest of 1 MB.
    assert 1_000_000 * weighted["en"] / sum(weighted.values()) > sizes["en"]
    assert counts["en"]["bytes"] == sizes["en"]
    assert (counts["zh"]["bytes"], counts["zh"]["weight"]) == (1_000_000 - sizes["en"], 1.0)
    # There is no other English to report on.
    report = json.loads((tmp_path / "one/work/tokenizer/tokenizer.report.json").read_text())
    assert report["sources"]["en"]["documents_also_trained_on"] == counts["en"]["documents"]
    # Files the other way round, in one piece or a piece each, by one process or two.
    others = _sampled(prep_config, tmp_path / "two", sources("2"), "piece_mb=1", "workers=2")
    assert others == (counts, model)
    # Another weight is another sample, but nothing is ingested again.
    ingested = (tmp_path / "one/work/ingest/00000.jsonl.zst").stat().st_mtime_ns
    config = _config(prep_config, tmp_path / "one", sources("1").replace("10}", "1}"),
                     "tokenizer={vocab_size: 1500, sample_mb: 1, model_type: bpe}")  # fmt: skip
    again = run(config, replace=True)["tokenizer_sample"]
    assert again["en"]["bytes"] == 1_000_000 * sizes["en"] // sum(sizes.values())
    assert (tmp_path / "one/work/ingest/00000.jsonl.zst").stat().st_mtime_ns == ingested


@pytest.mark.long
def test_report_is_on_other_text_where_there_is_some(prep_config: Path, tmp_path: Path) -> None:
    texts = near_texts.chinese(np.random.default_rng(3), 100)
    texts = [f"{number} {text}" for number in range(18) for text in texts]
    source = write_texts(tmp_path / "zh.jsonl", texts)
    counts, _ = _sampled(prep_config, tmp_path / "data", f"[{{name: zh, inputs: [{source}]}}]")
    assert counts["zh"]["source_bytes"] > 5_500_000
    assert counts["zh"]["bytes"] == 1_000_000
    path = tmp_path / "data/work/tokenizer/tokenizer.report.json"
    measured = json.loads(path.read_text())["sources"]["zh"]
    assert abs(measured["bytes"] - 4_000_000) < 3
    assert measured["documents_also_trained_on"] == 0


# The report


def test_report_by_hand(prep_config: Path, tmp_path: Path) -> None:
    pieces = [*bert_vocabulary.SPECIALS, "the", "model", "##s", "中", "文", "12", ".", "unused"]
    vocab = bert_vocabulary.write(tmp_path / "vocab.txt", pieces)
    texts = ["the models 中文 12.", "the the\nmodel 龘.", "the Ωx [MASK]."]
    texts += [f"the model{' the' * number}" for number in range(60)]
    source = write_texts(tmp_path / "t.jsonl", texts)
    given = f"tokenizer={{file: {vocab}, lowercase: true}}"
    report = run(config_of(prep_config, tmp_path / "data", source, given,
                           "shards.block_tokens=1000"))["sources"]["topics"]  # fmt: skip
    tokens = 7 + 5 + 6 + sum(2 + n for n in range(60))
    # 龘; Ωx, [, MASK and ].
    assert (report["tokens"], report["unknown"]) == (tokens, 5)
    assert report["unknown_share"] == round(5 / tokens, 6)
    path = tmp_path / "data/work/tokenizer/tokenizer.report.json"
    made = json.loads(path.read_text())
    assert made["vocabulary"] == {
        "kind": "wordpiece", "size": 114, "special": 5, "never_in_text": 101,
        "words_never_in_text": [], "bytes": 0,
        "pieces": 8, "unused_in_sample_share": 0.125, "single_character_share": 0.5,
        "scripts": {"Han": 2, "Latin": 4, "digits": 1, "other": 1},
        "longest": ["unused", "model", "the", "12", ".", "s", "中", "文"],
    }  # fmt: skip
    measured = made["sources"]["topics"]
    assert (measured["documents"], measured["characters"]) == (63, sum(map(len, texts)))
    assert measured["bytes_per_token"] == round(len("".join(texts).encode()) / tokens, 6)
    assert measured["tokens_per_document"]["0.5"] == 30
    assert measured["tokens_per_document"]["1"] == 61
    assert measured["unknown_texts"] == [["MASK", 1], ["[", 1], ["]", 1], ["Ωx", 1], ["龘", 1]]
    lost = len("model龘.") + len("theωx[mask].")
    whole = sum(len("".join(text.split())) for text in texts)
    assert measured["round_trip_share"] == round(1 - lost / whole, 6)
    assert measured["round_trip_differences"] == [
        {"character": "ω", "lines": 1, "text": "theωx[mask].",
         "decoded": "the[UNK][UNK][UNK][UNK]"},
        {"character": "龘", "lines": 1, "text": "model龘.", "decoded": "model[UNK]."},
    ]  # fmt: skip


def test_sentencepiece_report_counts_bytes_and_scripts(dataset: DatasetIndex) -> None:
    made = json.loads((dataset.folder / "work/tokenizer/tokenizer.report.json").read_text())
    measured = made["sources"]["topics"]
    report = json.loads((dataset.folder / "report.json").read_text())["sources"]["topics"]
    assert made["vocabulary"]["bytes"] == 256
    assert measured["tokens"] == report["tokens"]
    assert measured["byte_piece_share"] == report["byte_piece_share"] > 0
    assert measured["unknown_share"] == report["unknown"] == 0
    # Bytes spell what has no piece, so everything comes back.
    assert (measured["round_trip_share"], measured["round_trip_differences"]) == (1.0, [])
    found = [script(piece) for piece in ("中", "层a", "é", "x1", "12", ".", "ω", "の")]
    assert found == ["Han", "Han", "Latin", "Latin", "digits", "other", "other", "other"]


def test_a_vocabulary_that_does_not_go_with_the_text_is_warned_of(
    prep_config: Path, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = [*bert_vocabulary.SPECIALS, *"abcdefghijklmnopqrst", "机器学习", "中", "##a"]
    given = bert_vocabulary.write(tmp_path / "vocab.txt", pieces)
    with caplog.at_level(logging.WARNING):
        run(config_of(prep_config, tmp_path / "data", corpus, f"tokenizer={{file: {given}}}"))
    [unknown] = [text for text in caplog.messages if "tokens are unknown" in text]
    assert unknown.startswith("source topics: ")
    [never] = [text for text in caplog.messages if "can be in no text" in text]
    assert "1 words of several Chinese characters" in never
    assert "机器学习" in never
    report = json.loads((tmp_path / "data/report.json").read_bytes())
    assert report["tokenizer_report"]["vocabulary"]["words_never_in_text"] == ["机器学习"]
