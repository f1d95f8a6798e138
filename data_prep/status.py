"""`python -m data_prep status`: what is done, running, failed and waiting, stage by stage."""

from collections import Counter

from data_prep import corpus
from data_prep.chain import stage_names, walk
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus
from data_prep.stage import Done, Stage, State, finished, state_of

_COLUMNS = ("done", "running", "failed", "stopped", "waiting")
_EXAMPLES = 5


def status_text(config: PrepConfig) -> str:
    """A line a stage, then what is wrong and what to do; looks only.

    Tasks done with other inputs or settings count as waiting. How many tasks a stage has is known
    when the ones before are complete.

    Raises:
        DataError: an input does not exist or has no text files.
    """
    given = corpus.find(config)
    lines = [f"{'stage':<16}" + "".join(f"{name:>9}" for name in _COLUMNS)]
    remarks: list[str] = []
    seen: list[str] = []

    def visit(stage: Stage) -> list[Done] | None:
        states = [state_of(task) for task in stage.tasks]
        counts = Counter[str](state.name for state in states)
        lines.append(f"{stage.name:<16}" + "".join(f"{counts[name]:>9,}" for name in _COLUMNS))
        seen.append(stage.name)
        remarks.extend(_remarks(stage, states))
        if counts["done"] < len(states):
            return None
        return [done for done in map(finished, stage.tasks) if done]

    complete = walk(given, visit)
    later = [name for name in stage_names(config) if name not in seen]
    lines += [f"{name:<16}{'after ' + seen[-1]:>9}" for name in later]
    if complete:
        remarks.append(f"complete: {given.output} holds the dataset")
    elif not remarks:
        remarks.append(f"to go on: python -m data_prep run CONFIG, or --stage {seen[-1]} in parts")
    return "\n".join([*lines, "", *remarks])


def remaining(given: Corpus) -> dict[str, list[int]]:
    """Numbers of the tasks that are not done, by stage, up to the first stage that has any.

    Raises:
        DataError: the stages that are complete leave nothing to go on with.
    """
    left: dict[str, list[int]] = {}

    def visit(stage: Stage) -> list[Done] | None:
        records = [finished(task) for task in stage.tasks]
        left[stage.name] = [i for i, done in enumerate(records) if done is None]
        return None if left[stage.name] else [done for done in records if done]

    walk(given, visit)
    return left


def _remarks(stage: Stage, states: list[State]) -> list[str]:
    lines = []
    for name in ("failed", "stopped", "running"):
        those = [
            (task, state)
            for task, state in zip(stage.tasks, states, strict=True)
            if state.name == name
        ]
        for task, state in those[:_EXAMPLES]:
            lines.append(f"{name}: {stage.name} {task.name}: {state.text}")
        if len(those) > _EXAMPLES:
            lines.append(f"{name}: {len(those) - _EXAMPLES:,} more tasks of {stage.name}")
        if those and name != "running":
            lines.append(
                "    the same command does them again; what is done stays"
                if name == "stopped"
                else "    mend what the error says; the same command does them again"
            )
    return lines
