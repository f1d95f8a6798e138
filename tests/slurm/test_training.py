"""Training on a real cluster: the same run as under torchrun, whatever befalls it."""

from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from tests.support.ranks import Ranks
from tests.support.slurm import SlurmCluster
from tests.support.slurm_faults import suffer
from tests.support.slurm_runs import SlurmRun, assert_same, run_locally

STEPS = ("train.num_steps=140", "checkpoint.every_steps=20", "monitor.eval_every_steps=70")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex) -> Path:
    """Never interrupted, on this machine."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    Ranks(run_dir, dataset, *STEPS).ended()
    return run_dir


@pytest.mark.slow
def test_nodes_of_two_ranks(cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path) -> None:
    run_locally(tmp_path / "straight", dataset, *STEPS, ranks=4)
    run = SlurmRun(cluster, tmp_path / "run", dataset, *STEPS, ranks_per_node=2)
    assert run.wait_for_end() == "COMPLETED"
    assert run.log.startswith(f"start: job {run.job}, restart 0, nodes ")
    assert run.log.endswith("end: done; checkpoint step-00000140\n")
    assert (run.run_dir / "done.json").exists()
    assert [decision["decision"] for decision in run.decisions()] == ["finished"]
    assert len({start["host"] for start in run.starts()}) == 1
    assert len(list((run.run_dir / "logs").glob("rank-*.log"))) == 4
    assert_same(run.run_dir, tmp_path / "straight")


@pytest.mark.parametrize(
    "faults",
    [
        ("time limit announced", "power of a worker node"),
        pytest.param(("rank killed", "preempted"), marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_after_two_faults(cluster: SlurmCluster, dataset: DatasetIndex,
                                        straight: Path, tmp_path: Path,
                                        faults: tuple[str, str]) -> None:  # fmt: skip
    run = SlurmRun(cluster, tmp_path / "run", dataset, *STEPS)
    for step, name in zip((30, 80), faults, strict=True):
        run.wait_for_step(step)
        suffer(run, name)
    assert run.wait_for_end() == "COMPLETED"
    assert len(run.starts()) == 3
    assert run.decisions()[-1]["decision"] == "finished"
    assert_same(run.run_dir, straight)
