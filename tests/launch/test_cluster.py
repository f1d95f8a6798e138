"""Cluster profiles: what is refused, with what to change; and those that are shipped."""

import re
from pathlib import Path

import pytest

from launch.cluster import SET_OPTIONS, ClusterConfig, ContainerConfig, PrepJobsConfig, mebibytes
from launch.prep import PrepJob, StagePlan, render_prep
from launch.script import render
from launch.script_parts import sbatch_resources
from launch.submit import Origin, checkout_job
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "configs/cluster").glob("*.yaml"))


@pytest.mark.parametrize(("fields", "message"), [
    ({"mem_per_node": "1.5G"}, "mem_per_node='1.5G'.*K, M, G or T"),
    ({"partition": "a b"}, "partition='a b'"),
    ({"reservation": "x\n"}, "reservation='x.n'"),
    ({"gpu_type": "H200:8"}, "gpu_type='H200:8'"),
    ({"gpu_type": "h200", "gpus_per_node": 0, "ranks_per_node": 1}, "gpu_type.*gpus_per_node"),
    ({"constraint": "ib & h200"}, "constraint='ib & h200'"),
    ({"exclude": "node1 node2"}, "exclude='node1 node2'"),
    ({"modules": ("gcc/13 cuda/13",)}, "modules='gcc/13 cuda/13'"),
    ({"modules": ("a;rm",)}, "modules='a;rm'"),
    ({"network": ("1A=b",)}, "network: '1A=b'.*NAME=value"),
    ({"network": ("A=b\nc",)}, "network: .*NAME=value"),
    ({"network": ("A=1", "A=2")}, "network: .*'A=1' and 'A=2'"),
    ({"network": ("MASTER_ADDR=x",)}, "launcher sets MASTER_ADDR"),
    ({"network": ("SLURM_EXPORT_ENV=NONE",)}, "launcher sets SLURM_EXPORT_ENV"),
    ({"scratch": "scratch"}, "scratch='scratch'"),
    ({"scratch": "/a/$(id)"}, r"scratch='/a/\$\(id\)'"),
    ({"python": "a\nb"}, "python="),
    ({"sbatch": ("-N 4",)}, "sbatch: '-N 4'.*--name=value"),
    ({"sbatch": ("--nodes=4",)}, "'--nodes=4'"),
    ({"sbatch": ("nod=4",)}, "'nod=4'.*sets --nodes"),  # sbatch completes what is cut short
    ({"sbatch": ("--gres=nvme:1",), "gpu_request": "gres"}, "--gres"),
    ({"sbatch": ("--mem-per-cpu=1G",), "mem_per_node": "9G"}, "--mem-per-cpu"),
    ({"requeue": False}, r"requeue=false.*max_restarts.* 51 jobs"),
    ({"sbatch": ("--nice=1", "nice=2")}, "--nice.*twice"),
    ({"srun": ("--label",)}, "sets --label"), ({"srun": ("mpi none",)}, "srun: 'mpi none'"),
    ({"cpu_bind": "all cores"}, "cpu_bind='all cores'"),
    ({"distribution": "; rm"}, "distribution='; rm'"),
    ({"gpus_per_node": 8, "ranks_per_node": 4}, "ranks_per_node=4.*gpus_per_node=8"),
    ({"gpus_per_node": 0}, "gpus_per_node=0.*ranks_per_node"),
    ({"time_limit": "1 day"}, "minutes"), ({"time_limit": ""}, "minutes"),
    ({"time_limit": "5:00"}, "no time is left"),
], ids=str)  # fmt: skip
def test_what_slurm_or_a_shell_misreads_fails(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "a.sif"}, "container.image='a.sif'.*container.kind=none"),
        ({"kind": "apptainer"}, "container.kind=apptainer.*container.image"),
        ({"kind": "singularity", "image": "nvcr.io#a/b"}, "docker://REGISTRY/NAME:TAG"),
        ({"kind": "pyxis", "image": "x.sqsh"}, "./x.sqsh"),
        ({"kind": "pyxis", "image": "/a b.sqsh"}, "/a b.sqsh.*white space"),
        ({"kind": "pyxis", "image": "/x.sqsh", "mounts": ("/a,/b",)}, "container.mounts='/a,/b'"),
        ({"kind": "pyxis", "image": "/x.sqsh", "arguments": ("x",)}, "container.arguments='x'"),
    ],
    ids=str,
)
def test_impossible_container_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContainerConfig(**fields)  # type: ignore[arg-type]


def test_prep_has_options_of_its_own() -> None:
    assert PrepJobsConfig(sbatch=("--constraint=cpu", "gres=nvme:1")).sbatch
    with pytest.raises(ConfigError, match=r"prep\.sbatch: '--array=1'"):
        PrepJobsConfig(sbatch=("--array=1",))
    # Its jobs' ids would be asked for at the local cluster.
    with pytest.raises(ConfigError, match="sbatch: '--clusters=big'"):
        ClusterConfig(sbatch=("--clusters=big",))
    with pytest.raises(ConfigError, match=r"prep\.mem='lots'"):
        PrepJobsConfig(mem="lots")


def test_what_sites_need_is_taken() -> None:
    ClusterConfig(
        gpu_type="nvidia_h100_80gb_hbm3", constraint="[rack1|rack2]&ib", exclude="n[1-3,7],m02",
        partition="a,b", network=("NCCL_IB_HCA=mlx5_0,mlx5_1", "EMPTY="),
        modules=("gcc/13.2.0", "openmpi/4.1.6-cuda"), scratch="${TMPDIR}/$USER/x",
        sbatch=("--switches=1@0:30", "contiguous", "--gres=nvme:950", "--time-min=1:00:00"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "mib"), [("500G", 512_000), ("4gb", 4096), ("2048", 2048), ("512K", 0.5), ("0", 0)]
)
def test_memory_is_read_as_sbatch_reads_it(text: str, mib: float) -> None:
    assert mebibytes(text, "mem") == mib


def _set_by(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_render_and_no_option_of_theirs_can_be_given_again(path: Path) -> None:
    cluster = load(ClusterConfig, path).config
    config = load(PretrainConfig, ROOT / "configs/demo.yaml").config
    run = _set_by(render(checkout_job(config, Origin("c", (), None, "/work")), cluster))
    # Fields that choose nodes may be given in their own words: sbatch takes some of them twice.
    assert run - set(sbatch_resources(cluster)) <= SET_OPTIONS
    job = PrepJob(
        name="p", start=("-m",), config_path="p.yaml", output_dir="data", work_dir="/work"
    )
    [stage] = render_prep([StagePlan("ingest", 9, 1, 1)], cluster, job)
    assert _set_by(stage.scripts[0]) <= SET_OPTIONS
