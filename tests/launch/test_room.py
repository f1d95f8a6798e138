"""Room in the queue: limits as accounting prints them, and arrays that wait until they fit."""

import json
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig, PrepJobsConfig
from launch.prep import ARRAYS_FILE, PrepDraft, PrepJob, StagePlan, render_prep, submit
from launch.queue import Quota, room_of
from launch.records import FAILED_MARK, next_number, read_prep, submission_folder, write_prep
from launch.site import submit_limit
from launch.slurm import TooManyJobsError
from pipeline.errors import BusyError, PostnormError
from tests.support.fake_slurm import FakeSlurm, interruptible

# `sacctmgr show assoc` with account, qos and maxsubmitjobs; `show qos` with name and
# maxsubmitjobsperuser.
OWN = "physics|normal,long|1000\nml|normal|\n"
QOS = "normal|500\nlong|200\ndebug|\n"


@pytest.mark.parametrize(
    ("account", "qos", "limit"),
    [
        ("", "", 1000),  # which of two QOS is not known
        ("physics", "normal", 500),
        ("physics", "long", 200),
        ("physics", "debug", 1000),
        ("ml", "", 500),  # its only QOS
        ("ml", "debug", None),
        ("other", "", None),
    ],
)
def test_smallest_of_account_and_qos_counts(
    account: str, qos: str, limit: int | None, slurm: FakeSlurm
) -> None:
    _accounting(slurm)
    assert submit_limit(account, qos) == limit


def _accounting(slurm: FakeSlurm) -> None:
    (slurm.folder / "config").write_text("AccountingStorageEnforce = associations,limits,qos\n")
    for name, text in (("assoc", OWN), ("qos", QOS)):
        (slurm.folder / name).write_text(text)
    slurm.add("sacctmgr", f'cat "{slurm.folder}/$4"')


def test_profile_comes_before_accounting_and_arrays_leave_room(slurm: FakeSlurm) -> None:
    _accounting(slurm)
    found = ClusterConfig(account="physics", qos="normal", prep=PrepJobsConfig(qos="long"))
    assert room_of(found, prep=False, every_s=None).limit == 500
    assert room_of(found, prep=True, every_s=None).limit == 200
    assert room_of(ClusterConfig(max_submit_jobs=7), prep=True, every_s=None).limit == 7
    (slurm.folder / "config").write_text("AccountingStorageEnforce = associations\n")
    assert room_of(found, prep=False, every_s=None).limit == 0
    assert [Quota(limit).array_size(1001) for limit in (0, 3, 100, 10_000)] == [1001, 1, 25, 1001]


def _draft(output: Path, limit: int = 8) -> PrepDraft:
    """Two arrays of two elements, then one."""
    work = output / "work"
    folder = submission_folder(work, next_number(work))
    job = PrepJob(name="web", config_path=str(folder / "config.yaml"), start=("-m",),
                  output_dir=str(output), work_dir="/")  # fmt: skip
    prep = PrepJobsConfig(array_tasks=4, max_concurrent=2, cores=1)
    cluster = ClusterConfig(max_submit_jobs=limit, prep=prep)
    plans = [StagePlan("ingest", 4, 1, 0.5), StagePlan("dedup", 1, 1, 0.5)]
    return PrepDraft(render_prep(plans, cluster, job), job, folder, "output_dir: d\n", cluster)


def _queue(slurm: FakeSlurm, folder: Path, *jobs: str) -> None:
    line = "{0}|{1}|PENDING|Priority|gpu|(null)|0|1|N/A|N/A|1:00|0|{2}\n"
    text = "".join(line.format(job, job.partition("_")[0], folder) for job in jobs)
    (slurm.folder / "queue").write_text(text)


def _sizes(slurm: FakeSlurm) -> list[str]:
    return [script.partition("--array=")[2].partition("\n")[0] for _, script in slurm.calls]


def test_what_does_not_fit_is_told_before_a_submission(tmp_path: Path, slurm: FakeSlurm) -> None:
    _queue(slurm, tmp_path, "7", "8_1", "8_2", "8_3")
    with pytest.raises(TooManyJobsError, match=r"4 of 8 jobs .*--wait-room"):
        submit(_draft(tmp_path), Quota(8))
    assert not slurm.calls
    _queue(slurm, tmp_path)
    assert submit(_draft(tmp_path), Quota(8)) == {"ingest": ["101", "102"], "dedup": ["103"]}
    assert _sizes(slurm) == ["0-1%1", "0-1%1", "0-0%2"]


def test_arrays_wait_for_those_before_to_end(tmp_path: Path, slurm: FakeSlurm) -> None:
    """Every third look finds two elements of the newest array ended."""
    shown = f"""
        [[ "$*" != *tres-per-node* ]] || exec cat {slurm.folder}/job
        echo x >>{slurm.folder}/looks; looks=$(wc -l <{slurm.folder}/looks)
        [ $((looks % 3)) = 0 ] || for job in 1 2; do
          echo "$job|$job|RUNNING|None|gpu|n|0|1|1|N/A|1:00|0|{tmp_path}"; done"""
    slurm.add("squeue", shown)
    submit(_draft(tmp_path), Quota(3, every_s=0.01))
    assert _sizes(slurm) == ["0-1%1", "0-1%1", "0-0%2"]
    assert len(slurm.lines("looks")) >= 6


def test_ended_submission_goes_on_without_a_job_twice(tmp_path: Path, slurm: FakeSlurm) -> None:
    """It is interrupted after sbatch, before the second array's job is on record."""
    room = Quota(8, every_s=0.01)
    shown = f"""
        [[ "$*" == *tres-per-node* ]] || exec cat {slurm.folder}/queue
        [ "$(wc -l <{slurm.folder}/calls.jsonl)" != 2 ] || kill -INT "$PPID"
        cat {slurm.folder}/job"""
    slurm.add("squeue", shown)
    with interruptible(), pytest.raises(KeyboardInterrupt):
        submit(_draft(tmp_path), room)
    arrays = json.loads((tmp_path / "work/launch/0001" / ARRAYS_FILE).read_text())
    assert [one["job"] for one in arrays] == ["101", "", ""]
    assert read_prep(tmp_path).waiting == 2
    _queue(slurm, tmp_path, "101_0", "102_0")
    with pytest.raises(BusyError, match=r"1 arrays .*--wait-room"):
        submit(_draft(tmp_path), Quota(8))
    jobs = submit(_draft(tmp_path), room)
    assert jobs == {"ingest": ["101", "102"], "dedup": ["103"]}
    assert len(slurm.calls) == 3
    found = read_prep(tmp_path)
    assert (found.waiting, found.jobs) == (0, jobs)


@pytest.mark.parametrize("why", ["failed", "cancelled"])
def test_no_more_is_submitted_after_an_end(tmp_path: Path, slurm: FakeSlurm, why: str) -> None:
    draft = _draft(tmp_path)
    (slurm.folder / "fails_at").write_text("102")
    room = Quota(8, every_s=0.01)

    class Ends(Quota):
        def pause(self) -> None:
            if why == "failed":
                (draft.folder / f"{FAILED_MARK}ingest").write_text("part 1 of 4")
            else:
                found = read_prep(tmp_path)
                write_prep(tmp_path, type(found)(found.jobs, 1.0, 2.0, found.waiting))

    expected = "stage ingest failed, so 2 arrays" if why == "failed" else "was cancelled: nothing"
    with pytest.raises(PostnormError, match=expected):
        submit(draft, Ends(8, every_s=0.01))
    assert len(slurm.calls) == 2
    # The next call begins anew.
    (slurm.folder / "fails_at").unlink()
    submit(_draft(tmp_path), room)
    assert len(slurm.calls) == 5
