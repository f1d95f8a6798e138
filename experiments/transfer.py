"""`postnorm transfer`: what a task gains from a multi-task stage, and from other tasks alone.

Each task is fine-tuned from three models: the one that the stage starts from, that of all tasks,
and one of all other tasks, which never saw it. The last is the test of transfer: the second may
have learned the task itself. Differences are paired over rows and seeds.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments.benchmark import BenchmarkCell, difference, read_cell
from pipeline.config.load import build, find_config, load, provenance
from pipeline.config.schema import REQUIRED, param, path_param
from pipeline.errors import EXIT_FINISHED, ConfigError, PreemptedError
from pipeline.multitask.config import TaskMix, load_mix
from pipeline.runtime import env
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.runtime.rank import Rank
from pipeline.runtime.run_folder import RunFolder
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
    lines: list[dict[str, Any]] = []
    for name in names:
        others = {each: of for each, of in mix.members.items() if each != name}
        _train(_only(mix, others), out / f"{WITHOUT}-{name}")
        sources = {
            ALONE: mix.config.init_from,
            ALL: str(out / ALL),
            WITHOUT: str(out / f"{WITHOUT}-{name}"),
        }
        task = _overridden(mix.tasks[name], config)
        lines.append(_line(name, task, sources, config, out))
        body = {
            "mix": str(file),
            "start": mix.config.init_from,
            "seeds": list(config.seeds),
            "partial": len(lines) < len(names),
            "tasks": lines,
            "versions": provenance(),
        }
        write_json_atomic(out / "transfer.json", body)
        write_atomic(out / "transfer.md", markdown(body).encode())
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


def _overridden(task: TaskConfig, config: TransferConfig) -> TaskConfig:
    return build(TaskConfig, asdict(task), f"task {task.name}", config.overrides)


def _line(
    name: str,
    task: TaskConfig,
    sources: Mapping[str, str],
    config: TransferConfig,
    out: Path,
) -> dict[str, Any]:
    from pipeline.finetune.run import finetune

    cells: dict[str, BenchmarkCell] = {}
    for arm, source in sources.items():
        folder = out / "finetune" / arm / name
        result = finetune(
            task, name=name, source=source, out=folder, seeds=config.seeds, tokens=out / "tokens"
        )
        cells[arm] = read_cell(folder, result)
    first = cells[ALONE].result
    return {
        "task": name,
        "metric": first["metric"],
        "scored_on": first["protocol"]["scored_on"],
        "majority": first["majority"],
        "chance": first["chance"],
        "scores": {arm: cell.scores for arm, cell in cells.items()},
        "differences": {
            f"{one} - {other}": difference(cells[one], cells[other]) for one, other in _PAIRS
        },
    }


def markdown(body: Mapping[str, Any]) -> str:
    """Write the table."""
    head = ["task", "metric", "majority", "start", "all tasks", "without it"]
    head += [f"{one} - {other}" for one, other in _PAIRS]
    rows = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for line in body["tasks"]:
        scores = [_score(line["scores"][arm]) for arm in (ALONE, ALL, WITHOUT)]
        row = [line["task"], line["metric"], f"{100 * line['majority']:.1f}", *scores]
        rows.append([*row, *(_difference(each) for each in line["differences"].values())])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    state = "partial: " if body["partial"] else ""
    return f"""# Transfer: {state}{len(body["tasks"])} tasks

{table}

Percent; mean ± standard deviation over {len(body["seeds"])} seeds of the fine-tuning. Differences
are paired, with 95% intervals by bootstrap over rows and seeds; + helped, - hurt, ? either. One
multi-task run each: how much these vary from seed to seed is not part of the intervals.
start: {body["start"]}; all: after the mix {body["mix"]}; without: after the same without the task.
"""


def _score(scores: list[float]) -> str:
    spread = f" ± {100 * float(np.std(scores, ddof=1)):.1f}" if len(scores) > 1 else ""
    return f"{100 * float(np.mean(scores)):.1f}{spread}"


def _difference(each: Mapping[str, float | None]) -> str:
    mean, low, high = each["mean"], each["low"], each["high"]
    if mean is None or low is None or high is None:
        return "other rows"
    sign = "+" if low > 0 else "-" if high < 0 else "?"
    return f"{sign} {100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
