"""The verbs of tasks: fine-tune a model, and let it answer. Nothing here imports torch early."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config import strict_yaml
from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.finetune.rescore_command import rescore
from pipeline.runtime import cli, env
from pipeline.runtime.cli import JSON, argument, option, verb
from pipeline.runtime.files import write_atomic
from pipeline.runtime.rank import Rank, run_as_rank
from pipeline.runtime.summary import FolderSummary

if TYPE_CHECKING:
    from pipeline.finetune.benchmark import BenchmarkPlan

_AGAIN = "The same command continues it."


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of different whole numbers from 0, such as 1,2,3"
        )
    return seeds


@verb(
    "finetune fewclue-tnews data.root=data --from runs/mine --out runs/tnews --seeds 1,2,3",
    if_interrupted=_AGAIN,
)
def _finetune(
    task: str = argument("task file, or the name of a shipped one"),
    source: str | None = option(
        "run, model folder, Hugging Face folder; random:MODEL takes fresh weights; default: "
        "the task's `model`",
        "MODEL",
        flag="--from",
    ),
    out: str | None = option("folder of the results; default: the task's `run_dir`", "DIR"),
    seeds: tuple[int, ...] | None = option("such as 1,2,3; default: the task's", type=_seeds),
    tokens: Path | None = option("folder of tokenised rows that runs share", "DIR"),
    overrides: list[str] = cli.overrides("such as train.lr=5e-5 data.root=clue"),
) -> int:
    """Train a model on a task, choose on dev, report on test."""
    from pipeline.config.load import warn_of_unusual
    from pipeline.tasks.task import load_task

    def work(rank: Rank) -> int:
        config = load_task(task, tuple(overrides))
        if rank.process.is_first:
            warn_of_unusual(config)
        start, folder = source or config.model or "", out or config.run_dir or ""
        for value, name, key in ((start, "--from", "model"), (folder, "--out", "run_dir")):
            if not value:
                raise ConfigError(f"{name} is missing, and {task} has no `{key}`")
        if rank.run_dir is None:
            rank.run_dir = Path(folder)
        from pipeline.finetune.run import finetune

        body = finetune(
            config,
            name=str(config.name),
            source=start,
            out=Path(folder),
            seeds=seeds,
            tokens=tokens,
        )
        if body:
            print(result_line(body))
            for text in body["warnings"]:
                print(f"warning: {text}")
        return EXIT_FINISHED

    # What launched this rank knows the folder, also where the task cannot be read.
    return run_as_rank(work, env.process_info_or_alone(), env.launched_run_dir())


def result_line(body: dict[str, object]) -> str:
    """Summarise the result of a task in one line."""
    spread = f" ± {body['sd']:.4f}" if len(body["seeds"]) > 1 else ""  # type: ignore[arg-type]
    on = body["protocol"]["scored_on"]  # type: ignore[index]
    return (
        f"{body['task']}: {body['metric']} {body['mean']:.4f}{spread} on {on} "
        f"(majority {body['majority']:.4f}, chance {body['chance']:.4f}, "
        f"seeds {', '.join(map(str, body['seeds']))})"  # type: ignore[call-overload]
    )


_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}


@verb(
    "benchmark small data.root=data --from runs/mine --from models/bert --out runs/table "
    "--seeds 1,2,3",
    "benchmark clue data.root=data --from runs/mine --out runs/clue --overlap data/corpus.jsonl.gz",
    "benchmark clue data.root=data --from runs/mine --out runs/clue --write-sweep sweep.yaml",
    if_interrupted=_AGAIN,
)
def _benchmark(
    suite: str = argument("YAML file, or the name of a shipped suite", "SUITE"),
    models: list[str] = option(
        "as of finetune; once for each model",
        "MODEL",
        flag="--from",
        action="append",
        required=True,
    ),
    out: Path = option("folder of all results", "DIR", required=True),
    seeds: tuple[int, ...] = option("such as 1,2,3; default: the tasks'", type=_seeds, default=()),
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
        from pipeline.finetune import benchmark

        plan = benchmark.read_plan(
            suite, models, out, seeds, overrides, with_random=random, with_ngrams=baselines
        )
        if dry_run:
            from pipeline.finetune.cost import cost_lines, costs

            most = max(len(task.train.seeds) for task in plan.tasks.values())
            lines = cost_lines(costs(plan, plan.models[0]), most)
            print(FolderSummary(suite, "not run", lines).text())
            return EXIT_FINISHED
        if write_sweep:
            sweep = benchmark.sweep(plan)
            write_atomic(write_sweep, strict_yaml.dump(sweep).encode())
            print(f"{write_sweep}: {len(sweep['runs'])} runs")
            return EXIT_FINISHED
        return _make_table(plan, out, overlap)

    return run_as_rank(work, env.process_info_or_alone())


def _make_table(plan: "BenchmarkPlan", out: Path, corpora: list[str]) -> int:
    from pipeline.finetune import benchmark, benchmark_text
    from pipeline.finetune.run import finetune

    overlap = benchmark.count_overlap(plan, corpora) if corpora else None

    def written(body: benchmark.Body) -> None:
        write_atomic(out / "table.md", benchmark_text.markdown(body).encode())
        for model in plan.models:
            card = plan.folder("card.md", model)
            card.parent.mkdir(exist_ok=True)
            write_atomic(card, benchmark_text.card(body, model).encode())

    body, code = benchmark.run(plan, finetune, written, overlap)
    print(benchmark_text.terminal(body, str(out)))
    return code


@verb(
    "predict runs/tnews --input test.json --out predictions.jsonl",
    "predict runs/tnews --input test.json --out submission/ --format clue",
)
def _predict(
    folder: Path = argument("the --out of finetune", "DIR"),
    input: Path = option("in the format of the task", "FILE", required=True),
    out: Path = option("file to write", "FILE", required=True),
    format: Literal["jsonl", "clue"] = option(
        "id, gold, prediction and scores a line (default); or for CLUE's and FewCLUE's sites, "
        "where a folder as --out gets the file under its official name",
        default="jsonl",
    ),
    json: bool = JSON,
) -> None:
    """Let a fine-tuned model answer the rows of a file."""
    from pipeline.finetune.answer import as_json, predict

    answers = predict(folder, input, out, format)
    if json:
        print(as_json(answers))
        return
    print(f"{answers.path}: {answers.num_rows:,} rows")
    for what, count in answers.counts.items():
        print(f"{what}: {count:,}")
    for name, score in answers.scores.items():
        print(f"{name} {score:.4f}")


TASKS = (_finetune, _benchmark, _predict, rescore)
