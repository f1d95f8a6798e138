"""The kinds of task, by name."""

from pipeline.tasks.kinds.answer import QA
from pipeline.tasks.kinds.base import Kind
from pipeline.tasks.kinds.choice import CHOICE, CLOZE
from pipeline.tasks.kinds.entity import SPANS, TAG
from pipeline.tasks.kinds.multi import MULTILABEL
from pipeline.tasks.kinds.number import REGRESS
from pipeline.tasks.kinds.rank import RANK
from pipeline.tasks.kinds.single import CLASSIFY, COREF, PAIR

_ALL = (CLASSIFY, PAIR, CHOICE, TAG, SPANS, QA, MULTILABEL, REGRESS, CLOZE, COREF, RANK)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
METRICS = tuple(dict.fromkeys(metric for kind in _ALL for metric in kind.metrics))
"""Names of all scores."""


def kinds_of_format(form: str) -> str:
    """Name the kinds of task that a format with fixed names of fields holds rows for."""
    return " or ".join(kind.name for kind in _ALL if form in kind.formats)
