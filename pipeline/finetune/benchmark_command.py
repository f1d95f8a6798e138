"""`postnorm benchmark`: a suite of tasks by several models, and its table."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_atomic

_DESCRIPTION = """\
Fine-tune each model on each task of a suite and write DIR/table.md, DIR/table.json and a section
for the card of each model. Beside a score stand majority, chance, random initialisation and a bag
of character n-grams, and the paired differences with intervals. What is finished in DIR is not run
again; a task that fails is shown as failed, and the others go on."""
_ROWS_FILE, _OVERLAP_FILE = "overlap-rows.jsonl", "overlap.json"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("suite", metavar="SUITE", help="YAML file, or the name of a shipped suite")
    add("--from", action="append", required=True, dest="models", metavar="MODEL",
        help="run, model folder or random:MODEL; once for each column")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder of all results")
    add("--seeds", type=_seeds, default=(), metavar="1,2,3", help="default: those of the tasks")
    add("--random", action=switch, default=True, help="each model with fresh weights beside it")
    add("--baselines", action=switch, default=True, help="the bag of character n-grams")
    add("--overlap", action="append", default=[], metavar="TEXTS", help="count rows that share "
        "text with this corpus: text as `prep` takes it, or a dataset's folder")  # fmt: skip
    cli.add_overrides(parser, "of every task, such as data.root=/data train.epochs=1")


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _benchmark(arguments: argparse.Namespace) -> int:
    # numpy and, for the folders that are missing, torch take time to import.
    from pipeline.finetune import benchmark, benchmark_text

    plan = benchmark.read_plan(
        arguments.suite,
        arguments.models,
        arguments.out,
        arguments.seeds,
        arguments.overrides,
        with_random=arguments.random,
        with_ngrams=arguments.baselines,
    )
    out: Path = arguments.out
    overlap = _overlap(plan, arguments.overlap) if arguments.overlap else None

    def written(body: benchmark.Body) -> None:
        write_atomic(out / "table.md", benchmark_text.markdown(body).encode())
        for model in plan.models:
            card = plan.folder("card.md", model)
            card.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(card, benchmark_text.card(body, model).encode())

    body, code = benchmark.run(plan, _finetune, written, overlap)
    print(benchmark_text.terminal(body, str(out)))
    return code


def _finetune(*arguments: Any, **options: Any) -> Any:
    from pipeline.finetune.run import finetune

    return finetune(*arguments, **options)


def _overlap(plan: Any, corpus: list[str]) -> dict[str, Any]:
    """Let data preparation count; an earlier count of the same rows and corpus is taken."""
    from pipeline.finetune.readers import read_task

    lines = []
    for name, config in plan.tasks.items():
        try:
            splits = read_task(config).splits
        except DataError:
            continue  # its line of the table will say so
        rows = [row for row in splits["test"] if row.gold is not None] or splits["dev"]
        # One of several choices that occurs in the corpus says nothing about its row.
        texts = [[row.text, row.text_b] if row.text else [*row.choices] for row in rows]
        lines += [json.dumps({"set": name, "texts": each}) for each in texts]
    rows_file, found_file = plan.out / _ROWS_FILE, plan.out / _OVERLAP_FILE
    text = "".join(f"{line}\n" for line in lines).encode()
    if not (rows_file.is_file() and rows_file.read_bytes() == text and found_file.is_file()
            and json.loads(found_file.read_bytes())["corpus"] == corpus):  # fmt: skip
        plan.out.mkdir(parents=True, exist_ok=True)
        write_atomic(rows_file, text)
        command = [*module_command("data_prep"), "overlap", str(rows_file), *corpus]
        if subprocess.run([*command, "--out", str(found_file)], check=False).returncode:
            raise DataError(
                f"--overlap {' '.join(corpus)}: the count failed, see above; correct the path, or "
                "leave the option out"
            )
    found: dict[str, Any] = json.loads(found_file.read_bytes())
    return found


BENCHMARK = Verb(
    "benchmark",
    "fine-tune models on a suite of tasks and make their table",
    _arguments,
    _benchmark,
    """\
benchmark small --from runs/mine --from models/bert --out runs/table data.root=/data --seeds 1,2,3
benchmark clue --from runs/mine --out runs/clue --overlap /data/corpus.jsonl.gz data.root=/data""",
    if_interrupted="finished folders stay, the same command continues",
)
