"""Examples to rows of tokens, with the characters that each token covers, and back again.

Rows are [CLS] x [SEP], [CLS] a [SEP] b [SEP] and so on; segments are 0 everywhere, as the Chinese
encoders that this follows have no trained second segment (CLUE-bert4keras). Gold spans become
spans of tokens by offsets, never by looking for a token's text. What no tokens can express is
counted; scores take the gold of the file, so it counts as missed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.errors import ConfigError
from pipeline.tasks.readers import Example
from pipeline.tasks.scores import Span
from pipeline.tasks.task import InputConfig, TaskConfig

_OTHER_BLANK = "[MASK]" * 4  # an idiom has four characters
_MARKS = {"span1": ("_", "_"), "span2": ("[", "]")}  # as CLUE's own baseline marks WSC


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


class TokenSpan(NamedTuple):
    """A typed run of slots of a row; the end is exclusive."""

    type: str
    start: int
    end: int


@dataclass(frozen=True)
class TokenRow:
    """One input of the encoder."""

    example: int
    """Number of its example."""
    part: int
    """Index of the choice, or number of the window; 0 elsewhere."""
    ids: npt.NDArray[np.int32]
    """(n,)"""
    offsets: npt.NDArray[np.int32]
    """(n, 2) characters of the example's text that a slot covers, -1 for all other slots."""
    spans: tuple[TokenSpan, ...] = ()
    """Gold of tag and spans; of qa the answer, if this window holds it."""
    starts: tuple[int, int] = (0, 0)
    """qa: the slots, end exclusive, that no other window has with more context around them."""


class _Tokens(NamedTuple):
    ids: list[int]
    offsets: list[tuple[int, int]]

    def take(self, places: Sequence[int]) -> "_Tokens":
        return _Tokens([self.ids[i] for i in places], [self.offsets[i] for i in places])


def encode(
    config: TaskConfig, tokenizer: Codec, examples: Sequence[Example]
) -> tuple[list[TokenRow], dict[str, int]]:
    """Return the rows of all examples in order, and counts of what was cut or cannot be expressed.

    Raises:
        ConfigError: the windows of qa have no room, or leave out parts of a passage.
    """
    encoder = _Encoder(config, tokenizer, Counter())
    rows = [row for number, example in enumerate(examples) for row in encoder.rows(number, example)]
    return rows, dict(+encoder.counts)


def text_spans(row: TokenRow, spans: Sequence[TokenSpan]) -> list[Span]:
    """Return spans of slots as spans of characters; slots outside the text have none."""
    places = [(kind, row.offsets[start], row.offsets[end - 1]) for kind, start, end in spans]
    return [
        Span(kind, int(first[0]), int(last[1]))
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


@dataclass(frozen=True)
class _Encoder:
    config: TaskConfig
    tokenizer: Codec
    counts: Counter[str]

    def rows(self, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield an example's rows; a choice with the text of an earlier one has none."""
        kind = self.config.task.kind
        if kind == "qa":
            yield from self._windows(number, example)
        elif kind in ("choice", "cloze"):
            for part, choice in enumerate(example.choices):
                if not example.distinct[part]:
                    continue
                if kind == "cloze":
                    yield self._cloze(number, part, example, choice)
                else:
                    texts = [example.text, example.text_b, choice]
                    yield self._row(number, part, [self._plain(each) for each in texts if each])
        elif kind == "coref":
            yield self._coref(number, example)
        elif kind in ("tag", "spans"):
            row = self._row(number, 0, [self._located(example.text)])
            yield self._with_entities(row, example)
        else:
            texts = [example.text, example.text_b] if example.text_b else [example.text]
            yield self._row(number, 0, [self._plain(each) for each in texts])

    def _plain(self, text: str) -> _Tokens:
        ids = self.tokenizer.encode(text)
        return _Tokens(ids, [(-1, -1)] * len(ids))

    def _located(self, text: str) -> _Tokens:
        """Encode a text; offsets are without the space that a token may begin or end with."""
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        return _Tokens(ids, [_without_space(text, start, end) for start, end in offsets])

    def _row(self, number: int, part: int, texts: Sequence[_Tokens]) -> TokenRow:
        room = self.config.input.max_length - 1 - len(texts)
        lengths = _lengths([len(each.ids) for each in texts], room)
        self.counts["rows that were cut"] += sum(lengths) < sum(len(each.ids) for each in texts)
        return self._joined(number, part, [
            each.take(_kept(len(each.ids), limit, self.config.input))
            for each, limit in zip(texts, lengths, strict=True)
        ])  # fmt: skip

    def _joined(self, number: int, part: int, texts: Sequence[_Tokens]) -> TokenRow:
        ids, offsets = [self.tokenizer.cls_id], [(-1, -1)]
        for each in texts:
            ids += [*each.ids, self.tokenizer.sep_id]
            offsets += [*each.offsets, (-1, -1)]
        places = np.array(offsets, dtype=np.int32).reshape(-1, 2)
        return TokenRow(number, part, np.array(ids, dtype=np.int32), places)

    def _cloze(self, number: int, part: int, example: Example, choice: str) -> TokenRow:
        """Put a candidate into its blank between separators, in the middle of its window.

        As RoFormerV2's clue/chid.py does; other blanks are masks.
        """
        (_, start, end), *others = example.marks
        left, right = (
            self.tokenizer.encode_with_masks(_masked(example.text, others, *bounds))
            for bounds in ((0, start), (end, len(example.text)))
        )
        most = self.config.input.max_length - 4
        candidate = self._plain(choice)
        candidate = candidate.take(range(min(len(candidate.ids), most)))
        room = most - len(candidate.ids)
        before = min(len(left), max(room // 2, room - len(right)))
        sides = left[len(left) - before :], right[: room - before]
        self.counts["rows that were cut"] += len(sides[0]) + len(sides[1]) < len(left) + len(right)
        one, other = (_Tokens(side, [(-1, -1)] * len(side)) for side in sides)
        return self._joined(number, part, [one, candidate, other])

    def _coref(self, number: int, example: Example) -> TokenRow:
        text, places = _marked(example)
        row = self._row(number, 0, [self._located(text)])
        kept = [bool(np.any((row.offsets[:, 0] <= at) & (at < row.offsets[:, 1]))) for at in places]
        self.counts["marked spans behind the cut"] += not all(kept)
        return replace(row, offsets=np.full_like(row.offsets, -1))  # they were of the marked text

    def _with_entities(self, row: TokenRow, example: Example) -> TokenRow:
        spans = []
        gold = example.gold if isinstance(example.gold, tuple) else ()
        for item in gold:
            assert isinstance(item, Span)
            exact = _slots(row, example.text, item.start, item.end, exact=True)
            if exact is not None:
                spans.append(TokenSpan(item.type, *exact))
            elif _slots(row, example.text, item.start, item.end, exact=False) is None:
                self.counts["entities behind the cut"] += 1
            else:
                self.counts["entities that begin or end inside a token"] += 1
        if self.config.task.kind == "tag":
            flat = _flat(spans)
            self.counts["entities inside others, which tags cannot hold"] += len(spans) - len(flat)
            spans = flat
        return replace(row, spans=tuple(spans))

    def _windows(self, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield [CLS] question [SEP] window [SEP]; every token of the passage is in some window."""
        config = self.config.input
        question = self._plain(example.text_b)
        self.counts["questions that were cut"] += len(question.ids) > config.max_question
        question = question.take(range(min(len(question.ids), config.max_question)))
        passage = self._located(example.text)
        room = config.max_length - 3 - len(question.ids)
        if len(passage.ids) > room and config.stride > room:
            raise ConfigError(
                f"{example.where}: windows have room for {room} tokens of the passage and start "
                f"every input.stride={config.stride}: parts of it would be left out; lower "
                "input.stride or input.max_question, or raise input.max_length"
            )
        answers = [
            (item.start, item.start + len(item.text.strip()))
            for item in (example.gold if isinstance(example.gold, tuple) else ())
            if not isinstance(item, (str, Span)) and item.start is not None
        ]
        held = 0
        # Slots of the passage begin behind [CLS] question [SEP].
        first = len(question.ids) + 2
        for part, (start, end, *best) in enumerate(_windows(len(passage.ids), room, config.stride)):
            row = self._joined(number, part, [question, passage.take(range(start, end))])
            places = (_slots(row, example.text, *each, exact=False) for each in answers)
            slots = next((each for each in places if each is not None), None)
            spans = () if slots is None else (TokenSpan("answer", *slots),)
            held = max(held, slots[1] - slots[0] if slots else 0)
            starts = first + best[0] - start, first + best[1] - start
            yield replace(row, spans=spans, starts=starts)
        self.counts["answers that no window holds"] += bool(answers) and not held
        self.counts["answers longer than head.max_answer"] += held > self.config.head.max_answer


def _windows(length: int, room: int, stride: int) -> list[tuple[int, int, int, int]]:
    """Return each window's tokens, and those of which it has the most context; ends are exclusive.

    The context of a token is what stands on its smaller side, and a hundredth of the window; of
    equal windows the first has it. Source: google-research/bert `run_squad.py`.
    """
    starts = range(0, max(1, length - room + stride), stride)
    owner, most = np.full(length, -1), np.full(length, -1.0)
    for number, start in enumerate(starts):
        size = min(room, length - start)
        right = np.arange(size)[::-1]
        context = np.minimum(np.arange(size), right) + 0.01 * size
        part = slice(start, start + size)
        owner[part][context > most[part]] = number
        most[part] = np.maximum(most[part], context)
    bounds = np.searchsorted(owner, np.arange(len(starts) + 1)).tolist()
    return [
        (start, min(start + room, length), bounds[number], bounds[number + 1])
        for number, start in enumerate(starts)
    ]


def _without_space(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    if not part.strip():
        return start, end
    return start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())


def _slots(
    row: TokenRow, text: str, start: int, end: int, *, exact: bool
) -> tuple[int, int] | None:
    """Find the slots [first, last + 1) that cover characters; None if the row lacks them.

    `exact`: that cover no others.
    """
    start, end = _without_space(text, start, end)
    inside = np.flatnonzero((row.offsets[:, 0] < end) & (row.offsets[:, 1] > start))
    if not len(inside):
        return None
    first, last = row.offsets[inside[0], 0], row.offsets[inside[-1], 1]
    covers = (first, last) == (start, end) if exact else first <= start and end <= last
    return (int(inside[0]), int(inside[-1]) + 1) if covers else None


def _flat(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Keep the longest of spans that overlap."""
    kept: list[TokenSpan] = []
    for span in sorted(spans, key=lambda span: (span.start - span.end, span.start)):
        if all(span.end <= each.start or each.end <= span.start for each in kept):
            kept.append(span)
    return sorted(kept, key=lambda span: span.start)


def _marked(example: Example) -> tuple[str, list[int]]:
    """Write the marks of coref around their spans; also return where the signs are."""
    signs = []
    for name, start, end in example.marks:
        before, behind = _MARKS[name]
        # At one place what closes comes first, then what opens; the longer span lies outside.
        signs += [(end, 0, end - start, behind), (start, 1, start - end, before)]
    text, places = example.text, []
    for number, (place, _, _, sign) in enumerate(sorted(signs)):
        places.append(place + number)
        text = text[: places[-1]] + sign + text[places[-1] :]
    return text, places


def _masked(text: str, blanks: Sequence[Span], start: int, end: int) -> str:
    """Return text[start:end] with masks in place of the blanks in it."""
    parts, place = [], start
    for _, first, last in sorted(blanks, key=lambda blank: blank.start):
        if start <= first and last <= end:
            parts += [text[place:first], _OTHER_BLANK]
            place = last
    return "".join([*parts, text[place:end]])
