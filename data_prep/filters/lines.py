"""Rules about the lines and paragraphs of a text."""

import re
from collections.abc import Sequence
from operator import itemgetter

from data_prep.filters.config import C4Config
from data_prep.filters.text import Measured

_BULLETS = frozenset("-*–•‣◦●○■□▪▫◆◇▶►·∙")
_ELLIPSES = ("...", "…", "。。。")
# C4's terminal punctuation and closing quotation mark, and the Chinese ones.
_LINE_ENDS = (".", "!", "?", '"', "”", "。", "！", "？", "…", "」", "』")
_JAVASCRIPT = "javascript"
_PARAGRAPH = re.compile("\n\n+")


class Lines:
    """Lines of a text, without spaces around them; empty ones do not count."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = list(filter(None, map(str.strip, text.split("\n"))))

    def bullets(self) -> float:
        """Share of lines that start with a bullet."""
        firsts = map(itemgetter(0), self._lines)
        return sum(map(_BULLETS.__contains__, firsts)) / (len(self._lines) or 1)

    def ellipses(self) -> float:
        """Share of lines that end with an ellipsis."""
        return sum(line.endswith(_ELLIPSES) for line in self._lines) / (len(self._lines) or 1)

    def duplicate_lines(self) -> tuple[float, float]:
        """Share of lines that equal an earlier one, and of the characters of lines in them."""
        return _duplicates(self._lines)

    def duplicate_paragraphs(self) -> tuple[float, float]:
        """The same of paragraphs, which an empty line ends."""
        parts = map(str.strip, _PARAGRAPH.split(self._text))
        return _duplicates(list(filter(None, parts)))


class LineRules:
    """C4's rules that drop lines."""

    def __init__(self, config: C4Config) -> None:
        self._config = config

    def apply(self, text: str, lower: str) -> str:
        """The text without the lines that a rule drops; the same object if there are none.

        Args:
            text: a document.
            lower: the same in lower case.
        """
        config = self._config
        javascript = config.javascript_lines and _JAVASCRIPT in lower
        if not (javascript or config.terminal_punctuation or config.min_line_words):
            return text
        lines = text.split("\n")
        kept = [line for line in lines if not line.strip() or self._keeps(line)]
        if len(kept) == len(lines):
            return text
        # A dropped line may have stood between two empty ones.
        return re.sub("\n\n\n+", "\n\n", "\n".join(kept)).strip()

    def _keeps(self, line: str) -> bool:
        config = self._config
        if config.javascript_lines and _JAVASCRIPT in line.lower():
            return False
        if config.terminal_punctuation and not line.rstrip().endswith(_LINE_ENDS):
            return False
        least = config.min_line_words
        return not least or Measured(line).num_units >= least


def _duplicates(parts: Sequence[str]) -> tuple[float, float]:
    unique = set(parts)
    if len(unique) == len(parts):
        return 0.0, 0.0
    chars = sum(map(len, parts))
    repeated = chars - sum(map(len, unique))
    return (len(parts) - len(unique)) / len(parts), repeated / chars
