"""BERT-whitening: vectors of mean 0 and covariance 1, cut to the directions of largest variance.

Source: Su, Cao, Liu and Ou 2021 (arXiv 2103.15316), kexue.fm/archives/8069; the code is
bojone/BERT-whitening. Vectors are seen once, in chunks of any size.

Shapes: N texts, D hidden size, K size of whitened vectors.
"""

import hashlib
import io
import os
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.model.encoder import Encoder
from pipeline.model.heads import Pool
from pipeline.runtime.files import write_atomic

Vectors = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

_FUNCTION = [
    "num_layers",
    "num_heads",
    "position_offset",
    "rotary_value",
    "norm_placement",
    "norm",
    "norm_eps",
    "activation",
    "score_residual",
    "attention_scale",
    "residual",
]
"""Fields of the architecture that change what is computed and not the tensors."""
TRANSDUCTIVE = (
    "fit on the texts that it is evaluated on, without their gold: transductive, not comparable "
    "with a whitening fit elsewhere"
)


class Moments:
    """Mean and scatter of all vectors so far, in float64."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean_D: Floats = np.zeros(width)
        self.scatter_DD: Floats = np.zeros((width, width))
        """Sum of the outer products of vectors less their mean."""

    def add(self, vectors_ND: npt.NDArray[np.floating[Any]]) -> None:
        """Take in a chunk."""
        count = len(vectors_ND)
        if not count:
            return
        vectors = np.asarray(vectors_ND, np.float64)
        mean_D = vectors.mean(0)
        centred, apart_D = vectors - mean_D, mean_D - self.mean_D
        both = self.count + count
        # Chan, Golub and LeVeque 1979 (Stanford STAN-CS-79-773): sizes of chunks change rounding
        # alone.
        self.scatter_DD += centred.T @ centred
        self.scatter_DD += np.outer(apart_D, apart_D) * (self.count * count / both)
        self.mean_D = self.mean_D + apart_D * (count / both)
        self.count = both

    def directions(self) -> tuple[Floats, Floats]:
        """Return variances (R,), largest first, and their (D, R) directions, R the rank."""
        variances, directions = np.linalg.eigh(self.scatter_DD / max(self.count - 1, 1))
        variances, directions = variances[::-1], directions[:, ::-1]
        scale = variances[0] + self.mean_D @ self.mean_D
        # Vectors are float32, so a direction whose deviation is below their rounding has none.
        floor = len(self.mean_D) * float(np.finfo(np.float32).eps) ** 2 * scale
        rank = min(int((variances > floor).sum()), self.count - 1)
        return variances[:rank], directions[:, :rank]


@dataclass(frozen=True, kw_only=True)
class Whitening:
    """A linear map of a model's vectors, and how those must be made."""

    mean: Floats
    """(D,)"""
    weight: Floats
    """(D, K): eigenvectors of the covariance over the roots of their eigenvalues."""
    pooling: Pool
    max_length: int
    num_texts: int
    """Texts that it was fit on."""
    rank: int
    """Directions that these texts vary in; K is this at most."""
    texts: str
    """What they were, such as a file's name."""
    fingerprint: str
    """Fingerprint of the encoder, see `fingerprint`."""

    @property
    def size(self) -> int:
        """Width K of whitened vectors."""
        return int(self.weight.shape[1])

    def __call__(self, vectors_ND: Vectors) -> Vectors:
        """Whiten vectors: (N, K) float32."""
        whitened = (vectors_ND.astype(np.float64) - self.mean) @ self.weight
        return whitened.astype(np.float32)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file, which is complete or absent."""
        buffer = io.BytesIO()
        np.savez(buffer, **asdict(self))
        write_atomic(Path(path), buffer.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote (DataError: it is something else)."""
        try:
            with np.load(path, allow_pickle=False) as file:
                values = {field.name: file[field.name] for field in fields(cls)}
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path} is not a file that `postnorm whiten` wrote: {error}; fit it again"
            ) from None
        plain = {name: value if value.ndim else value.item() for name, value in values.items()}
        if plain["pooling"] not in get_args(Pool):
            raise DataError(f"{path}: pooling {plain['pooling']!r} is not known; fit it again")
        return cls(**plain)


def fit(
    blocks: Iterable[Vectors], size: int | None, *,
    pooling: Pool, max_length: int, texts: str, fingerprint: str,
) -> Whitening:  # fmt: skip
    """Fit a whitening to vectors.

    Args:
        blocks: (n, D) vectors, in parts.
        size: K; None, or more than the rank, takes the rank.
        pooling: of the vectors, kept beside the result like what follows.
        max_length: tokens of a text.
        texts: what they are, in words.
        fingerprint: of the encoder.

    Raises:
        ConfigError: `size` is below 1.
        DataError: there is no variance: no text, one, or all have the same vector.
    """
    if size is not None and size < 1:
        raise ConfigError(f"size={size} of whitened vectors must be at least 1")
    moments: Moments | None = None
    for block in blocks:
        moments = moments or Moments(block.shape[1])
        moments.add(block)
    if moments is None:
        raise DataError(f"{texts}: no text to fit a whitening on; give at least two")
    variances, directions = moments.directions()
    if not len(variances):
        raise DataError(
            f"{texts}: the vectors of all {moments.count:,} texts are the same, so that they have "
            "no variance to whiten; give other texts"
        )
    return Whitening(
        mean=moments.mean_D,
        weight=(directions / np.sqrt(variances))[:, :size],
        pooling=pooling,
        max_length=max_length,
        num_texts=moments.count,
        rank=len(variances),
        texts=texts,
        fingerprint=fingerprint,
    )


def fingerprint(encoder: Encoder) -> str:
    """Digest what makes vectors: an encoder's function, its alpha, names, shapes and weights."""
    config, digest = encoder.config, hashlib.sha256(f"alpha {float(encoder.alpha):.6g}".encode())
    base = config.rotary_base if config.positions == "rotary" else None
    digest.update(f"{base} {[getattr(config, name) for name in _FUNCTION]}".encode())
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        # Weights count as bfloat16, so that a model loaded in that is the same one.
        rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
