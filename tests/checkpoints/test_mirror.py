"""Copies of checkpoints: whole ones, of this run, kept as the run keeps its own."""

import fcntl
import shutil
import time
from pathlib import Path
from threading import Event

import pytest

from pipeline.checkpoints.background import Mirror
from pipeline.checkpoints.manifest import Retention, state_file, verify
from pipeline.errors import ConfigError
from pipeline.runtime.checkpoints import FOLDER, published
from pipeline.runtime.run_folder import RunFolder
from tests.support.checkpoints import make_checkpoint


def _steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in published(folder / FOLDER)]


def _copy(mirror: Mirror) -> None:
    mirror.request()
    mirror.finish()


def test_copies_follow_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, target = tmp_path / "run", tmp_path / "copies"
    for step in (10, 20, 30):
        make_checkpoint(run, step, world_size=2)
    (run / FOLDER / "step-00000020" / state_file(1, 2)).write_bytes(b"")
    # Of processes that were killed.
    (target / FOLDER / ".copying-step-00000030").mkdir(parents=True)
    (target / FOLDER / ".removing-step-00000005").mkdir()
    mirror = Mirror(run, target, Retention(2))
    _copy(mirror)
    # What is damaged here is not copied, and said.
    assert _steps(target) == [30, 10]
    assert "step-00000020" in caplog.text
    assert sorted(path.name for path in (target / FOLDER).iterdir()) == [
        "latest", "step-00000010", "step-00000030"
    ]  # fmt: skip

    shutil.rmtree(run / FOLDER / "step-00000010")
    shutil.rmtree(run / FOLDER / "step-00000020")
    make_checkpoint(run, 40)
    # Step 30 was trained again, from another place.
    shutil.rmtree(run / FOLDER / "step-00000030")
    make_checkpoint(run, 30, seed=9)
    mirror.request()
    _copy(mirror)
    assert _steps(target) == [40, 30]
    for path in published(target / FOLDER):
        verify(path)
        assert (path / "manifest.json").read_bytes() == (
            run / FOLDER / path.name / "manifest.json"
        ).read_bytes()
    assert (target / FOLDER / "latest").read_text() == "step-00000040\n"


def test_copies_of_a_way_that_was_left_go(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copies"
    for step in (400, 500):
        make_checkpoint(run, step)
    mirror = Mirror(run, target, Retention(2))
    _copy(mirror)
    shutil.rmtree(run / FOLDER / "step-00000500")  # the run went back
    _copy(mirror)
    assert _steps(target) == [400]
    make_checkpoint(run, 450)
    _copy(mirror)
    assert _steps(target) == [450, 400]
    # A folder that lost all of them has not gone back.
    shutil.rmtree(run / FOLDER)
    _copy(mirror)
    assert _steps(target) == [450, 400]


def test_the_ledger_of_the_run_is_copied(tmp_path: Path) -> None:
    run, target = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "copies")
    make_checkpoint(run.path, 10)
    run.ledger.write_text("what was left out\n")
    mirror = Mirror(run.path, target.path, Retention(2))
    _copy(mirror)
    assert target.ledger.read_text() == run.ledger.read_text()
    # A folder that lost all has not begun anew; one that has a new checkpoint has.
    run.ledger.unlink()
    lost = run.checkpoints.rename(tmp_path / "lost")
    _copy(mirror)
    assert target.ledger.read_text() == "what was left out\n"
    lost.rename(run.checkpoints)
    _copy(mirror)
    assert target.ledger.read_text() == ""


def test_failures_warn_and_are_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, target = tmp_path / "run", tmp_path / "copies"
    make_checkpoint(run, 10)
    target.touch()
    mirror = Mirror(run, target, Retention(1))
    _copy(mirror)
    assert str(target) in caplog.text
    target.unlink()
    target.mkdir()
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _copy(mirror)
        assert _steps(target) == []
    _copy(mirror)
    assert _steps(target) == [10]


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", 10)
    _copy(Mirror(tmp_path / "one", tmp_path / "copies", Retention(1)))
    with pytest.raises(ConfigError, match=r"copies .*/one, .*two"):
        Mirror(tmp_path / "two", tmp_path / "copies", Retention(1))


def test_folder_of_the_run_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "same").symlink_to("run")
    with pytest.raises(ConfigError, match="run_dir itself"):
        Mirror(tmp_path / "run", tmp_path / "same", Retention(1))


def test_a_copy_that_takes_its_time_gives_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, beats = Mirror(tmp_path / "run", tmp_path / "copies", Retention(2)), Event()
    monkeypatch.setattr(mirror, "_copy_missing", lambda: beats.wait(60))
    mirror.request()
    mirror.finish(beats.set)  # it ends with the first of them
    assert beats.is_set()


def test_a_copy_that_hangs_gives_no_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, beats = Mirror(tmp_path / "run", tmp_path / "copies", Retention(2)), list[int]()

    def copy() -> None:
        for _ in range(3):
            mirror._num_moved += 1
            time.sleep(0.3)
        time.sleep(2)

    monkeypatch.setattr(mirror, "_copy_missing", copy)
    mirror.request()
    mirror.finish(lambda: beats.append(1))
    assert 2 <= len(beats) <= 4
