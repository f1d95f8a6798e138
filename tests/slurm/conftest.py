"""A SLURM cluster that tests share, whole again before each of them."""

from collections.abc import Iterator

import pytest

from tests.support.processes import processes as processes
from tests.support.slurm import SlurmCluster, why_not

SETTINGS = {"MaxArraySize": 4}  # small, so that tests reach it


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Four nodes; each worker process of pytest has a cluster of its own."""
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), settings=SETTINGS) as started:
        yield started


@pytest.fixture(autouse=True)
def _mended(cluster: SlurmCluster) -> Iterator[None]:
    """Leaves neither jobs nor faults to the next test."""
    yield
    cluster.mend()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds to a failure what the cluster knows of the jobs that were there."""
    report = yield
    used = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and used:
        report.sections.append(("SLURM", used.tell()))
    return report
