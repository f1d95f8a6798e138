"""`python -m pipeline fill-mask`: the most likely tokens at each [MASK] of a text."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.data.shards import CLS_ID, MASK_ID, NUM_SPECIAL, SEP_ID, SPECIAL_TOKENS
from pipeline.errors import DataError
from pipeline.export.weights import load_run


@dataclass(frozen=True)
class Candidate:
    """A token that may stand at a mask."""

    token: str
    """With its leading space, if it has one."""
    probability: float


def fill_mask(run_dir: Path, text: str, *, top: int) -> list[list[Candidate]]:
    """Predicts each `[MASK]` of a text.

    Args:
        run_dir: run folder, or a folder that `export` wrote.
        text: with at least one `[MASK]`; each stands for one token.
        top: number of candidates, most likely first.

    Raises:
        DataError: the text has no `[MASK]`.
        CheckpointError: there is no model in `run_dir`.
    """
    if SPECIAL_TOKENS[MASK_ID] not in text:
        raise DataError(f"text {text!r} has no [MASK]; write one where a token is to be predicted")
    if top < 1:
        raise DataError(f"--top {top} must be at least 1")
    trained = load_run(run_dir)
    ids = torch.tensor([[CLS_ID, *trained.tokenizer.encode_with_masks(text), SEP_ID]])
    masked_index = torch.nonzero(ids[0] == MASK_ID)[:, 0]
    with torch.no_grad():
        logits = trained.model(
            ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], masked_index
        )
    # Specials are never a target in training; the model's opinion of them means nothing.
    logits[:, :NUM_SPECIAL] = float("-inf")
    logits[:, trained.tokenizer.vocab_size :] = float("-inf")
    best = logits.softmax(-1).topk(min(top, trained.tokenizer.vocab_size - NUM_SPECIAL))
    return [
        [
            Candidate(trained.tokenizer.piece(token), probability)
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
