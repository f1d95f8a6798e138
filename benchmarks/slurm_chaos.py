"""One training job on a real SLURM cluster that suffers many random faults; JSON line and table.

    python -m benchmarks.slurm_chaos [--faults 12] [--seed 1] [--slow]
        [--report benchmarks/results/slurm_chaos.md]

Needs SLURM (`apt-get install slurm-wlm iproute2`); its daemons run on six "nodes" of this machine.
A tiny model is trained over gloo on two of them, two ranks each, dropout on. Faults come from a
shuffled deck, which has each kind once and pairs of faults that strike at the same time; each
strikes at a random step, in a save, or in the start of the job, and hits a random rank.
`--slow` adds those that SLURM takes its time for: preemption, lost power, a cut network.

Time lost is from the fault to the next step. "SLURM" is the part of it in which no script of the
job ran: until SLURM notices, and until it starts the job again. Steps done twice are those that
were logged before the fault and done again after it.

Must hold, or the exit code is 1: the one job survives all faults and completes; it never resumes
from before the newest checkpoint; a fault that was announced costs no step; batches.tsv and the
last checkpoint are those of a run on this machine that no fault befell, to the bit.
"""

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from benchmarks.faults import small_dataset
from tests.support.ranks import newest_state, records
from tests.support.slurm import SlurmCluster, why_not
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
)
_PAIRS_A_DECK = 3
_MOMENTS = ("step", "step", "save", "start")
_SETTINGS = {"KillWait": 30}
"""SLURM's default, from SIGTERM to SIGKILL; tests of the launcher have it shorter."""
_TELLS = re.compile(r"^(start|requeue|end): | JOB \d+ ON ")
"""Lines of the job's log that say when it started and why it ended."""
_STEPS_PER_FAULT = 120
"""More than the run does between two of them, on a fast machine, too."""
_EVERY_STEPS = 20
_WITHIN_STEPS = 35
"""Of the first step of a start, a fault strikes."""


class Chaos:
    """One job and what befell it."""

    def __init__(self, cluster: SlurmCluster, run: SlurmRun, seed: int, *, slow: bool) -> None:
        """Nothing has struck yet.

        Args:
            cluster: where it runs.
            run: submitted.
            seed: of faults and moments.
            slow: whether slow faults are among them.
        """
        self._cluster, self._run, self._random = cluster, run, Random(seed)
        self._kinds = [
            name for name, fault in FAULTS.items()
            if (slow or not fault.is_slow) and (cluster.can_cut_network or not fault.needs_network)
        ]  # fmt: skip
        self._deck: list[tuple[str, ...]] = []
        self.rows: list[dict[str, Any]] = []
        """What struck, and what it cost."""

    def strike(self, number: int) -> None:
        """Lets so many faults strike, one after the other.

        Raises:
            AssertionError: the run did not survive one as it must.
        """
        self._run.wait_for_start(1, timeout_s=240)
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
            self._cluster.run("scontrol", "requeue", run.job)
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
        """From the start of the newest script that came so far to its first step."""
        steps = records(self._run.run_dir)
        first_s = min(each["unix_s"] for each in steps if each["attempt"] == steps[-1]["attempt"])
        folder = self._run.run_dir / "launch" / "preflight"
        begun = [float(path.read_text()) for path in folder.glob("*/started")]
        return float(first_s - max(each for each in begun if each < first_s))


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


def by_kind(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What faults of each kind cost."""
    found = {}
    for kind in dict.fromkeys(row["fault"] for row in rows):
        ours = [row for row in rows if row["fault"] == kind]
        survived = [row for row in ours if row["survived"]]
        found[kind] = {"faults": len(ours), "survived": len(survived)}
        if survived:
            lost = [row["lost_s"] for row in survived]
            found[kind] |= {
                "median_s": median(lost), "max_s": max(lost),
                "slurm_s": median(row["slurm_s"] for row in survived),
                "steps_done_twice": sum(row["again"] for row in survived),
            }  # fmt: skip
    return found


def run_campaign(folder: Path, faults: int, seed: int, *, slow: bool) -> dict[str, Any]:
    """Runs all of it; see the module."""
    started = time.monotonic()
    num_steps = _STEPS_PER_FAULT * faults + _STEPS_PER_FAULT
    steps = (
        f"train.num_steps={num_steps}", f"checkpoint.every_steps={_EVERY_STEPS}",
        f"monitor.eval_every_steps={num_steps}",
    )  # fmt: skip
    _say("prepares a dataset")
    dataset = small_dataset(folder)
    _say(f"reference: {num_steps} steps without faults")
    run_locally(folder / "straight", dataset, *steps)
    problems: list[str] = []
    same: dict[str, int] = {}
    (folder / "slurm").mkdir()
    with SlurmCluster(folder / "slurm", num_nodes=6, settings=_SETTINGS) as cluster:
        slurm = cluster.run("sinfo", "--version").split()[-1]
        _say(f"the reference took {time.monotonic() - started:.0f} s; now the job")
        begun = time.monotonic()
        run = SlurmRun(cluster, folder / "run", dataset, *steps, max_attempts_without_progress=10)
        chaos = Chaos(cluster, run, seed, slow=slow)
        try:
            chaos.strike(faults)
            _say("no more faults")
            state = run.wait_for_end(timeout_s=600)
            assert state == "COMPLETED", f"the job ended as {state}\n{run.log[-5000:]}"
            same = differences(run.run_dir, folder / "straight")
        except AssertionError as error:
            problems.append(str(error))
        restarts, job_s = run.restarts, time.monotonic() - begun
        log = [line for line in run.log.splitlines() if _TELLS.search(line)]
    problems += [
        f"{name.replace('_', ' ')}: {number}" for name, number in same.items()
        if number and name != "tensors"
    ]  # fmt: skip
    return {
        "seed": seed, "slow": slow, "steps": num_steps, "checkpoint_every_steps": _EVERY_STEPS,
        "faults": len(chaos.rows), "survived": sum(row["survived"] for row in chaos.rows),
        "restarts": restarts, "job_s": round(job_s), "wall_s": round(time.monotonic() - started),
        "other_restarts": restarts - sum(
            row.get("restarts", 0) + (row["moment"] == "start") for row in chaos.rows
        ),
        "same": same, "problems": problems, "kinds": by_kind(chaos.rows), "rows": chaos.rows,
        "log": log,
        "versions": {"python": platform.python_version(), "machine": platform.machine(),
                     "slurm": slurm, "torch": torch.__version__,
                     "deepspeed": version("deepspeed")},
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The campaign as Markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    slow, same = " --slow" if result["slow"] else "", result["same"]
    verdict = [f"- {text}" for text in result["problems"]] or [
        "Every fault was survived by the one job. No sample was lost or repeated, and all "
        f"{same['tensors']} tensors of the last checkpoint, weights and optimizer, are those of "
        "the run without faults, bit for bit."
    ]
    lines = [
        "# Faults on a SLURM cluster", "",
        f"`python -m benchmarks.slurm_chaos --faults {result['faults']} --seed {result['seed']}"
        f"{slow}`, {versions}; what is done and compared is said in `benchmarks/slurm_chaos.py`. "
        f"{result['faults']} times faults in one job of {result['steps']} steps, a checkpoint "
        f"every {result['checkpoint_every_steps']}; SLURM started it again {result['restarts']} "
        f"times in {result['job_s']} s, {result['other_restarts']} times without a cause from here "
        "(a fault, or a restart to be hit).", "",
        *verdict, "",
        "Seconds from a fault to the next step, how many of them SLURM waited (median), and steps "
        "done twice. A requeued job waits 6 s here; by default SLURM lets it wait 121 s.", "",
        "| fault | times | survived | median, s | most, s | SLURM, s | steps twice |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {kind} | {' | '.join(str(round(value, 1)) for value in row.values())} |"
        for kind, row in result["kinds"].items()
    ]
    lines += [
        "", "In their order:", "",
        "| fault | moment | after step | to the next step, s | SLURM, s | steps twice | restarts |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["rows"]:
        costs = [row.get(name, "-") for name in ("step", "lost_s", "slurm_s", "again", "restarts")]
        lines.append(f"| {row['fault']} | {row['moment']} | {' | '.join(map(str, costs))} |")
    return "\n".join([*lines, ""])


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> None:
    """Runs the campaign and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--faults", type=int, default=12, help="times that faults strike")
    parser.add_argument("--seed", type=int, default=1, help="of faults and moments")
    parser.add_argument("--slow", action="store_true", help="also those that SLURM is slow to see")
    parser.add_argument("--report", type=Path, help="file for the table; default: standard error")
    arguments = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        result = run_campaign(Path(name), arguments.faults, arguments.seed, slow=arguments.slow)
    if arguments.report:
        arguments.report.write_text(table(result), encoding="utf-8")
    else:
        _say(table(result))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
