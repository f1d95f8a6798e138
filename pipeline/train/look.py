"""Looks inside the model at evaluation steps: its attention, its predictions, and maps of numbers.

It uses the same few held-out sequences each time. All ranks use the same ones, so that it works
for a model whose weights are divided, too.

Falling entropy of attention in every head warns of collapse.

Pillow draws the text of maps; TensorBoard needs it as well.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader, MicroBatch
from pipeline.model.encoder import Encoder, EncoderModel
from pipeline.model.layers import Trace
from pipeline.model.layout import Layout, rows
from pipeline.tokenizer.load import load_tokenizer

_NUM_EXAMPLES = 5
_BEFORE, _AFTER = 12, 36
"""Tokens shown around an example's first mask."""
_TOP = 3
# Attention probabilities in one pass, of all layers: 0.25 GB in bf16, and a layer in fp32.
_MOST_PROBABILITIES = 1 << 27
# Five colours of matplotlib's viridis, low to high: readable in grey and by the colour-blind.
_COLOURS = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64
)
_NAN_COLOUR = (160, 160, 160)
_SMALLEST, _LARGEST, _SIDE = 16, 48, 288
"""Pixels of a cell's side, and those that the longer side of a small map is to have."""
_MARGIN, _GAP, _BAR = 10, 6, 14
_NUM_TICKS = 5


@torch.no_grad()
def attention_entropy(
    encoder: Encoder,
    input_ids: Tensor,
    layout: Layout,
    real: Tensor,
    segments: Tensor | None = None,
) -> Tensor:
    """Run the encoder once, at the alpha that it has; return the (L, N) entropies of its attention.

    Nats of layers and heads, fp32, means over real tokens: 0 for attention to one token, log(keys)
    for equal attention to all. `real`, as input_ids, are the tokens that are not padding.
    """
    trace = Trace()
    encoder(input_ids, layout, segments=segments, trace=trace)
    real_BNS = layout.to_rows(real[..., None, None].float())[..., 0]
    return torch.stack([_mean(entropy_of(each.float()), real_BNS) for each in trace.probabilities])


def entropy_of(share_BNSS: Tensor) -> Tensor:
    """Compute (B, N, S) entropies, in nats, of (B, N, S, S) attention probabilities."""
    terms_BNSS: Tensor = torch.special.xlogy(share_BNSS, share_BNSS)
    return -terms_BNSS.sum(-1)


def _mean(value_BNS: Tensor, weight_BNS: Tensor) -> Tensor:
    """Compute (N,) weighted means over sequences and slots."""
    return (value_BNS * weight_BNS).sum((0, 2)) / weight_BNS.sum((0, 2))


class Observer:
    """Measures a model on fixed sequences."""

    def __init__(
        self,
        model: EncoderModel,
        loader: EvalLoader,
        index: DatasetIndex,
        device: torch.device,
        *,
        sees_masks: bool,
    ) -> None:
        """Take the sequences; the memory that attention needs limits their number.

        A discriminator sees tokens in place of masks: attention is that to the true ones.
        """
        self._model, self._sees_masks = model, sees_masks
        self._device = device
        self._tokenizer = load_tokenizer(index.folder / index.tokenizer_file)
        vocabulary = index.vocabulary
        self._no_answer = [*vocabulary.special]
        self._vocab_size = vocabulary.size
        self._examples = loader.spread(_NUM_EXAMPLES)
        config = model.encoder.config
        length = self._examples.input_ids.shape[1]
        maps = config.num_layers * config.num_heads
        # Of longer sequences the beginning alone: flash attention trains what would not fit here.
        self._length = min(length, math.isqrt(_MOST_PROBABILITIES // maps))
        each = maps * self._length**2
        self._attention = loader.spread(min(8, _MOST_PROBABILITIES // each))

    def attention(self) -> Tensor:
        """Measure the (L, N) entropies of attention at the model's alpha."""
        batch, cut = self._attention.to(self._device), np.s_[:, : self._length]
        documents = batch.documents[cut]
        segments = None if batch.segments is None else batch.segments[cut]
        encoder, layout = self._model.eval().encoder, rows(documents, batch.positions[cut])
        ids = batch.input_ids
        if not self._sees_masks:
            ids = ids.clone()
            ids.view(-1)[batch.inputs["masked_index"]] = batch.inputs["targets"]
        return attention_entropy(encoder, ids[cut], layout, documents > 0, segments)

    @torch.no_grad()
    def examples(self) -> str:
        """Fill in the masks of each sequence that has some.

        Returns:
            Markdown: of each sequence the original, the input, and a line for each mask with the
            most likely pieces and their probabilities.
        """
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
        examples = (
            self._example(batch, np.flatnonzero(row_of_mask == row), shares, tokens)
            for row in np.unique(row_of_mask).tolist()
        )
        return "\n\n---\n\n".join(examples)

    def _example(
        self,
        batch: MicroBatch,
        masks: npt.NDArray[np.int64],
        shares: npt.NDArray[np.float32],
        tokens: npt.NDArray[np.int64],
    ) -> str:
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
        # Lines are indented, so that Markdown shows special characters unchanged.
        lines = [
            f"    original: {self._text(original[shown])}",
            f"    input:    {self._text(given[shown])}",
        ]
        for mask in masks.tolist():
            if at[mask] in shown:
                best = zip(tokens[mask].tolist(), shares[mask].tolist(), strict=True)
                candidates = (f"{self._piece(token)!r} {share:.2f}" for token, share in best)
                lines.append(
                    f"    {self._piece(int(original[at[mask]]))!r}: {'  '.join(candidates)}"
                )
        return "\n".join(lines)

    def _text(self, ids: npt.NDArray[np.int64]) -> str:
        return " ".join(str(self._tokenizer.decode(ids.tolist())).split())

    def _piece(self, token: int) -> str:
        return str(self._tokenizer.piece(token))


def cells(
    values: npt.NDArray[np.floating], low: float, high: float, side: int
) -> npt.NDArray[np.uint8]:
    """Draw (rows, columns) numbers as squares of `side` pixels, first row on top.

    Values out of range have the colour of the limit; NaN and infinity are grey.
    """
    share = np.clip((np.nan_to_num(values) - low) / max(high - low, 1e-12), 0, 1)
    at = np.linspace(0, 1, len(_COLOURS))
    pixels = np.stack([np.interp(share, at, channel) for channel in _COLOURS.T], axis=-1)
    pixels[~np.isfinite(values)] = _NAN_COLOUR
    return np.round(pixels).astype(np.uint8).repeat(side, 0).repeat(side, 1)


def heat_map(
    values: npt.NDArray[np.floating],
    low: float,
    high: float,
    *,
    title: Sequence[str],
    row_name: str,
    column_name: str,
    unit: str,
) -> npt.NDArray[np.uint8]:
    """Draw a labelled map of (rows, columns) numbers, numbered from 0, first row on top.

    Args:
        values: to be shown; see `cells`.
        low: value of the darkest colour.
        high: value of the brightest.
        title: lines above the map.
        row_name: what a row is.
        column_name: what a column is.
        unit: of the values, beside the scale.

    Returns:
        (height, width, 3) pixels, with a white margin.
    """
    rows, columns = values.shape
    side = max(_SMALLEST, min(_LARGEST, _SIDE // max(rows, columns)))
    font = ImageFont.load_default(13)
    line = _size("Ay", font)[1] + 2
    ticks = [f"{value:.2f}" for value in np.linspace(low, high, _NUM_TICKS)]
    tick_width = max(_size(tick, font)[0] for tick in ticks)

    left = _MARGIN + line + _GAP + _size(str(rows), font)[0] + _GAP
    top = _MARGIN + len(title) * line + _GAP
    map_height = max(rows * side, _NUM_TICKS * line, _size(row_name, font)[0])
    bar_left = left + max(columns * side, _size(column_name, font)[0]) + 3 * _GAP
    right = bar_left + _BAR + _GAP + tick_width + _GAP + line + _MARGIN
    width = max(right, 2 * _MARGIN + max(_size(text, font)[0] for text in title))
    height = top + map_height + _GAP + 2 * line + _MARGIN

    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for number, text in enumerate(title):
        draw.text((_MARGIN, _MARGIN + number * line), text, "black", font)
    image.paste(Image.fromarray(cells(values, low, high, side)), (left, top))
    for row in range(0, rows, _stride(line, side)):
        middle = top + row * side + side // 2
        draw.text((left - _GAP, middle), str(row), "black", font, anchor="rm")
    below = top + rows * side + _GAP
    for column in range(0, columns, _stride(_size(str(columns), font)[0] + _GAP, side)):
        middle = left + column * side + side // 2
        draw.text((middle, below), str(column), "black", font, anchor="mt")
    draw.text((left, below + line), column_name, "black", font)
    _sideways(image, row_name, (_MARGIN, top), font)

    scale = np.linspace(high, low, map_height)[:, None]
    image.paste(Image.fromarray(cells(scale, low, high, 1).repeat(_BAR, 1)), (bar_left, top))
    for number, tick in enumerate(ticks):
        share = number / (_NUM_TICKS - 1)
        middle = top + line // 2 + round((1 - share) * (map_height - line))
        draw.text((bar_left + _BAR + _GAP, middle), tick, "black", font, anchor="lm")
    _sideways(image, unit, (right - _MARGIN - line, top), font)
    return np.asarray(image)


def _size(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> tuple[int, int]:
    """Measure a text from its origin: width and height, rounded up."""
    box = font.getbbox(text)
    return int(np.ceil(box[2])), int(np.ceil(box[3]))


def _stride(needed: int, side: int) -> int:
    """Choose which rows or columns get a number, so that numbers do not touch."""
    return next(stride for stride in (1, 2, 5, 10, 20, 50, 100) if stride * side >= needed)


def _sideways(
    image: Image.Image,
    text: str,
    at: tuple[int, int],
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """Write a text from the bottom to the top; `at` is its upper left corner."""
    label = Image.new("RGB", _size(text, font), "white")
    ImageDraw.Draw(label).text((0, 0), text, "black", font)
    image.paste(label.rotate(90, expand=True), at)
