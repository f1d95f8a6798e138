"""Jobs on their way into the queue: none is lost, and each is what its script asks for."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from launch.pending_submission import INTENT_FILE, differences, options_of, submitting
from launch.slurm import NoAnswerError, passed_on, withheld
from pipeline.errors import BusyError, ConfigError
from tests.support.fake_slurm import FakeSlurm, interruptible

SCRIPT = """#!/bin/bash
#SBATCH --comment='/runs/a b'
#SBATCH --nodes=8
#SBATCH --cpus-per-task=24
#SBATCH --time=36:00:00
#SBATCH --partition=h200,h100
#SBATCH --account=Mine
#SBATCH --qos=normal
#SBATCH --mem=500G
#SBATCH --gres=gpu:h200:8
#SBATCH --requeue
srun true
"""
SHOWN = {"Partition": "h100", "Account": "mine", "QOS": "normal", "TimeLimit": "1-12:00:00",
         "NumNodes": "8", "cpus-per-task": "24", "MinMemory": "500G",
         "tres-per-node": "gres:gpu:h200:8", "Reservation": "(null)", "Requeue": "1",
         "Comment": "/runs/a b"}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"tres-per-node": "gres/gpu:h200=8"}, {"tres-per-node": "gres/gpu:h200:8,gres/nvme:1"},
     {"QOS": "(null)", "Account": "(null)"}, {"MinMemory": "512000M"}, {"NumNodes": "8-8"},
     {"Reservation": "maintenance"}, {"Partition": "h100,h200"},
     {"tres-per-node": "gres:nvme:1,gres:gpu:h200:8"}],
    ids=str,
)  # fmt: skip
def test_the_same_job_however_it_is_written(changes: dict[str, str]) -> None:
    assert differences(options_of(SCRIPT), {**SHOWN, **changes}) == []


@pytest.mark.parametrize(
    ("field", "value", "asked"),
    [("Partition", "debug", "--partition=h200,h100"), ("Account", "other", "--account=Mine"),
     ("TimeLimit", "30:00", "--time=36:00:00"), ("TimeLimit", "UNLIMITED", "--time=36:00:00"),
     ("NumNodes", "4", "--nodes=8"), ("cpus-per-task", "1", "--cpus-per-task=24"),
     ("MinMemory", "62.50G", "--mem=500G"),
     ("tres-per-node", "gres:gpu:a100:8", "--gres=gpu:h200:8"),
     ("tres-per-node", "gres:gpu:h200:4", "--gres=gpu:h200:8"),
     ("tres-per-node", "", "--gres=gpu:h200:8"), ("Requeue", "0", "--requeue"),
     ("Comment", "site", "--comment=/runs/a b")],
)  # fmt: skip
def test_every_difference_is_named(field: str, value: str, asked: str) -> None:
    [found] = differences(options_of(SCRIPT), {**SHOWN, field: value})
    assert found.startswith(f"{asked}, SLURM has {field} {value}")


def _submit(folder: Path) -> str:
    """Submit as the launcher does: what is left of it is withdrawn after an error."""
    with submitting(folder, folder, list) as intent:
        try:
            return intent.queue([], "#!/bin/bash\n#SBATCH --comment=mine\n")
        except BaseException:
            intent.withdraw()
            raise


def _left(folder: Path) -> object:
    """What the next submission finds; None if there is nothing."""
    path = folder / "launch" / INTENT_FILE
    return json.loads(path.read_text()) if path.exists() else None


def _queued(slurm: FakeSlurm, job: str, comment: Path | str) -> None:
    line = f"{job}|{job}|PENDING|Priority|gpu|(null)|0|1|N/A|N/A|1:00|0|{comment}"
    (slurm.folder / "queue").write_text(f"{line}\n")


def test_ctrl_c_after_sbatch_cancels_the_job(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.add("squeue", 'kill -INT "$PPID"')
    with interruptible(), pytest.raises(KeyboardInterrupt):
        _submit(tmp_path)
    assert slurm.lines("cancelled") == ["101"]
    assert _left(tmp_path) is None


def test_job_whose_record_cannot_be_written_is_cancelled(tmp_path: Path, slurm: FakeSlurm) -> None:
    home = tmp_path / "launch"
    slurm.add("sbatch", f"rm -r {home}; touch {home}; echo 101")
    with pytest.raises(OSError, match=f"Not a directory: '{home}/.*tmp"):
        _submit(tmp_path)
    assert slurm.lines("cancelled") == ["101"]


def test_job_that_cannot_be_cancelled_is_found_whatever_its_comment(
    tmp_path: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    (slurm.folder / "plugin").write_text('{"comment": "site"}')
    slurm.add("scancel", "echo 'scancel: error: Access denied' >&2; exit 1")
    with pytest.raises(ConfigError, match="SLURM has Comment site"):
        _submit(tmp_path)
    assert "scancel 101" in caplog.text
    _queued(slurm, "101", "site")
    with pytest.raises(BusyError, match=f"process {os.getpid()} .* job 101"):
        _submit(tmp_path)
    assert len(slurm.calls) == 1
    (slurm.folder / "plugin").unlink()
    _queued(slurm, "102", "site")  # another's, with a comment of no run
    assert _submit(tmp_path) == "102"
    assert _left(tmp_path) is None


def test_mute_sbatch(tmp_path: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture) -> None:
    real = (slurm.folder / "sbatch").rename(slurm.folder / "real")
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    slurm.add("sbatch", f"{real} >/dev/null; echo '{said}' >&2; exit 1")
    with pytest.raises(NoAnswerError):
        _submit(tmp_path)
    assert "a job may be in the queue" in caplog.text
    assert _left(tmp_path)
    _queued(slurm, "101", tmp_path)
    with pytest.raises(BusyError, match="job 101"):
        _submit(tmp_path)
    assert len(slurm.calls) == 1
    (slurm.folder / "queue").write_text("")
    real.rename(slurm.folder / "sbatch")
    assert _submit(tmp_path) == "102"
    assert _left(tmp_path) is None


def test_refusal_of_sbatch_leaves_nothing(tmp_path: Path, slurm: FakeSlurm) -> None:
    (slurm.folder / "fails_at").write_text("101")
    with pytest.raises(Exception, match="violates accounting/QOS policy"):
        _submit(tmp_path)
    assert _left(tmp_path) is None
    assert slurm.lines("cancelled") == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_does_not_stop_a_submission(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, number: int,
) -> None:  # fmt: skip
    def refuse(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    # No such file system can be mounted here.
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert _submit(tmp_path) == "101"
    assert os.strerror(number) in caplog.text


def test_jobs_get_variables_but_slurms_and_the_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ["PATH", "HOME", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "HF_HOME", "TORCH_HOME",
            "NCCL_DEBUG", "http_proxy", "https_proxy", "no_proxy", "LD_LIBRARY_PATH", "PYTHONPATH",
            "CUDA_HOME", "OMP_NUM_THREADS", "LOADEDMODULES", "TMPDIR", "KRB5CCNAME", "SLURM_CONF",
            "POSTNORM_SCRATCH", "XDG_CACHE_HOME", "RANKING"]  # fmt: skip
    taken = ["SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_CPU_BIND", "SLURMD_NODENAME", "SRUN_DEBUG",
             "SQUEUE_FORMAT", "SSH_CONNECTION", "SSH_AUTH_SOCK", "DISPLAY", "XAUTHORITY",
             "XDG_SESSION_ID", "XDG_RUNTIME_DIR", "TMUX", "RANK", "WORLD_SIZE", "MASTER_ADDR",
             "POSTNORM_START"]  # fmt: skip
    for name in (*kept, *taken):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    assert set(kept) <= passed_on().keys()
    assert not set(taken) & passed_on().keys()
    assert set(taken) <= set(withheld())
    assert not set(kept) & set(withheld())
