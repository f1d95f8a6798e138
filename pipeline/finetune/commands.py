"""The verbs of tasks: fine-tune a model, and let it answer. Nothing here imports torch early."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import strict_yaml
from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.finetune.rescore_command import RESCORE
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb
from pipeline.runtime.files import write_atomic
from pipeline.runtime.summary import FolderSummary

if TYPE_CHECKING:
    from pipeline.runtime.rank import Rank


def _finetune_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", help="task file, or the name of a shipped one")
    add(
        "--from",
        dest="source",
        metavar="MODEL",
        help="run, model folder, Hugging Face folder; random:MODEL takes fresh weights; default: "
        "the task's `model`",
    )
    add("--out", metavar="DIR", help="folder of the results; default: the task's `run_dir`")
    add("--seeds", type=_seeds, help="such as 1,2,3; default: the task's")
    add("--tokens", type=Path, metavar="DIR", help="folder of tokenised rows that runs share")
    cli.add_overrides(parser, "such as train.lr=5e-5 data.root=clue")


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


def _finetune(arguments: argparse.Namespace) -> int:
    from pipeline.config.load import warn_of_unusual
    from pipeline.runtime import env
    from pipeline.runtime.rank import Rank, run_as_rank
    from pipeline.tasks.task import load_task

    def work(rank: Rank) -> int:
        config = load_task(arguments.task, tuple(arguments.overrides))
        if rank.process.is_first:
            warn_of_unusual(config)
        source: str = arguments.source or config.model or ""
        out: str = arguments.out or config.run_dir or ""
        for value, option, key in ((source, "--from", "model"), (out, "--out", "run_dir")):
            if not value:
                raise ConfigError(f"{option} is missing, and {arguments.task} has no `{key}`")
        if rank.run_dir is None:
            rank.run_dir = Path(out)
        from pipeline.finetune.run import finetune

        body = finetune(
            config,
            name=str(config.name),
            source=source,
            out=Path(out),
            seeds=arguments.seeds,
            tokens=arguments.tokens,
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


FINETUNE = Verb(
    "finetune",
    "train a model on a task, choose on dev, report on test",
    _finetune_arguments,
    _finetune,
    "finetune fewclue-tnews data.root=data --from runs/mine --out runs/tnews --seeds 1,2,3",
    "The same command continues it.",
)


_BENCHMARK = """\
Fine-tune each model on each task of a suite and write DIR/table.md, DIR/table.json and a section
for the card of each model. Beside a score stand majority, chance, random initialisation and a bag
of character n-grams, and the paired differences with intervals. What is finished in DIR is not run
again; a task that fails is shown as failed, and the others go on."""


def _benchmark_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _BENCHMARK
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("suite", metavar="SUITE", help="YAML file, or the name of a shipped suite")
    add(
        "--from",
        action="append",
        required=True,
        dest="models",
        metavar="MODEL",
        help="as of finetune; once for each model",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder of all results")
    add("--seeds", type=_seeds, default=(), help="such as 1,2,3; default: the tasks'")
    add("--random", action=switch, default=True, help="each model with fresh weights beside it")
    add("--baselines", action=switch, default=True, help="the bag of character n-grams")
    add(
        "--overlap",
        action="append",
        default=[],
        metavar="TEXTS",
        help="count the rows that share text with this corpus: a dataset's folder, or text as a "
        "source of `prep` takes it; may be repeated",
    )
    nothing = parser.add_mutually_exclusive_group()
    nothing.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: rows, steps, tokens and GPU hours of each task with the first model",
    )
    nothing.add_argument(
        "--write-sweep",
        type=Path,
        metavar="FILE",
        help="train nothing: write all fine-tunings as a sweep, for `submit --sweep FILE`; "
        "afterwards, the same command without this option makes the table of them",
    )
    cli.add_overrides(
        parser, "of every task, such as data.root=data train.epochs=1; of one: tnews.train.epochs=1"
    )


def _benchmark(arguments: argparse.Namespace) -> int:
    from pipeline.runtime import env
    from pipeline.runtime.rank import run_as_rank

    return run_as_rank(partial(_benchmark_on, arguments), env.process_info_or_alone())


def _benchmark_on(arguments: argparse.Namespace, rank: "Rank") -> int:
    from pipeline.finetune import benchmark, benchmark_text
    from pipeline.finetune.run import finetune

    if rank.process.world_size > 1:
        raise ConfigError(
            f"benchmark runs in one process, not in {rank.process.world_size}; fine-tune on "
            "several ranks first, into the folders DIR/MODEL/TASK: what is finished is taken"
        )
    out: Path = arguments.out
    plan = benchmark.read_plan(
        arguments.suite,
        arguments.models,
        out,
        arguments.seeds,
        arguments.overrides,
        with_random=arguments.random,
        with_ngrams=arguments.baselines,
    )
    if arguments.dry_run:
        from pipeline.finetune.cost import cost_lines, costs

        seeds = max(len(task.train.seeds) for task in plan.tasks.values())
        found = costs(plan, plan.models[0])
        print(FolderSummary(arguments.suite, "not run", cost_lines(found, seeds)).text())
        return EXIT_FINISHED
    if arguments.write_sweep:
        sweep = benchmark.sweep(plan)
        write_atomic(arguments.write_sweep, strict_yaml.dump(sweep).encode())
        print(f"{arguments.write_sweep}: {len(sweep['runs'])} runs")
        return EXIT_FINISHED
    overlap = benchmark.count_overlap(plan, arguments.overlap) if arguments.overlap else None

    def written(body: benchmark.Body) -> None:
        write_atomic(out / "table.md", benchmark_text.markdown(body).encode())
        for model in plan.models:
            card = plan.folder("card.md", model)
            card.parent.mkdir(exist_ok=True)
            write_atomic(card, benchmark_text.card(body, model).encode())

    body, code = benchmark.run(plan, finetune, written, overlap)
    print(benchmark_text.terminal(body, str(out)))
    return code


BENCHMARK = Verb(
    "benchmark",
    "fine-tune models on a suite of tasks and make their table",
    _benchmark_arguments,
    _benchmark,
    """\
benchmark small data.root=data --from runs/mine --from models/bert --out runs/table --seeds 1,2,3
benchmark clue data.root=data --from runs/mine --out runs/clue --overlap data/corpus.jsonl.gz
benchmark clue data.root=data --from runs/mine --out runs/clue --write-sweep sweep.yaml""",
    "The same command continues it.",
)


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of finetune")
    add("--input", type=Path, required=True, metavar="FILE", help="in the format of the task")
    add("--out", type=Path, required=True, metavar="FILE", help="file to write")
    add(
        "--format",
        choices=("jsonl", "clue"),
        default="jsonl",
        help="id, gold, prediction and scores a line (default); or for CLUE's and FewCLUE's sites, "
        "where a folder as --out gets the file under its official name",
    )
    add("--json", action="store_true", help="one JSON object")


def _predict(arguments: argparse.Namespace) -> None:
    from pipeline.finetune.answer import as_json, predict

    answers = predict(arguments.folder, arguments.input, arguments.out, arguments.format)
    if arguments.json:
        print(as_json(answers))
        return
    print(f"{answers.path}: {answers.num_rows:,} rows")
    for what, count in answers.counts.items():
        print(f"{what}: {count:,}")
    for name, score in answers.scores.items():
        print(f"{name} {score:.4f}")


PREDICT = Verb(
    "predict",
    "let a fine-tuned model answer the rows of a file",
    _predict_arguments,
    _predict,
    """\
predict runs/tnews --input test.json --out predictions.jsonl
predict runs/tnews --input test.json --out submission/ --format clue""",
)
TASKS: tuple[Verb, ...] = (FINETUNE, BENCHMARK, PREDICT, RESCORE)
