"""The part of the campaign of faults that strikes a training job on a real SLURM cluster.

SLURM's daemons run on six "nodes" of this machine. A tiny model is trained over gloo on two of
them, two ranks each, dropout on. Faults come from a shuffled deck, which has each kind of
`tests.support.slurm_faults` once and pairs of faults that strike at the same time; each strikes at
a random step, in a save, or in the start of the job, and hits a random rank.

Time lost is from the fault to the next step. "slurm_s" is the part of it in which no script of the
run ran: until SLURM notices, and until it starts the job again. Steps done "again" are those that
were logged before the fault and done once more after it.

Must hold, or there are problems: the run survives all faults and completes; it never resumes from
before the newest checkpoint; a fault that was announced costs no step; batches.tsv and the last
checkpoint are those of a run on this machine that no fault befell, to the bit.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import torch

from pipeline.data.format import DatasetIndex
from tests.support.ranks import newest_state, records
from tests.support.slurm import SlurmCluster
from tests.support.slurm_faults import FAULTS, suffer
from tests.support.slurm_runs import SlurmRun, run_locally

_PAIRS = (
    ("rank killed", "requeued by an administrator"),
    ("time limit announced", "rank killed"),
    ("rank killed", "controller restarted"),
    ("requeued by an administrator", "controller restarted"),
    ("preempted", "rank killed"),
    ("power of a worker node", "power of the batch node"),
    ("time limit announced", "power of the batch node"),
    ("power of a worker node", "controller restarted"),
    ("network of a worker node", "rank killed"),
    ("rank killed", "two submissions at once"),
    ("stray SBATCH_ variables", "controller restarted"),
)
_PAIRS_A_DECK = 4
_MOMENTS = ("step", "step", "save", "start")
_SETTINGS = {"KillWait": 30}
"""SLURM's default, from SIGTERM to SIGKILL; tests of the launcher have it shorter."""
_STEPS_PER_FAULT = 120
"""More than the run does between two of them, on a fast machine, too."""
_EVERY_STEPS = 20
_WITHIN_STEPS = 35
"""Of the first step of a start, a fault strikes."""


class _Campaign:
    """One run and what befell it."""

    def __init__(self, run: SlurmRun, seed: int) -> None:
        self._run, self._random = run, Random(seed)
        self._kinds = [
            name for name, fault in FAULTS.items()
            if run.cluster.can_cut_network or not fault.needs_network
        ]  # fmt: skip
        self._deck: list[tuple[str, ...]] = []
        self.rows: list[dict[str, Any]] = []
        """What struck, and what it cost."""

    def strike(self, number: int) -> None:
        """Lets so many faults strike, one after the other; fails where the run does not survive."""
        self._run.wait_for_start(1)
        for _ in range(number):
            self._deck = self._deck or self._shuffled()
            names, moment = self._deck.pop(), self._random.choice(_MOMENTS)
            self.rows.append({"fault": " + ".join(names), "moment": moment, "survived": False})
            within = self._come(moment)
            toll = suffer(self._run, *names, choice=self._random, moment=within)
            self.rows[-1] |= {
                "survived": True, "step": toll.step, "lost_s": round(toll.lost_s, 1),
                "slurm_s": round(toll.waited_s, 1), "again": toll.again, "restarts": toll.restarts,
            }  # fmt: skip
            _say(f"{len(self.rows)}/{number} {json.dumps(self.rows[-1])}")

    def _shuffled(self) -> list[tuple[str, ...]]:
        pairs = [pair for pair in _PAIRS if set(pair) <= set(self._kinds)]
        deck = [(name,) for name in self._kinds]
        deck += self._random.sample(pairs, min(len(pairs), _PAIRS_A_DECK))
        self._random.shuffle(deck)
        return deck

    def _come(self, moment: str) -> Callable[[], object]:
        """Waits until faults may be prepared; returns what then waits for the moment itself."""
        run = self._run
        if moment == "start":
            restarts, usual_s = run.restarts, self._startup_s()
            run.cluster.run("scontrol", "requeue", run.job)
            run.wait_until(
                lambda: f"restart {restarts + 1}, nodes" in run.log, "started again", 120
            )
            time.sleep(self._random.uniform(0, usual_s))
            return lambda: None
        run.wait_for_step(run.step + self._random.randint(1, _WITHIN_STEPS))
        return self._wait_for_save if moment == "save" else lambda: None

    def _wait_for_save(self) -> None:
        folder, saved = self._run.run_dir / "checkpoints", self._run.saved_step
        deadline = time.monotonic() + 60
        while not any(folder.glob(".saving-*")):
            # One that was quicker than a look at the folder is as good.
            if self._run.saved_step > saved or time.monotonic() > deadline:
                return
            time.sleep(0.0005)
        time.sleep(self._random.uniform(0, 0.03))

    def _startup_s(self) -> float:
        """Seconds from the start of the newest script that reached a step to that step."""
        steps = records(self._run.run_dir)
        first_s = min(each["unix_s"] for each in steps if each["attempt"] == steps[-1]["attempt"])
        return float(first_s - max(each for each in self._run.begun().values() if each < first_s))


def run_slurm(folder: Path, dataset: DatasetIndex, faults: int, seed: int) -> dict[str, Any]:
    """Strikes one run; see the module.

    Args:
        folder: a new one, on a short path.
        dataset: to train on.
        faults: number of times that a fault, or two at once, strike.
        seed: of faults and moments.

    Returns:
        `rows`, one a strike: `fault`, `moment` and `survived` and, if so, the last `step` before
        it, seconds `lost_s` and `slurm_s`, steps done `again`, and `restarts` after it;
        `problems`, as texts; what is the `same` (`differences`); `steps` of the run,
        `checkpoint_every_steps`, `restarts`, seconds `job_s` from the first job's submission to
        the end of the last one, and the version of `slurm`.
    """
    num_steps = _STEPS_PER_FAULT * (faults + 1)
    steps = (
        f"train.num_steps={num_steps}", f"checkpoint.every_steps={_EVERY_STEPS}",
        f"monitor.eval_every_steps={num_steps}",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"reference for SLURM: {num_steps} steps without faults")
    run_locally(folder / "straight", dataset, *steps)
    problems: list[str] = []
    same: dict[str, int] = {}
    (folder / "slurm").mkdir()
    with SlurmCluster(folder / "slurm", num_nodes=6, settings=_SETTINGS) as cluster:
        slurm = cluster.run("sinfo", "--version").split()[-1]
        _say("the cluster is up; now the job")
        begun = time.monotonic()
        run = SlurmRun(
            cluster, folder / "run", dataset, *steps,
            max_attempts_without_progress=10, max_restarts=10 * faults + 10,
        )  # fmt: skip
        campaign = _Campaign(run, seed)
        try:
            campaign.strike(faults)
            _say("no more faults")
            state = run.wait_for_end(timeout_s=600)
            assert state == "COMPLETED", f"the job ended as {state}\n{run.log[-5000:]}"
            same = differences(run.run_dir, folder / "straight")
        except AssertionError as error:
            problems.append(str(error))
        job_s = time.monotonic() - begun
    problems += [
        f"{name.replace('_', ' ')}: {number}" for name, number in same.items()
        if number and name != "tensors"
    ]  # fmt: skip
    return {
        "rows": campaign.rows, "problems": problems, "same": same, "steps": num_steps,
        "checkpoint_every_steps": _EVERY_STEPS, "restarts": len(run.begun()) - 1,
        "job_s": round(job_s), "slurm": slurm,
    }  # fmt: skip


def differences(run_dir: Path, straight: Path) -> dict[str, int]:
    """Samples that a run lost or repeated, and tensors that differ, against a run without faults.

    Args:
        run_dir: of the run.
        straight: folder of the other.
    """
    expected, found = (
        (folder / "batches.tsv").read_text().splitlines()[1:] for folder in (straight, run_dir)
    )
    ours, theirs = newest_state(run_dir), newest_state(straight)
    return {
        "samples_lost": _sequences(set(expected) - set(found)),
        "samples_repeated": _sequences(found) - _sequences(set(found)),
        "samples_not_expected": _sequences(set(found) - set(expected)),
        "tensors": len(theirs),
        "tensors_that_differ": sum(
            name not in ours or not torch.equal(ours[name], theirs[name]) for name in theirs
        ) + len(ours.keys() - theirs.keys()),
    }  # fmt: skip


def _sequences(lines: Iterable[str]) -> int:
    return sum(int(line.split("\t")[2]) for line in lines)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
