"""Killed and stopped runs continue bit for bit; what does not fit is refused."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.checkpoints.manifest import newest_good
from pipeline.errors import EXIT_PREEMPTED
from pipeline.inspect.status import run_status
from pipeline.runtime.checkpoints import read_manifest, signed
from tests.distributed.conftest import Train
from tests.support.damage import flip
from tests.support.grids import first_in_ci
from tests.support.ranks import assert_same_bits, losses, records


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


@pytest.mark.parametrize(
    ("killed_rank", "precision"), first_in_ci([(0, "fp32"), (1, "fp32"), (0, "bf16")], 2)
)
def test_killed_run_continues(
    straight_run: Path, tmp_path: Path, killed_rank: int, precision: str, train: Train
) -> None:
    run_dir, in_precision = tmp_path / "run", f"train.precision={precision}"
    if precision == "bf16":
        in_fp32, straight_run = straight_run, train("straight", in_precision).run_dir
        # Dropout draws the same; only rounding differs.
        assert losses(straight_run) == pytest.approx(losses(in_fp32), rel=0, abs=0.05)
    ranks = train.start("run", in_precision)
    ranks.wait_for_step(17)
    ranks.wait_for_checkpoint(15)
    ranks.signal(signal.SIGKILL, killed_rank)
    codes = ranks.wait()
    assert codes[killed_rank] == -signal.SIGKILL
    assert codes[1 - killed_rank] != 0
    assert _checkpoints(run_dir) == ["latest", "step-00000015"]

    train("run", in_precision)
    attempts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["resumed_from_step"] for attempt in attempts] == [None, 15]
    assert losses(run_dir) == losses(straight_run)
    # Steps that both attempts computed came out the same in both.
    first = {r["step"]: r["loss"] for r in records(run_dir) if r["attempt"] == 1}
    assert 16 in first
    assert {step: losses(straight_run)[step] for step in first} == first
    assert_same_bits(run_dir, straight_run)


@pytest.mark.parametrize(
    ("number", "rank"), first_in_ci([(signal.SIGTERM, 1), (signal.SIGUSR1, None)])
)
def test_stopped_run_saves_and_continues_bit_for_bit(
    straight_run: Path, tmp_path: Path, number: signal.Signals, rank: int | None, train: Train
) -> None:
    run_dir = tmp_path / "run"
    ranks = train.start("run")
    ranks.wait_for_step(3)
    ranks.signal(number, rank)
    ranks.ended(EXIT_PREEMPTED)
    path, rejected = newest_good(run_dir / "checkpoints")
    assert not rejected
    assert path is not None
    assert 3 <= read_manifest(path).step < 15

    train("run")
    assert losses(run_dir) == losses(straight_run)
    assert_same_bits(run_dir, straight_run)
    starts = [(start.job, start.end) for start in run_status(run_dir).starts]
    assert starts == [("local-1", "stopped on request, saved"), ("local-2", "finished")]


def test_rank_dead_in_a_save_is_retried(straight_run: Path, tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "run"
    train("run", fault="dying", code=[1, -signal.SIGKILL])
    assert (run_dir / "exit/local-1/rank-00000").read_text() == "1\n"
    assert _checkpoints(run_dir) == [".saving-step-00000015"]
    train("run")
    assert losses(run_dir) == losses(straight_run)


def test_unreadable_config_is_recorded(tmp_path: Path, train: Train) -> None:
    train.set(POSTNORM_RUN_DIR=str(tmp_path / "run"))
    train("run", "train.lrr=1", code=2)
    assert (tmp_path / "run/exit/local/rank-00001").read_text() == "2\n"


def test_damaged_checkpoint_is_rejected(straight_run: Path, train: Train) -> None:
    run_dir = train.copied(straight_run)
    (run_dir / "checkpoints" / ".saving-step-00000040").mkdir()
    [model] = (run_dir / "checkpoints/step-00000040/state").glob("rank-00001-*")
    flip(model)
    ranks = train("run")
    assert "rank-00001-of-00002.safetensors is damaged" in ranks.output
    assert "step-00000030" in ranks.output
    assert "a save that was never finished" in ranks.output
    assert_same_bits(run_dir, straight_run)

    for path in (run_dir / "checkpoints").glob("step-*/manifest.json"):
        path.write_text(path.read_text().replace('"cursor": ', '"cursor": 8'))
    ranks = train("run", code=2)
    assert "manifest.json is damaged" in ranks.output


def test_a_run_of_a_newer_version_is_left_as_it_is(straight_run: Path, train: Train) -> None:
    run_dir = train.copied(straight_run)
    before = _checkpoints(run_dir)
    attempts = (run_dir / "attempts.jsonl").read_text()
    newest = run_dir / "checkpoints/step-00000040/manifest.json"
    original, body = newest.read_text(), json.loads(newest.read_bytes())
    body.pop("manifest_sha256")
    newest.write_text(json.dumps(signed({**body, "planes": 7})))
    ranks = train("run", "train.num_steps=50", code=2)
    assert "the fields planes, which this version does not know" in ranks.output
    assert _checkpoints(run_dir) == before
    assert (run_dir / "attempts.jsonl").read_text() == attempts
    # A start that was refused is on record, and shown until another one trains.
    [first, *_] = run_status(run_dir).warnings
    assert re.match("the last start, .* failed: .*the fields planes", first)
    newest.write_text(original)
    record = {**json.loads(attempts), "format_version": 2, "git_revision": "abc"}
    (run_dir / "attempts.jsonl").write_text(attempts + json.dumps(record))
    ranks = train("run", "train.num_steps=50", code=2)
    assert "has format_version 2, expected 1 at most: a newer version (abc)" in ranks.output
    assert _checkpoints(run_dir) == before


@pytest.mark.parametrize(("world_size", "stage"), first_in_ci([(1, 3), (4, 2)]))
def test_other_number_of_ranks_and_stage_continue(
    straight_run: Path, world_size: int, stage: int, train: Train
) -> None:
    run_dir = train.copied(straight_run)
    shutil.rmtree(run_dir / "checkpoints/step-00000040")
    overrides = ("monitor.eval_every_steps=5", f"train.zero_stage={stage}")
    ranks = train("run", *overrides, world_size=world_size)
    assert f"was saved by 2 ranks, this run has {world_size}" in ranks.output
    manifest = read_manifest(run_dir / "checkpoints/step-00000040")
    assert (manifest.step, manifest.cursor, manifest.world_size) == (40, 320, world_size)
    # The same sequences and masks; dropout draws other numbers.
    mine = {r["step"]: r["loss"] for r in records(run_dir) if r["attempt"] == 2}
    assert sorted(mine) == list(range(31, 41))
    for step, loss in mine.items():
        assert loss == pytest.approx(losses(straight_run)[step], abs=0.2)
