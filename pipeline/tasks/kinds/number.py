"""regress: a number for each row."""

from typing import Any, ClassVar

import numpy as np

from pipeline.errors import DataError
from pipeline.tasks.cells import OTHER_LABEL
from pipeline.tasks.formats import Row, TableFile
from pipeline.tasks.kinds import base
from pipeline.tasks.scores import Tables, correlations
from pipeline.tasks.types import Example, HeadSpec, TaskRows


class Number(base.Kind):
    """A number for each row."""

    loss: ClassVar = "regression"
    form: ClassVar = 0.5
    hugging_face: ClassVar = base.Kind.hugging_face._replace(
        answer="float(output.logits)", problem_type="regression"
    )

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> float:
        """Read a finite number."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise DataError(f"{row.where}: {value!r} is not a number; {OTHER_LABEL}") from None
        if number - number != 0:  # infinite, or NaN
            raise DataError(f"{row.where}: {value!r} is not a finite number; {OTHER_LABEL}")
        return number

    def outputs(self, spec: HeadSpec) -> tuple[str, ...]:
        """Return the task's name, for its only number."""
        return (spec.name,)

    def targets(self, spec: HeadSpec, batch: base.UnitBatch) -> base.Arrays:
        """Return `labels` (B,) float32."""
        return {"labels": np.array(batch.golds, np.float32)}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the mean square of the numbers."""
        golds: list[Any] = [row.gold for row in data.examples]
        return float((np.array(golds, np.float64) ** 2).mean())

    def loss_of_prior(self, golds: base.Values) -> float:
        """Return their variance, the loss of their mean."""
        return float(np.array(golds, np.float64).var())

    def prediction(self, spec: HeadSpec, example: Example, decided: base.Decided) -> base.Answered:
        """Return the number."""
        [(_, [score])] = decided
        return base.short(score), None

    def tables(
        self, golds: base.Values, predictions: base.Values, labels: base.Labels, scorer: str
    ) -> Tables:
        """Return Pearson's and Spearman's correlations."""
        return correlations(golds, predictions)

    def constants(self, golds: base.Values, labels: base.Labels) -> list[float]:
        """Return the mean."""
        return [float(np.mean(golds))]


REGRESS = Number("regress", ("text",), ("spearman", "pearson"), optional=("text_b",))
