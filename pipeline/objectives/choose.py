"""The objective that a config names, or the identity of a checkpoint."""

import json
from typing import Any

from pipeline.config import schema, strict_yaml
from pipeline.config.objective import MLM, ObjectiveConfig
from pipeline.objectives.base import TextObjective
from pipeline.objectives.boundary import SpanBoundaries
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.objectives.pairs import PairClassification
from pipeline.objectives.rtd import ReplacedTokenDetection


def make_objective(config: ObjectiveConfig) -> TextObjective:
    """Return the objective of a pre-training run."""
    if config.pairs is not None:
        return PairClassification(config.pairs, config.pair_weight)
    if config.kind == "rtd":
        return ReplacedTokenDetection(config)
    if config.kind == "mlm_sbo":
        return SpanBoundaries(config)
    return MaskedLanguageModeling()


def read_objective(identity: dict[str, Any], origin: str) -> ObjectiveConfig:
    """Read the objective from what a manifest says of a run; without a word of it, it is MLM.

    Raises:
        ConfigError: a key or value is wrong.
    """
    if "objective" not in identity:
        return MLM
    node = strict_yaml.parse(json.dumps(identity["objective"]), origin, with_lines=False)
    return schema.build(ObjectiveConfig, node, "objective")
