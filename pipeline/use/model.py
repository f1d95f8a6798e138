"""`postnorm.load`: a trained, exported or published model that reads texts and token ids.

Shapes: B rows of S slots, D hidden size, L layers, V vocabulary, N texts.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.model.heads import Pool, packed_documents, pool
from pipeline.model.layers import Trace
from pipeline.model.layout import masked, packed
from pipeline.runtime.checkpoints import Step
from pipeline.runtime.files import temporary_beside
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.use.folder import TrainedModel
from pipeline.use.foreign_config import SENTENCES
from pipeline.use.source import load_source
from pipeline.use.whiten import Vectors, Whitening, fingerprint, fit

_DEFAULT_LENGTH = 512
# Sorting by length: 2,000 texts of 10 to 400 characters take 22 CPU-seconds in any order; before,
# 40 as they come, 33 one at a time, 25 sorted by hand.
# Batches whose texts are sorted by length together; so many texts are held at once.
_WINDOW_BATCHES = 32
# Tokens of a forward pass on a CPU, but for a longer text: activations of more leave its cache.
# With 6 layers of 384 and 23 tokens a text a core did 138 texts a second at 16 texts, 90 at 128.
_CPU_TOKENS = 512
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Candidate(NamedTuple):
    """A token that may fill a mask."""

    token: str
    """Text of the token, with its leading space if it has one."""
    probability: float


@dataclass(frozen=True)
class Output:
    """What a model computes of a batch; tensors lie on the model's device, in its dtype."""

    input_ids: Tensor
    """(B, S) int64."""
    mask: Tensor
    """(B, S) bool, False at padding."""
    hidden_states: tuple[Tensor, ...]
    """L + 1 of (B, S, D): after the embeddings, then after each layer; padding is meaningless."""
    pooled: Tensor | None
    """(B, D) BERT's pooled first token; None: the model has no pooler."""
    _head: Callable[[Tensor], Tensor] = field(repr=False)

    @property
    def hidden(self) -> Tensor:
        """(B, S, D) hidden states of the last layer."""
        return self.hidden_states[-1]

    @cached_property
    def logits(self) -> Tensor:
        """(B, S, V) scores of the masked-language-model head, computed when first asked for."""
        with torch.no_grad():
            return self._head(self.hidden)


def load(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: Literal["fp32", "bf16"] | torch.dtype | None = None,
    *,
    step: Step | None = None,
) -> "Model":
    """Load a model for use.

    Example:
        >>> model = postnorm.load("runs/mine")  # doctest: +SKIP
        >>> model.encode(["a text", "another"]).shape  # doctest: +SKIP
        (2, 384)

    Args:
        path: a run's folder or its copy, whose newest good checkpoint is taken, or RUN@STEP or
            RUN@best; a folder written by `postnorm export`, `convert`, `average` or `finetune`; or
            a Hugging Face folder of BERT, RoBERTa or RoFormer.
        device: such as "cpu" or "cuda:1"; None takes the GPU if there is one.
        dtype: of weights and computation; None is fp32.
        step: of a run, the checkpoint of this step, or "best", in place of the newest good one.

    Raises:
        RunFolderError: this is not such a folder.
        CheckpointError: the checkpoint or folder is damaged, or there is none of that step.
        ConfigError: `device` or `dtype` is not one.
    """
    return Model(load_source(os.fspath(path), step), _device(device), _dtype(dtype))


def _device(device: str | torch.device | None) -> torch.device:
    try:
        return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: {error}") from error


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    chosen = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype or "fp32")
    if chosen is None or chosen not in _DTYPES.values():
        raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}, or torch's own")
    return chosen


class Model:
    """A model in evaluation mode: texts to vectors, tokens for masks, hidden states, logits.

    It computes at the alpha of its checkpoint. No method keeps what a gradient would need; to
    train it in a loop of your own take `module`.
    """

    def __init__(self, trained: TrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        """Move a model to its device; see `load`."""
        self.module = trained.model.to(device, dtype)
        """The torch module: an encoder with its head."""
        self.config: ModelConfig = trained.model.config
        self.tokenizer: Tokenizer | FastTokenizer | None = trained.tokenizer
        """Has `encode`, `encode_with_masks`, `decode`, `cls_id` and the like."""
        self.facts: dict[str, Any] = trained.facts
        """Step, dataset fingerprint, versions, as far as they are known."""
        self.device = device
        self.num_cut = 0
        """Texts that were longer than `max_length` in encodings so far."""
        self._trained = trained

    @property
    def alpha(self) -> float:
        """Scale of the residual branches; below 1 for a checkpoint of the alpha warm-up."""
        return float(self.module.encoder.alpha)

    def __repr__(self) -> str:
        """Describe what it is in one line."""
        config = self.config
        return (
            f"<Postnorm model: {config.num_layers} layers of {config.hidden_size}, "
            f"{config.vocab_size:,} tokens, alpha {self.alpha:g}, on {self.device}>"
        )

    def __call__(
        self,
        texts_or_ids: Sequence[str] | Sequence[Sequence[int]] | npt.NDArray[np.int64] | Tensor,
        mask: Any = None,
        segments: Any = None,
    ) -> Output:
        """Compute hidden states, logits and pooled output of a batch.

        Example:
            >>> model(["a text", "another"]).hidden.shape  # doctest: +SKIP
            torch.Size([2, 4, 384])

        Args:
            texts_or_ids: texts, which get [CLS] and [SEP] and are padded at the end; or (B, S)
                token ids with their specials, as anything torch makes a tensor of.
            mask: (B, S), 1 or True at tokens, 0 at padding, on either side; None: no padding. With
                texts it is made.
            segments: (B, S) segment ids; None: all are 0.

        Raises:
            DataError: ids, mask or segments have a wrong shape or value, or a text is too long for
                the model's positions.
            CheckpointError: there are texts and the model came without a tokenizer.
        """
        if isinstance(texts_or_ids, str):
            raise DataError("a text was given in place of a list of texts; write [text]")
        is_tensor = isinstance(texts_or_ids, (Tensor, np.ndarray))
        if not is_tensor and len(texts_or_ids) and isinstance(texts_or_ids[0], str):
            if mask is not None:
                raise DataError("mask was given with texts, which have their own; leave it out")
            ids, seen = self._rows([self._document(text, n) for n, text in enumerate(texts_or_ids)])  # type: ignore[arg-type]
        else:
            ids = _whole_numbers("ids", texts_or_ids, None)
            seen = _whole_numbers("mask", torch.ones_like(ids) if mask is None else mask, ids)
            _require_range("mask", seen, 2, "1 at tokens and 0 at padding")
        _require_range("ids", ids, self.config.vocab_size or 0, "ids of the model's vocabulary")
        seen = seen.bool()
        self._require_length(int(seen.sum(-1).max()))
        if not bool(seen.any(-1).all()):
            row = int((~seen.any(-1)).nonzero()[0])
            raise DataError(f"mask is 0 in all of row {row}; each row needs a token: leave it out")
        if segments is not None:
            segments = _whole_numbers("segments", segments, ids)
            _require_range("segments", segments, self.config.type_vocab_size, "segment ids")
            segments = segments.to(self.device)
        ids, seen = ids.to(self.device), seen.to(self.device)
        trace, encoder = Trace(keep_probabilities=False), self.module.encoder
        with torch.no_grad():
            x_BSD = encoder(ids, masked(seen), segments=segments, trace=trace)
            first_B = seen.int().argmax(-1)
            x_BD = x_BSD[torch.arange(len(ids), device=self.device), first_B]
            pooled = encoder.pool(x_BD) if self.config.pooler else None
        return Output(ids, seen, tuple(trace.hidden), pooled, self._project)

    def encode(
        self,
        texts: Iterable[str],
        pooling: Pool | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        whitening: Whitening | None = None,
    ) -> Vectors:
        """Compute a vector of each text, in the order of the texts.

        Example:
            >>> model.encode(["a text", "another"]).shape  # doctest: +SKIP
            (2, 384)

        Args:
            texts: strings; of an iterator 32 batches are held at a time.
            pooling: "mean" of the last layer's tokens, [CLS] and [SEP] included, "cls" of the last
                layer, that through BERT's "pooler", or "first_last_avg", the mean over the first
                and last layer (Su 2021, kexue.fm/archives/8069). None: that of a folder of
                sentence-transformers, like its length, or "mean".
            batch_size: most texts of a forward pass; on a CPU it also ends at some hundred tokens.
                Texts of similar length go together, and no padding is computed; rounding apart the
                batches do not change a vector.
            max_length: tokens of a text with [CLS] and [SEP]; of longer texts the beginning is
                taken, and `num_cut` counts them. None: the model's positions, or 512.
            whitening: applied to the vectors; it has their pooling and length, too.

        Returns:
            (N, D) float32, (N, K) with a whitening.

        Raises:
            DataError: there is no text, or one is not a string.
            ConfigError: another argument is out of range, the model has no pooler, the whitening
                is of another model, pooling or length, or pooling is None and a folder of
                sentence-transformers asks for more than a pooling.
            CheckpointError: the model came without a tokenizer.
        """
        blocks = list(self.iter_encode(texts, pooling, batch_size, max_length, whitening))
        if not blocks:
            raise DataError("no text to encode; give at least one")
        return np.concatenate(blocks)

    def iter_encode(
        self,
        texts: Iterable[str],
        pooling: Pool | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        whitening: Whitening | None = None,
    ) -> Iterator[Vectors]:
        """Compute what `encode` does, 32 batches at a time, for texts without end.

        Returns:
            (at most 32 * batch_size, D or K) float32 of consecutive texts.

        Raises:
            CheckpointError: a vector is infinite or NaN.
            PostnormError: as `encode`, but no text gives no vectors.
        """
        if isinstance(texts, str):
            raise DataError("a text was given in place of a list of texts; write [text]")
        pooling, max_length = self.setting(pooling, max_length, whitening)
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1")
        self._trained.require_tokenizer()
        blocks = self._windows(iter(texts), pooling, batch_size, max_length)
        return blocks if whitening is None else map(whitening, blocks)

    def setting(
        self, pooling: Pool | None, max_length: int | None, whitening: Whitening | None = None
    ) -> tuple[Pool, int]:
        """Fill in the pooling and the length that are None, as `encode` does, and check them.

        Raises:
            ConfigError: as `encode`.
        """
        if whitening is not None:
            if whitening.fingerprint != self.fingerprint:
                raise ConfigError(
                    f"the whitening was fit on vectors of another model ({whitening.texts}); fit "
                    "one on this model's"
                )
            given = {"pooling": pooling, "max_length": max_length}
            for name, value in given.items():
                if value not in (None, getattr(whitening, name)):
                    raise ConfigError(
                        f"{name}={value}, but the whitening was fit with "
                        f"{getattr(whitening, name)}; leave {name} out, or fit it again"
                    )
            pooling, max_length = whitening.pooling, whitening.max_length
        own = self.facts.get(SENTENCES, {})
        if pooling is None and own.get("more"):
            raise ConfigError(
                f"sentence-transformers makes this model's vectors with {', '.join(own['more'])}, "
                f"which is not done here; pass pooling={own['pooling'] or 'mean'} for the vectors "
                "without it"
            )
        pooling = pooling or own.get("pooling") or "mean"
        if pooling not in get_args(Pool):
            known = ", ".join(get_args(Pool))
            raise ConfigError(f"pooling={pooling!r} is not known; expected one of {known}")
        if pooling == "pooler" and not self.config.pooler:
            raise ConfigError(
                "pooling=pooler: this model has no pooler (model.pooler is false); take cls, mean "
                "or first_last_avg"
            )
        length = self.longest(max_length)
        is_own = max_length is None and own.get("max_length")
        return pooling, min(length, own["max_length"]) if is_own else length

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the encoder, by which a whitening knows its model."""
        return fingerprint(self.module.encoder)

    def fit_whitening(
        self,
        texts: Iterable[str],
        size: int | None = None,
        pooling: Pool | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        name: str = "texts",
    ) -> Whitening:
        """Fit a whitening on the vectors of texts, which are not held.

        Args:
            texts: as in `encode`.
            size: of whitened vectors; None, or more than the texts vary in, takes as many.
            pooling: as in `encode`.
            batch_size: as in `encode`.
            max_length: as in `encode`.
            name: what the texts are, for messages and model cards.

        Raises:
            PostnormError: as `encode`, or `pipeline.use.whiten.fit`.
        """
        pooling, max_length = self.setting(pooling, max_length)
        blocks = self.iter_encode(texts, pooling, batch_size, max_length)
        about = {"texts": name, "fingerprint": self.fingerprint}
        return fit(blocks, size, pooling=pooling, max_length=max_length, **about)

    def longest(self, max_length: int | None = None) -> int:
        """Return how many tokens of a text `encode` takes (ConfigError: it is out of range)."""
        limit = self.config.longest_document
        length = (limit or _DEFAULT_LENGTH) if max_length is None else max_length
        if length < 3 or (limit and length > limit):
            raise ConfigError(
                f"max_length={length} must be at least 3, and at most the model's positions "
                f"({limit or 'no limit'})"
            )
        return length

    def encode_to(
        self,
        out: str | os.PathLike[str],
        texts: Iterable[str],
        pooling: Pool | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        whitening: Whitening | None = None,
    ) -> int:
        """Write what `encode` computes to an .npy file, which is complete or absent.

        Neither texts nor vectors are held; `np.load(out, mmap_mode="r")` reads it in parts.

        Args:
            out: file of (N, D or K) float32; its name stays as it is.
            texts: as in `encode`, like the arguments that follow.
            pooling: as in `encode`.
            batch_size: as in `encode`.
            max_length: as in `encode`.
            whitening: as in `encode`.

        Returns:
            Number of texts.

        Raises:
            PostnormError: as `encode`.
            OSError: the file cannot be written.
        """
        path, count = Path(out), 0
        width = self.config.hidden_size if whitening is None else whitening.size
        blocks = self.iter_encode(texts, pooling, batch_size, max_length, whitening)
        unfinished = temporary_beside(path)
        try:
            with unfinished.open("wb") as file:
                write_header(file, 0, width)
                for block in blocks:
                    block.tofile(file)
                    count += len(block)
                if not count:
                    raise DataError("no text to encode; give at least one")
                file.seek(0)
                write_header(file, count, width)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return count

    def fill_mask(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """Predict each `[MASK]` of a text; each stands for one token.

        Example:
            >>> [[best, *_]] = model.fill_mask("The capital of France is [MASK].")  # doctest: +SKIP
            >>> best.token, best.probability  # doctest: +SKIP
            (' Paris', 0.43)

        Returns:
            For each mask its `top` most likely tokens, the likeliest first, without specials.

        Raises:
            DataError: the text is not a string, has no `[MASK]`, or is longer than the model's
                positions; or `top` is below 1.
            CheckpointError: the model came without a tokenizer, or without its MLM head.
        """
        if top < 1:
            raise DataError(f"top={top} must be at least 1")
        tokenizer = self._trained.require_tokenizer()
        _require_text(text, "text")
        encoded = [tokenizer.cls_id, *tokenizer.encode_with_masks(text), tokenizer.sep_id]
        if tokenizer.mask_id not in encoded:
            raise DataError(
                f"text {text!r} has no [MASK]; write one where a token is to be predicted"
            )
        output = self([encoded])
        with torch.no_grad():
            logits = self._project(output.hidden[output.input_ids == tokenizer.mask_id]).float()
        # Specials are never a target in training; the model's opinion of them means nothing. Nor
        # does that of rows beyond the vocabulary.
        logits[:, sorted(tokenizer.special_ids)] = float("-inf")
        logits[:, tokenizer.vocab_size :] = float("-inf")
        best = logits.softmax(-1).topk(min(top, tokenizer.vocab_size - len(tokenizer.special_ids)))
        return [
            [
                Candidate(tokenizer.piece(token), probability)
                for probability, token in zip(probabilities, tokens, strict=True)
            ]
            for probabilities, tokens in zip(
                best.values.tolist(), best.indices.tolist(), strict=True
            )
        ]

    def _project(self, x: Tensor) -> Tensor:
        """Compute (..., V) logits of (..., D) hidden states."""
        self._trained.require_head()
        return self.module.head(x)  # type: ignore[no-any-return]

    def _document(self, text: str, number: int) -> list[int]:
        """Encode a text with its specials; `number` is for the message."""
        _require_text(text, f"texts[{number}]")
        tokenizer = self._trained.require_tokenizer()
        return [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]

    def _rows(self, documents: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Pad documents to (B, S) ids and a mask."""
        ids = torch.full(
            (len(documents), max(map(len, documents))), self._trained.require_tokenizer().pad_id
        )
        mask = torch.zeros_like(ids)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.tensor(document)
            mask[row, : len(document)] = 1
        return ids, mask

    def _require_length(self, length: int) -> None:
        limit = self.config.longest_document
        if limit and length > limit:
            raise DataError(
                f"a row has {length} tokens, the model has {limit} positions; shorten the text"
            )

    def _windows(
        self, texts: Iterator[str], pooling: Pool, batch_size: int, max_length: int
    ) -> Iterator[Vectors]:
        number = 0
        while window := list(islice(texts, _WINDOW_BATCHES * batch_size)):
            documents = [self._cut(text, number + n, max_length) for n, text in enumerate(window)]
            # The longest first: memory that is too small shows at once.
            order = sorted(range(len(window)), key=lambda row: -len(documents[row]))
            vectors = np.empty((len(window), self.config.hidden_size), np.float32)
            lengths = [len(document) for document in documents]
            most = _CPU_TOKENS if self.device.type == "cpu" else None
            for rows in batches_of(order, lengths, batch_size, most):
                vectors[rows] = self._pool([documents[row] for row in rows], pooling).cpu().numpy()
            if not np.isfinite(vectors).all():
                bad = number + int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])
                raise CheckpointError(
                    f"the vector of texts[{bad}] is not finite: the model's training has diverged, "
                    "or its weights are damaged; take an earlier checkpoint"
                )
            number += len(window)
            yield vectors

    def _cut(self, text: str, number: int, max_length: int) -> list[int]:
        document = self._document(text, number)
        if len(document) <= max_length:
            return document
        self.num_cut += 1
        return [*document[: max_length - 1], document[-1]]

    def _pool(self, documents: list[list[int]], pooling: Pool) -> Tensor:
        """Compute (B, D) fp32 vectors of documents that lie end to end, without padding."""
        lengths = torch.tensor([len(ids) for ids in documents])
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(self.device)
        ids = torch.tensor([token for document in documents for token in document])
        layout = packed(ends, int(lengths.max()), len(ids))
        trace = Trace(keep_probabilities=False) if pooling == "first_last_avg" else None
        with torch.no_grad():
            encoder = self.module.encoder
            x_TD: Tensor = encoder(ids.to(self.device), layout, trace=trace)
            hidden = [x_TD] if trace is None else [x_TD, trace.hidden[1], x_TD]
            if pooling != "pooler":  # whose weights are in the model's dtype
                hidden = [each.float() for each in hidden]
            return pool(pooling, hidden, packed_documents(ends, len(ids)), encoder).float()


def _require_text(text: Any, name: str) -> None:
    """Check that this is text (DataError: it is not)."""
    if not isinstance(text, str):
        raise DataError(f"{name} is {type(text).__name__}, expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half of a character at {error.start} ({text[error.start]!a}), as UTF-16 "
            "that was cut has it; expected whole characters"
        ) from None


def write_header(file: Any, count: int, width: int) -> None:
    """Write the header of an .npy file of (count, width) float32."""
    # numpy leaves room for the first axis to grow: the header keeps its length.
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(file, header)


def batches_of(
    order: Sequence[int], lengths: Sequence[int], batch_size: int, most: int | None
) -> Iterator[list[int]]:
    """Split texts into batches of at most `batch_size` texts and `most` tokens, one text at least.

    `order` are numbers of texts, as many tokens as `lengths` has; neighbours should be alike.
    """
    batch: list[int] = []
    total = 0
    for number in order:
        too_long = most is not None and total + lengths[number] > most
        if batch and (len(batch) == batch_size or too_long):
            yield batch
            batch, total = [], 0
        batch.append(number)
        total += lengths[number]
    if batch:
        yield batch


def _whole_numbers(name: str, values: Any, like: Tensor | None) -> Tensor:
    """Make (B, S) int64 of what was given (DataError: it is something else)."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} cannot be made a tensor: {error}; expected rows of equal length (pad them and "
            "give a mask)"
        ) from error
    if tensor.ndim != 2 or not tensor.numel():
        raise DataError(
            f"{name} have shape {tuple(tensor.shape)}, expected (rows, slots) with at least one "
            "each; a single sequence is ids[None]"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise DataError(f"{name} are {tensor.dtype}, expected whole numbers")
    if like is not None and tensor.shape != like.shape:
        raise DataError(
            f"{name} has shape {tuple(tensor.shape)}, expected that of ids, {tuple(like.shape)}"
        )
    return tensor.long()


def _require_range(name: str, values: Tensor, stop: int, meaning: str) -> None:
    wrong = values[(values < 0) | (values >= stop)]
    if len(wrong):
        raise DataError(f"{name} has {int(wrong[0])}, expected {meaning}, 0 to {stop - 1}")
