"""Rows of tokens: texts between special tokens, cut to fit, with the characters of each token.

Rows are [CLS] x [SEP], [CLS] a [SEP] b [SEP] and so on; segments are 0 everywhere, as the Chinese
encoders that this follows have no trained second segment (CLUE-bert4keras). Gold spans become
spans of tokens by offsets, never by looking for a token's text. What no tokens can express is
counted; scores take the gold of the file, so it counts as missed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.tasks.config import InputConfig
from pipeline.tasks.types import Example, Span, TokenRow, TokenSpan


class Codec(Protocol):
    """What is needed of a tokenizer."""

    cls_id: int
    sep_id: int

    def encode(self, text: str) -> list[int]:
        """Encode a text without specials."""

    def encode_with_masks(self, text: str) -> list[int]:
        """Encode a text in which [MASK] is a token."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text; also the characters that each token covers."""


class Tokens(NamedTuple):
    """Tokens of a text, and the characters that each covers; (-1, -1) where that is not asked."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def take(self, places: Sequence[int]) -> "Tokens":
        """Return the tokens at some places."""
        return Tokens([self.ids[i] for i in places], [self.offsets[i] for i in places])


@dataclass(frozen=True)
class RowWriter:
    """Writes the rows of examples, and counts what was cut or cannot be expressed."""

    input: InputConfig
    max_answer: int
    """Longest answer of qa that the head can give, in tokens."""
    tokenizer: Codec
    counts: Counter[str] = field(default_factory=Counter)

    def plain(self, text: str) -> Tokens:
        """Encode a text whose offsets are not asked."""
        ids = self.tokenizer.encode(text)
        return Tokens(ids, [(-1, -1)] * len(ids))

    def located(self, text: str) -> Tokens:
        """Encode a text; offsets are without the space that a token may begin or end with."""
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        return Tokens(ids, [without_space(text, start, end) for start, end in offsets])

    def row(self, number: int, part: int, texts: Sequence[Tokens]) -> TokenRow:
        """Cut texts so that all fit, and join them."""
        room = self.input.max_length - 1 - len(texts)
        lengths = _lengths([len(text.ids) for text in texts], room)
        self.counts["rows that were cut"] += sum(lengths) < sum(len(text.ids) for text in texts)
        kept = (
            text.take(_kept(len(text.ids), limit, self.input))
            for text, limit in zip(texts, lengths, strict=True)
        )
        return self.joined(number, part, list(kept))

    def joined(self, number: int, part: int, texts: Sequence[Tokens]) -> TokenRow:
        """Put a separator behind each text."""
        ids, offsets = [self.tokenizer.cls_id], [(-1, -1)]
        for text in texts:
            ids += [*text.ids, self.tokenizer.sep_id]
            offsets += [*text.offsets, (-1, -1)]
        places = np.array(offsets, dtype=np.int32).reshape(-1, 2)
        return TokenRow(number, part, np.array(ids, dtype=np.int32), places)


def text_spans(
    row: TokenRow, spans: Sequence[TokenSpan], words: Sequence[tuple[int, int]] = ()
) -> list[Span]:
    """Return spans of slots as spans of characters; slots outside the text have none.

    Of a text in words the first token of one stands for all of it.
    """
    ends = dict(words)
    places = [(kind, row.offsets[start], row.offsets[end - 1]) for kind, start, end in spans]
    return [
        Span(kind, int(first[0]), max(int(last[1]), ends.get(int(last[0]), 0)))
        for kind, first, last in places
        if 0 <= first[0] < last[1]
    ]


def _lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Shorten the longest part, of equal ones the last, by a token again and again until all fit.

    Of two texts as google-research/bert's `truncate_seq_pair`.
    """
    cut = list(lengths)
    while (excess := sum(cut) - room) > 0:
        # All at once that makes it no shorter than the second longest.
        longest = max(reversed(range(len(cut))), key=cut.__getitem__)
        second = max((n for i, n in enumerate(cut) if i != longest), default=0)
        cut[longest] -= min(excess, max(1, cut[longest] - second))
    return cut


def _kept(length: int, limit: int, config: InputConfig) -> Sequence[int]:
    """Return the places of the tokens that stay of a text cut to `limit`."""
    if length <= limit or config.truncate == "tail":
        return range(min(length, limit))
    head = int(limit * config.head_share) if config.truncate == "head_tail" else 0
    return [*range(head), *range(length - (limit - head), length)]


def without_space(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of a stretch without the white space at its ends."""
    part = text[start:end]
    if not part.strip():
        return start, end
    return start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())


def slots_of(
    row: TokenRow, text: str, start: int, end: int, *, exact: bool
) -> tuple[int, int] | None:
    """Find the slots [first, last + 1) that cover characters; None if the row lacks them.

    `exact`: that cover no others.
    """
    start, end = without_space(text, start, end)
    # Slots without characters, from -1 to -1, are never inside.
    inside = np.flatnonzero((row.offsets[:, 0] < end) & (row.offsets[:, 1] > start))
    if not len(inside):
        return None
    first, last = row.offsets[inside[0], 0], row.offsets[inside[-1], 1]
    covers = (first, last) == (start, end) if exact else first <= start and end <= last
    return (int(inside[0]), int(inside[-1]) + 1) if covers else None


def labelled(row: TokenRow, example: Example) -> npt.NDArray[np.int64]:
    """Return the slots of a row that a label may stand at.

    Those are the tokens of the text; where it is given in words, the first token of each word.
    """
    slots = np.flatnonzero(row.offsets[:, 0] >= 0)
    if not example.words:
        return slots
    firsts = {start for start, _ in example.words}
    return np.array([slot for slot in slots if int(row.offsets[slot, 0]) in firsts], np.int64)
