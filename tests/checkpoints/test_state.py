"""State in parts: any stretch can be read, and parts that do not fit are refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from pipeline.checkpoints import state as saved_state
from pipeline.checkpoints.state import KINDS, SavedState, TensorShard, unsound_value
from pipeline.errors import CheckpointError
from pipeline.runtime.tensors import SlicedFile

SHAPES = {"matrix": (3, 7), "gain": (5,), "scalar": (1,)}
COUNTERS = {"updates": 3, "global_steps": 4, "skipped_steps": 1}
SIZES = {name: math.prod(shape) for name, shape in SHAPES.items()}
WHOLE = {kind: {name: torch.randn(size) for name, size in SIZES.items()} for kind in KINDS}


def _part(name: str, start: int, stop: int) -> TensorShard:
    tensors = {kind: WHOLE[kind][name][start:stop] for kind in KINDS}
    return TensorShard(name, SHAPES[name], start, tensors)


def _save(folder: Path, *of_ranks: list[TensorShard]) -> None:
    for rank, parts in enumerate(of_ranks):
        saved_state.write_part(folder, rank, len(of_ranks), parts, COUNTERS)


def _file(folder: Path, rank: int, world_size: int) -> Path:
    return folder / f"state/rank-{rank:05d}-of-{world_size:05d}.safetensors"


MATRIX = [_part("matrix", 0, 4), _part("matrix", 4, 5), _part("matrix", 5, 21)]
REST = [_part("gain", 0, 5), _part("scalar", 0, 1)]


def test_any_stretch_can_be_read(tmp_path: Path) -> None:
    _save(tmp_path, [MATRIX[2]], [], [MATRIX[0], *REST], [MATRIX[1]])
    saved = SavedState(tmp_path)
    assert saved.counters == COUNTERS
    saved.require_shapes(SHAPES)
    for kind in KINDS:
        for name, whole in WHOLE[kind].items():
            for start in range(len(whole)):
                for stop in range(start, len(whole) + 1):
                    assert torch.equal(saved.read(kind, name, start, stop), whole[start:stop])
    weights: dict[str, Tensor] = saved_state.read_weights(tmp_path)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == SHAPES


def test_parts_may_have_averages_of_their_own(tmp_path: Path) -> None:
    one = [replace(part, tensors={k: part.tensors[k] for k in KINDS[:2]}) for part in MATRIX]
    _save(tmp_path, [one[1]], [one[2]], [*REST, one[0]])
    saved = SavedState(tmp_path)
    assert saved.kinds == {"matrix": KINDS[:2], "gain": KINDS, "scalar": KINDS}
    assert torch.equal(saved.read("exp_avg", "matrix"), WHOLE["exp_avg"]["matrix"])
    with pytest.raises(CheckpointError, match=r"no exp_avg_sq of matrix.*train\.optimizer"):
        saved.read("exp_avg_sq", "matrix")
    formats = {_format(tmp_path, rank, 3) for rank in range(3)}
    _save(tmp_path / "as before", REST)
    # Files of what was there before are the same as before.
    assert (formats, _format(tmp_path / "as before", 0, 1)) == ({2}, 1)
    _save(tmp_path / "mixed", [one[0]], [MATRIX[1]], [MATRIX[2]])
    with pytest.raises(CheckpointError, match="matrix has master, exp_avg, exp_avg_sq, in an e"):
        SavedState(tmp_path / "mixed")


def _format(folder: Path, rank: int, world_size: int) -> int:
    table = json.loads(SlicedFile(_file(folder, rank, world_size)).metadata["postnorm_state"])
    assert {len(part) for part in table["parts"].values()} == {table["format"] + 1}
    return int(table["format"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([MATRIX[0], MATRIX[2]], "lacks elements 4 to 4 of matrix, which has 21"),
        ([MATRIX[1], MATRIX[2]], "lacks elements 0 to 3 of matrix, which has 21"),
        ([MATRIX[0], MATRIX[1]], "lacks elements 5 to 20 of matrix, which has 21"),
        ([*MATRIX, _part("matrix", 3, 6)], "has twice elements 3 to 3 of matrix"),
        ([*MATRIX, MATRIX[1]], "has twice elements 4 to 4 of matrix"),
        ([*MATRIX, MATRIX[2]], "has twice elements 5 to 20 of matrix"),
    ],
)
def test_gaps_overlaps_are_refused(tmp_path: Path, parts: list[TensorShard], message: str) -> None:
    _save(tmp_path, REST, *[[part] for part in parts])
    with pytest.raises(CheckpointError, match=message):
        SavedState(tmp_path)


def test_average_of_another_length_is_refused(tmp_path: Path) -> None:
    part = _part("gain", 0, 5)
    part.tensors["exp_avg_sq"] = part.tensors["exp_avg_sq"][:4]
    _save(tmp_path, [part])
    with pytest.raises(CheckpointError, match="gain is not complete"):
        SavedState(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({**SHAPES, "matrix": (7, 3)}, r"matrix has shape \[3, 7\] there, \[7, 3\] here"),
        ({**SHAPES, "bias": (2,)}, r"bias has shape none there, \[2\] here"),
        ({"matrix": (3, 7), "gain": (5,)}, r"scalar has shape \[1\] there, none here"),
    ],
)
def test_other_model_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    _save(tmp_path, MATRIX[:1], MATRIX[1:2], [MATRIX[2], *REST])
    with pytest.raises(CheckpointError, match=message):
        SavedState(tmp_path).require_shapes(shapes)


def test_missing_foreign_damaged_and_older_files_are_named(tmp_path: Path) -> None:
    _save(tmp_path, REST, [])
    content = _file(tmp_path, 1, 2).read_bytes()
    _file(tmp_path, 1, 2).write_bytes(content[:20])
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002\.safetensors"):
        SavedState(tmp_path)
    _file(tmp_path, 1, 2).unlink()
    with pytest.raises(CheckpointError, match=r"missing.*: rank-00001-of-00002"):
        SavedState(tmp_path)
    saved_state.write_part(tmp_path, 1, 2, [], {**COUNTERS, "updates": 2})
    with pytest.raises(CheckpointError, match="different steps"):
        SavedState(tmp_path)
    (tmp_path / "old/state").mkdir(parents=True)
    (tmp_path / "old/state/mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="an earlier version wrote it"):
        SavedState(tmp_path / "old")


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    # 100 MB of which 4 bytes are asked for: the memory in use must not grow by more than a tenth.
    numel = 8_000_000
    tensors = {kind: torch.ones(numel) for kind in KINDS}
    _save(tmp_path, [TensorShard("big", (numel,), 0, tensors)])
    del tensors
    before = psutil.Process().memory_info().rss
    saved = SavedState(tmp_path)
    for kind in KINDS:
        assert saved.read(kind, "big", numel - 1).tolist() == [1.0]
    assert psutil.Process().memory_info().rss - before < 10_000_000


def test_files_are_readable_by_those_whom_the_system_lets(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    _save(tmp_path, REST)
    assert _file(tmp_path, 0, 1).stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("size", "place"), [(1, 0), (10, 9), ((1 << 23) + 5, (1 << 23) + 2)])
def test_a_value_that_no_training_gives_is_found(wrong: float, size: int, place: int) -> None:
    values = torch.full((size,), 3e38)
    assert unsound_value("master", values) is None
    values[place] = wrong
    assert unsound_value("master", values) == f"element {place} is {wrong}"


def test_an_average_of_squares_is_not_negative() -> None:
    values = torch.zeros(9)
    values[4] = -1e-30
    assert unsound_value("exp_avg", values) is None
    assert unsound_value("exp_avg_sq", values) == f"element 4 is {values[4].item()}"
    assert unsound_value("exp_avg", torch.zeros(0)) is None
