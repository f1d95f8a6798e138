"""How a run is doing, in the numbers that one looks at first: of its metrics.jsonl and its starts.

`status` prints them and TensorBoard's first picture shows them, so here is neither torch nor numpy.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.runs import RunConfig
from pipeline.config.schedule import share_done
from pipeline.runtime.run_folder import RunFolder

Record = dict[str, Any]
_OF_TEXT = {"unigram_entropy", "perplexity"}
"""Keys that an evaluation has where the loss is one of text."""
_LOOKED_AT = {"step", "kind", "attempt", "loss", "lr", "tokens_per_s", "stage", "elapsed_s"}
WHOLE = "all"
"""Name of the data where it is not told apart by source."""


class MetricLines:
    """The lines of metrics.jsonl without those of steps that a later start computed again."""

    def __init__(self, run: RunFolder, *, slim: bool = False) -> None:
        """Read nothing yet; `slim` keeps of each line what a `Glance` looks at."""
        self._run, self._slim = run, slim
        self._offset = 0
        self._attempt: int | None = None
        self.kept: list[Record] = []

    def update(self, attempts: Iterable[Record]) -> list[Record]:
        """Read what was written since the last call; return all lines."""
        resumed = {line["attempt"]: line["resumed_from_step"] for line in attempts}
        for line in self._new():
            if line["attempt"] != self._attempt:
                self._attempt = line["attempt"]
                from_step = resumed.get(self._attempt)
                self.kept = [
                    old for old in self.kept if from_step is not None and old["step"] <= from_step
                ]
            self.kept.append(line)
        return self.kept

    def valid(self, attempts: Sequence[Record]) -> list[Record]:
        """Read all lines, without those of steps that the last start is about to compute again."""
        lines, last = self.update(attempts), attempts[-1]
        if lines and lines[-1]["attempt"] != last["attempt"]:
            lines = [line for line in lines if line["step"] <= (last["resumed_from_step"] or 0)]
        return lines

    def _new(self) -> Iterable[Record]:
        if not self._run.metrics.is_file():
            return
        with self._run.metrics.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                try:
                    # Replaced, not refused: a line cut within a character hides no other.
                    line = json.loads(raw.decode("utf-8", "replace"))
                except ValueError:
                    if not raw.endswith(b"\n"):
                        return  # it is being written
                    line = None
                self._offset += len(raw)
                if isinstance(line, dict):
                    yield _slimmed(line) if self._slim else line


def _slimmed(line: Record) -> Record:
    return {
        key: value
        for key, value in line.items()
        if key in _LOOKED_AT | _OF_TEXT or key.startswith("epoch")
    }


@dataclass(frozen=True)
class LossTrack:
    """A loss over a run, nats a token where the objective is one of text."""

    newest: float | None
    """None: it was NaN or infinite."""
    step: int
    first: float | None
    first_step: int
    best: float | None
    """The lowest of all log lines or evaluations."""
    best_step: int


@dataclass(frozen=True)
class Glance:
    """The numbers that one looks at first; None: not known, or not yet."""

    step: int
    num_steps: int
    share_done: float
    """The larger of the shares of steps and of a time budget."""
    stage: str | None
    """Name of the stage of the last step; None: the run has no stages."""
    loss: LossTrack | None
    held_out: LossTrack | None
    unigram_entropy: float | None
    """Loss of a model that knows only how frequent each token is, nats."""
    uniform_guess: float | None
    """Loss of a model that knows nothing, log of the vocabulary's size; None: no text run."""
    lr: float | None
    tokens_per_s: float | None
    epochs: dict[str, float]
    """How often the data was seen, by stage and source where the run has several."""
    restarts: tuple[int, ...]
    """The step that each start but the first went on from."""
    rewinds: tuple[int, ...]
    """The step that the run went back to, each time that it did."""
    stage_steps: tuple[int, ...]
    """The step of the first log line of each stage but the first."""

    @property
    def epochs_text(self) -> str:
        """The epochs for people."""
        parts = (
            f"{value:.2f}" if name == WHOLE else f"{name} {value:.2f}"
            for name, value in self.epochs.items()
        )
        return ", ".join(parts) or "unknown"


def glance(config: RunConfig, lines: Sequence[Record], attempts: Sequence[Record]) -> Glance:
    """Sum up a run from its valid lines and its starts, oldest first."""
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "eval"]
    last = train[-1] if train else {}
    begun_at = attempts[-1]["resumed_from_step"] or 0 if attempts else 0
    step = max((line["step"] for line in train), default=begun_at)
    entropies = [line["unigram_entropy"] for line in held_out if "unigram_entropy" in line]
    stages = config.timeline.stages
    numbers = [int(line.get("stage", 0)) for line in train]
    is_text = config.model.vocab_size and any(_OF_TEXT & line.keys() for line in held_out)
    return Glance(
        step=step,
        num_steps=config.train.num_steps,
        share_done=share_done(step, config.train, last.get("elapsed_s", 0.0)),
        stage=stages[numbers[-1] if numbers else 0].name or None,
        loss=_track(train),
        held_out=_track(held_out),
        unigram_entropy=entropies[-1] if entropies else None,
        uniform_guess=math.log(config.model.vocab_size or 1) if is_text else None,
        lr=last.get("lr"),
        tokens_per_s=last.get("tokens_per_s"),
        epochs=_epochs(config, train),
        restarts=tuple(
            line["resumed_from_step"] or 0 for line in attempts[1:] if not line.get("rewound")
        ),
        rewinds=tuple(line["resumed_from_step"] or 0 for line in attempts if line.get("rewound")),
        stage_steps=tuple(
            line["step"]
            for line, number, before in zip(train[1:], numbers[1:], numbers, strict=False)
            if number != before
        ),
    )


def _track(lines: Sequence[Record]) -> LossTrack | None:
    told = [line for line in lines if "loss" in line]
    if not told:
        return None
    first, last = told[0], told[-1]
    finite = [line for line in told if line["loss"] is not None]
    best = min(finite, key=lambda line: line["loss"], default=last)
    return LossTrack(
        last["loss"], last["step"], first["loss"], first["step"], best["loss"], best["step"]
    )


def _epochs(config: RunConfig, train: Sequence[Record]) -> dict[str, float]:
    newest = {int(line.get("stage", 0)): line for line in train}
    found = {}
    for number, line in newest.items():
        name = config.timeline.stages[number].name
        for key, value in line.items():
            of = key.partition("_")[2]
            if key == "epoch" or key.startswith("epoch_"):
                found["/".join(filter(None, (name, of))) or WHOLE] = value
    return found
