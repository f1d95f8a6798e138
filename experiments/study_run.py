"""Runs what is missing of a study as sweeps: here, or as job arrays of a cluster."""

import json
import logging
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import array, grid
from experiments.read import check_reads, outcome, runs_folder, task_name, tasks_folder
from experiments.study import ClassesConfig, StudyPlan, StudyRun
from launch.queue import room_of
from launch.records import FINETUNE, PRETRAIN
from launch.site import check, profile_here
from launch.submit import Origin
from pipeline.data.format import INDEX_FILE, read_index
from pipeline.errors import EXIT_PREEMPTED, ConfigError, DataError
from pipeline.model.architecture import is_model_folder
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_atomic
from pipeline.tasks.config import FieldsConfig
from pipeline.tasks.readers import read_task
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import Example

logger = logging.getLogger(__name__)

_PLACES = ("data.dir", "init_from")
"""Settings that differ where a study's folder was moved."""


@dataclass(frozen=True)
class Where:
    """Where runs are started."""

    jobs: int = 1
    """Number of runs at the same time."""
    cluster: str | None = None
    """Profile; None: this machine."""


def require_same(plan: StudyPlan, out: Path) -> None:
    """Refuse a study with runs that were started with other settings, but for where files are.

    Raises:
        ConfigError: names the runs and settings.
    """
    folder, kind = runs_folder(out), grid.KINDS[PRETRAIN]
    runs = [
        grid.SweepRun(run.name, {}, folder / run.name, run.config) for run in plan.runs.values()
    ]
    told = (grid.changes(run, kind, _PLACES) for run in runs if run.config_file.is_file())
    grid.refuse([line for lines in told for line in lines])


def run_missing(plan: StudyPlan, out: Path, where: Where) -> int:
    """Run what is neither finished nor diverged; return 75 if a signal stopped it, else 0.

    A run that fails is counted in the results and stops no other. On a cluster, what can start now
    is submitted: runs that go on from others follow when the same command is called again.

    Raises:
        PostnormError: nothing can start as it is configured.
    """
    out = out.resolve()
    folder = runs_folder(out)
    # First of all, so that too few rows are told before anything is trained.
    tasks = {
        (task, draw, seed): _task_of(plan, task, draw, seed, out)
        for task, draw, seed in dict.fromkeys(
            (task, draw, plan.runs[run].seed) for run, task, draw in plan.fine_tunings
        )
        if _has_rows(plan, task)
    }
    for wave in plan.waves():
        ready = [run for run in wave if _has_start(run, out)]
        if len(ready) < len(wave):
            logger.info("%d run(s) wait for those that they go on from", len(wave) - len(ready))
        configs: dict[str, Any] = {
            run.name: replace(run.config, init_from=str(_start_folder(run, out)))
            if run.start
            else run.config
            for run in ready
            if outcome(folder / run.name) != "diverged"
        }
        if _sweep(plan.name, PRETRAIN, folder, configs, where):
            return EXIT_PREEMPTED
    finished = [of for of in plan.fine_tunings if outcome(folder / of[0]) == "finished"]
    configs = {
        task_name(run, task, draw): replace(
            tasks[task, draw, plan.runs[run].seed], model=str(folder / run)
        )
        for run, task, draw in finished
        if (task, draw, plan.runs[run].seed) in tasks
    }
    return EXIT_PREEMPTED if _sweep(plan.name, FINETUNE, tasks_folder(out), configs, where) else 0


def prepare(plan: StudyPlan, out: Path) -> None:
    """Make the text of a study unless it is there, once its reads are known to fit its runs.

    Raises:
        ConfigError: a read does not fit.
        DataError: the text could not be made.
    """
    check_reads(plan)
    if any(run.config.data.dir == str(out / "data") for run in plan.runs.values()):
        embedded_corpus(out, plan.study.corpus, plan.study.fingerprint)


def embedded_corpus(folder: Path, config: str = "demo", fingerprint: str | None = None) -> Path:
    """Return the folder of a prep config's corpus in a study's folder; make it if it is not there.

    Raises:
        DataError: it failed, or the dataset has another fingerprint than is given.
    """
    data = folder / "data"
    if not (data / INDEX_FILE).is_file():
        words = ["run", config, f"output_dir={data.resolve()}"]
        if subprocess.run([*module_command("data_prep"), *words], check=False).returncode:
            raise DataError(f"{data}: the embedded corpus could not be prepared, see above")
    found = read_index(data).fingerprint
    if fingerprint not in (None, found):
        raise DataError(
            f"{data} has fingerprint {found}, expected {fingerprint}: the study's numbers are of "
            f"that text. Remove {data} and call again with the packages of prep config {config}, "
            "or give data.dir=DATASET for numbers of your own text"
        )
    return data


def _start_folder(run: StudyRun, out: Path) -> Path:
    return out / "starts" / run.name


def _has_start(run: StudyRun, out: Path) -> bool:
    """Return whether a run can start; make the model that it starts from."""
    if run.start is None:
        return True
    if outcome(runs_folder(out) / run.start) != "finished":
        return False
    if not is_model_folder(_start_folder(run, out)):
        make_start(run, runs_folder(out) / run.start, _start_folder(run, out))
    return True


def make_start(run: StudyRun, source: Path, folder: Path) -> None:
    """Write the model that a run goes on from: grown if asked to, in the run's architecture.

    It gets the vocabulary of the run's data. Switches without weights, such as
    `model.score_residual`, may differ from the source's.

    Raises:
        PostnormError: the run's sizes are not those of the grown model, or it cannot be written.
    """
    from pipeline.train.initial import tokenizer_differences
    from pipeline.use.folder import publishing, write_model, write_tokenizer
    from pipeline.use.grow import grow
    from pipeline.use.source import load_source
    from pipeline.use.surgery import Surgery, operate

    grown = folder.with_name(f".{folder.name}.grown")
    if run.grow is not None:
        shutil.rmtree(grown, ignore_errors=True)
        of = run.grow
        grow(source, grown, width=of.width, depth=of.depth, noise=of.noise, seed=run.seed)
        source = grown
    trained = load_source(source)
    if tokenizer_differences(trained.tokenizer, read_index(run.config.data.dir))[0]:
        trained, _ = operate(trained, Surgery(Path(run.config.data.dir)))
    model = replace(run.config.model, vocab_size=trained.model.config.vocab_size)
    if trained.model.config.norm_eps != model.norm_eps:
        raise ConfigError(
            f"{run.name}: grown, the model has norm_eps={trained.model.config.norm_eps:.3g}, and "
            f"the run model.norm_eps={model.norm_eps:.3g}; set the smaller one for all arms"
        )
    with publishing(folder) as new:
        write_tokenizer(trained, new)
        write_model(new, model, dict(trained.model.state_dict()), {"study_start": str(run.start)})
    shutil.rmtree(grown, ignore_errors=True)


def _task_of(plan: StudyPlan, task: str, draw: int, seed: int, out: Path) -> TaskConfig:
    """Return a task as a seed has it; write its rows if it has classes (DataError: too few)."""
    config, classes = replace(plan.tasks[task], name=task), plan.study.tasks[task].classes
    config = replace(config, train=replace(config.train, seeds=(seed,)))
    if classes is None:
        return config
    return subset(config, classes, (seed, draw), out / "rows" / f"{task}+seed-{seed}+{draw}")


def _has_rows(plan: StudyPlan, task: str) -> bool:
    """Return whether a task's files are there; say what to do if they are not."""
    data = plan.tasks[task].data
    missing = [file for file in data.train if not Path(data.root or ".", file).is_file()]
    if missing:
        text = "%s: %s is not in %s, so it is left out; give tasks.data.root=FOLDER"
        logger.warning(text, task, missing[0], data.root)
    return not missing


def _sweep(study: str, verb: str, folder: Path, configs: Mapping[str, Any], where: Where) -> bool:
    """Run or submit what is left to do, by folder; return whether a signal stopped it."""
    if not configs:
        return False
    points: tuple[dict[str, Any], ...] = tuple({"folder": name} for name in configs)
    sweep, work_dir = grid.SweepConfig(verb=verb, dir=str(folder), runs=points), os.getcwd()

    def config_of(name: str, _: grid.Point) -> Any:
        return replace(configs[name], run_dir=str(folder / name))

    what = grid.todo(grid.made(sweep, work_dir, config_of), sweep.kind)
    logger.info("%s: %d of %d runs are left to do", verb, len(what.runs), len(configs))
    if not what.runs:
        return False
    if where.cluster is None:
        codes = grid.run_here(sweep, what, where.jobs, 1, None, work_dir)
        return EXIT_PREEMPTED in codes.values()
    cluster, source = profile_here(where.cluster), Origin(study, (), where.cluster, work_dir)
    logger.info("%s", check(cluster, verb, work_dir=work_dir))
    room = room_of(cluster, prep=False, every_s=None)
    for job, draft in array.submit_all(sweep, what, cluster, source, where.jobs, room):
        logger.info("job %s: %d runs", job, len(draft.runs))
    return False


def subset(
    config: TaskConfig, sizes: ClassesConfig, key: tuple[int, int], folder: Path
) -> TaskConfig:
    """Write the rows of some classes into a folder; return the task that reads them.

    This varies the number of classes apart from rows a class and imbalance.

    The key is the seed with the number of the draw. Train has equally many rows of each class, dev
    and test all they have of these classes.

    Raises:
        DataError: too few classes have enough rows.
    """
    # All rows first: limits are of the rows of the classes that are drawn.
    whole = replace(config.data, train_rows=None, dev_rows=None, test_rows=None)
    data = read_task(replace(config, data=whole))
    train = _by_class(data.splits["train"])
    wanted = sizes.rows_a_class or max(1, (sizes.rows or 0) // sizes.number)
    enough = sorted(name for name, rows in train.items() if len(rows) >= wanted)
    if len(enough) < sizes.number:
        raise DataError(
            f"{config.name}: {len(enough)} classes have {wanted} rows of train, expected "
            f"{sizes.number}; lower classes.number or its rows"
        )
    # Each seed draws classes of its own, so that a mean over seeds is one over draws as well.
    random = np.random.default_rng((*key, sizes.number))
    chosen = [enough[i] for i in sorted(random.permutation(len(enough))[: sizes.number].tolist())]
    drawn = {
        name: [train[name][i] for i in random.permutation(len(train[name]))[:wanted].tolist()]
        for name in chosen
    }
    rows = {"train": [row for name in chosen for row in drawn[name]]}
    for split in ("dev", "test"):
        of = _by_class(data.splits[split])
        rows[split] = [row for name in chosen for row in of.get(name, [])]
    folder.mkdir(parents=True, exist_ok=True)
    for split, every in rows.items():
        lines = [
            json.dumps({"id": str(n), "text": row.text, "label": row.gold}, ensure_ascii=False)
            for n, row in enumerate(every)
        ]
        write_atomic(folder / f"{split}.jsonl", ("\n".join(lines) + "\n").encode())
    return replace(
        config,
        data=replace(
            config.data,
            root=str(folder.resolve()),
            format="jsonl",
            columns=(),
            drop_labels=(),
            labels=tuple(chosen),
            fields=FieldsConfig(text="text"),
            train=("train.jsonl",),
            dev=("dev.jsonl",),
            test=("test.jsonl",),
        ),
    )


def _by_class(rows: Sequence[Example]) -> dict[str, list[Example]]:
    found = defaultdict(list)
    for row in rows:
        if isinstance(row.gold, str):
            found[row.gold].append(row)
    return dict(found)
