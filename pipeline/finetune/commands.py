"""The verbs of tasks: fine-tune a model, and let it answer. Nothing here imports torch early."""

import argparse
from pathlib import Path

from pipeline.finetune.rescore_command import RESCORE
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb


def _finetune_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", help="task file, or the name of a shipped one")
    add(
        "--from",
        dest="source",
        required=True,
        metavar="MODEL",
        help="run, model folder, Hugging Face folder; random:MODEL takes fresh weights",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
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
    from pipeline.finetune.run import finetune
    from pipeline.tasks.task import load_task

    config = load_task(arguments.task, tuple(arguments.overrides))
    name = Path(arguments.task).stem
    body = finetune(
        config,
        name=name,
        source=arguments.source,
        out=arguments.out,
        seeds=arguments.seeds,
        tokens=arguments.tokens,
    )
    if body:
        print(result_line(body))
        for text in body["warnings"]:
            print(f"warning: {text}")
    return 0


def result_line(body: dict[str, object]) -> str:
    """Say in a line how a task went."""
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
TASKS: tuple[Verb, ...] = (FINETUNE, PREDICT, RESCORE)
