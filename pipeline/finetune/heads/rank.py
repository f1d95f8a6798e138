"""Scores of the candidates of a query, by a softmax over the whole list."""

import torch
from torch import Tensor

from pipeline.finetune.heads.pooled import PooledHead


class RankHead(PooledHead):
    """A linear layer on the vector of a candidate's row."""

    def losses(self, scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """(U,) cross-entropies of the softmax of scores with the shares of relevance.

        A query without relevance has loss 0. Source: Bruch et al. 2019, "An analysis of the softmax
        cross entropy loss for learning-to-rank with binary relevance".
        """
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        # Missing candidates have -inf, and 0 times that is NaN.
        logs = wide.log_softmax(-1).masked_fill(~inputs["choices"], 0)
        return -(inputs["labels"] * logs).sum(-1)
