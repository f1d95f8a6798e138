"""The export for sentence-transformers: its files, and the vectors that they describe."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError
from pipeline.model.heads import Pool
from pipeline.use.model import load
from pipeline.use.sentences import export_sentence_transformers
from tests.use.test_model import BERT, TEXTS, write
from tests.use.test_sts import run_verb

LONG = [*TEXTS, " ".join(TEXTS) * 9]
CASES: dict[str, tuple[dict[str, Any], Pool, int, int | None]] = {
    "own code, whitened": ({}, "mean", 9, 4),
    "bert's pooler": ({**BERT, "pooler": True}, "pooler", 11, None),
}
"""Changes of the model, pooling, length, and size of a whitening."""


class Exported(NamedTuple):
    case: str
    folder: Path
    vectors: np.ndarray
    """Those of `Model.encode`."""


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
             dataset: DatasetIndex, processes: None) -> Exported:  # fmt: skip
    path = tmp_path_factory.mktemp("exported")
    changes, pooling, length, size = CASES[request.param]
    source = write(path / "ours", dataset, **changes)
    model = load(source)
    if size is None:
        export_sentence_transformers(source, path / "st", pooling, length)
        return Exported(request.param, path / "st", model.encode(LONG, pooling, max_length=length))
    words = " ".join(TEXTS).split()
    whitening = model.fit_whitening(words, size, pooling, max_length=length, name="words.txt")
    whitening.save(path / "whitening.npz")
    # Pooling and length are in the file.
    export_sentence_transformers(source, path / "st", whitening_file=path / "whitening.npz")
    return Exported(request.param, path / "st", model.encode(LONG, whitening=whitening))


def test_the_card_names_the_setting(exported: Exported) -> None:
    _, pooling, length, size = CASES[exported.case]
    card = (exported.folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    meaning = {"mean": "mean of the last layer's", "pooler": "BERT's pooler"}[pooling]
    fit_on = f"to {size} dimensions, fit without labels on 15 texts (words.txt)"
    for row in (
        f"| pooling | {meaning}",
        f"| longest text | {length} tokens",
        "| normalisation | none",
        f"| whitening | {fit_on if size else 'none'}",
    ):
        assert row in card


def test_sentence_transformers_computes_the_same(exported: Exported) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(exported.folder), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(model.encode(LONG), exported.vectors, atol=1e-4)


def test_what_it_cannot_express_is_refused(dataset: DatasetIndex, tmp_path: Path) -> None:
    source = write(tmp_path / "ours", dataset)
    with pytest.raises(ConfigError, match="first_last_avg"):
        export_sentence_transformers(source, tmp_path / "st", "first_last_avg")
    with pytest.raises(ConfigError, match="this model has no pooler"):
        export_sentence_transformers(source, tmp_path / "st", "pooler")
    with pytest.raises(ConfigError, match=r"leave them out of --format hf"):
        run_verb("export", source, tmp_path / "hf", "--format", "hf", "--pooling", "mean")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
