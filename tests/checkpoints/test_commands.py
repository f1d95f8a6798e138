"""`python -m pipeline checkpoint ...` as it is typed, without torch where none is needed."""

import fcntl
import json
from functools import partial
from pathlib import Path

import pytest

from pipeline.checkpoints.commands import CHECKPOINT
from pipeline.checkpoints.manifest import state_file
from pipeline.errors import CheckpointError, RunFolderError
from pipeline.runtime import cli
from pipeline.runtime.checkpoints import FOLDER
from tests.support.checkpoints import make_checkpoint
from tests.support.processes import without

_command = partial(without, "torch numpy", "checkpoint")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10 to 40, a loss with each but the last; the rule keeps 20, 30 and 40."""
    for step in (10, 20, 30, 40):
        loss = None if step == 40 else abs(step - 20) / 10 + 1
        make_checkpoint(tmp_path / "run", step, held_out_loss=loss)
    (tmp_path / "run/resolved.yaml").write_text(
        "run_dir: run\ndata: {dir: data}\nmonitor: {eval_every_steps: 10}\n"
        "checkpoint: {every_steps: 10, keep: 2, keep_best: 1}\n"
    )
    return tmp_path / "run"


@pytest.mark.usefixtures("processes")
def test_list_and_verify(run: Path) -> None:
    text = _command("list", run).stdout.splitlines()
    assert text[0].split() == ["step", "cursor", "skipped", "alpha", "age", "MB", "ranks", "zero",
                               "held-out", "checked", "resume", "kept"]  # fmt: skip
    assert text[2].endswith("1.0000  manifest          best")
    assert text[4].endswith("-  manifest      <-  newest")

    (run / FOLDER / "step-00000040" / state_file(0, 1)).write_bytes(b"")
    # Its manifest is whole.
    found = json.loads(_command("list", run, "--json").stdout)
    assert [row["would_resume"] for row in found] == [False, False, False, True]
    found = json.loads(_command("list", run, "--json", "--verify").stdout)
    assert [row["would_resume"] for row in found] == [False, False, True, False]
    assert [row["kept"] for row in found] == [[], ["newest 2", "best"], ["newest"],
                                              ["damaged, newer"]]  # fmt: skip
    assert "has 0 bytes, expected" in found[3]["problems"][0]
    assert found[0]["manifest"]["bytes"] > 0

    done = _command("verify", run)
    assert (done.returncode, done.stdout.count(": good\n")) == (2, 3)
    assert f"step-00000040: {state_file(0, 1)} has 0 bytes, expected" in done.stdout
    assert done.stdout.endswith("3 of 4 checkpoints are good\n")
    done = _command("verify", run, "--step", 30)
    assert done.returncode == 0
    assert "values are not looked at, only hashes: " in done.stderr
    done = _command("verify", run, "--step", 31)
    assert done.returncode == 2
    assert "no checkpoint of step 31; it has those of 10, 20, 30, 40" in done.stderr


@pytest.mark.usefixtures("processes")
def test_prune(run: Path) -> None:
    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in (run / FOLDER).glob("step-*"))

    done = _command("prune", run)
    assert done.returncode == 0
    assert steps() == [10, 20, 30, 40]
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _command("prune", run, "--yes")
        assert done.returncode == 1
        assert "is in use by a running process" in done.stderr
        assert steps() == [10, 20, 30, 40]
    assert _command("prune", run, "--yes").returncode == 0
    assert steps() == [20, 30, 40]
    assert _command("prune", run, "--keep", 1, "--keep-best", 0, "--yes").returncode == 0
    assert steps() == [40]
    assert "nothing to remove" in _command("prune", run, "--keep", 1, "--yes").stdout
    assert steps() == [40]


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.parser_of("test", "", {"train": [CHECKPOINT]})

    def diff(*arguments: object) -> tuple[int, str]:
        """In this process, which has torch."""
        parsed = cli.parse(parser, ["checkpoint", "diff", *map(str, arguments)])
        return parsed.run(parsed), capsys.readouterr().out

    make_checkpoint(tmp_path / "a", 10, seed=1)
    make_checkpoint(tmp_path / "a", 20, seed=2)
    make_checkpoint(tmp_path / "b", 10, seed=1, world_size=3)
    make_checkpoint(tmp_path / "c", 10, seed=2, identity={"seed": 1, "model": {"layers": 3}})
    # The same state, saved by one rank and by three.
    code, text = diff(tmp_path / "a/10", tmp_path / "b")
    assert code == 0
    assert "world_size" not in text
    assert "2 of 2 parameters are equal" in text

    code, text = diff(tmp_path / "a", tmp_path / "c", "--json")
    assert code == 1
    found = json.loads(text)
    step, cursor, model = found["manifest"]
    assert (step, cursor) == ("step: 20 against 10", "cursor: 160 against 80")
    assert model == "identity.model: None against {'layers': 3}"
    assert found["state"]["tensors"] == []
    assert [text.split(":")[0] for text in found["state"]["others"]] == [
        "counter global_steps", "counter updates"
    ]  # fmt: skip

    code, text = diff(tmp_path / "a", "--steps", 10, 20)
    assert code == 1
    assert "0 of 2 parameters are equal" in text
    with pytest.raises(RunFolderError, match=r"none .*run_dir"):
        diff(tmp_path / "a", tmp_path / "none")
    with pytest.raises(CheckpointError, match="needs two checkpoints"):
        diff(tmp_path / "a")
