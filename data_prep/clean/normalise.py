"""Unicode normalisation of a document.

NFKC (Unicode Standard Annex 15), control and invisible characters removed, runs of spaces and blank
lines shortened. The tokenizer applies NFKC by itself too; doing it first lets deduplication see
equal texts as equal. On request, remnants of HTML are removed and Traditional Chinese becomes
Simplified. Normalising a normalised text again does not change it.

Nearly every character of real text becomes one other character whatever stands beside it, so a
table does most of the work; `unicodedata` sees only the other places. That is eight times as fast
as `unicodedata.normalize` and regular expressions over the whole text.

OpenCC's dictionaries of phrases and characters simplify Chinese. Most text is converted by `t2s`,
which does not change Simplified text.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.config import CleanConfig

# C0 and C1 controls that are no white space, soft hyphen, zero-width space, direction marks, word
# joiner and its kin, byte-order mark, replacement character.
_REMOVED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufffd]"
)
# Written out, since the search for a fixed beginning is several times as fast as one for " {2,}".
_SPACES = re.compile("  +")
_NEWLINES = re.compile("\n\n\n+")
_NEWLINE_LIKE = "\n\r\x85\u2028\u2029"
_REMOVE, _LOOK_CLOSER = 0x110000, 0x110001
_CHUNK = 1 << 20
_DEFAULT = CleanConfig()
# Text of which so many Han characters change is Traditional, and converted by `tw2s`, which also
# knows Taiwan's 著 for 着; on Simplified text that would turn 原著 into 原着.
_TRADITIONAL_SHARE = 0.05
_MOST_ROUNDS = 10  # real texts never needed more than three


def normalise(text: str, clean: CleanConfig = _DEFAULT, cut: Counter[str] | None = None) -> str:
    """Return the text as it is deduplicated and tokenised; may be empty.

    `cut` counts the characters of HTML that are removed, by kind: see `html_text.strip`.
    """
    text = _plain(text, clean)
    if clean.html == "strip":
        from data_prep.clean.html_text import strip

        # Tags that were hidden in entities or full-width letters show up in the next round.
        while (stripped := strip(text, cut)) != text:
            text = _plain(stripped, clean)
    if clean.simplified:
        text = to_simplified(text)
    text = _SPACES.sub(" ", text).replace(" \n", "\n").replace("\n ", "\n")
    return _NEWLINES.sub("\n\n", text).strip()


def _plain(text: str, clean: CleanConfig) -> str:
    text = text.replace("\r\n", "\n")
    return "".join([_characters(chunk, nfkc=clean.nfkc) for chunk in _chunks(text)])


def _chunks(text: str) -> Iterator[str]:
    """Yield parts of bounded size that can be normalised one by one: they end at a newline."""
    start = 0
    while start < len(text):
        # Without a newline for a MB the chunk is longer; the last one ends with the text.
        end = text.find("\n", start + _CHUNK) + 1 or len(text)
        yield text[start:end]
        start = end


def _characters(text: str, *, nfkc: bool) -> str:
    """Normalise one part; every newline becomes \\n, every other blank a space."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    table = _table(nfkc=nfkc)
    mapped = table[codes]
    if not len(mapped) or mapped.max() < _REMOVE:
        return _decoded(mapped)
    stays = mapped != _REMOVE
    mapped, codes = mapped[stays], codes[stays]
    [closer] = np.nonzero(mapped == _LOOK_CLOSER)
    mapped[closer] = codes[closer]
    text = _decoded(mapped)
    if not len(closer):
        return text
    # A run of such characters may combine with the one before it, never with the one behind it.
    last = np.append(np.diff(closer) > 1, True)
    first = np.append(True, last[:-1])
    parts, done = [], 0
    for begin, end in zip((closer[first] - 1).tolist(), (closer[last] + 1).tolist(), strict=True):
        begin = max(0, begin)
        parts += [text[done:begin], unicodedata.normalize("NFKC", text[begin:end])]
        done = end
    return "".join([*parts, text[done:]])


def _decoded(codes: npt.NDArray[np.uint32]) -> str:
    return codes.astype("<u4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")


# 17 to 130 MB a CPU-second; tests compare it with the definition on all assigned characters.
@cache
def _table(*, nfkc: bool) -> npt.NDArray[np.uint32]:
    """Make the (0x110000,) table: code point -> its replacement in any context, or a mark.

    A character has such a replacement if NFKC makes it one character and nothing before it can
    combine with that: it is neither a combining mark nor the second half of a composition (Hangul
    vowels and final consonants are such halves by rule instead of by table). The characters that
    may combine with one before them are marked.
    """
    characters = [chr(code) for code in range(0x30000)]  # no rule of Unicode changes others
    table = np.arange(0x110000, dtype=np.uint32)
    if nfkc:
        _add_nfkc(table, characters)
    table[[ord(c) for c in characters if c.isspace()]] = ord(" ")
    table[[ord(c) for c in _NEWLINE_LIKE]] = ord("\n")
    table[[ord(c) for c in _REMOVED.findall("".join(characters[:0x10000]))]] = _REMOVE
    return table


def _add_nfkc(table: npt.NDArray[np.uint32], characters: list[str]) -> None:
    """Fill in the replacements of NFKC, as `_table` says."""
    changed = [c for c in characters if unicodedata.decomposition(c) or unicodedata.combining(c)]
    pairs = [unicodedata.decomposition(c).split() for c in changed]
    joins = {chr(int(pair[1], 16)) for pair in pairs if len(pair) == 2 and pair[0][0] != "<"}
    joins |= {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for character in (*changed, *joins):
        normal = unicodedata.normalize("NFKC", character)
        first = unicodedata.normalize("NFD", normal)[0]
        alone = len(normal) == 1 and not unicodedata.combining(first) and first not in joins
        table[ord(character)] = ord(normal) if alone else _LOOK_CLOSER


# OpenCC: 53 to 161 MB a CPU-second; zhconv 10, opencc-python-reimplemented 2.
def to_simplified(text: str) -> str:
    """Convert a text to Simplified Chinese; converting it again does not change it."""
    if text.isascii():
        return text
    # Phrases that only appear by a conversion are converted by the next.
    for _ in range(_MOST_ROUNDS):
        if (converted := _simplified_once(text)) == text:
            break
        text = converted
    return text


def _simplified_once(text: str) -> str:
    converted: str = _converter("t2s").convert(text)
    if converted == text or not _is_traditional(text, converted):
        return converted
    taiwanese: str = _converter("tw2s").convert(text)
    return taiwanese


@cache
def _converter(name: str) -> Any:
    import opencc  # few corpora need it

    return opencc.OpenCC(name)


def _is_traditional(text: str, converted: str) -> bool:
    if len(converted) != len(text):
        return False
    before, after = (np.frombuffer(t.encode("utf-32-le"), dtype="<u4") for t in (text, converted))
    han = np.count_nonzero((before >= 0x3400) & (before < 0xA000))
    return int(np.count_nonzero(before != after)) >= max(1.0, _TRADITIONAL_SHARE * han)
