"""What a model makes of texts: vectors (`encode`), and tokens at each [MASK] (`fill-mask`)."""

import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.model.layers import Trace
from pipeline.model.layout import packed, padded
from pipeline.runtime.files import write_atomic
from pipeline.use.folder import load_trained

Pooling = Literal["cls", "mean", "first_last_avg"]
_DEFAULT_LENGTH = 512


class TextEncoder:
    """A trained or converted model that turns texts into vectors."""

    def __init__(self, source: Path, *, pooling: Pooling, max_length: int | None = None) -> None:
        """Load a run's newest checkpoint or a model folder.

        Pooling takes [CLS], the mean of the last layer, or the mean of the average of first and
        last layer (Su 2021, kexue.fm/archives/8069). `max_length` counts [CLS] and [SEP]; longer
        texts are cut.

        Raises:
            CheckpointError: there is no model, or it has no tokenizer.
            ConfigError: `max_length` is more than the model has positions for.
        """
        trained = load_trained(source)
        self._encoder = trained.model.encoder
        self._tokenizer = trained.require_tokenizer()
        self._pooling = pooling
        limit = trained.model.config.longest_document
        self.max_length = max_length or limit or _DEFAULT_LENGTH
        if self.max_length < 3 or (limit and self.max_length > limit):
            raise ConfigError(
                f"max_length={self.max_length} must be at least 3, and at most the model's "
                f"positions ({limit or 'no limit'})"
            )
        self.num_cut = 0
        """Texts that were longer than `max_length` so far."""

    @property
    def size(self) -> int:
        """Length of a vector."""
        return self._encoder.config.hidden_size

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Compute (number of texts, D) fp32 vectors (DataError: there is no text)."""
        if not texts:
            raise DataError("no text to encode")
        documents = [self._ids(text) for text in texts]
        lengths = torch.tensor([len(ids) for ids in documents])
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        ids = torch.tensor([token for document in documents for token in document])
        layout = packed(ends, int(lengths.max()), len(ids))
        trace = Trace(keep_probabilities=False)
        with torch.no_grad():
            x_TD = self._encoder(ids, layout, trace=trace)
        if self._pooling == "cls":
            first: Tensor = x_TD[ends[:-1]]
            return first
        if self._pooling == "first_last_avg":
            x_TD = (trace.hidden[1] + x_TD) / 2
        row = torch.repeat_interleave(lengths)
        sums = torch.zeros(len(texts), self.size).index_add_(0, row, x_TD)
        return sums / lengths[:, None]

    def encode_all(self, texts: Iterable[str], batch_size: int) -> Iterator[Tensor]:
        """Compute (at most batch_size, D) vectors of consecutive texts."""
        remaining = iter(texts)
        while batch := list(islice(remaining, batch_size)):
            yield self.encode(batch)

    def _ids(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        if len(ids) > self.max_length - 2:
            self.num_cut += 1
            ids = ids[: self.max_length - 2]
        return [self._tokenizer.cls_id, *ids, self._tokenizer.sep_id]


def write_vectors(
    encoder: TextEncoder, lines: Iterable[str], batch_size: int, out: Path | None
) -> int:
    """Encode one text a line, an empty line too, so that line N has vector N.

    `out` becomes an .npy file of (number of texts, D) float32, complete or absent; without it each
    vector is printed as a JSON list.

    Returns:
        Number of texts.

    Raises:
        ConfigError: `batch_size` is below 1.
        DataError: there is no text.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size} must be at least 1")
    vectors = encoder.encode_all((line.rstrip("\r\n") for line in lines), batch_size)
    if out is None:
        count = 0
        for batch in vectors:
            for vector in batch.tolist():
                sys.stdout.write(json.dumps([float(f"{value:.6g}") for value in vector]) + "\n")
            count += len(batch)
    else:
        batches = list(vectors)
        count = sum(len(batch) for batch in batches)
        if count:
            content = io.BytesIO()
            np.save(content, torch.cat(batches).numpy())
            write_atomic(out, content.getvalue())
    if not count:
        raise DataError("no text on standard input; give one a line")
    return count


@dataclass(frozen=True)
class Candidate:
    """A token that may fill a mask."""

    token: str
    """With its leading space, if it has one."""
    probability: float


def fill_mask(source: Path, text: str, *, top: int) -> list[list[Candidate]]:
    """Predict each `[MASK]` of a text.

    Each stands for one token.

    Raises:
        DataError: the text has no `[MASK]`, or is longer than the model's positions.
        CheckpointError: there is no model in `source`, or no tokenizer.
    """
    if top < 1:
        raise DataError(f"--top {top} must be at least 1")
    trained = load_trained(source)
    tokenizer = trained.require_tokenizer()
    encoded = [tokenizer.cls_id, *tokenizer.encode_with_masks(text), tokenizer.sep_id]
    if tokenizer.mask_id not in encoded:
        raise DataError(f"text {text!r} has no [MASK]; write one where a token is to be predicted")
    limit = trained.model.config.longest_document
    if limit and len(encoded) > limit:
        raise DataError(f"text has {len(encoded)} tokens, the model has {limit} positions")
    ids = torch.tensor([encoded])
    masked_index = torch.nonzero(ids[0] == tokenizer.mask_id)[:, 0]
    with torch.no_grad():
        layout = padded(torch.tensor([ids.shape[1]]), ids.shape[1])
        logits = trained.model(ids, layout, masked_index)
    # Specials are never a target in training; the model's opinion of them means nothing. Nor does
    # that of rows beyond the vocabulary.
    logits[:, sorted(tokenizer.special_ids)] = float("-inf")
    logits[:, tokenizer.vocab_size :] = float("-inf")
    best = logits.softmax(-1).topk(min(top, tokenizer.vocab_size - len(tokenizer.special_ids)))
    return [
        [
            Candidate(tokenizer.piece(token), probability)
            for probability, token in zip(probabilities, tokens, strict=True)
        ]
        for probabilities, tokens in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def text_table(masks: list[list[Candidate]]) -> str:
    """Write one line for each mask."""
    return "\n".join(
        f"[MASK] {number}: "
        + "  ".join(f"{candidate.token!r} {candidate.probability:.3f}" for candidate in candidates)
        for number, candidates in enumerate(masks, start=1)
    )
