"""The site check against a real SLURM: it and sbatch agree, and sbatch takes what profiles emit."""

import getpass
import time
from pathlib import Path
from typing import Any

import pytest

from launch import site
from launch.cluster import ClusterConfig
from launch.script_parts import sbatch_lines, sbatch_resources, setup_lines
from launch.slurm import run_command
from pipeline.errors import ConfigError
from tests.support.processes import wait_until
from tests.support.slurm import SlurmCluster

ROOT = Path(__file__).parents[2]


def _nightly(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def nodes(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the nodes of a real cluster that this process now talks to."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return [node.name for node in site.read().partitions["train"].nodes]


def _script(cluster: ClusterConfig, *lines: str, **options: object) -> str:
    every = {"nodes": cluster.nodes, "ntasks-per-node": cluster.num_ranks_per_node,
             "cpus-per-task": cluster.cpus_per_rank, "time": cluster.time_limit,
             "mem": cluster.mem_per_node, "partition": cluster.partition,
             **sbatch_resources(cluster), **options}  # fmt: skip
    return "\n".join(["#!/bin/bash", *sbatch_lines(every), "", *lines, ""])


def _cluster(**fields: object) -> ClusterConfig:
    given = {"nodes": 2, "gpus_per_node": 4, "cpus_per_rank": 1, "time_limit": "10",
             "python": "python3", **fields}  # fmt: skip
    return ClusterConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [
    {"gpus_per_node": 8, "gpu_request": "gres", "nodes": 4}, _nightly({"gpus_per_node": 8}),
    _nightly({"exclusive": True, "mem_per_node": "60G", "sbatch": ("--switches=1",)}),
    _nightly({"partition": "low,high"}),
], ids=str)  # fmt: skip
def test_what_fits_is_taken(nodes: list[str], fields: dict[str, object]) -> None:
    cluster = _cluster(**fields)
    assert "fits the site" in site.check(cluster, "pretrain", work_dir=str(ROOT))
    assert "to start at" in site.ask_sbatch(_script(cluster))


@pytest.mark.slow
def test_excluded_nodes_are_known_and_left_out(nodes: list[str]) -> None:
    cluster = _cluster(nodes=1, exclude=",".join(nodes[:-1]))
    site.check(cluster, "pretrain", work_dir=str(ROOT))
    assert f"on nodes {nodes[-1]} " in site.ask_sbatch(_script(cluster))
    with pytest.raises(ConfigError, match=f"{len(nodes)}, {len(nodes) - 1} .*excluded"):
        site.check(_cluster(exclude=cluster.exclude), "pretrain", work_dir=str(ROOT))
    wrong = _cluster(nodes=1, exclude="no-such-node")
    with pytest.raises(ConfigError, match="the site has no no-such-node"):
        site.check(wrong, "pretrain", work_dir=str(ROOT))
    with pytest.raises(ConfigError, match="Invalid node name specified"):
        site.ask_sbatch(_script(wrong))


@pytest.mark.slow
def test_reservation_is_known(nodes: list[str]) -> None:
    name = f"test-{time.time_ns()}"
    cluster = _cluster(nodes=1, reservation=name)
    with pytest.raises(ConfigError, match=f"reservation='{name}' is not known"):
        site.check(cluster, "pretrain", work_dir=str(ROOT))
    with pytest.raises(ConfigError, match="Requested reservation is invalid"):
        site.ask_sbatch(_script(cluster))
    run_command(["scontrol", "create", "reservation", f"reservationname={name}", "starttime=now",
             "duration=5", f"users={getpass.getuser()}", f"nodes={nodes[0]}"])  # fmt: skip
    try:
        site.check(cluster, "pretrain", work_dir=str(ROOT))
        assert f"on nodes {nodes[0]} " in site.ask_sbatch(_script(cluster))
    finally:
        run_command(["scontrol", "delete", f"reservation={name}"])


@pytest.mark.parametrize(
    ("fields", "ours", "theirs"),
    [
        ({"partition": "trian"}, "did you mean 'train'", "invalid partition specified"),
        _nightly({"nodes": 5}, "nodes=5: partition train has 4", "Requested node configuration"),
        _nightly({"gpus_per_node": 9, "cpus_per_rank": 1}, "gpus_per_node=9", "Requested node"),
        _nightly({"gpu_type": "h200"}, "gpu_type='h200'", "Requested node configuration"),
        _nightly({"mem_per_node": "65G"}, "64000M", "Requested node"),
        _nightly({"constraint": "ib"}, "feature 'ib'", "Invalid feature specification"),
    ],
    ids=str,
)
def test_what_does_not_fit_would_be_refused(
    nodes: list[str], fields: dict[str, object], ours: str, theirs: str
) -> None:
    cluster = _cluster(**fields)
    with pytest.raises(ConfigError, match=ours):
        site.check(cluster, "pretrain", work_dir=str(ROOT))
    try:
        answer = site.ask_sbatch(_script(cluster))
    except ConfigError as error:
        answer = str(error)
    assert theirs in answer


@pytest.mark.slow
def test_variables_reach_all_ranks_where_the_site_wants_an_empty_environment(
    nodes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = _cluster(gpus_per_node=0, ranks_per_node=2, network=("NCCL_IB_HCA=mlx5_0,mlx5_1",),
                       scratch=f"{tmp_path}/$SLURM_JOB_ID",
                       setup=("mine=yes; export mine",))  # fmt: skip
    show = """srun bash -c 'echo "$NCCL_IB_HCA $POSTNORM_SCRATCH $mine"'"""
    script = _script(cluster, *setup_lines(cluster), show, output=f"{tmp_path}/log")
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    (tmp_path / "job.sh").write_text(script)
    job = run_command(["sbatch", "--parsable", str(tmp_path / "job.sh")]).strip()
    shown = ["scontrol", "--oneliner", "show", "job", job]
    wait_until(lambda: "COMPLETED" in run_command(shown))
    expected = f"mlx5_0,mlx5_1 {tmp_path}/{job} yes"
    assert (tmp_path / "log").read_text().splitlines() == [expected] * 4
