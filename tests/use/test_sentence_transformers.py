"""The export for sentence-transformers: its files, and the vectors that they describe."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline.data.format import DatasetIndex
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.heads import Pool
from pipeline.use.hf import export_hf
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


def test_a_folder_of_sentence_transformers_keeps_its_setting(
    dataset: DatasetIndex, tmp_path: Path, processes: None
) -> None:
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    export_hf(write(tmp_path / "ours", dataset, **BERT), tmp_path / "hf")
    for mode, normalised in (("cls", False), ("mean", False), ("max", False), ("cls", True)):
        first = models.Transformer(str(tmp_path / "hf"), max_seq_length=7)
        modules = [first, models.Pooling(first.get_embedding_dimension(), mode)]
        modules += [models.Normalize()] * normalised
        theirs = library.SentenceTransformer(modules=modules, device="cpu")
        folder = tmp_path / f"{mode}-{normalised}"
        theirs.save(str(folder))
        refused = "2_Normalize" if normalised else "pooling max" if mode == "max" else ""
        _compare(folder, theirs.encode(LONG), refused)
        # Versions 2 to 5 wrote other files.
        names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
        flags = {
            f"pooling_mode_{name}": name.removesuffix("s") == f"{mode}_token" for name in names
        }
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
        length = {"max_seq_length": 7, "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_text(json.dumps(length))
        _compare(folder, theirs.encode(LONG), refused.replace(" ", " pooling_mode_"))
        # And those before them named the file by the class.
        (folder / "sentence_bert_config.json").rename(folder / "sentence_roberta_config.json")
        _compare(folder, theirs.encode(LONG), refused.replace(" ", " pooling_mode_"))
    (folder / "modules.json").write_text("[3]")
    with pytest.raises(CheckpointError, match=r"modules.json is damaged"):
        load(folder)


def _compare(folder: Path, expected: np.ndarray, refused: str) -> None:
    model = load(folder)
    if not refused:
        np.testing.assert_allclose(model.encode(LONG), expected, atol=1e-5)
        return
    with pytest.raises(ConfigError, match=refused):
        model.encode(LONG)
    vectors = model.encode(LONG, "cls")
    if refused == "2_Normalize":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_what_it_cannot_express_is_refused(dataset: DatasetIndex, tmp_path: Path) -> None:
    source = write(tmp_path / "ours", dataset)
    with pytest.raises(ConfigError, match="first_last_avg"):
        export_sentence_transformers(source, tmp_path / "st", "first_last_avg")
    with pytest.raises(ConfigError, match="this model has no pooler"):
        export_sentence_transformers(source, tmp_path / "st", "pooler")
    with pytest.raises(ConfigError, match=r"leave them out of --format hf"):
        run_verb("export", source, tmp_path / "hf", "--format", "hf", "--pooling", "mean")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
