"""The transformers side of an exported folder; `pipeline.use.hf` puts the model's code above it.

Not imported by this project: it becomes the lower half of `modeling_postnorm.py`, which needs torch
and transformers only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
)

from pipeline.model.encoder import Encoder, MaskedLanguageModel
from pipeline.model.layers import Trace
from pipeline.model.layout import masked


class PostnormConfig(PretrainedConfig):
    """The architecture; fields are those of Postnorm's `ModelConfig`."""

    model_type = "postnorm"
    attribute_map = {  # noqa: RUF012 - transformers wants a plain class attribute
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_size",
        "max_position_embeddings": "max_positions",
    }

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return int(self.hidden_size // self.num_heads)

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return int(self.embedding_size or self.hidden_size)

    @property
    def num_distinct_layers(self) -> int:
        """Layers with weights of their own."""
        return 1 if self.share_layers else int(self.num_layers)


class PostnormPreTrainedModel(PreTrainedModel):
    """The part that all models share."""

    config_class = PostnormConfig
    base_model_prefix = "postnorm"

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; in a masked language model it is the output matrix too."""
        [encoder] = (module for module in self.modules() if isinstance(module, Encoder))
        return encoder.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        [encoder] = (module for module in self.modules() if isinstance(module, Encoder))
        encoder.token_embedding = value

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a head made for fine-tuning; the encoder initialises its weights itself."""
        if isinstance(module, Encoder):
            # transformers 5 makes models without storage and fills buffers that no file holds with
            # whatever the memory has: without this line alpha is a random number.
            module.set_alpha(1.0)
        if isinstance(module, nn.Linear) and module is getattr(self, "classifier", None):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class PostnormModel(PostnormPreTrainedModel):
    """Token ids to hidden states."""

    def __init__(self, config: PostnormConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPooling:
        """Compute (B, S, D) hidden states of (B, S) ids."""
        layout = masked(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
        trace = Trace(keep_probabilities=bool(output_attentions))
        x_BSD = self.encoder(input_ids, layout, segments=token_type_ids, trace=trace)
        return BaseModelOutputWithPooling(
            last_hidden_state=x_BSD,
            pooler_output=self.encoder.pool(x_BSD[:, 0]) if self.config.pooler else None,
            hidden_states=tuple(trace.hidden) if output_hidden_states else None,
            attentions=tuple(trace.probabilities) if output_attentions else None,
        )


class PostnormForMaskedLM(PostnormPreTrainedModel):
    """The model as it was pre-trained."""

    def __init__(self, config: PostnormConfig) -> None:
        super().__init__(config)
        self.postnorm = MaskedLanguageModel(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> MaskedLMOutput:
        """Compute (B, S, V) logits of (B, S) ids; labels of -100 are left out of the loss."""
        layout = masked(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
        trace = Trace(keep_probabilities=False)
        x_BSD = self.postnorm.encoder(input_ids, layout, segments=token_type_ids, trace=trace)
        logits = self.postnorm.head(x_BSD)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        hidden = tuple(trace.hidden) if output_hidden_states else None
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=hidden)


class PostnormForSequenceClassification(PostnormPreTrainedModel):
    """A linear classifier, or regression with one label, on the first token."""

    def __init__(self, config: PostnormConfig) -> None:
        super().__init__(config)
        self.postnorm = PostnormModel(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Compute (B, num_labels) logits of (B, S) ids."""
        x_BSD = self.postnorm(input_ids, attention_mask, token_type_ids).last_hidden_state
        logits = self.classifier(self.dropout(x_BSD[:, 0]))
        loss = None
        if labels is not None and self.config.num_labels == 1:
            loss = F.mse_loss(logits[:, 0], labels.to(logits.dtype))
        elif labels is not None:
            loss = F.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
