"""A model as the Massive Text Embedding Benchmark (MTEB, C-MTEB) takes it.

Both interfaces are met: that of mteb 1, `encode(sentences, task_name=, prompt_type=, ...)`, and
that of mteb 2, `encode(batches, task_metadata=, hf_split=, hf_subset=, prompt_type=, ...)` with
`mteb.models.EncoderProtocol`. mteb itself is not needed.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pipeline.errors import DataError
from pipeline.model.heads import Pool
from pipeline.use.model import Model
from pipeline.use.whiten import Vectors, Whitening


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
