"""`python -m pipeline fill-mask`: the most likely tokens at each [MASK] of a text."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.errors import DataError
from pipeline.model.layout import padded
from pipeline.use.export import load_trained


@dataclass(frozen=True)
class Candidate:
    """A token that may stand at a mask."""

    token: str
    """With its leading space, if it has one."""
    probability: float


def fill_mask(source: Path, text: str, *, top: int) -> list[list[Candidate]]:
    """Predicts each `[MASK]` of a text.

    Args:
        source: run folder, or model folder.
        text: with at least one `[MASK]`; each stands for one token.
        top: number of candidates, most likely first.

    Raises:
        DataError: the text has no `[MASK]`, or is longer than the model's positions.
        CheckpointError: there is no model in `source`, or no tokenizer.
    """
    if top < 1:
        raise DataError(f"--top {top} must be at least 1")
    trained = load_trained(source)
    tokenizer = trained.require_tokenizer()
    encoded = [tokenizer.cls_id, *tokenizer.encode_with_masks(text), tokenizer.sep_id]
    if tokenizer.mask_id not in encoded:
        raise DataError(f"text {text!r} has no [MASK]; write one where a token is to be predicted")
    limit = trained.model.config.longest_document
    if limit and len(encoded) > limit:
        raise DataError(f"text has {len(encoded)} tokens, the model has {limit} positions")
    ids = torch.tensor([encoded])
    masked_index = torch.nonzero(ids[0] == tokenizer.mask_id)[:, 0]
    with torch.no_grad():
        layout = padded(torch.tensor([ids.shape[1]]), ids.shape[1])
        logits = trained.model(ids, layout, masked_index)
    # Specials are never a target in training; the model's opinion of them means nothing. Nor does
    # that of rows beyond the vocabulary.
    logits[:, sorted(tokenizer.special_ids)] = float("-inf")
    logits[:, tokenizer.vocab_size :] = float("-inf")
    best = logits.softmax(-1).topk(min(top, tokenizer.vocab_size - len(tokenizer.special_ids)))
    return [
        [
            Candidate(tokenizer.piece(token), probability)
            for probability, token in zip(probabilities, tokens, strict=True)
        ]
        for probabilities, tokens in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def text_table(masks: list[list[Candidate]]) -> str:
    """One line a mask."""
    return "\n".join(
        f"[MASK] {number}: "
        + "  ".join(f"{candidate.token!r} {candidate.probability:.3f}" for candidate in candidates)
        for number, candidates in enumerate(masks, start=1)
    )
