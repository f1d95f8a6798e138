"""What a pre-training run minimises: `objective:` in its config."""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import param

ObjectiveKind = Literal["mlm", "mlm_nsp", "mlm_sop", "mlm_sbo", "rtd"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """An objective of `pipeline.objectives`; each kind reads the fields that name it."""

    kind: ObjectiveKind = param(
        "mlm",
        "masked language modelling; with next-sentence prediction (BERT), sentence order (ALBERT) "
        "or span boundaries (SpanBERT); or replaced-token detection (ELECTRA)",
    )


MLM = ObjectiveConfig()
"""What a run minimises whose config says nothing of it."""
