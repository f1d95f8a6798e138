"""A look inside the model at evaluation steps: its attention, and what it fills in.

On the same few held-out sequences each time. All ranks look at the same ones, so that a model
whose weights are divided can be looked at, too.

An array of numbers drawn as an image, with numpy alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.data.batch import MicroBatch
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader
from pipeline.model.encoder import EncoderModel
from pipeline.model.layout import rows
from pipeline.model.statistics import AttentionStatistics, attention_statistics
from pipeline.tokenizer.wordpiece import load_tokenizer

_NUM_EXAMPLES = 5
_BEFORE, _AFTER = 12, 36
"""Tokens shown around an example's first mask."""
_TOP = 3
_MOST_PROBABILITIES = 1 << 27
"""Attention probabilities looked at in one pass: 0.25 GB in bf16, and 0.5 GB in fp32."""


@dataclass(frozen=True)
class Prediction:
    """One masked token of an example."""

    original: str
    candidates: list[tuple[str, float]]
    """Most likely pieces with their probabilities."""


@dataclass(frozen=True)
class Example:
    """A piece of held-out text."""

    original: str
    input: str
    """As the model is given it."""
    predictions: list[Prediction]


class Observer:
    """Looks at fixed sequences."""

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
        return attention_statistics(encoder, batch.input_ids, layout, batch.documents > 0)

    @torch.no_grad()
    def examples(self) -> list[Example]:
        """Fill in the masks; one example for each sequence that has a mask."""
        batch = self._examples
        on_device = batch.to(self._device)
        model = self._model.eval()
        layout = rows(on_device.documents, on_device.positions)
        logits: Tensor = model(on_device.input_ids, layout, on_device.inputs["masked_index"])
        logits = logits.float()
        # Specials are never a target in training, nor are rows beyond the vocabulary.
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
        self, batch: MicroBatch, masks: npt.NDArray[np.int64],
        shares: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64],
    ) -> Example:  # fmt: skip
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
        return Example(
            self._text(original[shown]),
            self._text(given[shown]),
            [
                Prediction(
                    self._piece(int(original[at[mask]])),
                    [(self._piece(int(token)), float(share))
                     for token, share in zip(tokens[mask], shares[mask], strict=True)],
                )
                for mask in masks.tolist()
                if at[mask] in shown
            ],
        )  # fmt: skip

    def _text(self, ids: npt.NDArray[np.int64]) -> str:
        return str(self._tokenizer.decode(ids.tolist())).strip()

    def _piece(self, token: int) -> str:
        return str(self._tokenizer.piece(token))


def examples_text(examples: list[Example]) -> str:
    """Format examples as Markdown: the original, the input, and a line for each mask."""
    blocks = []
    for example in examples:
        lines = [f"    original: {_one_line(example.original)}",
                 f"    input:    {_one_line(example.input)}"]  # fmt: skip
        lines += [
            f"    {prediction.original!r}: "
            + "  ".join(f"{piece!r} {share:.2f}" for piece, share in prediction.candidates)
            for prediction in example.predictions
        ]
        blocks.append("\n".join(lines))
    # Indented, so that Markdown leaves special characters as they are.
    return "\n\n---\n\n".join(blocks)


def _one_line(text: str) -> str:
    return " ".join(text.split())


_CELL = 16
"""Pixels of a number's side."""
_COLOURS = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64
)
"""Five of matplotlib's viridis, from low to high: readable in grey, and by the colour-blind."""
_NO_NUMBER = (160, 160, 160)


def heat_map(values: npt.NDArray[np.floating], low: float, high: float) -> npt.NDArray[np.uint8]:
    """Draw (rows, columns) numbers, first row on top.

    Args:
        values: those out of range have the colour of the limit; what is no number is grey.
        low: darkest.
        high: brightest.

    Returns:
        (16 * rows, 16 * columns, 3) pixels.
    """
    share = np.clip((np.nan_to_num(values) - low) / max(high - low, 1e-12), 0, 1)
    at = np.linspace(0, 1, len(_COLOURS))
    pixels = np.stack([np.interp(share, at, channel) for channel in _COLOURS.T], axis=-1)
    pixels[~np.isfinite(values)] = _NO_NUMBER
    return np.round(pixels).astype(np.uint8).repeat(_CELL, 0).repeat(_CELL, 1)
