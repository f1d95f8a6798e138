"""Pairs of packed pieces, written out in plain Python from the rules of `pipeline.data.pairs`."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.data.packing import Packing
from pipeline.data.pairs import PairRule
from pipeline.data.random import philox
from pipeline.data.reader import Block

ENDS, CLOSES = "。｡．！？；…‥.!?;", "”’\"'」』）)】》〉］]｝}»›"
Range = tuple[int, int]


@dataclass(frozen=True)
class Made:
    """A pair as lists of token places of the block."""

    first: list[int]
    second: list[int] | None
    label: int | None
    in_sentence: bool
    alone: bool


class ReferencePairs:
    """The pairs of one block."""

    def __init__(self, block: Block, pieces: Sequence[str], rule: PairRule) -> None:
        self.block, self.rule = block, rule
        ends = block.doc_ends.tolist()
        self.documents: list[Range] = list(zip([0, *ends], ends, strict=False))
        self.texts = [pieces[token] for token in block.tokens.tolist()]
        self.starts_word = block.word_starts(0, len(block.tokens)).tolist()

    def sentences(self, document: int) -> list[int]:
        """Where each sentence of a document starts."""
        start, stop = self.documents[document]
        return [at for at in range(start, stop) if at == start or self._starts(at, start)]

    def _starts(self, at: int, document_start: int) -> bool:
        if not self.starts_word[at] or self._ends(at) or self._closes(at):
            return False
        before = at - 1
        while before > document_start and self._closes(before):
            before -= 1
        return self._ends(before)

    def _ends(self, at: int) -> bool:
        marks = self.texts[at].lstrip(" ").rstrip(CLOSES)
        return bool(marks) and set(marks) <= set(ENDS)

    def _closes(self, at: int) -> bool:
        return bool(self.texts[at]) and set(self.texts[at]) <= set(CLOSES)

    def pair(self, piece: tuple[int, int, int], number: int, epoch: int, sample_id: int) -> Made:
        """The pair of the piece (start, stop, document), which is `number` in its sequence."""
        start, stop, document = piece
        counter = (number, epoch, sample_id % 2**32, sample_id >> 32)
        key = (self.rule.seed, self.rule.purpose)
        cut_draw, coin, which, where = (int(word) for word in philox(counter, key))
        sentences = self.sentences(document)
        bounds = [*sentences, self.documents[document][1]]
        ends_whole = stop in bounds
        low, high = start, stop
        choices = [at for at in sentences if start < at < stop]
        if self.rule.kind == "sop":
            inside = [at for at in bounds if start <= at <= stop]
            choices = inside[1:-1]
            if choices:
                low, high = inside[0], inside[-1]
        in_sentence = not choices
        if in_sentence:
            choices = [at for at in range(start + 1, stop) if self.starts_word[at]]
        if not choices:
            return Made([*range(start, stop)], None, None, False, False)
        cut = choices[cut_draw % len(choices)]
        label = int(coin >= 2**31)
        head, tail = [*range(start, low)], [*range(high, stop)]
        one, other = [*range(low, cut)], [*range(cut, high)]
        if not label:
            return Made(head + one, other + tail, 0, in_sentence, False)
        if self.rule.kind == "sop":
            return Made(head + other, one + tail, 1, in_sentence, False)
        others = [each for each in range(len(self.documents)) if each != document]
        if not others:
            return Made(head + one, other + tail, 0, in_sentence, True)
        chosen = others[which % len(others)]
        text = self._other(chosen, where, stop - cut, from_word=in_sentence, whole=ends_whole)
        return Made(head + one, text, 1, in_sentence, False)

    def _other(
        self, document: int, draw: int, longest: int, *, from_word: bool, whole: bool
    ) -> list[int]:
        first, last = self.documents[document]
        sentences = self.sentences(document)
        whole_ones = list(zip(sentences, [*sentences[1:], last], strict=True))
        if from_word and not whole:
            token = first + draw % (last - first)
            begins = max(
                at for at in range(first, token + 1) if at == first or self.starts_word[at]
            )
            return [*range(begins, min(begins + longest, last))]
        number = draw % len(sentences)
        if from_word:
            begins, stop = whole_ones[number]
            room = range(max(begins, stop - longest), stop)
            if len(room) == stop - begins:
                return [*room]
            words = [at for at in room if self.starts_word[at]]
            return [*range(words[0] if words else stop - 1, stop)]
        if whole:
            turned = whole_ones[number:] + whole_ones[:number]
            fitting = [each for each in (turned * 10)[:10] if each[1] - each[0] <= longest]
            number = whole_ones.index(fitting[0]) if fitting else number
        begins = sentences[number]
        stop = begins + longest
        if stop < last and whole:
            stop = max([at for at in sentences if begins < at <= stop], default=stop)
        return [*range(begins, min(stop, last))]

    def row(
        self, packing: Packing, sequence: int, epoch: int, sample_id: int
    ) -> list[tuple[int, Made]]:
        """The pairs of a sequence, each with the document of its piece."""
        return [
            (
                int(packing.piece_doc[piece]),
                self.pair(
                    (
                        int(packing.piece_start[piece]),
                        int(packing.piece_stop[piece]),
                        int(packing.piece_doc[piece]),
                    ),
                    number, epoch, sample_id,
                ),
            )
            for number, piece in enumerate(packing.pieces(sequence))
        ]  # fmt: skip
