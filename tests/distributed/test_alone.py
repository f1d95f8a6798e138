"""Training as one process that no launcher started, and through `torchrun -m postnorm`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import strict_yaml
from pipeline.data.format import DatasetIndex
from pipeline.errors import EXIT_FAILED_RETRY, EXIT_PREEMPTED
from tests.support.grids import first_in_ci
from tests.support.pages import ROOT, blocks
from tests.support.processes import free_port, python
from tests.support.ranks import CONFIG, Ranks, losses

pytestmark = pytest.mark.usefixtures("processes")

_NO_GROUP = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
} | {"OMP_NUM_THREADS": "1"}

_SIX_STEPS = ("train.num_steps=6", "train.warmup_steps=2", "train.alpha_warmup_steps=2")


def _run(run_dir: Path, dataset: DatasetIndex, *words: str, launcher: tuple[str, ...] = ()) -> None:
    config = run_dir.with_suffix(".yaml")
    config.write_text(CONFIG)
    python(*launcher, "-m", "postnorm", "pretrain", config, f"run_dir={run_dir}",
           f"data.dir={dataset.folder}", *words, env=_NO_GROUP, timeout=120)  # fmt: skip


def _attempts(run_dir: Path) -> list[tuple[int, int | None]]:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(record["world_size"], record["resumed_from_step"]) for record in found]


@pytest.mark.parametrize("zero_stage", first_in_ci([0, 1]))
def test_alone_is_as_a_launched_one(zero_stage: int, dataset: DatasetIndex, tmp_path: Path) -> None:
    words = (*_SIX_STEPS, f"train.zero_stage={zero_stage}")
    Ranks(tmp_path / "launched", dataset, *words, world_size=1).ended()
    _run(tmp_path / "alone", dataset, *words)
    assert losses(tmp_path / "alone") == losses(tmp_path / "launched")
    assert len(losses(tmp_path / "alone")) == 6
    assert (tmp_path / "alone/exit/local-1/rank-00000").read_text() == "0\n"
    assert _attempts(tmp_path / "alone") == [(1, None)]


def test_two_processes_do_not_share_a_folder(dataset: DatasetIndex, tmp_path: Path) -> None:
    run_dir, endless = tmp_path / "run", "train.num_steps=1000000"
    first = Ranks(run_dir, dataset, endless, world_size=1)
    try:
        first.wait_for_step(1)
        second = Ranks(run_dir, dataset, endless, world_size=1).ended(EXIT_FAILED_RETRY)
        assert f"{run_dir} is in use by another running process" in second.output
        assert first.processes[0].poll() is None
        first.signal(signal.SIGTERM)
        first.ended(EXIT_PREEMPTED)
    finally:
        first.kill()
    assert _attempts(run_dir) == [(1, None)]


def test_torchrun_starts_ranks_of_the_door(dataset: DatasetIndex, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _run(tmp_path / "run", dataset, *_SIX_STEPS, launcher=launcher)
    assert _attempts(tmp_path / "run") == [(2, None)]
    assert len(losses(tmp_path / "run")) == 6


def _pods() -> tuple[list[str], dict[str, str]]:
    """The command of the manifest in docs/without_slurm.md, and its variables."""
    [block] = [b for b in blocks(ROOT / "docs" / "without_slurm.md") if b.kind == "yaml"]
    _, job = (strict_yaml.parse(part, "page").plain() for part in block.text.split("---\n"))
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["subdomain"] == job["metadata"]["name"]
    assert f"--nnodes={job['spec']['completions']}" in container["args"][0]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    return [*container["command"], *container["args"]], variables


@pytest.mark.parametrize("how", first_in_ci(["a process a pod", "torchrun in pods"]))
def test_pods_train_one_run(how: str, dataset: DatasetIndex, tmp_path: Path) -> None:
    """Two pods, as Kubeflow and the manifest of the documentation start them."""
    config, run_dir = tmp_path / "train.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    words = [f"run_dir={run_dir}", f"data.dir={dataset.folder}", *_SIX_STEPS]
    command = [sys.executable, "-m", "postnorm", "pretrain", str(config), *words]
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONPATH": str(ROOT)}
    port = free_port()
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if how == "torchrun in pods":
        command, group = _pods()
        text = command[-1].replace("torchrun", f"{sys.executable} -m torch.distributed.run")
        text = text.replace("--master-port=29500", f"--master-port={port}")
        command[-1] = text.replace("/shared/train.yaml", f"{config} {' '.join(words)}")
        group |= {"MASTER_ADDR": "127.0.0.1", "GPUS": "1"}
    pods = [
        subprocess.Popen(command, env={**_NO_GROUP, **pod, **group, "RANK": rank,
                                       "JOB_COMPLETION_INDEX": rank}, cwd=tmp_path)
        for rank in "01"
    ]  # fmt: skip
    assert [process.wait(200) for process in pods] == [0, 0]
    assert _attempts(run_dir) == [(2, None)]
    assert len(losses(run_dir)) == 6
