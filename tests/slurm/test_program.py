"""A user's program as a job: asked to stop, started again, done."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.slurm import SlurmCluster
from tests.support.slurm_runs import PROFILE, ROOT

# The first start waits to be asked; the second one has what the first one left.
PROGRAM = """
trap 'touch "$1/saved-$RANK"; exit 75' USR1
[ ! -e "$1/saved-$RANK" ] || exit 0
touch "$1/ready-$RANK"
while :; do sleep 0.1; done
"""


def test_program_is_asked_to_save_and_started_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    run_dir, profile = tmp_path / "tuned", tmp_path / "cluster.yaml"
    profile.write_text(json.dumps(PROFILE))
    done = subprocess.run(
        [sys.executable, "-m", "launch", "submit", "--program", str(run_dir), "--cluster",
         str(profile), "--", "bash", "-c", PROGRAM, "x", str(tmp_path)],
        cwd=ROOT, env=cluster.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = (run_dir / "launch").glob("*/submission.json")
    job = json.loads(record.read_text())["job"]
    cluster.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 4, "four ranks", timeout_s=60)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait_for(job, timeout_s=90) == "COMPLETED"
    assert cluster.job(job)["Restarts"] == "1"
    history = (run_dir / "launch" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["decision"] for line in history] == ["requeue", "finished"]
