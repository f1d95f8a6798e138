"""Packs the documents of a block into sequences, and lays their tokens out in slots.

A document longer than a sequence becomes successive pieces; nothing is dropped. Every piece takes
two more slots, for [CLS] and [SEP], or three where it becomes a pair of segments. Packing is a pure
function of the documents' lengths, not of seed or epoch: attention never crosses documents, so it
does not matter which of them share a sequence. A sequence therefore keeps one number, by which its
masks are drawn.

Letters: B sequences of S slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.objective import PairKind
from pipeline.data.format import Vocabulary
from pipeline.data.jit import kernel
from pipeline.data.reader import Block

Ints = npt.NDArray[np.int64]

SPECIALS_PER_PIECE = 2
"""Of a piece that is a single segment."""
RULE_VERSION = 1
"""Raise it when packing changes, because stored counts are wrong then."""
_WORD = 32  # bits used of an int64, without its sign


def specials_per_piece(pairs: PairKind | None) -> int:
    """Return how many slots packing keeps for the special tokens of a piece; see `ObjectiveConfig`.

    A pair has a [SEP] in its middle, too.
    """
    return SPECIALS_PER_PIECE + (pairs is not None)


def counts_file(seq_len: int, specials: int) -> str:
    """Name the file of the stored counts of sequences."""
    return f"packing-{seq_len}{'' if specials == SPECIALS_PER_PIECE else '-pairs'}.npz"


@dataclass(frozen=True)
class Packing:
    """The sequences of one block."""

    piece_start: Ints
    """(p,) first token of each piece, as offset into the block."""
    piece_stop: Ints
    """(p,) one past the last token of each piece."""
    piece_doc: Ints
    """(p,) row in the block of each piece's document."""
    sequence_ends: Ints
    """(s,) end of each sequence in the piece arrays."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.sequence_ends)

    def pieces(self, sequence: int) -> range:
        """Return the rows of one sequence's pieces."""
        begin = int(self.sequence_ends[sequence - 1]) if sequence else 0
        return range(begin, int(self.sequence_ends[sequence]))


# By block, not over an epoch: a sequence keeps its id, an epoch permutes ids, and a resume costs
# the same anywhere.
# Numba: 1,087 to 23,838 M tokens a CPU-second, bit-identical to the Python version of the tests.
# The price of packing by block: its last sequence is not full (fill stays above 98%).
def pack(doc_ends: Ints, seq_len: int, specials: int = SPECIALS_PER_PIECE) -> Packing:
    """Pack documents by best fit, longest piece first.

    Among the sequences with the least sufficient room, the one that reached it last is taken.

    `doc_ends` (d,) rise; `seq_len` includes specials, of which each piece has as many.
    """
    # Not [0]: a block without documents has no start either.
    starts = np.concatenate((doc_ends[:1] * 0, doc_ends[:-1]))
    return _pack_ranges((starts, doc_ends, np.arange(len(doc_ends))), seq_len, specials)


def repack(
    packing: Packing, sequences: Ints, seq_len: int, specials: int = SPECIALS_PER_PIECE
) -> Packing:
    """Pack the pieces of some sequences of a block again, for another length.

    Adjacent pieces of a document are joined first.
    """
    rows = np.concatenate([np.array(packing.pieces(int(s)), np.int64) for s in sequences])
    rows = rows[np.argsort(packing.piece_start[rows])]
    start, stop, doc = packing.piece_start[rows], packing.piece_stop[rows], packing.piece_doc[rows]
    first = np.ones(len(rows), np.bool_)
    first[1:] = (doc[1:] != doc[:-1]) | (start[1:] != stop[:-1])
    last = np.append(first[1:], True)
    return _pack_ranges((start[first], stop[last], doc[first]), seq_len, specials)


def _pack_ranges(ranges: tuple[Ints, Ints, Ints], seq_len: int, specials: int) -> Packing:
    """Pack ranges of tokens, each of one document: starts, stops and documents."""
    starts, stops, docs = ranges
    of_one_type = (_for_compiler(starts), _for_compiler(stops), _for_compiler(docs))
    start, stop, doc = _split(of_one_type, seq_len - specials)
    need = stop - start + specials
    by_length = _longest_first(need, seq_len)
    sequence, num_sequences = _best_fit(need, by_length, seq_len, specials)
    order, ends = _grouped(sequence, by_length, num_sequences)
    return Packing(start[order], stop[order], doc[order], ends)


def _for_compiler(array: Ints) -> Ints:
    """Make the array one type for the compiler, wherever it comes from."""
    # Layout and writability are part of a numba type: arrays from files, from shared memory and
    # freshly made ones would each compile the loops again.
    array = np.ascontiguousarray(array).view()
    array.flags.writeable = False
    return array


@kernel
def _split(ranges: tuple[Ints, Ints, Ints], longest: int) -> tuple[Ints, Ints, Ints]:
    """Cut ranges into pieces of at most `longest` tokens: start, stop and document of each."""
    starts, stops, docs = ranges
    num_pieces = 0
    for row in range(len(starts)):
        num_pieces += (stops[row] - starts[row] + longest - 1) // longest
    start = np.empty(num_pieces, np.int64)
    stop = np.empty(num_pieces, np.int64)
    doc = np.empty(num_pieces, np.int64)
    piece = 0
    for row in range(len(starts)):
        at = starts[row]
        while at < stops[row]:
            start[piece] = at
            at = min(at + longest, stops[row])
            stop[piece] = at
            doc[piece] = docs[row]
            piece += 1
    return start, stop, doc


@kernel
def _longest_first(need: Ints, seq_len: int) -> Ints:
    """Sort the pieces by falling number of slots, stably; a counting sort."""
    place = np.zeros(seq_len + 1, np.int64)
    for slots in need:
        place[slots] += 1
    before = 0
    for slots in range(seq_len, -1, -1):
        place[slots], before = before, before + place[slots]
    order = np.empty(len(need), np.int64)
    for piece in range(len(need)):
        order[place[need[piece]]] = piece
        place[need[piece]] += 1
    return order


@kernel
def _best_fit(need: Ints, by_length: Ints, seq_len: int, specials: int) -> tuple[Ints, int]:
    """Return the sequence of each piece, and the number of sequences."""
    sequence_of = np.empty(len(need), np.int64)
    # Sequences with k free slots form a stack with top top[k]; below s lies below[s].
    top = np.full(seq_len + 1, -1, np.int64)
    below = np.empty(len(need), np.int64)
    occupied = np.zeros(seq_len // _WORD + 1, np.int64)  # bit k: top[k] is a sequence
    num_sequences = 0
    for piece in by_length:
        slots = need[piece]
        space = _first_set_bit(occupied, slots)
        if space < 0:
            space, sequence = seq_len, num_sequences
            num_sequences += 1
        else:
            sequence = top[space]
            top[space] = below[sequence]
            if top[space] < 0:
                occupied[space // _WORD] &= ~(1 << (space % _WORD))
        sequence_of[piece] = sequence
        rest = space - slots
        # With only `specials` slots left a sequence has no room for a token, so it is full.
        if rest > specials:
            below[sequence] = top[rest]
            top[rest] = sequence
            occupied[rest // _WORD] |= 1 << (rest % _WORD)
    return sequence_of, num_sequences


@kernel
def _first_set_bit(words: Ints, first: int) -> int:
    """Return the number of the first bit set from bit `first` on, -1 if there is none."""
    at = first // _WORD
    word = words[at] >> (first % _WORD) << (first % _WORD)
    while not word:
        at += 1
        if at == len(words):
            return -1
        word = words[at]
    bit = at * _WORD
    while not word & 1:
        word >>= 1
        bit += 1
    return bit


@kernel
def _grouped(sequence_of: Ints, by_length: Ints, num_sequences: int) -> tuple[Ints, Ints]:
    """Group the pieces by sequence, in the order of their placing, with each sequence's end."""
    ends = np.zeros(num_sequences, np.int64)
    for sequence in sequence_of:
        ends[sequence] += 1
    place = np.empty(num_sequences, np.int64)
    total = 0
    for sequence in range(num_sequences):
        place[sequence] = total
        total += ends[sequence]
        ends[sequence] = total
    order = np.empty(len(sequence_of), np.int64)
    for piece in by_length:
        order[place[sequence_of[piece]]] = piece
        place[sequence_of[piece]] += 1
    return order, ends


_ONE, _THREE, _SEVEN = np.uint64(1), np.uint64(3), np.uint64(7)


class PairFields(NamedTuple):
    """What sequences of pairs have beside their slots; see `pipeline.data.pairs`."""

    segments: npt.NDArray[np.int64]
    """(B, S) 1 from behind a piece's first [SEP] to its second, else 0."""
    labels: npt.NDArray[np.int8]
    """(B, S) at the [CLS] of a pair 1 if B does not follow A, 0 if it does; -1 elsewhere."""
    counts: npt.NDArray[np.int64]
    """(B, 3) pieces cut within a sentence, too short for a pair, without another document."""


class PackedSequences(NamedTuple):
    """The sequences of a micro-batch before they are masked."""

    tokens: npt.NDArray[np.int64]
    """(B, S) int64."""
    documents: npt.NDArray[np.int32]
    """(B, S) int32, number of the piece in the sequence from 1, 0 at padding."""
    positions: npt.NDArray[np.int64]
    """(B, S) int64, position within the piece, 0 at its [CLS] and at padding."""
    word_starts: npt.NDArray[np.bool_]
    """(B, S) bool. [CLS], a piece's first token, [SEP] and padding bound words."""
    maskable: npt.NDArray[np.bool_]
    """(B, S) bool, false at special tokens and padding."""
    pairs: PairFields | None = None
    """None: each piece is one segment."""

    @classmethod
    def empty(cls, num_sequences: int, seq_len: int, *, pairs: bool = False) -> "PackedSequences":
        """Room for sequences; every one is to be filled by `lay_out`, or by `lay_out_pairs`."""
        shape = (num_sequences, seq_len)
        marks = None
        if pairs:
            counts = np.empty((num_sequences, 3), np.int64)
            marks = PairFields(np.empty(shape, np.int64), np.empty(shape, np.int8), counts)
        return cls(
            tokens=np.empty(shape, np.int64),
            documents=np.empty(shape, np.int32),
            positions=np.empty(shape, np.int64),
            word_starts=np.empty(shape, np.bool_),
            maskable=np.empty(shape, np.bool_),
            pairs=marks,
        )


def lay_out(
    slots: PackedSequences,
    which: tuple[Ints, Ints],
    block: Block,
    packing: Packing,
    vocabulary: Vocabulary,
) -> None:
    """Fill some rows with the pieces of sequences of a block, side by side.

    `which` holds rows (r,) below B, and the numbers (r,) of the sequences within the block.
    """
    _lay_out(
        slots,
        which,
        (block.tokens, block.word_bits),
        (packing.piece_start, packing.piece_stop, packing.sequence_ends),
        vocabulary.special,
    )


@kernel
def _lay_out(
    slots: PackedSequences,
    which: tuple[Ints, Ints],
    block: tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]],
    packing: tuple[Ints, Ints, Ints],
    special: tuple[int, int, int, int, int],
) -> None:
    rows, sequences = which
    starts, stops, ends = packing
    for i in range(len(rows)):
        first = ends[sequences[i] - 1] if sequences[i] else 0
        _lay_out_row(slots, rows[i], block, (starts, stops, first, ends[sequences[i]]), special)


@kernel
def put_text(
    into: tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]],
    to_maskable: npt.NDArray[np.bool_],
    block: tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]],
    start: int,
    special: tuple[int, int, int, int, int],
) -> None:
    """Copy as many tokens as there is room for, with their words' starts, from `start` on."""
    to_tokens, to_words = into
    block_tokens, word_bits = block
    pad, unk, cls, sep, mask = special
    # Loops over whole slices: the compiler makes vector code of them.
    text = block_tokens[start : start + len(to_tokens)]
    for i in range(len(text)):
        token = np.int64(text[i])
        to_tokens[i] = token
        to_maskable[i] = (
            # [UNK] stands in texts and is not a target: nobody can say what it was.
            (token != pad) & (token != unk) & (token != cls) & (token != sep) & (token != mask)
        )
    for i in range(len(to_words)):
        # Unsigned and high bit first: shifts as np.packbits has stored the bits.
        bit = np.uint64(start + i)
        to_words[i] = (word_bits[bit >> _THREE] >> (_SEVEN - (bit & _SEVEN))) & _ONE


@kernel
def _lay_out_row(
    slots: PackedSequences,
    row: int,
    block: tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]],
    pieces: tuple[Ints, Ints, int, int],
    special: tuple[int, int, int, int, int],
) -> None:
    tokens, documents, positions = slots.tokens[row], slots.documents[row], slots.positions[row]
    word_starts, maskable = slots.word_starts[row], slots.maskable[row]
    starts, stops, first, last = pieces
    pad, _, cls, sep, _ = special
    slot = 0
    for piece in range(first, last):
        start, stop = starts[piece], stops[piece]
        end = slot + stop - start + 2
        documents[slot:end] = piece - first + 1
        # Loops over whole slices: the compiler makes vector code of them.
        of_piece = positions[slot:end]
        for i in range(len(of_piece)):
            of_piece[i] = i
        put_text(
            (tokens[slot + 1 : end - 1], word_starts[slot + 1 : end - 1]),
            maskable[slot + 1 : end - 1],
            block,
            start,
            special,
        )
        tokens[slot], tokens[end - 1] = cls, sep
        maskable[slot] = maskable[end - 1] = False
        # A piece's first token starts a word even where the document was cut within one: whole
        # words are masked within a piece.
        word_starts[slot] = word_starts[slot + 1] = word_starts[end - 1] = True
        slot = end
    tokens[slot:] = pad
    documents[slot:] = 0
    positions[slot:] = 0
    word_starts[slot:] = True
    maskable[slot:] = False
