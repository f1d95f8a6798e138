"""Where tokens lie and which of them see each other: rows with a mask, or packed end to end.

Linear layers, norms and the feed-forward work on tokens wherever they lie; only attention needs
sequences side by side. A layout says how to get them there, and both kinds give the same numbers.

Shapes: B rows, S slots of a row, T tokens of a packed batch, N heads, H head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.choose import Windows


class Layout(NamedTuple):
    """Made by the functions below; tensors only, so that it passes through wrappers."""

    positions: Tensor
    """(B, S) or (T,) int64 position of each token within its document."""
    allowed: Tensor
    """Bool, broadcasts to (B, N, S, S): query (row) may see key (column)."""
    slots: Tensor | None
    """(T,) int64: slot of each packed token in the rows that attention sees; None for rows."""
    spans: Tensor | None = None
    """(T, 4) or (B * S, 4) int32, as in `Windows`; None where what is seen may be no interval."""
    bounds: Tensor | None = None
    """(B + 1,) int32, as in `Windows`."""
    cu_seqlens: Tensor | None = None
    """(D + 1,) int32: 0, then the end of each document, tokens end to end as they lie, padding as
    documents of its own; None where documents are not all that is seen."""

    def windows(self) -> Windows | None:
        """Return who sees whom, for fused kernels; None if they cannot take the layout."""
        if self.spans is None or self.bounds is None:
            return None
        return Windows(self.spans, self.bounds, self.allowed.shape[-1])

    def num_keys(self) -> Tensor:
        """Count the tokens that each token sees, itself included; shaped like `positions`."""
        counts = self.allowed.sum(-1)[:, 0].expand(-1, self.allowed.shape[-1])
        return counts if self.slots is None else counts.flatten()[self.slots]

    def to_rows(self, x: Tensor) -> Tensor:
        """Rearrange (B, S, N, H) or (T, N, H) tokens to (B, N, S, H); empty slots are 0."""
        if self.slots is not None:
            num_rows, length = self.allowed.shape[0], self.allowed.shape[-1]
            empty = x.new_zeros(num_rows * length, *x.shape[1:])
            x = empty.index_copy(0, self.slots, x).view(num_rows, length, *x.shape[1:])
        return x.transpose(1, 2)

    def from_rows(self, x_BNSH: Tensor) -> Tensor:
        """Rearrange (B, N, S, H) to (B, S, N * H) or (T, N * H) tokens."""
        x = x_BNSH.transpose(1, 2).flatten(2)
        return x if self.slots is None else x.flatten(0, 1)[self.slots]


def rows(documents: Tensor, positions: Tensor, cu_seqlens: Tensor | None = None) -> Layout:
    """Lay out several documents in each row; tokens see only tokens with their own number.

    Args:
        documents: (B, S) integers, equal ones side by side. Padding has a number of its own, and
            sees itself.
        positions: (B, S) int64.
        cu_seqlens: as `pipeline.data.loader.document_bounds` has it; flash attention needs it.
    """
    same_BSS = documents[:, :, None] == documents[:, None, :]
    num_rows, length = documents.shape
    slots = torch.arange(num_rows * length, dtype=torch.int32, device=documents.device)
    slots = slots.view(num_rows, length)
    changes = documents[:, 1:] != documents[:, :-1]
    ends = torch.ones_like(documents[:, :1], dtype=torch.bool)
    first = torch.where(torch.cat((ends, changes), 1), slots, slots[:, :1]).cummax(1).values
    last = torch.where(torch.cat((changes, ends), 1), slots, slots[:, -1:])
    # From the right: the nearest end at or behind each slot.
    last = last.flip(1).cummin(1).values.flip(1)
    span = torch.stack((first, last + 1), -1).flatten(0, 1)
    bounds = _equal_bounds(slots)
    return Layout(positions, same_BSS[:, None], None, span.repeat(1, 2), bounds, cu_seqlens)


def padded(lengths: Tensor, num_slots: int) -> Layout:
    """Lay out one document in each row, padded at the end; padding sees the document, too.

    `lengths` (B,) are at least 1; `num_slots`, S, is at least the longest.
    """
    positions = torch.arange(num_slots, device=lengths.device).expand(len(lengths), -1)
    allowed_BS = positions < lengths[:, None]
    slots = torch.arange(positions.numel(), dtype=torch.int32, device=lengths.device)
    slots = slots.view(positions.shape)
    start = slots[:, :1].expand_as(slots)
    stop = start + lengths[:, None].int()
    # Padding is seen by none.
    seen_by = (start, start + num_slots * allowed_BS.int())
    spans = torch.stack((start, stop, *seen_by), -1).flatten(0, 1)
    return Layout(positions, allowed_BS[:, None, None, :], None, spans, _equal_bounds(slots))


def masked(mask_BS: Tensor) -> Layout:
    """Lay out one document in each row, padded on either side; padding sees the document, too.

    `mask_BS` is true at tokens.
    """
    seen = mask_BS.bool()
    positions = (seen.long().cumsum(-1) - 1).clamp(min=0)
    # A row without tokens sees all of itself: a softmax over nothing would be NaN, and reach every
    # parameter's gradient.
    seen = seen | ~seen.any(-1, keepdim=True)
    return Layout(positions, seen[:, None, None, :], None)


def packed(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> Layout:
    """Lay out documents end to end, without padding. No host synchronisation.

    `cu_seqlens` (B + 1,) are 0, then the end of each document; none is empty. T, `num_tokens`, is
    the last.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    # Without the size the host would have to wait for the GPU to sum up the lengths.
    row = torch.repeat_interleave(lengths, output_size=num_tokens)
    positions = torch.arange(num_tokens, device=row.device) - starts[row]
    allowed_BS = torch.arange(max_seqlen, device=row.device) < lengths[:, None]
    slots = row * max_seqlen + positions
    bounds = cu_seqlens.int()
    span = torch.stack((bounds[:-1][row], bounds[1:][row]), -1)
    return Layout(positions, allowed_BS[:, None, None, :], slots, span.repeat(1, 2), bounds, bounds)


def _equal_bounds(slots: Tensor) -> Tensor:
    """Return the (B + 1,) int32 bounds of windows that are the rows of (B, S) slots."""
    return torch.cat((slots[:, 0], slots[-1, -1:] + 1))
