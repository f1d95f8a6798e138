"""Killed and stopped runs continue bit for bit; what does not fit is refused."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.checkpoints.manifest import newest_good, read_manifest
from pipeline.data.format import DatasetIndex
from pipeline.errors import EXIT_PREEMPTED
from pipeline.inspect.status import run_status
from tests.support.ranks import Ranks, losses, newest_state, records


def _same_state(one: Path, other: Path) -> None:
    first, second = newest_state(one), newest_state(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_straight_run_leaves_what_it_should(straight_run: Path) -> None:
    assert _checkpoints(straight_run) == ["latest", "step-00000030", "step-00000040"]
    assert (straight_run / "checkpoints/latest").read_text() == "step-00000040\n"
    assert sorted(losses(straight_run)) == list(range(1, 41))
    assert [record["step"] for record in records(straight_run, "eval")] == [0, 20, 40]
    assert json.loads((straight_run / "done.json").read_text())["step"] == 40
    manifest = read_manifest(straight_run / "checkpoints/step-00000040")
    assert (manifest.step, manifest.cursor, manifest.world_size) == (40, 320, 2)
    for rank in range(2):
        assert (straight_run / f"exit/local-1/rank-{rank:05d}").read_text() == "0\n"
        assert "step 40/40" in (straight_run / f"logs/rank-{rank:05d}.log").read_text()
    text = (straight_run / "resolved.yaml").read_text()
    assert "git_revision" in text
    assert "vocab_size: 1000" in text


def test_loss_falls_and_schedules_are_logged(straight_run: Path) -> None:
    train = records(straight_run)
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    by_step = {record["step"]: record for record in train}
    # The update after k applied steps is logged as step k + 1.
    assert [by_step[k]["alpha"] for k in (1, 6, 10, 11, 40)] == [0.0, 0.5, 0.9, 1.0, 1.0]
    assert by_step[1]["lr"] == pytest.approx(3e-3 / 5)
    assert by_step[5]["lr"] == pytest.approx(3e-3)
    assert by_step[40]["lr"] == pytest.approx(3e-3 / 35)
    assert all(0 < record["grad_norm"] < 100 for record in train)
    assert all(0 <= record["data_wait"] <= 1 and record["fill"] > 0.9 for record in train)


def test_tensorboard_has_every_curve(straight_run: Path) -> None:
    events = EventAccumulator(str(straight_run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = {event.step: event.value for event in events.Scalars("quality/loss")}
    assert points == pytest.approx(losses(straight_run), rel=1e-6)


@pytest.mark.parametrize("killed_rank", [0, pytest.param(1, marks=pytest.mark.smoke)])
def test_killed_run_continues_bit_for_bit(
    dataset: DatasetIndex,
    straight_run: Path,
    tmp_path: Path,
    killed_rank: int,
    start_ranks: type[Ranks],
) -> None:
    run_dir = tmp_path / "run"
    ranks = start_ranks(run_dir, dataset)
    ranks.wait_for_step(17)
    ranks.wait_for_checkpoint(15)
    ranks.signal(signal.SIGKILL, killed_rank)
    codes = ranks.wait()
    assert codes[killed_rank] == -signal.SIGKILL
    assert codes[1 - killed_rank] != 0
    assert _checkpoints(run_dir) == ["latest", "step-00000015"]

    again = start_ranks(run_dir, dataset)
    assert again.wait() == [0, 0], again.output
    attempts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["resumed_from_step"] for attempt in attempts] == [None, 15]
    assert losses(run_dir) == losses(straight_run)
    # Steps that both attempts computed came out the same in both.
    first = {r["step"]: r["loss"] for r in records(run_dir) if r["attempt"] == 1}
    assert 16 in first
    assert {step: losses(straight_run)[step] for step in first} == first
    _same_state(run_dir, straight_run)


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGUSR1, None), (signal.SIGTERM, 1)])
def test_stopped_run_saves_and_continues_bit_for_bit(
    dataset: DatasetIndex, straight_run: Path, tmp_path: Path, number: signal.Signals,
    rank: int | None, start_ranks: type[Ranks],
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    ranks = start_ranks(run_dir, dataset)
    ranks.wait_for_step(3)
    ranks.signal(number, rank)
    assert ranks.wait() == [EXIT_PREEMPTED, EXIT_PREEMPTED], ranks.output
    path, rejected = newest_good(run_dir / "checkpoints")
    assert not rejected
    assert path is not None
    stopped_at = read_manifest(path).step
    assert 3 <= stopped_at < 15

    again = start_ranks(run_dir, dataset)
    assert again.wait() == [0, 0], again.output
    assert losses(run_dir) == losses(straight_run)
    _same_state(run_dir, straight_run)
    starts = [(start.job, start.end) for start in run_status(run_dir).starts]
    assert starts == [("local-1", "stopped on request, saved"), ("local-2", "finished")]


def test_rank_that_dies_in_a_save_lets_the_run_be_tried_again(
    dataset: DatasetIndex, straight_run: Path, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    run_dir = tmp_path / "run"
    ranks = start_ranks(run_dir, dataset, module=("-m", "tests.distributed.dying_in_save_main"))
    assert ranks.wait() == [1, -signal.SIGKILL], ranks.output
    assert (run_dir / "exit/local-1/rank-00000").read_text() == "1\n"
    assert _checkpoints(run_dir) == [".saving-step-00000015"]
    again = start_ranks(run_dir, dataset)
    assert again.wait() == [0, 0], again.output
    assert losses(run_dir) == losses(straight_run)


def test_unreadable_config_is_recorded_for_the_launcher(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ranks: type[Ranks]
) -> None:
    monkeypatch.setenv("POSTNORM_RUN_DIR", str(tmp_path / "run"))
    ranks = start_ranks(tmp_path / "run", dataset, "train.lrr=1")
    assert ranks.wait() == [2, 2], ranks.output
    assert (tmp_path / "run/exit/local/rank-00001").read_text() == "2\n"


def test_folder_of_a_running_run_cannot_be_used_twice(
    dataset: DatasetIndex, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    ranks = start_ranks(tmp_path / "run", dataset, "train.num_steps=5000")
    try:
        ranks.wait_for_step(1)
        second = start_ranks(tmp_path / "run", dataset, world_size=1)
        assert second.wait() == [1]
        assert "is in use by another running process" in second.output
        assert all(process.poll() is None for process in ranks.processes)
    finally:
        ranks.kill()


def test_damaged_checkpoint_is_rejected_and_the_one_before_is_used(
    dataset: DatasetIndex, straight_run: Path, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight_run, run_dir)
    (run_dir / "checkpoints" / ".saving-step-00000040").mkdir()
    [model] = (run_dir / "checkpoints/step-00000040/state").glob("rank-00001-*")
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    ranks = start_ranks(run_dir, dataset)
    assert ranks.wait() == [0, 0], ranks.output
    assert "checkpoint rejected" in ranks.output
    assert "rank-00001-of-00002.safetensors is damaged" in ranks.output
    assert "resumed from" in ranks.output
    assert "step-00000030" in ranks.output
    assert "a save that was never finished" in ranks.output
    _same_state(run_dir, straight_run)

    for path in (run_dir / "checkpoints").glob("step-*/manifest.json"):
        path.write_text(path.read_text().replace('"cursor": ', '"cursor": 8'))
    ranks = start_ranks(run_dir, dataset)
    assert ranks.wait() == [2, 2]
    assert "none of the 2 checkpoints" in ranks.output
    assert "manifest.json is damaged" in ranks.output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layers=3", "model.num_layers: checkpoint 2, now 3"),
        ("seed=4", "seed: checkpoint 3, now 4"),
        ("data.mask_prob=0.3", "data.mask_prob: checkpoint 0.15, now 0.3"),
        ("train.global_batch=16", "train.global_batch: checkpoint 8, now 16"),
    ],
)
def test_run_that_does_not_fit_its_checkpoint_is_refused(
    dataset: DatasetIndex,
    straight_run: Path,
    tmp_path: Path,
    override: str,
    message: str,
    start_ranks: type[Ranks],
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight_run, run_dir)
    before = _checkpoints(run_dir)
    ranks = start_ranks(run_dir, dataset, override, "train.num_steps=50")
    assert ranks.wait() == [2, 2]
    assert message in ranks.output
    assert "does not fit this run" in ranks.output
    assert "Traceback" not in ranks.output
    assert _checkpoints(run_dir) == before


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (4, 2)])
def test_other_number_of_ranks_and_stage_continue(
    dataset: DatasetIndex,
    straight_run: Path,
    tmp_path: Path,
    world_size: int,
    stage: int,
    start_ranks: type[Ranks],
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight_run, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-00000040")
    overrides = ("monitor.eval_every_steps=5", f"train.zero_stage={stage}")
    ranks = start_ranks(run_dir, dataset, *overrides, world_size=world_size)
    assert ranks.wait() == [0] * world_size, ranks.output
    assert f"was saved by 2 ranks, this run has {world_size}" in ranks.output
    manifest = read_manifest(run_dir / "checkpoints/step-00000040")
    assert (manifest.step, manifest.cursor, manifest.world_size) == (40, 320, world_size)
    # The same sequences and masks; dropout draws other numbers.
    mine = {r["step"]: r["loss"] for r in records(run_dir) if r["attempt"] == 2}
    assert sorted(mine) == list(range(31, 41))
    for step, loss in mine.items():
        assert loss == pytest.approx(losses(straight_run)[step], abs=0.2)


def test_number_of_ranks_that_does_not_divide_the_batch_is_refused(
    dataset: DatasetIndex, straight_run: Path, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    shutil.copytree(straight_run, tmp_path / "run")
    ranks = start_ranks(tmp_path / "run", dataset, world_size=3)
    assert ranks.wait() == [2] * 3
    assert "must be a multiple of train.micro_batch=2 x 3 ranks" in ranks.output


def test_other_dataset_is_refused(
    dataset: DatasetIndex, straight_run: Path, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    shutil.copytree(straight_run, tmp_path / "run")
    shutil.copytree(dataset.folder, tmp_path / "data")
    index = json.loads((tmp_path / "data/index.json").read_text())
    from pipeline.data import format as dataset_format

    del index["fingerprint"]
    index["unigram_entropy_nats"] += 1
    index["fingerprint"] = dataset_format._fingerprint(index)
    (tmp_path / "data/index.json").write_text(json.dumps(index))
    ranks = start_ranks(tmp_path / "run", dataset, f"data.dir={tmp_path}/data")
    assert ranks.wait() == [2, 2]
    assert f"dataset fingerprint: checkpoint {dataset.fingerprint}" in ranks.output
    assert index["fingerprint"] in ranks.output
    assert (
        f"unigram_entropy_nats: checkpoint {dataset.unigram_entropy_nats}, now "
        f"{index['unigram_entropy_nats']}. Restore the data that"
    ) in ranks.output


def test_longer_run_goes_on_from_a_finished_one(
    dataset: DatasetIndex, straight_run: Path, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    shutil.copytree(straight_run, tmp_path / "run")
    ranks = start_ranks(tmp_path / "run", dataset, "train.num_steps=43")
    assert ranks.wait() == [0, 0], ranks.output
    assert json.loads((tmp_path / "run/done.json").read_text())["step"] == 43
    assert max(losses(tmp_path / "run")) == 43
