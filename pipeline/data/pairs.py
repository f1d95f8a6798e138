"""Makes a pair [CLS] A [SEP] B [SEP] of each packed piece, as a pure function of seed and place.

nsp   Next-sentence prediction (Devlin et al. 2019, section 3.1; google-research/bert,
      create_pretraining_data.py). The piece is cut at a random sentence, and with probability 1/2
      another text stands in place of the rest: label 1.
sop   Sentence order (Lan et al. 2020, arXiv 1909.11942, section 3.1; google-research/albert,
      create_pretraining_data.py). With probability 1/2 the two parts change places: label 1.

A piece is a text of one document, of at most a sequence's length. Unlike in the sources:

- The other text of nsp is of the same block, so that no other block is read: of any other document
  with equal probability, from any of its sentences on. It is at most as long as the rest that it
  replaces. Where that ends with a sentence, so does the other text, or its cut end would tell the
  label: it starts with the first of ten sentences from there on that fits, and has as many as fit;
  if none does, it is cut all the same.
- Packing cuts long documents anywhere. A part of a sentence at either end of a piece stays there
  when sop exchanges whole sentences: a [SEP] behind half a sentence would tell the label.
- A piece with too few sentences (nsp: two, whole or not; sop: two whole ones) is cut where a word
  starts, and has either label with probability 1/2; the other text of nsp then starts with a word,
  too: anywhere, or where it is to end with a sentence, in that sentence. In BERT and ALBERT, a
  chunk of one sentence is always followed by another text, with label 1: how A ends then gives the
  label away.
- A piece of one word has no label and is a single segment. Without another document in the block,
  nsp takes the true rest.

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
_TRIES = 10


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
    """(k,) of `sentence_starts`."""

    @classmethod
    def of(cls, block: Block, sentences: Ints) -> "Text":
        """Put a block and its sentences together."""
        return cls(block.tokens, block.word_bits, block.doc_ends, sentences)


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


def _numbers(rule: PairRule) -> tuple[bool, int, int]:
    return rule.kind == "sop", rule.seed, int(rule.purpose)


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
    parts: Ints,
    piece: tuple[int, int, int],
    text: Text,
    at: tuple[int, int, int],
    rule: tuple[bool, int, int],
) -> tuple[int, bool, bool]:
    """Fill `parts`, (4, 2), with the pair of a piece: start, stop, document.

    Returns:
        The label or -1, whether it is cut within a sentence, and whether nsp found no other
        document.
    """
    start, stop, document = piece
    number, epoch, sample_id = at
    swaps, seed, purpose = rule
    sentences = text.sentences
    low, high = np.uint64(sample_id) & _LOW, np.uint64(sample_id) >> _HALF
    cut_draw, coin, which, where = philox_words(
        np.uint64(number), np.uint64(epoch), low, high, np.uint64(seed), np.uint64(purpose)
    )
    # The bias of a remainder of 32 bits is below the number of choices / 2^32.
    first = np.searchsorted(sentences, start, side="right")
    last = np.searchsorted(sentences, stop)
    ends_whole = bool(
        stop == text.doc_ends[document] or (last < len(sentences) and sentences[last] == stop)
    )
    begin, end = start, stop
    if swaps:
        # Whole sentences are those of first .. last - 1, but for one that goes on behind the piece.
        if not ends_whole:
            last -= 1
            if last >= first:
                end = sentences[last]
        if sentences[first - 1] != start and first < last:
            begin = sentences[first]
            first += 1
    in_sentence = bool(first >= last)
    if in_sentence:
        begin, end = start, stop
        cut = _random_word(text.word_bits, start, stop, cut_draw)
        if cut < 0:
            parts[:] = 0
            parts[0, 0], parts[0, 1] = start, stop
            return _NO_LABEL, False, False
    else:
        cut = sentences[first + np.int64(cut_draw % np.uint64(last - first))]
    label = int(np.int64(coin >> np.uint64(31)))
    parts[0, 0], parts[0, 1], parts[1, 0], parts[1, 1] = start, begin, begin, cut
    parts[2, 0], parts[2, 1], parts[3, 0], parts[3, 1] = cut, end, end, stop
    if swaps and label:
        parts[1, 0], parts[1, 1], parts[2, 0], parts[2, 1] = cut, end, begin, cut
    elif label:
        if len(text.doc_ends) < 2:
            return 0, in_sentence, True
        other = int(np.int64(which % np.uint64(len(text.doc_ends) - 1)))
        other += other >= document
        parts[2, 0], parts[2, 1] = _other_text(
            text, other, (where, in_sentence), stop - cut, ends_whole
        )
    return label, in_sentence, False


@kernel
def _random_word(word_bits: npt.NDArray[np.uint8], start: int, stop: int, draw: np.uint64) -> int:
    """Return one of the places behind `start` where a word starts, -1 if there is none."""
    count = 0
    for at in range(start + 1, stop):
        count += _starts_word(word_bits, at)
    if count == 0:
        return -1
    left = np.int64(draw % np.uint64(count))
    at = start
    while left >= 0:
        at += 1
        left -= _starts_word(word_bits, at)
    return at


# From the same block, which is read anyway: pairs cost no input and stay a function of (seed,
# sample, epoch).
@kernel
def _other_text(
    text: Text, document: int, how: tuple[np.uint64, bool], longest: int, ends_whole: bool
) -> tuple[int, int]:
    """Return from where to where a text of a document goes that has at most `longest` tokens."""
    draw, from_word = how
    sentences, end = text.sentences, text.doc_ends[document]
    first = text.doc_ends[document - 1] if document else 0
    if from_word and not ends_whole:
        start = first + int(np.int64(draw % np.uint64(end - first)))
        while start > first and not _starts_word(text.word_bits, start):
            start -= 1
        return int(start), int(min(start + longest, end))
    low, high = np.searchsorted(sentences, first), np.searchsorted(sentences, end)
    which = int(low + np.int64(draw % np.uint64(high - low)))
    if ends_whole and not from_word:
        for after in range(_TRIES):
            at = int(low + (which - low + after) % (high - low))
            if _sentence_end(sentences, at, end) - sentences[at] <= longest:
                which = at
                break
    start = sentences[which]
    if from_word:
        end = _sentence_end(sentences, which, end)
        if end - start > longest:
            start = end - longest
            while start < end - 1 and not _starts_word(text.word_bits, start):
                start += 1
    elif end - start > longest:
        end = start + longest
        whole = sentences[np.searchsorted(sentences, end, side="right") - 1]
        if ends_whole and whole > start:
            end = whole
    return int(start), int(end)


@inlined
def _sentence_end(sentences: Ints, which: int, document_end: int) -> int:
    """Return where a sentence of a document ends."""
    if which + 1 == len(sentences):
        return document_end
    return int(min(sentences[which + 1], document_end))


@kernel
def _lay_out_pairs(
    slots: PackedSequences,
    pairs: PairFields,
    which: tuple[Ints, Ints, Ints, Ints],
    text: Text,
    packing: tuple[Ints, Ints, Ints, Ints],
    special: tuple[int, int, int, int, int],
    rule: tuple[bool, int, int],
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
