"""What the row of a task's file becomes: an example, rows of tokens, and a prediction.

Nothing here knows a kind of task or torch.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label of a slot that has none, as `pipeline.model.heads.IGNORED`, which needs torch."""


class Span(NamedTuple):
    """A typed stretch of a text, from `start` to `end`, exclusive, in characters (or words)."""

    type: str
    start: int
    end: int


class Answer(NamedTuple):
    """An answer to a question, and the character that it starts at; None if it is not there."""

    text: str
    start: int | None


_Golds = tuple[str, ...] | tuple[float, ...] | tuple[Span, ...] | tuple[Answer, ...]
Gold = str | int | float | _Golds | None
"""What is right, in the form of the kind; None: unlabelled."""


def plain(gold: Gold) -> Any:
    """Return a gold as files of predictions have it; of answers that is their text."""
    if not isinstance(gold, tuple):
        return gold
    return [
        list(item) if isinstance(item, Span) else item.text if isinstance(item, Answer) else item
        for item in gold
    ]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of a task, in the terms of its file."""

    id: str
    where: str
    """File and line, or the place in the file, for messages."""
    text: str = ""
    text_b: str = ""
    choices: tuple[str, ...] = ()
    marks: tuple[Span, ...] = ()
    """coref: span1 and span2; cloze: the blank that is asked for, then the other blanks."""
    words: tuple[tuple[int, int], ...] = ()
    """Bounds of the words of a file that has its text in words; empty elsewhere."""
    gold: Gold = None
    group: str = ""
    """Rows of one group share a passage (qa), or candidates that are each used once (ChID)."""

    @property
    def distinct(self) -> tuple[bool, ...]:
        """Whether a choice is the first with its text: others are masked, so one index wins."""
        return tuple(self.choices.index(text) == i for i, text in enumerate(self.choices))

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a model sees of the row but its place: rows with equal texts are repeats."""
        return (self.text, self.text_b, *self.choices, *map(str, self.marks))


class TokenSpan(NamedTuple):
    """A typed run of slots of a row; the end is exclusive."""

    type: str
    start: int
    end: int


@dataclass(frozen=True)
class TokenRow:
    """One input of the encoder."""

    example: int
    """Number of its example."""
    part: int
    """Index of the choice, or number of the window; 0 elsewhere."""
    ids: npt.NDArray[np.int32]
    """(n,)"""
    offsets: npt.NDArray[np.int32]
    """(n, 2) characters of the example's text that a slot covers, -1 for all other slots."""
    spans: tuple[TokenSpan, ...] = ()
    """Gold of tag and spans; of qa the answer, if this window holds it."""
    starts: tuple[int, int] = (0, 0)
    """qa: the slots, end exclusive, that no other window has with more context around them."""


@dataclass(frozen=True)
class TaskRows:
    """Examples and their rows of tokens."""

    examples: Sequence[Example]
    rows: Sequence[TokenRow]
    counts: dict[str, int] = field(default_factory=dict)
    """Number of things that tokens cannot express, by their name in words."""

    @cached_property
    def digest(self) -> str:
        """Hash of all that a model is trained on."""
        total = hashlib.sha256()
        for row in self.rows:
            total.update(row.ids.tobytes())
            total.update(repr((row.example, row.part, row.spans)).encode())
        for example in self.examples:
            total.update(repr(example.gold).encode())
        return total.hexdigest()


@dataclass(frozen=True)
class HeadSpec:
    """What a model needs to know of its task; stands in its config.json under `task`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    pool: str
    dropout: float
    decoder: str
    scheme: str
    max_length: int
    max_answer: int
    null_threshold: float | None
    """None: every question has an answer."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HeadSpec":
        """Read what `to_dict` wrote."""
        return cls(**{**values, "labels": tuple(values["labels"])})

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {**asdict(self), "labels": list(self.labels)}


class PredictionRow(NamedTuple):
    """A row of `predictions-SPLIT.jsonl`, in the terms of the task's file."""

    id: str
    gold: Any
    """None where the file has none."""
    prediction: Any
    scores: Sequence[float | None] | None = None
    """Raw scores (logits) of the labels or choices, None for a masked choice; other kinds: None."""
