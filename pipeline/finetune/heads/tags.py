"""A tag for each token, alone or by a CRF."""

from typing import Any

import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.finetune.heads.base import OnTokens
from pipeline.model import heads
from pipeline.tasks.types import HeadSpec


class TagsHead(OnTokens):
    """Tags, and transitions between them with head.decoder=crf."""

    def __init__(self, config: ModelConfig, spec: HeadSpec) -> None:
        super().__init__(config, spec)
        if spec.decoder == "crf":
            self.crf = heads.Crf(self.linear.output.out_features)

    def losses(self, scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """(B,)."""
        if self.spec.decoder == "crf":
            return self.crf.losses(scores, inputs["tags"])
        return heads.token_losses(scores, inputs["tags"])

    @torch.no_grad()
    def decode(self, scores: Tensor, inputs: dict[str, Tensor]) -> list[Any]:
        """Return the tags of slots as numbers, `heads.IGNORED` where there is none."""
        scores, labelled = scores.float(), inputs["text"]
        if self.spec.decoder == "crf":
            return self.crf.decode(scores, labelled).tolist()  # type: ignore[no-any-return]
        tags = scores.argmax(-1).masked_fill(~labelled, heads.IGNORED)
        return tags.tolist()  # type: ignore[no-any-return]
