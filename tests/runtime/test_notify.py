"""A user's command is told of events: what it gets, and what goes wrong with it."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import notify
from pipeline.runtime.notify import Notifier, notify_end
from tests.support.processes import wait_until


def _command(folder: Path) -> str:
    """A line for the shell that keeps its standard input."""
    return f"cat >>{folder}/received"


def _received(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "received").read_text().splitlines()]


def test_a_command_receives_events_in_their_order(tmp_path: Path) -> None:
    notifier = Notifier(_command(tmp_path), tmp_path / "mine", "7.0")
    notifier.send(notify.STARTED, "from step 0")
    notifier.send(notify.WENT_BACK, "to step 6: the loss jumped")
    notifier.finish()
    first, second = _received(tmp_path)
    assert first["unix_s"] == pytest.approx(time.time(), abs=60)
    assert (first["event"], first["run"], first["job"]) == ("started", "mine", "7.0")
    assert first["run_dir"] == str(tmp_path / "mine")
    assert second["text"] == "mine: went back: to step 6: the loss jumped"


@pytest.mark.parametrize(
    ("word", "goes_on", "event"),
    [("requeue", True, "requeued"), ("requeue", False, "stopped"), ("failed", True, "failed")],
)
def test_the_launcher_tells_how_an_attempt_ended(
    tmp_path: Path, word: str, goes_on: bool, event: str
) -> None:
    command = json.dumps(_command(tmp_path))
    folder = tmp_path / "mine/launch/0001"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run_dir: mine\nnotify:\n  command: {command}\n")
    notify_end(tmp_path / "mine", "7.1", word, "rank 0 died", goes_on=goes_on)
    [received] = _received(tmp_path)
    assert (received["event"], received["job"]) == (event, "7.1")
    assert received["text"] == f"mine: {event}: rank 0 died"


@pytest.mark.parametrize(
    ("command", "limit_s", "warning"),
    [
        ("until [ -e {sent} ]; do sleep 0.05; done; echo no such hook >&2; exit 7", 60.0,
         "notify.command ended with code 7: no such hook"),
        ("sleep 60 & sleep 60", 0.3, "notify.command was killed: it took longer than 0.3 s"),
    ],
    ids=["fails", "takes too long"],
)  # fmt: skip
def test_failure_only_warns_and_nothing_waits_for_it(
    tmp_path: Path, command: str, limit_s: float, warning: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(notify, "_LIMIT_S", limit_s)
    notifier = Notifier(command.format(sent=tmp_path / "sent"), tmp_path, "7.0")
    notifier.send(notify.STARTED, "from step 0")
    (tmp_path / "sent").touch()  # the first command ends only after this
    with caplog.at_level(logging.WARNING):
        notifier.finish()
        wait_until(lambda: caplog.messages)
    assert caplog.messages == [warning]


def test_a_decision_stands_where_storage_fails(caplog: pytest.LogCaptureFixture) -> None:
    notify_end(Path("nowhere"), "7.1", "failed", "why")  # a run without a command
    assert not caplog.text
    # Such a name is an error of the system, as a stale mount is.
    notify_end(Path("/" + 300 * "x"), "7.0", "requeue", "the attempt saved")
    assert "notify.command was not run" in caplog.text
