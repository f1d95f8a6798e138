"""Packing as it was first written, in Python: slow, and easy to see what it does."""

import numpy as np
import numpy.typing as npt

from pipeline.data.packing import SPECIALS_PER_PIECE, Packing


def pack(
    doc_ends: npt.NDArray[np.int64], seq_len: int, specials: int = SPECIALS_PER_PIECE
) -> Packing:
    """Packs documents by best fit, longest piece first; `seq_len` includes specials."""
    start, stop, doc = _split(doc_ends, seq_len - specials)
    need = stop - start + specials
    by_length = np.argsort(-need, kind="stable")
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free slots -> bins with just that many
    spaces = 0  # bit k is set if a bin with k free slots exists: finds the best fit in one step
    for piece in by_length.tolist():
        slots = int(need[piece])
        fitting = spaces >> slots
        if fitting:
            space = slots + (fitting & -fitting).bit_length() - 1
            bin_ = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
            bins[bin_].append(piece)
        else:
            space = seq_len
            bin_ = len(bins)
            bins.append([piece])
        rest = space - slots
        if rest > specials:
            by_space.setdefault(rest, []).append(bin_)
            spaces |= 1 << rest
    order = np.array([piece for members in bins for piece in members], dtype=np.int64)
    ends = np.cumsum([len(members) for members in bins], dtype=np.int64)
    return Packing(start[order], stop[order], doc[order], ends)


def _split(
    doc_ends: npt.NDArray[np.int64], longest: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cuts documents into pieces of at most `longest` tokens: start, stop and document of each."""
    doc_starts = np.concatenate(([0], doc_ends[:-1])).astype(np.int64)
    pieces_per_doc = -(-(doc_ends - doc_starts) // longest)
    doc = np.repeat(np.arange(len(doc_ends)), pieces_per_doc)
    first_piece = np.cumsum(pieces_per_doc) - pieces_per_doc
    number_in_doc = np.arange(len(doc)) - first_piece[doc]
    start = doc_starts[doc] + number_in_doc * longest
    return start, np.minimum(start + longest, doc_ends[doc]), doc
