"""The transformers side of an exported folder; `pipeline.use.hf` puts the model's code above it.

Not imported by this project: it becomes the lower half of `modeling_postnorm.py`, which needs torch
and transformers only.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from pipeline.config.model import DEFAULTS
from pipeline.model.encoder import Encoder, MaskedHead, initialise_matrix
from pipeline.model.heads import masked_documents, pool
from pipeline.model.layers import Residual, RMSNorm, Trace
from pipeline.model.layout import Layout, masked


class PostnormConfig(PretrainedConfig):
    """The architecture; fields are those of Postnorm's `ModelConfig`."""

    model_type = "postnorm"
    attribute_map = {  # noqa: RUF012 - transformers wants a plain class attribute
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_size",
        "max_position_embeddings": "max_positions",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }

    # Of heads: what `pool` reads, and the dropout before them, None for that of the encoder.
    pool = "cls"
    classifier_dropout = None

    def __init__(self, **values: Any) -> None:
        # Tools of transformers make a config without arguments, to compare with.
        super().__init__(**{**DEFAULTS, **values})

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
    """The part that all models share.

    Attention is torch's sdpa, whatever `attn_implementation` says, but where scores are carried
    from layer to layer or probabilities are asked for.
    """

    config_class = PostnormConfig
    base_model_prefix = "postnorm"
    supports_gradient_checkpointing = True
    # Else Trainer takes losses for sums over accumulated batches, and accumulates too much.
    # Our losses are means over rows.
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _no_split_modules: ClassVar = ["Layer"]

    @property
    def _encoder(self) -> Encoder:
        [encoder] = (module for module in self.modules() if isinstance(module, Encoder))
        return encoder

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; in a masked language model it is the output matrix too."""
        return self._encoder.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self._encoder.token_embedding = value

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        """Recompute layers in the backward pass; gradients stay the same to the bit."""
        self._encoder.checkpoint_activations(1 if enable else None)
        # transformers looks here whether it is on.
        self._encoder.gradient_checkpointing = enable  # type: ignore[assignment]

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what no file holds: transformers makes models without storage."""
        if isinstance(module, Encoder):
            module.set_alpha(1.0)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            # transformers' `nn.init` leaves alone what was loaded, but not parts of a matrix.
            if not getattr(module.weight, "_is_hf_initialized", False):
                [name] = (name for name, child in self.named_modules() if child is module)
                initialise_matrix(name, module, self.config)
        elif isinstance(module, (nn.LayerNorm, RMSNorm)) and module.weight is not None:
            nn.init.ones_(module.weight)
        elif isinstance(module, Residual) and module.gain is not None:
            nn.init.zeros_(module.gain)
        for name in ("bias", "head_bias"):
            if isinstance(getattr(module, name, None), nn.Parameter):
                nn.init.zeros_(getattr(module, name))

    def _returned(self, output: ModelOutput, return_dict: bool | None) -> Any:
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()


class PostnormModel(PostnormPreTrainedModel):
    """Token ids to hidden states."""

    def __init__(self, config: PostnormConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Compute (B, S, D) hidden states of (B, S) ids, or of (B, S, E) embeddings of tokens.

        Positions count the tokens that the (B, S) mask shows, unless they are given. A (B, 1, S, S)
        mask says which token (row) sees which: true or 1, or, as a number that is added to scores,
        0; positions then count all slots.

        Raises:
            ValueError: ids and embeddings are both given or both missing, or there are more
                positions than the model has.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        config = self.config
        self._require_positions(tokens.shape[1], position_ids)
        if attention_mask is None:
            attention_mask = torch.ones(tokens.shape[:2], device=tokens.device)
        layout = _layout(attention_mask)
        if position_ids is not None:
            layout = layout._replace(positions=position_ids.expand(tokens.shape[:2]))
        attentions = _first(output_attentions, config.output_attentions)
        hidden = _first(output_hidden_states, config.output_hidden_states)
        if token_type_ids is None:  # called as a module, the embedding may lie elsewhere (below)
            token_type_ids = torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        # Without a trace, training may recompute layers.
        trace = Trace(keep_probabilities=attentions) if attentions or hidden else None
        x_BSD = self.encoder(tokens, layout, segments=token_type_ids, trace=trace)
        output = BaseModelOutputWithPooling(
            last_hidden_state=x_BSD,
            pooler_output=self.encoder.pool(_first_token(x_BSD, attention_mask))
            if config.pooler
            else None,
            hidden_states=tuple(trace.hidden) if trace and hidden else None,
            attentions=tuple(trace.probabilities) if trace and attentions else None,
        )
        return self._returned(output, return_dict)

    def _require_positions(self, length: int, position_ids: Tensor | None) -> None:
        if self.config.positions != "learned":
            return
        limit = self.config.max_positions - self.config.position_offset
        asked = length if position_ids is None else int(position_ids.max()) + 1
        if asked > limit:
            raise ValueError(
                f"the input has {asked} positions, this model has {limit}; cut it, such as with "
                f"tokenizer(..., truncation=True, max_length={limit})"
            )


class PostnormWithHead(PostnormPreTrainedModel):
    """A model that makes logits, and a loss of labels."""

    output_class: type[ModelOutput]

    def __init__(self, config: PostnormConfig) -> None:
        super().__init__(config)
        self.postnorm = PostnormModel(config)
        self.add_head()
        self.post_init()

    def add_head(self) -> None:
        """Make a classifier; its weights are initialised afterwards."""
        dropout = _first(self.config.classifier_dropout, self.config.dropout)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)

    def head_logits(self, states: Any, mask_BS: Tensor | None) -> Tensor:
        """Return logits of the base model's output: those of every token here.

        Not `score`, where PEFT looks for the matrix of a classifier.
        """
        return self.classifier(self.dropout(states.last_hidden_state))  # type: ignore[no-any-return]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a mean cross-entropy, of tokens here; labels of -100 are left out."""
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Compute logits, and the loss of labels; other arguments as in `PostnormModel`."""
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        return_dict = options.pop("return_dict", None)
        hidden = _first(options.pop("output_hidden_states", None), self.config.output_hidden_states)
        needed = hidden or self.config.pool == "first_last_avg"
        states = self.postnorm(*given, output_hidden_states=needed, return_dict=True, **options)
        logits = self.head_logits(states, attention_mask)
        output = self.output_class(
            loss=None if labels is None else self.loss(logits, labels),
            logits=logits,
            hidden_states=states.hidden_states if hidden else None,
            attentions=states.attentions,
        )
        return self._returned(output, return_dict)


class PostnormForMaskedLM(PostnormWithHead, MaskedHead):
    """The model as it was pre-trained; (B, S, V) logits."""

    output_class = MaskedLMOutput

    def add_head(self) -> None:
        """Make the head whose output matrix is the token embedding."""
        self.make_head()

    def head_logits(self, states: Any, mask_BS: Tensor | None) -> Tensor:
        """Return logits of every token."""
        embedding = self._encoder.token_embedding
        # accelerate offloads weights: they come when their module is called, which this is not.
        hook = getattr(embedding, "_hf_hook", None)
        if hook is not None:
            hook.pre_forward(embedding)
        logits = self.project(states.last_hidden_state, embedding.weight)
        return logits if hook is None else hook.post_forward(embedding, logits)  # type: ignore[no-any-return]

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> nn.Module:
        """Resize the token embedding, and the bias of logits with it: 0 for new tokens."""
        embedding: nn.Embedding = super().resize_token_embeddings(*arguments, **options)
        bias_V = self._output_bias()
        if bias_V is not None:
            grown = F.pad(bias_V.detach(), (0, embedding.num_embeddings - len(bias_V)))
            self.head_bias = nn.Parameter(grown, requires_grad=bias_V.requires_grad)
        return embedding


class PostnormForTokenClassification(PostnormWithHead):
    """A linear classifier on every token; (B, S, num_labels) logits."""

    output_class = TokenClassifierOutput


class PostnormForSequenceClassification(PostnormWithHead):
    """A linear classifier or regression on what `config.pool` makes; (B, num_labels) logits."""

    output_class = SequenceClassifierOutput

    def add_head(self) -> None:
        """Make a classifier, and check what it reads."""
        known = ("cls", "mean", "first_last_avg", *["pooler"] * bool(self.config.pooler))
        if self.config.pool not in known:
            raise ValueError(f"pool={self.config.pool!r}, this model has {', '.join(known)}")
        super().add_head()

    def head_logits(self, states: Any, mask_BS: Tensor | None) -> Tensor:
        """Return logits of rows."""
        x_BSD = states.last_hidden_state
        if mask_BS is not None and mask_BS.ndim == 4 and self.config.pool not in ("cls", "pooler"):
            raise ValueError(
                f"pool={self.config.pool!r} needs an attention_mask of (rows, tokens): one of "
                "(rows, 1, tokens, tokens) does not say which tokens are padding"
            )
        if mask_BS is None or mask_BS.ndim == 4:
            mask_BS = torch.ones_like(x_BSD[..., 0])
        hidden = states.hidden_states or (x_BSD,)
        pooled = pool(self.config.pool, hidden, masked_documents(mask_BS), self._encoder)
        return self.classifier(self.dropout(pooled))  # type: ignore[no-any-return]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of `config.problem_type`; None takes what the labels look like."""
        kind = self.config.problem_type
        if kind is None:
            several = "multi_label" if labels.is_floating_point() else "single_label"
            kind = "regression" if self.config.num_labels == 1 else f"{several}_classification"
        if kind == "regression":
            return F.mse_loss(logits.float(), labels.view_as(logits).float())
        if kind == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
        return super().loss(logits, labels)


class PostnormForMultipleChoice(PostnormForSequenceClassification):
    """A score for each choice; inputs are (B, C, S), logits (B, C)."""

    def add_head(self) -> None:
        """Make a classifier with one output."""
        super().add_head()
        self.classifier = nn.Linear(self.config.hidden_size, 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Compute logits, and the loss of (B,) labels; hidden states are those of B * C rows."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None:
            raise ValueError("pass input_ids or inputs_embeds, of shape (rows, choices, ...)")
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        rows = (each if each is None else each.flatten(0, 1) for each in given)
        return_dict = options.pop("return_dict", None)
        states = super().forward(*rows, return_dict=True, **options)
        logits = states.logits.view(tokens.shape[:2])
        output = MultipleChoiceModelOutput(
            loss=None if labels is None else F.cross_entropy(logits.float(), labels),
            logits=logits,
            hidden_states=states.hidden_states,
            attentions=states.attentions,
        )
        return self._returned(output, return_dict)


class PostnormForQuestionAnswering(PostnormWithHead):
    """Scores of each token as an answer's first and last; (B, S) logits of both."""

    output_class = TokenClassifierOutput

    def add_head(self) -> None:
        """Make two outputs without dropout, as BERT's."""
        self.dropout = nn.Dropout(_first(self.config.classifier_dropout, 0.0))
        self.qa_outputs = nn.Linear(self.config.hidden_size, 2)

    def head_logits(self, states: Any, mask_BS: Tensor | None) -> Tensor:
        """Return both logits of every token."""
        return self.qa_outputs(self.dropout(states.last_hidden_state))  # type: ignore[no-any-return]

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Compute logits, and the loss of (B,) positions; those outside the row are left out."""
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        return_dict = options.pop("return_dict", None)
        states = super().forward(*given, return_dict=True, **options)
        start_BS, end_BS = states.logits.float().unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            length = start_BS.shape[1]
            start_loss, end_loss = (
                F.cross_entropy(scores, gold.view(-1).clamp(0, length), ignore_index=length)
                for scores, gold in ((start_BS, start_positions), (end_BS, end_positions))
            )
            loss = (start_loss + end_loss) / 2
        output = QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_BS,
            end_logits=end_BS,
            hidden_states=states.hidden_states,
            attentions=states.attentions,
        )
        return self._returned(output, return_dict)


def _first_token(x_BSD: Tensor, mask: Tensor) -> Tensor:
    """Take the state of [CLS], behind padding on the left, too."""
    if mask.ndim != 2:
        return x_BSD[:, 0]
    return x_BSD[torch.arange(len(x_BSD), device=x_BSD.device), mask.int().argmax(-1)]


def _layout(mask: Tensor) -> Layout:
    if mask.ndim != 4:
        return masked(mask)
    allowed = mask == 0 if mask.is_floating_point() else mask.bool()
    allowed = allowed | ~allowed.any(-1, keepdim=True)  # a softmax over nothing would be NaN
    num_rows, length = mask.shape[0], mask.shape[-1]
    positions = torch.arange(length, device=mask.device).expand(num_rows, -1)
    return Layout(positions, allowed, None)


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given
