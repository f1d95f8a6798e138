"""The verbs of tasks: fine-tune, predict, and rescore. Nothing here imports torch early."""

import argparse
import itertools
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.runtime import cli, env
from pipeline.runtime.cli import JSON, argument, option, verb
from pipeline.runtime.files import write_json_atomic
from pipeline.runtime.rank import Rank, run_as_rank
from pipeline.runtime.summary import number, table

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
    out: Path = option("file to write", "FILE", required=True, type=cli.new_path),
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


if TYPE_CHECKING:
    from pipeline.finetune.can import CanConfig

logger = logging.getLogger(__name__)

Body = dict[str, Any]
_NUMBERS = ("dev", "test", "majority", "chance", "scores", "mean", "sd", "interval")


def recompute(folder: Path, can: "CanConfig | None" = None) -> dict[Path, tuple[Body, Body]]:
    """Return the stored and the new body of each `result.json` in a folder of `finetune`.

    The last one is the folder's own; the others are those of its seeds. A stored result that has
    CAN gets it again. The stored body is empty if a folder of several seeds has none yet.

    Raises:
        DataError: see `read_runs` and `can_result`.
    """
    from pipeline.finetune.can import CanConfig, can_result
    from pipeline.finetune.result import RESULT, combine, read_result, read_runs

    runs = read_runs(folder)
    groups = {run.folder: [run] for run in runs} | {folder: runs}
    bodies = {}
    for path, group in groups.items():
        stored = read_result(path) if (path / RESULT).is_file() else {}
        about = {k: v for k, v in (stored or group[0].stored).items() if k != "can"}
        new = combine([run.scored for run in group], [run.seed for run in group], about)
        config = can or (CanConfig(**stored["can"]["settings"]) if "can" in stored else None)
        if config is not None:
            new["can"] = can_result(group, config)
        bodies[path] = stored, new
    return bodies


def differences(stored: Body, new: Body) -> dict[str, tuple[float | None, float | None]]:
    """Return the numbers that differ, by name such as `dev.accuracy`: stored and new."""
    one, other = _flat(stored), _flat(new)
    names = [name for name in one | other if not _is_same(one.get(name), other.get(name))]
    return {name: (one.get(name), other.get(name)) for name in names}


def _flat(body: Body) -> dict[str, float]:
    return dict(_leaves("", {name: body.get(name) for name in _NUMBERS}))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}".lstrip("."), each)
    elif value is not None:
        yield name, value


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def write_results(bodies: dict[Path, tuple[Body, Body]]) -> list[Path]:
    """Write each `result.json` that is new; one with other numbers stays as `result.N.json`."""
    from pipeline.finetune.result import RESULT

    written = []
    for folder, (stored, new) in bodies.items():
        if stored == new:
            continue
        if stored and differences(stored, new):
            names = (folder / f"result.{n}.json" for n in itertools.count(1))
            kept = next(path for path in names if not path.exists())
            write_json_atomic(kept, stored)
            logger.info("the result as it was is kept in %s", kept)
        write_json_atomic(folder / RESULT, new)
        written.append(folder / RESULT)
    return written


def _lines(folder: Path, stored: Body, new: Body) -> Iterator[str]:
    different = differences(stored, new) if stored else {}
    seeds = ", ".join(map(str, new["seeds"]))
    yield f"{folder}: {new['task']}, {new['metric']}, seeds {seeds}"
    rows = [("", "now", "stored")]
    for name, value in (_flat(new) | {name: old for name, (old, _) in different.items()}).items():
        old, now = different.get(name, (None, value))
        rows.append((name, number(now, ".5f"), number(old, ".5f") if name in different else ""))
    yield from table([row[: 3 if different else 2] for row in rows], right=(1, 2))
    if stored and not different:
        yield "all numbers are as stored"
    yield from (f"warning: {text}" for text in new["warnings"])
    if "can" in new:
        yield from _can_lines(new["can"], new["metric"])


def _can_lines(can: Body, metric: str) -> Iterator[str]:
    settings = ", ".join(f"{name}={value}" for name, value in can["settings"].items())
    yield f"CAN ({settings}; not tuned)"
    rows: list[tuple[str, ...]] = [("", "before", "after")]
    for split, body in can["splits"].items():
        for name in body["before"] or ():
            values = (f"{body[key][name]:.5f}" for key in ("before", "after"))
            rows.append((f"{split}.{name}", *values))
        if (of := body["difference"]) is not None:
            ends = f"{number(of['low'], '+.5f')} to {number(of['high'], '+.5f')}"
            rows.append((f"{split}, {metric}, after - before", f"{of['mean']:+.5f}", ends))
        counts = (("uncertain rows", "uncertain"), ("predictions changed", "changed"))
        rows += [(f"{split}, {text}", "", f"{body[key]:,.6g}") for text, key in counts]
        for name in ("confident", "gold"):
            far = body[f"shift_{name}"]
            rows.append((f"{split}, {name} rows from prior", "", number(far, ".3f")))
    yield from table(rows, right=(1, 2))
    yield from (f"warning: {text}" for text in can["warnings"])


@verb("rescore runs/tnews", "rescore runs/tnews --can --tau 0.9 --json")
def rescore(
    folder: Path = argument("folder of finetune, of one seed or several", "DIR"),
    can: bool = option(
        "correct uncertain rows by the class frequencies of train, beside the raw scores"
    ),
    top: int | None = option("of --can: classes of the entropy (3)", "K"),
    tau: float | None = option("of --can: least entropy of uncertain rows (0.9)"),
    alpha: float | None = option("of --can: power of the probabilities (1)"),
    as_json: bool = JSON,
) -> None:
    """Compute a fine-tuning result again from its stored predictions."""
    # Importing numpy takes a while.
    from pipeline.finetune.can import CanConfig

    values: dict[str, Any] = {"top": top, "tau": tau, "alpha": alpha}
    given = {name: value for name, value in values.items() if value is not None}
    if given and not can:
        raise ConfigError(f"--{' and --'.join(given)} without --can: add it, or leave them out")
    bodies = recompute(folder, CanConfig(**given) if can else None)
    written = [str(path) for path in write_results(bodies)]
    stored, new = bodies[folder]
    if as_json:
        body = {"result": new, "differences": differences(stored, new), "written": written}
        print(json.dumps(body, ensure_ascii=False))
    else:
        print("\n".join(_lines(folder, stored, new)))


TASKS = (_finetune, _predict, rescore)
