"""Data preparation as a chain of job arrays on a real cluster: faults, dependencies, mending."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from data_prep.config import PrepConfig
from data_prep.run import run
from pipeline.config.load import load
from tests.support.processes import Processes, python, write_program
from tests.support.slurm import ENDED, SlurmCluster

ROOT = Path(__file__).parents[2]
STAGES = ("ingest", "exact", "dedup", "tokenizer", "shards", "index")
PIECES = 6
DAMAGED = 4
# Runs data preparation, but kills it the first two times that it does the last part of ingest.
_DYING_TWICE = f"""#!/bin/bash
count=$(dirname "$0")/deaths
case "$*" in *"--stage ingest"*"--rank {PIECES - 1}")
  if [ "$(wc -l <"$count")" -lt 2 ]; then
    {sys.executable} "$@" &
    kill -KILL $!
    wait $!
    code=$?
    hostname >>"$count"
    exit $code
  fi
esac
exec {sys.executable} "$@"
"""


@dataclass
class Preparation:
    """A dataset to be made, from a folder with a piece a file."""

    cluster: SlurmCluster | None
    config: Path
    inputs: Path
    folder: Path
    python: str = sys.executable
    most_jobs: int = 0  # that may be in the queue
    jobs: dict[str, list[str]] = field(default_factory=dict)  # of each stage, as last submitted

    @property
    def output(self) -> Path:
        return self.folder / "data"

    @property
    def overrides(self) -> list[str]:
        names = (f"{{name: s{i}, inputs: [{self.inputs}/{i}.jsonl]}}" for i in range(PIECES))
        sources = f"sources=[{', '.join(names)}]"
        return [f"output_dir={self.output}", sources, "clean.max_document_mb=1",
                "tokenizer.vocab_size=400"]  # fmt: skip

    def submit(self) -> dict[str, list[str]]:
        """Submits the chain; returns the jobs of each stage that has something left to do."""
        text = self._command("launch", "submit", "--prep", "--cluster", str(self._profile()))
        found = re.findall(r"^(\w+) +(\d+) +[\d.]+ +([\d ]+)$", text, re.MULTILINE)
        self.jobs = {stage: ids.split() for stage, _, ids in found}
        return self.jobs

    def status(self) -> str:
        return self._command("data_prep", "status")

    def log(self, stage: str, job: str, index: int) -> str:
        return (self.output / f"work/logs/prep-{stage}-{job}_{index}.log").read_text()

    def markers(self) -> dict[str, int]:
        """When each finished task of ingest was done."""
        paths = (self.output / "work").rglob("ingest/*.done.json")
        return {path.name: path.stat().st_mtime_ns for path in paths}

    def _profile(self) -> Path:
        path = self.folder / "cluster.yaml"
        path.write_text(
            f"python: {self.python}\nprep: {{array_tasks: {PIECES}, cores: 1}}\n"
            f"max_submit_jobs: {self.most_jobs}\n"
        )
        return path

    def start_rolling(self, processes: Processes) -> "subprocess.Popen[str]":
        """Submits array after array, as there is room."""
        words = ["submit", "--prep", "--cluster", str(self._profile()), "--wait-room", "1"]
        command = [sys.executable, "-m", "launch", *words, str(self.config), *self.overrides]
        with (self.folder / "rolling.log").open("ab") as log:
            return processes.start(
                command, cwd=ROOT, env=self.cluster.environment, stdout=log, stderr=log
            )

    def _command(self, program: str, *words: str) -> str:
        command = ["-m", program, *words, self.config, *self.overrides]
        return python(*command, env=self.cluster.environment)


@pytest.fixture(autouse=True)
def _mended() -> None:
    """Not between these tests: the chains go on side by side, as most of their time is waiting."""


@pytest.fixture(scope="module")
def cluster(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    yield cluster
    cluster.mend()


@pytest.fixture(scope="module")
def texts(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    lines = corpus.read_text().splitlines(keepends=True)[:300]
    for i in range(PIECES):
        (folder / f"{i}.jsonl").write_text("".join(lines[i::PIECES]))
    return folder


@pytest.fixture(scope="module")
def local(texts: Path, prep_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset as one process makes it."""
    made = Preparation(None, prep_config, texts, tmp_path_factory.mktemp("local"))
    run(load(PrepConfig, prep_config, made.overrides).config)
    return made.output


@pytest.fixture(scope="module")
def dying(
    cluster: SlurmCluster, prep_config: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Preparation:
    """A task of it is killed twice; submitted and under way."""
    folder = tmp_path_factory.mktemp("dying")
    program = write_program(folder / "python", _DYING_TWICE)
    (folder / "deaths").touch()
    made = Preparation(cluster, prep_config, texts, folder, str(program))
    made.submit()
    return made


@pytest.fixture(scope="module")
def damaged(
    cluster: SlurmCluster, prep_config: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Preparation:
    """A document of one piece is longer than allowed; submitted and under way."""
    folder = tmp_path_factory.mktemp("damaged")
    inputs = folder / "texts"
    shutil.copytree(texts, inputs)
    with (inputs / f"{DAMAGED}.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "text": "many words " * 100_000}) + "\n")
    made = Preparation(cluster, prep_config, inputs, folder)
    made.submit()
    return made


def _files(folder: Path) -> dict[str, str]:
    """Hash of every file of a dataset that does not say where and when it was made."""
    paths = [*folder.glob("shards/*.tar"), *folder.glob("index.*"), folder / "tokenizer.model"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.slow
def test_failing_task_stops_the_chain(
    dying: Preparation, damaged: Preparation, cluster: SlurmCluster
) -> None:
    """`dying` is only submitted here, so that it is under way."""
    jobs = damaged.jobs
    for stage in STAGES[1:]:
        (job,) = jobs[stage]
        assert cluster.wait_for(job) == "FAILED", stage
        assert "stage ingest failed" in damaged.log(stage, job, 0)
    states = [cluster.state(f"{job}_{i}") for job in jobs["ingest"] for i in range(PIECES // 2)]
    assert states == ["FAILED" if i == DAMAGED else "COMPLETED" for i in range(PIECES)]
    # The queue has nothing of it.
    left = {job.partition("_")[0] for job, state in cluster.jobs().items() if state not in ENDED}
    assert not left & {job for ids in jobs.values() for job in ids}
    why = rf"{damaged.inputs}/{DAMAGED}\.jsonl: .* longer than clean\.max_document_mb"
    assert re.search(rf"^failed: ingest {DAMAGED:05d}: DataError: {why}", damaged.status(), re.M)
    log = damaged.log("ingest", jobs["ingest"][1], DAMAGED - PIECES // 2)
    assert f"end: stage ingest, part {DAMAGED} of {PIECES}" in log
    assert re.search(rf"^error: {why}", log, re.M)


@pytest.mark.slow
def test_submission(damaged: Preparation, texts: Path, local: Path, cluster: SlurmCluster) -> None:
    name = f"{DAMAGED}.jsonl"
    shutil.copy(texts / name, damaged.inputs / name)
    before = damaged.markers()
    assert len(before) == PIECES - 1
    jobs = damaged.submit()
    assert list(jobs) == list(STAGES)
    # One element, of one array.
    (job,) = jobs["ingest"]
    assert cluster.job(job)["ArrayTaskId"] == str(DAMAGED - PIECES // 2)
    cluster.wait_for(jobs["index"][0], "COMPLETED", timeout_s=120)
    assert before.items() < damaged.markers().items()
    assert _files(damaged.output) == _files(local)
    assert damaged.submit() == {}


def test_task_that_dies_twice_is_tried_again(dying: Preparation, cluster: SlurmCluster) -> None:
    jobs = dying.jobs
    cluster.wait_for(jobs["index"][0], "COMPLETED", timeout_s=120)
    assert len((dying.folder / "deaths").read_text().splitlines()) == 2
    part = PIECES - 1
    index = part - PIECES // 2
    assert cluster.job(f"{jobs['ingest'][1]}_{index}")["Restarts"] == "2"
    assert cluster.job(f"{jobs['ingest'][1]}_0")["Restarts"] == "0"
    lines = dying.log("ingest", jobs["ingest"][1], index).splitlines()
    told = [line for line in lines if line.startswith(("requeue:", "end:"))]
    again = [f"requeue: exit code 137, failure {count} of 3" for count in (1, 2)]
    assert told == [*again, "end: done"]


def test_chain_makes_same_dataset(dying: Preparation, local: Path, cluster: SlurmCluster) -> None:
    cluster.wait_for(dying.jobs["index"][0], "COMPLETED", timeout_s=120)
    assert _files(dying.output) == _files(local)
    # More parts than an array of this cluster may have (`SETTINGS` of conftest.py).
    assert len(dying.jobs["ingest"]) == 2
    assert dying.submit() == {}


@pytest.mark.slow
def test_arrays_follow_each_other_below_the_limit_although_the_submission_is_killed(
    cluster: SlurmCluster,
    processes: Processes,
    prep_config: Path,
    texts: Path,
    local: Path,
    tmp_path: Path,
) -> None:
    """Last, since its limit counts the jobs of all chains."""
    made = Preparation(cluster, prep_config, texts, tmp_path, most_jobs=4)
    most = []

    def submitted() -> int:
        mine = cluster.run("squeue", "--noheader", "--array", "--format=%k|%T").splitlines()
        most.append(sum(line.startswith(f"{made.output}|") for line in mine))
        path = made.output / "work/logs/submitted.json"
        jobs = json.loads(path.read_text())["jobs"] if path.exists() else {}
        return sum(map(len, jobs.values()))

    first = made.start_rolling(processes)
    cluster.wait_until(lambda: submitted() >= 3, "three arrays are submitted", timeout_s=240)
    first.kill()
    first.wait()
    second = made.start_rolling(processes)
    cluster.wait_until(lambda: submitted() and second.poll() is not None, "all", timeout_s=400)
    assert second.returncode == 0, (tmp_path / "rolling.log").read_text()
    jobs = json.loads((made.output / "work/logs/submitted.json").read_text())["jobs"]
    assert set(jobs) == set(STAGES)
    assert len(jobs["ingest"]) == PIECES
    cluster.wait_for(jobs["index"][0], "COMPLETED", timeout_s=120)
    assert 0 < max(most) <= made.most_jobs
    # Every part of ingest has one log: no job came twice.
    logs = (made.output / "work/logs").glob("prep-ingest-*.log")
    parts = [re.findall(r"^start: stage ingest, part (\d+)", log.read_text(), re.M) for log in logs]
    assert sorted(parts) == [[str(part)] for part in range(PIECES)]
    assert _files(made.output) == _files(local)
