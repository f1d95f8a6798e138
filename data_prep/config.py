"""The root config of `python -m data_prep`."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from data_prep.filters.config import FiltersConfig
from pipeline.config.schema import REQUIRED, param, section
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One named collection of text."""

    name: str = param(REQUIRED, "name of the source, part of every document id")
    kind: Literal["files", "embedded"] = param(
        "files", "text files, or the documentation that is installed with Python (embedded)"
    )
    inputs: tuple[str, ...] = param(
        (), "folders, globs and files, plain or .gz, .zst, .xz: .txt, .jsonl, .json (an object a "
        "line), .wet, .warc, .parquet, wiki_NN",
    )  # fmt: skip
    format: Literal["auto", "txt", "jsonl", "parquet", "wet", "wikiextractor"] = param(
        "auto", "how files are read; auto goes by the suffix, wiki_NN is WikiExtractor's output"
    )
    encoding: Literal["utf-8", "gb18030", "auto"] = param(
        "utf-8", "of txt, jsonl and wikiextractor files; auto takes a file whose first MB is no "
        "valid UTF-8 but valid GB18030 for the latter",
    )  # fmt: skip
    txt_documents: Literal["blank_line", "line", "file"] = param(
        "blank_line", "what ends a document in .txt files: a blank line, a line, or the file"
    )
    text_field: str = param("text", "key of the text in .jsonl, column in .parquet files")
    weight: float = param(1.0, "share in training, relative to the source's size", gt=0)
    id_field: str = param(
        "id", "key or column of the document's id; without it, ids are file@OFFSET in bytes"
    )

    def __post_init__(self) -> None:
        if (self.kind == "files") != bool(self.inputs):
            raise ConfigError(
                f"source {self.name!r}: kind={self.kind} with inputs={list(self.inputs)}; "
                "files need inputs, the embedded corpus takes none"
            )


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """How text is normalised, and limits on documents."""

    nfkc: bool = param(
        True, "Unicode normalisation form KC: full-width letters and ligatures become plain ones"
    )
    simplified: bool = param(
        False, "Traditional Chinese becomes Simplified, by OpenCC's phrases and characters"
    )
    html: Literal["keep", "strip"] = param(
        "keep", "remnants of HTML: strip decodes entities and removes tags, comments, scripts and "
        "styles; what only looks like a tag stays (rules: data_prep/clean/html_text.py)",
    )  # fmt: skip
    min_chars: int = param(1, "shorter documents are rejected, after normalisation",
                           unit="characters", ge=1)  # fmt: skip
    max_document_mb: int = param(
        64, "a longer document stops the run (about 25 times as much memory is needed for it)",
        unit="MB", ge=1, le=4096,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DedupConfig:
    """Equal lines and near duplicates; equal documents always go. The first of several is kept."""

    lines: bool = param(
        False, "drop lines that were there before, in an earlier document or the same one"
    )
    line_min_chars: int = param(20, "shorter lines always stay", unit="characters", ge=1)
    near_duplicates: bool = param(
        False, "drop documents that are similar to an earlier one that is kept (MinHash)"
    )
    threshold: float = param(
        0.33, "a document is dropped at this estimated Jaccard similarity of shingle sets: a copy "
        "with a tenth of its words changed has about 0.6, of its characters about 0.3 (English) "
        "to 0.5 (Chinese); two versions of a law or of a template have as much", gt=0, le=1,
    )  # fmt: skip
    ngram: int = param(6, "letters and digits of a shingle", unit="characters", ge=2, le=64)
    ngram_cjk: int = param(
        3, "the same for shingles that start with a Chinese, Japanese or Korean character",
        unit="characters", ge=2, le=64,
    )  # fmt: skip
    bands: int = param(
        256, "groups of hashes; documents that agree in all rows of one band are compared, with "
        "probability 1 - (1 - similarity^rows)^bands: about half of those with similarity "
        "(0.7/bands)^(1/rows), which is 0.31 for 256 and 5", ge=1, le=1000,
    )  # fmt: skip
    rows: int = param(
        5, "hashes of a band; fewer find less similar documents, and let more unrelated ones of a "
        "large corpus meet", ge=1, le=64,
    )  # fmt: skip
    min_chars: int = param(
        100, "documents with fewer letters and digits are left out", unit="characters", ge=2
    )

    def __post_init__(self) -> None:
        if self.min_chars < max(self.ngram, self.ngram_cjk):
            raise ConfigError(
                f"dedup.min_chars = {self.min_chars} with shingles of {self.ngram} and "
                f"{self.ngram_cjk} characters; expected at least a shingle: raise min_chars"
            )


DEFAULT_VOCAB_SIZE = 50_000


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig:
    """One evaluation set."""

    name: str = param(REQUIRED, "its name in reports")
    inputs: tuple[str, ...] = param(
        REQUIRED, "folders, globs and files, plain or .gz, .zst, .xz: .jsonl and .json (every "
        "string in it), .tsv and .csv (every cell), .txt (every line)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError(f"evaluation set {self.name!r}: inputs = []; expected its files")


@dataclass(frozen=True, kw_only=True)
class DecontaminateConfig:
    """Documents that share text with evaluation sets; off without sets."""

    sets: tuple[EvalSetConfig, ...] = param((), "what the model will be evaluated on")
    ngram: int = param(
        60, "letters and digits in a row that a document must share with an item: 13 English words",
        unit="characters", ge=8, le=1000,
    )  # fmt: skip
    ngram_cjk: int = param(
        20, "the same for n-grams that start with a Chinese, Japanese or Korean character",
        unit="characters", ge=4, le=1000,
    )  # fmt: skip
    min_chars: int = param(
        30, "an item too short for `min_hits` n-grams is looked for as a whole if it has this many "
        "letters and digits, else not at all", unit="characters", ge=4, le=1000,
    )  # fmt: skip
    min_chars_cjk: int = param(
        12, "the same for items in Chinese, Japanese or Korean: so many from such a letter on",
        unit="characters", ge=4, le=1000,
    )  # fmt: skip
    min_hits: int = param(
        1, "different n-grams of one set that a document must share", unit="n-grams", ge=1
    )
    max_documents: int | None = param(
        None, "n-grams that stand in more documents are ignored, since they are common phrases "
        "(GPT-3: 10); null: none is", unit="documents", ge=1,
    )  # fmt: skip
    action: Literal["drop", "report"] = param("drop", "what is done with documents that are found")

    def __post_init__(self) -> None:
        names = [chosen.name for chosen in self.sets]
        if len(set(names)) < len(names):
            raise ConfigError(f"decontaminate.sets = {names}: expected each with its own name")
        for least, most in (("min_chars", "ngram"), ("min_chars_cjk", "ngram_cjk")):
            if getattr(self, least) > getattr(self, most):
                raise ConfigError(
                    f"decontaminate.{least} = {getattr(self, least)} is longer than an n-gram, "
                    f"decontaminate.{most} = {getattr(self, most)}; expected at most as long"
                )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Sentencepiece training, or a tokenizer that is there already."""

    file: str | None = param(
        None, "take this instead of training: a sentencepiece model that `data_prep` trained, or a "
        "BERT model's vocab.txt or tokenizer.json; which of them it is, its content tells",
    )  # fmt: skip
    lowercase: bool | None = param(
        None, "with a vocab.txt: text is read in lower case; null: as tokenizer_config.json beside "
        "it says (do_lower_case), or else if the vocabulary has no capitals",
    )  # fmt: skip
    strip_accents: bool | None = param(
        None, "with a vocab.txt: accents are removed; null: as tokenizer_config.json beside it "
        "says, or else like lowercase",
    )  # fmt: skip
    split_chinese: bool | None = param(
        None, "with a vocab.txt: each Chinese character is a token; null: as "
        "tokenizer_config.json beside it says (tokenize_chinese_chars), or else true",
    )  # fmt: skip
    vocab_size: int | None = param(
        None, "pieces to train, with 5 special tokens and 256 bytes among them; null: "
        f"{DEFAULT_VOCAB_SIZE:,}", unit="tokens", ge=300,
    )  # fmt: skip
    model_type: Literal["unigram", "bpe"] = param("unigram", "sentencepiece algorithm")
    character_coverage: float = param(
        0.9995, "share of characters that get pieces; the rest falls back to bytes", ge=0.98, lt=1
    )
    sample_mb: int = param(
        1000, "text drawn for training, by hash of the documents' ids, split over the sources by "
        "weight times size; about 17 times as much memory",
        unit="MB", ge=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        of_training = ("vocab_size", "model_type", "character_coverage", "sample_mb")
        of_a_file = ("lowercase", "strip_accents", "split_chinese")
        out_of_place = of_a_file if self.file is None else of_training
        default = {field.name: field.default for field in dataclasses.fields(self)}
        for name in out_of_place:
            if getattr(self, name) != default[name]:
                raise ConfigError(
                    f"tokenizer.{name} = {getattr(self, name)} with tokenizer.file = {self.file}: "
                    + (f"{name} is for a vocab.txt; give it as tokenizer.file" if self.file is None
                       else "a given tokenizer is not trained")
                    + f", or leave tokenizer.{name} out"
                )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShardsConfig:
    """Blocks, shards and the held-out split."""

    block_tokens: int = param(1_000_000, "a block is closed before it grows beyond this",
                              unit="tokens", ge=1000)  # fmt: skip
    shard_mb: int = param(512, "approximate size of a training shard", unit="MB", ge=1, le=4096)
    eval_fraction: float = param(
        0.002, "share of documents held out, drawn by hash of their id", gt=0, lt=0.5
    )


@dataclass(frozen=True, kw_only=True)
class PrepConfig:
    """From text files to a dataset folder."""

    output_dir: str = param(REQUIRED, "dataset folder; intermediate files go to work/ in it")
    workers: int = param(0, "processes; 0 takes one a core", unit="processes", ge=0)
    piece_mb: int = param(
        64, "input files are grouped into pieces of about this size", unit="MB", ge=1
    )
    sources: tuple[SourceConfig, ...] = param(REQUIRED, "collections of text, at least one")
    clean: CleanConfig = section(CleanConfig, "normalisation, and limits on documents")
    filters: FiltersConfig = section(FiltersConfig, "rules on documents, and masking; all off")
    dedup: DedupConfig = section(DedupConfig, "removal of near duplicates, off")
    decontaminate: DecontaminateConfig = section(
        DecontaminateConfig, "removal of text of evaluation sets, off without sets"
    )
    tokenizer: TokenizerConfig = section(TokenizerConfig, "sentencepiece, or a given one")
    shards: ShardsConfig = section(ShardsConfig, "blocks, shards and the held-out split")

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"sources = {names}: expected at least one, each with its own name")
