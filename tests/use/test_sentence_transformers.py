"""The export for sentence-transformers: its files, and the vectors that they describe."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError
from pipeline.use.model import load
from pipeline.use.sentence_transformers import export_sentence_transformers
from tests.use.test_model import BERT, TEXTS, write

LONG = [*TEXTS, " ".join(TEXTS) * 9]
CASES: dict[str, tuple[dict[str, Any], str | None, int | None, int | None]] = {
    "own code": ({}, None, None, None),
    "own code, whitened": ({}, "cls", 9, 4),
    "bert": ({**BERT, "pooler": True}, "mean", 11, None),
    "bert, pooler, whitened": ({**BERT, "pooler": True}, "pooler", 32, 5),
}
"""Changes of the model, pooling, length, and size of a whitening."""

# Does what the files say, as sentence-transformers documents them, without this project.
READER = """
import json, sys
from pathlib import Path
for name in ("pipeline", "data_prep", "launch"):
    sys.modules[name] = None
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer
folder, texts, out = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
read = lambda name: json.loads((folder / name).read_text())
modules = read("modules.json")
assert [m["idx"] for m in modules] == list(range(len(modules)))
assert modules[0]["path"] == "" and modules[0]["type"].endswith(".Transformer")
assert modules[1]["type"].endswith(".Pooling")
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
length = read("sentence_bert_config.json")["max_seq_length"]
batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
with torch.no_grad():
    x = model(**batch).last_hidden_state
    pooling = read(modules[1]["path"] + "/config.json")
    assert pooling["word_embedding_dimension"] == x.shape[-1]
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value]
    mask = batch["attention_mask"][..., None].float()
    x = {
        "pooling_mode_cls_token": lambda: x[:, 0],
        "pooling_mode_mean_tokens": lambda: (x * mask).sum(1) / mask.sum(1),
    }[modes[0]]()
    assert len(modes) == 1
    for module in modules[2:]:
        assert module["type"].endswith(".Dense")
        config = read(module["path"] + "/config.json")
        tensors = load_file(folder / module["path"] / "model.safetensors")
        weight, bias = tensors["linear.weight"], tensors["linear.bias"]
        assert weight.shape == (config["out_features"], config["in_features"]) and config["bias"]
        x = x @ weight.T + bias
        home, _, name = config["activation_function"].rpartition(".")
        x = getattr(sys.modules[home], name)()(x)
np.save(out, x.numpy())
"""


def _exported(case: str, dataset: DatasetIndex, path: Path) -> tuple[Path, np.ndarray]:
    """The folder of a case, and the vectors of `Model.encode`."""
    changes, pooling, length, size = CASES[case]
    source = write(path / "ours", dataset, **changes)
    model = load(source)
    whitening = file = None
    if size is not None:
        words = " ".join(TEXTS).split()
        whitening = model.fit_whitening(words, size, pooling, max_length=length, name="words.txt")  # type: ignore[arg-type]
        file = path / "whitening.npz"
        whitening.save(file)
        # Both are in the file.
        pooling = length = None
    export_sentence_transformers(source, path / "st", pooling, length, file)  # type: ignore[arg-type]
    return path / "st", model.encode(LONG, pooling, max_length=length, whitening=whitening)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("processes")
def test_the_files_describe_the_models_vectors(
    case: str, dataset: DatasetIndex, tmp_path: Path
) -> None:
    folder, expected = _exported(case, dataset, tmp_path)
    out = tmp_path / "vectors.npy"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder), json.dumps(LONG), str(out)],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(out), expected, atol=1e-4)
    _, pooling, length, size = CASES[case]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert {
        None: "mean of the last",
        "mean": "mean of the last",
        "cls": "[CLS]",
        "pooler": "pooler",
    }[pooling] in card
    assert f"| {length or 512} tokens with [CLS] and [SEP]" in card
    assert "| normalisation | none" in card
    fit_on = f"to {size} dimensions, fit without labels on 16 texts (words.txt)"
    assert (fit_on if size else "| whitening | none |") in card


@pytest.mark.parametrize("case", CASES)
def test_sentence_transformers_computes_the_same(
    case: str, dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder, expected = _exported(case, dataset, tmp_path)
    model = library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(model.encode(LONG), expected, atol=1e-4)


def test_what_it_cannot_express_is_refused(dataset: DatasetIndex, tmp_path: Path) -> None:
    source = write(tmp_path / "ours", dataset)
    with pytest.raises(ConfigError, match="first_last_avg cannot be exported: .* last layer alone"):
        export_sentence_transformers(source, tmp_path / "st", "first_last_avg")
    with pytest.raises(ConfigError, match="this model has no pooler"):
        export_sentence_transformers(source, tmp_path / "st", "pooler")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
