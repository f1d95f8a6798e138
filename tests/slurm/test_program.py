"""A user's program as a job: asked to stop, started again, done."""

import json
from pathlib import Path

import pytest

from launch.records import history
from tests.support.slurm import ENDED, SlurmCluster
from tests.support.slurm_runs import PROFILE, launch

# The first start waits to be asked; the second one has what the first one left. The second rank
# takes longer to save.
PROGRAM = """
trap 'sleep $((3 * RANK)); touch "$1/saved-$RANK"; exit 75' USR1
[ ! -e "$1/saved-$RANK" ] || exit 0
touch "$1/ready-$RANK"
while :; do sleep 0.1; done
"""


# It notes each start; the first job asks for another one, the next ends with the second word.
SHORT = """
echo "$SLURM_ARRAY_TASK_ID.$RANK" >>"$1/starts"
# srun ends all ranks with the first that fails, so none leaves before all are there.
until [ "$(grep -c "^$SLURM_ARRAY_TASK_ID\\." "$1/starts")" = 2 ]; do sleep 0.1; done
[ "$SLURM_ARRAY_TASK_ID" = 0 ] && exit 75
exit "$2"
"""


def _submit(cluster: SlurmCluster, run_dir: Path, *command: object, **profile: object) -> str:
    path = run_dir.with_suffix(".yaml")
    path.write_text(json.dumps({**PROFILE, **profile}))
    launch(cluster, "submit", "--program", run_dir, "--cluster", path, "--", *command)
    [record] = (run_dir / "launch").glob("*/submission.json")
    return str(json.loads(record.read_text())["job"])


@pytest.mark.slow
def test_a_chain_goes_on_until_a_verdict(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Where requeueing is forbidden: done and wrong both end the chain, and no job runs twice."""
    jobs = {}
    for code in (0, 2):
        notes = tmp_path / str(code)
        notes.mkdir()
        command = ("bash", "-c", SHORT, "x", notes, code)
        run_dir = tmp_path / f"tuned-{code}"
        jobs[code] = _submit(cluster, run_dir, *command, requeue=False, max_restarts=3)
    for code, word in ((0, "finished"), (2, "failed")):
        run_dir = tmp_path / f"tuned-{code}"

        def states(chain: str = f"{jobs[code]}_") -> dict[str, str]:
            return {job: state for job, state in cluster.jobs().items() if job.startswith(chain)}

        cluster.wait_until(lambda: set(states().values()) <= ENDED, "all have ended", timeout_s=200)
        ends = states()
        ran = [ends.pop(f"{jobs[code]}_{n}") for n in range(2)]
        assert ran == ["FAILED", "FAILED" if code else "COMPLETED"]
        # Those that never ran are one line, or one each.
        assert set(ends.values()) == {"CANCELLED"}
        starts = (tmp_path / str(code) / "starts").read_text().split()
        assert sorted(starts) == sorted(f"{n}.{rank}" for n in range(2) for rank in range(2))
        found = [(line["job"], line["decision"]) for line in history(run_dir)]
        assert found == [(f"{jobs[code]}_0", "requeue"), (f"{jobs[code]}_1", word)]
        # One log for all of them, and status names the verdict.
        assert (run_dir / "logs" / f"slurm-{jobs[code]}.log").read_text().count("start: job ") == 2
        assert word in launch(cluster, "status", run_dir).splitlines()[0]


def test_program_is_asked_to_save_and_started_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path / "tuned", "bash", "-c", PROGRAM, "x", tmp_path)
    cluster.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "two ranks", timeout_s=60)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait_for(job, timeout_s=90) == "COMPLETED"
    assert cluster.job(job)["Restarts"] == "1"
    assert [line["decision"] for line in history(tmp_path / "tuned")] == ["requeue", "finished"]
