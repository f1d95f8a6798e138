"""Looking at one node: this real machine, with GPUs told by a stand-in for nvidia-smi."""

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import ClusterConfig, PreflightConfig
from launch.preflight import check as checks
from launch.preflight.check import Record, check_gpus, read_record
from launch.preflight.judge import gather, judge_nodes
from launch.submit import Origin, prepare_mix
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex, read_index
from pipeline.errors import ConfigError, DataError
from pipeline.multitask.config import load_mix
from tests.support.checkpoints import make_checkpoint
from tests.support.damage import flip
from tests.support.processes import python, write_program
from tests.support.tiny_tasks import write_task

ROOT = Path(__file__).parents[2]
# What any machine has that can run these tests.
EASY = PreflightConfig(min_free_gb=0.001, min_shm_gb=0.001, min_open_files=64)


# As the real one: values are divided by comma and space, what a GPU does not have is `[N/A]`, and
# one field that the driver does not know makes it refuse the query in one line.
_SCRIPT = """\
#!{python} -S
import json, sys, time
state = json.loads(open({state!r}).read())
time.sleep(state["sleep_s"])
if state["error"]:
    print(state["error"]); sys.exit(state["code"])
query, _, fields = sys.argv[1].partition("=")
what = query.removeprefix("--query-")
assert sys.argv[2] == "--format=csv,noheader,nounits", sys.argv
rows = state["apps"] if what == "compute-apps" else state["gpus"]
known = set(state["known"][what])
for field in fields.split(","):
    if field not in known:
        print(f'Field "{{field}}" is not a valid field to query.\\n'); sys.exit(2)
for row in rows:
    print(", ".join(str(row.get(field, "[N/A]")) for field in fields.split(",")))
"""
_GPU_FIELDS = ["index", "uuid", "name", "driver_version", "memory.total", "memory.used",
               "ecc.errors.uncorrected.volatile.total", "retired_pages.pending",
               "clocks_throttle_reasons.hw_thermal_slowdown",
               "clocks_throttle_reasons.hw_power_brake_slowdown"]  # fmt: skip
"""Of a driver before 535, which does not know `clocks_event_reasons`."""


class FakeSmi:
    """The command, in a folder that comes first in PATH; healthy H100s until told otherwise."""

    def __init__(self, folder: Path, num_gpus: int = 2) -> None:
        folder.mkdir()
        self.folder = folder
        self.gpus = [
            {
                "index": i, "uuid": f"GPU-0000000{i}-aaaa", "gpu_uuid": f"GPU-0000000{i}-aaaa",
                "name": "NVIDIA H100 80GB HBM3", "driver_version": "550.54.15",
                "memory.total": 81559, "memory.used": 4, "ecc.errors.uncorrected.volatile.total": 0,
                "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
                "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
                "remapped_rows.pending": "0", "remapped_rows.failure": "0",
            }
            for i in range(num_gpus)
        ]  # fmt: skip
        self.apps: list[dict[str, object]] = []
        self.error, self.code, self.sleep_s = "", 0, 0.0
        program = _SCRIPT.format(python=sys.executable, state=str(folder / "state.json"))
        write_program(folder / "nvidia-smi", program)
        self.save()

    def save(self) -> None:
        known = {
            "gpu": _GPU_FIELDS,
            "compute-apps": ["gpu_uuid", "pid", "process_name"],
            "remapped-rows": ["gpu_uuid", "remapped_rows.pending", "remapped_rows.failure"],
        }
        names = ("gpus", "apps", "error", "code", "sleep_s")
        state = {name: getattr(self, name) for name in names} | {"known": known}
        (self.folder / "state.json").write_text(json.dumps(state))


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    fake = FakeSmi(tmp_path / "smi")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.parametrize("with_text", [False, True])
def test_node_of_a_multi_task_run(dataset: DatasetIndex, tmp_path: Path, with_text: bool) -> None:
    (tmp_path / "model").mkdir()
    tasks = {kind: {"from": str(write_task(tmp_path, kind))} for kind in ("classify", "tag")}
    text = {"mlm": {}} if with_text else {}
    body: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "init_from": str(tmp_path / "model")}
    body |= {"tasks": {**tasks, **text}, **({"data": {"dir": str(dataset.folder)}} if text else {})}
    path = tmp_path / "mix.yaml"
    path.write_text(json.dumps(body))
    mix = load_mix(str(path))
    cluster = ClusterConfig(gpus_per_node=0, ranks_per_node=2, preflight=EASY)
    draft = prepare_mix(mix, cluster, Origin(str(path), (), None, str(tmp_path)))
    assert f"launch preflight check {draft.job.words[2]}" in draft.script

    records = tmp_path / "run/launch/preflight/7.0"
    record = checks.check_node(mix.config, cluster, records, "n1")
    assert record.findings == []
    assert record.fingerprint == (dataset.fingerprint if with_text else "")
    # A checkpoint of such a run has another fingerprint than its text.
    make_checkpoint(tmp_path / "run", 10)
    evidence = gather(records, ["n1"], mix.config, with_bandwidth=False)
    assert judge_nodes(mix.config, cluster, evidence, job="7", restart=0).exit_code == 0


def test_good_node(dataset: DatasetIndex, tmp_path: Path) -> None:
    records = tmp_path / "run/launch/preflight/7.0"
    records.mkdir(parents=True)
    cluster = ClusterConfig(gpus_per_node=0, ranks_per_node=2, preflight=EASY)
    overrides = [f"run_dir={tmp_path / 'run'}", f"data.dir={dataset.folder}"]
    config = load(PretrainConfig, ROOT / "configs/demo.yaml", overrides).config
    record = checks.check_node(config, cluster, records, "n1")
    assert record.findings == []
    assert record.gpus is None
    assert record.fingerprint == dataset.fingerprint
    assert abs(record.free_gb - shutil.disk_usage(tmp_path).free / 1e9) < 5
    assert record.packages["python"] == platform.python_version()
    assert record.packages["torch"] == importlib.metadata.version("torch")
    assert "pytest" not in record.packages
    assert record.is_finished
    assert read_record(records, "n1") == record
    assert sorted(path.name for path in records.iterdir()) == ["n1.json"], "nothing is left over"


def test_a_stage_is_checked_on_its_own_data(dataset: DatasetIndex, tmp_path: Path) -> None:
    other = shutil.copytree(dataset.folder, tmp_path / "other")
    stages = [{"name": "stable", "steps": 10},
              {"name": "decay", "steps": 10, "data": {"dir": str(other)}}]  # fmt: skip
    overrides = [f"run_dir={tmp_path / 'run'}", f"data.dir={dataset.folder}",
                 f"stages={json.dumps(stages)}", "train.global_batch=8", "train.micro_batch=4",
                 "train.warmup_steps=2", "train.num_steps=20",
                 "train.alpha_warmup_steps=0"]  # fmt: skip
    config = load(PretrainConfig, ROOT / "configs/demo.yaml", overrides).config
    seen = []
    for step in (0, 5, 10, 15):
        if step:
            make_checkpoint(tmp_path / "run", step)
        data = checks.data_of(config)
        assert data is not None
        evidence = gather(tmp_path, ["n1"], config, with_bandwidth=False)
        seen.append((data.dir, evidence.checkpoint is not None))
    # At the border the checkpoint is of the other data.
    assert seen == [(str(dataset.folder), False), (str(dataset.folder), True),
                    (str(other), False), (str(other), True)]  # fmt: skip


def test_healthy_gpus_of_an_old_driver(smi: FakeSmi) -> None:
    """It refuses two of the fields, and has no pages to retire."""
    gpus, found = check_gpus(replace(EASY, gpu="H100", min_driver="550.54"), 2, os.environ)
    assert found == []
    assert [gpu.name for gpu in gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert {gpu.driver for gpu in gpus} == {"550.54.15"}


def _set(gpu: int, **fields: object) -> Callable[[FakeSmi], None]:
    def change(smi: FakeSmi) -> None:
        smi.gpus[gpu].update({name.replace("__", "."): value for name, value in fields.items()})

    return change


def _state(**state: object) -> Callable[[FakeSmi], None]:
    return lambda smi: vars(smi).update(state)


@pytest.mark.parametrize(("change", "check", "text"), [
    (_set(1, ecc__errors__uncorrected__volatile__total=3), "GPU health", "-aaaa): 3 "),
    (_set(0, retired_pages__pending="Yes"), "GPU health", "retired"),
    (_set(0, remapped_rows__pending="1"), "GPU health", "remapped"),
    (_set(0, remapped_rows__failure="Yes"), "GPU health", "not be remapped"),
    (_set(1, clocks_throttle_reasons__hw_thermal_slowdown="Active"), "GPU health", "temper"),
    (_set(0, memory__used=40000), "GPU in use", "40000 of 81559 MiB"),
    (_state(apps=[{"gpu_uuid": "GPU-00000001-aaaa", "pid": 4711, "process_name": "python"}]),
     "GPU in use", "GPU-00000001-aaaa) is used by process 4711"),
    (_set(1, memory__used="[GPU is lost]"), "GPU state", "'[GPU is lost]'"),
    (_set(1, name="NVIDIA A100-SXM4-80GB"), "GPU names", "preflight.gpu='H100'"),
    (_set(1, driver_version="535.129.03"), "GPU driver", "535.129.03"),
    (lambda smi: smi.gpus.pop(), "GPU count", "1 GPUs, expected gpus_per_node=2"),
    (_state(error="No devices were found", code=6), "GPUs", "(6): No devices were found"),
    (_state(error="Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error"),
     "GPUs", "GPU0000:CB:00.0"),
])  # fmt: skip
def test_trouble_of_a_gpu_is_told(
    smi: FakeSmi, change: Callable[[FakeSmi], None], check: str, text: str
) -> None:
    change(smi)
    smi.save()
    _, found = check_gpus(replace(EASY, gpu="H100", min_driver="550.54"), 2, os.environ)
    assert [f.check for f in found if text in f.text] == [check], found


@pytest.mark.parametrize("visible", ["1", "GPU-00000001-aaaa"])
def test_gpus_of_other_jobs_are_not_looked_at(smi: FakeSmi, visible: str) -> None:
    """Without a cgroup nvidia-smi lists all; SLURM says which are this job's."""
    smi.gpus[0]["memory.used"] = 70000
    smi.save()
    gpus, found = check_gpus(EASY, 1, {"CUDA_VISIBLE_DEVICES": visible})
    assert (found, len(gpus)) == ([], 1)
    _, found = check_gpus(EASY, 2, {"CUDA_VISIBLE_DEVICES": visible})
    assert [f.check for f in found] == ["GPU count"]


@contextlib.contextmanager
def _tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(tmp_path: Path) -> None:
    with _tmpfs(tmp_path / "small", "size=1m,nr_inodes=20") as folder:
        free_gb, found = checks.check_folder(EASY, "run_dir", folder / "run", "all")
        assert free_gb < 0.0011
        assert [f.check for f in found] == ["run_dir inodes"]
        assert "expected 10000; remove files" in found[0].text
        _, found = checks.check_folder(replace(EASY, min_free_gb=1.0), "run_dir", folder, "all")
        assert [f.check for f in found] == ["run_dir space", "run_dir inodes"]
        assert "preflight.min_free_gb=1" in found[0].text
        assert checks.check_shared_memory(replace(EASY, min_shm_gb=0.5), folder)[0].check == (
            "shared memory"
        )
        with contextlib.suppress(OSError), (folder / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        free_gb, found = checks.check_folder(EASY, "run_dir", folder, "all")
        assert free_gb is None
        assert "[Errno 28]" in found[0].text
        assert sorted(path.name for path in folder.iterdir()) == ["fill", "run"]


def test_limits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        found = checks.check_limits(replace(EASY, min_open_files=1024))
        assert [f.check for f in found if f.check == "open files"] == ["open files"]
        assert "200, expected preflight.min_open_files=1024" in found[0].text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not [f for f in checks.check_limits(EASY) if f.check in ("open files", "stack")]


@pytest.fixture
def damaged(dataset: DatasetIndex, tmp_path: Path) -> DatasetIndex:
    """A copy of the dataset with one bit of every block's tokens flipped."""
    folder = tmp_path / "damaged"
    shutil.copytree(dataset.folder, folder)
    blocks = dataset.blocks
    for row in range(len(blocks)):
        file = folder / dataset.shards[int(blocks.shard[row])].file
        flip(file, int(blocks.member_offset[row, 0]) + 200)
    return read_index(folder)


def test_damaged_shard_is_found(dataset: DatasetIndex, damaged: DatasetIndex) -> None:
    intact = DataConfig(dir=str(dataset.folder))
    assert checks.check_dataset(intact, 4, "7.0 n1") == (dataset.fingerprint, [])
    fingerprint, found = checks.check_dataset(DataConfig(dir=str(damaged.folder)), 2, "7.0 n1")
    assert fingerprint == dataset.fingerprint, "the index is intact"
    assert len(found) == 2
    for finding in found:
        assert "tokens.npy is damaged" in finding.text
        assert finding.block is not None
        with pytest.raises(DataError):
            checks.read_block(damaged, finding.block)
        checks.read_block(dataset, finding.block)


def test_other_nodes_and_restarts_look_at_other_blocks(damaged: DatasetIndex) -> None:
    data = DataConfig(dir=str(damaged.folder))
    chosen = [
        tuple(f.block for f in checks.check_dataset(data, 2, seed)[1])
        for seed in ("7.0 n1", "7.0 n1", "7.0 n2", "7.1 n1", "7.2 n1")
    ]
    assert chosen[0] == chosen[1]
    assert len(set(chosen)) == 4


def test_missing_shard_and_missing_dataset(damaged: DatasetIndex, tmp_path: Path) -> None:
    for shard in damaged.shards:
        (damaged.folder / shard.file).unlink()
    _, found = checks.check_dataset(DataConfig(dir=str(damaged.folder)), 100, "seed")
    assert len(found) == len(damaged.shards)
    assert all("does not exist" in f.text and f.block is not None for f in found)
    fingerprint, found = checks.check_dataset(DataConfig(dir=str(tmp_path / "nothing")), 4, "seed")
    assert fingerprint == ""
    assert [f.check for f in found] == ["dataset"]


@pytest.mark.usefixtures("processes")
def test_command_outlives_the_driver(dataset: DatasetIndex, smi: FakeSmi, tmp_path: Path) -> None:
    smi.sleep_s = 6
    smi.save()
    profile = tmp_path / "cluster.yaml"
    profile.write_text(
        "gpus_per_node: 2\n"
        "preflight: {timeout_s: 2, min_free_gb: 0.001, min_shm_gb: 0.001, min_open_files: 64}\n"
    )
    records = tmp_path / "records"
    said = python("-m", "launch", "preflight", "check", ROOT / "configs/demo.yaml",
                  f"run_dir={tmp_path / 'run'}", f"data.dir={dataset.folder}", "--cluster", profile,
                  "--records", records, timeout=60,
                  env={**os.environ, "SLURMD_NODENAME": "n7"})  # fmt: skip
    record = read_record(records, "n7")
    assert isinstance(record, Record)
    assert [f.text for f in record.findings] == ["GPUs: not done within preflight.timeout_s=2"]
    assert record.fingerprint == dataset.fingerprint
    assert "n7: GPUs: not done within" in said


@pytest.mark.parametrize("text", ["latest", "550.", "v550"])
def test_driver_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"preflight\.min_driver="):
        PreflightConfig(min_driver=text)
