"""The first and the last token of an answer, or [CLS] for none."""

from typing import Any

import torch
from torch import Tensor

from pipeline.finetune.heads.base import OnTokens
from pipeline.model import heads


class AnswerHead(OnTokens):
    """Scores of starts and of ends."""

    def losses(self, scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """(B,)."""
        return heads.answer_losses(scores, inputs["text"], inputs["start"], inputs["last"])

    @torch.no_grad()
    def decode(self, scores: Tensor, inputs: dict[str, Tensor]) -> list[Any]:
        """Return (first, last, score, null) of the best answer of each window."""
        best = heads.best_answers(
            scores.float(), inputs["starts"], inputs["text"], self.spec.max_answer
        )
        return list(zip(*(values.tolist() for values in best), strict=True))
