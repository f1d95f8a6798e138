"""Unicode normalisation of a document.

NFKC (Unicode Standard Annex 15), control and invisible characters removed, runs of spaces and blank
lines shortened. The tokenizer applies NFKC by itself too; doing it first lets deduplication see
equal texts as equal. On request remnants of HTML are removed and Traditional Chinese becomes
Simplified. What is normalised once stays as it is when it is normalised again.
"""

import re
import unicodedata

from data_prep.config import CleanConfig

# C0 and C1 controls but tab and newline, soft hyphen, zero-width space, direction marks, word
# joiner and its kin, byte-order mark, replacement character.
_REMOVED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufffd]"
)
_NEWLINES = re.compile("\r\n?|[\x85\u2028\u2029]")
_SPACES = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r" ?\n ?(?:\n ?)+")
_DEFAULT = CleanConfig()


def normalise(text: str, clean: CleanConfig = _DEFAULT) -> str:
    """Returns the text as it is deduplicated and tokenised; may be empty."""
    text = _plain(text, clean)
    if clean.html == "strip":
        from data_prep.html_text import strip

        # What was hidden in entities or full-width letters shows up in the next round.
        while (stripped := strip(text)) != text:
            text = _plain(stripped, clean)
    if clean.simplified:
        from data_prep.simplified import to_simplified

        text = to_simplified(text)
    text = _SPACES.sub(" ", text)
    text = _BLANK_LINES.sub("\n\n", text)
    return text.replace(" \n", "\n").replace("\n ", "\n").strip()


def _plain(text: str, clean: CleanConfig) -> str:
    text = _REMOVED.sub("", _NEWLINES.sub("\n", text))
    return unicodedata.normalize("NFKC", text) if clean.nfkc else text
