"""The objective that a config names."""

from pipeline.config.objective import ObjectiveConfig
from pipeline.objectives.base import TextObjective
from pipeline.objectives.boundary import SpanBoundaries
from pipeline.objectives.mlm import MaskedLanguageModeling


def make_objective(config: ObjectiveConfig) -> TextObjective:
    """Return the objective of a pre-training run."""
    if config.kind == "mlm_sbo":
        return SpanBoundaries(config)
    return MaskedLanguageModeling()
