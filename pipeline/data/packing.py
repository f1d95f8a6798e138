"""Documents of a block to sequences of a fixed length: a pure function of the documents' lengths.

A document longer than a sequence becomes successive pieces; nothing is dropped. Every piece costs
two more slots, for [CLS] and [SEP]. Packing never looks at the seed or the epoch: which documents
share a sequence has no effect on any of them, since attention never crosses documents, and so a
sequence has one number for good, by which its masks are drawn.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.data.jit import kernel

Ints = npt.NDArray[np.int64]

SPECIALS_PER_PIECE = 2
RULE_VERSION = 1
"""To be raised when documents are packed in another way: what was counted before is then wrong."""
_WORD = 32  # bits used of an int64: none of them is its sign


@dataclass(frozen=True)
class Packing:
    """The sequences of one block."""

    piece_start: Ints
    """(p,) first token of each piece, as offset into the block."""
    piece_stop: Ints
    """(p,) one past its last token."""
    piece_doc: Ints
    """(p,) row of its document in the block."""
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


def pack(doc_ends: Ints, seq_len: int) -> Packing:
    """Pack documents by best fit, longest piece first.

    Among the sequences with the least room that is enough, the one that got there last is taken.

    Args:
        doc_ends: (d,) int64 rising end offset of each document.
        seq_len: slots of a sequence, specials included.
    """
    starts = np.concatenate((doc_ends[:1] * 0, doc_ends[:-1]))
    return _pack_ranges(starts, doc_ends, np.arange(len(doc_ends)), seq_len)


def repack(packing: Packing, sequences: Ints, seq_len: int) -> Packing:
    """Pack the pieces of some sequences of a block again, for another length.

    Pieces of a document that follow one another are put together again before.

    Args:
        packing: of the block.
        sequences: (k,) numbers of sequences, each once.
        seq_len: slots of the new sequences.
    """
    rows = np.concatenate([np.array(packing.pieces(int(s)), np.int64) for s in sequences])
    rows = rows[np.argsort(packing.piece_start[rows])]
    start, stop, doc = packing.piece_start[rows], packing.piece_stop[rows], packing.piece_doc[rows]
    first = np.ones(len(rows), np.bool_)
    first[1:] = (doc[1:] != doc[:-1]) | (start[1:] != stop[:-1])
    last = np.append(first[1:], True)
    return _pack_ranges(start[first], stop[last], doc[first], seq_len)


def _pack_ranges(starts: Ints, stops: Ints, docs: Ints, seq_len: int) -> Packing:
    """Pack ranges of tokens, each of one document."""
    ranges = (_for_compiler(starts), _for_compiler(stops), _for_compiler(docs))
    start, stop, doc = _split(ranges, seq_len - SPECIALS_PER_PIECE)
    need = stop - start + SPECIALS_PER_PIECE
    by_length = _longest_first(need, seq_len)
    sequence, num_sequences = _best_fit(need, by_length, seq_len)
    order, ends = _grouped(sequence, by_length, num_sequences)
    return Packing(start[order], stop[order], doc[order], ends)


def _for_compiler(array: Ints) -> Ints:
    """Make the array one type for the compiler, wherever it comes from."""
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
def _best_fit(need: Ints, by_length: Ints, seq_len: int) -> tuple[Ints, int]:
    """Return the sequence of each piece, and the number of sequences."""
    sequence_of = np.empty(len(need), np.int64)
    # Sequences with k free slots are a stack: its top is top[k], what lies below s is below[s].
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
        if rest > SPECIALS_PER_PIECE:
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
