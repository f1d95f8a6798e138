"""Both forms in which the Massive Text Embedding Benchmark calls an encoder."""

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import postnorm
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, DataError
from tests.use.test_model import TEXTS, write


class PromptType(Enum):
    query = "query"


PROMPTS = {"STSB-query": "1 ", "STSB": "2 ", "STS-query": "3 ", "STS": "4 ", "query": "5 "}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex) -> Any:
    folder: Path = write(tmp_path_factory.mktemp("models") / "small", dataset)
    return postnorm.load(folder)


def test_both_forms_give_the_models_vectors(model: Any) -> None:
    expected = model.encode(TEXTS, "first_last_avg", max_length=9)
    encoder = postnorm.SentenceEncoder(model, "first_last_avg", max_length=9)
    one = encoder.encode(TEXTS, task_name="STSB", show_progress_bar=False, convert_to_tensor=True)
    # mteb 2 gives an iterable of batches, a mapping of columns each.
    batches = [{"text": TEXTS[:2], "id": ["0", "1"]}, {"text": TEXTS[2:], "id": ["2"]}]
    names = SimpleNamespace(name="STSB", type="STS")
    two = encoder.encode(iter(batches), task_metadata=names, hf_split="test", hf_subset="default",
                         prompt_type=None, batch_size=2)  # fmt: skip
    for found in (one, two, encoder.encode([{"text": text} for text in TEXTS])):
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert encoder.mteb_model_meta is None


def test_the_most_special_prompt_is_taken(model: Any) -> None:
    metadata = SimpleNamespace(name="STSB", type="STS")
    left = dict(PROMPTS)
    for key, prompt in PROMPTS.items():
        encoder = postnorm.SentenceEncoder(model, prompts=left)
        call = {"task_metadata": metadata, "prompt_type": PromptType.query}
        expected = model.encode([prompt + text for text in TEXTS])
        np.testing.assert_allclose(encoder.encode(TEXTS, **call), expected, atol=1e-5)
        del left[key]
    encoder = postnorm.SentenceEncoder(model, prompts=PROMPTS)
    for call, prompt in (
        ({"task_name": "STSB", "prompt_type": "query"}, "1 "),
        ({"task_name": "other", "prompt_type": "document"}, ""),
        ({}, ""),
    ):
        expected = model.encode([prompt + text for text in TEXTS])
        np.testing.assert_allclose(encoder.encode(TEXTS, **call), expected, atol=1e-5)


def test_whitened_vectors_of_length_1(model: Any) -> None:
    whitening = model.fit_whitening([*TEXTS, "another", "one more"], 3, "cls")
    encoder = postnorm.SentenceEncoder(model, whitening=whitening, normalise=True)
    expected = model.encode(TEXTS, whitening=whitening)
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    found = encoder.encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for normalise in (False, True):
        other = postnorm.SentenceEncoder(model, whitening=whitening, normalise=not normalise)
        sizes = np.linalg.norm(other.encode(TEXTS, normalize_embeddings=normalise), axis=1)
        assert np.allclose(sizes, 1, atol=1e-5) == normalise
    cosines = expected @ expected.T
    np.testing.assert_allclose(encoder.similarity(found, found), cosines, atol=1e-5)
    np.testing.assert_allclose(encoder.similarity(2 * found[0], found), cosines[:1], atol=1e-5)
    pairwise = encoder.similarity_pairwise(found, 3 * found[::-1].copy())
    np.testing.assert_allclose(pairwise, np.diag(cosines[:, ::-1]), atol=1e-5)


def test_mistakes_are_named(model: Any) -> None:
    with pytest.raises(ConfigError, match="pooling='max' is not known"):
        postnorm.SentenceEncoder(model, "max")  # type: ignore[arg-type]
    encoder = postnorm.SentenceEncoder(model, prompts={"query": "q "})
    with pytest.raises(DataError, match="a batch has image but no text"):
        encoder.encode([{"image": [1]}])
    with pytest.raises(DataError, match="in place of a list of texts"):
        encoder.encode("a text")
    with pytest.raises(DataError, match=r"texts\[1\] is int, expected a string"):
        encoder.encode(["a", 3], prompt_type="query")
