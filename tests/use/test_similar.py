"""Tables of similar tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.run import run
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.masking import similar_tokens
from pipeline.errors import ConfigError, DataError
from pipeline.use.vectors import nearest, write_similar
from tests.support.prepare import config_of, write_texts


def test_nearest_are_those_of_all_cosines_within_a_group() -> None:
    vectors = np.random.default_rng(2).normal(size=(1500, 8)).astype(np.float32)
    pieces = [("##" if number % 3 == 0 else "") + str(number) for number in range(1500)]
    table = nearest(vectors, pieces, np.arange(5, 1500), 4)
    assert (table[:5] == -1).all()
    centred = vectors[5:] - vectors[5:].mean(0)
    cosines = centred @ centred.T / np.outer(*[np.linalg.norm(centred, axis=1)] * 2)
    for token in (5, 6, 700, 1499):
        group = [other for other in range(5, 1500)
                 if other != token and (other % 3 == 0) == (token % 3 == 0)]  # fmt: skip
        best = sorted(group, key=lambda other: -cosines[token - 5, other - 5])[:4]
        assert table[token].tolist() == best
    vectors = np.eye(4, dtype=np.float32)
    table = nearest(vectors, ["a", "b", "##c", "##d"], np.arange(4), 3)
    assert table.tolist() == [[1, -1, -1], [0, -1, -1], [3, -1, -1], [2, -1, -1]]


def test_another_vocabulary_of_the_same_size_is_refused(
    straight_run: Path, dataset: DatasetIndex, prep_config: Path, corpus: Path, tmp_path: Path
) -> None:
    assert write_similar(straight_run, str(dataset.folder), tmp_path / "same.npy", 2) > 100
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    table = str.maketrans("aeiou", "eioua")
    other = write_texts(tmp_path / "other.jsonl", [row["text"].translate(table) for row in rows])
    folder = tmp_path / "other"
    run(config_of(prep_config, folder, other))
    assert read_index(folder).vocabulary.size == dataset.vocabulary.size
    with pytest.raises(ConfigError, match=r"expected 1 or more, and the model of that vocabulary"):
        write_similar(straight_run, str(folder), tmp_path / "other.npy", 2)
    assert not (tmp_path / "other.npy").exists()
    # A table that was made before the tokenizer was trained anew.
    here, there, made = dataset, read_index(folder), str(tmp_path / "same.npy")
    assert similar_tokens(made, here.vocabulary, here.tokenizer_sha256).shape[1] == 2
    with pytest.raises(DataError, match=r"same.npy is for the tokenizer [0-9a-f]{12}, this"):
        similar_tokens(made, there.vocabulary, there.tokenizer_sha256)
