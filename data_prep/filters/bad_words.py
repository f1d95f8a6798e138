"""Finds words of a list in a text.

Measured on 60 MB with 400 English and 400 Chinese words: this 0.7 s, ahocorasick_rs 0.4 s without
word boundaries, pyahocorasick 0.6 s, one regular expression with boundaries 7 s. So a package for
this is not worth a dependency.
"""

import re
from pathlib import Path

from pipeline.errors import ConfigError

_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_LETTERS = "a-z0-9_\u00df-\u024f"
_TOKEN = re.compile(f"[{_LETTERS}]+")


def read_words(path: str) -> list[str]:
    """Read the words of a file, one a line, in lower case, without empty lines and # comments.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or holds no words.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").lower().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"filters.bad_words.file = {path!r} cannot be read: {error}") from error
    words = [" ".join(line.split()) for line in lines if not line.lstrip().startswith("#")]
    words = sorted({word for word in words if word})
    if not words:
        raise ConfigError(f"filters.bad_words.file = {path!r} holds no words; one a line expected")
    return words


class WordFinder:
    """Finds words with Chinese characters or kana anywhere, others between word boundaries."""

    def __init__(self, words: list[str]) -> None:
        grouped: dict[str, list[str]] = {}
        self._by_token: dict[str, list[re.Pattern[str]]] = {}
        for word in words:
            if _CJK.search(word):
                grouped.setdefault(word[0], []).append(re.escape(word[1:]))
                continue
            # Where the word occurs between boundaries, its first token is a token of the text.
            token = _TOKEN.search(word)
            bounded = rf"(?<![{_LETTERS}]){re.escape(word)}(?![{_LETTERS}])"
            self._by_token.setdefault(token[0] if token else "", []).append(re.compile(bounded))
        # Grouped by first character, the expression looks for a set of characters, which is fast.
        # The longer word first, so that it is taken where another one begins alike.
        branches = [
            f"{re.escape(first)}(?:{'|'.join(sorted(rests, key=len, reverse=True))})"
            for first, rests in grouped.items()
        ]
        self._chinese = re.compile("|".join(branches)) if branches else None

    def count(self, lower: str) -> int:
        """Count occurrences of the words in a text in lower case."""
        hits = len(self._chinese.findall(lower)) if self._chinese else 0
        if self._by_token:
            tokens = self._by_token.keys() & {"", *_TOKEN.findall(lower)}
            patterns = (pattern for token in tokens for pattern in self._by_token[token])
            hits += sum(len(pattern.findall(lower)) for pattern in patterns)
        return hits
