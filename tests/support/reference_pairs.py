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
        cut_draw, coin, where, _ = (int(word) for word in philox(counter, key))
        label = int(coin >= 2**31)
        is_alone = False
        for in_sentence in (False, True):
            if self.rule.kind == "sop":
                low, choices, high = self._exchanged(piece, in_sentence)
            else:
                low, choices, high = start, self._cuts(piece, in_sentence), stop
            turn = cut_draw % len(choices) if choices else 0
            for cut in (choices[turn:] + choices[:turn])[:10]:
                head, tail = [*range(start, low)], [*range(high, stop)]
                one, other = [*range(low, cut)], [*range(cut, high)]
                if self.rule.kind == "nsp":
                    text = self._other((cut, stop), document, where)
                    if text is None:
                        is_alone = True
                        continue
                    return Made(one, text if label else other, label, in_sentence, False)
                if label:
                    one, other = other, one
                return Made(head + one, other + tail, label, in_sentence, False)
        return Made([*range(start, stop)], None, None, False, is_alone)

    def _cuts(self, piece: tuple[int, int, int], in_sentence: bool) -> list[int]:
        start, stop, document = piece
        found = self._inner_words(document) if in_sentence else self.sentences(document)
        return [at for at in found if start < at < stop]

    def _exchanged(
        self, piece: tuple[int, int, int], in_sentence: bool
    ) -> tuple[int, list[int], int]:
        """From where to where parts change places, and cuts between them."""
        start, stop, document = piece
        bounds = self._cuts(piece, in_sentence)
        if not in_sentence:
            if start in self.sentences(document):
                bounds = [start, *bounds]
            is_marked = self._ends(stop - 1) or self._closes(stop - 1)
            if stop in [*self.sentences(document), self.documents[document][1]] and is_marked:
                bounds = [*bounds, stop]
        return (bounds[0], bounds[1:-1], bounds[-1]) if len(bounds) > 2 else (start, [], stop)

    def _inner_words(self, document: int) -> list[int]:
        """Words of a document behind its first token, away from marks."""
        start, stop = self.documents[document]
        is_mark = [self._ends(at) or self._closes(at) for at in range(start, stop)]
        return [
            at for at in range(start + 1, stop)
            if self.starts_word[at] and not is_mark[at - start] and not is_mark[at - start - 1]
        ]  # fmt: skip

    def _shape(self, text: Range, document: int) -> tuple[str, str, str] | None:
        """How a text of a document begins and ends; None: it is not an other text of any rest."""
        start, stop = text
        sentences, (first, last) = self.sentences(document), self.documents[document]
        if not first < start < stop <= last:
            return None
        if start not in [*sentences, *self._inner_words(document)]:
            return None
        begins = "sentence" if start in sentences else "word"
        if stop == last:
            ends = "document"
        elif stop in sentences:
            ends = "sentence"
        else:
            ends = "word" if self.starts_word[stop] else "within"
        mark = "closes" if self._closes(stop - 1) else "ends" if self._ends(stop - 1) else ""
        return begins, ends, mark

    def _other(self, rest: Range, document: int, draw: int) -> list[int] | None:
        length, shape = rest[1] - rest[0], self._shape(rest, document)
        assert shape is not None
        others = [each for each in range(len(self.documents)) if each != document]
        if shape[1] == "document":
            starts = [self.documents[each][1] - length for each in others]
        elif shape[1] == "sentence" or shape[0] == "sentence":
            # The block's end counts as a sentence's start.
            starts = [at for each in others for at in self.sentences(each)] + [len(self.texts)]
            if shape[1] == "sentence":
                starts = [at - length for at in starts]
        else:
            starts = [at for each in others for at in range(*self.documents[each])]
        turn = draw % len(starts) if starts else 0
        for start in (starts[turn:] + starts[:turn])[:1000]:
            of = [each for each in others if range(*self.documents[each]).count(start)]
            if of and self._shape((start, start + length), of[0]) == shape:
                return [*range(start, start + length)]
        return None

    def row(self, packing: Packing, sequence: int, epoch: int, sample_id: int) -> list[Made]:
        """The pairs of a sequence."""
        arrays = packing.piece_start, packing.piece_stop, packing.piece_doc
        pieces = [[int(array[at]) for array in arrays] for at in packing.pieces(sequence)]
        return [
            self.pair((start, stop, document), number, epoch, sample_id)
            for number, (start, stop, document) in enumerate(pieces)
        ]
