"""All settings of data preparation; `PrepConfig` is the root.

Filter rules are off until their group is `enabled`; null switches off a single rule of a group.
Their defaults are the papers' values where there is a paper (see `data_prep.filters.rules`); other
defaults say that they are our own.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.errors import ConfigError
from pipeline.runtime.remote import is_address

Encoding = Literal[
    "utf-8", "gb18030", "big5", "shift_jis", "euc-jp", "windows-1252", "utf-16-le", "utf-16-be"
]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One named collection of text."""

    name: str = param(REQUIRED, "name of the source, part of every document id")
    kind: Literal["files", "embedded"] = param(
        "files", "text files, or the documentation that is installed with Python (embedded)"
    )
    inputs: tuple[str, ...] = path_param(
        (),
        "folders, globs and files, also in stores (s3://bucket/folder), plain or .gz, .zst, .xz, "
        ".bz2: .txt, .jsonl, .json (an object a line, or an array of objects), .csv, .tsv, .wet, "
        ".warc, .parquet, wiki_NN; of embedded: patterns of names, such as stdlib/*, or packages, "
        "such as numpy==2.4.6, none for all",
    )
    format: Literal[
        "auto", "txt", "md", "jsonl", "json", "csv", "tsv", "parquet", "wet", "wikiextractor"
    ] = param(
        "auto",
        "format of the files; auto goes by the suffix, wiki_NN is WikiExtractor's output; an .md "
        "file is a document; README.md in a folder is read only if md is asked for",
    )
    encoding: Literal["auto", Encoding] = param(
        "utf-8",
        "encoding of txt, jsonl, csv, tsv and wikiextractor files; auto finds each file's own by "
        "what its bytes would mean; lines that are not valid in it are rejected and counted",
    )
    txt_documents: Literal["blank_line", "line", "file"] = param(
        "blank_line",
        "end of a document in .txt files: a blank line, every line, or the end of the file",
    )
    text_field: str | tuple[str, ...] = param(
        "text",
        "key of the text in JSON, column in tables, or a list of such, whose texts are joined by "
        "line breaks; a.b is b of the object, or of each object of the list, in a; texts of a list "
        "are joined too",
    )
    weight: float = param(1.0, "share in training, relative to the source's size", gt=0)
    id_field: str = param(
        "id", "key or column of the document's id; without it, ids are file@OFFSET in bytes"
    )
    metadata: tuple[str, ...] = param(
        (),
        "keys or columns, such as url, date and licence, that go with a document to the files of "
        "rejected ones, `prep show`, the datasheet and `prep export`; WET has url, date and "
        "language, WikiExtractor url and title",
    )

    on_unreadable: Literal["stop", "skip"] = param(
        "stop",
        "what to do about files, folders and links in an input folder that cannot be read: stop, "
        "or leave them out, listed in the log and counted in the report",
    )
    max_lost_share: float = param(
        0.1,
        "a run stops if a larger share of the source's rows, or of its bytes, cannot be read: not "
        "valid, in another encoding, or without text",
        ge=0,
        le=1,
    )
    near_threshold: float | None = param(
        None,
        "similarity from which on a document of this source is dropped, in place of "
        "dedup.threshold: higher where different documents share a form, such as letters, licences "
        "and reports",
        gt=0,
        le=1,
    )
    reader: str = param(
        "",
        "own reader, MODULE:FUNCTION beside the config or in sys.path: is given a file's path and "
        "yields texts, or (id, text), or (id, text, metadata); format, encoding and fields do not "
        "count then",
    )
    clean: "CleanConfig | None" = param(
        None,
        "settings of `clean` for this source in place of the top level's, such as {html: strip}; "
        "null: the top level's",
    )
    filters: "FiltersConfig | tuple[FiltersConfig, ...] | None" = param(
        None,
        "rules for this source in place of the top level's: `{from: technical}` (presets: web, "
        "technical, legal, verse), rules, or a list of such that apply in order; null: the top "
        "level's",
    )

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Names of the fields whose texts are joined."""
        return (self.text_field,) if isinstance(self.text_field, str) else self.text_field

    # What says how often text is used, which files there are and what is dropped later is left out.
    def of_texts(self) -> dict[str, Any]:
        """Return the settings that the texts of the source depend on, but rules and own code."""
        settings = dataclasses.asdict(self)
        sampling = ("weight", "on_unreadable", "max_lost_share", "near_threshold")
        for name in (*sampling, "reader", "clean", "filters"):
            del settings[name]
        return settings

    def __post_init__(self) -> None:
        if not self.text_fields:
            raise ConfigError(f"source {self.name!r}: text_field = []; expected names of fields")
        if self.kind == "files" and not self.inputs:
            raise ConfigError(f"source {self.name!r}: kind=files with inputs=[]; files need inputs")
        taken = sorted({"id", "source", "split", "text"} & set(self.metadata))
        if taken or len(set(self.metadata)) < len(self.metadata):
            raise ConfigError(
                f"source {self.name!r}: metadata = {list(self.metadata)}; expected different "
                "names, none of them id, source, split or text, which every document has"
            )
        if self.reader and (self.kind != "files" or self.format != "auto"):
            raise ConfigError(
                f"source {self.name!r}: reader={self.reader!r} with kind={self.kind} and "
                f"format={self.format}; an own reader takes files of any format: leave these out"
            )


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """Normalisation of text, and limits on documents."""

    nfkc: bool = param(
        True, "Unicode normalisation form KC: full-width letters and ligatures become plain ones"
    )
    simplified: bool = param(
        False, "Traditional Chinese becomes Simplified, by OpenCC's phrases and characters"
    )
    html: Literal["keep", "strip"] = param(
        "keep",
        "remnants of HTML: strip decodes entities and removes tags, comments, scripts and "
        "styles, and counts them; code in Markdown, and text that names or only looks like a tag, "
        "stays (rules: data_prep/clean/html_text.py)",
    )
    newline: Literal["space", "token"] = param(
        "space",
        "line breaks in a document: a space to the tokenizer, or a token of their own, for verse "
        "and code; files in work/ have them either way",
    )
    min_chars: int = param(
        1, "shorter documents are rejected, after normalisation", unit="characters", ge=1
    )
    # Read whole and then split or rejected: a reader that splits would have to know each format's
    # text before it has parsed it. Never dropped in silence.
    max_document_mb: int = param(
        64,
        "longest document (about 25 times as much memory is needed for it)",
        unit="MB",
        ge=1,
        le=4096,
    )
    on_long_document: Literal["stop", "split", "reject"] = param(
        "stop",
        "what to do about a longer one: stop the run, split it at the end of a line or else at a "
        "space into documents ID, ID#2, ID#3 and so on, or reject it",
    )

    # A new setting with its old default is left out, so that no finished task is repeated.
    def of_texts(self) -> dict[str, Any]:
        """Return the settings that cleaned texts depend on; lines are the tokenizer's matter."""
        settings = dataclasses.asdict(self)
        del settings["newline"]
        return settings


def _share(default: float | None, meaning: str) -> Any:
    """Declare a rule that is a share of the text."""
    return param(default, f"{meaning}; null: off", ge=0, le=1)


def _count(default: int | None, meaning: str, unit: str = "words") -> Any:
    """Declare a rule that is a number."""
    return param(default, f"{meaning}; null: off", unit=unit, ge=0)


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Length and make-up of a document; the values are our own."""

    enabled: bool = param(False, "apply these rules")
    min_chars: int | None = _count(None, "shortest document", "characters")
    max_digit_share: float | None = _share(0.3, "digits among characters other than spaces")
    max_symbol_share: float | None = _share(
        0.4, "neither letters nor digits, among characters other than spaces"
    )


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """Scripts that a document may be written in; the share is our own."""

    enabled: bool = param(False, "apply this rule")
    languages: tuple[Literal["zh", "en"], ...] = param(
        ("zh", "en"), "zh expects Han letters, en Latin ones"
    )
    min_share: float = param(0.7, "letters of the expected scripts among all letters", ge=0, le=1)

    def __post_init__(self) -> None:
        if not self.languages:
            raise ConfigError("filters.script.languages = []: expected zh, en or both")


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """Gopher's quality rules."""

    enabled: bool = param(False, "apply these rules")
    min_words: int | None = _count(50, "fewest words; a Chinese character is one")
    max_words: int | None = _count(100_000, "most words; a Chinese character is one")
    min_mean_word_length: float | None = param(
        3.0, "shortest mean word, not in Chinese; null: off", unit="characters", ge=0
    )
    max_mean_word_length: float | None = param(
        10.0, "longest mean word, not in Chinese; null: off", unit="characters", ge=0
    )
    max_hash_ratio: float | None = _share(0.1, "hash signs a word")
    max_ellipsis_ratio: float | None = _share(0.1, "ellipses a word")
    max_bullet_lines: float | None = _share(0.9, "lines that start with a bullet")
    max_ellipsis_lines: float | None = _share(0.3, "lines that end with an ellipsis")
    min_lines: int | None = _count(
        3, "shorter documents pass these two rules on lines; our own", "lines"
    )
    min_alphabetic_words: float | None = _share(0.8, "words with a letter, not in Chinese")
    min_stop_words: int | None = _count(2, "different stop words in it")


@dataclass(frozen=True, kw_only=True)
class RepetitionConfig:
    """Gopher's repetition rules."""

    enabled: bool = param(False, "apply these rules")
    max_duplicate_lines: float | None = _share(0.30, "lines equal to an earlier one")
    max_duplicate_paragraphs: float | None = _share(0.30, "paragraphs equal to an earlier one")
    max_duplicate_line_chars: float | None = _share(0.20, "characters in duplicate lines")
    max_duplicate_paragraph_chars: float | None = _share(0.20, "characters in duplicate paragraphs")
    max_top_2gram: float | None = _share(0.20, "characters in the most frequent 2-gram")
    max_top_3gram: float | None = _share(0.18, "characters in the most frequent 3-gram")
    max_top_4gram: float | None = _share(0.16, "characters in the most frequent 4-gram")
    max_duplicate_5gram: float | None = _share(0.15, "characters in 5-grams seen earlier")
    max_duplicate_6gram: float | None = _share(0.14, "characters in 6-grams seen earlier")
    max_duplicate_7gram: float | None = _share(0.13, "characters in 7-grams seen earlier")
    max_duplicate_8gram: float | None = _share(0.12, "characters in 8-grams seen earlier")
    max_duplicate_9gram: float | None = _share(0.11, "characters in 9-grams seen earlier")
    max_duplicate_10gram: float | None = _share(0.10, "characters in 10-grams seen earlier")
    chinese_chars_per_word: int = param(
        2,
        "an n-gram of a Chinese document has n times as many characters",
        unit="characters",
        ge=1,
        le=4,
    )


@dataclass(frozen=True, kw_only=True)
class C4Config:
    """C4's rules. The first three drop lines, the others documents, as does 'lorem ipsum'."""

    enabled: bool = param(False, "apply these rules")
    terminal_punctuation: bool = param(False, "drop lines that do not end like a sentence")
    min_line_words: int | None = _count(None, "drop lines with fewer words (the paper: 5)")
    javascript_lines: bool = param(True, "drop lines with the word javascript")
    curly_bracket: bool = param(True, "reject documents with a '{'")
    min_sentences: int | None = _count(None, "fewest sentences (the paper: 3)", "sentences")


@dataclass(frozen=True, kw_only=True)
class BadWordsConfig:
    """Documents with words of a list are rejected."""

    enabled: bool = param(False, "apply this rule")
    file: str = path_param("", "UTF-8 file with a word or phrase a line; lines with # are comments")
    min_hits: int = param(1, "occurrences that reject a document", unit="words", ge=1)

    def __post_init__(self) -> None:
        if self.enabled and not self.file:
            raise ConfigError("filters.bad_words is enabled without a file; set its path")


MaskedKind = Literal["email", "phone", "chinese_id", "bank_card", "ipv4"]


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Personal data to replace, such as by <EMAIL>."""

    enabled: bool = param(False, "mask personal data")
    kinds: tuple[MaskedKind, ...] = param(
        get_args(MaskedKind),
        "what is replaced: e-mail addresses, <EMAIL>; Chinese mobile numbers and numbers with +, "
        "<PHONE>; 18-digit identity numbers with a right checksum, <ID>; 13 to 19 digits with a "
        "right Luhn checksum, <CARD>; public IPv4 addresses, <IP>",
    )

    def recorded(self) -> dict[str, bool]:
        """Return plain values as records have them, in which each kind was a switch."""
        kinds = {kind: kind in self.kinds for kind in get_args(MaskedKind)}
        return {"enabled": self.enabled, **kinds}


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Languages that a document may be written in, told apart by Lingua's models."""

    enabled: bool = param(False, "apply this rule; needs the package lingua-language-detector")
    languages: tuple[str, ...] = param(
        ("zh", "en"), "ISO 639-1 codes, of which the document has to be in one"
    )

    def __post_init__(self) -> None:
        if not self.languages:
            raise ConfigError("filters.language.languages = []: expected codes such as zh, en")


@dataclass(frozen=True, kw_only=True)
class FiltersConfig:
    """Rules that reject documents, and masking of personal data."""

    reads: Literal["text", "prose"] = param(
        "text",
        "prose: code fences, tables and lines without a letter count neither as repetition nor as "
        "bullets or short words (data_prep/filters/rules.py)",
    )
    shape: ShapeConfig = section(ShapeConfig, "length and make-up")
    script: ScriptConfig = section(ScriptConfig, "scripts of the expected languages")
    quality: QualityConfig = section(QualityConfig, "Gopher's quality rules")
    repetition: RepetitionConfig = section(RepetitionConfig, "Gopher's repetition rules")
    c4: C4Config = section(C4Config, "C4's rules")
    bad_words: BadWordsConfig = section(BadWordsConfig, "words that reject a document")
    language: LanguageConfig = section(LanguageConfig, "languages beyond scripts, by a library")
    python: str = param(
        "",
        "own rule, MODULE:FUNCTION beside the config or in sys.path: is given a document with id, "
        "source, text and metadata, and returns None or the reason to reject it",
    )
    mask: MaskConfig = section(MaskConfig, "personal data")


Filtering = FiltersConfig | tuple[FiltersConfig, ...]
"""Rules, or several sets of them, each of which a document has to pass, in order."""


def rule_sets(filters: Filtering) -> tuple[FiltersConfig, ...]:
    """Return the sets of rules in the order in which they apply."""
    return (filters,) if isinstance(filters, FiltersConfig) else filters


@dataclass(frozen=True, kw_only=True)
class DedupConfig:
    """Equal lines and near duplicates; equal documents are always dropped. The first stays."""

    lines: bool = param(
        False, "drop lines that stood earlier, in the same document or in one before it"
    )
    # From 20 on 4.5% of a real corpus repeats, nearly all notes of translators and licences; from
    # 12 on 5.2%, with `int main() {` and `\end{aligned}`.
    line_min_chars: int = param(20, "shorter lines always stay", unit="characters", ge=1)
    near_duplicates: bool = param(
        False, "drop documents that are similar to an earlier one that is kept (MinHash)"
    )
    threshold: float = param(
        0.33,
        "a document is dropped at this estimated Jaccard similarity of shingle sets: a copy "
        "with a tenth of its words changed has about 0.6, of its characters about 0.3 (English) "
        "to 0.5 (Chinese); two versions of a law or of a template have as much",
        gt=0,
        le=1,
    )
    ngram: int = param(
        6,
        "letters and digits of a shingle; twice as many from 150,000 of a document on, and both "
        "from 50,000 on",
        unit="characters",
        ge=2,
        le=32,
    )
    # Copies with a tenth of their words changed: recall 1.00; of their characters: Chinese 0.98,
    # mixed with English 0.97 (0.97 for both calculated for 100 million documents), English 0.70.
    # English would need shingles of 5, which unrelated documents share: 44 to 91 chance pairs a
    # document, recall below 0.9 at that size. Rows of a band are not independent: a product of
    # frequencies underestimates 25 to 70 times. 7 of 319,600 pairs of unrelated documents are
    # merged; those looked at are templates. 8 and 4 characters, 64 bands of 4 and 0.4 found 0.59,
    # 0.22 and 0.01. `python -m benchmarks.minhash CORPUS --others`
    ngram_cjk: int = param(
        3,
        "the same for shingles that start with a Chinese, Japanese or Korean character",
        unit="characters",
        ge=2,
        le=32,
    )
    bands: int = param(
        256,
        "groups of hashes; documents that agree in all rows of one band are compared, with "
        "probability 1 - (1 - similarity^rows)^bands: about half of those with similarity "
        "(0.7/bands)^(1/rows), which is 0.31 for 256 and 5",
        ge=1,
        le=1000,
    )
    rows: int = param(
        5,
        "hashes of a band; fewer find less similar documents, and let more unrelated ones of a "
        "large corpus meet",
        ge=1,
        le=64,
    )
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
    inputs: tuple[str, ...] = path_param(
        REQUIRED,
        "folders, globs and files, plain or .gz, .zst, .xz, .bz2: .jsonl and .json (every "
        "string in it), .tsv and .csv (every cell), .txt (every line)",
    )

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError(f"evaluation set {self.name!r}: inputs = []; expected its files")


@dataclass(frozen=True, kw_only=True)
class DecontaminateConfig:
    """Documents that share text with evaluation sets; off without sets."""

    sets: tuple[EvalSetConfig, ...] = param((), "texts on which the model will be evaluated")
    ngram: int = param(
        60,
        "letters and digits in a row that a document must share with an item: 13 English words",
        unit="characters",
        ge=8,
        le=1000,
    )
    ngram_cjk: int = param(
        20,
        "the same for n-grams that start with a Chinese, Japanese or Korean character, or to half "
        "consist of such",
        unit="characters",
        ge=4,
        le=1000,
    )
    min_chars: int = param(
        30,
        "an item too short for `min_hits` n-grams is looked for as a whole if it has this many "
        "letters and digits, else not at all",
        unit="characters",
        ge=4,
        le=1000,
    )
    # On 7,033 documents against nine Chinese and English sets 20 characters find 33, most of them
    # real quotations, and 13 find 457, mostly names of laws. 60 letters are about GPT-3's 13
    # English words. With a twentieth of the characters replaced 75% and 86% of items are found. 46
    # to 50 MB a CPU-second, English 31 (`benchmarks/decontaminate.py`).
    min_chars_cjk: int = param(
        12,
        "the same for items in Chinese, Japanese or Korean, counted from such a character on",
        unit="characters",
        ge=4,
        le=1000,
    )
    min_hits: int = param(
        1, "different n-grams of one set that a document must share", unit="n-grams", ge=1
    )
    # Common phrases (Brown et al. 2020, appendix C); it counts over all pieces, so one task
    # decides.
    max_documents: int | None = param(
        None,
        "n-grams that occur in more documents are ignored, since they are common phrases "
        "(GPT-3: 10); null: no n-gram is ignored",
        unit="documents",
        ge=1,
    )
    action: Literal["drop", "report"] = param("drop", "drop such documents, or only report them")

    def __post_init__(self) -> None:
        names = [chosen.name for chosen in self.sets]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"decontaminate.sets has names twice: {names}; give each set its own name"
            )
        for least, most in (("min_chars", "ngram"), ("min_chars_cjk", "ngram_cjk")):
            if getattr(self, least) > getattr(self, most):
                raise ConfigError(
                    f"decontaminate.{least} = {getattr(self, least)} is longer than an n-gram, "
                    f"decontaminate.{most} = {getattr(self, most)}; expected at most as long"
                )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Sentencepiece training, or an existing tokenizer."""

    file: str | None = path_param(
        None,
        "use this instead of training a tokenizer: a sentencepiece model that `data_prep` trained, "
        "a BERT model's vocab.txt or tokenizer.json, or the tokenizer.json of a byte-level BPE "
        "(RoBERTa, ModernBERT) or its vocab.json with merges.txt beside it; the kind is recognised "
        "by its content",
    )
    lowercase: bool | None = param(
        None,
        "with a vocab.txt: text is read in lower case; null: as tokenizer_config.json beside "
        "it says (do_lower_case), or else if the vocabulary has no capitals",
    )
    strip_accents: bool | None = param(
        None,
        "with a vocab.txt: accents are removed; null: as tokenizer_config.json beside it "
        "says, or else like lowercase",
    )
    split_chinese: bool | None = param(
        None,
        "with a vocab.txt: each Chinese character is a token; null: as "
        "tokenizer_config.json beside it says (tokenize_chinese_chars), or else true",
    )
    vocab_size: int | None = param(
        None,
        "pieces to train, with 5 special tokens and 256 bytes among them; null: "
        f"{DEFAULT_VOCAB_SIZE:,}",
        unit="tokens",
        ge=300,
    )
    model_type: Literal["unigram", "bpe"] = param("unigram", "sentencepiece algorithm")
    character_coverage: float = param(
        0.9995, "share of characters that get pieces; the rest falls back to bytes", ge=0.98, lt=1
    )
    sample_mb: int = param(
        1000,
        "text drawn for training, by hash of the documents' ids, split over the sources by "
        "weight times size; about 17 times as much memory",
        unit="MB",
        ge=1,
    )

    def __post_init__(self) -> None:
        of_training = ("vocab_size", "model_type", "character_coverage", "sample_mb")
        of_a_file = ("lowercase", "strip_accents", "split_chinese")
        out_of_place = of_a_file if self.file is None else of_training
        default = {field.name: field.default for field in dataclasses.fields(self)}
        remedy = (
            "only a vocab.txt has this option; give one as tokenizer.file"
            if self.file is None
            else "a given tokenizer is not trained"
        )
        for name in out_of_place:
            if getattr(self, name) != default[name]:
                raise ConfigError(
                    f"tokenizer.{name} = {getattr(self, name)} with tokenizer.file = {self.file}: "
                    f"{remedy}, or leave tokenizer.{name} out"
                )


@dataclass(frozen=True, kw_only=True)
class WordsConfig:
    """Words of Chinese text, which masking takes as a whole."""

    dictionary: str | None = path_param(
        None,
        "UTF-8 file of words that jieba's dictionary lacks, such as medical terms: one a line, "
        "with its frequency behind a space if that is known",
    )


@dataclass(frozen=True, kw_only=True)
class ShardsConfig:
    """Blocks, shards and the held-out split."""

    block_tokens: int = param(
        1_000_000, "a block is closed before it grows beyond this", unit="tokens", ge=1000
    )
    shard_mb: int = param(512, "approximate size of a training shard", unit="MB", ge=1, le=4096)
    eval_fraction: float = param(
        0.002, "share of documents held out, drawn by hash of their id", gt=0, lt=0.5
    )


@dataclass(frozen=True, kw_only=True)
class PrepConfig:
    """Settings of a preparation: text files to a dataset folder."""

    SHIPPED: ClassVar = ("prep",)

    output_dir: str = path_param(REQUIRED, "dataset folder; intermediate files go to work/ in it")
    workers: int = param(0, "processes; 0 takes one a core", unit="processes", ge=0)
    piece_mb: int | None = param(
        None,
        "input files are grouped into pieces of about this size; null: 64, and above 500 GB so "
        "much more that there are about 8,000 pieces at most",
        unit="MB",
        ge=1,
    )
    sources: tuple[SourceConfig, ...] = param(REQUIRED, "collections of text, at least one")
    clean: CleanConfig = section(CleanConfig, "normalisation, and limits on documents")
    filters: Filtering = section(
        FiltersConfig, "rules on documents, and masking, of sources without their own; all off"
    )
    dedup: DedupConfig = section(DedupConfig, "removal of near duplicates, off")
    decontaminate: DecontaminateConfig = section(
        DecontaminateConfig, "removal of text of evaluation sets, off without sets"
    )
    tokenizer: TokenizerConfig = section(TokenizerConfig, "sentencepiece, or a given one")
    words: WordsConfig = section(WordsConfig, "words of Chinese text, by jieba and own ones")
    shards: ShardsConfig = section(ShardsConfig, "blocks, shards and the held-out split")

    def __post_init__(self) -> None:
        if is_address(self.output_dir):
            raise ConfigError(
                f"output_dir={self.output_dir}: leases and renames need a folder of a file system; "
                "prepare into one, then send the finished dataset with `postnorm prep publish "
                f"FOLDER {self.output_dir}`"
            )
        names = [source.name for source in self.sources]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"sources = {names}: expected at least one, each with its own name")
        # The tokenizer is one of all; texts of evaluation sets are cleaned as the top level says.
        of_all = ["newline"] + ["nfkc", "simplified"] * bool(self.decontaminate.sets)
        for source in self.sources:
            for name in of_all:
                own, common = getattr(self.clean_of(source), name), getattr(self.clean, name)
                if own != common:
                    why = "the same for all sources"
                    if name != "newline":
                        why += " where texts of evaluation sets are searched for"
                    raise ConfigError(
                        f"source {source.name!r}: clean.{name} = {own}, and {common} at the top "
                        f"level; it is {why}"
                    )

    def clean_of(self, source: SourceConfig) -> CleanConfig:
        """Return how the texts of a source are cleaned."""
        return self.clean if source.clean is None else source.clean

    def near_threshold_of(self, source: SourceConfig) -> float:
        """Return the similarity from which on a document of a source is dropped."""
        own = source.near_threshold
        return self.dedup.threshold if own is None else own

    def filters_of(self, source: SourceConfig) -> tuple[FiltersConfig, ...]:
        """Return the sets of rules that the documents of a source have to pass, in order."""
        return rule_sets(self.filters if source.filters is None else source.filters)
