"""`checkpoint diff`: what differs between two checkpoints, in words."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline.checkpoints.manifest import MANIFEST_FILE, Manifest, published, read_manifest
from pipeline.checkpoints.table import at_step, folder_of

if TYPE_CHECKING:
    from pipeline.checkpoints.state import StateDifferences

# How and when a state was saved does not make it another one.
_CIRCUMSTANCES = ("world_size", "zero_stage", "created_unix_s", "elapsed_s", "config_sha256",
                  "held_out_loss", "held_out_step", "contents", "left_out", "rewinds")  # fmt: skip
# Losses decide about a spike to come.
_STATE = ("step", "cursor", "skipped", "alpha", "fingerprint", "losses")


@dataclass(frozen=True)
class CheckpointDifferences:
    """Empty lists: nothing differs."""

    manifest: list[str]
    """Counters and identity."""
    circumstances: list[str]
    """How, when and with what they were saved; does not count."""
    state: "StateDifferences"

    @property
    def is_equal(self) -> bool:
        """Whether a run would go on from both in the same way."""
        return not (self.manifest or self.state.others or self.state.tensors)


def resolve(text: str) -> Path:
    """A checkpoint by its folder, as RUN/STEP, or as RUN for its newest.

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
    """Compares two checkpoints; their hashes are not looked at.

    Raises:
        CheckpointError: one cannot be read.
    """
    from pipeline.checkpoints.state import state_differences

    a, b = read_manifest(one), read_manifest(other)
    manifest = [*_values(a, b, _STATE), *_tree(a.identity, b.identity, "identity")]
    circumstances = [
        *_values(a, b, _CIRCUMSTANCES), *_tree(a.provenance, b.provenance, "provenance")
    ]  # fmt: skip
    # Four bytes an element; the rest of the files is small.
    with tqdm(
        total=a.num_bytes // 4, unit="element", unit_scale=True, desc="diff", disable=None,
        leave=False,
    ) as progress:  # fmt: skip
        return CheckpointDifferences(
            manifest, circumstances, state_differences(one, other, progress.update)
        )


def difference_text(one: Path, other: Path, found: CheckpointDifferences) -> Iterator[str]:
    """Lines, the sum at the end."""
    yield f"a: {one}"
    yield f"b: {other}"
    yield from (f"({text})" for text in found.circumstances)
    yield from found.manifest
    yield from found.state.others
    if found.state.tensors:
        width = max(len(each.name) for each in found.state.tensors)
        yield f"{'parameter':{width}}  {'of it':10}  {'max |a-b|':>10}  {'|a-b| / |a|':>11}"
        for each in found.state.tensors:
            sizes = f"{each.max_abs:10.3e}  {each.relative:11.3e}"
            yield f"{each.name:{width}}  {each.kind:10}  {sizes}"
    differing = len({each.name for each in found.state.tensors})
    yield (
        f"{found.state.num_parameters - differing} of {found.state.num_parameters} parameters are "
        f"equal with their optimizer state, bit for bit; "
        + ("equal" if found.is_equal else "different")
    )


def as_json(found: CheckpointDifferences) -> dict[str, Any]:
    """Plain values; JSON has no infinity, so it is null."""
    values = asdict(found)
    for each in values["state"]["tensors"]:
        each |= {name: None for name in ("max_abs", "relative") if not math.isfinite(each[name])}
    return {**values, "is_equal": found.is_equal}


def _values(a: Manifest, b: Manifest, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
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
    if name == "created_unix_s":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if name == "losses":
        usual, high = value.get("usual", []), value.get("high", [])
        return f"{len(usual)} up to {usual[-1]:.4f}, {len(high)} high" if usual else "none"
    return str(value)
