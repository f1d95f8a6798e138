"""The command `checkpoint verify|list|prune|diff`: tables of checkpoints, and their differences."""

import argparse
import fcntl
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints.manifest import (
    MANIFEST_FILE,
    REJECTED,
    REMOVING,
    Manifest,
    Retention,
    at_step,
    folder_of,
    newest_good,
    problems,
    published,
    read_manifest,
    remove,
    step_of,
    superseded,
)
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, BusyError, CheckpointError
from pipeline.runtime.cli import Verb, family
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import duration, progress, table

if TYPE_CHECKING:
    from pipeline.checkpoints.state import StateDifferences

logger = logging.getLogger(__name__)

# Losses are state: the next decision about a spike depends on them.
_STATE = ("step", "cursor", "skipped", "alpha", "fingerprint", "losses")


@dataclass(frozen=True)
class CheckpointDifferences:
    """The differences between two checkpoints; empty lists where nothing differs."""

    manifest: list[str]
    """Counters and identity that differ."""
    state: "StateDifferences"

    @property
    def is_equal(self) -> bool:
        """Whether a run would continue identically from both."""
        return not (self.manifest or self.state.others or self.state.tensors)


def resolve(text: str) -> Path:
    """Find the checkpoint that is given as its folder, as RUN/STEP, or as RUN for its newest.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(text)
    if (path / MANIFEST_FILE).is_file():
        return path
    if path.name.isdecimal() and not path.exists():
        return at_step(path.parent, int(path.name))
    return published(folder_of(path))[0]


def differences(one: Path, other: Path) -> CheckpointDifferences:
    """Compare two checkpoints without checking their hashes.

    Raises:
        CheckpointError: one cannot be read.
    """
    from pipeline.checkpoints.state import state_differences

    a, b = read_manifest(one), read_manifest(other)
    # How, when and by how many ranks a state was saved does not change the state.
    manifest = [*_values(a, b), *_tree(a.identity, b.identity, "identity")]
    # Four bytes an element; the rest of the files is small.
    with progress("diff", a.num_bytes // 4, "element") as advance:
        state = state_differences(one, other, advance)
    return CheckpointDifferences(manifest, state)


def difference_text(one: Path, other: Path, differing: CheckpointDifferences) -> Iterator[str]:
    """Format the differences as lines, with the verdict last."""
    state = differing.state
    yield f"a: {one}"
    yield f"b: {other}"
    yield from differing.manifest
    yield from state.others
    if state.tensors:
        rows = [
            (each.name, each.kind, f"{each.max_abs:.3e}", f"{each.relative:.3e}")
            for each in state.tensors
        ]
        heads = ("parameter", "tensor", "max |a-b|", "|a-b| / |a|")
        yield from table([heads, *rows], right=(2, 3))
    num_equal = state.num_parameters - len({each.name for each in state.tensors})
    yield (
        f"{num_equal} of {state.num_parameters} parameters are equal with their optimizer state, "
        f"bit for bit; {'equal' if differing.is_equal else 'different'}"
    )


def as_json(differing: CheckpointDifferences) -> dict[str, Any]:
    """Convert the differences to plain values; infinity, which JSON lacks, becomes null."""
    values = asdict(differing)
    for each in values["state"]["tensors"]:
        each |= {name: None for name in ("max_abs", "relative") if not math.isfinite(each[name])}
    return {**values, "is_equal": differing.is_equal}


def _values(a: Manifest, b: Manifest) -> Iterator[str]:
    for name in _STATE:
        before, after = getattr(a, name), getattr(b, name)
        if before != after:
            yield f"{name}: {_shown(name, before)} against {_shown(name, after)}"


def _tree(a: dict[str, Any], b: dict[str, Any], path: str) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        before, after = a.get(name), b.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _tree(before, after, f"{path}.{name}")
        elif before != after:
            yield f"{path}.{name}: {before} against {after}"


def _shown(name: str, value: Any) -> str:
    if name == "losses":
        usual, high = value.get("usual", []), value.get("high", [])
        return f"{len(usual)} up to {usual[-1]:.4f}, {len(high)} high" if usual else "none"
    return str(value)


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint."""

    path: str
    step: int
    manifest: Manifest | None
    """None if it cannot be read."""
    problems: list[str]
    """Everything wrong with it; without `is_verified`, from its manifest alone."""
    is_verified: bool
    """Whether all files were compared with their hashes."""
    would_resume: bool
    """Whether a start would resume from it, as far as was verified."""
    kept: list[str] | None
    """Why the run's retention keeps it; empty if it does not, None if the rule is unknown."""


def retention_of(run: Path) -> Retention | None:
    """Return the rule of a run's config; None if the folder has none, as one of copies."""
    path = RunFolder(run).resolved
    return Retention.of(load(PretrainConfig, path).config.checkpoint) if path.is_file() else None


def all_problems(paths: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Compare the files of checkpoints with their hashes, with a progress bar over bytes.

    Files that are as they were written are read once more, for values that are not finite. That
    needs torch: without it, hashes alone are compared, and that is said.
    """
    try:
        from pipeline.checkpoints.state import SavedState
    except ModuleNotFoundError as error:
        logger.warning("values are not looked at, only hashes: %s is not installed", error.name)
        read = None
    else:
        read = SavedState
    sizes = [manifest.num_bytes for path in paths if (manifest := _manifest(path)[0])]
    with progress("verify", sum(sizes), "B") as advance:
        for path in paths:
            found = list(problems(path, advance))
            if read and not found:
                try:
                    found = list(read(path).non_finite())
                except CheckpointError as error:
                    found = [str(error)]
            yield path, found


def rows(run: Path, *, verify: bool = False) -> list[CheckpointRow]:
    """List all checkpoints of a run, oldest first.

    Without `verify` only manifests are read, and no hashes.
    """
    paths = published(folder_of(run))
    manifests = {path: _manifest(path) for path in paths}
    wrong = {path: [text] if text else [] for path, (_, text) in manifests.items()}
    if verify:
        wrong |= dict(all_problems(paths))
    resumed = next((path for path in paths if not wrong[path]), None)
    rule = retention_of(run)
    # Like `manifest.superseded`: checkpoints newer than the newest good one are not counted.
    counted = {
        step_of(path): manifest.own_held_out_loss if (manifest := manifests[path][0]) else None
        for path in paths
        if resumed is not None and step_of(path) <= step_of(resumed)
    }
    reasons = rule.reasons(counted) if rule else {}
    return [
        CheckpointRow(
            path=str(path),
            step=step_of(path),
            manifest=manifests[path][0],
            problems=wrong[path],
            is_verified=verify,
            would_resume=path == resumed,
            kept=reasons.get(step_of(path), ["damaged, newer"]) if rule else None,
        )
        for path in reversed(paths)
    ]


def list_text(rows: list[CheckpointRow], now_s: float | None = None) -> Iterator[str]:
    """Format rows as lines of a table, followed by the problems found."""
    now_s = time.time() if now_s is None else now_s
    found = [_cells(row, now_s) for row in rows]
    lines = [[*found[0]], *([*each.values()] for each in found)]
    yield from table(lines, right=range(len(found[0]) - 1))
    yield from (f"bad: {text}" for row in rows for text in row.problems)


def _cells(row: CheckpointRow, now_s: float) -> dict[str, str]:
    """Write a row's values by column."""
    manifest = row.manifest
    names = ("cursor", "skipped", "alpha", "age", "MB", "ranks", "zero", "held-out")
    values = dict.fromkeys(names, "?")
    if manifest is not None:
        loss, stage = manifest.own_held_out_loss, manifest.zero_stage
        values = {
            "cursor": f"{manifest.cursor:,}",
            "skipped": f"{manifest.skipped:,}",
            "alpha": f"{manifest.alpha:.3f}",
            "age": duration(now_s - manifest.created_unix_s),
            "MB": f"{manifest.num_bytes / 1e6:,.1f}",
            "ranks": str(manifest.world_size),
            "zero": "?" if stage is None else str(stage),
            "held-out": "-" if loss is None else f"{loss:.4f}",
        }
    return {
        "step": f"{row.step:,}",
        **values,
        "checked": "BAD" if row.problems else "files" if row.is_verified else "manifest",
        "resume": "<-" if row.would_resume else "",
        "kept": "?" if row.kept is None else ", ".join(row.kept) or "no",
    }


def _manifest(path: Path) -> tuple[Manifest | None, str]:
    try:
        return read_manifest(path), ""
    except CheckpointError as error:
        return None, str(error)


@dataclass(frozen=True)
class PrunePlan:
    """The checkpoints that a prune removes, and why others are kept."""

    rule: Retention
    good: Path
    """The newest checkpoint that verifies; it is kept whatever the rule says."""
    rejected: list[str]
    """Problems of newer checkpoints; those are kept as well."""
    removed: list[Path]


def plan(run: Path, keep: int | None, keep_every: int | None, keep_best: int | None) -> PrunePlan:
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
    return PrunePlan(rule, good, rejected, superseded(folder, rule, good))


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
    for path, wrong in all_problems(paths):
        print(f"{path}: {'BAD' if wrong else 'good'}")
        for text in wrong:
            print(f"  {text}")
        num_bad += bool(wrong)
    print(f"{len(paths) - num_bad} of {len(paths)} checkpoints are good")
    return EXIT_FAILED_DO_NOT_RETRY if num_bad else EXIT_FINISHED


def _list(arguments: argparse.Namespace) -> int:
    listed = rows(arguments.run_dir, verify=arguments.verify)
    if arguments.json:
        print(json.dumps([_plain(asdict(row)) for row in listed]))
    else:
        print("\n".join(list_text(listed)))
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
    add = parser.add_argument
    add("one", metavar="RUN[/STEP]", help="newest checkpoint of RUN, or that of STEP")
    add("other", metavar="OTHER[/STEP]", nargs="?", help="checkpoint to compare with")
    add("--steps", type=int, nargs=2, metavar=("A", "B"), help="two steps of RUN")
    add("--json", action="store_true", help="print one JSON object")


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
