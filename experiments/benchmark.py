"""Many tasks by many models: runs what is missing and puts the scores side by side.

DIR/MODEL/TASK is a fine-tuning folder, DIR/ngrams/TASK a baseline's of the same form. All numbers
come from their predictions. `table.json` holds what the table shows, as fractions; it is written
after every finished folder, so that an interrupted benchmark has a partial table.

Intervals are bootstrapped over rows and seeds; a difference is drawn with the same rows for both.
"""

import json
import logging
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import baselines
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
from pipeline.finetune.result import read_runs, seed_folders
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.tasks.readers import read_task
from pipeline.tasks.scores import Floats, Table, bootstrap, interval
from pipeline.tasks.task import RANDOM, PublishedConfig, SuiteConfig, TaskConfig, load_task

logger = logging.getLogger(__name__)

TABLE_FILE = "table.json"
_ROWS_FILE, _OVERLAP_FILE = "overlap-rows.jsonl", "overlap.json"
LEFT_OUT = "left out by the limit of rows"
_OTHER_TASK = re.compile(r"task\.|data\.(?!root=|\w+_rows=)")
"""Overrides that make a task another one than scores were published for."""
Body = dict[str, Any]
"""What `table.json` holds."""


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

    def folder(self, task: str, column: str) -> Path:
        """Return the fine-tuning folder of a task and a column."""
        return self.out / re.sub(r"[^\w.-]+", "-", column).strip("-.") / task


class BenchmarkCell(NamedTuple):
    """A finished folder."""

    result: dict[str, Any]
    rows: list[tuple[str, Any]]
    """Id and gold of each scored row."""
    scores: list[float]
    """One a seed."""
    draws: Floats


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
    names = dict.fromkeys(models)
    plan = BenchmarkPlan(
        name=Path(suite).stem, tasks=tasks, files=files, models=tuple(names), out=out,
        published=config.published, overrides=tuple(overrides), **on,
    )  # fmt: skip
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
    """Describe all fine-tunings as a sweep (`postnorm submit --sweep`), a run for each seed.

    Where a task has a search, its seeds are one run, since the first one chooses for all.
    """
    runs: list[dict[str, Any]] = []
    for (task, config), column in product(plan.tasks.items(), plan.columns):
        if column == baselines.NAME:
            continue
        file, seeds = plan.files[task], config.train.seeds
        written = {path: value for path, _, value in walk(load_task(file))}
        cell = plan.folder(task, column).relative_to(plan.out)
        parts = dict(zip(seed_folders(cell, seeds), ((seed,) for seed in seeds), strict=True))
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
        texts = [[row.text, row.text_b] if row.text else [*row.choices] for row in rows]
        lines += [json.dumps({"set": name, "texts": each}) + "\n" for each in texts]
    rows_file, found_file = plan.out / _ROWS_FILE, plan.out / _OVERLAP_FILE
    plan.out.mkdir(parents=True, exist_ok=True)
    write_atomic(rows_file, "".join(lines).encode())
    words = ["overlap", str(rows_file), *corpus, "--out", str(found_file)]
    if subprocess.run([*module_command("data_prep"), *words], check=False).returncode:
        raise DataError(
            f"--overlap {' '.join(corpus)}: the count failed, see above; correct the path, or "
            "leave the option out"
        )
    return dict(json.loads(found_file.read_bytes()))


def run(
    plan: BenchmarkPlan,
    finetune: Callable[..., Any],
    written: Callable[[Body], object],
    overlap: dict[str, Any] | None = None,
) -> tuple[Body, int]:
    """Run all folders, one after the other; return the table and an exit code.

    Args:
        plan: tasks and models.
        finetune: as `pipeline.finetune.run.finetune`, which takes a finished folder as it is if
            data, weights and settings are the same.
        written: called with the table each time it is written.
        overlap: what `data_prep.decontaminate.overlap` found, with the tasks as its sets.

    Raises:
        PreemptedError, StoppedError: the same call continues.
    """
    table = _Growing(plan, overlap)
    places = [(task, column) for task in plan.tasks for column in plan.columns]
    for number, (task, column) in enumerate(places, start=1):
        logger.info("%d of %d: %s, %s", number, len(places), task, column)
        table.run(task, column, finetune)
        body = table.write(partial=number < len(places))
        written(body)
    return body, max(table.exit_codes, default=0)


class _Growing:
    """The table while it grows."""

    def __init__(self, plan: BenchmarkPlan, overlap: dict[str, Any] | None) -> None:
        self.exit_codes: list[int] = []
        self._plan, self._overlap = plan, overlap
        self._cells: dict[tuple[str, str], BenchmarkCell | str | None] = {}
        """What is finished, why it failed, or None: there is no such baseline."""
        self._provenance = provenance()

    def run(self, task: str, column: str, finetune: Callable[..., Any]) -> None:
        """Run one folder; a failure is noted."""
        config, folder = self._plan.tasks[task], self._plan.folder(task, column)
        try:
            if column == baselines.NAME:
                result = baselines.run_baseline(config, name=task, out=folder)
            else:
                result = finetune(
                    config,
                    name=task,
                    source=column,
                    out=folder,
                    seeds=config.train.seeds,
                    tokens=self._plan.out / "tokens",
                )
            self._cells[task, column] = read_cell(folder, result) if result else None
        except (StoppedError, PreemptedError):
            raise
        except Exception as error:  # whatever it is, the others go on
            is_told = isinstance(error, (PostnormError, OSError))
            logger.error("%s, %s: %s", task, column, error, exc_info=not is_told)
            self._cells[task, column] = str(error) or type(error).__name__
            self.exit_codes.append(getattr(error, "exit_code", EXIT_FAILED_RETRY))

    def write(self, *, partial: bool) -> Body:
        """Write `table.json`."""
        lines = [self._line(task) for task in self._plan.tasks]
        columns = {
            "chance": [line["chance"] for line in lines],
            "majority": [line["majority"] for line in lines],
        }
        for column in self._plan.columns:
            columns[column] = [line["columns"].get(column, {}).get("mean") for line in lines]
        full = [i for i in range(len(lines)) if all(of[i] is not None for of in columns.values())]
        means = {
            name: float(np.mean([of[i] for i in full])) for name, of in columns.items() if full
        }
        body = {
            "suite": self._plan.name,
            "partial": partial,
            "models": list(self._plan.models),
            "columns": self._plan.columns,
            "tasks": lines,
            "mean": {"tasks": [lines[i]["task"] for i in full], **means},
            "published": [self._published(row, lines) for row in self._plan.published],
            "overlap": self._overlap and {**self._overlap, "sets": None},
            "intervals": {"level": 0.95, "draws": 1000, "key": 0},
            "versions": self._provenance,
        }
        self._plan.out.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self._plan.out / TABLE_FILE, body)
        return body

    def _line(self, task: str) -> dict[str, Any]:
        config = self._plan.tasks[task]
        of = {column: self._cells.get((task, column)) for column in self._plan.columns}
        cells = {column: cell for column, cell in of.items() if isinstance(cell, BenchmarkCell)}
        result = next((cell.result for cell in cells.values()), {})
        counts = result.get("counts", {})
        shown = {column: self._shown(task, column, cell) for column, cell in of.items() if cell}
        return {
            "task": task,
            "kind": config.task.kind,
            "metric": config.metric,
            "rows": result.get("rows"),
            "sampled": [split for split, of in counts.items() if of.get(LEFT_OUT)],
            "scored_on": result.get("protocol", {}).get("scored_on"),
            "chance": result.get("chance"),
            "majority": result.get("majority"),
            "overlap": (self._overlap or {}).get("sets", {}).get(task),
            "columns": shown,
            "differences": list(self._differences(cells)),
        }

    def _shown(self, task: str, column: str, cell: BenchmarkCell | str) -> dict[str, Any]:
        if isinstance(cell, str):
            return {"failed": cell}
        num = len(cell.scores)
        low, high = interval(cell.draws)
        mean = float(np.mean(cell.scores))
        warnings = list(cell.result["warnings"])
        if abs(mean - cell.result["mean"]) > 1e-6:
            warnings.append(
                f"result.json says {cell.result['mean']:.4f}, its predictions give {mean:.4f}"
            )
        return {
            "mean": mean,
            "sd": float(np.std(cell.scores, ddof=1)) if num > 1 else 0.0,
            "n": num,
            "low": low,
            "high": high,
            "scores": cell.scores,
            "seeds": cell.result["seeds"],
            "minutes": cell.result["train_s"] / 60,
            "warnings": warnings,
            "searched": bool(cell.result.get("search")),
            "protocol": cell.result["protocol"],
            "folder": str(self._plan.folder(task, column).relative_to(self._plan.out)),
        }

    def _differences(self, cells: dict[str, BenchmarkCell]) -> Iterator[dict[str, Any]]:
        models = self._plan.models
        pairs = [(model, RANDOM + model) for model in models] + list(combinations(models, 2))
        for model, against in pairs:
            if model in cells and against in cells:
                yield {
                    "model": model,
                    "against": against,
                    **difference(*(cells[name] for name in (model, against))),
                }

    def _published(self, row: PublishedConfig, lines: list[dict[str, Any]]) -> dict[str, Any]:
        found, left_out = {}, {}
        for line, score in zip(lines, row.scores, strict=True):
            if score is None:
                continue
            why = _not_comparable(row, line, self._plan)
            if why:
                left_out[line["task"]] = why
            else:
                found[line["task"]] = score / 100
        facts = {name: value for name, value in asdict(row).items() if name != "scores"}
        return {**facts, "scores": found, "left_out": left_out}


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
    changed = [each for each in plan.overrides if _OTHER_TASK.match(each)]
    if changed:
        return f"here {' '.join(changed)}"
    search = plan.tasks[line["task"]].search
    best = {"dev": "best epoch on dev", "last": "last epoch"}[protocols[0]["selected_on"]]
    # A mean of several runs estimates the same as one run.
    ours = {"one run", best} | ({"best of a grid on dev"} if search.points else set())
    others = sorted(set(row.protocol.split(", ")) - ours)
    return f"protocol: {', '.join(others)}" if others else ""


def read_cell(folder: Path, result: dict[str, Any]) -> BenchmarkCell:
    """Score the predictions of a folder again.

    Raises:
        DataError: predictions are missing, damaged, or of other rows from seed to seed.
    """
    runs = read_runs(folder)
    predictions = runs[0].predictions[runs[0].scored.body["protocol"]["scored_on"]]
    rows = [(row.id, row.gold) for row in predictions if row.gold is not None]
    tables: list[Table] = [run.scored.table for run in runs]
    return BenchmarkCell(result, rows, [table.score for table in tables], bootstrap(tables))


def difference(one: BenchmarkCell, other: BenchmarkCell) -> dict[str, float | None]:
    """Return mean, low and high of a paired difference; None where the rows are not the same."""
    if one.rows != other.rows:
        return {"mean": None, "low": None, "high": None}
    low, high = interval(one.draws - other.draws)
    return {"mean": float(np.mean(one.scores) - np.mean(other.scores)), "low": low, "high": high}
