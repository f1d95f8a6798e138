"""Cluster profiles: what is refused, with what to change; and those that are shipped."""

import re
from pathlib import Path

import pytest

from launch.cluster import SET_OPTIONS, ClusterConfig, ContainerConfig, PrepJobsConfig, mebibytes
from launch.prep import PrepJob, StagePlan, render_prep
from launch.script import render
from launch.script_parts import sbatch_resources
from launch.submit import Source, checkout_job
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "configs/cluster").glob("*.yaml"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mem_per_node": "1.5G"}, "mem_per_node='1.5G': expected a whole number and K, M, G or T"),
        ({"partition": "a b"}, "partition='a b': expected a name as SLURM shows it"),
        ({"reservation": "x\n"}, "reservation='x.n': expected a name"),
        ({"gpu_type": "H200:8"}, "gpu_type='H200:8': expected a name"),
        ({"gpu_type": "h200", "gpus_per_node": 0, "ranks_per_node": 1}, "leave out one"),
        ({"constraint": "ib & h200"}, "constraint='ib & h200': expected features joined by"),
        ({"exclude": "node1 node2"}, "exclude='node1 node2': expected node names"),
        ({"modules": ("gcc/13 cuda/13",)}, "modules='gcc/13 cuda/13': expected names"),
        ({"modules": ("",)}, "modules=' ': expected names"),
        ({"modules": ("a;rm",)}, "modules='a;rm': expected names"),
        ({"network": ("NCCL_DEBUG",)}, "'NCCL_DEBUG' is not a variable; expected NAME=value"),
        ({"network": ("1A=b",)}, "network: '1A=b' is not a variable"),
        ({"network": ("A=b\nc",)}, "is not a variable; expected NAME=value on one line"),
        ({"network": ("A=1", "A=2")}, "network: A is given twice, 'A=1' and 'A=2'; keep one"),
        ({"network": ("MASTER_ADDR=x",)}, "the launcher sets MASTER_ADDR itself; leave it out"),
        ({"network": ("SLURM_EXPORT_ENV=NONE",)}, "the launcher sets SLURM_EXPORT_ENV itself"),
        ({"scratch": "scratch"}, "scratch='scratch': expected a whole path"),
        ({"scratch": "/a/$(id)"}, r"scratch='/a/\$\(id\)': expected a whole path"),
        ({"scratch": "$"}, "expected a whole path"),
        ({"python": "a\nb"}, "python=.*: expected one line"),
        ({"sbatch": ("-N 4",)}, "sbatch: '-N 4' is not an option; expected --name or --name=value"),
        ({"sbatch": ("--switches 1",)}, "is not an option; expected --name or --name=value"),
        ({"sbatch": ("--nodes=4",)}, "'--nodes=4': the launcher or another field sets --nodes"),
        # sbatch completes what is cut short.
        ({"sbatch": ("nod=4",)}, "'nod=4': the launcher or another field sets --nodes"),
        ({"sbatch": ("--constraint=a",)}, "the launcher or another field sets --constraint"),
        ({"sbatch": ("--exclusive",)}, "the launcher or another field sets --exclusive"),
        ({"sbatch": ("--gres=nvme:1",), "gpu_request": "gres"}, "another field sets --gres"),
        ({"sbatch": ("--mem-per-cpu=1G",), "mem_per_node": "9G"}, "field sets --mem-per-cpu"),
        ({"requeue": False}, r"requeue=false queues max_restarts \+ 1 = 51 jobs .* at most: set"),
        ({"sbatch": ("--nice=1", "nice=2")}, "sbatch: --nice is given twice; keep one"),
    ],
    ids=str,
)  # fmt: skip
def test_what_slurm_or_the_shell_would_misread_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "a.sif"}, "container.image='a.sif' has no effect with container.kind=none"),
        ({"kind": "apptainer"}, "container.kind=apptainer needs container.image"),
        ({"kind": "podman"}, r"needs container.image, such as registry\.example"),
        ({"kind": "podman", "image": "/x.sif"}, "podman takes the name of an image or an archive"),
        ({"kind": "podman", "image": "a/b:1", "arguments": ("--detach",)}, "foreground"),
        ({"kind": "podman", "image": "a/b:1", "arguments": ("--name=x",)}, "leave it out"),
        ({"kind": "enroot", "image": "docker://a/b"}, "`enroot import`"),
        ({"kind": "enroot", "image": "nvcr.io#a/b"}, "`enroot import`"),
        ({"kind": "singularity", "image": "nvcr.io#a/b"}, "docker://REGISTRY/NAME:TAG"),
        ({"kind": "pyxis", "image": "x.sqsh"}, "a value that does not start with / or .* ./x.sqsh"),
        ({"kind": "pyxis", "image": "/a b.sqsh"}, "expected a path or name without white space"),
        ({"kind": "pyxis", "image": "/x.sqsh", "mounts": ("data",)}, "container.mounts='data'"),
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
    with pytest.raises(ConfigError, match=r"prep\.sbatch: '--array=1': the launcher or another"):
        PrepJobsConfig(sbatch=("--array=1",))
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
    run = _set_by(render(checkout_job(config, Source("c", (), None, "/work")), cluster))
    # Fields that choose nodes may be given in their own words: sbatch takes some of them twice.
    assert run - set(sbatch_resources(cluster)) <= SET_OPTIONS
    job = PrepJob(
        name="p", start=("-m",), config_path="p.yaml", output_dir="data", work_dir="/work"
    )
    [stage] = render_prep([StagePlan("ingest", 9, 1, 1)], cluster, job)
    assert _set_by(stage.scripts[0]) <= SET_OPTIONS


def test_example_profiles_show_every_container_and_style() -> None:
    shown = [load(ClusterConfig, path).config for path in PROFILES]
    assert {cluster.container.kind for cluster in shown} == {"none", "apptainer", "pyxis"}
    assert {cluster.gpu_request for cluster in shown} == {"gpus-per-node", "gres"}
    assert {bool(cluster.gpus_per_node) for cluster in shown} == {True, False}
