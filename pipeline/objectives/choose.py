"""The objective that a config names."""

from pipeline.config.objective import ObjectiveConfig
from pipeline.objectives.base import TextObjective
from pipeline.objectives.mlm import MaskedLanguageModeling


def make_objective(config: ObjectiveConfig) -> TextObjective:
    """Return the objective of a pre-training run."""
    return MaskedLanguageModeling()
