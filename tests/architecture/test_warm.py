"""Forks with their imports done behave as programs do: `tests/support/warm.py`."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import leftovers, warm
from tests.support.processes import wait_until
from tests.support.ranks import start

_MODULE = """
import os, sys, time
print(sys.argv[1:], os.environ["RANK"], os.getcwd(), "torch" in sys.modules, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
raise {"exit": SystemExit(7), "fail": ValueError("no number")}[sys.argv[1]]
"""


@pytest.fixture
def folder(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "forked.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _start(folder: Path, word: str, ranks: int = 1) -> list[warm.Fork]:
    forks = start([sys.executable, "-m", "forked", word], ranks, folder / "out")
    assert all(isinstance(fork, warm.Fork) for fork in forks)
    return [fork for fork in forks if isinstance(fork, warm.Fork)]


def test_forks_run_the_module_with_their_variables_folder_output_and_code(folder: Path) -> None:
    assert [fork.wait(60) for fork in _start(folder, "exit", 2)] == [7, 7]
    lines = sorted((folder / "out").read_text().splitlines())
    assert lines == [f"['exit'] {rank} {folder} True" for rank in range(2)]
    assert _start(folder, "fail")[0].wait(60) == 1
    assert "ValueError: no number" in (folder / "out").read_text()


def test_a_command_is_run_as_subprocess_runs_it(folder: Path) -> None:
    done = warm.run("postnorm", "config", "nosuch.yaml", cwd=folder)
    program = [sys.executable, "-m", "postnorm", "config", "nosuch.yaml"]
    expected = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (expected.returncode, expected.stdout,
                                                           expected.stderr)  # fmt: skip
    assert expected.returncode == 2
    assert "nosuch.yaml" in expected.stderr


def test_a_kill_ends_the_fork_itself(folder: Path) -> None:
    one, other = _start(folder, "wait", 2)
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.1)
    assert one.poll() is None
    one.kill()
    assert one.wait(60) == -signal.SIGKILL
    assert not Path(f"/proc/{one.pid}").exists()
    assert other.poll() is None
    other.send_signal(signal.SIGTERM)
    assert other.wait(60) == -signal.SIGTERM
    assert warm.running() == []


def test_a_fork_that_is_left_over_is_found(folder: Path) -> None:
    fork = _start(folder, "wait")[0]
    found = leftovers.left_by("any test")
    assert [left.process.pid for left in found] == [fork.pid]
    leftovers.end(found)
    assert fork.wait(60) == -signal.SIGKILL


def test_another_environment_is_new_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    processes = start([sys.executable, "-m", "forked", "exit"], 1, folder / "out")
    assert isinstance(processes[0], subprocess.Popen)
    assert processes[0].wait(60) == 7
    assert "False" in (folder / "out").read_text()


def test_forks_of_a_pytest_that_is_killed_end(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.support.ranks import start\n"
        "forks = start([sys.executable, '-m', 'forked', 'wait'], 1, Path('out'))\n"
        "print(forks[0].pid, flush=True); sys.stdin.read()"
    )
    variables = {**os.environ, "PYTHONPATH": str(warm.ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], env=variables, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as pytest_process:  # fmt: skip
        assert pytest_process.stdout
        pid = next(int(line) for line in pytest_process.stdout if line.strip().isdecimal())
        pytest_process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


_SCRIPT = """
import sys
loaded = {name.partition(".")[0] for name, module in sys.modules.items() if module}
print("transformers" in loaded, loaded & OURS, [sys.modules.get(name, 1) for name in ABSENT])
from huggingface_hub import is_offline_mode
from transformers.dynamic_module_utils import get_class_from_dynamic_module
print(get_class_from_dynamic_module("made.Made", sys.argv[1]).__module__, is_offline_mode())
raise ValueError(__name__)
"""


def test_a_script_has_transformers_its_variables_and_nothing_of_this_project(folder: Path) -> None:
    script = _SCRIPT.replace("OURS", repr({path.name for path in warm.ROOT.iterdir()}))
    script = script.replace("ABSENT", repr(warm.ABSENT))
    (folder / "made.py").write_text("class Made: pass\n")
    for number in "01":
        variables = {"HF_MODULES_CACHE": str(folder / number), "HF_HUB_OFFLINE": number}
        done = warm.run_script(script, folder, cwd=folder, variables=variables)
        loaded, made = done.stdout.splitlines()
        assert loaded == f"True set() {[None] * len(warm.ABSENT)}"
        assert re.fullmatch(rf"transformers_modules\..* {number == '1'}", made)
        assert len([*(folder / number).rglob("made.py")]) == done.returncode == 1
        assert done.stderr.endswith("ValueError: __main__\n")
