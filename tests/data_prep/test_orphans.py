"""What a killed stage leaves: no workers, and no word that outlives the task."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from data_prep.stage import Stage, StageTask, make_key, run_tasks, state_of
from pipeline.runtime.files import is_alive
from tests.support.processes import wait_until


@pytest.mark.usefixtures("processes")
def test_workers_of_a_killed_process_end_and_their_tasks_are_stopped(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "tests.support.sleeping_stage", tmp_path])
    tasks = [StageTask(str(number), tmp_path, "key", None) for number in range(2)]
    wait_until(lambda: {state_of(task).name for task in tasks} == {"running"}, process)
    workers = [json.loads(task.path(".running.json").read_text())["process"] for task in tasks]
    assert len({process.pid, *workers}) == 3
    for task, worker in zip(tasks, workers, strict=True):
        assert f"process {worker}," in state_of(task).text
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(is_alive, workers)))
    assert {state_of(task).name for task in tasks} == {"stopped"}
    run_tasks(Stage("stage", tasks, _no_work), workers=1)
    assert {state_of(task).name for task in tasks} == {"done"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.done.json", "1.done.json"]


@pytest.mark.usefixtures("processes")
def test_word_of_a_task_killed_after_its_record_is_removed(tmp_path: Path) -> None:
    task = StageTask("0", tmp_path, make_key("a"), None)
    process = multiprocessing.get_context("spawn").Process(target=_die_after_record, args=(task,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert task.path(".running.json").exists()
    assert state_of(task).name == "done"
    run_tasks(Stage("stage", [task], _no_work), workers=1)
    assert not task.path(".running.json").exists()


def _no_work(task: StageTask[None]) -> tuple[dict[str, Any], list[Path]]:
    del task
    return {}, []


def _die_after_record(task: StageTask[None]) -> None:
    record = task.marker

    class DiesWhenDone:
        """In place of the thread that touches the file; joined once the record is written."""

        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            pass

        def join(self) -> None:
            if record.exists():
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread = DiesWhenDone  # type: ignore[assignment,misc]
    run_tasks(Stage("stage", [task], _no_work), workers=1)
