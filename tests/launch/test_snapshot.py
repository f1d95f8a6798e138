"""The copy of the code: complete, verified, and what runs."""

import shutil
from pathlib import Path

import pytest

from launch.records import SnapshotError, code_hash, snapshot, snapshot_for, start_file
from tests.support.processes import python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the packages that a test can change."""
    for package in ("pipeline", "launch", "data_prep", "postnorm", "configs"):
        shutil.copytree(ROOT / package, tmp_path / "checkout" / package, symlinks=True,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    return tmp_path / "checkout"


def _start(code: Path, *words: str, cwd: Path) -> str:
    return python(code / "pipeline" / "runtime" / "start.py", *words, cwd=cwd)


@pytest.mark.usefixtures("processes")
def test_job_runs_the_copy_inside_an_edited_checkout(checkout: Path, tmp_path: Path) -> None:
    code = snapshot(tmp_path / "code", checkout)
    assert code == tmp_path / "code" / code_hash(checkout)
    # Edited after the submission; the job's current folder is this very checkout.
    (checkout / "pipeline" / "__init__.py").write_text("raise SystemExit('the edited code ran')\n")
    shown = _start(code, "pipeline", "config", str(ROOT / "configs/demo.yaml"), cwd=checkout)
    assert "run_dir: runs/demo/train" in shown
    shutil.rmtree(checkout / "configs")  # the copy has its own, in place of the checkout's link
    assert "num_layers: 12" in _start(code, "pipeline", "config", "roformer_v2-base", cwd=tmp_path)
    # What the run starts in other processes is the copy, too.
    script = (
        f"import sys; sys.path.insert(0, {str(code)!r}); from pipeline.runtime import env; "
        f"import subprocess; subprocess.run([*env.module_command('pipeline.runtime.probe_me')])"
    )
    (code / "pipeline" / "runtime" / "probe_me.py").write_text("print(__file__)")
    shown = python("-c", script, cwd=checkout).strip()
    assert shown == str(code / "pipeline" / "runtime" / "probe_me.py")


@pytest.mark.usefixtures("processes")
def test_a_copy_has_the_machine_code_of_numba(checkout: Path, tmp_path: Path) -> None:
    script = (
        "from pipeline.data import random; random.permutation(2, seed=0, purpose=0, epoch=0); "
        "print(random.__file__, sum(random._sort_keys.stats.cache_hits.values()))"
    )

    def loaded(code: Path) -> int:
        place, number = python("-c", script, cwd=code).split()
        assert place == f"{code}/pipeline/data/random.py"
        return int(number)

    assert (loaded(checkout), loaded(snapshot(tmp_path / "before", checkout))) == (0, 1)
    with (checkout / "pipeline/data/random.py").open("a") as file:
        file.write("# another content\n")
    assert loaded(snapshot(tmp_path / "after", checkout)) == 0


def test_second_submission_uses_the_same_copy(checkout: Path, tmp_path: Path) -> None:
    first = snapshot(tmp_path / "code", checkout)
    (first / "pipeline" / "__pycache__").mkdir()  # what the job's Python leaves there
    (first / "pipeline" / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert snapshot(tmp_path / "code", checkout) == first
    (checkout / "launch" / "new.py").touch()
    assert snapshot(tmp_path / "code", checkout) != first
    assert len(list((tmp_path / "code").iterdir())) == 2


def test_a_changed_copy_and_a_script_of_other_code_are_refused(
    checkout: Path, tmp_path: Path
) -> None:
    (snapshot(tmp_path / "code", checkout) / "launch" / "render.py").write_text("")
    with pytest.raises(SnapshotError, match="a file in it was changed"):
        snapshot(tmp_path / "code", checkout)
    snapshot_for(start_file(tmp_path), tmp_path)
    with pytest.raises(SnapshotError, match="edited"):
        snapshot_for(tmp_path / "0123456789abcdef/pipeline/runtime/start.py", tmp_path)
