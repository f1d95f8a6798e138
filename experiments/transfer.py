"""`postnorm transfer`: what a task gains from a multi-task stage, and from other tasks alone.

Each task is fine-tuned from three models: the one that the stage starts from, that of all tasks,
and one of all other tasks, which never saw it. The last is the test of transfer: the second may
have learned the task itself. Beside them may stand other mixes of all tasks (`variants`), and all
may be asked for several numbers of the task's own rows (`rows`). Differences are paired over rows
and seeds.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

from experiments import page
from experiments.read import TaskScores, difference, joined, read_scores
from pipeline.config.load import build, find_config, load, provenance
from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.errors import EXIT_FINISHED, ConfigError, PreemptedError
from pipeline.multitask.config import MIX_FILE, TaskMix, load_mix, mix_text
from pipeline.runtime import env
from pipeline.runtime.rank import Rank
from pipeline.runtime.run_folder import RunFolder
from pipeline.tasks import intervals
from pipeline.tasks.intervals import Interval, in_percent, judged
from pipeline.tasks.task import TaskConfig
from pipeline.use.pretrain import own_process

logger = logging.getLogger(__name__)

ALONE, ALL, WITHOUT = "start", "all", "without"
_TAKEN = (ALONE, ALL, "finetune", "tokens")


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
    mix_per_seed: bool = param(
        False, "train each mix anew for each seed, so that intervals hold how much mixes vary"
    )
    rows: tuple[int, ...] = param(
        (), "rows of train that each task is fine-tuned on, in turn; empty takes those of the task"
    )
    variants: dict[str, tuple[str, ...]] = section(
        dict, "further mixes of all tasks: name and their section.key=value"
    )
    leave_out: bool = param(True, "train a mix without it for each task")

    def __post_init__(self) -> None:
        for name in self.variants:
            if name in _TAKEN or "/" in name or name.startswith(WITHOUT):
                raise ConfigError(
                    f"variants: {name} cannot be a mix's name: it is a folder of run_dir, so "
                    f"{', '.join(_TAKEN)}, / and names that begin with {WITHOUT} are taken; "
                    "choose another one"
                )
        if any(rows < 1 for rows in self.rows):
            raise ConfigError(f"rows={list(self.rows)}: expected numbers of at least 1")

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the models that each task is fine-tuned from."""
        return (ALONE, ALL, *self.variants, *((WITHOUT,) if self.leave_out else ()))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Models that are compared: each with the start, and with that of all tasks."""
        others = [arm for arm in self.arms if arm not in (ALONE, ALL)]
        return [(arm, ALONE) for arm in (ALL, *others)] + [(ALL, arm) for arm in others]


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
    beside = find_config(path, TransferConfig.SHIPPED).parent
    file = find_config(config.mix, ("multitask",), beside)
    mix = load_mix(str(file), config.mix_overrides)
    names = list(config.tasks or mix.tasks)
    unknown = [name for name in names if name not in mix.tasks]
    if unknown:
        raise ConfigError(
            f"tasks: {', '.join(unknown)} are not of {file}, which has {', '.join(mix.tasks)}"
        )
    if config.leave_out and len(mix.members) < 3:
        raise ConfigError(
            f"{file} has {len(mix.members)} tasks; leaving one out needs at least 3, mlm included"
        )
    mixes = {ALL: mix} | {
        name: load_mix(str(file), (*config.mix_overrides, *words))
        for name, words in config.variants.items()
    }
    out = Path(config.run_dir)
    sources: dict[str, list[str]] = {ALONE: [mix.config.init_from] * len(config.seeds)}
    for arm, of in mixes.items():
        sources[arm] = _train(of, out / arm, config)
    scores: dict[tuple[str, int | None, str], TaskScores] = {}
    for number, name in enumerate(names, start=1):
        if config.leave_out:
            others = {member: of for member, of in mix.members.items() if member != name}
            sources[WITHOUT] = _train(_only(mix, others), out / f"{WITHOUT}-{name}", config)
        for rows, arm in product(config.rows or (None,), config.arms):
            folder = out / "finetune" / arm / (f"rows-{rows}" if rows else "")
            scores[name, rows, arm] = _tuned(mix.tasks[name], sources[arm], folder, rows, config)
        body = {
            "mix": str(file),
            "start": mix.config.init_from,
            "seeds": list(config.seeds),
            "mix_per_seed": config.mix_per_seed,
            "variants": {name: list(words) for name, words in config.variants.items()},
            "partial": number < len(names),
            **_compared(names[:number], scores, config),
            "versions": provenance(),
        }
        page.write(out, "transfer", body, markdown(body).splitlines(), {})
    return body


def _only(mix: TaskMix, members: Mapping[str, Any]) -> TaskMix:
    """Return a mix of some of its tasks."""
    config = replace(mix.config, tasks={name: mix.config.tasks[name] for name in members})
    tasks = {name: task for name, task in mix.tasks.items() if name in members}
    return TaskMix(config, tasks, dict(members), tuple(mix.tasks.values()))


def _train(mix: TaskMix, folder: Path, config: TransferConfig) -> list[str]:
    """Train on a mix, once or for each seed, unless that is done; return the model of each seed."""
    if not config.mix_per_seed:
        _train_one(mix, folder)
        return [str(folder)] * len(config.seeds)
    for seed in config.seeds:
        of_seed = replace(mix, config=replace(mix.config, seed=seed))
        _train_one(of_seed, folder / f"seed-{seed}")
    return [str(folder / f"seed-{seed}") for seed in config.seeds]


def _train_one(mix: TaskMix, folder: Path) -> None:
    mix = replace(mix, config=replace(mix.config, run_dir=str(folder)))
    if RunFolder(folder).done.exists():
        if (folder / MIX_FILE).read_text(encoding="utf-8") != mix_text(mix):
            raise ConfigError(f"{folder} is finished, of another mix; choose another run_dir")
        logger.info("%s is finished", folder)
        return
    from pipeline.multitask.run import multitask

    with env.restored(), own_process():
        rank = Rank(env.process_info_or_alone())
        code = multitask(mix, rank)
        is_asked_to_stop = rank.stop.requested
    if code != EXIT_FINISHED or is_asked_to_stop:
        raise PreemptedError(
            f"{folder} was stopped by a signal and has saved; the same command continues it"
        )


def _tuned(
    task: TaskConfig, sources: Sequence[str], folder: Path, rows: int | None, config: TransferConfig
) -> TaskScores:
    """Fine-tune a task from the model of each seed, unless that is done, and score it."""
    # A function, not a command: by the weights it knows whether what is finished is of this model.
    from pipeline.finetune.run import finetune

    words = (*config.overrides, *(() if rows is None else (f"data.train_rows={rows}",)))
    changed = build(TaskConfig, asdict(task), f"task {task.name}", words)
    name, tokens = str(task.name), Path(config.run_dir) / "tokens"
    found = []
    for source in dict.fromkeys(sources):
        seeds = tuple(s for s, of in zip(config.seeds, sources, strict=True) if of == source)
        out = folder / name if len(seeds) == len(sources) else folder / f"{name}+seed-{seeds[0]}"
        result = finetune(changed, name=name, source=source, out=out, seeds=seeds, tokens=tokens)
        found.append(read_scores(out, result))
    return joined(found)


def _compared(
    names: Sequence[str],
    scores: Mapping[tuple[str, int | None, str], TaskScores],
    config: TransferConfig,
) -> dict[str, Any]:
    """Compare the models of each task, and judge all differences together."""
    places = list(product(names, config.rows or (None,)))
    compared: dict[Hashable, Interval | None] = {
        (*place, *pair): difference(*(scores[*place, arm] for arm in pair))
        for place, pair in product(places, config.pairs)
    }
    stands, how_sure = judged(compared)
    lines = []
    for place in places:
        first = scores[*place, ALONE].result
        lines.append(
            {
                "task": place[0],
                # Those that there were: a task may have fewer than were asked for.
                "rows": None if place[1] is None else first["rows"]["train"],
                "metric": first["metric"],
                "scored_on": first["protocol"]["scored_on"],
                "majority": first["majority"],
                "chance": first["chance"],
                "scores": {arm: scores[*place, arm].scores for arm in config.arms},
                "differences": {
                    " - ".join(pair): intervals.plain(
                        compared[*place, *pair], stands.get((*place, *pair))
                    )
                    for pair in config.pairs
                },
            }
        )
    return {"tasks": lines, "how_sure": how_sure}


def markdown(body: Mapping[str, Any]) -> str:
    """Write the table."""
    first = body["tasks"][0]
    by_rows = ["rows"] if first["rows"] is not None else []
    head = ["task", *by_rows, "metric", "majority", *first["scores"], *first["differences"]]
    rows = []
    for line in body["tasks"]:
        cells = [line["task"], *(str(line[name]) for name in by_rows), line["metric"]]
        cells += [f"{100 * line['majority']:.1f}", *map(_score, line["scores"].values())]
        rows.append([*cells, *map(_difference, line["differences"].values())])
    sides = ("l" + "r" * len(by_rows) + "l").ljust(len(head), "r")
    table = "\n".join(page.table(sides, head, rows))
    state = "partial: " if body["partial"] else ""
    mixes = (
        "Each seed has multi-task runs of its own."
        if body["mix_per_seed"]
        else "One multi-task run each: how much these\nvary from seed to seed is not part of "
        "the intervals."
    )
    said = [f"start: {body['start']}", f"all: after the mix {body['mix']}"]
    said += [f"{name}: the same with {' '.join(words)}" for name, words in body["variants"].items()]
    if WITHOUT in first["scores"]:
        said.append("without: the same mix without the task")
    tasks = len({line["task"] for line in body["tasks"]})
    return f"""# Transfer: {state}{tasks} tasks

{table}

Percent; mean ± standard deviation over {len(body["seeds"])} seeds of the fine-tuning. Differences
are paired, with 95% intervals: bootstrap of the rows, Student's t of the seeds; + helped, - hurt,
? either, ! stands after Holm's correction. {mixes}
{"; ".join(said)}.

{body["how_sure"]}
"""


def _score(scores: Sequence[float]) -> str:
    spread = f" ± {100 * stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{100 * fmean(scores):.1f}{spread}"


def _difference(of: Mapping[str, Any]) -> str:
    if of["mean"] is None or of["low"] is None:
        return in_percent(of)
    return f"{'+' if of['low'] > 0 else '-' if of['high'] < 0 else '?'} {in_percent(of)}"
