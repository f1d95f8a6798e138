"""What an evaluation shows and leaves: a table or JSON, and lines of RUN/evaluations.jsonl."""

import json
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

from pipeline.config.load import provenance
from pipeline.runtime import dist
from pipeline.runtime.files import AppendedFile, read_json_lines
from pipeline.train.evaluate import Score
from pipeline.use.evaluate import Evaluation, Evaluator
from pipeline.use.folder import is_model_folder

logger = logging.getLogger(__name__)

EVALUATIONS_FILE = "evaluations.jsonl"
"""In a run's folder: one line for each checkpoint that was evaluated apart from training."""


class Report:
    """What rank 0 shows and writes."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Shows nothing yet."""
        self._evaluator = evaluator
        self._provenance: dict[str, str] | None = None
        run = evaluator.request.source
        self._path = None if is_model_folder(run) else run / EVALUATIONS_FILE

    def earlier_steps(self) -> frozenset[int]:
        """Steps that `--all` need not evaluate again. Collective.

        This SLURM job did so before it was preempted and started again.
        """
        return dist.from_first(self._earlier_steps())

    def record(self, found: Evaluation) -> dict[str, Any]:
        """All that is known of an evaluation, in plain values; JSON has no NaN, so it is None."""
        evaluator = self._evaluator
        self._provenance = self._provenance or provenance()
        sources = {name: _numbers(score) for name, score in found.result.by_source.items()}
        return {
            "step": found.step,
            "model": str(found.path),
            **_numbers(found.result.total),
            "sources": sources,
            "alpha": found.alpha,
            "setting": evaluator.setting,
            "micro_batch": evaluator.micro_batch,
            "world_size": evaluator.process.world_size,
            "unix_s": time.time(),
            "host": evaluator.process.host,
            "job": evaluator.process.job,
            **self._provenance,
        }

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line to the run's file; a model folder has none.

        Raises:
            OSError: it cannot be written.
        """
        if self._path is not None:
            AppendedFile(self._path).append((json.dumps(record) + "\n").encode(), end=b"\n")

    def head(self) -> list[str]:
        """What the table is about, and its first line."""
        setting = self._evaluator.setting
        about = (
            f"{self._evaluator.request.source}: {setting['sequences']:,} held-out sequences of "
            f"{setting['seq_len']} from {setting['data']}, {setting['precision']}"
        )
        names = ("step", "source", "loss", "perplexity", "accuracy", "masked tokens")
        return [about, self._line(*names)]

    def lines(self, found: Evaluation) -> Iterator[str]:
        """Lines of the table: the whole, and sources where there are several."""
        scores = {"all": found.result.total}
        if len(found.result.by_source) > 1:
            scores |= found.result.by_source
        step = "-" if found.step is None else f"{found.step:,}"
        for name, score in scores.items():
            yield self._line(
                step, name, f"{score.loss:.5f}", f"{score.perplexity:,.2f}",
                f"{score.means['accuracy']:.5f}", f"{score.counts['num_masked']:,}",
            )  # fmt: skip

    def _earlier_steps(self) -> frozenset[int]:
        request, process = self._evaluator.request, self._evaluator.process
        if self._path is None or not request.every or process.job == "local":
            return frozenset()
        job = process.job.partition(".")[0]
        steps = frozenset(
            record["step"]
            for record in read_json_lines(self._path)
            if record["job"].partition(".")[0] == job
            and record["setting"] == self._evaluator.setting
        )
        if process.is_first and steps:
            logger.info(
                "job %s has evaluated steps %s before, see %s", job,
                ", ".join(map(str, sorted(steps))), self._path,
            )  # fmt: skip
        return steps

    def _line(self, step: str, name: str, *numbers: str) -> str:
        width = max(map(len, ("source", *self._evaluator.sources)))
        cells = [text.rjust(width) for text, width in zip(numbers, (9, 12, 9, 14), strict=True)]
        return "  ".join([step.rjust(10), name.ljust(width), *cells])


def _numbers(score: Score) -> dict[str, float | None]:
    found = {
        "loss": score.loss, "perplexity": score.perplexity, "accuracy": score.means["accuracy"],
        "num_masked": score.counts["num_masked"],
    }  # fmt: skip
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
