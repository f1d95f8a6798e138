"""What a pre-training run minimises: `objective:` in its config."""

import json
from dataclasses import dataclass, fields, replace
from typing import Literal

from pipeline.config.model import ModelConfig
from pipeline.config.schema import param
from pipeline.errors import ConfigError

ObjectiveKind = Literal["mlm", "mlm_nsp", "mlm_sop", "mlm_sbo", "rtd"]
PairKind = Literal["nsp", "sop"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """An objective of `pipeline.objectives`; each kind reads the fields that name it."""

    kind: ObjectiveKind = param(
        "mlm",
        "masked language modelling; with next-sentence prediction (BERT), sentence order (ALBERT) "
        "or span boundaries (SpanBERT); or replaced-token detection (ELECTRA)",
    )
    generator_size: float = param(
        0.25, "of rtd: width, heads and feed-forward of the generator over the model's", gt=0, le=1
    )
    generator_layers: float = param(
        1.0, "of rtd: layers of the generator over the model's", gt=0, le=1
    )
    temperature: float = param(
        1.0, "of rtd: the generator's logits are divided by it before a token is drawn", gt=0
    )
    discriminator_weight: float = param(
        50.0, "of rtd: factor of the discriminator's loss beside the generator's", gt=0
    )
    pair_weight: float = param(
        1.0, "of mlm_nsp and mlm_sop: factor of the pairs' loss beside that of masked tokens", gt=0
    )
    boundary_weight: float = param(
        1.0, "of mlm_sbo: factor of the loss of span boundaries beside that of masked tokens", gt=0
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), _KINDS_OF.get(field.name)
            if kinds and self.kind not in kinds and value != field.default:
                raise ConfigError(
                    f"objective.{field.name}={value} has no meaning with objective.kind="
                    f"{self.kind}; leave it out (objective.{field.name}="
                    f"{json.dumps(field.default)} on the command line), or set objective.kind="
                    f"{kinds[0]}"
                )

    @property
    def pairs(self) -> PairKind | None:
        """What is asked of a pair [CLS] A [SEP] B [SEP]; None: text is not laid out in pairs."""
        kinds: dict[str, PairKind] = {"mlm_nsp": "nsp", "mlm_sop": "sop"}
        return kinds.get(self.kind)


_KINDS_OF: dict[str, tuple[ObjectiveKind, ...]] = {
    "boundary_weight": ("mlm_sbo",),
    "pair_weight": ("mlm_nsp", "mlm_sop"),
    "generator_size": ("rtd",),
    "generator_layers": ("rtd",),
    "temperature": ("rtd",),
    "discriminator_weight": ("rtd",),
}
"""Which kinds read a field."""


MLM = ObjectiveConfig()
"""What a run minimises whose config says nothing of it."""


def generator_of(model: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
    """Return the generator of replaced-token detection beside a model, its discriminator.

    It keeps the model's head size, has a whole number of heads and layers, one at least, and lives
    on the model's embeddings.
    """
    heads = max(1, round(objective.generator_size * model.num_heads))
    return replace(
        model,
        embedding_size=model.embedding_width,
        hidden_size=heads * model.head_size,
        num_heads=heads,
        ffn_size=max(1, round(model.ffn_size * heads / model.num_heads)),
        num_layers=max(1, round(objective.generator_layers * model.num_layers)),
        pooler=False,
    )
