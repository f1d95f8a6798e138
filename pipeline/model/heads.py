"""Heads on an encoder's hidden states: pooling, classes, choices, tags, spans, answers.

A head makes scores; functions beside it make the loss of each row and the decision. Losses and
dynamic programs are fp32 at least. A row without tokens has loss 0.

Shapes: B rows of S slots, T tokens end to end, D hidden size, P documents, K classes or span
types, C choices, H head size. A mask is true at what counts; `-inf` are scores of what does not.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.model.encoder import Encoder, initialise
from pipeline.model.layers import rotary_tables, rotate

Pool = Literal["cls", "mean", "first_last_avg", "pooler"]
Kind = Literal["single_label", "multi_label", "regression"]

IGNORED = -100
"""The label of a token that has none, as in `torch.nn.functional.cross_entropy`."""

_NEVER = float("-inf")


class Documents(NamedTuple):
    """Which document each token belongs to, however documents lie in a batch."""

    first: Tensor
    """(P,) int64 flat numbers of first tokens, b * S + s in rows."""
    owner: Tensor
    """(B * S,) or (T,) int64 document of each token; P at padding."""


def masked_documents(mask_BS: Tensor) -> Documents:
    """One document in each row, padded on either side; a row of padding is a document, too."""
    num_rows, length = mask_BS.shape
    row = torch.arange(num_rows, device=mask_BS.device)
    # The first of equal values: a row's first token, or slot 0 of a row of padding.
    first = row * length + mask_BS.int().argmax(-1)
    return Documents(first, torch.where(mask_BS.bool(), row[:, None], num_rows).flatten())


def packed_documents(cu_seqlens: Tensor, num_tokens: int) -> Documents:
    """Documents end to end: (P + 1,) bounds as in `pipeline.model.layout.packed`."""
    bounds = cu_seqlens.long()
    owner = torch.repeat_interleave(bounds.diff(), output_size=num_tokens)
    return Documents(bounds[:-1], owner)


def pool(
    kind: Pool, hidden: Sequence[Tensor], documents: Documents, encoder: Encoder | None = None
) -> Tensor:
    """Make one vector of each document.

    Source of the kinds: bojone/BERT-whitening (kexue.fm/archives/8069). "first" is the output of
    the first layer, not of the embeddings.

    Args:
        kind: the first token, that through BERT's pooler, the mean of all tokens, or that mean over
            the first and last layer.
        hidden: (..., D) states as `Trace.hidden`; all but "first_last_avg" read the last alone.
        documents: of the tokens.
        encoder: the one with the pooler, where it is asked for.

    Returns:
        (P, D) in the dtype of the states; 0 for the mean of a document without tokens.
    """
    x_TD = hidden[-1].flatten(0, -2)
    if kind == "cls":
        return x_TD[documents.first]
    if kind == "pooler":
        assert encoder is not None, "the caller checks that there is a pooler"
        return encoder.pool(x_TD[documents.first])
    wide_TD = x_TD.to(_wide(x_TD))
    if kind == "first_last_avg":
        wide_TD = (hidden[1].flatten(0, -2).to(wide_TD.dtype) + wide_TD) / 2
    # The last row takes the padding.
    sums = wide_TD.new_zeros(len(documents.first) + 1, x_TD.shape[-1])
    counts = torch.zeros_like(sums[:, :1])
    sums = sums.index_add(0, documents.owner, wide_TD)
    counts = counts.index_add(0, documents.owner, torch.ones_like(wide_TD[:, :1]))
    return (sums / counts.clamp(min=1))[:-1].to(x_TD.dtype)


class LinearHead(nn.Module):
    """Dropout and one linear layer: classes of pooled vectors, tags of tokens, start and end.

    Initialised like the encoder's matrices. Source: CLUEbenchmark baselines by bojone
    (`bojone/CLUE-bert4keras`), which have no hidden layer.
    """

    def __init__(self, config: ModelConfig, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(config.hidden_size, num_outputs)
        initialise(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) scores of (..., D)."""
        return self.output(self.dropout(x))  # type: ignore[no-any-return]


def class_losses(kind: Kind, scores_BK: Tensor, labels: Tensor) -> Tensor:
    """Compute the (B,) losses of rows.

    Args:
        kind: cross-entropy, `multi_label_losses`, or the squared error.
        scores_BK: K is 1 for the regression of one value.
        labels: (B,) int64, (B, K) bool, or (B,) numbers.
    """
    scores_BK = scores_BK.to(_wide(scores_BK))
    if kind == "multi_label":
        return multi_label_losses(scores_BK, labels.bool())
    if kind == "regression":
        return (scores_BK[:, 0] - labels.to(scores_BK.dtype)).square()
    return F.cross_entropy(scores_BK, labels, reduction="none")


def multi_label_losses(scores: Tensor, gold: Tensor) -> Tensor:
    """Compute log(1 + sum over others of e^s) + log(1 + sum over gold of e^-s), (...).

    A class is chosen if s > 0. Source: Su 2020, kexue.fm/archives/7359.

    `scores` are (..., K), `gold` is bool alike; a score of -inf counts nowhere and cannot be gold.
    """
    zero = torch.zeros_like(scores[..., :1])
    # -inf in a sum of exponentials is a class that is not there.
    others = torch.where(gold, _NEVER, scores)
    chosen = torch.where(gold, -scores, _NEVER)
    parts = (torch.cat((zero, part), -1).logsumexp(-1) for part in (others, chosen))
    return sum(parts, torch.zeros_like(zero[..., 0]))


def choice_scores(head: LinearHead, pooled_XD: Tensor, mask_BC: Tensor) -> Tensor:
    """(B, C) scores of the choices of each row, -inf where a row has fewer.

    `pooled_XD` are the X real choices alone, row by row, so that fillers cost nothing.
    """
    scores_X = head(pooled_XD)[:, 0]
    nothing = torch.full(mask_BC.shape, _NEVER, dtype=scores_X.dtype, device=scores_X.device)
    return nothing.masked_scatter(mask_BC.bool(), scores_X)


def token_losses(scores_BSK: Tensor, tags_BS: Tensor) -> Tensor:
    """(B,) means of the cross-entropies of a row's tokens; tags of `IGNORED` do not count."""
    wide = scores_BSK.to(_wide(scores_BSK)).transpose(1, 2)
    losses = F.cross_entropy(wide, tags_BS, ignore_index=IGNORED, reduction="none")
    return losses.sum(-1) / (tags_BS != IGNORED).sum(-1).clamp(min=1)


class Crf(nn.Module):
    """A linear-chain conditional random field over K tags.

    Tokens that the mask leaves out (padding, [CLS], word continuations) are no part of the chain,
    wherever they lie. Source: Lafferty, McCallum and Pereira 2001, section 3.
    """

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        # From 0: before the first update tags are independent, as without a CRF.
        self.transitions = nn.Parameter(torch.zeros(num_tags, num_tags))
        """Score of a transition from the row's tag to the column's."""
        self.start = nn.Parameter(torch.zeros(num_tags))
        self.end = nn.Parameter(torch.zeros(num_tags))

    def losses(self, scores_BSK: Tensor, tags_BS: Tensor) -> Tensor:
        """(B,) negative log-likelihoods of the tags; tokens of `IGNORED` are left out."""
        mask_BS = tags_BS != IGNORED
        scores, mask, order = _to_front(scores_BSK, mask_BS)
        tags = tags_BS.masked_fill(~mask_BS, 0).gather(1, order)
        return self._log_partition(scores, mask) - self._path_score(scores, tags, mask)

    def decode(self, scores_BSK: Tensor, mask_BS: Tensor) -> Tensor:
        """Find the (B, S) int64 tags of the best paths, `IGNORED` where the mask is false.

        Of equal paths the one whose tags, read from the end, come first. Source: Viterbi 1967.
        """
        scores, mask, order = _to_front(scores_BSK, mask_BS.bool())
        state_BK, steps = self.start.to(scores.dtype) + scores[:, 0], []
        stay_BK = torch.arange(len(self.start), device=scores.device).expand_as(state_BK)
        for step in range(1, mask.shape[1]):
            best, source_BK = (state_BK[:, :, None] + self.transitions).max(1)
            state_BK = torch.where(mask[:, step, None], best + scores[:, step], state_BK)
            # Behind a row's end the path stays where it is, so that all rows are read back from the
            # last step.
            steps.append(torch.where(mask[:, step, None], source_BK, stay_BK))
        tag_B1 = (state_BK + self.end).argmax(-1, keepdim=True)
        path = [tag_B1]
        for source_BK in reversed(steps):
            tag_B1 = source_BK.gather(1, tag_B1)
            path.append(tag_B1)
        tags_BS = torch.cat(path[::-1], 1).masked_fill(~mask, IGNORED)
        return torch.empty_like(tags_BS).scatter(1, order, tags_BS)

    def _log_partition(self, scores_BSK: Tensor, mask_BS: Tensor) -> Tensor:
        state_BK = self.start.to(scores_BSK.dtype) + scores_BSK[:, 0]
        for step in range(1, mask_BS.shape[1]):
            arrived = (state_BK[:, :, None] + self.transitions).logsumexp(1) + scores_BSK[:, step]
            state_BK = torch.where(mask_BS[:, step, None], arrived, state_BK)
        return (state_BK + self.end).logsumexp(-1).where(mask_BS[:, 0], 0)

    def _path_score(self, scores_BSK: Tensor, tags_BS: Tensor, mask_BS: Tensor) -> Tensor:
        emitted = scores_BSK.gather(2, tags_BS[..., None])[..., 0].where(mask_BS, 0).sum(-1)
        moved = self.transitions[tags_BS[:, :-1], tags_BS[:, 1:]].where(mask_BS[:, 1:], 0).sum(-1)
        last = tags_BS.gather(1, (mask_BS.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]
        ends = self.start[tags_BS[:, 0]] + self.end[last]
        return (emitted + moved + ends).where(mask_BS[:, 0], 0)


def _to_front(scores_BSK: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move what the mask keeps to the front of rows; also the moved mask, and where from."""
    # Stable, or tokens of a chain would change places.
    order_BS = (~mask_BS).int().argsort(dim=1, stable=True)
    scores = scores_BSK.to(_wide(scores_BSK)).gather(1, order_BS[..., None].expand_as(scores_BSK))
    return scores, mask_BS.gather(1, order_BS), order_BS


class TypedSpan(NamedTuple):
    """Tokens of one type."""

    type: int
    start: int
    end: int
    """Exclusive."""


class GlobalPointer(nn.Module):
    """Scores every span of every type by its first and last token, so spans may nest.

    Sources: Su 2021 (kexue.fm/archives/8373); bojone/bert4keras `bert4keras/layers.py`.
    """

    def __init__(
        self, config: ModelConfig, num_types: int, *, dropout: float, head_size: int = 64
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.dropout = nn.Dropout(dropout)
        self.query_key = nn.Linear(config.hidden_size, 2 * num_types * head_size)
        initialise(self, config)

    def forward(self, x_BSD: Tensor, positions_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """(B, K, S, S) scores of spans from row to column, both inclusive.

        -inf where the end lies before the start or either is masked, fp32 at least.
        """
        both = self.query_key(self.dropout(x_BSD))
        cos_sin = rotary_tables(positions_BS, self.head_size, 10000.0, both.dtype)
        query, key = both.unflatten(-1, (-1, 2, self.head_size)).unbind(-2)
        query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        scores = torch.einsum("bmkh,bnkh->bkmn", query, key) / self.head_size**0.5
        mask_BS = mask_BS.bool()
        legal_BSS = (mask_BS[:, :, None] & mask_BS[:, None, :]).triu()
        return torch.where(legal_BSS[:, None], scores.to(_wide(scores)), _NEVER)


def span_losses(scores_BKSS: Tensor, gold_BKSS: Tensor) -> Tensor:
    """(B,) means over types of `multi_label_losses` over the spans of a type."""
    return multi_label_losses(scores_BKSS.flatten(2), gold_BKSS.flatten(2)).mean(-1)


def decode_spans(scores_BKSS: Tensor) -> list[list[TypedSpan]]:
    """Return each row's spans with a score above 0, by type, start and end; they may nest."""
    rows: list[list[TypedSpan]] = [[] for _ in scores_BKSS]
    for row, kind, start, last in (scores_BKSS > 0).nonzero().tolist():
        rows[row].append(TypedSpan(kind, start, last + 1))
    return rows


class AnswerSpans(NamedTuple):
    """The best legal answer of each window."""

    start: Tensor
    """(B,) int64 slot of the first token."""
    last: Tensor
    """(B,) int64 slot of the last token."""
    score: Tensor
    """(B,) sum of both scores; -inf where no pair is legal."""
    null: Tensor
    """(B,) score of "no answer": both scores of slot 0, [CLS]."""


def answer_losses(
    scores_BS2: Tensor, allowed_BS: Tensor, start_B: Tensor, last_B: Tensor
) -> Tensor:
    """(B,) means of the cross-entropies of start and last token among the allowed slots.

    Slot 0 is always allowed: it is the gold of a window without the answer. Source:
    google-research/bert `run_squad.py`.
    """
    allowed = allowed_BS.bool().index_fill(1, torch.zeros(1, dtype=torch.int64).to(start_B), True)
    wide = scores_BS2.to(_wide(scores_BS2)).masked_fill(~allowed[..., None], _NEVER)
    start, last = (
        F.cross_entropy(wide[..., side], gold, reduction="none")
        for side, gold in enumerate((start_B, last_B))
    )
    return (start + last) / 2


def best_answers(
    scores_BS2: Tensor, starts_BS: Tensor, allowed_BS: Tensor, max_tokens: int
) -> AnswerSpans:
    """Find the best pair of start <= last of each window among all pairs, not among n best.

    Args:
        scores_BS2: of `LinearHead` with two outputs.
        starts_BS: true at the tokens of the context that an answer may begin at.
        allowed_BS: true at those that it may end at.
        max_tokens: of an answer.
    """
    wide = scores_BS2.to(_wide(scores_BS2))
    null = wide[:, 0].sum(-1)
    start_BS = wide[..., 0].masked_fill(~starts_BS.bool(), _NEVER)
    last_BS = wide[..., 1].masked_fill(~allowed_BS.bool(), _NEVER)
    num_slots = start_BS.shape[1]
    near_SS = torch.ones(num_slots, num_slots, dtype=torch.bool, device=wide.device)
    near_SS = near_SS.triu().tril(max_tokens - 1)
    pairs = (start_BS[:, :, None] + last_BS[:, None, :]).masked_fill(~near_SS, _NEVER)
    score, place = pairs.flatten(1).max(-1)
    return AnswerSpans(place // num_slots, place % num_slots, score, null)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
