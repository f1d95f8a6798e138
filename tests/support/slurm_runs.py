"""A training run on a test cluster."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.records import history, script_starts
from pipeline.data.format import DatasetIndex
from pipeline.runtime.checkpoints import read_manifest
from pipeline.runtime.files import read_json_lines
from tests.support.processes import ROOT, python, write_program
from tests.support.ranks import CONFIG, assert_same_bits, records
from tests.support.slurm import ENDED, SlurmCluster

PROFILE: dict[str, object] = {"nodes": 2, "gpus_per_node": 0, "ranks_per_node": 1,
                              "cpus_per_rank": 1, "time_limit": "30", "stop_before_end_s": 90,
                              "python": sys.executable, "max_attempts_without_progress": 3,
                              "hardware": {"start_s": 10},
                              "preflight": {"min_free_gb": 0.5, "min_shm_gb": 0.01}}  # fmt: skip

Place = tuple[int, int]
"""Of a start among all of a run: number of its job, and times that SLURM had put it back."""


def place_of(name: str) -> Place:
    """Place of the start that the launcher calls `JOB.RESTART`."""
    job, _, restart = name.partition(".")
    return int(job), int(restart)


def launch(cluster: SlurmCluster, *words: object, code: int = 0, **variables: str) -> str:
    """Return the output of `python -m launch ...`, or its errors where it must fail.

    It has the cluster's variables and some more.
    """
    return python("-m", "launch", *words, code=code, env={**cluster.environment, **variables})


class SlurmRun:
    """One run, submitted with `python -m launch submit`."""

    def __init__(self, cluster: SlurmCluster, run_dir: Path, dataset: DatasetIndex, *overrides: str,
                 **profile: object) -> None:  # fmt: skip
        """`profile` are fields of the cluster profile that differ from PROFILE."""
        self.cluster, self.run_dir = cluster, run_dir
        config = run_dir.with_suffix(".yaml")
        config.write_text(CONFIG)
        self.python = run_dir.with_suffix(".bin") / "python"
        """Interpreter of the run, unless `profile` names one: a script that may be lost."""
        self.python.parent.mkdir()
        write_program(self.python, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        fields = {**PROFILE, "python": str(self.python), **profile}
        profile_path = run_dir.with_suffix(".cluster.yaml")
        profile_path.write_text(json.dumps(fields))
        self.ranks = 2 * int(str(fields["ranks_per_node"]))
        given = [f"run_dir={run_dir}", f"data.dir={dataset.folder}", *overrides]
        self.launch("submit", str(config), *given, "--cluster", str(profile_path))

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts `python -m launch ...` with the variables of the cluster."""
        return subprocess.Popen([sys.executable, "-m", "launch", *words], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=self.cluster.environment)  # fmt: skip

    def launch(self, *words: str, **variables: str) -> str:
        return launch(self.cluster, *words, **variables)

    def resume(self, **variables: str) -> None:
        self.launch("resume", str(self.run_dir), **variables)

    def cancel_with_save(self) -> None:
        """Cancels the job, which may save first, and waits for its end."""
        self.launch("cancel", str(self.run_dir), "--save")

    @property
    def job(self) -> str:
        newest = sorted((self.run_dir / "launch").glob("[0-9]*/submission.json"))[-1]
        return str(json.loads(newest.read_text())["job"])

    @property
    def log(self) -> str:
        path = self.run_dir / "logs" / f"slurm-{self.job}.log"
        return path.read_text() if path.exists() else ""

    @property
    def step(self) -> int:
        return max((record["step"] for record in records(self.run_dir)), default=0)

    @property
    def saved_step(self) -> int:
        latest = self.run_dir / "checkpoints" / "latest"
        return int(latest.read_text()[5:]) if latest.exists() else 0

    def starts(self) -> list[dict[str, Any]]:
        """Those that got as far as the data, from attempts.jsonl."""
        return read_json_lines(self.run_dir / "attempts.jsonl")

    def decisions(self) -> list[dict[str, Any]]:
        """Of job scripts that lived to the end of an attempt."""
        return history(self.run_dir)

    def wait_for_step(self, step: int, timeout_s: float = 240) -> None:
        self.wait_until(lambda: self.step >= step, f"step {step}", timeout_s)

    def wait_for_start(self, number: int, timeout_s: float = 240) -> None:
        """Waits until the run has started so many times and does steps."""
        self.wait_until(
            lambda: any(record["attempt"] == number for record in records(self.run_dir)),
            f"start {number}", timeout_s,
        )  # fmt: skip

    def wait_for_end(self, timeout_s: float = 400) -> str:
        """Waits until the job stays out of the queue and returns its state."""
        return self.cluster.wait_for(self.job, timeout_s=timeout_s)

    def nodes(self) -> list[int]:
        """Numbers of the job's nodes, from 1; the batch script is on the first."""
        names = self.cluster.run(
            "scontrol", "show", "hostnames", self.cluster.job(self.job)["NodeList"]
        ).split()
        return [self.cluster.nodes.index(name) + 1 for name in names]

    @property
    def restarts(self) -> int:
        """Times that SLURM has put the newest job back into the queue."""
        return int(self.cluster.job(self.job)["Restarts"])

    @property
    def place(self) -> Place:
        """Of the newest job's newest start, or of the one that it waits for."""
        job = self.job
        return int(job), int(self.cluster.job(job)["Restarts"])

    def begun(self) -> dict[Place, float]:
        """When scripts began, in Unix time, of the starts whose script reached the run."""
        lines = script_starts(self.run_dir)
        return {(int(line["job"]), line["restart"]): line["unix_s"] for line in lines}

    def waited_s(self, place: Place, struck: float) -> float:
        """Seconds for which no script of the run ran, from the end of a start on.

        A fault struck that start at a Unix time: SLURM says when a script ended only if the script
        did, which writes down its decision just before.
        """
        begun = self.begun()
        decided = {(int(line["job"]), line["restart"]): line["unix_s"] for line in self.decisions()}
        total, left = 0.0, max(struck, decided.get(place, 0.0))
        for later in sorted(each for each in begun if each > place):
            total += max(0.0, begun[later] - left)
            left = decided.get(later, float("inf"))
        return total

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        """Waits until something is so; fails where waiting is in vain."""

        def is_so() -> object:
            state = self.cluster.state(self.job)
            there = condition()
            # A job that lost a node is NODE_FAIL for a moment.
            has_ended = state in ENDED - {"NODE_FAIL"}
            assert there or not has_ended, f"{state} before: {what}\n{self.log[-5000:]}"
            return there

        self.cluster.wait_until(is_so, what, timeout_s=timeout_s)


def run_locally(run_dir: Path, dataset: DatasetIndex, *overrides: str, ranks: int = 2) -> None:
    """The same run on this machine."""
    config = run_dir.with_suffix(".yaml")
    config.write_text(CONFIG)
    python("-m", "launch", "submit", config, f"run_dir={run_dir}", f"data.dir={dataset.folder}",
           *overrides, "--local", "--ranks", ranks,
           env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


def assert_same(first: Path, second: Path) -> None:
    """Batches and the newest checkpoint's contents of two runs."""
    assert (first / "batches.tsv").read_text() == (second / "batches.tsv").read_text()
    assert_same_bits(first, second)
    folders = [sorted((run / "checkpoints").glob("step-*"))[-1] for run in (first, second)]
    assert len({read_manifest(folder).cursor for folder in folders}) == 1
