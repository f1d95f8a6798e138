"""A loss that jumps: the run goes back, leaves batches out, and is the run that never saw them."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from pipeline.data.ledger import Rewind, read_ledger
from pipeline.data.record import read_batches
from pipeline.runtime.checkpoints import FOLDER, name_of, published, read_manifest
from tests.distributed.conftest import Train
from tests.support import warm
from tests.support.processes import wait_until
from tests.support.ranks import Ranks, assert_same_bits, losses, records

OVERRIDES = ("train.num_steps=45", "monitor.log_every_steps=5", "checkpoint.every_steps=10",
             "checkpoint.keep=5", "spikes.window_steps=10", "spikes.steps_in_a_row=3",
             "spikes.skip_before_steps=2", "spikes.deviations=3",
             "spikes.rise_nats=0.3")  # fmt: skip
FIRST_BAD = 23
ONE_BAD = range(FIRST_BAD, FIRST_BAD + 1)


def _run(train: Train, bad: range, *overrides: str, code: int = 0) -> Ranks:
    """A run in which the loss rises after some batches."""
    train.set(SPIKE_HASHES=train.hashes(bad))
    return train("run", *OVERRIDES, *overrides, fault="spiking", code=code)


@pytest.fixture(scope="module")
def spiking(
    dataset: DatasetIndex, tmp_path_factory: pytest.TempPathFactory, start_ranks: type[Ranks]
) -> Path:
    """A run that went back once, without another interruption."""
    with pytest.MonkeyPatch.context() as patch:
        train = Train(tmp_path_factory.mktemp("rewind"), dataset, patch)
        return _run(train, ONE_BAD).run_dir


def _rewind(run_dir: Path) -> Rewind:
    [rewind] = read_ledger(run_dir).rewinds
    return rewind


def test_run_goes_back_and_leaves_the_batches_out(spiking: Path) -> None:
    rewind = _rewind(spiking)
    # The bad update is seen in the loss of the batch after it; two more come before that.
    assert (rewind.high_batches[0], rewind.first_batch) == (FIRST_BAD + 1, FIRST_BAD - 1)
    assert rewind.loss > rewind.limit
    # Looked at in steps that are multiples of 5; by then three in a row were high.
    assert rewind.from_step == 30
    assert (rewind.last_batch, rewind.to_step) == (29, 20)
    output = spiking.with_suffix(".out").read_text()
    assert "back to the checkpoint of step 20, batches 22 to 29 are left out" in output
    logged = read_batches(spiking)
    assert [record.batch for record in logged if record.step is None] == list(range(22, 30))
    assert [record.step for record in logged if record.step] == list(range(1, 46))
    # No checkpoint that saw them is left, and TensorBoard's and other readers see an attempt.
    starts = [json.loads(line) for line in (spiking / "attempts.jsonl").read_text().splitlines()]
    assert [start["resumed_from_step"] for start in starts] == [None, 20]
    assert records(spiking)[-1]["left_out_batches"] == 8
    assert losses(spiking)[45] < rewind.limit


def test_a_spike_at_a_border_goes_back_over_it(train: Train) -> None:
    stages = [{"name": "first", "steps": FIRST_BAD + 2},
              {"name": "second", "steps": 43 - FIRST_BAD, "model": {"rotary_base": 160000},
               "train": {"decay": "linear"}}]  # fmt: skip
    staged = f"stages={json.dumps(stages)}"
    run_dir = _run(train, ONE_BAD, staged).run_dir
    rewind = _rewind(run_dir)
    assert (rewind.first_batch, rewind.last_batch) == (FIRST_BAD - 1, 29)
    assert (rewind.from_step, rewind.to_step) == (30, 20)
    left_out = [record for record in read_batches(run_dir) if record.step is None]
    assert [record.stage for record in left_out] == [0] * 3 + [1] * 5
    assert [record.step for record in read_batches(run_dir) if record.step] == list(range(1, 46))
    # The stage's end has a checkpoint, though its last batch was left out.
    ends = [read_manifest(path) for path in published(run_dir / "checkpoints")]
    assert (22, 8 * (FIRST_BAD + 2)) in [(end.step, end.cursor) for end in ends]
    skipped = f"train.skip_batches=[{{first: {FIRST_BAD - 1}, last: 29}}]"
    assert_same_bits(run_dir, train("told", *OVERRIDES, staged, skipped).run_dir)


def test_commands_tell_what_was_left_out(spiking: Path) -> None:
    lines = warm.run("pipeline", "inspect", spiking, "--skip").stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:8]] == [f"batch {n}" for n in range(22, 30)]
    assert all("; left out when the run went back; epoch/sample 0/" in line for line in lines[:8])
    assert "back from step 30 to 20, without batches 22 to 29" in lines[8]
    assert "'train.skip_batches=[{first: 22, last: 29}]'" in lines[-1]
    text = warm.run("postnorm", "status", spiking).stdout
    assert "went back" in text
    assert "the run went back 1 times" in text


def test_a_run_that_left_them_out_from_the_start_is_the_same(
    spiking: Path, tmp_path: Path, train: Train
) -> None:
    rewind = _rewind(spiking)
    left_out = f"train.skip_batches=[{{first: {rewind.first_batch}, last: {rewind.last_batch}}}]"
    train("run", *OVERRIDES, left_out)
    assert (tmp_path / "run/batches.tsv").read_bytes() == (spiking / "batches.tsv").read_bytes()
    assert_same_bits(tmp_path / "run", spiking)
    assert losses(tmp_path / "run")[45] == losses(spiking)[45]


def test_a_run_whose_folder_is_lost_goes_on_from_its_copies(
    spiking: Path, tmp_path: Path, train: Train
) -> None:
    copies = tmp_path / "copies"
    run_dir = _run(train, ONE_BAD, f"checkpoint.copy_to={copies}").run_dir
    shutil.rmtree(run_dir)
    shutil.rmtree(copies / FOLDER / name_of(45))
    again = _run(train, ONE_BAD, f"checkpoint.copy_to={copies}")
    assert "step-00000040, a copy, is used" in again.output
    assert read_ledger(run_dir).rewinds
    assert_same_bits(run_dir, spiking)


YOUNG = "spikes.window_steps=200"


def test_a_young_run_goes_back_to_its_first_checkpoint(train: Train) -> None:
    """The window of losses is not full, and all checkpoints but the oldest are from the spike."""
    few = "checkpoint.keep=1", "spikes.skip_before_steps=9", "train.num_steps=25"
    rewind = _rewind(_run(train, range(12, 13), YOUNG, *few).run_dir)
    assert (rewind.high_batches[0], rewind.to_step, rewind.first_batch) == (13, 10, 10)


def test_without_a_checkpoint_from_before_it_goes_on_and_is_told(train: Train) -> None:
    events = train.folder / "events.jsonl"
    given = ("train.num_steps=40", "train.warmup_steps=2", f"notify.command=cat >>{events}")
    ranks = _run(train, range(8, 40), YOUNG, *given)
    assert "no good checkpoint after step 0 is from before it: training goes on" in ranks.output
    assert not read_ledger(ranks.run_dir).rewinds
    [told] = records(ranks.run_dir, "divergence")
    assert told["since_batch"] == 9
    assert told["step"] <= 15
    assert told["best"] < told["limit"] < told["loss"]
    assert losses(ranks.run_dir)[40] > told["limit"]
    names = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert names == ["started", "diverged", "finished"]
    text = warm.run("postnorm", "status", ranks.run_dir).stdout
    assert f"diverged: the loss is {losses(ranks.run_dir)[40]:.3f}, high since batch 9" in text
    assert "plateau" not in text


def test_a_young_run_that_went_back_too_often_goes_on(train: Train) -> None:
    given = "spikes.max_rewinds=1", "train.num_steps=25", "checkpoint.keep_first=true"
    ranks = _run(train, range(11, 60), YOUNG, *given)
    assert [rewind.to_step for rewind in read_ledger(ranks.run_dir).rewinds] == [10]
    assert "went back to step 10 1 times before" in ranks.output
    assert "set spikes.rewind=false: training goes on" in ranks.output
    assert records(ranks.run_dir)[-1]["step"] == 25


def test_the_checkpoint_from_before_it_is_kept(train: Train) -> None:
    few = "checkpoint.keep=1", "checkpoint.every_steps=5", "spikes.rewind=false"
    run_dir = _run(train, range(12, 60), YOUNG, *few).run_dir
    kept = [read_manifest(path).step for path in published(run_dir / "checkpoints")]
    assert kept == [45, 10]
    listed = warm.run("pipeline", "checkpoint", "list", run_dir).stdout
    assert "before the loss rose" in listed


def test_killed_before_it_goes_back(spiking: Path, tmp_path: Path, train: Train) -> None:
    train.set(SPIKE_HASHES=train.hashes(ONE_BAD))
    run_dir, given = tmp_path / "run", (*OVERRIDES, "checkpoint.every_steps=13")
    # This attempt ends in the middle of the spike, with a checkpoint that is in it.
    ranks = train.start("run", *given, fault="spiking")
    ranks.wait_for_step(26)
    ranks.kill()
    assert not read_ledger(run_dir).rewinds
    ranks = train.start("run", *given, fault="spiking")
    wait_until(lambda: read_ledger(run_dir).rewinds, *ranks.processes)
    ranks.kill()
    spoiled = run_dir / "checkpoints/step-00000026"
    killed_first = spoiled.exists()
    ranks = train("run", *given, fault="spiking")
    if killed_first:
        assert f"removing {spoiled}: it was trained on batches that are" in ranks.output
    assert _rewind(run_dir).to_step == 13
    left_out = {record.batch for record in read_batches(run_dir) if record.step is None}
    assert left_out == set(range(22, 30))
    assert_same_bits(run_dir, spiking)


def test_a_loss_that_always_jumps_ends_the_run(train: Train) -> None:
    ranks = _run(train, range(FIRST_BAD, 80), "spikes.max_rewinds=1", code=2)
    assert "the run went back to step 20 1 times before (spikes.max_rewinds)" in ranks.output
    assert (ranks.run_dir / "checkpoints/step-00000020").exists()
