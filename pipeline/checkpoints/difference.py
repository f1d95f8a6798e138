"""`checkpoint diff`: the differences between two checkpoints as text or JSON."""

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

# How and when a state was saved does not change the state.
_CIRCUMSTANCES = (
    "world_size",
    "zero_stage",
    "created_unix_s",
    "elapsed_s",
    "config_sha256",
    "held_out_loss",
    "held_out_step",
    "contents",
    "left_out",
    "rewinds",
)
# Losses are state: the next decision about a spike depends on them.
_STATE = ("step", "cursor", "skipped", "alpha", "fingerprint", "losses")


@dataclass(frozen=True)
class CheckpointDifferences:
    """The differences between two checkpoints; empty lists where nothing differs."""

    manifest: list[str]
    """Counters and identity that differ."""
    circumstances: list[str]
    """How, when and with what they were saved; these do not make checkpoints different."""
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
    manifest = [*_values(a, b, _STATE), *_tree(a.identity, b.identity, "identity")]
    circumstances = [
        *_values(a, b, _CIRCUMSTANCES),
        *_tree(a.provenance, b.provenance, "provenance"),
    ]
    with tqdm(
        total=a.num_bytes // 4,  # four bytes an element; the rest of the files is small
        unit="element",
        unit_scale=True,
        desc="diff",
        disable=None,
        leave=False,
    ) as progress:
        return CheckpointDifferences(
            manifest, circumstances, state_differences(one, other, progress.update)
        )


def difference_text(one: Path, other: Path, differing: CheckpointDifferences) -> Iterator[str]:
    """Format the differences as lines, with the verdict last."""
    state = differing.state
    yield f"a: {one}"
    yield f"b: {other}"
    yield from (f"({text})" for text in differing.circumstances)
    yield from differing.manifest
    yield from state.others
    if state.tensors:
        width = max(len(each.name) for each in state.tensors)
        yield f"{'parameter':{width}}  {'tensor':10}  {'max |a-b|':>10}  {'|a-b| / |a|':>11}"
        for each in state.tensors:
            sizes = f"{each.max_abs:10.3e}  {each.relative:11.3e}"
            yield f"{each.name:{width}}  {each.kind:10}  {sizes}"
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
