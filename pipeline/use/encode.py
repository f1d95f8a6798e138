"""`python -m pipeline encode`: one vector a text."""

import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.model.layers import Trace
from pipeline.model.layout import packed
from pipeline.runtime.files import write_atomic
from pipeline.use.export import load_trained

Pooling = Literal["cls", "mean", "first_last_avg"]
_DEFAULT_LENGTH = 512


class TextEncoder:
    """A trained or converted model that turns texts into vectors."""

    def __init__(self, source: Path, *, pooling: Pooling, max_length: int | None = None) -> None:
        """Loads a run's newest checkpoint or a model folder.

        Args:
            source: run or model folder.
            pooling: hidden state of [CLS]; mean over all tokens of the last layer; or that of the
                first and last layer's average (Su 2021, kexue.fm/archives/8069).
            max_length: tokens of a text with [CLS] and [SEP]; longer ones are cut.

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
        """(number of texts, D) fp32 vectors.

        Raises:
            DataError: there is no text.
        """
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
        """(at most batch_size, D) vectors of consecutive texts."""
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
    """Encodes one text a line, an empty line too, so that vectors and lines stay together.

    Args:
        encoder: a loaded model.
        lines: texts.
        batch_size: texts at once.
        out: .npy file of (number of texts, D) float32, complete or absent; None prints each vector
            as a JSON list.

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
