"""Vectors of sentences in the forms that other programs take: MTEB and sentence-transformers.

`SentenceEncoder` meets both interfaces of the Massive Text Embedding Benchmark (MTEB, C-MTEB), that
of mteb 1, `encode(sentences, task_name=, prompt_type=, ...)`, and that of mteb 2, `encode(batches,
task_metadata=, hf_split=, hf_subset=, prompt_type=, ...)` with `mteb.models.EncoderProtocol`.

`postnorm export RUN OUT --format sentence-transformers` writes the folder of `--format hf` and
beside it, as sentence-transformers 2 to 6 read them: modules.json, the longest row, the pooling,
and a linear layer for BERT's pooler and for a whitening. Neither package is needed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from pipeline.errors import ConfigError, DataError
from pipeline.model.heads import Pool
from pipeline.runtime import tensors
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.use import hf
from pipeline.use.export import ExportReport
from pipeline.use.folder import publishing
from pipeline.use.model import Model
from pipeline.use.whiten import Vectors, Whitening

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


class SentenceEncoder:
    """Vectors of sentences with one setting, for programs that call `encode(sentences, **...)`.

    Example:
        >>> encoder = postnorm.SentenceEncoder(model, pooling="mean")  # doctest: +SKIP
        >>> mteb.evaluate(encoder, mteb.get_tasks(tasks=["STSB"]))  # doctest: +SKIP
    """

    mteb_model_meta: Any = None
    """An `mteb.ModelMeta` that names the model in mteb's results, set by you; mteb 2 looks for it.

    None gives results without a name.
    """

    def __init__(
        self,
        model: Model,
        pooling: Pool | None = None,
        *,
        max_length: int | None = None,
        whitening: Whitening | None = None,
        prompts: Mapping[str, str] | None = None,
        normalise: bool = False,
    ) -> None:
        """Choose the setting.

        Args:
            model: from `postnorm.load`.
            pooling: as in `Model.encode`, like the two that follow.
            max_length: as in `Model.encode`.
            whitening: as in `Model.encode`.
            prompts: texts put before every sentence, by task-and-prompt-type ("STSB-query"), task,
                type-and-prompt-type ("STS-query"), type of task, or prompt type ("query",
                "document"); the first that is there is taken, as mteb does.
            normalise: whether vectors get length 1.

        Raises:
            ConfigError: as `Model.encode`.
        """
        self.model = model
        self.pooling, self.max_length = model.setting(pooling, max_length, whitening)
        self.whitening, self.normalise = whitening, normalise
        self.prompts = dict(prompts or {})

    def encode(
        self,
        sentences: Iterable[Any],
        *,
        task_metadata: Any = None,
        task_name: str | None = None,
        prompt_type: Any = None,
        batch_size: int = 32,
        normalize_embeddings: bool | None = None,
        **_: Any,
    ) -> Vectors:
        """Compute vectors in the order of the sentences; other keywords change nothing.

        Args:
            sentences: strings; or batches, mappings whose "text" is a list of strings.
            task_metadata: mteb 2's, whose `name` and `type` choose the prompt.
            task_name: mteb 1's name of the task.
            prompt_type: "query", "document", or an enumeration of such values.
            batch_size: as in `Model.encode`.
            normalize_embeddings: in place of `normalise`, as sentence-transformers calls it.

        Returns:
            (N, D or K) float32.

        Raises:
            PostnormError: as `Model.encode`, or a batch has no text.
        """
        name = getattr(task_metadata, "name", task_name)
        kind = getattr(task_metadata, "type", None)
        prompt = self._prompt(name, kind, getattr(prompt_type, "value", prompt_type))
        chosen = self.pooling, batch_size, self.max_length, self.whitening
        vectors = self.model.encode(_texts(sentences, prompt), *chosen)
        units = self.normalise if normalize_embeddings is None else normalize_embeddings
        return normalize(torch.from_numpy(vectors), dim=-1).numpy() if units else vectors

    def similarity(self, one: Any, other: Any) -> Tensor:
        """Compute the (N, M) cosines of (N, K) and (M, K) vectors, or of single ones."""
        return _units(one) @ _units(other).T

    def similarity_pairwise(self, one: Any, other: Any) -> Tensor:
        """Compute the (N,) cosines of (N, K) vectors with (N, K) others."""
        return (_units(one) * _units(other)).sum(-1)

    def _prompt(self, name: str | None, kind: str | None, prompt_type: str | None) -> str:
        for task in (name, kind):
            for key in (f"{task}-{prompt_type}", task):
                if task and key in self.prompts:
                    return self.prompts[key]
        return self.prompts.get(prompt_type or "", "")


def _units(vectors: Any) -> Tensor:
    tensor = torch.as_tensor(vectors).float()
    return normalize(tensor if tensor.ndim > 1 else tensor[None], dim=-1)


def _texts(sentences: Iterable[Any], prompt: str) -> Iterator[Any]:
    if isinstance(sentences, str):
        raise DataError("a text was given in place of a list of texts; write [text]")
    for each in sentences:
        if isinstance(each, Mapping) and "text" not in each:
            raise DataError(
                f"a batch has {', '.join(map(str, each))} but no text; this model reads text alone"
            )
        batch = each["text"] if isinstance(each, Mapping) else [each]
        for text in [batch] if isinstance(batch, str) else batch:
            yield prompt + text if isinstance(text, str) else text


def export_sentence_transformers(
    source: str | Path,
    out: Path,
    pooling: Pool | None = None,
    max_length: int | None = None,
    whitening_file: Path | None = None,
    license_id: str = hf.NO_LICENSE,
) -> ExportReport:
    """Write a model for sentence-transformers, which makes the vectors of `Model.encode`.

    Args:
        source: a model, as `load_source` reads it.
        out: folder to write.
        pooling: as in `Model.encode`, like max_length; not "first_last_avg".
        max_length: tokens of a text.
        whitening_file: that `Whitening.save` wrote; it has pooling and length.
        license_id: for the card, as hubs name it.

    Raises:
        PostnormError: as `export_hf` and `Model.encode`; or the pooling cannot be expressed.
    """
    trained = hf.load_for_hf(source)
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
        report = hf.write_hf(trained, folder)
        _write_modules(folder, pooling, max_length, trained.model.config.hidden_size, layers)
        about = _about(pooling, max_length, whitening)
        card = hf.masked_card(trained, out.name)
        text = f"{card.text}\n\n{_CARD.format(name=out.name, table=about)}"
        card = replace(card, metadata=_METADATA, text=text)
        family = hf.native_family(trained.model.config, trained.tokenizer)
        body = hf.model_card(out.name, trained, family, report.max_abs_diff, card, license_id)
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
