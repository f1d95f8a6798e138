"""`postnorm transfer`: what a task gains from a multi-task stage, and from other tasks alone.

Each task is fine-tuned from three models: the one that the stage starts from, that of all tasks,
and one of all other tasks, which never saw it. The last is the test of transfer: the second may
have learned the task itself. Differences are paired over rows and seeds.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

from experiments import page
from experiments.read import TaskScores, difference, read_scores
from pipeline.config.load import build, find_config, load, provenance
from pipeline.config.schema import REQUIRED, param, path_param
from pipeline.errors import EXIT_FINISHED, ConfigError, PreemptedError
from pipeline.multitask.config import TaskMix, load_mix
from pipeline.runtime import env
from pipeline.runtime.rank import Rank
from pipeline.runtime.run_folder import RunFolder
from pipeline.tasks import intervals
from pipeline.tasks.intervals import Interval, in_percent, judged
from pipeline.tasks.task import TaskConfig
from pipeline.use.pretrain import own_process

logger = logging.getLogger(__name__)

ALONE, ALL, WITHOUT = "start", "all", "without"
_PAIRS = ((ALL, ALONE), (WITHOUT, ALONE), (ALL, WITHOUT))


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Which tasks are fine-tuned from which multi-task models."""

    SHIPPED: ClassVar = ("multitask",)

    run_dir: str = path_param(REQUIRED, "folder of all runs; resumed if it exists")
    mix: str = path_param(REQUIRED, "multi-task config; its run_dir is chosen here")
    mix_overrides: tuple[str, ...] = param((), "section.key=value of the multi-task runs")
    tasks: tuple[str, ...] = param((), "tasks of the mix to fine-tune; empty takes all")
    overrides: tuple[str, ...] = param((), "section.key=value of the fine-tunings")
    seeds: tuple[int, ...] = param((1, 2, 3), "of the fine-tunings")


def transfer(path: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run what is missing, and write `transfer.md` and `transfer.json` after each task.

    Returns:
        The body of `transfer.json`.

    Raises:
        ConfigError: the mix has no such task, or too few tasks to leave one out.
        PreemptedError: the same call continues.
        PostnormError: of a run.
    """
    config = load(TransferConfig, path, overrides).config
    file = find_config(config.mix, ("multitask",), Path(path).parent)
    mix = load_mix(str(file), config.mix_overrides)
    names = list(config.tasks or mix.tasks)
    unknown = [name for name in names if name not in mix.tasks]
    if unknown:
        raise ConfigError(
            f"tasks: {', '.join(unknown)} are not of {file}, which has {', '.join(mix.tasks)}"
        )
    if len(mix.members) < 3:
        raise ConfigError(
            f"{file} has {len(mix.members)} tasks; leaving one out needs at least 3, mlm included"
        )
    out = Path(config.run_dir)
    _train(mix, out / ALL)
    scores: dict[tuple[str, str], TaskScores] = {}
    for number, name in enumerate(names, start=1):
        without = out / f"{WITHOUT}-{name}"
        others = {member: of for member, of in mix.members.items() if member != name}
        _train(_only(mix, others), without)
        sources = {ALONE: mix.config.init_from, ALL: str(out / ALL), WITHOUT: str(without)}
        for arm, source in sources.items():
            scores[name, arm] = _tuned(mix.tasks[name], source, out / "finetune" / arm, config)
        body = {
            "mix": str(file),
            "start": mix.config.init_from,
            "seeds": list(config.seeds),
            "partial": number < len(names),
            **_compared(names[:number], scores),
            "versions": provenance(),
        }
        page.write(out, "transfer", body, markdown(body).splitlines(), {})
    return body


def _only(mix: TaskMix, members: Mapping[str, Any]) -> TaskMix:
    """Return a mix of some of its tasks."""
    config = replace(mix.config, tasks={name: mix.config.tasks[name] for name in members})
    tasks = {name: task for name, task in mix.tasks.items() if name in members}
    return TaskMix(config, tasks, dict(members))


def _train(mix: TaskMix, folder: Path) -> None:
    """Train on a mix in a folder, unless that is done."""
    if RunFolder(folder).done.exists():
        logger.info("%s is finished", folder)
        return
    from pipeline.multitask.run import multitask

    config = replace(mix.config, run_dir=str(folder))
    with env.restored(), own_process():
        rank = Rank(env.process_info_or_alone())
        code = multitask(replace(mix, config=config), rank)
        is_asked_to_stop = rank.stop.requested
    if code != EXIT_FINISHED or is_asked_to_stop:
        raise PreemptedError(
            f"{folder} was stopped by a signal and has saved; the same command continues it"
        )


def _tuned(task: TaskConfig, source: str, folder: Path, config: TransferConfig) -> TaskScores:
    """Fine-tune a task from a model, unless that is done, and score it."""
    # A function, not a command: by the weights it knows whether what is finished is of this model.
    from pipeline.finetune.run import finetune

    changed = build(TaskConfig, asdict(task), f"task {task.name}", config.overrides)
    name, tokens = str(task.name), Path(config.run_dir) / "tokens"
    out = folder / name
    result = finetune(changed, name=name, source=source, out=out, seeds=config.seeds, tokens=tokens)
    return read_scores(out, result)


def _compared(names: Sequence[str], scores: Mapping[tuple[str, str], TaskScores]) -> dict[str, Any]:
    """Compare the three models of each task, and judge all differences together."""
    compared: dict[Hashable, Interval | None] = {
        (name, *pair): difference(*(scores[name, arm] for arm in pair))
        for name, pair in product(names, _PAIRS)
    }
    stands, how_sure = judged(compared)
    lines = []
    for name in names:
        first = scores[name, ALONE].result
        lines.append(
            {
                "task": name,
                "metric": first["metric"],
                "scored_on": first["protocol"]["scored_on"],
                "majority": first["majority"],
                "chance": first["chance"],
                "scores": {arm: scores[name, arm].scores for arm in (ALONE, ALL, WITHOUT)},
                "differences": {
                    f"{arm} - {against}": intervals.plain(
                        compared[name, arm, against], stands.get((name, arm, against))
                    )
                    for arm, against in _PAIRS
                },
            }
        )
    return {"tasks": lines, "how_sure": how_sure}


def markdown(body: Mapping[str, Any]) -> str:
    """Write the table."""
    head = ["task", "metric", "majority", "start", "all tasks", "without it"]
    rows = []
    for line in body["tasks"]:
        scores = [_score(line["scores"][arm]) for arm in (ALONE, ALL, WITHOUT)]
        differences = map(_difference, line["differences"].values())
        majority = f"{100 * line['majority']:.1f}"
        rows.append([line["task"], line["metric"], majority, *scores, *differences])
    head += [f"{arm} - {against}" for arm, against in _PAIRS]
    table = "\n".join(page.table("ll" + "r" * (len(head) - 2), head, rows))
    state = "partial: " if body["partial"] else ""
    return f"""# Transfer: {state}{len(body["tasks"])} tasks

{table}

Percent; mean ± standard deviation over {len(body["seeds"])} seeds of the fine-tuning. Differences
are paired, with 95% intervals: bootstrap of the rows, Student's t of the seeds; + helped, - hurt,
? either, ! stands after Holm's correction. One multi-task run each: how much these vary from seed
to seed is not part of the intervals.
start: {body["start"]}; all: after the mix {body["mix"]}; without: after the same without the task.

{body["how_sure"]}
"""


def _score(scores: Sequence[float]) -> str:
    spread = f" ± {100 * stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{100 * fmean(scores):.1f}{spread}"


def _difference(of: Mapping[str, Any]) -> str:
    if of["mean"] is None or of["low"] is None:
        return in_percent(of)
    return f"{'+' if of['low'] > 0 else '-' if of['high'] < 0 else '?'} {in_percent(of)}"
