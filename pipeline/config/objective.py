"""What a pre-training run minimises: `objective:` in its config."""

from dataclasses import dataclass
from typing import Literal

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
    pair_weight: float = param(
        1.0, "of mlm_nsp and mlm_sop: factor of the pairs' loss beside that of masked tokens", gt=0
    )

    def __post_init__(self) -> None:
        if self.pair_weight != 1.0 and self.pairs is None:
            raise ConfigError(
                f"objective.pair_weight={self.pair_weight} with objective.kind={self.kind}, which "
                "has no pairs; leave it out, or set objective.kind to mlm_nsp or mlm_sop"
            )

    @property
    def pairs(self) -> PairKind | None:
        """What is asked of a pair [CLS] A [SEP] B [SEP]; None: text is not laid out in pairs."""
        kinds: dict[str, PairKind] = {"mlm_nsp": "nsp", "mlm_sop": "sop"}
        return kinds.get(self.kind)


MLM = ObjectiveConfig()
"""What a run minimises whose config says nothing of it."""
