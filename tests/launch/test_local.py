"""Programs of the user as ranks of a job, and commands side by side."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from launch.decide import Limits
from launch.local import run_local, run_side_by_side
from launch.records import FINETUNE, FOLDER, PRETRAIN, PROGRAM, history
from pipeline.runtime.env import module_command
from tests.launch.test_submit import START
from tests.support.processes import Processes, output, wait_until

Rank = Callable[..., "Popen[str]"]


@pytest.fixture
def rank(processes: Processes, tmp_path: Path) -> Rank:
    """Starts a program as rank 1 of a job."""
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": "1", "SLURM_JOB_ID": "7",
                 "POSTNORM_RUN_DIR": str(tmp_path)}  # fmt: skip

    def start(*words: str) -> "Popen[str]":
        return processes.start([*START, "rank", "--", *words], env={**os.environ, **variables})

    return start


def _record(run_dir: Path) -> str:
    return (run_dir / "exit" / "7.0" / "rank-00001").read_text().strip()


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 75", 75), ("exit 9", 9), ("kill -9 $$", 137), ("", 2)],
)
def test_exit_code_is_the_program_s(rank: Rank, tmp_path: Path, script: str, code: int) -> None:
    """A program that does not exist is a mistake of the user, which is not tried again.

    A rank that has saved must not look like one that failed: srun would end those that still save.
    """
    started = rank("bash", "-c", script) if script else rank("no-such-program")
    said = started.communicate(timeout=120)[0]
    assert ("no-such-program cannot be started" in said) == (not script)
    assert started.returncode == (0 if code == 75 else code)
    assert _record(tmp_path) == str(code)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_reach_the_program(rank: Rank, tmp_path: Path, number: signal.Signals) -> None:
    script = f"trap 'exit 75' {number.name}; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    started = rank("bash", "-c", script)
    wait_until((tmp_path / "ready").exists)
    started.send_signal(number)
    assert started.wait(120) == 0
    assert _record(tmp_path) == "75"


@pytest.mark.usefixtures("processes")
def test_side_by_side_commands_divide_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    script = (
        f"echo $CUDA_VISIBLE_DEVICES; cd {tmp_path}; touch $0; "
        "until [ -e a ] && [ -e b ]; do sleep 0.05; done; [ $0 != b ] || exit 9"
    )
    commands = {name: (["bash", "-c", script, name], tmp_path / f"{name}.log") for name in "abc"}
    assert run_side_by_side(commands, jobs=2, ranks=2) == {"a": 0, "b": 9, "c": 0}
    # The first two run at the same time: each waits for the other.
    assert {(tmp_path / f"{name}.log").read_text() for name in "ab"} == {"4,5\n", "6,7\n"}
    assert (tmp_path / "c.log").read_text() in ("4,5\n", "6,7\n")


@pytest.mark.usefixtures("processes")
def test_local_starts_keep_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")  # in the shell of an allocation
    (tmp_path / FOLDER).mkdir()
    script = f"[ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; exit 1; }}"
    words = ["launch", "rank", "--", "bash", "-c", script]
    assert run_local(words, PROGRAM, tmp_path, 1, Limits(1, 9)) == 0
    # Under the names that the history has, by which `status` joins the two.
    codes = {f"{line['job']}.{line['restart']}": line["codes"] for line in history(tmp_path)}
    assert list(codes.values()) == [[1], [0]]
    records = tmp_path.glob("exit/*/*")
    assert {path.parent.name: [int(path.read_text())] for path in records} == codes


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", [PRETRAIN, FINETUNE])
def test_a_run_of_a_sweep_is_judged_as_one_alone(tmp_path: Path, kind: str) -> None:
    """Not as a program, of which a STOP file is a failure and a checkpoint no progress."""
    words = [*module_command("pipeline"), kind, str(tmp_path / "no.yaml")]
    output(*START, "submit", "--program", str(tmp_path), "--local", "--", *words, code=2)
    assert [line["kind"] for line in history(tmp_path)] == [kind]
