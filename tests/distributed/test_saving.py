"""Saves in the background, their retention, copies and probes, with real ranks."""

import signal
from pathlib import Path

from pipeline.checkpoints.manifest import newest_good, verify
from pipeline.errors import EXIT_PREEMPTED
from pipeline.runtime.checkpoints import FOLDER, published, read_manifest
from tests.distributed.conftest import Train, tensorboard
from tests.support.ranks import assert_same_bits, losses, records


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).iterdir())


def test_retention_probe_and_copy_and_a_resume_from_the_copy(tmp_path: Path, train: Train) -> None:
    run_dir, copies = tmp_path / "run", tmp_path / "copies"
    overrides = ("train.num_steps=20", "monitor.eval_every_steps=5", "checkpoint.every_steps=5",
                 "checkpoint.keep=1", "checkpoint.keep_every_steps=10", "checkpoint.keep_best=1",
                 "checkpoint.probe_every=4", "checkpoint.keep_first=true",
                 f"checkpoint.copy_to={copies}",
                 "train.lr=0.3")  # fmt: skip
    ranks = train("run", *overrides, timeout_s=300)
    # At that learning rate the loss soon rises, so the best is not the newest.
    held_out = {record["step"]: record["loss"] for record in records(run_dir, "eval")}
    best = min((0, 5, 10, 15, 20), key=lambda step: (held_out[step], -step))
    expected = ["latest", *(f"step-{step:08d}" for step in sorted({0, best, 10, 20}))]
    assert _names(run_dir) == _names(copies) == expected
    for path in [*published(run_dir / FOLDER), *published(copies / FOLDER)]:
        verify(path)
        manifest = read_manifest(path)
        assert manifest.held_out_step == manifest.step
        assert (manifest.held_out_loss, manifest.zero_stage) == (held_out[manifest.step], 1)
    saves = records(run_dir, "save")
    assert [record["step"] for record in saves if "save_s" in record] == [0, 5, 10, 15, 20]
    assert all(0 < record["save_share"] <= 1 for record in saves if "save_s" in record)
    assert [record["step"] for record in saves if "probe_s" in record] == [20]
    assert ranks.output.count("and their optimizer state, read by another process") == 1
    assert ranks.output.count("saved ") == 5
    saved = tensorboard(run_dir).Scalars("speed/save_s")
    assert [event.step for event in saved] == [0, 5, 10, 15, 20]

    for path in published(run_dir / FOLDER):
        (path / "index.json").unlink()
    again = train("run", *overrides, "train.num_steps=21", world_size=1, timeout_s=300)
    assert f"{copies}/checkpoints/step-00000020, a copy, is used" in again.output
    assert "index.json is missing" in again.output
    assert max(losses(run_dir)) == 21
    assert newest_good(copies / FOLDER)[0] == copies / FOLDER / "step-00000021"


def test_training_goes_on_while_a_save_is_written_and_a_stop_waits_for_it(
    straight_run: Path, tmp_path: Path, train: Train
) -> None:
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    train.set(GATE=str(gate))
    ranks = train.start("run", "checkpoint.every_steps=30", fault="saving")
    try:
        ranks.wait_for_step(34)
        assert _names(run_dir) == [".saving-step-00000030"]
        # To one rank, which has written nothing for good; the other has long done its part.
        ranks.signal(signal.SIGTERM, 1)
        gate.touch()
        codes = ranks.wait(300)
    finally:
        ranks.kill()
    # If the signal comes in the last steps, the run ends in the usual way.
    assert codes in ([EXIT_PREEMPTED] * 2, [0, 0]), ranks.output
    last = max(losses(run_dir))
    assert _names(run_dir) == ["latest", "step-00000030", f"step-{last:08d}"]
    assert last > 33
    # Steps 31 to 34 came after the copy and before the end of the write.
    assert_same_bits(*(run / FOLDER / "step-00000030" for run in (run_dir, straight_run)))
    for path in published(run_dir / FOLDER):
        verify(path)


def test_rejected_checkpoint_stops_the_run_and_those_before_stay(train: Train) -> None:
    train.set(SPOILED="10")
    ranks = train("run", "train.num_steps=100000", "checkpoint.every_steps=5", "checkpoint.keep=1",
                  "checkpoint.probe_every=2", fault="saving", code=1, timeout_s=300)  # fmt: skip
    run_dir = ranks.run_dir
    assert "checkpoint step-00000010 was read back and rejected: " in ranks.output
    # The next save may have begun; a start removes what it left.
    found = [name for name in _names(run_dir) if name != ".saving-step-00000015"]
    [rejected, latest, before] = found
    assert rejected.startswith(".rejected-step-00000010-")
    assert (latest, before) == ("latest", "step-00000005")
    assert (run_dir / FOLDER / "latest").read_text() == "step-00000005\n"
    verify(run_dir / FOLDER / before)
    assert "Traceback" not in ranks.output


def test_storage_that_fails_for_a_moment_costs_nothing_and_for_long_a_start(
    straight_run: Path, tmp_path: Path, train: Train
) -> None:
    train.set(STORAGE_FROM="30", STORAGE_TIMES="1000")
    lasting = train("run", fault="storage", code=1)
    assert "checkpoint step-00000030 could not be" in lasting.output
    assert "look at its state, then start the run again" in lasting.output
    assert _names(tmp_path / "run") == ["latest", "step-00000015"]
    train.set(STORAGE_FROM="0", STORAGE_TIMES="4")
    passing = train("run", fault="storage")
    assert "resumed from" in passing.output
    assert "Stale file handle" in passing.output
    assert_same_bits(straight_run, tmp_path / "run")
