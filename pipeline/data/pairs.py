"""Makes a pair [CLS] A [SEP] B [SEP] of each packed piece, as a pure function of seed and place.

nsp   Next-sentence prediction (Devlin et al. 2019, section 3.1; google-research/bert,
      create_pretraining_data.py). The piece is cut at a random sentence, and with probability 1/2
      another text stands in place of the rest: label 1.
sop   Sentence order (Lan et al. 2020, arXiv 1909.11942, section 3.1; google-research/albert,
      create_pretraining_data.py). With probability 1/2 the two parts change places: label 1.

A piece is a text of one document, of at most a sequence's length. Neither the lengths of A and B
nor how they begin and end may tell the label. So, unlike in the sources:

- The other text of nsp has as many tokens as the rest that it replaces, and its shape: both begin
  with a sentence or both within one, and end with the document, a sentence, a word or within one,
  with the same kind of mark. It is of another document of the same block, so that no other block is
  read: the first that fits, from a random place on. It is looked for whatever the label is. Where
  none fits, the piece is cut at its other sentences, then within a sentence.
- sop exchanges whole sentences that end with a mark. What else is at either end of a piece stays
  there, such as a part of a sentence, of which packing makes many: a [SEP] behind it would tell the
  label.
- A piece with too few sentences (nsp: two, whole or not; sop: two that can be exchanged) is cut at
  a word within a sentence, and has either label with probability 1/2; its first and last words stay
  when sop exchanges what is between them. In BERT and ALBERT, a chunk of one sentence is always
  followed by another text, with label 1: how A ends then gives the label away.
- A piece of too few words has no label and is a single segment; with nsp also one for which there
  is no other text. The true rest in its place would tell the label by its length.

A sentence starts with a document, and behind a token of 。！？；… . ! ? ; (full or half width) and
closing quotes and brackets that follow it, if the next token starts a word. That is only a guess
from tokens: "3.14" and "e.g." are cut, too, and a colon or a line's end is not.

A piece's draws are one Philox counter: (number of the piece in its sequence, epoch, sample id).
Whole numbers only. Letters: B sequences, S slots each, V vocabulary, n tokens and d documents of a
block.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.objective import PairKind
from pipeline.data.format import Vocabulary
from pipeline.data.jit import inlined, kernel
from pipeline.data.order import Locations
from pipeline.data.packing import Ints, PackedSequences, Packing, PairFields, put_text
from pipeline.data.random import Purpose, philox_words
from pipeline.data.reader import Block

_ENDS, _CLOSES = 1, 2
_ENDS_SENTENCE = re.compile(r"[。｡．！？；…‥.!?;]+[”’\"'」』）)】》〉］\]｝}»›]*")
_CLOSES_SENTENCE = re.compile(r"[”’\"'」』）)】》〉］\]｝}»›]+")
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ONE, _THREE, _SEVEN = np.uint64(1), np.uint64(3), np.uint64(7)
_NO_LABEL = -1
_IN_SENTENCE, _TOO_SHORT, _ALONE = range(3)
_CUTS, _PLACES = 10, 1000
"""How many are tried: cuts of a piece, and places of a block for the other text of one cut."""
_Rule = tuple[bool, int, int, npt.NDArray[np.uint8]]
"""Whether segments change places; seed; purpose; (V,) marks."""


class PairRule(NamedTuple):
    """What makes the pairs of a split."""

    kind: PairKind
    seed: int
    purpose: Purpose
    marks: npt.NDArray[np.uint8]
    """(V,) of `sentence_marks`."""


def sentence_marks(pieces: Iterable[str]) -> npt.NDArray[np.uint8]:
    """Mark each piece of a vocabulary, (V,): 1 if it ends a sentence, 2 if it closes a quote.

    A piece shows the space before it; a quote behind a space opens one.
    """
    marks = [
        _ENDS if _ENDS_SENTENCE.fullmatch(piece.lstrip(" "))
        else _CLOSES if _CLOSES_SENTENCE.fullmatch(piece)
        else 0
        for piece in pieces
    ]  # fmt: skip
    return np.array(marks, np.uint8)


def sentence_starts(block: Block, marks: npt.NDArray[np.uint8]) -> Ints:
    """Find the (k,) rising places of the tokens of a block that start a sentence."""
    return _sentence_starts(block.tokens, block.word_bits, block.doc_ends, marks)


class Text(NamedTuple):
    """A block as kernels need it."""

    tokens: npt.NDArray[np.unsignedinteger]
    """(n,)."""
    word_bits: npt.NDArray[np.uint8]
    doc_ends: Ints
    """(d,)."""
    sentences: Ints
    """(k + 1,) of `sentence_starts`, and the block's end."""

    @classmethod
    def of(cls, block: Block, sentences: Ints) -> "Text":
        """Put a block and its sentences together."""
        bounds = np.append(sentences, len(block.tokens))
        return cls(block.tokens, block.word_bits, block.doc_ends, bounds)


class Pair(NamedTuple):
    """How a piece became a pair."""

    parts: Ints
    """(4, 2) tokens from, to of the block; two of each segment, one behind the other, or empty."""
    label: int | None
    """None: there is only the first segment."""
    in_sentence: bool
    """Whether it was cut within a sentence."""


def lay_out_pairs(
    slots: PackedSequences,
    rows: Ints,
    text: Text,
    packing: Packing,
    locations: Locations,
    vocabulary: Vocabulary,
    rule: PairRule,
) -> None:
    """Fill some rows with pairs, as `pipeline.data.packing.lay_out` does with single segments.

    `rows` (r,) are below B; `locations` are those of the B sequences.
    """
    assert slots.pairs is not None
    which = (rows, locations.sequences, locations.sample_ids, locations.epochs)
    packed = (packing.piece_start, packing.piece_stop, packing.piece_doc, packing.sequence_ends)
    plain = slots._replace(pairs=None)
    _lay_out_pairs(plain, slots.pairs, which, text, packed, vocabulary.special, _numbers(rule))


def pairs_of(text: Text, packing: Packing, one: Locations, rule: PairRule) -> list[Pair]:
    """Return the pairs of a single sequence, in the order of its pieces."""
    packed = (packing.piece_start, packing.piece_stop, packing.piece_doc)
    found = []
    for number, piece in enumerate(packing.pieces(int(one.sequences[0]))):
        start, stop, document = (int(array[piece]) for array in packed)
        parts = np.empty((4, 2), np.int64)
        at = (number, int(one.epochs[0]), int(one.sample_ids[0]))
        label, in_sentence, _ = _draw(parts, (start, stop, document), text, at, _numbers(rule))
        found.append(Pair(parts, None if label == _NO_LABEL else label, bool(in_sentence)))
    return found


def _numbers(rule: PairRule) -> _Rule:
    return rule.kind == "sop", rule.seed, int(rule.purpose), rule.marks


@inlined
def _starts_word(word_bits: npt.NDArray[np.uint8], at: int) -> bool:
    bit = np.uint64(at)
    return bool((np.uint64(word_bits[bit >> _THREE]) >> (_SEVEN - (bit & _SEVEN))) & _ONE)


@kernel
def _sentence_starts(
    tokens: npt.NDArray[np.unsignedinteger],
    word_bits: npt.NDArray[np.uint8],
    doc_ends: Ints,
    marks: npt.NDArray[np.uint8],
) -> Ints:
    starts = np.empty(len(tokens), np.int64)
    count, first = 0, 0
    for end in doc_ends:
        is_over = False
        for at in range(first, end):
            mark = marks[tokens[at]]
            if at == first or (is_over and mark == 0 and _starts_word(word_bits, at)):
                starts[count] = at
                count += 1
            is_over = mark == _ENDS or (is_over and mark == _CLOSES)
        first = end
    return starts[:count].copy()


@kernel
def _draw(
    parts: Ints, piece: tuple[int, int, int], text: Text, at: tuple[int, int, int], rule: _Rule
) -> tuple[int, bool, bool]:
    """Fill `parts`, (4, 2), with the pair of a piece: start, stop, document.

    Returns:
        The label or -1, whether it is cut within a sentence, and whether nsp found no other text.
    """
    start, stop, document = piece
    number, epoch, sample_id = at
    swaps, seed, purpose, marks = rule
    low, high = np.uint64(sample_id) & _LOW, np.uint64(sample_id) >> _HALF
    cut_draw, coin, where, _ = philox_words(
        np.uint64(number), np.uint64(epoch), low, high, np.uint64(seed), np.uint64(purpose)
    )
    label = int(np.int64(coin >> np.uint64(31)))
    is_alone = False
    # The bias of a remainder of 32 bits is below the number of choices / 2^32.
    for in_sentence in (False, True):
        places = _places(text, marks, (start, stop), swaps, in_sentence)
        count = len(places) - 2 * swaps
        for turn in range(min(count, _CUTS)):
            cut = places[swaps + (np.int64(cut_draw) + turn) % count]
            begin, end, other = start, stop, cut
            if swaps:
                begin, end = places[0], places[-1]
            else:
                # With label 0, too: if only label 1 needed another text, pieces for which there is
                # none would all be 0.
                other = _other_text(text, marks, (cut, stop, document), where)
            if other < 0:
                is_alone = True
                continue
            parts[0, 0], parts[0, 1], parts[1, 0], parts[1, 1] = start, begin, begin, cut
            parts[2, 0], parts[2, 1], parts[3, 0], parts[3, 1] = cut, end, end, stop
            if label and swaps:
                parts[1, 0], parts[1, 1], parts[2, 0], parts[2, 1] = cut, end, begin, cut
            elif label:
                parts[2, 0], parts[2, 1] = other, other + stop - cut
            return label, in_sentence, False
    parts[:] = 0
    parts[0, 0], parts[0, 1] = start, stop
    return _NO_LABEL, False, is_alone


@kernel
def _places(
    text: Text, marks: npt.NDArray[np.uint8], piece: tuple[int, int], swaps: bool, in_sentence: bool
) -> Ints:
    """Return the (p,) rising places where a piece, start and stop, may be cut.

    With sop the first and the last one bound what changes places.
    """
    start, stop = piece
    if in_sentence:
        found = np.empty(stop - start, np.int64)
        count = 0
        for at in range(start + 1, stop):
            if _is_within_sentence(text, marks, at):
                found[count] = at
                count += 1
        return found[:count]
    bounds = text.sentences
    # A cut at the piece's start would leave A empty; for sop that place bounds what is exchanged.
    first = np.searchsorted(bounds, start + 1 - swaps)
    last = np.searchsorted(bounds, stop + swaps)
    # Behind a last sentence without a mark, a document's end would become the end of A.
    if swaps and first < last and bounds[last - 1] == stop and marks[text.tokens[stop - 1]] == 0:
        last -= 1
    return bounds[first:last]


@inlined
def _is_within_sentence(text: Text, marks: npt.NDArray[np.uint8], at: int) -> bool:
    """Whether a word starts at a place behind another token, and neither is a mark."""
    return bool(
        _starts_word(text.word_bits, at)
        and marks[text.tokens[at]] == 0
        and marks[text.tokens[at - 1]] == 0
    )


@inlined
def _is_bound(text: Text, at: int) -> bool:
    return bool(text.sentences[np.searchsorted(text.sentences, at)] == at)


@kernel
def _shape(text: Text, marks: npt.NDArray[np.uint8], start: int, stop: int) -> int:
    """Return a number for how a text begins and ends; -1 if it cannot stand for a rest.

    Such a text begins a document, begins neither a sentence nor a word, or passes a document's end.
    """
    document = np.searchsorted(text.doc_ends, start, side="right")
    end = text.doc_ends[document]
    if start == 0 or start == text.doc_ends[document - 1] or stop > end:
        return -1
    begins_sentence = _is_bound(text, start)
    if not (begins_sentence or _is_within_sentence(text, marks, start)):
        return -1
    # 0 within a word, 1 behind a word, 2 a sentence, 3 a document.
    ends = int(stop == end or _starts_word(text.word_bits, stop))
    ends += int(_is_bound(text, stop)) + (stop == end)
    return int(12 * begins_sentence + 3 * ends + marks[text.tokens[stop - 1]])


# From the same block, which is read anyway: pairs cost no input and stay a function of (seed,
# sample, epoch).
@kernel
def _other_text(
    text: Text, marks: npt.NDArray[np.uint8], rest: tuple[int, int, int], draw: np.uint64
) -> int:
    """Return where a text of another document starts that has a rest's length and shape; -1: none.

    The rest is tokens from, to of a document.
    """
    begin, stop, document = rest
    tokens, sentences, doc_ends = text.tokens, text.sentences, text.doc_ends
    length, shape = stop - begin, _shape(text, marks, begin, stop)
    is_behind_mark = marks[tokens[begin - 1]] != 0
    ends_whole, ends_document = _is_bound(text, stop), stop == doc_ends[document]
    # Tried are ends of documents, bounds of sentences or all tokens, without the document's own.
    own, own_stop, count = document, document + 1, len(doc_ends)
    if not ends_document:
        own = int(doc_ends[document - 1]) if document else 0
        own_stop, count = int(doc_ends[document]), len(tokens)
        if ends_whole or is_behind_mark:
            own = int(np.searchsorted(sentences, own))
            own_stop, count = int(np.searchsorted(sentences, own_stop)), len(sentences)
    count -= own_stop - own
    for turn in range(min(count, _PLACES)):
        at = int((np.int64(draw) + turn) % count)
        if at >= own:
            at += own_stop - own
        if ends_document:
            at = int(doc_ends[at])
        elif ends_whole or is_behind_mark:
            at = int(sentences[at])
        start = at - length if ends_whole else at
        # Most places fail by the token before them, which is cheap to look at.
        if (
            start > 0
            and start + length <= len(tokens)
            and (marks[tokens[start - 1]] != 0) == is_behind_mark
            and _shape(text, marks, start, start + length) == shape
        ):
            return start
    return -1


@kernel
def _lay_out_pairs(
    slots: PackedSequences,
    pairs: PairFields,
    which: tuple[Ints, Ints, Ints, Ints],
    text: Text,
    packing: tuple[Ints, Ints, Ints, Ints],
    special: tuple[int, int, int, int, int],
    rule: _Rule,
) -> None:
    rows, sequences, sample_ids, epochs = which
    starts, stops, docs, ends = packing
    pad, _, cls, sep, _ = special
    block = text.tokens, text.word_bits
    parts = np.empty((4, 2), np.int64)
    for row in rows:
        tokens, documents, positions = slots.tokens[row], slots.documents[row], slots.positions[row]
        word_starts, maskable = slots.word_starts[row], slots.maskable[row]
        segments, labels, counts = pairs.segments[row], pairs.labels[row], pairs.counts[row]
        # Special tokens and padding; what is text is written over.
        word_starts[:], maskable[:], labels[:] = True, False, _NO_LABEL
        counts[:] = 0
        sequence = sequences[row]
        first = ends[sequence - 1] if sequence else 0
        slot = 0
        for piece in range(first, ends[sequence]):
            bounds = starts[piece], stops[piece], docs[piece]
            at = piece - first, epochs[row], sample_ids[row]
            label, in_sentence, alone = _draw(parts, bounds, text, at, rule)
            counts[_IN_SENTENCE] += in_sentence
            counts[_TOO_SHORT] += label == _NO_LABEL
            counts[_ALONE] += alone
            begin = slot
            tokens[slot], labels[slot], segments[slot] = cls, label, 0
            slot += 1
            for segment in range(1 if label == _NO_LABEL else 2):
                text_begin = slot
                for part in range(2 * segment, 2 * segment + 2):
                    end = slot + parts[part, 1] - parts[part, 0]
                    into = tokens[slot:end], word_starts[slot:end]
                    put_text(into, maskable[slot:end], block, parts[part, 0], special)
                    slot = end
                word_starts[text_begin] = True
                tokens[slot] = sep
                segments[text_begin : slot + 1] = segment
                slot += 1
            documents[begin:slot] = piece - first + 1
            for slot_of_piece in range(begin, slot):
                positions[slot_of_piece] = slot_of_piece - begin
        tokens[slot:] = pad
        documents[slot:], positions[slot:], segments[slot:] = 0, 0, 0
