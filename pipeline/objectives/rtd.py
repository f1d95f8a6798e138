"""Replaced-token detection (ELECTRA, Clark et al. 2020, arXiv 2003.10555, section 2).

A small generator learns masked language modelling. What it draws for the masked tokens is put into
the text, and the encoder, the discriminator, says of each token whether it is the original one. The
encoder is what is kept and fine-tuned. No gradient goes from the discriminator into the generator:
drawing has none. The tables of tokens, positions and segments, with the norm behind them, exist
once, in the encoder; both use and train them (google-research/electra `modeling.py`,
`run_pretraining.py`).

Differences from google-research/electra: it draws the positions to mask with replacement, so that
some are drawn twice; here they differ. It draws a token as the largest of logits plus Gumbel noise;
here as the inverse of the summed probabilities at one number in [0, 1), which is the same
distribution from one draw a token, so that a step needs no random state.

Letters: B sequences of S slots, M masked slots, D hidden size, E embedding width, V vocabulary, T
slots of a batch end to end.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig, generator_of
from pipeline.data.loader import MicroBatch
from pipeline.kernels.loss import rows_of_chunk, vocabulary_loss
from pipeline.model.encoder import Encoder, EncoderModel, MaskedHead, initialise
from pipeline.model.layers import activate
from pipeline.model.layout import Layout, rows
from pipeline.objectives.base import Sum, Sums, weight_tensor
from pipeline.objectives.mlm import MaskedLanguageModeling

# Of one logit while a token is drawn: it, it over the temperature, its share, and the sum in fp64.
_DRAW_BYTES = 20


class Generator(MaskedHead):
    """An encoder without tables of its own, and an MLM head on it up to the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Without tables: a second name for those of the encoder would be saved, or forgotten.
        self.encoder = Encoder(config, embeds=False)
        self.make_head()

    def forward(self, embedded: Tensor, layout: Layout, masked_index: Tensor) -> Tensor:
        """Turn what `Encoder.embed` returned into (M, E) inputs of the output layer."""
        x = self.encoder(embedded, layout)
        return self._before_output(x.reshape(-1, self.config.hidden_size)[masked_index])

    @property
    def output_bias(self) -> Tensor | None:
        """(V,)."""
        return self._output_bias()


# By inversion with one counter-based draw a slot, no Gumbel noise over the vocabulary: the same
# token on any number of ranks. Sums are fp64: a GPU adds in another order each time.
@torch.no_grad()
def draw_tokens(
    x_ME: Tensor, weight_VE: Tensor, bias_V: Tensor | None, uniform: Tensor, temperature: float
) -> Tensor:
    """Draw (M,) int64 ids from softmax((x W^T + b) / temperature), at `uniform` (M,) in [0, 1).

    The drawn id is the first one up to which the probabilities add up to more than that share of
    all of them. It never has probability 0.
    """
    wide = torch.promote_types(x_ME.dtype, torch.float32)
    drawn = torch.empty(len(x_ME), dtype=torch.int64, device=x_ME.device)
    step = rows_of_chunk(len(x_ME), len(weight_VE) * _DRAW_BYTES)
    for first in range(0, len(x_ME), step):
        chunk = slice(first, first + step)
        logits = F.linear(x_ME[chunk], weight_VE, bias_V).to(wide) / temperature
        # A GPU may add up in another order each time: in fp64 no draw falls into the difference.
        up_to = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
        whole = up_to[:, -1:].contiguous()
        found = torch.searchsorted(up_to, uniform[chunk, None].double() * whole, right=True)
        # Behind the last id that adds something a draw of 1 would lie, and sums out of order.
        found = torch.minimum(found, torch.searchsorted(up_to, whole))
        # NaN is found nowhere; as an id, V would end the process before the step can be skipped.
        drawn[chunk] = found[:, 0].clamp(max=len(weight_VE) - 1)
    return drawn


class DiscriminatorHead(nn.Module):
    """Dense, gelu, and one logit for each token, above 0 if it looks replaced."""

    def __init__(self, config: ModelConfig) -> None:
        """Both layers have a bias, whatever the encoder has: most tokens are not replaced."""
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)
        initialise(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """(...) logits of (..., D) hidden states."""
        return self.output(activate(self.dense(x), "gelu")).squeeze(-1)  # type: ignore[no-any-return]


class _Parts(nn.Module):
    """What the objective has beside the encoder."""

    def __init__(self, config: ModelConfig, generator: ModelConfig) -> None:
        super().__init__()
        self.generator = Generator(generator)
        self.discriminator = DiscriminatorHead(config)


class ReplacedTokenModel(EncoderModel):
    """The discriminator's encoder, and below `objective` its head and the generator."""

    def __init__(self, config: ModelConfig, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.objective = _Parts(config, generator_of(config, objective))
        self._temperature = objective.temperature
        self._fuses_loss = False

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """The discriminator's and the generator's."""
        return self.encoder, self.objective.generator.encoder

    def fuse_loss(self) -> None:
        """Compute the generator's cross-entropies by the fused kernel."""
        self._fuses_loss = True

    def forward(
        self,
        input_ids: Tensor,
        layout: Layout,
        masked_index: Tensor,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
        uniform: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fill in the masked tokens and look for what was filled in.

        Args:
            input_ids: as in `Encoder.forward`, ids alone.
            layout: as in `Encoder.forward`.
            masked_index: (M,) int64 numbers of tokens, b * S + s in rows.
            segments: as in `Encoder.forward`.
            targets: (M,) int64 original token ids.
            uniform: (M,) in [0, 1), what the generator draws with.

        Returns:
            With targets, the generator's sum of losses and number of hits, (M,) int64 drawn ids,
            and the discriminator's logits, shaped like the ids. Without, the generator's logits
            (M, V).
        """
        generator = self.objective.generator
        embedded = self.encoder.embed(input_ids, layout, segments)
        x_ME = generator(embedded, layout, masked_index)
        # Asked for behind the modules that have them, after which ZeRO stage 3 takes them apart.
        table_VE, bias_V = self.encoder.token_embedding.weight, generator.output_bias
        if targets is None:
            return F.linear(x_ME, table_VE, bias_V)
        assert uniform is not None, "what is replaced is drawn"
        loss, hits = vocabulary_loss(x_ME, table_VE, bias_V, targets, fused=self._fuses_loss)
        drawn = draw_tokens(x_ME, table_VE, bias_V, uniform, self._temperature)
        # Every masked slot gets a drawn token, so that no [MASK] is left.
        # Their places differ, so a GPU writes each slot once: the same bits each time.
        filled = input_ids.flatten().index_copy(0, masked_index, drawn).view_as(input_ids)
        x = self.encoder(filled, layout, segments=segments)
        return loss, hits, drawn, self.objective.discriminator(x)

    def head(self, x_MD: Tensor) -> Tensor:
        """(M, V) logits of (M, D) hidden states of the generator."""
        return self.objective.generator.project(x_MD, self.encoder.token_embedding.weight)


class ReplacedTokenDetection(MaskedLanguageModeling):
    """Two losses: the generator's, and `discriminator`, which finds what the generator put in.

    `loss` and `accuracy` are the generator's at the masked tokens, `sampled_accuracy` is the share
    of them whose drawn token is the original one. Those count as original: the label of a token is
    whether it differs, not whether it was drawn.

    `discriminator` is the sigmoid cross-entropy in nats, a mean over all tokens, [CLS] and [SEP]
    too. `auc` is the share of pairs (replaced, original) within a micro-batch that the logits put
    in order, ties counting half; `precision` and `recall` are of logits above 0. There is no
    accuracy: some 15% * (1 - sampled_accuracy) of the tokens are replaced, so that one who calls
    everything original is right more than nine times in ten.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self._config = config
        self.losses = {"loss": 1.0, "discriminator": config.discriminator_weight}

    def make_model(self, config: ModelConfig) -> ReplacedTokenModel:
        """Return generator and discriminator on one table."""
        return ReplacedTokenModel(config, self._config)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Return the sums over a micro-batch."""
        layout = rows(batch.documents, batch.positions, batch.cu_seqlens)
        masked_index, targets = batch.inputs["masked_index"], batch.inputs["targets"]
        loss, hits, drawn, logits = model(
            batch.input_ids,
            layout,
            masked_index,
            segments=batch.segments,
            targets=targets,
            uniform=batch.inputs["uniform"],
        )
        differs = drawn != targets
        count = weight_tensor(batch.weights["loss"], loss)
        counted = batch.documents.flatten() > 0
        if not batch.weights["discriminator"]:  # made for a rank that has nothing left
            counted = torch.zeros_like(counted)
        replaced = torch.zeros_like(counted).index_copy(0, masked_index, differs)
        return {
            "loss": Sum(loss, count),
            "accuracy": Sum(hits, count),
            "sampled_accuracy": Sum(count.to(loss.dtype) - differs.sum(), count),
            **detection_sums(logits.flatten(), replaced, counted),
        }


def detection_sums(logits_T: Tensor, replaced_T: Tensor, counted_T: Tensor) -> Sums:
    """Sum up how well logits tell the replaced tokens; bool tensors, without host synchronisation.

    Only what is `counted` counts. The weight of `auc` is the number of pairs.
    """
    logits = logits_T.to(torch.promote_types(logits_T.dtype, torch.float32))
    losses = F.binary_cross_entropy_with_logits(
        logits, replaced_T.to(logits.dtype), reduction="none"
    )
    positive, negative = replaced_T & counted_T, ~replaced_T & counted_T
    called = (logits.detach() > 0) & counted_T
    found = (called & positive).sum()
    # The original tokens below each logit, and those not above it; halved, that is the mid-rank.
    sorted_T, order = logits.detach().sort()
    originals = F.pad(negative[order].cumsum(0), (1, 0))
    below = originals[torch.searchsorted(sorted_T, sorted_T)]
    not_above = originals[torch.searchsorted(sorted_T, sorted_T, right=True)]
    twice = (positive[order] * (below + not_above)).sum()
    return {
        "discriminator": Sum(torch.where(counted_T, losses, 0.0).sum(), counted_T.sum().float()),
        "auc": Sum(twice.to(logits.dtype) / 2, (positive.sum() * negative.sum()).float()),
        "precision": Sum(found.to(logits.dtype), called.sum().float()),
        "recall": Sum(found.to(logits.dtype), positive.sum().float()),
    }
