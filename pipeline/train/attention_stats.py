"""Looks inside the model at evaluation steps: its attention and its predictions.

It uses the same few held-out sequences each time. All ranks use the same ones, so that it works
for a model whose weights are divided, too.

Falling entropy of attention in every head warns of collapse; with carried scores, the known danger
is that all layers attend alike (He et al. 2020, arXiv 2012.11747, section 5 measures both).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader, MicroBatch
from pipeline.model.encoder import Encoder, EncoderModel
from pipeline.model.layers import Trace
from pipeline.model.layout import Layout, rows
from pipeline.tokenizer.load import load_tokenizer


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over real tokens, fp32; L layers, N heads."""

    entropy: Tensor
    """(L, N) nats: 0 for attention to one token, log(keys) for equal attention to all."""
    divergence: Tensor
    """(L - 1, N) nats: Jensen-Shannon divergence of a head from the same head one layer below, 0
    for equal attention, log 2 at most."""


@torch.no_grad()
def attention_statistics(
    encoder: Encoder,
    input_ids: Tensor,
    layout: Layout,
    real: Tensor,
    segments: Tensor | None = None,
) -> AttentionStatistics:
    """Run the encoder once, at the alpha that it has, and measure its attention.

    `real`, as input_ids, are the tokens that are not padding.
    """
    trace = Trace()
    encoder(input_ids, layout, segments=segments, trace=trace)
    real_BNS = layout.to_rows(real[..., None, None].float())[..., 0]
    shares = [share.float() for share in trace.probabilities]
    none = torch.zeros(0, encoder.config.num_heads, device=input_ids.device)
    entropy = [_mean(entropy_of(share), real_BNS) for share in shares]
    divergence = [_mean(divergence_of(lower, upper), real_BNS) for lower, upper in pairwise(shares)]
    return AttentionStatistics(
        torch.stack(entropy), torch.stack(divergence) if divergence else none
    )


def entropy_of(share_BNSS: Tensor) -> Tensor:
    """Compute (B, N, S) entropies, in nats, of (B, N, S, S) attention probabilities."""
    terms_BNSS: Tensor = torch.special.xlogy(share_BNSS, share_BNSS)
    return -terms_BNSS.sum(-1)


def divergence_of(first_BNSS: Tensor, second_BNSS: Tensor) -> Tensor:
    """Compute (B, N, S) Jensen-Shannon divergences, in nats, of two (B, N, S, S) attentions."""
    middle_BNSS = (first_BNSS + second_BNSS) / 2
    return entropy_of(middle_BNSS) - (entropy_of(first_BNSS) + entropy_of(second_BNSS)) / 2


def _mean(value_BNS: Tensor, weight_BNS: Tensor) -> Tensor:
    """Compute (N,) weighted means over sequences and slots."""
    return (value_BNS * weight_BNS).sum((0, 2)) / weight_BNS.sum((0, 2))


_NUM_EXAMPLES = 5
_BEFORE, _AFTER = 12, 36
"""Tokens shown around an example's first mask."""
_TOP = 3
_MOST_PROBABILITIES = 1 << 27
"""Attention probabilities in one pass: 0.25 GB in bf16, and 0.5 GB in fp32."""


@dataclass(frozen=True)
class MaskedPrediction:
    """One masked token of an example."""

    original: str
    candidates: list[tuple[str, float]]
    """Most likely pieces with their probabilities."""


@dataclass(frozen=True)
class TextExample:
    """A piece of held-out text."""

    original: str
    input: str
    """The text with masks, as the model gets it."""
    predictions: list[MaskedPrediction]


class Observer:
    """Measures a model on fixed sequences."""

    def __init__(
        self, model: EncoderModel, loader: EvalLoader, index: DatasetIndex, device: torch.device
    ) -> None:
        """Take the sequences; the memory that attention needs limits their number."""
        self._model = model
        self._device = device
        self._tokenizer = load_tokenizer(index.folder / index.tokenizer_file)
        vocabulary = index.vocabulary
        self._no_answer = [*vocabulary.special]
        self._vocab_size = vocabulary.size
        self._examples = loader.spread(_NUM_EXAMPLES)
        config = model.encoder.config
        length = self._examples.input_ids.shape[1]
        each = config.num_layers * config.num_heads * length * length
        self._attention = loader.spread(min(8, max(1, _MOST_PROBABILITIES // each)))

    def attention(self) -> AttentionStatistics:
        """Measure the entropies and divergences of attention at the model's alpha."""
        batch = self._attention.to(self._device)
        layout = rows(batch.documents, batch.positions)
        encoder = self._model.eval().encoder
        real = batch.documents > 0
        return attention_statistics(encoder, batch.input_ids, layout, real, batch.segments)

    @torch.no_grad()
    def examples(self) -> list[TextExample]:
        """Fill in the masks; one example for each sequence that has a mask."""
        batch = self._examples
        on_device = batch.to(self._device)
        model = self._model.eval()
        layout = rows(on_device.documents, on_device.positions)
        masked_index, segments = on_device.inputs["masked_index"], on_device.segments
        logits: Tensor = model(on_device.input_ids, layout, masked_index, segments=segments)
        logits = logits.float()
        # Special tokens and rows beyond the vocabulary are never targets in training.
        logits[:, self._no_answer] = float("-inf")
        logits[:, self._vocab_size :] = float("-inf")
        best = logits.softmax(-1).topk(min(_TOP, self._vocab_size - len(self._no_answer)))
        shares, tokens = best.values.cpu().numpy(), best.indices.cpu().numpy()
        row_of_mask = batch.inputs["masked_index"].numpy() // batch.input_ids.shape[1]
        return [
            self._example(batch, np.flatnonzero(row_of_mask == row), shares, tokens)
            for row in np.unique(row_of_mask).tolist()
        ]

    def _example(
        self,
        batch: MicroBatch,
        masks: npt.NDArray[np.int64],
        shares: npt.NDArray[np.float32],
        tokens: npt.NDArray[np.int64],
    ) -> TextExample:
        """Show the text around the first of a sequence's masks, within its document."""
        given, at = batch.input_ids.flatten().numpy(), batch.inputs["masked_index"].numpy()
        original = given.copy()
        original[at] = batch.inputs["targets"].numpy()
        first = int(at[masks[0]])
        width = batch.input_ids.shape[1]
        documents = batch.documents.flatten().numpy()
        same = np.flatnonzero(documents == documents[first])
        same = same[same // width == first // width][1:-1]  # without [CLS] and [SEP]
        shown = same[(same >= first - _BEFORE) & (same < first + _AFTER)]
        predictions = []
        for mask in masks.tolist():
            if at[mask] in shown:
                best = zip(tokens[mask], shares[mask], strict=True)
                candidates = [(self._piece(int(token)), float(share)) for token, share in best]
                predictions.append(
                    MaskedPrediction(self._piece(int(original[at[mask]])), candidates)
                )
        return TextExample(self._text(original[shown]), self._text(given[shown]), predictions)

    def _text(self, ids: npt.NDArray[np.int64]) -> str:
        return str(self._tokenizer.decode(ids.tolist())).strip()

    def _piece(self, token: int) -> str:
        return str(self._tokenizer.piece(token))


def examples_text(examples: list[TextExample]) -> str:
    """Format examples as Markdown: the original, the input, and a line for each mask."""
    blocks = []
    for example in examples:
        lines = [
            f"    original: {_one_line(example.original)}",
            f"    input:    {_one_line(example.input)}",
        ]
        lines += [
            f"    {prediction.original!r}: "
            + "  ".join(f"{piece!r} {share:.2f}" for piece, share in prediction.candidates)
            for prediction in example.predictions
        ]
        blocks.append("\n".join(lines))
    # Lines are indented, so that Markdown shows special characters unchanged.
    return "\n\n---\n\n".join(blocks)


def _one_line(text: str) -> str:
    return " ".join(text.split())
