"""The objective that a config names."""

from pipeline.config.objective import ObjectiveConfig
from pipeline.objectives.base import TextObjective
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.objectives.pairs import PairClassification


def make_objective(config: ObjectiveConfig) -> TextObjective:
    """Return the objective of a pre-training run."""
    if config.pairs is not None:
        return PairClassification(config.pairs, config.pair_weight)
    return MaskedLanguageModeling()
