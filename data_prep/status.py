"""The text of `data_prep status`: done, running, failed and waiting tasks, stage by stage."""

from collections import Counter

from data_prep import corpus
from data_prep.chain import look, steps
from data_prep.config import PrepConfig
from data_prep.stage import Stage, State, state_of

_COLUMNS = ("done", "running", "failed", "stopped", "waiting")
_EXAMPLES = 5
_REMEDIES = {
    "failed": "    fix the cause; the same command repeats them",
    "stopped": "    the same command repeats them; finished tasks stay done",
}


def status_text(config: PrepConfig) -> str:
    """Format a line per stage, then failures and the next command; only reads.

    Tasks done with other inputs or settings count as waiting. The number of tasks of a stage is
    known when the stages before are complete.

    Raises:
        DataError: an input does not exist or has no text files.
    """
    given = corpus.find(config)
    rows = [f"{'stage':<16}" + "".join(f"{name:>9}" for name in _COLUMNS)]
    remarks: list[str] = []
    seen = look(given)
    for stage, records in seen:
        tasks = zip(stage.tasks, records, strict=True)
        states = [State("done") if record else state_of(task) for task, record in tasks]
        counts = Counter[str](state.name for state in states)
        rows.append(f"{stage.name:<16}" + "".join(f"{counts[name]:>9,}" for name in _COLUMNS))
        remarks += _remarks(stage, states)
    last, records = seen[-1]
    later = [step.name for step in steps(config)][len(seen) :]
    rows += [f"{name:<16}{'after ' + last.name:>9}" for name in later]
    if all(records) and not later:
        remarks.append(f"complete: {given.output} holds the dataset")
    elif not remarks:
        remarks.append(f"next: python -m data_prep run CONFIG, or --stage {last.name} in parts")
    return "\n".join([*rows, "", *remarks])


def _remarks(stage: Stage, states: list[State]) -> list[str]:
    texts = []
    for name in ("failed", "stopped", "running"):
        pairs = zip(stage.tasks, states, strict=True)
        those = [(task, state) for task, state in pairs if state.name == name]
        shown = those[:_EXAMPLES]
        texts += [f"{name}: {stage.name} {task.name}: {state.text}" for task, state in shown]
        if len(those) > _EXAMPLES:
            texts.append(f"{name}: {len(those) - _EXAMPLES:,} more tasks of {stage.name}")
        if those and name in _REMEDIES:
            texts.append(_REMEDIES[name])
    return texts
