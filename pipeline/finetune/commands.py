"""The verbs of tasks: fine-tune a model, and let it answer. Nothing here imports torch early."""

import argparse
from pathlib import Path
from typing import Literal

from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.finetune.rescore_command import rescore
from pipeline.runtime import cli, env
from pipeline.runtime.cli import JSON, argument, option, verb
from pipeline.runtime.rank import Rank, run_as_rank

_AGAIN = "The same command continues it."


def seeds_of(text: str) -> tuple[int, ...]:
    """Read a list of seeds from the command line."""
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
        "run, RUN@STEP, RUN@best, model folder, Hugging Face folder; random:MODEL takes fresh "
        "weights; default: the task's `model`",
        "MODEL",
        flag="--from",
    ),
    out: str | None = option("folder of the results; default: the task's `run_dir`", "DIR"),
    seeds: tuple[int, ...] | None = option("such as 1,2,3; default: the task's", type=seeds_of),
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


TASKS = (_finetune, _predict, rescore)
