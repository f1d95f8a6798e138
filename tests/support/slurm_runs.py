"""A training run on a test cluster, and what can befall it there."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoints.manifest import read_manifest
from pipeline.data.shards import DatasetIndex
from tests.support.ranks import CONFIG, records
from tests.support.slurm import SlurmCluster

ROOT = Path(__file__).parents[2]
PROFILE: dict[str, object] = {
    "nodes": 2, "gpus_per_node": 0, "ranks_per_node": 2, "cpus_per_rank": 1,
    "time_limit": "30", "stop_before_end_s": 90, "python": sys.executable,
    "max_attempts_without_progress": 3, "hardware": {"start_s": 10},
    "preflight": {"min_free_gb": 0.5, "min_shm_gb": 0.01},
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Something that ends an attempt."""

    strike: Callable[["SlurmRun"], None]
    is_announced: bool
    """Whether the ranks hear of it in time to save."""


class SlurmRun:
    """One run, submitted with `python -m launch submit`."""

    def __init__(
        self, cluster: SlurmCluster, run_dir: Path, dataset: DatasetIndex, *overrides: str,
        **profile: object,
    ) -> None:  # fmt: skip
        """Submits it.

        Args:
            cluster: that runs it.
            run_dir: new folder.
            dataset: to train on.
            overrides: of the config in `tests.support.ranks`.
            profile: fields of the cluster profile that differ from PROFILE.
        """
        self.cluster, self.run_dir = cluster, run_dir
        self._config = run_dir.with_suffix(".yaml")
        self._config.write_text(CONFIG)
        self._profile = run_dir.with_suffix(".cluster.yaml")
        self._profile.write_text(json.dumps({**PROFILE, **profile}))
        self._overrides = [f"run_dir={run_dir}", f"data.dir={dataset.folder}", *overrides]
        self.launch("submit", str(self._config), *self._overrides, "--cluster", str(self._profile))

    def launch(self, *words: str, code: int = 0) -> str:
        """Output of `python -m launch ...`, which must end with an exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "launch", *words], capture_output=True, text=True, cwd=ROOT,
            env=self.cluster.environment,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def resume(self, *overrides: str) -> None:
        """Submits the run again."""
        self.launch("resume", str(self.run_dir), *overrides)

    @property
    def job(self) -> str:
        """Id of the newest job."""
        newest = sorted((self.run_dir / "launch").glob("[0-9]*/submission.json"))[-1]
        return str(json.loads(newest.read_text())["job"])

    @property
    def log(self) -> str:
        """Of the newest job."""
        path = self.run_dir / "logs" / f"slurm-{self.job}.log"
        return path.read_text() if path.exists() else ""

    @property
    def step(self) -> int:
        """The last one that was logged."""
        return max((record["step"] for record in records(self.run_dir)), default=0)

    @property
    def saved_step(self) -> int:
        """Of the newest checkpoint."""
        latest = self.run_dir / "checkpoints" / "latest"
        return int(latest.read_text()[5:]) if latest.exists() else 0

    def starts(self) -> list[dict[str, Any]]:
        """Those that got as far as the data, from attempts.jsonl."""
        path = self.run_dir / "attempts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def decisions(self) -> list[dict[str, Any]]:
        """Of job scripts that lived to the end of an attempt."""
        path = self.run_dir / "launch" / "history.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        """Waits until a step is logged."""
        self.cluster.wait_until(
            lambda: self._goes_on() and self.step >= step, f"step {step}", timeout_s=timeout_s
        )

    def wait_for_start(self, number: int, timeout_s: float = 180) -> None:
        """Waits until the run has started so many times and does steps."""
        self.cluster.wait_until(
            lambda: self._goes_on() and len(self.starts()) >= number
            and any(record["attempt"] == number for record in records(self.run_dir)),
            f"start {number}", timeout_s=timeout_s,
        )  # fmt: skip

    def wait_for_end(self, timeout_s: float = 180) -> str:
        """Waits until the job stays out of the queue and returns its state."""
        return self.cluster.wait_for(self.job, timeout_s=timeout_s)

    def suffer(self, name: str) -> float:
        """Waits for a step after a save, strikes, and waits until the run goes on.

        Returns:
            Seconds from the fault to the next step.
        """
        number = len(self.starts())
        fault = FAULTS[name]
        before = self.saved_step
        fault.strike(self)
        started = time.monotonic()
        self.wait_for_start(number + 1)
        took_s = time.monotonic() - started
        self.check_resume(number, fault, before)
        return took_s

    def check_resume(self, number: int, fault: Fault, saved_before: int) -> None:
        """That start `number` was continued from where it must be."""
        last = max(r["step"] for r in records(self.run_dir) if r["attempt"] == number)
        resumed = self.starts()[number]["resumed_from_step"]
        if fault.is_announced:
            assert resumed >= last, f"steps {resumed} to {last} were done twice"
        assert resumed >= saved_before, f"resumed at {resumed}, saved was {saved_before}"

    def node_of(self, rank: int) -> int:
        """Number of a rank's node, from 1."""
        names = self.cluster.run(
            "scontrol", "show", "hostnames", self.cluster.job(self.job)["NodeList"]
        ).split()
        per_node = int(str(PROFILE["ranks_per_node"]))
        return self.cluster.nodes.index(names[rank // per_node]) + 1

    def _goes_on(self) -> bool:
        """Fails where waiting is in vain."""
        state = self.cluster.state(self.job)
        assert state not in ("FAILED", "TIMEOUT", "CANCELLED"), f"{state}\n{self.log[-5000:]}"
        return True


def _announce_limit(run: SlurmRun) -> None:
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job)


def _requeue(run: SlurmRun) -> None:
    run.cluster.run("scontrol", "requeue", run.job)


def _kill_rank(run: SlurmRun, rank: int = 3) -> None:
    run.cluster.tasks(run.job)[rank].send_signal(signal.SIGKILL)


def _preempt(run: SlurmRun) -> None:
    restarts = int(run.cluster.job(run.job)["Restarts"])
    with run.cluster.preempting():
        run.cluster.wait_until(
            lambda: int(run.cluster.job(run.job)["Restarts"]) > restarts, "preempted", timeout_s=90
        )


def _power_off(rank: int) -> Callable[[SlurmRun], None]:
    def strike(run: SlurmRun) -> None:
        number, restarts = run.node_of(rank), int(run.cluster.job(run.job)["Restarts"])
        run.cluster.poweroff(number)
        run.cluster.wait_until(
            lambda: int(run.cluster.job(run.job)["Restarts"]) > restarts, "noticed", timeout_s=120
        )
        run.cluster.boot(number)

    return strike


def _cut_network(run: SlurmRun) -> None:
    number, restarts = run.node_of(3), int(run.cluster.job(run.job)["Restarts"])
    run.cluster.netcut(number)
    run.cluster.wait_until(
        lambda: int(run.cluster.job(run.job)["Restarts"]) > restarts, "noticed", timeout_s=180
    )
    run.cluster.netheal(number)


FAULTS = {
    "time limit announced": Fault(_announce_limit, is_announced=True),
    "requeued by an administrator": Fault(_requeue, is_announced=True),
    "rank killed": Fault(_kill_rank, is_announced=False),
    "preempted": Fault(_preempt, is_announced=True),
    "power of a worker node": Fault(_power_off(3), is_announced=False),
    "power of the batch node": Fault(_power_off(0), is_announced=False),
    "network of a node": Fault(_cut_network, is_announced=False),
}


def run_locally(run_dir: Path, dataset: DatasetIndex, *overrides: str) -> None:
    """The same run with torchrun, on four ranks of this machine."""
    config = run_dir.with_suffix(".yaml")
    config.write_text(CONFIG)
    subprocess.run(
        [sys.executable, "-m", "launch", "submit", str(config), f"run_dir={run_dir}",
         f"data.dir={dataset.folder}", *overrides, "--local", "--ranks", "4"],
        cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
    )  # fmt: skip


def assert_same(first: Path, second: Path) -> None:
    """Batches and the newest checkpoint's contents of two runs."""
    from tests.support.ranks import newest_state

    assert (first / "batches.tsv").read_text() == (second / "batches.tsv").read_text()
    ours, theirs = newest_state(first), newest_state(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.equal(theirs[name]), name
    folders = [sorted((run / "checkpoints").glob("step-*"))[-1] for run in (first, second)]
    assert len({read_manifest(folder).cursor for folder in folders}) == 1
