"""What a pre-training run minimises: `objective:` in its config."""

from dataclasses import dataclass, fields
from typing import Literal

from pipeline.config.schema import param
from pipeline.errors import ConfigError

ObjectiveKind = Literal["mlm", "mlm_nsp", "mlm_sop", "mlm_sbo", "rtd"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """An objective of `pipeline.objectives`; each kind reads the fields that name it."""

    kind: ObjectiveKind = param(
        "mlm",
        "masked language modelling; with next-sentence prediction (BERT), sentence order (ALBERT) "
        "or span boundaries (SpanBERT); or replaced-token detection (ELECTRA)",
    )
    boundary_weight: float = param(
        1.0, "mlm_sbo: factor of the loss of span boundaries; that of masked tokens has 1", gt=0
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), _KINDS_OF.get(field.name)
            if kinds and self.kind not in kinds and value != field.default:
                raise ConfigError(
                    f"objective.{field.name}={value} has no meaning with objective.kind="
                    f"{self.kind}; leave it out, or set objective.kind={kinds[0]}"
                )


_KINDS_OF: dict[str, tuple[ObjectiveKind, ...]] = {"boundary_weight": ("mlm_sbo",)}
"""Which kinds read a field."""


MLM = ObjectiveConfig()
"""What a run minimises whose config says nothing of it."""
