"""The section `filters` of the config: every rule of `data_prep.filters.rules`, all groups off.

A group is switched on by `enabled`; a single rule of it is switched off by null. Defaults are the
papers' values where there is a paper (see `data_prep.filters.rules`), else said to be our own.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config.schema import param, section
from pipeline.errors import ConfigError


def _share(default: float | None, meaning: str) -> Any:
    return param(default, f"{meaning}; null: off", ge=0, le=1)


def _count(default: int | None, meaning: str, unit: str = "words") -> Any:
    return param(default, f"{meaning}; null: off", unit=unit, ge=0)


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Length and make-up of a document; the values are our own."""

    enabled: bool = param(False, "apply these rules")
    min_chars: int | None = _count(None, "shortest document", "characters")
    max_chars: int | None = _count(None, "longest document", "characters")
    max_digit_share: float | None = _share(0.3, "digits among characters that are no space")
    max_symbol_share: float | None = _share(
        0.4, "neither letters, digits nor space, among characters that are no space"
    )


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """Which scripts a document is written in; the share is our own."""

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
        2, "an n-gram of a Chinese document has n times as many characters",
        unit="characters", ge=1, le=4,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class C4Config:
    """C4's rules. The first three drop lines, the others documents."""

    enabled: bool = param(False, "apply these rules")
    terminal_punctuation: bool = param(False, "drop lines that do not end like a sentence")
    min_line_words: int | None = _count(None, "drop lines with fewer words (the paper: 5)")
    javascript_lines: bool = param(True, "drop lines with the word javascript")
    lorem_ipsum: bool = param(True, "reject documents with 'lorem ipsum'")
    curly_bracket: bool = param(True, "reject documents with a '{'")
    min_sentences: int | None = _count(None, "fewest sentences (the paper: 3)", "sentences")


@dataclass(frozen=True, kw_only=True)
class BadWordsConfig:
    """Documents with words of a list are rejected."""

    enabled: bool = param(False, "apply this rule")
    file: str = param("", "UTF-8 file with a word or phrase a line; lines with # are comments")
    min_hits: int = param(1, "occurrences that reject a document", unit="words", ge=1)

    def __post_init__(self) -> None:
        if self.enabled and not self.file:
            raise ConfigError("filters.bad_words is enabled without a file; set its path")


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Personal data that is replaced, such as by <EMAIL>."""

    enabled: bool = param(False, "mask personal data")
    email: bool = param(True, "e-mail addresses: <EMAIL>")
    phone: bool = param(True, "Chinese mobile numbers and numbers with +: <PHONE>")
    chinese_id: bool = param(True, "18-digit identity numbers with a right checksum: <ID>")
    bank_card: bool = param(True, "13 to 19 digits with a right Luhn checksum: <CARD>")
    ipv4: bool = param(True, "public IPv4 addresses: <IP>")


@dataclass(frozen=True, kw_only=True)
class FiltersConfig:
    """Which documents go on, and what is masked in them."""

    shape: ShapeConfig = section(ShapeConfig, "length and make-up")
    script: ScriptConfig = section(ScriptConfig, "scripts of the expected languages")
    quality: QualityConfig = section(QualityConfig, "Gopher's quality rules")
    repetition: RepetitionConfig = section(RepetitionConfig, "Gopher's repetition rules")
    c4: C4Config = section(C4Config, "C4's rules")
    bad_words: BadWordsConfig = section(BadWordsConfig, "words that reject a document")
    mask: MaskConfig = section(MaskConfig, "personal data")
