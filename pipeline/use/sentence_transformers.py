"""`postnorm export RUN OUT --format sentence-transformers`: a folder that it loads as it is.

The folder of `--format hf` and beside it, as sentence-transformers 2 to 6 read them: modules.json,
the longest row, the pooling, and a linear layer for BERT's pooler and for a whitening.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.model.heads import Pool
from pipeline.runtime import tensors
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.use.folder import ExportReport, publishing
from pipeline.use.hf import load_for_hf, masked_card, model_card, native_family, write_hf
from pipeline.use.model import Model
from pipeline.use.whiten import Whitening

_METADATA = (
    "library_name: sentence-transformers\npipeline_tag: sentence-similarity\n"
    "tags: [postnorm, encoder, sentence-transformers]"
)
_CARD = """\
## Sentence vectors

```python
from sentence_transformers import SentenceTransformer
vectors = SentenceTransformer("{name}", trust_remote_code=True).encode(["a text", "another"])
```
| | |
|---|---|
{table}

Scores change with each of these, and with a prompt: name them beside a score.

## Model"""
_MEANINGS = {
    "cls": "the last layer's state of the first token, [CLS]",
    "pooler": "BERT's pooler (linear and tanh) on the last layer's state of the first token, [CLS]",
    "mean": "mean of the last layer's states of all tokens, [CLS] and [SEP] included",
}


def export_sentence_transformers(
    source: Path,
    out: Path,
    pooling: Pool | None = None,
    max_length: int | None = None,
    whitening_file: Path | None = None,
) -> ExportReport:
    """Write a model for sentence-transformers, which makes the vectors of `Model.encode`.

    Args:
        source: run folder, or model folder.
        out: folder to write.
        pooling: as in `Model.encode`, like max_length; not "first_last_avg".
        max_length: tokens of a text.
        whitening_file: that `Whitening.save` wrote; it has pooling and length.

    Raises:
        PostnormError: as `export_hf` and `Model.encode`; or the pooling cannot be expressed.
    """
    trained = load_for_hf(source)
    trained.require_tokenizer()
    whitening = None if whitening_file is None else Whitening.load(whitening_file)
    model = Model(trained, torch.device("cpu"), torch.float32)
    pooling, max_length = model.setting(pooling, max_length, whitening)
    if pooling == "first_last_avg":
        raise ConfigError(
            "pooling=first_last_avg cannot be exported: sentence-transformers pools the states of "
            "the last layer alone; take mean, cls or pooler"
        )
    layers: list[tuple[Tensor, Tensor, str]] = []
    if pooling == "pooler":
        pooler = trained.model.encoder.pooler
        layers.append(
            (pooler.weight.detach(), pooler.bias.detach(), "torch.nn.modules.activation.Tanh")
        )
    if whitening is not None:
        bias = -whitening.mean @ whitening.weight
        weight, bias = whitening.weight.T.astype(np.float32), bias.astype(np.float32)
        tensor = torch.from_numpy(weight).contiguous()
        layers.append((tensor, torch.from_numpy(bias), "torch.nn.modules.linear.Identity"))
    with publishing(out) as folder:
        report = write_hf(trained, folder)
        _write_modules(folder, pooling, max_length, trained.model.config.hidden_size, layers)
        about = _about(pooling, max_length, whitening)
        card = masked_card(trained, out.name)
        text = f"{card.text}\n\n{_CARD.format(name=out.name, table=about)}"
        card = replace(card, metadata=_METADATA, text=text)
        family = native_family(trained.model.config)
        body = model_card(out.name, trained, family, report.max_abs_diff, card)
        write_atomic(folder / "README.md", body.encode())
    return report


def _about(pooling: Pool, max_length: int, whitening: Whitening | None) -> str:
    fit_on = "none"
    if whitening is not None:
        fit_on = (
            f"to {whitening.size} dimensions, fit without labels on {whitening.num_texts:,} texts "
            f"({whitening.texts}); transductive if these are evaluated"
        )
    rows = {
        "pooling": _MEANINGS[pooling],
        "longest text": f"{max_length} tokens with [CLS] and [SEP]; the beginning is kept",
        "normalisation": "none: vectors have any length, compare them by cosine",
        "prompt": "none",
        "whitening": fit_on,
    }
    return "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _write_modules(
    folder: Path, pooling: Pool, max_length: int, width: int,
    layers: list[tuple[Tensor, Tensor, str]],
) -> None:  # fmt: skip
    """Write what sentence-transformers reads beside the model: `layers` are weight, bias, f."""
    settings: dict[str, Any] = {"max_seq_length": max_length, "do_lower_case": False}
    write_json_atomic(folder / "sentence_bert_config.json", settings)
    settings = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json_atomic(folder / "config_sentence_transformers.json", settings)
    is_mean = pooling == "mean"
    settings = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": not is_mean,
        "pooling_mode_mean_tokens": is_mean,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    (folder / "1_Pooling").mkdir()
    write_json_atomic(folder / "1_Pooling" / "config.json", settings)
    paths = {"": "Transformer", "1_Pooling": "Pooling"}
    for number, (weight, bias, activation) in enumerate(layers, start=2):
        path = folder / f"{number}_Dense"
        path.mkdir()
        settings = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": True,
            "activation_function": activation,
        }
        write_json_atomic(path / "config.json", settings)
        values = {"linear.weight": weight, "linear.bias": bias}
        tensors.write_file(values, path / "model.safetensors")
        paths[path.name] = "Dense"
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
        for n, (path, name) in enumerate(paths.items())
    ]
    write_json_atomic(folder / "modules.json", modules)
