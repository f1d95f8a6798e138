"""Data preparation as job arrays: every part once, complete dependencies, retries, submission."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig, PrepJobsConfig
from launch.prep import PrepDraft, PrepJob, PrepStage, StagePlan, dry_run_text, render_prep, submit
from launch.records import PREP_RECORD, next_number, submission_folder
from launch.site import within_site
from launch.slurm import SlurmError
from pipeline.config.load import load
from pipeline.errors import BusyError, ConfigError
from tests.support.fake_slurm import FakeSlurm
from tests.support.processes import output, write_program

ROOT = Path(__file__).parents[2]
PLANS = [
    StagePlan("ingest", max_tasks=2500, core_hours=100, memory_gb=0.7),
    StagePlan("dedup", max_tasks=1, core_hours=1.5, memory_gb=7.2),
    StagePlan("shards", max_tasks=10, core_hours=1, memory_gb=0.5),
]


def _render(plans: list[StagePlan] = PLANS, *, output_dir: str = "data", work_dir: str = "/work",
            config_path: str = "web.yaml", cluster: dict[str, object] | None = None,
            **prep: object) -> list[PrepStage]:  # fmt: skip
    profile = ClusterConfig(prep=PrepJobsConfig(**prep), **(cluster or {}))  # type: ignore[arg-type]
    job = PrepJob(name=Path(config_path).stem, config_path=config_path, start=("-m",),
                  output_dir=output_dir, work_dir=work_dir)  # fmt: skip
    return render_prep(plans, profile, job)


def _draft(output_dir: Path, stages: list[PrepStage]) -> PrepDraft:
    work = output_dir / "work"
    folder = submission_folder(work, next_number(work))
    job = PrepJob(
        name="web", config_path="web.yaml", start=("-m",), output_dir=str(output_dir), work_dir="/"
    )
    return PrepDraft(stages, job, folder, "output_dir: data\n", ClusterConfig())


def _options(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    assert len(found) == len({name for name, _ in found})
    return dict(found)


def _parts(script: str) -> tuple[range, int]:
    """The parts that an array does, and how many of them at once (0: all)."""
    array = re.fullmatch(r"0-(\d+)(?:%(\d+))?", _options(script)["array"])
    first = re.search(r"^first_rank=(\d+)$", script, re.MULTILINE)
    return range(int(first[1]), int(first[1]) + int(array[1]) + 1), int(array[2] or 0)


@pytest.mark.parametrize(
    ("array_tasks", "max_array_size", "arrays"),
    [(2500, 1001, 3), (1001, 1001, 1), (1002, 1001, 2), (7, 3, 3), (5, 1, 5), (1, 1001, 1)],
)
def test_every_part_is_in_one_array(array_tasks: int, max_array_size: int, arrays: int) -> None:
    ingest, dedup, _ = _render(array_tasks=array_tasks, max_array_size=max_array_size, cores=1,
                               time_limit="10-0")  # fmt: skip
    assert ingest.world == array_tasks
    assert len(ingest.scripts) == arrays
    parts = [_parts(script)[0] for script in ingest.scripts]
    assert [rank for part in parts for rank in part] == list(range(array_tasks))
    assert all(len(part) <= max_array_size for part in parts)  # the largest index is one less
    for script in ingest.scripts:
        assert f" --world {array_tasks} --rank " in script
    assert [_parts(script)[0] for script in dedup.scripts] == [range(1)]


@pytest.mark.parametrize(
    ("todo", "arrays"),
    [
        ((), []),
        ((0, 1, 2, 9, 11), [(0, "0-2"), (8, "1-1,3-3")]),
        ((5,), [(4, "1-1")]),
        # Task i is of part i % 12.
        ((25, 26, 23), [(0, "1-2"), (8, "3-3")]),
    ],
)
def test_parts_with_work_are_queued(todo: tuple[int, ...], arrays: list[tuple[int, str]]) -> None:
    plans = [replace(PLANS[0], todo=todo), *PLANS[1:]]
    stages = _render(plans, array_tasks=12, cores=1, max_array_size=4, time_limit="10-0")
    assert [stage.name for stage in stages] == ["ingest"] * bool(todo) + ["dedup", "shards"]
    if todo:
        assert stages[0].num_parts == len(todo)
        found = [(int(re.findall(r"^first_rank=(\d+)$", script, re.MULTILINE)[0]),
                  _options(script)["array"])
                 for script in stages[0].scripts]  # fmt: skip
        assert found == arrays
        assert all(" --world 12 --rank " in script for script in stages[0].scripts)


@pytest.mark.parametrize(("site", "taken"), [("4", 4), ("2000", 1001), (None, 1001)])
def test_arrays_are_as_the_site_allows(slurm: FakeSlurm, site: str | None, taken: int) -> None:
    if site:
        (slurm.folder / "config").write_text(f"MaxArraySize            = {site}\n")
    assert within_site(ClusterConfig()).prep.max_array_size == taken


def test_arrays_of_a_stage_share_what_may_run_at_once() -> None:
    ingest = _render(array_tasks=2500, cores=1, max_concurrent=64)[0]
    limits = [_parts(script)[1] for script in ingest.scripts]
    assert sum(limits) == 64
    assert min(limits) == 21
    with pytest.raises(ConfigError, match=r"prep\.max_concurrent=2"):
        _render(array_tasks=2500, max_concurrent=2)


def test_size_and_memory_follow_the_plan() -> None:
    ingest, dedup, shards = _render(array_tasks=64, cores=4)
    assert (ingest.world, dedup.world, shards.world) == (64, 1, 3)
    assert [_options(stage.scripts[0])["mem"] for stage in (ingest, dedup, shards)] == [
        "4G", "9G", "3G",  # 4 x 0.7 GB, 7.2 GB and 4 x 0.5 GB, rounded up, and 1 GB
    ]  # fmt: skip
    for stage, processes in ((ingest, 4), (dedup, 1), (shards, 4)):
        assert f" workers={processes} " in stage.scripts[0]
        assert _options(stage.scripts[0])["cpus-per-task"] == "4"
    assert ingest.hours == pytest.approx(100 / 256)


def test_options_are_those_of_the_profile_unless_prep_has_its_own() -> None:
    profile: dict[str, object] = {"partition": "gpu", "account": "a", "mem_per_node": "500G"}
    script = _render(cluster=profile, partition="cpu", mem="12G", qos="q")[1].scripts[0]
    assert _options(script) == {
        "array": "0-0", "job-name": "web-dedup", "output": "/work/data/work/logs/%x-%A_%a.log",
        "nodes": "1", "ntasks": "1", "cpus-per-task": "4", "mem": "12G", "time": "4:00:00",
        "partition": "cpu", "account": "a", "qos": "q", "open-mode": "append", "requeue": "",
        "kill-on-invalid-dep": "yes", "comment": "/work/data",
    }  # fmt: skip


def test_what_cannot_end_in_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ingest: 100\.0 .* 12\.5 hours"):
        _render(array_tasks=2)
    with pytest.raises(ConfigError, match=r"prep\.time_limit='soon': expected"):
        PrepJobsConfig(time_limit="soon")


def test_odd_names_reach_data_prep_unchanged(tmp_path: Path, slurm: FakeSlurm) -> None:
    work = tmp_path / 'it\'s 50%j "work" $HOME'
    (work / "out").mkdir(parents=True)
    shown = tmp_path / "shown"
    show = f'#!/bin/bash\nprintf "%s\\n" "$PWD" "$@" >"{shown}"\n'
    program = write_program(tmp_path / "my python", show)
    output_dir = "it's 50%j"
    stages = _render(output_dir=output_dir, work_dir=str(work), array_tasks=3,
                     config_path="my '$config'.yaml", time_limit="2-0",
                     cluster={"python": str(program), "setup": ("true 'so'",)})  # fmt: skip
    script = stages[0].scripts[0]
    assert script.startswith("#!/bin/bash\n#SBATCH")
    assert script.rindex("#SBATCH") < script.index("true 'so'") < script.index("set -u +e")
    quoted = _options(script)["output"].replace("%%", "%")
    logs = (work / output_dir / PREP_RECORD).parent
    assert output("bash", "-c", f"printf %s {quoted}") == f"{logs}/%x-%A_%a.log"
    done = _run_script(script, slurm, SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("end: done\n")
    assert shown.read_text().splitlines() == [str(work), "-m", "data_prep", "run",
                                              "my '$config'.yaml", "workers=4", "--stage", "ingest",
                                              "--world", "3", "--rank", "2"]  # fmt: skip


def _run_script(
    script: str, slurm: FakeSlurm, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash"], input=script, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**slurm.environment, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0",
             **variables},
    )  # fmt: skip


def _failing(tmp_path: Path, code: str, *, has_folder: bool = True) -> str:
    if has_folder:
        (tmp_path / "data" / PREP_RECORD).parent.mkdir(parents=True)
    program = write_program(tmp_path / "failing", f"#!/bin/bash\n{code}\n")
    stages = _render(work_dir=str(tmp_path), array_tasks=2500, cores=1, max_failures=3,
                     cluster={"python": str(program)})  # fmt: skip
    return stages[0].scripts[1]


@pytest.mark.parametrize("code", ["exit 1", "kill -KILL $$"])
def test_failure_is_tried_again_a_few_times(tmp_path: Path, slurm: FakeSlurm, code: str) -> None:
    script = _failing(tmp_path, code)
    for attempt in (1, 2):
        done = _run_script(script, slurm)
        assert done.returncode == 0  # after scontrol said that the job is in the queue again
        assert f"failure {attempt} of 3" in done.stdout
        # By its own name: the last element's job id is that of the whole array.
        assert slurm.lines("requeued") == ["requeue 7_0"] * attempt
    # Another element has a count of its own.
    assert "failure 1 of 3" in _run_script(script, slurm, SLURM_ARRAY_TASK_ID="1").stdout
    done = _run_script(script, slurm)
    assert done.returncode == 1
    assert "part 833 of 2500" in done.stdout
    assert "failure 3 of 3 (prep.max_failures)" in done.stdout
    assert slurm.lines("requeued").count("requeue 7_0") == 2


def test_success_forgets_earlier_failures(tmp_path: Path, slurm: FakeSlurm) -> None:
    script = _failing(tmp_path, f"[ -e {tmp_path}/mended ] || exit 1")
    _run_script(script, slurm)
    (tmp_path / "mended").touch()
    assert _run_script(script, slurm).returncode == 0
    (tmp_path / "mended").unlink()
    assert "failure 1 of 3" in _run_script(script, slurm).stdout


def test_a_stage_waits_for_all_arrays_of_the_one_before(tmp_path: Path, slurm: FakeSlurm) -> None:
    stages = _render(array_tasks=2500, cores=1)
    (slurm.folder / "clusters").touch()  # sbatch prints id;cluster
    draft = _draft(tmp_path / "data", stages)
    assert submit(draft) == {"ingest": ["101", "102", "103"], "dedup": ["104"], "shards": ["105"]}
    assert draft.job.logs.is_dir()
    assert (draft.folder / "config.yaml").read_text() == draft.config
    assert load(ClusterConfig, draft.folder / "cluster.yaml").config == draft.cluster
    assert len(list((draft.folder.parent / "code").iterdir())) == 1
    expected = [[], [], [], ["--dependency=afterany:101:102:103"], ["--dependency=afterany:104"]]
    assert [arguments for arguments, _ in slurm.calls] == [["--parsable", *e] for e in expected]
    assert [script for _, script in slurm.calls] == [s for stage in stages for s in stage.scripts]


def test_dry_run_is_a_script_that_does_the_same(tmp_path: Path, slurm: FakeSlurm) -> None:
    stages = _render(array_tasks=2500, cores=1, cluster={"setup": ("echo 'it''s' \"(\" `id`",)})
    draft = _draft(tmp_path / "it's the data", stages)
    text = dry_run_text(draft)
    assert not slurm.calls
    assert not draft.job.folder.exists()
    subprocess.run(["bash"], input=text, text=True, check=True)
    by_dry_run = slurm.calls
    assert draft.job.logs.is_dir()
    (slurm.folder / "calls.jsonl").unlink()
    submit(draft)
    assert by_dry_run == slurm.calls


def test_sbatch_undone(tmp_path: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture) -> None:
    (slurm.folder / "fails_at").write_text("104")
    with pytest.raises(SlurmError) as error:
        submit(_draft(tmp_path, _render(array_tasks=2500, cores=1)))
    assert slurm.calls[-1][0] == ["--parsable", "--dependency=afterany:101:102:103"]
    assert "violates accounting/QOS policy" in str(error.value)
    assert "101 102 103" in caplog.text
    assert slurm.lines("cancelled") == ["101 102 103"]
    assert len(slurm.calls) == 4
    (slurm.folder / "fails_at").unlink()
    submit(_draft(tmp_path, _render()))  # nothing of it is left that would refuse this


def test_second_chain_beside_a_first_is_refused(tmp_path: Path, slurm: FakeSlurm) -> None:
    submit(_draft(tmp_path, _render()))
    line = "{0}|{0}|RUNNING|None|train|n|0|1|1|N/A|1:00|0|{1}\n"
    queue = "".join(line.format(job, tmp_path) for job in (102, 102, 103))
    # One of them ended, and another job got its id.
    (slurm.folder / "queue").write_text(queue + line.format(101, "/another"))
    with pytest.raises(BusyError, match="in the queue: 102 103;"):
        submit(_draft(tmp_path, _render()))
    assert len(slurm.calls) == 3
    (slurm.folder / "queue").write_text(line.format(102, "/another"))
    submit(_draft(tmp_path, _render()))


def test_site_that_allows_fewer_jobs_is_told_apart(tmp_path: Path, slurm: FakeSlurm) -> None:
    said = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed"
    slurm.add("sbatch", f"echo '{said}: Job violates accounting/QOS policy' >&2; exit 1")
    needs = r"needs 75 in the queue.*\(ingest 64, dedup 1, shards 10\).* prep\.array_tasks=64"
    with pytest.raises(SlurmError, match=needs):
        submit(_draft(tmp_path, _render(cores=1)))


@pytest.mark.parametrize(
    ("command", "has_folder", "code", "said"),
    [("exit 2", True, 2, "no use"), ("exit 1", False, 1, "storage_patience_s"),
     ("", True, 127, "interpreter")],
    ids=["wrong input", "failure that cannot be counted", "no interpreter"],
)  # fmt: skip
def test_what_is_not_tried_again(
    tmp_path: Path, slurm: FakeSlurm, command: str, has_folder: bool, code: int, said: str
) -> None:
    script = _failing(tmp_path, command, has_folder=has_folder)
    if not command:
        (tmp_path / "failing").unlink()
    done = _run_script(script, slurm)
    assert done.returncode == code
    assert said in done.stdout.splitlines()[-1]
    assert not slurm.lines("requeued")


def test_early_stage_waits_and_one_after_a_failure_ends(tmp_path: Path, slurm: FakeSlurm) -> None:
    program = write_program(tmp_path / "refusing", "#!/bin/bash\necho started; exit 2\n")
    (tmp_path / "data" / PREP_RECORD).parent.mkdir(parents=True)
    stages = _render(work_dir=str(tmp_path), cluster={"python": str(program)})
    ingest, dedup, shards = (stage.scripts[0] for stage in stages)
    # Of another dataset, whose preparation has the same name.
    (slurm.folder / "queue").write_text("/elsewhere/data\n")
    early = _run_script(dedup, slurm).stdout
    assert early.splitlines()[-1].startswith("end: stage dedup, part 0 of 1: trying again is no")
    (tmp_path / "failed-dedup").unlink()
    (slurm.folder / "queue").write_text(f"{tmp_path}/data\n")
    done = _run_script(dedup, slurm)
    assert slurm.lines("requeued") == ["requeue 7_0"]
    assert not (tmp_path / "failed-dedup").exists()
    (slurm.folder / "queue").write_text("")
    # The first stage waits for none.
    assert _run_script(ingest, slurm).returncode == 2
    for script in (dedup, shards):
        done = _run_script(script, slurm)
        assert done.returncode == 2
        assert "stage ingest failed" in done.stdout
        assert "started\n" not in done.stdout
