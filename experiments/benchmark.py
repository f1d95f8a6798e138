"""Many tasks by many models: runs what is missing and puts the scores side by side.

DIR/MODEL/TASK is a fine-tuning folder, DIR/ngrams/TASK a baseline's of the same form. All numbers
come from their predictions. `table.json` holds what the table shows, as fractions; it is written
after every finished folder, so that an interrupted benchmark has a partial table.
"""

import json
import logging
import re
import subprocess
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments import baselines
from experiments.read import TaskScores, difference, read_scores
from pipeline.config.load import find_config, load, provenance
from pipeline.config.schema import walk
from pipeline.errors import (
    EXIT_FAILED_RETRY,
    ConfigError,
    DataError,
    PostnormError,
    PreemptedError,
    StoppedError,
)
from pipeline.finetune.result import seed_folders
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_atomic
from pipeline.runtime.summary import progress
from pipeline.tasks import intervals
from pipeline.tasks.intervals import Interval, interval_of, judged, row_variance
from pipeline.tasks.readers import read_task
from pipeline.tasks.task import RANDOM, PublishedConfig, SuiteConfig, TaskConfig, load_task

logger = logging.getLogger(__name__)

_ROWS_FILE, _OVERLAP_FILE = "overlap-rows.jsonl", "overlap.json"
LEFT_OUT = "left out by the limit of rows"
_OTHER_TASK = re.compile(
    r"(task|head|input|can)\.|train\.(?!precision=|keep=|seeds=)|data\.(?!root=|\w+_rows=)"
)
"""Overrides that make a task another one than scores were published for."""
Body = dict[str, Any]
"""What `table.json` holds."""
Place = tuple[str, str]
"""A task and a column."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkPlan:
    """What a table shows."""

    name: str
    tasks: dict[str, TaskConfig]
    """Tasks by name; seeds and files are those of this benchmark."""
    files: dict[str, str]
    """The task file of each, or the name of a shipped one."""
    models: tuple[str, ...]
    out: Path
    with_random: bool = True
    with_ngrams: bool = True
    published: tuple[PublishedConfig, ...] = ()
    overrides: tuple[str, ...] = ()
    """Overrides of the command line, beside those of the suite."""

    @property
    def columns(self) -> list[str]:
        """Models, each followed by its random twin, behind the n-grams."""
        columns = [baselines.NAME] if self.with_ngrams else []
        for model in self.models:
            columns.append(model)
            if self.with_random and not model.startswith(RANDOM):
                columns.append(RANDOM + model)
        return list(dict.fromkeys(columns))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Models and what each is compared with: its random twin, and the others."""
        twins = [(model, RANDOM + model) for model in self.models]
        shown = [pair for pair in twins if pair[1] in self.columns]
        return shown + list(combinations(self.models, 2))

    def folder(self, task: str, column: str) -> Path:
        """Return the fine-tuning folder of a task and a column."""
        # Without dots at its ends: that of `../runs/a` would be hidden.
        return self.out / re.sub(r"[^\w.-]+", "-", column).strip("-.") / task


def read_plan(
    suite: str,
    models: list[str],
    out: Path,
    seeds: tuple[int, ...],
    overrides: list[str],
    **on: bool,
) -> BenchmarkPlan:
    """Read a suite and its tasks; task files are looked for beside the suite's file first.

    Raises:
        ConfigError: a file or an override is wrong, or two tasks or models would share a folder.
    """
    config = load(SuiteConfig, suite).config
    beside = find_config(suite, SuiteConfig.SHIPPED).parent
    root = [] if config.root is None else [f"data.root={json.dumps(config.root)}"]
    given = (*root, *config.overrides, *overrides)
    tasks: dict[str, TaskConfig] = {}
    files: dict[str, str] = {}
    for text in config.tasks:
        name = Path(text).stem
        if name in tasks:
            raise ConfigError(f"{suite}: two tasks are called {name!r}; rename one of the files")
        path = beside / text
        files[name] = str(path) if path.is_file() else text
        task = load_task(files[name], config.overrides_of(name, given))
        if seeds:
            task = replace(task, train=replace(task.train, seeds=seeds))
        tasks[name] = task
    if not tasks:
        raise ConfigError(f"{suite} names no task; list task files in `tasks`")
    names = tuple(dict.fromkeys(models))
    facts: dict[str, Any] = {"published": config.published, "overrides": tuple(overrides), **on}
    name = Path(suite).stem
    plan = BenchmarkPlan(name=name, tasks=tasks, files=files, models=names, out=out, **facts)
    if plan.with_ngrams and find_spec("sklearn") is None:
        raise ConfigError(
            "the bag of character n-grams needs scikit-learn: pip install 'postnorm[tables]', or "
            "leave it out by --no-baselines"
        )
    folders = [plan.folder("", column) for column in plan.columns]
    if len(set(folders)) < len(folders) or (plan.with_ngrams and baselines.NAME in names):
        raise ConfigError(f"--from {', '.join(names)}: two of them would share a folder in {out}")
    return plan


def sweep(plan: BenchmarkPlan) -> dict[str, Any]:
    """Describe all fine-tunings as a sweep (`postnorm submit --sweep`), a run for each seed."""
    runs: list[dict[str, Any]] = []
    for (task, config), column in product(plan.tasks.items(), plan.columns):
        if column == baselines.NAME:
            continue
        file, seeds = plan.files[task], config.train.seeds
        written = {path: value for path, _, value in walk(load_task(file))}
        cell = plan.folder(task, column).relative_to(plan.out)
        parts = dict(zip(seed_folders(cell, seeds), ((seed,) for seed in seeds), strict=True))
        # Where a task has a search, its seeds are one run, since the first one chooses for all.
        for folder, own in ({cell: seeds} if config.search.points else parts).items():
            train = replace(config.train, seeds=own)
            leaves = walk(replace(config, name=task, model=column, train=train))
            changed = {path: value for path, _, value in leaves if value != written[path]}
            start = str(Path(file).resolve()) if Path(file).is_file() else file
            runs.append({"folder": str(folder), "config": start, **changed})
    plain = json.loads(json.dumps(runs))  # a tuple that comes twice would be an alias in YAML
    return {"verb": "finetune", "dir": str(plan.out), "metric": {"name": "score"}, "runs": plain}


def count_overlap(plan: BenchmarkPlan, corpus: list[str]) -> dict[str, Any]:
    """Let data preparation count the rows that share text with a corpus.

    Raises:
        DataError: the count failed.
    """
    lines = []
    for name, config in plan.tasks.items():
        try:
            splits = read_task(config).splits
        except PostnormError:
            continue  # its line of the table will say so
        rows = [row for row in splits["test"] if row.gold is not None] or splits["dev"]
        # One of several choices that occurs in the corpus says nothing about its row.
        every = [[row.text, row.text_b] if row.text else [*row.choices] for row in rows]
        lines += [json.dumps({"set": name, "texts": texts}) + "\n" for texts in every]
    rows_file, counted = plan.out / _ROWS_FILE, plan.out / _OVERLAP_FILE
    plan.out.mkdir(parents=True, exist_ok=True)
    write_atomic(rows_file, "".join(lines).encode())
    words = ["overlap", str(rows_file), *corpus, "--out", str(counted)]
    if subprocess.run([*module_command("data_prep"), *words], check=False).returncode:
        raise DataError(
            f"--overlap {' '.join(corpus)}: the count failed, see above; correct the path, or "
            "leave the option out"
        )
    return dict(json.loads(counted.read_bytes()))


def run(
    plan: BenchmarkPlan,
    finetune: Callable[..., Any],
    write: Callable[[Body], object],
    overlap: dict[str, Any] | None = None,
) -> tuple[Body, int]:
    """Run all folders, one after the other; return the table and an exit code.

    Args:
        plan: tasks and models.
        finetune: as `pipeline.finetune.run.finetune`, which takes a finished folder as it is if
            data, weights and settings are the same. To know that it reads the model, so that it is
            a function here, and not a command for each folder, which would load torch each time.
        write: called with the table, partial or not, whenever a folder is finished.
        overlap: what `data_prep.decontaminate.overlap` found, with the tasks as its sets.

    Raises:
        PreemptedError, StoppedError: the same call continues.
    """
    versions = provenance()
    scores: dict[Place, TaskScores] = {}
    failed: dict[Place, str] = {}
    exit_code = 0
    places = list(product(plan.tasks, plan.columns))
    with progress("benchmark", len(places), "cell", logs=False) as advance:
        for number, (task, column) in enumerate(places, start=1):
            logger.info("%d of %d: %s, %s", number, len(places), task, column)
            try:
                result = _result(plan, task, column, finetune)
                if result:  # else there is no such baseline
                    scores[task, column] = read_scores(plan.folder(task, column), result)
            # Not a failure of this cell: the whole table stops, and goes on with the same call.
            except (StoppedError, PreemptedError):
                raise
            except Exception as error:  # whatever it is, the others go on
                # A traceback for our own bugs alone: other messages say what to change.
                is_told = isinstance(error, (PostnormError, OSError))
                logger.error("%s, %s: %s", task, column, error, exc_info=not is_told)
                failed[task, column] = str(error) or type(error).__name__
                exit_code = max(exit_code, getattr(error, "exit_code", EXIT_FAILED_RETRY))
            body = table(plan, scores, failed, overlap)
            body |= {"partial": number < len(places), "versions": versions}
            write(body)
            advance(1)
    return body, exit_code


def _result(plan: BenchmarkPlan, task: str, column: str, finetune: Callable[..., Any]) -> Any:
    config, folder = plan.tasks[task], plan.folder(task, column)
    if column == baselines.NAME:
        return baselines.run_baseline(config, name=task, out=folder)
    options = {"seeds": config.train.seeds, "tokens": plan.out / "tokens"}
    return finetune(config, name=task, source=column, out=folder, **options)


def table(
    plan: BenchmarkPlan,
    scores: Mapping[Place, TaskScores],
    failed: Mapping[Place, str],
    overlap: dict[str, Any] | None,
) -> Body:
    """Put what there is side by side."""
    compared: dict[Hashable, Interval | None] = {
        (task, *pair): difference(*(scores[task, column] for column in pair))
        for task, pair in product(plan.tasks, plan.pairs)
        if all((task, column) in scores for column in pair)
    }
    stands, how_sure = judged(compared)
    lines = [_line(plan, task, scores, failed) for task in plan.tasks]
    for line in lines:
        line["overlap"] = (overlap or {}).get("sets", {}).get(line["task"])
        line["differences"] = [
            {"model": model, "against": against, **intervals.plain(compared[key], stands.get(key))}
            for model, against in plan.pairs
            if (key := (line["task"], model, against)) in compared
        ]
    columns = {name: [line[name] for line in lines] for name in ("chance", "majority")}
    for column in plan.columns:
        columns[column] = [line["columns"].get(column, {}).get("mean") for line in lines]
    full = [i for i in range(len(lines)) if all(of[i] is not None for of in columns.values())]
    means = {name: fmean(of[i] for i in full) for name, of in columns.items() if full}
    return {
        "suite": plan.name,
        "models": list(plan.models),
        "columns": plan.columns,
        "tasks": lines,
        "mean": {"tasks": [lines[i]["task"] for i in full], **means},
        "published": [_published(row, lines, plan) for row in plan.published],
        "overlap": overlap and {**overlap, "sets": None},
        "how_sure": how_sure,
        "intervals": intervals.SETTINGS,
    }


def _line(
    plan: BenchmarkPlan, task: str, scores: Mapping[Place, TaskScores], failed: Mapping[Place, str]
) -> dict[str, Any]:
    config = plan.tasks[task]
    cells = {column: scores[task, column] for column in plan.columns if (task, column) in scores}
    result = next((cell.result for cell in cells.values()), {})
    shown: dict[str, Any] = {}
    for column in plan.columns:
        if column in cells:
            folder = str(plan.folder(task, column).relative_to(plan.out))
            shown[column] = {**_cell(cells[column]), "folder": folder}
        elif (task, column) in failed:
            shown[column] = {"failed": failed[task, column]}
    return {
        "task": task,
        "kind": config.task.kind,
        "metric": config.metric,
        "rows": result.get("rows"),
        "sampled": [split for split, of in result.get("counts", {}).items() if of.get(LEFT_OUT)],
        "scored_on": result.get("protocol", {}).get("scored_on"),
        "chance": result.get("chance"),
        "majority": result.get("majority"),
        "columns": shown,
    }


def _cell(cell: TaskScores) -> dict[str, Any]:
    result, num = cell.result, len(cell.scores)
    interval = interval_of(cell.scores, row_variance(cell.draws, len(cell.rows)))
    warnings = list(result["warnings"])
    if abs(interval.mean - result["mean"]) > 1e-6:
        warnings.append(
            f"result.json says {result['mean']:.4f}, its predictions give {interval.mean:.4f}"
        )
    return {
        "mean": interval.mean,
        "sd": float(np.std(cell.scores, ddof=1)) if num > 1 else 0.0,
        "n": num,
        "low": interval.low,
        "high": interval.high,
        "scores": cell.scores,
        "seeds": result["seeds"],
        "minutes": result["train_s"] / 60,
        "warnings": warnings,
        "searched": bool(result.get("search")),
        "protocol": result["protocol"],
    }


def _published(
    row: PublishedConfig, lines: list[dict[str, Any]], plan: BenchmarkPlan
) -> dict[str, Any]:
    shown, left_out = {}, {}
    for line, score in zip(lines, row.scores, strict=True):
        if score is None:
            continue
        why = _not_comparable(row, line, plan)
        if why:
            left_out[line["task"]] = why
        else:
            shown[line["task"]] = score / 100
    facts = {name: value for name, value in asdict(row).items() if name != "scores"}
    return {**facts, "scores": shown, "left_out": left_out}


def _not_comparable(row: PublishedConfig, line: dict[str, Any], plan: BenchmarkPlan) -> str:
    """Return why a published score cannot stand beside the measured ones; "" if it can."""
    cells = [line["columns"].get(model, {}) for model in plan.models]
    protocols = [cell["protocol"] for cell in cells if "protocol" in cell]
    if not protocols:
        return "nothing was measured"
    if line["scored_on"] != row.split:
        return f"of {row.split}, here {line['scored_on']}"
    if line["sampled"]:
        return f"here {' and '.join(line['sampled'])} is a sample"
    own = f"{line['task']}."
    changed = [text for text in plan.overrides if _OTHER_TASK.match(text.removeprefix(own))]
    if changed:
        return f"here {' '.join(changed)}"
    search = plan.tasks[line["task"]].search
    best = {"dev": "best epoch on dev", "last": "last epoch"}[protocols[0]["selected_on"]]
    # A mean of several runs estimates the same as one run.
    grid = {"best of a grid on dev"} if search.points else set[str]()
    theirs = set(row.protocol.split(", "))
    if others := sorted(theirs - {"one run", best} - grid):
        return f"protocol: {', '.join(others)}"
    if row.split != "dev":
        return ""
    # What chose on the rows that are reported makes a score higher.
    more = grid - theirs
    if protocols[0]["selected_on"] == "dev" and not theirs & {best, "best of a grid on dev"}:
        more |= {best}
    return f"protocol: here {', '.join(sorted(more))}" if more else ""
