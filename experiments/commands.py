"""The verbs of many runs: sweeps, benchmarks, transfer, studies. Nothing imports torch early."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import array, grid
from experiments.study import (
    PRESETS,
    StudyArguments,
    StudyConfig,
    StudyPlan,
    plan,
    read_study,
)
from launch.commands import SubmitArguments, refuse_dry_run, submit_one
from launch.local import combined_exit_code
from launch.queue import room_of
from launch.site import check, profile_here
from pipeline.config import strict_yaml
from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.finetune.commands import seeds_of
from pipeline.runtime import cli, env
from pipeline.runtime.cli import argument, at_least, option, verb
from pipeline.runtime.files import write_atomic
from pipeline.runtime.rank import Rank, run_as_rank
from pipeline.runtime.summary import FolderSummary

if TYPE_CHECKING:
    from experiments.benchmark import BenchmarkPlan

_AGAIN = "The same command continues it."


# Sweeps


@dataclass(frozen=True)
class ManyArguments(SubmitArguments):
    """The command line of `submit`, with what is of sweeps alone."""

    sweep: bool = option(
        "CONFIG is a sweep: submit its runs as a job array; with --local, run them here",
        one_of="what",
    )
    jobs: int | None = option("for --sweep: runs at the same time", "N", type=at_least(1))
    json: bool = option("for --sweep: one JSON object")


@verb(
    "submit train.yaml --cluster configs/cluster/example.yaml --dry-run",
    "submit train.yaml --cluster configs/cluster/example.yaml",
    "submit train.yaml --local --ranks 2",
    "submit --prep configs/prep/web.yaml --cluster configs/cluster/example.yaml --wait-room",
    "submit --sweep sweep.yaml --cluster configs/cluster/example.yaml",
    "submit --sweep sweep.yaml --local --jobs 2",
    "submit --evaluate runs/mine --all --cluster configs/cluster/example.yaml",
    "submit --program runs/tuned --cluster c.yaml -- python finetune.py models/mine",
)
def submit(arguments: ManyArguments) -> int:
    """Submit a run, a sweep of runs or a data preparation to SLURM; or run it here."""
    if not arguments.sweep:
        if arguments.jobs or arguments.json:
            raise ConfigError("--jobs and --json are for --sweep: leave them out")
        return submit_one(arguments)
    if arguments.words:
        raise ConfigError(f"`-- {' '.join(arguments.words)}`: only --program takes words after --")
    return _submit_sweep(arguments)


def _submit_sweep(arguments: ManyArguments) -> int:
    work_dir = os.getcwd()
    config, runs = grid.read_sweep(arguments.config, arguments.overrides, work_dir)
    what, jobs = grid.todo(runs, config.kind), arguments.jobs or config.jobs
    said: dict[str, Any] = {
        "dir": str(Path(work_dir, config.dir)),
        "runs": [run.name for run in what.runs],
        "left": what.left,
    }
    code, text = EXIT_FINISHED, ""
    if not arguments.json:
        for name, why in what.left.items():
            print(f"left alone: {name}: {why}", flush=True)
    if what.runs and arguments.local:
        refuse_dry_run(arguments)
        codes = grid.run_here(config, what, jobs, arguments.ranks, arguments.cluster, work_dir)
        said["exit_codes"], code = codes, combined_exit_code(codes.values())
    elif what.runs:
        cluster, source = profile_here(arguments.cluster), arguments.origin(arguments.config)
        text = check(cluster, config.verb, work_dir=work_dir, optional=arguments.dry_run)
        room = room_of(cluster, prep=False, every_s=arguments.wait_room)
        if arguments.dry_run:
            drafts = array.drafts(config, what, cluster, source, jobs, room)
            said["script"] = drafts[0].script
            text = "\n".join([f"# {text}", *map(array.dry_run_text, drafts)])
        else:
            for job, draft in array.submit_all(config, what, cluster, source, jobs, room):
                said.setdefault("jobs", []).append(job)
                text += f"\njob {job}: {len(draft.runs)} runs, {draft.job.at_once} at once"
            said["job"] = next(iter(said.get("jobs", [])), None)
            text += "\n"
    elif not arguments.dry_run:
        grid.record(config, Path(said["dir"]), what.every)
    if arguments.json:
        print(json.dumps(said))
    else:
        if not arguments.dry_run:
            text += grid.sweep_summary(grid.sweep_report(Path(said["dir"]).resolve())).text()
        print(text)
    return code


def sweep_look(folder: Path) -> tuple[FolderSummary, dict[str, Any]] | None:
    """Look at the folder of a sweep, for `status`; None for another folder."""
    if not grid.is_sweep(folder):
        return None
    report = grid.sweep_report(folder.resolve())
    return grid.sweep_summary(report), asdict(report)


def sweep_cancel(folder: Path, save: bool, save_s: float) -> Iterable[str] | None:
    """End the jobs of a sweep, for `cancel`; None for another folder."""
    if not grid.is_sweep(folder):
        return None
    return grid.cancel_sweep(folder.resolve(), save=save, save_s=save_s)


# Tables of tasks


_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}


@verb(
    "benchmark small data.root=data --from runs/mine --from models/bert --out runs/table "
    "--seeds 1,2,3",
    "benchmark clue data.root=data --from runs/mine --out runs/clue --overlap data/corpus.jsonl.gz",
    "benchmark clue data.root=data --from runs/mine --out runs/clue --write-sweep sweep.yaml",
    if_interrupted=_AGAIN,
)
def benchmark(
    suite: str = argument("YAML file, or the name of a shipped suite", "SUITE"),
    models: list[str] = option(
        "as of finetune; once for each model",
        "MODEL",
        flag="--from",
        action="append",
        required=True,
    ),
    out: Path = option("folder of all results", "DIR", required=True),
    seeds: tuple[int, ...] = option(
        "such as 1,2,3; default: the tasks'", type=seeds_of, default=()
    ),
    random: bool = option("each model with fresh weights beside it", **_SWITCH),
    baselines: bool = option("the bag of character n-grams", **_SWITCH),
    overlap: list[str] = option(
        "count the rows that share text with this corpus: a dataset's folder, or text as a "
        "source of `prep` takes it; may be repeated",
        "TEXTS",
        action="append",
        default=[],
    ),
    dry_run: bool = option(
        "train nothing: rows, steps, tokens and GPU hours of each task with the first model",
        one_of="nothing",
    ),
    write_sweep: Path | None = option(
        "train nothing: write all fine-tunings as a sweep, for `submit --sweep FILE`; "
        "afterwards, the same command without this option makes the table of them",
        "FILE",
        one_of="nothing",
        type=cli.new_file,
    ),
    overrides: list[str] = cli.overrides(
        "of every task, such as data.root=data train.epochs=1; of one: tnews.train.epochs=1"
    ),
) -> int:
    """Fine-tune models on a suite of tasks and make their table.

    Fine-tune each model on each task of a suite and write DIR/table.md, DIR/table.json and a
    section for the card of each model. Beside a score stand majority, chance, random initialisation
    and a bag of character n-grams, and the paired differences with intervals. What is finished in
    DIR is not run again; a task that fails is shown as failed, and the others go on.
    """

    def work(rank: Rank) -> int:
        if rank.process.world_size > 1:
            raise ConfigError(
                f"benchmark runs in one process, not in {rank.process.world_size}; fine-tune on "
                "several ranks first, into the folders DIR/MODEL/TASK: what is finished is taken"
            )
        from experiments.benchmark import read_plan, sweep

        plan = read_plan(
            suite, models, out, seeds, overrides, with_random=random, with_ngrams=baselines
        )
        if dry_run:
            from pipeline.finetune.cost import cost_lines, costs

            most = max(len(task.train.seeds) for task in plan.tasks.values())
            lines = cost_lines(costs(plan.tasks, plan.models[0], plan.out), most)
            print(FolderSummary(suite, "not run", lines).text())
            return EXIT_FINISHED
        if write_sweep:
            body = sweep(plan)
            write_atomic(write_sweep, strict_yaml.dump(body).encode())
            print(f"{write_sweep}: {len(body['runs'])} runs")
            return EXIT_FINISHED
        return _make_table(plan, overlap)

    return run_as_rank(work, env.process_info_or_alone())


def _make_table(plan: "BenchmarkPlan", corpora: list[str]) -> int:
    from experiments import benchmark_text
    from experiments.benchmark import count_overlap, run
    from pipeline.finetune.run import finetune

    overlap = count_overlap(plan, corpora) if corpora else None
    body, code = run(plan, finetune, partial(benchmark_text.write, plan), overlap)
    print(benchmark_text.terminal(body, str(plan.out)))
    return code


@verb("transfer transfer.yaml run_dir=runs/transfer", if_interrupted=_AGAIN)
def transfer(
    config: str = argument("YAML file: run_dir, mix, tasks, seeds"),
    overrides: list[str] = cli.overrides("such as seeds=[1,2] run_dir=runs/transfer"),
) -> int:
    """What fine-tuned tasks gain from a multi-task stage.

    Fine-tune each task from the model that a multi-task stage starts from, from that of all tasks,
    and from one that never saw the task; write RUN_DIR/transfer.md and transfer.json with the
    paired differences. What is finished in RUN_DIR is not run again.
    """

    def work(rank: Rank) -> int:
        if rank.process.world_size > 1:
            raise ConfigError(
                f"transfer runs in one process, not in {rank.process.world_size}; train the "
                "mixes on several ranks first, into RUN_DIR/all and RUN_DIR/without-TASK"
            )
        from experiments import transfer as of

        print(of.markdown(of.transfer(config, tuple(overrides))))
        return EXIT_FINISHED

    return run_as_rank(work, env.process_info_or_alone())


# Studies


@verb(
    "study realformer --dry-run",
    "study realformer --local --jobs 2 --out runs/realformer",
    "study masks data.dir=data/mine --part units",
    "study realformer --preset gpu --cluster c.yaml --jobs 8",
    if_interrupted="runs keep their checkpoints; the same command continues the study",
)
def study(arguments: StudyArguments) -> int:
    """Run a study: what an architecture or a trick gives, with intervals.

    Runs what is missing of a study, and writes OUT/NAME.md, .json and figures; the same command
    resumes it.
    """
    name, read = read_study(arguments.study)
    out = (arguments.out or Path("runs", f"{name}-{arguments.preset}")).resolve()
    if read.kind == "speed":
        from experiments.speed import speed

        return speed(name, read, arguments, out)

    def planned(preset: str) -> StudyPlan:
        return plan(
            name,
            read,
            preset,
            out=out,
            overrides=arguments.overrides,
            parts=arguments.part,
            most_seeds=arguments.seeds,
        )

    if arguments.dry_run:
        from experiments.budgets import cost_lines

        for preset in (*(each for each in PRESETS if each != arguments.preset), arguments.preset):
            if set(arguments.part) <= set(read.parts_of(preset)) or preset == arguments.preset:
                is_listed = preset == arguments.preset
                print("\n".join(cost_lines(planned(preset), listed=is_listed)))
        return EXIT_FINISHED
    folder = (arguments.results or out).resolve()
    if arguments.report and not (out / "runs").is_dir() and (folder / f"{name}.json").is_file():
        return _write_again(name, read, arguments, folder)
    return _run(partial(planned, arguments.preset), arguments, out, folder)


def _write_again(name: str, study: StudyConfig, arguments: StudyArguments, folder: Path) -> int:
    """Write a page from the runs in its own JSON, where their folders are not there any more."""
    from experiments import study_page
    from experiments.read import read_page

    if arguments.overrides or arguments.part or arguments.seeds:
        raise ConfigError(
            f"{folder / name}.json is all that is left of the runs, and says what they were: "
            "leave out overrides, --part and --seeds, or give the --out that has the runs"
        )
    body, readings = read_page(folder / f"{name}.json")
    made = plan(
        name,
        study,
        body["preset"],
        out=folder,
        overrides=body["overrides"],
        parts=list(dict.fromkeys(cell["cell"]["part"] for cell in body["cells"])),
        most_seeds=body["most_seeds"],
    )
    if lacking := [run for run in made.runs if run not in readings]:
        raise ConfigError(
            f"{name}.json lacks {lacking[0]}: take the study's file as it was, or --out of the runs"
        )
    body = study_page.write(made, readings, body["batches"], folder, body)
    _say(body, folder / name)
    return EXIT_FINISHED


def _run(
    planned: Callable[[], StudyPlan], arguments: StudyArguments, out: Path, folder: Path
) -> int:
    from experiments import study_page
    from experiments.read import check_batches, read, runs_folder
    from experiments.study_run import Where, prepare, require_same, run_missing

    import_module("matplotlib")  # that it is missing is told before hours of training
    made = planned()
    if not arguments.report:
        prepare(made, out)
        made = planned()  # `flops_of` needs the vocabulary of the text
    require_same(made, out)
    code = EXIT_FINISHED
    if not arguments.report:
        code = run_missing(made, out, Where(arguments.jobs, arguments.cluster))
    readings = {run.name: read(made, run, out) for run in made.runs.values()}
    body = study_page.write(made, readings, check_batches(made, out), folder)
    failed = [run for run in readings if readings[run].outcome in ("diverged", "failed")]
    lines = [f"{run}: {readings[run].outcome}, see {runs_folder(out) / run}/logs" for run in failed]
    _say(body, folder / made.name, lines)
    return code


def _say(body: Mapping[str, Any], page: Path, more: Iterable[str] = ()) -> None:
    for line in (*body["verdicts"], *more):
        print(line)
    print(f"{'partial: ' if body['partial'] else ''}{page}.md")


TASKS, STUDY = (benchmark, transfer), (study,)
VERBS = (submit, *TASKS, *STUDY)
