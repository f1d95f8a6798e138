"""The command `checkpoint verify|list|prune|diff`: tables of checkpoints, and their differences."""

import fcntl
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoints.manifest import (
    REJECTED,
    REMOVING,
    Retention,
    manifests_of,
    newest_good,
    problems,
    remove,
    superseded,
)
from pipeline.config.runs import load_run
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, BusyError, CheckpointError
from pipeline.runtime.checkpoints import (
    MANIFEST_FILE,
    Manifest,
    at_step,
    folder_of,
    published,
    read_manifest,
    step_of,
)
from pipeline.runtime.cli import argument, at_least, family, option, verb
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import duration, progress, table

logger = logging.getLogger(__name__)

EXIT_DIFFERENT = 1
"""Exit code of `checkpoint diff`, like diff(1); an error is 2."""
# Losses are state: the next decision about a spike depends on them. How, when and by how many
# ranks a state was saved does not change it.
_STATE = ("step", "cursor", "skipped", "alpha", "fingerprint", "losses", "identity")
_HEADS = [
    *("step", "cursor", "skipped", "alpha", "age", "MB", "ranks", "zero", "held-out"),
    *("checked", "resume", "kept"),
]
_RUN: Any = argument("run folder, or its checkpoint.copy_to", "RUN")


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


def _manifest(path: Path) -> tuple[Manifest | None, list[str]]:
    try:
        return read_manifest(path), []
    except CheckpointError as error:
        return None, [str(error)]


@verb("verify runs/demo/train --step 1200")
def _verify(
    run_dir: Path = _RUN, step: int | None = option("only the checkpoint of this step", "N")
) -> int:
    """Compare every file with its hash; exit code 2 if one is bad."""
    paths = published(folder_of(run_dir)) if step is None else [at_step(run_dir, step)]
    num_bad = 0
    for path, wrong in all_problems(paths):
        print(f"{path}: {'BAD' if wrong else 'good'}")
        for text in wrong:
            print(f"  {text}")
        num_bad += bool(wrong)
    print(f"{len(paths) - num_bad} of {len(paths)} checkpoints are good")
    return EXIT_FAILED_DO_NOT_RETRY if num_bad else EXIT_FINISHED


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
    if not path.is_file():
        return None
    return Retention.of(load_run(path).config)


def rows(run: Path, *, verify: bool = False) -> list[CheckpointRow]:
    """List all checkpoints of a run, oldest first; without `verify` by their manifests alone."""
    paths = published(folder_of(run))
    manifests = {path: _manifest(path) for path in paths}
    wrong = {path: found for path, (_, found) in manifests.items()}
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
    reasons = {}
    if rule is not None:
        there = {step_of(path): path for path in paths if step_of(path) in counted}
        reasons = rule.reasons(counted, manifests_of(there))
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


def _table(rows: list[CheckpointRow]) -> Iterator[str]:
    lines = [_HEADS]
    for row in rows:
        values = ["?"] * 8
        if manifest := row.manifest:
            loss, stage = manifest.own_held_out_loss, manifest.zero_stage
            values = [
                f"{manifest.cursor:,}",
                f"{manifest.skipped:,}",
                f"{manifest.alpha:.3f}",
                duration(time.time() - manifest.created_unix_s),
                f"{manifest.num_bytes / 1e6:,.1f}",
                str(manifest.world_size),
                "?" if stage is None else str(stage),
                "-" if loss is None else f"{loss:.4f}",
            ]
        checked = "BAD" if row.problems else "files" if row.is_verified else "manifest"
        kept = "?" if row.kept is None else ", ".join(row.kept) or "no"
        lines.append([f"{row.step:,}", *values, checked, "<-" if row.would_resume else "", kept])
    yield from table(lines, right=range(len(_HEADS) - 1))
    yield from (f"bad: {text}" for row in rows for text in row.problems)


@verb("list runs/demo/train --verify")
def _list(
    run_dir: Path = _RUN,
    verify: bool = option("compare files with their hashes as well"),
    as_json: bool = option("print one JSON list", flag="--json"),
) -> None:
    """List checkpoints: which one a start would resume, which ones are kept and why."""
    listed = rows(run_dir, verify=verify)
    if as_json:
        found = [asdict(row) for row in listed]
        for manifest in (row["manifest"] for row in found if row["manifest"]):
            manifest["bytes"] = sum(entry["bytes"] for entry in manifest.pop("files").values())
        print(json.dumps(found))
        return
    print("\n".join(_table(listed)))
    for path in sorted(folder_of(run_dir).glob(f"{REJECTED}*")):
        print(f"a probe rejected {path}")


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
    folder, rule = folder_of(run), retention_of(run)
    if rule is None:
        if keep is None:
            raise CheckpointError(f"{run} has no config with a retention; give --keep N")
        rule = Retention(keep)
    given: dict[str, Any] = {"keep": keep, "keep_every_steps": keep_every, "keep_best": keep_best}
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
    with RunFolder(run).lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{run} is in use by a running process, which removes checkpoints by its own "
                "retention; stop it, or wait until it ends"
            ) from None
        remove(paths)
        for hidden in folder_of(run).glob(f"{REMOVING}*"):
            shutil.rmtree(hidden)


@verb("prune runs/demo/train --keep 1 --keep-best 2 --yes")
def _prune(
    run_dir: Path = _RUN,
    keep: int | None = option("keep the N newest; default: the config's", "N", type=at_least(1)),
    keep_every: int | None = option(
        "keep checkpoints at multiples of N steps; default: the config's", "N", type=at_least(1)
    ),
    keep_best: int | None = option(
        "keep the N with the lowest held-out loss; default: the config's", "N", type=at_least(0)
    ),
    yes: bool = option("remove them; otherwise only list them"),
) -> None:
    """Remove the checkpoints that the run's retention does not keep."""
    planned = plan(run_dir, keep, keep_every, keep_best)
    for text in planned.rejected:
        print(f"stays, though it does not verify: {text}")
    print(f"stays, the newest that verifies: {planned.good}")
    rule = planned.rule
    print(
        f"kept: the newest {rule.keep}"
        + (f", every {rule.keep_every_steps} steps" if rule.keep_every_steps else "")
        + (f", the best {rule.keep_best}" if rule.keep_best else "")
    )
    if yes:
        carry_out(run_dir, planned.removed)
    for path in planned.removed:
        print(f"{'removed' if yes else 'would be removed'}: {path}")
    if not planned.removed:
        print("nothing to remove")
    elif not yes:
        print("a dry run; --yes removes them")


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


def _unequal(a: dict[str, Any], b: dict[str, Any], path: str = "") -> Iterator[str]:
    for name in a | b:
        before, after = a.get(name), b.get(name)
        if before == after:
            continue
        if path + name == "losses":
            before, after = _losses(before), _losses(after)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _unequal(before, after, f"{path}{name}.")
        else:
            yield f"{path}{name}: {before} against {after}"


def _losses(value: Any) -> str:
    usual, high = value.get("usual", []), value.get("high", [])
    return f"{len(usual)} up to {usual[-1]:.4f}, {len(high)} high" if usual else "none"


@verb("diff runs/a/1000 runs/b/1000", "diff runs/a --steps 1000 2000")
def _diff(
    one: str = argument("newest checkpoint of RUN, or that of STEP", "RUN[/STEP]"),
    other: str | None = argument("checkpoint to compare with", "OTHER[/STEP]", nargs="?"),
    steps: list[int] | None = option("two steps of RUN", ("A", "B"), nargs=2),
    as_json: bool = option("print one JSON object", flag="--json"),
) -> int:
    """Compare counters, settings and tensors; exit code 1 if something differs, else 0."""
    from pipeline.checkpoints.state import state_differences

    if steps and other:
        raise CheckpointError(f"diff {one} {other} --steps: give OTHER or --steps, not both")
    if steps:
        first, second = (at_step(Path(one), step) for step in steps)
    elif other:
        first, second = resolve(one), resolve(other)
    else:
        raise CheckpointError("diff needs two checkpoints: RUN OTHER, or RUN --steps A B")
    a, b = read_manifest(first), read_manifest(second)
    states = [{name: getattr(each, name) for name in _STATE} for each in (a, b)]
    manifest = list(_unequal(states[0], states[1]))
    # Four bytes an element; the rest of the files is small.
    with progress("diff", a.num_bytes // 4, "element") as advance:
        state = state_differences(first, second, advance)
    is_equal = not (manifest or state.others or state.tensors)
    if as_json:
        values = asdict(state)
        for each in values["tensors"]:  # JSON has no infinity
            each |= {key: None for key in ("max_abs", "relative") if math.isinf(each[key])}
        print(json.dumps({"manifest": manifest, "state": values, "is_equal": is_equal}))
        return EXIT_FINISHED if is_equal else EXIT_DIFFERENT
    print("\n".join([f"a: {first}", f"b: {second}", *manifest, *state.others]))
    if state.tensors:
        heads = ("parameter", "tensor", "max |a-b|", "|a-b| / |a|")
        lines = [(t.name, t.kind, f"{t.max_abs:.3e}", f"{t.relative:.3e}") for t in state.tensors]
        print("\n".join(table([heads, *lines], right=(2, 3))))
    num_equal = state.num_parameters - len({each.name for each in state.tensors})
    print(
        f"{num_equal} of {state.num_parameters} parameters are equal with their optimizer state, "
        f"bit for bit; {'equal' if is_equal else 'different'}"
    )
    return EXIT_FINISHED if is_equal else EXIT_DIFFERENT


CHECKPOINT = family(
    "checkpoint", "verify, list, prune or compare checkpoints", (_verify, _list, _prune, _diff)
)
