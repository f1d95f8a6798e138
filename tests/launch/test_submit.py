"""A run handed to SLURM: what is copied, what is refused, what is left behind."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import ClusterConfig
from launch.submit import Origin, prepare_finetuning, prepare_training, require_data
from pipeline.config.load import build, load, resolved_text
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError
from pipeline.tasks.task import load_task
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_slurm import FakeSlurm
from tests.support.processes import Processes, output, wait_until
from tests.support.tiny_tasks import write_task

ROOT = Path(__file__).parents[2]
START = (sys.executable, str(ROOT / "pipeline/runtime/start.py"), "launch")


class Place:
    """A folder with a run's config and a profile, and SLURM's commands."""

    start: tuple[str, ...] = START

    def __init__(self, folder: Path, dataset: DatasetIndex) -> None:
        self.folder = folder
        self.slurm = FakeSlurm(folder / "slurm")
        self.run_dir = folder / "runs" / "mine"
        (folder / "train.yaml").write_text(
            f"run_dir: runs/mine\ndata: {{dir: {dataset.folder}, seq_len: 64}}\n"
            f"model: {{from: {ROOT}/configs/model/roformer_v2-small.yaml, num_layers: 2}}\n"
            "train: {num_steps: 20, warmup_steps: 2, global_batch: 8, micro_batch: 2}\n"
        )
        self.write_profile()

    def write_profile(self, **more: object) -> None:
        values = {"nodes": 2, "gpus_per_node": 0, "ranks_per_node": 2, "python": sys.executable}
        (self.folder / "c.yaml").write_text(json.dumps({**values, **more}))

    def launch(self, *words: str, code: int = 0) -> str:
        """Output of a command that ends with an exit code; the errors of one that fails."""
        return output(*self.start, *words, code=code, cwd=self.folder, env=self.slurm.environment)

    def submit(self, *words: str, code: int = 0) -> str:
        return self.launch("submit", "train.yaml", "--cluster", "c.yaml", *words, code=code)

    def queue(self, *jobs: int, folder: Path | None = None) -> None:
        """What squeue prints, whoever's jobs these are."""
        line = "{0}|{0}|RUNNING|None|train|n|0|1|1|N/A|1:00|0|{1}\n"
        text = "".join(line.format(job, folder or self.run_dir) for job in jobs)
        (self.slurm.folder / "queue").write_text(text)

    def record(self, number: int) -> dict[str, Any]:
        path = self.run_dir / "launch" / f"{number:04d}" / "submission.json"
        return json.loads(path.read_text())


@pytest.fixture
def place(tmp_path: Path, dataset: DatasetIndex, processes: None) -> Place:
    return Place(tmp_path, dataset)


def test_a_job_has_the_data_of_all_stages(dataset: DatasetIndex, tmp_path: Path) -> None:
    other = str(tmp_path / "elsewhere")
    stages = [{"name": "stable", "steps": 10},
              {"name": "decay", "steps": 5, "data": {"dir": other}}]  # fmt: skip
    values = {"run_dir": "runs/mine", "data": {"dir": str(dataset.folder), "seq_len": 64},
              "train": {"global_batch": 8, "micro_batch": 4, "warmup_steps": 2}}  # fmt: skip
    work = tmp_path / "work"
    source = Origin("train.yaml", (), None, str(work))
    cluster = ClusterConfig(gpus_per_node=0, ranks_per_node=1)
    config = build(PretrainConfig, {**values, "stages": stages}, "here")
    with pytest.raises(ConfigError, match=f"data.dir={other}"):
        prepare_training(config, cluster, source)
    shutil.copytree(dataset.folder, other)
    mounts = prepare_training(config, cluster, source).job.mounts
    assert mounts == (str(work), str(dataset.folder), other)
    # A run that goes on from another one reads its own data, and that one's checkpoint.
    of = str(tmp_path / "theirs/checkpoints/step-00000010")
    stages[0]["of"] = of
    config = build(PretrainConfig, {**values, "stages": stages}, "here")
    assert prepare_training(config, cluster, source).job.mounts == (str(work), other, of)
    # So does one that begins with weights; files and copies lie in folders, too.
    for name in ("model", "files", "archive"):
        (tmp_path / name).mkdir()
    values["init_from"], values["checkpoint"] = f"{tmp_path}/model@best", {
        "copy_to": f"{tmp_path}/archive/mine"}  # fmt: skip
    values["train"]["deepspeed_config"] = f"{tmp_path}/files/ds.json"
    config = build(PretrainConfig, values | {"train": values["train"] | {"num_steps": 9}}, "here")
    with pytest.raises(ConfigError, match=r"files/ds\.json does not exist"):
        prepare_training(config, cluster, source)
    (tmp_path / "files/ds.json").write_text("{}")
    mounts = prepare_training(config, cluster, source).job.mounts
    assert mounts[2:] == tuple(f"{tmp_path}/{name}" for name in ("model", "files", "archive"))
    (tmp_path / "model").rmdir()
    with pytest.raises(ConfigError, match="model does not exist"):
        prepare_training(config, cluster, source)
    make_checkpoint(work / "runs/mine", 10)
    mounts = prepare_training(config, cluster, source).job.mounts
    assert mounts[2:] == tuple(f"{tmp_path}/{name}" for name in ("files", "archive"))
    shutil.rmtree(work / "runs")
    for name in ("init_from", "checkpoint"):
        del values[name]
    # The data of a stage that is over may be gone.
    del stages[0]["of"]
    values["data"] = {"dir": str(tmp_path / "gone"), "seq_len": 64}
    config = build(PretrainConfig, {**values, "stages": stages}, "here")
    with pytest.raises(ConfigError, match=r"gone has no index\.json"):
        require_data(config, str(work))
    make_checkpoint(work / "runs/mine", 10)
    require_data(config, str(work))
    mounts = prepare_training(config, cluster, source).job.mounts
    assert str(tmp_path / "gone") not in mounts, "a container would not start with it"


@pytest.mark.parametrize("words", ["{}", "{}@10", "{}@best", "random:{}", "random:{}@best"])
def test_a_fine_tuning_starts_from_all_that_names_a_model(words: str, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    task, run = write_task(tmp_path / "tasks", "classify"), tmp_path / "theirs"
    own = (f"model={words.format(run)}", f"run_dir={tmp_path}/tuned")
    config = load_task(str(task), own)
    source = Origin(str(task), (), None, str(tmp_path / "work"))
    with pytest.raises(ConfigError, match="theirs does not exist"):
        prepare_finetuning(config, ClusterConfig(), source)
    run.mkdir()
    mounts = prepare_finetuning(config, ClusterConfig(), source).job.mounts
    # A container does not start with a folder that is not there.
    assert [Path(mount).name for mount in mounts] == ["work", "tuned", "theirs", "tasks"]


def test_options_of_other_jobs_are_refused(place: Place) -> None:
    for words in (("--data", "elsewhere"), ("--step", "5"), ("--all",)):
        told = place.launch("submit", "train.yaml", "--cluster", "c.yaml", *words, code=2)
        assert "--step, --all and --data are for --evaluate" in told
    ranks = ("submit", "train.yaml", "--cluster", "c.yaml", "--ranks", "8")
    assert "--ranks is for --local" in place.launch(*ranks, code=2)
    assert place.slurm.calls == []


def test_everything_a_job_needs_is_copied(place: Place) -> None:
    place.submit("train.lr=2e-4")
    folder = place.run_dir / "launch" / "0001"
    [(arguments, script)] = place.slurm.calls
    assert arguments == ["--parsable", str(folder / "job.sh")]
    assert script == (folder / "job.sh").read_text()
    config = load(PretrainConfig, folder / "config.yaml").config
    assert config == load(PretrainConfig, place.folder / "train.yaml", ["train.lr=2e-4"]).config
    assert load(ClusterConfig, folder / "cluster.yaml").config.nodes == 2
    record = place.record(1)
    assert (record["job"], record["ranks"]) == ("101", 4)
    assert record["overrides"] == ["train.lr=2e-4"]
    code = Path(record["code"])
    assert (code / "REVISION").read_text().strip() == record["revision"]
    start = f"{sys.executable} {code}/pipeline/runtime/start.py"
    assert f"exec {start} pipeline pretrain {folder}/config.yaml" in script
    assert f'{start} launch supervise "$run_dir" {folder}/config.yaml' in script
    assert f"#SBATCH --output={place.run_dir}/logs/slurm-%j.log" in script
    assert (place.run_dir / "logs").is_dir()


def test_dry_run_shows_the_script_and_changes_nothing(place: Place) -> None:
    shown = place.submit("--dry-run")
    assert not place.run_dir.exists()
    assert place.slurm.calls == []
    place.submit()
    assert shown.endswith((place.run_dir / "launch" / "0001" / "job.sh").read_text())


def test_second_submission_waits_for_the_first_to_leave_the_queue(place: Place) -> None:
    place.submit()
    place.queue(99, 101)
    assert "job 101 of" in place.submit(code=1)
    assert not (place.run_dir / "launch" / "0002").exists()
    place.queue(101, folder=place.folder / "another")  # it got the id of one that has ended
    place.submit()
    assert place.record(2)["job"] == "102"
    assert len(list((place.run_dir / "launch" / "code").iterdir())) == 1


@pytest.mark.parametrize(
    ("profile", "words", "message"),
    [
        ([], ["data.dir=nowhere"], "nowhere has no index.json"),
        ([], ["train.micro_batch=4"], "train.micro_batch=4 x 4 ranks"),
        ([], ["train.mycro_batch=3"], "did you mean 'micro_batch'"),
        ([], ["monitor.probes=[gone.yaml]"], "gone.yaml"),
        ([("time_limit", "6"), ("stop_before_end_s", 300)], [], "raise time_limit"),
    ],
)
def test_what_cannot_run_is_refused_before_sbatch(
    place: Place, profile: list[tuple[str, object]], words: list[str], message: str
) -> None:
    place.write_profile(**dict(profile))
    assert message in place.submit(*words, code=2)
    assert place.slurm.calls == []
    assert not place.run_dir.exists()


def test_stop_file_is_refused_and_resume_removes_it(place: Place) -> None:
    place.submit("train.lr=2e-4")
    (place.run_dir / "STOP").touch()
    assert "resume" in place.submit(code=2)
    # A job that is in the queue still has to see it.
    place.queue(101)
    assert "job 101 of" in place.launch("resume", "runs/mine", code=1)
    assert (place.run_dir / "STOP").exists()
    place.queue()
    said = place.launch("resume", "runs/mine", "train.num_steps=40")
    assert f"removed {place.run_dir / 'STOP'}" in said
    assert not (place.run_dir / "STOP").exists()
    config = load(PretrainConfig, place.run_dir / "launch" / "0002" / "config.yaml").config
    assert (config.train.num_steps, config.train.lr) == (40, 2e-4)
    assert place.record(2)["nodes"] == 2


def test_resume_needs_a_submission_or_a_cluster(place: Place) -> None:
    place.run_dir.mkdir(parents=True)
    assert "was never submitted" in place.launch("resume", "runs/mine", code=2)
    config = load(PretrainConfig, place.folder / "train.yaml").config
    (place.run_dir / "resolved.yaml").write_text(resolved_text(config))
    assert "--cluster" in place.launch("resume", "runs/mine", code=2)
    place.launch("resume", "runs/mine", "--cluster", "c.yaml")
    assert place.record(1)["config"].endswith("resolved.yaml")


def test_resume_of_a_folder_that_was_moved_is_refused(place: Place) -> None:
    place.submit()
    moved = place.run_dir.rename(place.folder / "elsewhere")
    assert "the folder was moved" in place.launch("resume", str(moved), code=2)
    assert len(place.slurm.calls) == 1


def test_evaluation_of_a_run_is_a_job_of_its_own(place: Place) -> None:
    evaluate = ["submit", "--evaluate", "runs/mine", "--cluster", "c.yaml"]
    assert "has no checkpoint to evaluate" in place.launch(*evaluate, code=2)
    place.submit()
    config = load(PretrainConfig, place.run_dir / "launch" / "0001" / "config.yaml").config
    (place.run_dir / "resolved.yaml").write_text(resolved_text(config))
    make_checkpoint(place.run_dir, 20)
    # The training job is in the queue, which is no reason to wait.
    place.queue(101)
    place.launch(*evaluate, "--all", "data.mask_prob=0.2")
    script = place.slurm.calls[-1][1]
    assert f"pipeline evaluate {place.run_dir} --all data.mask_prob=0.2" in script
    assert "--kind evaluate" in script
    assert "preflight" not in script
    assert not (place.run_dir / "launch" / "0002" / "config.yaml").exists()
    assert place.record(2)["kind"] == "evaluate"
    evaluate[2] = "runs/mine@20"
    place.launch(*evaluate)
    assert f"pipeline evaluate {place.run_dir} --step 20" in place.slurm.calls[-1][1]
    assert "leave out --step and --all" in place.launch(*evaluate, "--all", code=2)
    assert "best" in place.launch(*evaluate, "--step", "best", code=2)
    # What is resumed is the training.
    place.queue()
    place.launch("resume", "runs/mine")
    assert "pipeline pretrain" in place.slurm.calls[-1][1]


def test_two_submissions_at_once_give_one_job(place: Place, processes: Processes) -> None:
    # sbatch takes its time, so that the second one comes while it runs.
    real = (place.slurm.folder / "sbatch").rename(place.slurm.folder / "slow")
    gate = place.slurm.folder / "gate"
    wait = f'[[ "$*" == *test-only* ]] || while [ ! -e {gate} ]; do /bin/sleep 0.1; done'
    place.slurm.add("sbatch", f'{wait}\nexec {real} "$@"')
    command = [*START, "submit", "train.yaml", "--cluster", "c.yaml"]
    first = processes.start(command, cwd=place.folder, env=place.slurm.environment)
    intent = place.run_dir / "launch" / "submitting.json"
    wait_until(intent.exists, first)
    assert f"process {first.pid} on " in place.submit(code=1)
    gate.touch()
    assert "job 101" in first.communicate(timeout=60)[0]
    assert len(place.slurm.calls) == 1
    assert not intent.exists()
