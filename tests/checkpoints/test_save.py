"""What a save copies, and what rank 0 must see before it publishes."""

from pathlib import Path

import pytest
import torch

from pipeline.checkpoints.background import HostCopy
from pipeline.checkpoints.manifest import state_file
from pipeline.checkpoints.save import _require_files
from pipeline.checkpoints.state import KINDS, TensorShard
from pipeline.errors import CheckpointError
from pipeline.runtime.checkpoints import read_manifest
from tests.support.checkpoints import make_checkpoint


def test_copy_does_not_change_with_the_state_and_memory_is_used_again() -> None:
    state = {kind: torch.randn(6) for kind in KINDS}
    part = TensorShard("weight", (2, 3), 0, state)
    host = HostCopy()
    [first] = host.take([part])
    before = {kind: tensor.clone() for kind, tensor in state.items()}
    for tensor in state.values():
        tensor.add_(1.0)
    assert all(torch.equal(first.tensors[kind], before[kind]) for kind in KINDS)
    [second] = host.take([part])
    assert all(torch.equal(second.tensors[kind], state[kind]) for kind in KINDS)
    for kind in KINDS:
        assert second.tensors[kind].data_ptr() == first.tensors[kind].data_ptr()


def test_file_that_rank_0_does_not_see_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 10, world_size=2)
    manifest = read_manifest(path)
    (path / "manifest.json").unlink()
    _require_files(path, manifest)
    content = (path / state_file(1, 2)).read_bytes()
    (path / state_file(1, 2)).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002.*all nodes"):
        _require_files(path, manifest)
    (path / state_file(1, 2)).unlink()
    with pytest.raises(CheckpointError, match=r" 1 ranks, expected 2: .*rank-00001"):
        _require_files(path, manifest)
