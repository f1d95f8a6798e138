"""Whitening against numpy's own covariance and singular vectors; what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, DataError
from pipeline.use.export import export
from pipeline.use.model import Model, load
from pipeline.use.whiten import Moments, Whitening, fit
from tests.use.test_model import BERT, TEXTS, drawn, write

ABOUT: dict[str, Any] = {"pooling": "mean", "max_length": 8, "texts": "these", "fingerprint": "f"}


def _vectors(count: int, width: int = 12, seed: int = 0) -> np.ndarray:
    """Correlated vectors far from 0, in float32 as a model's."""
    numbers = np.random.default_rng(seed)
    mixed = numbers.normal(size=(count, width)) @ numbers.normal(size=(width, width))
    return (mixed + 100).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex) -> Path:
    return write(tmp_path_factory.mktemp("models") / "bert", dataset, pooler=True, **BERT)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return drawn(90, fewest=1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_moments_do_not_depend_on_the_chunks(chunk: int) -> None:
    vectors = _vectors(1000)
    moments = Moments(12)
    for at in range(0, 1000, chunk):
        moments.add(vectors[at : at + chunk])
        moments.add(vectors[:0])
    wide = vectors.astype(np.float64)
    covariance = np.cov(wide.T)
    np.testing.assert_allclose(moments.mean_D, wide.mean(0), rtol=1e-12)
    found = moments.scatter_DD / (moments.count - 1)
    assert abs(found - covariance).max() <= 1e-10 * abs(covariance).max()


def test_whitened_vectors_have_mean_0_covariance_1_and_the_largest_directions() -> None:
    vectors = _vectors(500)
    whitening = fit([vectors[:17], vectors[17:]], None, **ABOUT)
    assert (whitening.rank, whitening.size, whitening.num_texts) == (12, 12, 500)
    whitened = whitening(vectors)
    assert whitened.dtype == np.float32
    np.testing.assert_allclose(whitened.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(np.cov(whitened.T.astype(np.float64)), np.eye(12), atol=1e-4)
    # The reference is the method's own: the decomposition of numpy's covariance, W = U L^(-1/2).
    u, variances, _ = np.linalg.svd(np.cov(vectors.T.astype(np.float64)))
    small = fit([vectors], 5, **ABOUT)
    expected = (u / np.sqrt(variances))[:, :5]
    signs = np.sign((expected * small.weight).sum(0))
    np.testing.assert_allclose(small.weight * signs, expected, rtol=1e-6, atol=1e-9)


def test_fewer_texts_than_dimensions_give_the_rank() -> None:
    few = fit([_vectors(5)], 10, **ABOUT)
    assert (few.rank, few.size) == (4, 4)
    assert np.isfinite(few(_vectors(300, seed=1))).all()
    assert fit([np.repeat(_vectors(3), 40, axis=0)], None, **ABOUT).rank == 2
    # A layer norm leaves vectors one dimension less; rounding must not pass for another.
    flat = _vectors(500) - 100
    flat -= flat.mean(1, keepdims=True)
    assert fit([flat], None, **ABOUT).rank == 11


WRONG: dict[str, tuple[list[np.ndarray], int | None, type[Exception], str]] = {
    "size": ([_vectors(9)], 0, ConfigError, "size=0 of whitened vectors must be at least 1"),
    "none": ([], None, DataError, "these: no text to fit"),
    "one": ([_vectors(1)], None, DataError, "the vectors of all 1 texts are the same"),
    "the same": ([_vectors(1)] * 9, None, DataError, "vectors of all 9 texts are the same"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_has_no_variance_is_refused(mistake: str) -> None:
    blocks, size, error, message = WRONG[mistake]
    with pytest.raises(error, match=message):
        fit(blocks, size, **ABOUT)


def test_a_model_whitens(model: Model, folder: Path, texts: list[str], tmp_path: Path) -> None:
    whitening = model.fit_whitening(iter(texts), 6, "cls", 4, 9, "texts")
    whitening.save(tmp_path / "w.npz")
    again = Whitening.load(tmp_path / "w.npz")
    for name, value in vars(whitening).items():
        assert np.array_equal(getattr(again, name), value), name
    plain = model.encode(TEXTS, "cls", max_length=9).astype(np.float64)
    expected = (plain - whitening.mean) @ whitening.weight
    found = model.encode(TEXTS, whitening=again)
    assert (found.shape, found.dtype) == ((3, 6), np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert model.encode_to(tmp_path / "v.npy", iter(TEXTS), whitening=again) == 3
    assert np.array_equal(np.load(tmp_path / "v.npy"), found)
    # The same model by another way, and in another precision, is the same.
    export(folder, tmp_path / "copy")
    load(tmp_path / "copy", dtype="bf16").encode(TEXTS, whitening=again)


MISTAKES: dict[str, tuple[Callable[[Model, Whitening], object], str]] = {
    "pooling": (lambda m, w: m.encode(["a"], "mean", whitening=w), "pooling=mean, but .* fit w"),
    "length": (lambda m, w: m.encode(["a"], max_length=8, whitening=w), "max_length=8, but .* 9;"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_another_setting_is_refused(mistake: str, model: Model, texts: list[str]) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=message):
        call(model, model.fit_whitening(texts, 3, "cls", max_length=9, name="those"))


def test_another_models_whitening_is_refused(
    model: Model, texts: list[str], dataset: DatasetIndex, tmp_path: Path
) -> None:
    other = load(write(tmp_path / "other", dataset))
    with pytest.raises(ConfigError, match=r"fit on vectors of another model \(those\)"):
        other.encode(["a"], whitening=model.fit_whitening(texts, name="those"))
    # The same tensors compute something else with another base, or another constant of the norm.
    for change in ({"rotary_base": 5e4}, {"norm_eps": 1e-3}):
        alike = load(write(tmp_path / next(iter(change)), dataset, **change))
        with pytest.raises(ConfigError, match="fit on vectors of another model"):
            alike.encode(["a"], whitening=model.fit_whitening(texts, name="those"))
    with pytest.raises(ConfigError, match=r"this model has no pooler .*take cls, mean or first_l"):
        other.encode(["a"], "pooler")


@pytest.mark.parametrize("body", [b"", b"mean", b"PK\x03\x04 cut off", None])
def test_another_file_is_refused(body: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    if body is None:
        np.savez(path, mean=np.zeros(3))
    else:
        path.write_bytes(body)
    with pytest.raises(DataError, match=r"is not a file that `postnorm whiten` wrote"):
        Whitening.load(path)
