"""Non-finite steps, full disks, damaged shards, missing variables; and sums that do not depend on
how the batch is split."""

import shutil
import socket
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints.manifest import newest_good, verify
from pipeline.data.format import DatasetIndex
from pipeline.data.ledger import read_ledger
from pipeline.data.record import read_batches
from pipeline.runtime.checkpoints import read_manifest
from tests.distributed.conftest import Train, with_small_disk
from tests.support.damage import flip, needs_mount
from tests.support.ranks import assert_same_bits, losses, newest_state, records


def test_non_finite_step_is_skipped_on_all_ranks_and_schedules_stand_still(
    straight_run: Path, train: Train
) -> None:
    train.set(POISON_RANK="1", POISON_CALLS="6")  # two micro-batches a step: the third step
    ranks = train("run", "train.num_steps=20", fault="poisoned")
    run_dir = ranks.run_dir
    assert "step 3 skipped on all ranks: gradient norm" in ranks.output
    assert "sequences 16 to 23 are not trained on" in ranks.output
    [skip] = records(run_dir, "skip")
    assert (skip["step"], skip["total"]) == (2, 1)
    steps = {record["step"]: record for record in records(run_dir)}
    # Steps before the skip are those of the run without one.
    assert all(steps[step]["loss"] == losses(straight_run)[step] for step in (1, 2))
    # Step 3 is the next batch, at the same place of the schedules.
    assert (steps[3]["lr"], steps[3]["alpha"]) == (pytest.approx(3e-3 * 3 / 5), 0.2)
    assert steps[20]["skipped_steps"] == 1
    manifest = read_manifest(run_dir / "checkpoints/step-00000020")
    assert (manifest.step, manifest.cursor, manifest.skipped) == (20, 21 * 8, 1)
    for name, value in newest_state(run_dir).items():
        assert torch.isfinite(value.float()).all(), name


@pytest.mark.parametrize(("stage", "calls", "names"), [
    # Two micro-batches a step: the third step, and those of the same when it is looked at.
    (0, "6,8", True), (1, "6,8", True), (2, "6,8", True), (3, "6,8", True), (1, "6", False),
])  # fmt: skip
def test_non_finite_gradient_names_rank_and_tensor(
    tmp_path: Path, train: Train, stage: int, calls: str, names: bool
) -> None:
    below, above = (f"encoder.layers.{layer}.attention.qkv.weight" for layer in (0, 1))
    train.set(POISON_RANK="1", POISON_CALLS=calls, POISON_PARAMETERS=f"{below},{above}")
    settings = ("train.num_steps=6", "train.alpha_warmup_steps=2", f"train.zero_stage={stage}")
    ranks = train("run", *settings, fault="poisoned")
    [record] = read_ledger(tmp_path / "run").non_finite.values()
    assert (record.step, record.ranks) == (3, {})
    where = f"rank 1 on {socket.gethostname()}: the gradient of {above}, and of 1 more"
    assert record.gradients == ([f"{where} is not finite"] if names else [])
    said = where if names else "a device or the network erred in passing"
    assert f"losses are finite, {said if names else 'and so are'}" in ranks.output
    assert said in ranks.output
    if stage < 2:
        return
    # What is computed twice is added to no step, also where gradients are divided.
    [skipped] = [each.batch for each in read_batches(tmp_path / "run") if each.step is None]
    left_out = f"train.skip_batches=[{{first: {skipped}, last: {skipped}}}]"
    train("other", *settings, left_out)
    assert_same_bits(tmp_path / "run", tmp_path / "other")


def test_bad_steps_end_it(train: Train) -> None:
    train.set(POISON_RANK="0", POISON_CALLS="all")
    ranks = train("run", "train.max_skipped_in_a_row=3", fault="poisoned", code=2)
    assert "3 steps in a row had no finite gradient (train.max_skipped_in_a_row)" in ranks.output
    assert len(records(ranks.run_dir, "skip")) == 3


def test_loss_does_not_depend_on_ranks_and_accumulation(train: Train) -> None:
    common = ("train.precision=fp32", "train.num_steps=12", "model.dropout=0",
              "model.attention_dropout=0")  # fmt: skip
    runs = {(1, 8): {}, (2, 4): {}, (2, 1): {}}
    for world_size, micro_batch in runs:
        words = (*common, f"train.micro_batch={micro_batch}")
        ranks = train(f"run-{world_size}-{micro_batch}", *words, world_size=world_size)
        runs[world_size, micro_batch] = losses(ranks.run_dir)
    base = runs[1, 8]
    for found in runs.values():
        # fp32 sums in another order; differences grow over 12 steps of training.
        assert found == pytest.approx(base, rel=2e-5)


def test_write_error_leaves_the_checkpoint_before(straight_run: Path, train: Train) -> None:
    run_dir = train.copied(straight_run)
    newest = run_dir / "checkpoints" / "step-00000040"
    # The system refuses to let a file grow beyond 100 KB: the write fails half-way.
    limit = ("prlimit", "--fsize=102400", "--")
    ranks = train.start("run", "train.num_steps=42", prefix=limit)
    assert all(ranks.wait())
    assert "checkpoint step-00000042 could not be written" in ranks.output
    assert sorted(p.name for p in (run_dir / "checkpoints").glob("step-*")) == [
        "step-00000030", "step-00000040"
    ]  # fmt: skip
    verify(newest)
    train("run", "train.num_steps=42")
    assert newest_good(run_dir / "checkpoints")[0] == run_dir / "checkpoints/step-00000042"


@pytest.mark.usefixtures("processes")
@needs_mount
def test_full_disk_is_noticed_before_writing(dataset: DatasetIndex, tmp_path: Path) -> None:
    run_dir = tmp_path / "small" / "run"
    code = (
        "import sys; from pathlib import Path; from tests.support.ranks import Ranks;"
        "from pipeline.data.format import read_index;"
        "from pipeline.checkpoints.manifest import verify;"
        f"r = Ranks(Path({str(run_dir)!r}), read_index({str(dataset.folder)!r}));"
        "codes = r.wait(); print(codes, r.output);"
        f"verify(Path({str(run_dir / 'checkpoints' / 'step-00000015')!r})); print('survived')"
    )
    output = with_small_disk(tmp_path / "small", code)
    assert "[2, 2]" in output, output
    assert "no space for checkpoint step-00000030" in output
    assert "survived" in output


def test_flipped_byte_stops_training(dataset: DatasetIndex, tmp_path: Path, train: Train) -> None:
    data = tmp_path / "data"
    shutil.copytree(dataset.folder, data)
    path = data / dataset.shards[0].file
    flip(path, int(dataset.blocks.member_offset[0, 0]) + 500)
    # Found before training by one rank, and all ranks stop for it.
    ranks = train("run", f"data.dir={data}", "data.verify_at_start_gib=1", code=2)
    assert f"shard {path}, member train-000000-0000.tokens.npy is damaged" in ranks.output
    assert "from step 0" not in ranks.output
    assert "Traceback" not in ranks.output
