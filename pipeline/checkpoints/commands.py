"""The command `checkpoint verify|list|prune|diff`."""

import argparse
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoints.difference import as_json, difference_text, differences, resolve
from pipeline.checkpoints.manifest import REJECTED, newest_good, published
from pipeline.checkpoints.retention import REMOVING, Retention, remove, superseded
from pipeline.checkpoints.table import all_problems, at_step, folder_of, retention_of, rows, table
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, BusyError, CheckpointError
from pipeline.runtime.cli import Verb, family
from pipeline.runtime.run_folder import RunFolder


@dataclass(frozen=True)
class Plan:
    """The checkpoints that a prune removes, and why others are kept."""

    rule: Retention
    good: Path
    """The newest checkpoint that verifies; it is kept whatever the rule says."""
    rejected: list[str]
    """Problems of newer checkpoints; those are kept as well."""
    removed: list[Path]
    """Checkpoints to remove, oldest first."""


def plan(run: Path, keep: int | None, keep_every: int | None, keep_best: int | None) -> Plan:
    """Find the checkpoints that a run's retention, with these parts of it replaced, would remove.

    Raises:
        CheckpointError: there are no checkpoints, none verifies, or no rule is given or recorded.
    """
    folder = folder_of(run)
    rule = retention_of(run)
    if rule is None:
        if keep is None:
            raise CheckpointError(f"{run} has no config with a retention; give --keep N")
        rule = Retention(keep)
    given = {"keep": keep, "keep_every_steps": keep_every, "keep_best": keep_best}
    rule = replace(rule, **{name: value for name, value in given.items() if value is not None})
    good, rejected = newest_good(folder)
    if good is None:
        raise CheckpointError(
            f"none of the checkpoints in {folder} verifies, so nothing is removed: "
            f"{'; '.join(rejected)}"
        )
    return Plan(rule, good, rejected, superseded(folder, rule, good))


def carry_out(run: Path, paths: list[Path]) -> None:
    """Remove checkpoints, and the rest of those whose removal was killed.

    Raises:
        BusyError: a process uses the run folder.
    """
    with _locked(run):
        remove(paths)
        for hidden in folder_of(run).glob(f"{REMOVING}*"):
            shutil.rmtree(hidden)


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    with RunFolder(run).lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{run} is in use by a running process, which removes checkpoints by its own "
                "retention; stop it, or wait until it ends"
            ) from None
        yield


EXIT_DIFFERENT = 1
"""Exit code of `checkpoint diff`, like diff(1); an error is 2."""


def _verify(arguments: argparse.Namespace) -> int:
    run: Path = arguments.run_dir
    paths = published(folder_of(run)) if arguments.step is None else [at_step(run, arguments.step)]
    num_bad = 0
    for path, problems in all_problems(paths):
        print(f"{path}: {'BAD' if problems else 'good'}")
        for text in problems:
            print(f"  {text}")
        num_bad += bool(problems)
    print(f"{len(paths) - num_bad} of {len(paths)} checkpoints are good")
    return EXIT_FAILED_DO_NOT_RETRY if num_bad else EXIT_FINISHED


def _list(arguments: argparse.Namespace) -> int:
    listed = rows(arguments.run_dir, verify=arguments.verify)
    if arguments.json:
        print(json.dumps([_plain(asdict(row)) for row in listed]))
    else:
        print("\n".join(table(listed)))
        for path in sorted(folder_of(arguments.run_dir).glob(f"{REJECTED}*")):
            print(f"a probe rejected {path}")
    return EXIT_FINISHED


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Replace the table of hashes by the total size."""
    manifest = row["manifest"]
    if manifest is not None:
        manifest["bytes"] = sum(entry["bytes"] for entry in manifest.pop("files").values())
    return row


def _prune(arguments: argparse.Namespace) -> int:
    run: Path = arguments.run_dir
    planned = plan(run, arguments.keep, arguments.keep_every, arguments.keep_best)
    for text in planned.rejected:
        print(f"stays, though it does not verify: {text}")
    print(f"stays, the newest that verifies: {planned.good}")
    rule = planned.rule
    print(
        f"kept: the newest {rule.keep}"
        + (f", every {rule.keep_every_steps} steps" if rule.keep_every_steps else "")
        + (f", the best {rule.keep_best}" if rule.keep_best else "")
    )
    verb = "removed" if arguments.yes else "would be removed"
    if arguments.yes:
        carry_out(run, planned.removed)
    for path in planned.removed:
        print(f"{verb}: {path}")
    if not planned.removed:
        print("nothing to remove")
    elif not arguments.yes:
        print("a dry run; --yes removes them")
    return EXIT_FINISHED


def _diff(arguments: argparse.Namespace) -> int:
    if arguments.steps is None and arguments.other is None:
        raise CheckpointError("diff needs two checkpoints: RUN OTHER, or RUN --steps A B")
    if arguments.steps is not None:
        if arguments.other is not None:
            raise CheckpointError(
                f"diff {arguments.one} {arguments.other} --steps: give OTHER or --steps, not both"
            )
        one, other = (at_step(Path(arguments.one), step) for step in arguments.steps)
    else:
        one, other = resolve(arguments.one), resolve(arguments.other)
    differing = differences(one, other)
    if arguments.json:
        print(json.dumps(as_json(differing)))
    else:
        print("\n".join(difference_text(one, other, differing)))
    return EXIT_FINISHED if differing.is_equal else EXIT_DIFFERENT


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="run folder, or its checkpoint.copy_to"
    )


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="only the checkpoint of this step")


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--verify", action="store_true", help="compare files with their hashes as well"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def _prune_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    for name, type_, kept in (
        ("--keep", _positive, "keep the N newest"),
        ("--keep-every", _positive, "keep checkpoints at multiples of N steps"),
        ("--keep-best", _natural, "keep the N with the lowest held-out loss"),
    ):
        parser.add_argument(name, type=type_, metavar="N", help=f"{kept}; default: the config's")
    parser.add_argument("--yes", action="store_true", help="remove them; otherwise only list them")


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "one", metavar="RUN[/STEP]", help="newest checkpoint of RUN, or that of STEP"
    )
    parser.add_argument(
        "other", metavar="OTHER[/STEP]", nargs="?", help="checkpoint to compare with"
    )
    parser.add_argument("--steps", type=int, nargs=2, metavar=("A", "B"), help="two steps of RUN")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from {least} on")
    return int(text)


def _positive(text: str) -> int:
    return _natural(text, least=1)


CHECKPOINT = family(
    "checkpoint",
    "verify, list, prune or compare checkpoints",
    (
        Verb(
            "verify",
            "compare every file with its hash; exit code 2 if one is bad",
            _verify_arguments,
            _verify,
            "verify runs/demo/train --step 1200",
        ),
        Verb(
            "list",
            "list checkpoints: which one a start would resume, which ones are kept and why",
            _list_arguments,
            _list,
            "list runs/demo/train --verify",
        ),
        Verb(
            "prune",
            "remove the checkpoints that the run's retention does not keep",
            _prune_arguments,
            _prune,
            "prune runs/demo/train --keep 1 --keep-best 2 --yes",
        ),
        Verb(
            "diff",
            "compare counters, settings and tensors; exit code 1 if something differs, else 0",
            _diff_arguments,
            _diff,
            "diff runs/a/1000 runs/b/1000\ndiff runs/a --steps 1000 2000",
        ),
    ),
)
