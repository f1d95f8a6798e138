"""State that is not finite is never saved: the run goes back, and tells which rank and tensor."""

import json
from pathlib import Path

import pytest

from pipeline.checkpoints.commands import all_problems
from pipeline.checkpoints.state import SavedState
from pipeline.data.ledger import read_ledger
from pipeline.runtime.checkpoints import MANIFEST_FILE, published, read_manifest, signed
from pipeline.runtime.files import sha256_file
from pipeline.runtime.tensors import SlicedFile, read_file, write_file
from tests.distributed.conftest import Train
from tests.support.ranks import assert_same_bits

OVERRIDES = ("train.num_steps=30", "monitor.log_every_steps=5", "checkpoint.every_steps=10",
             "checkpoint.keep=1")  # fmt: skip
TENSOR = "exp_avg/encoder.token_embedding.weight: element 3 "


@pytest.mark.parametrize(
    ("batch", "settings", "firsts"),
    [
        # The loss after the next step shows it; the batch of that step is left out in vain.
        (23, ("checkpoint.background=true", "train.zero_stage=0"), [24, 22]),
        # The save of step 20 shows it.
        (19, ("checkpoint.background=false", "train.zero_stage=1"), [19]),
    ],
)
def test_goes_back_and_is_the_run_without_the_batch(
    tmp_path: Path, train: Train, batch: int, settings: tuple[str, ...], firsts: list[int]
) -> None:
    train.set(BREAK_HASHES=train.hashes(range(batch, batch + 1)))
    ranks = train("run", *OVERRIDES, *settings, fault="breaking")
    rewinds = read_ledger(tmp_path / "run").rewinds
    assert [rewind.first_batch for rewind in rewinds] == firsts
    for rewind in rewinds:
        assert rewind.loss is None
        assert all(text.startswith("rank 0 on ") for text in rewind.unsound)
        assert TENSOR in "".join(rewind.unsound)
    assert f"back to the checkpoint of step {batch // 10 * 10}, " in ranks.output
    for path in published(tmp_path / "run/checkpoints"):
        assert not list(SavedState(path).non_finite())
        assert read_manifest(path).is_sound

    ranges = [f"{{first: {each.first_batch}, last: {each.last_batch}}}" for each in rewinds]
    left_out = f"train.skip_batches=[{', '.join(ranges)}]"
    train("other", *OVERRIDES, *settings, left_out)
    assert_same_bits(tmp_path / "run", tmp_path / "other")


def test_a_state_that_breaks_again_and_again_ends_the_run_with_the_truth(train: Train) -> None:
    train.set(BREAK_HASHES=train.hashes(range(16, 60)))
    ranks = train("run", *OVERRIDES, "spikes.max_rewinds=2", fault="breaking", code=2)
    assert "the run went back to step 10 2 times before (spikes.max_rewinds)" in ranks.output
    first, second = read_ledger(ranks.run_dir).rewinds
    assert first.first_batch - second.first_batch == 2
    [path] = published(ranks.run_dir / "checkpoints")
    assert path.name == "step-00000010"
    assert not list(SavedState(path).non_finite())


def test_a_checkpoint_of_an_earlier_version_is_looked_at(straight_run: Path, train: Train) -> None:
    newest, older, *_ = published(train.copied(straight_run) / "checkpoints")
    path = sorted((newest / "state").glob("*"))[1]
    tensors, metadata = read_file(path), SlicedFile(path).metadata
    name = next(name for name in tensors if name.startswith("exp_avg_sq/"))
    tensors[name][2] = float("inf")
    write_file(tensors, path, metadata)
    body = json.loads((newest / MANIFEST_FILE).read_bytes())
    del body["manifest_sha256"], body["is_sound"]
    entry = body["files"][f"state/{path.name}"]
    entry |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (newest / MANIFEST_FILE).write_text(json.dumps(signed(body)))

    found = dict(all_problems([newest, older]))
    assert found[older] == []
    assert f"{name}: element 2 is inf" in found[newest][0]
    ranks = train("run", "train.num_steps=44")
    assert f"checkpoint rejected: {newest}: {name}: element 2 is inf" in ranks.output
    assert f"resumed from {older}" in ranks.output
