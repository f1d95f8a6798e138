"""What a profile adds to a job script: options, setup lines, containers; bash runs what it can."""

import shlex
import subprocess
from pathlib import Path

import pytest

from launch import script_parts as parts
from launch.cluster import ClusterConfig, ContainerConfig
from pipeline.errors import ConfigError
from tests.support.processes import write_program

WORK = "/shared/me/work"
APPTAINER = ContainerConfig(
    kind="apptainer", image="images/a.sif", mounts=("/data:/data:ro",), arguments=("--no-home",)
)
PYXIS = ContainerConfig(kind="pyxis", image="nvcr.io#nvidia/pytorch:25.06-py3", mounts=("/data",))


def _bash(lines: list[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True,
                          timeout=60, env={"PATH": "/usr/bin:/bin", **variables})  # fmt: skip


@pytest.mark.parametrize(("fields", "lines"), [
    ({"gpus_per_node": 8, "gpu_type": "h200"}, ["gpus-per-node=h200:8"]),
    ({"gpus_per_node": 4, "gpu_request": "gres", "gpu_type": "a100"}, ["gres=gpu:a100:4"]),
    ({"gpus_per_node": 0, "ranks_per_node": 2, "gpu_request": "gres"}, []),
    (
        {"gpus_per_node": 1, "constraint": "ib&h200", "exclude": "n[1-2]", "reservation": "r",
         "exclusive": True, "sbatch": ("--switches=1@0:30", "contiguous")},
        ["gpus-per-node=1", "constraint=ib&h200", "exclude=n[1-2]", "reservation=r",
         "exclusive", "switches=1@0:30", "contiguous"],
    ),
], ids=str)  # fmt: skip
def test_options_of_a_run(fields: dict[str, object], lines: list[str]) -> None:
    given = parts.sbatch_lines(parts.sbatch_resources(ClusterConfig(**fields)))  # type: ignore[arg-type]
    every = ["open-mode=append", "requeue", "kill-on-invalid-dep=yes"]
    assert given == [f"#SBATCH --{line}" for line in [*lines, *every]]


def test_setup_comes_in_order_and_values_stay_as_they_are() -> None:
    cluster = ClusterConfig(
        modules=("gcc/13", "cuda/13.0"), scratch="$NODE_DISK/${WHO}/x",
        network=("NCCL_IB_HCA=mlx5_0,mlx5_1", "ODD=it's $HOME `id` \"", "EMPTY="),
        setup=("user=$POSTNORM_SCRATCH",),
    )  # fmt: skip
    module = "module() { echo module $*; }"
    names = '"$NCCL_IB_HCA" "$ODD" "<${EMPTY-unset}>" "$POSTNORM_SCRATCH" "$SLURM_EXPORT_ENV"'
    # What another program sees was exported.
    show = [f"bash -c 'printf \"%s\\n\" {names}'", 'echo "$user"']
    done = _bash([module, *parts.setup_lines(cluster), *show], NODE_DISK="/disk", WHO="me")
    assert done.stdout.splitlines() == [
        "module load gcc/13 cuda/13.0", "mlx5_0,mlx5_1", "it's $HOME `id` \"", "<>",
        "/disk/me/x", "ALL", "/disk/me/x",
    ], done.stderr  # fmt: skip


def test_failing_setup_ends_the_job_and_says_why() -> None:
    lines = parts.setup_lines(ClusterConfig(modules=("nope/1",)))
    done = _bash(["module() { echo no such module >&2; return 1; }", *lines, "echo went on"])
    assert (done.returncode, done.stdout) == (
        2, "end: `module load nope/1` failed, see above; change modules of the cluster profile\n",
    )  # fmt: skip
    done = _bash([*parts.setup_lines(ClusterConfig(scratch="$NODE_DISK/x")), "echo went on"])
    assert done.returncode
    assert not done.stdout
    assert "NODE_DISK" in done.stderr


def test_apptainer() -> None:
    cluster = ClusterConfig(container=APPTAINER, scratch="$D", network=("A=x,y z",))
    words = parts.wrapped(
        cluster, [WORK, "/runs", WORK], ["python3", '"$rank"'], work_dir=WORK, gpus=True
    )
    assert parts.srun_words(cluster, [WORK], work_dir=WORK) == []
    shown = _bash(
        ['apptainer() { printf "%s\\n" "$@"; }', " ".join(words)], POSTNORM_SCRATCH="/d", rank="r 3"
    )
    assert shown.stdout.splitlines() == [
        "exec", "--nv", f"--bind={WORK}", "--bind=/runs", "--bind=/data:/data:ro", "--bind=/d",
        f"--pwd={WORK}", "--no-home", "images/a.sif", "env", "A=x,y z", "python3", "r 3",
    ]  # fmt: skip
    no_gpus = parts.wrapped(cluster, [], ["python3"], work_dir=WORK, gpus=False)
    cpus = ClusterConfig(container=APPTAINER, gpus_per_node=0, ranks_per_node=1)
    assert "--nv" not in no_gpus
    assert "--nv" not in parts.wrapped(cpus, [], ["python3"], work_dir=WORK, gpus=True)


def test_pyxis() -> None:
    cluster = ClusterConfig(container=PYXIS, scratch="$D", network=("A=x y",))
    words = parts.srun_words(cluster, [WORK, "/runs"], work_dir=WORK)
    shown = _bash([f"printf '%s\\n' {' '.join(words)}"], POSTNORM_SCRATCH="/d")
    assert shown.stdout.splitlines() == [
        "--container-image=nvcr.io#nvidia/pytorch:25.06-py3",
        f"--container-mounts={WORK}:{WORK},/runs:/runs,/data:/data,/d:/d",
        f"--container-workdir={WORK}", "--no-container-mount-home",
    ]  # fmt: skip
    command = parts.wrapped(cluster, [WORK], ["python3"], work_dir=WORK, gpus=True)
    assert shlex.split(" ".join(command)) == ["env", "A=x y", "python3"]
    # Pyxis refuses both.
    asked = ContainerConfig(kind="pyxis", image="/i.sqsh", arguments=("--container-mount-home",))
    words = parts.srun_words(ClusterConfig(container=asked), [], work_dir=WORK)
    assert [word for word in words if word.endswith("home")] == ["--container-mount-home"]


@pytest.mark.parametrize("folder", ["/a:b", "/a,b", "/a b", "runs"])
def test_folder_that_cannot_be_mounted_is_refused(folder: str) -> None:
    message = f"'{folder}' cannot be mounted in a container"
    with pytest.raises(ConfigError, match=message):
        parts.srun_words(ClusterConfig(container=PYXIS), [folder], work_dir=WORK)
    cluster = ClusterConfig(container=APPTAINER)
    with pytest.raises(ConfigError, match=message):
        parts.wrapped(cluster, [folder], ["true"], work_dir=WORK, gpus=False)


def test_ranks_keep_to_their_cores_and_the_profile_adds_options() -> None:
    assert parts.rank_options(ClusterConfig()) == "--cpu-bind=cores --distribution=block:block"
    srun = ("--mpi=none", "exact", "--prolog=/my dir/it's $HOME", "network=a b")
    own = ClusterConfig(cpu_bind="map_cpu:0,8", distribution="*:cyclic", srun=srun)
    shown = _bash([f"printf '%s\\n' {parts.rank_options(own)}"])
    assert shown.stdout.splitlines() == ["--cpu-bind=map_cpu:0,8", "--distribution=*:cyclic",
                                         "--mpi=none", "--exact", "--prolog=/my dir/it's $HOME",
                                         "--network=a b"]  # fmt: skip
    assert parts.rank_options(ClusterConfig(cpu_bind="", distribution="")) == ""


@pytest.mark.parametrize(
    ("line", "cancelled"),
    [("exit 0", True), ("exit 2", True), ("exit 28", True), ("exit 75", False),
     ("kill -TERM $$; wait", False), ("(exit 0); exit 75", False)],
)  # fmt: skip
def test_verdicts_end_the_chain_no_signal_does(line: str, cancelled: bool, tmp_path: Path) -> None:
    write_program(tmp_path / "scancel", f'#!/bin/bash\necho "$*" >{tmp_path}/cancelled\n')
    found = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_JOB_ID": "7"}
    _bash(["sleep() { :; }", parts.CHAIN.format(again=75), line], **found)
    assert (tmp_path / "cancelled").exists() == cancelled
    if cancelled:
        assert (tmp_path / "cancelled").read_text() == "--state=PENDING 7\n"
