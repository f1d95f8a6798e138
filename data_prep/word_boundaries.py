"""Starts of words: by the tokenizer's spaces and punctuation, in Chinese by jieba's words.

A user's dictionary can add words to jieba's own, which cuts terms of medicine and the like.
Whole-word masking needs them; they are computed once, here, on the normalised text that the tokens
spell, and stored as one bit per token. In data_prep only this module imports rjieba (jieba's
algorithm and dictionary in Rust: a prefix dictionary, the most likely path, and an HMM for unknown
words).
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import rjieba

from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig
from pipeline.errors import DataError
from pipeline.tokenizer.sentencepiece import Spelling

# CJK unified ideographs, extension A, compatibility ideographs, and the supplementary planes.
HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
# jieba looks for words inside runs of Chinese characters and these; some of its words have both,
# such as T恤.
_JOINED = "a-zA-Z0-9+#&._%-"
_BETWEEN = re.compile(f"[^{''.join(f'{chr(a)}-{chr(b)}' for a, b in HAN)}{_JOINED}]")
_IS_JOINED, _IS_HAN = 1, 2
# Stages take turns by the megabyte, not by the document: sentencepiece took 2.77 s between other
# work, 2.48 s in batches, 2.19 s alone.
_CHUNK = 1 << 20

Tokens = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Words:
    """Words that a user's dictionary adds, with their frequencies, and the hash of both."""

    entries: tuple[tuple[str, int | None], ...] = field(default=(), compare=False, repr=False)
    sha256: str = ""


JIEBA = Words()
"""No words but jieba's own."""


def read_words(path: Path, clean: CleanConfig) -> Words:
    """Read a dictionary: a word a line, its frequency behind it if that is known.

    Words are normalised as texts are. Empty lines, and those that begin with #, are left out.

    Raises:
        DataError: the file cannot be read, or a line is no word that can be found in Chinese text.
    """
    entries: dict[str, int | None] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"words.dictionary = {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        word, *rest = normalise(line, clean).split(" ")
        has_han = any(first <= ord(c) <= last for c in word for first, last in HAN)
        # 18 digits, since jieba counts in 64 bits; it never finds a word of frequency 0.
        is_frequency = len(rest) == 1 and rest[0].isdecimal() and len(rest[0]) < 19
        is_counted = rest == [] or (is_frequency and int(rest[0]) > 0)
        if not has_han or _BETWEEN.search(word) or not is_counted:
            raise DataError(
                f"words.dictionary = {path}, line {number}: {line.strip()!r}; expected a word of "
                "Chinese characters, which may have letters, digits and +#&._%- in it, and at most "
                "its frequency, a number above 0 of at most 18 digits, behind a space"
            )
        entries[word] = int(rest[0]) if rest else None
    content = json.dumps(list(entries.items()), ensure_ascii=False)
    return Words(tuple(entries.items()), hashlib.sha256(content.encode()).hexdigest())


@cache
def _cutter(words: Words) -> Callable[[str], list[str]]:
    if not words.entries:
        return rjieba.cut  # type: ignore[no-any-return]
    jieba = rjieba.Jieba()
    for word, frequency in words.entries:
        jieba.add_word(word, frequency, None)
    return jieba.cut  # type: ignore[no-any-return]


def word_starts(spelling: Spelling, ids: Tokens, words: Words = JIEBA) -> npt.NDArray[np.bool_]:
    """Whether each token of a whole document starts a word; (n,) bool.

    A token that starts with a Chinese character starts a word where one of jieba's words starts;
    `Tokenizer.word_starts` decides about all other tokens. A token that starts inside a word and
    reaches into the next belongs to the first. `spelling` is the tokenizer, or its spelling of the
    document.
    """
    return word_starts_of([(spelling, ids)], words)


def word_starts_of(
    documents: Sequence[tuple[Spelling, Tokens]], words: Words = JIEBA
) -> npt.NDArray[np.bool_]:
    """Compute `word_starts` of several documents at once.

    Many at once are faster: tokenizer and jieba both have tables of megabytes, which push each
    other out of the processor's cache if they take turns from document to document.
    """
    starts = np.concatenate([spelling.word_starts(ids) for spelling, ids in documents])
    surfaces = [spelling.surface(ids) for spelling, ids in documents]
    # The newline, for which jieba joins nothing, also stands behind the last document.
    han, begins = _chinese("".join([f"{text}\n" for text, _ in surfaces]), _cutter(words))
    if han.any():
        places = np.cumsum([0] + [len(text) + 1 for text, _ in surfaces])
        offsets = np.concatenate([own + places[i] for i, (_, own) in enumerate(surfaces)])
        continues = np.concatenate([spelling.continues(ids) for spelling, ids in documents])
        chinese = han[offsets] & ~continues
        starts[chinese] = begins[offsets[chinese]]
    return starts


def _chinese(
    text: str, cut: Callable[[str], list[str]]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return (len(text),) bool twice: Chinese characters, and those that begin a word of `cut`.

    The second is only meaningful where the first is true.
    """
    han, begins = (np.zeros(len(text), dtype=bool) for _ in range(2))
    start = 0
    while start < len(text):
        gap = _BETWEEN.search(text, start + _CHUNK)
        end = gap.end() if gap else len(text)
        codes = np.frombuffer(text[start:end].encode("utf-32-le"), dtype="<u4")
        kinds = _KINDS.take(codes)
        np.equal(kinds, _IS_HAN, out=han[start:end])
        if han[start:end].any():
            places = _places(kinds)
            # jieba looks at one such run at a time, so giving it only runs with Chinese changes no
            # bit (0 of 27.5 million). A cache of unique runs (-12% before its own cost) and jieba
            # without its HMM (no faster) were tried.
            words = cut(codes[places].tobytes().decode("utf-32-le"))
            lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
            begins[start + places[np.cumsum(lengths) - lengths]] = True
        start = end
    return han, begins


def _places(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Return the places of the text that jieba's words in Chinese depend on.

    These are the runs of `_IS_JOINED` and `_IS_HAN` that have a Chinese character, each with the
    character behind it, which separates it from the next run: jieba itself looks at one run at a
    time. There must be at least one such run.
    """
    inside = np.zeros(len(kinds) + 2, dtype=bool)
    np.not_equal(kinds, 0, out=inside[1:-1])
    [bounds] = np.nonzero(inside[1:] != inside[:-1])
    first, end = bounds[::2], bounds[1::2]
    chosen = np.maximum.reduceat(kinds, first) == _IS_HAN
    first, length = first[chosen], (end + 1 - first)[chosen]
    places = np.repeat(first - (np.cumsum(length) - length), length)
    places += np.arange(len(places))
    return places if places[-1] < len(kinds) else places[:-1]


def _kinds() -> npt.NDArray[np.uint8]:
    """Make the (0x110000,) table: code point -> Chinese, joined to Chinese by jieba, or 0."""
    kinds = np.zeros(0x110000, dtype=np.uint8)
    for character in filter(re.compile(f"[{_JOINED}]").match, map(chr, range(128))):
        kinds[ord(character)] = _IS_JOINED
    for first, last in HAN:
        kinds[first : last + 1] = _IS_HAN
    return kinds


_KINDS = _kinds()
