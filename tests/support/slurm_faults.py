"""What can befall a training run on a test cluster, and what it costs the run."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

from pipeline.errors import EXIT_FAILED_RETRY, EXIT_FINISHED
from tests.support.ranks import records
from tests.support.slurm_runs import Place, SlurmRun, place_of

NOTICED_WITHIN_S = 180

_STRAY = {"SBATCH_ARRAY_INX": "0-3", "SBATCH_EXPORT": "NONE", "SBATCH_NO_REQUEUE": "1",
          "SBATCH_OPEN_MODE": "truncate", "SBATCH_PARTITION": "high", "SBATCH_TIMELIMIT": "1",
          "SLURM_CPU_BIND": "none such", "SLURM_EXPORT_ENV": "NONE", "SLURM_JOB_ID": "1",
          "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_RESTART_COUNT": "99",
          "SRUN_CPUS_PER_TASK": "99", "RANK": "7", "WORLD_SIZE": "99",
          "MASTER_ADDR": "none.such"}  # fmt: skip
"""Of a shell that is itself in a job, and of a user who has defaults of his own for sbatch."""
_OF_THE_PROFILE = ("TimeLimit", "Requeue", "Partition", "NumNodes", "NumTasks", "CPUs/Task")
"""What `scontrol show job` says of a job that the profile decides."""


@dataclass(frozen=True)
class Blow:
    """A fault with all that had to be looked up for it, so that it strikes at once."""

    strike: Callable[[], object]
    relent: Callable[[], object] = lambda: None  # when SLURM has noticed
    heal: Callable[[], object] = lambda: None  # when the run goes on


@dataclass(frozen=True)
class Fault:
    """Something that befalls a run."""

    aim: Callable[[SlurmRun, Random], Blow]
    is_announced: bool = False  # the ranks hear of it in time to save
    ends_attempt: bool = True  # the job starts again after it
    needs_network: bool = False  # nodes must have networks of their own


@dataclass(frozen=True)
class Toll:
    """What faults that struck at once have cost a run."""

    step: int  # the last one before them that was logged
    lost_s: float  # from them to the next step
    waited_s: float  # of it, from the end of an attempt to the start of the next one's script
    again: int  # steps that were done twice
    restarts: int  # of the job, or of one that took its place


def suffer(run: SlurmRun, *names: str, choice: Random | None = None,
           moment: Callable[[], object] = lambda: None) -> Toll:  # fmt: skip
    """Lets FAULTS strike together, waits until the run goes on, and returns the toll.

    `choice` decides which rank or node is hit, always the same by default; `moment` is waited for
    when all is prepared. Fails if the run does not go on, or from an older step than it must.
    """
    faults = [FAULTS[name] for name in names]
    blows = [fault.aim(run, choice or Random(0)) for fault in faults]
    before = run.place
    moment()
    saved, struck = run.saved_step, time.time()
    for blow in blows:
        blow.strike()
    ends = any(fault.ends_attempt for fault in faults)
    if ends:
        run.wait_until(lambda: run.place > before, f"{names} noticed", NOTICED_WITHIN_S)
    for blow in blows:
        blow.relent()
    since = time.time()
    if ends:
        run.wait_until(lambda: _later_starts(run, before), f"a start after {names}", 240)
        later = _later_starts(run, before)
        first, resumed = later[0]["attempt"], later[0]["resumed_from_step"] or 0
        run.wait_until(lambda: _steps(run, first, struck), f"a step after {names}", 120)
        # A start that steps were done again in may not have come as far as one before it.
        last = ([0] + [each["step"] for each in _steps(run) if each["attempt"] < first])[-1]
    else:
        first = len(run.starts())
        run.wait_until(lambda: _steps(run, first, since), f"a step after {names}", 120)
        assert run.place == before, f"{names} ended an attempt"
        last = resumed = run.step
    for blow in blows:
        blow.heal()
    assert resumed >= saved, f"{names}: resumed at {resumed}, saved was {saved}"
    again = max(0, last - resumed)
    is_announced = all(fault.is_announced for fault in faults)
    assert not (again and is_announced), f"{names}: {again} steps up to {last} were done twice"
    next_s = min(each["unix_s"] for each in _steps(run, first, struck))
    waited_s = run.waited_s(before, struck) if ends else 0.0
    restarts = sum(place > before for place in run.begun())
    return Toll(last, next_s - struck, waited_s, again, restarts)


def _later_starts(run: SlurmRun, place: Place) -> list[dict[str, Any]]:
    """Those after one; a start that is being ended may still join the earlier ones."""
    return [start for start in run.starts() if place_of(start["job"]) > place]


def _steps(run: SlurmRun, attempt: int = 1, moment: float = 0.0) -> list[dict[str, Any]]:
    """Steps that were done by a start or later ones, after a moment in Unix time."""
    every = records(run.run_dir)
    return [each for each in every if each["attempt"] >= attempt and each["unix_s"] > moment]


def _tell_job(*command: str) -> Callable[[SlurmRun, Random], Blow]:
    def aim(run: SlurmRun, _choice: Random) -> Blow:
        job = run.job
        return Blow(lambda: run.cluster.run(*command, job))

    return aim


def _kill_rank(run: SlurmRun, choice: Random) -> Blow:
    run.cluster.wait_for_tasks(run.job, run.ranks)
    tasks = run.cluster.tasks(run.job)
    return Blow(tasks[choice.choice(sorted(tasks))].kill)


def _preempt(run: SlurmRun, _choice: Random) -> Blow:
    stack = ExitStack()
    return Blow(lambda: stack.enter_context(run.cluster.preempting()), stack.close)


def _power_off(place: int) -> Callable[[SlurmRun, Random], Blow]:
    def aim(run: SlurmRun, _choice: Random) -> Blow:
        number = run.nodes()[place]
        return Blow(lambda: run.cluster.poweroff(number), heal=lambda: run.cluster.boot(number))

    return aim


def _cut_network(place: int) -> Callable[[SlurmRun, Random], Blow]:
    def aim(run: SlurmRun, _choice: Random) -> Blow:
        number = run.nodes()[place]
        # A node that is cut off runs its ranks on, which may hold the lock of the run.
        return Blow(lambda: run.cluster.netcut(number), lambda: run.cluster.netheal(number))

    return aim


def _kill_controller(run: SlurmRun, choice: Random) -> Blow:
    away_s = choice.uniform(0.5, 4)

    def strike() -> None:
        run.cluster.kill_controller()
        time.sleep(away_s)
        run.cluster.start_controller()

    return Blow(strike)


def _lose_python(run: SlurmRun, choice: Random) -> Blow:
    """The job must end and name the interpreter that is missing; a person puts it back."""
    job, kill, away = run.job, _kill_rank(run, choice).strike, run.python.with_suffix(".away")

    def strike() -> None:
        run.python.rename(away)
        kill()
        run.cluster.wait_for(job, "FAILED", timeout_s=NOTICED_WITHIN_S)
        last = run.log.splitlines()[-1]
        assert last.startswith("end: the launcher cannot be started"), run.log[-5000:]
        assert str(run.python) in last
        away.rename(run.python)
        run.resume()

    return Blow(strike)


def _lose_folder_of_python(run: SlurmRun, choice: Random) -> Blow:
    """The job must name it and wait, as for a mount that is gone for a while."""
    kill, folder = _kill_rank(run, choice).strike, run.python.parent
    away, waits = folder.with_suffix(".away"), f"{run.python} cannot be read"

    def strike() -> None:
        told = run.log.count(waits)
        folder.rename(away)
        kill()
        run.wait_until(lambda: run.log.count(waits) > told, f"{waits!r} in the log", 60)
        away.rename(folder)

    return Blow(strike)


def _resume_with_stray_variables(run: SlurmRun, _choice: Random) -> Blow:
    """The new job must be as the profile says."""
    expected = {name: run.cluster.job(run.job)[name] for name in _OF_THE_PROFILE}

    def strike() -> None:
        run.cancel_with_save()
        run.resume(**_STRAY)

    def compare() -> None:
        job = run.cluster.job(run.job)
        assert {name: job[name] for name in expected} == expected, job

    return Blow(strike, heal=compare)


def _resume_twice(run: SlurmRun, _choice: Random) -> Blow:
    """One job must come of it, and one refusal that says why."""

    def strike() -> None:
        run.cancel_with_save()
        known = set(run.cluster.jobs())
        both = [run.start("resume", str(run.run_dir)) for _ in range(2)]
        messages = [process.communicate()[1] for process in both]
        codes = [process.returncode for process in both]
        assert sorted(codes) == [EXIT_FINISHED, EXIT_FAILED_RETRY], (codes, messages)
        refusal = messages[codes.index(EXIT_FAILED_RETRY)]
        in_queue = f"job {run.job} of {run.run_dir} is in the queue"
        assert f"{run.run_dir} is being submitted" in refusal or in_queue in refusal, refusal
        assert set(run.cluster.jobs()) - known == {run.job}

    return Blow(strike)


FAULTS = {
    "time limit announced": Fault(
        _tell_job("scancel", "--batch", "--signal=USR1"), is_announced=True
    ),
    "requeued by an administrator": Fault(_tell_job("scontrol", "requeue"), is_announced=True),
    "rank killed": Fault(_kill_rank),
    "preempted": Fault(_preempt, is_announced=True),
    "power of a worker node": Fault(_power_off(-1)),
    "power of the batch node": Fault(_power_off(0)),
    "network of a worker node": Fault(_cut_network(-1), needs_network=True),
    "network of the batch node": Fault(_cut_network(0), needs_network=True),
    # Together with others it comes last: nothing can be asked while it is away.
    "controller restarted": Fault(
        lambda run, _choice: Blow(run.cluster.restart_controller), ends_attempt=False
    ),
    "controller killed": Fault(_kill_controller, ends_attempt=False),
    # These end at once what runs, so that together with others they come last, too.
    "interpreter gone": Fault(_lose_python),
    "folder of the interpreter gone": Fault(_lose_folder_of_python),
    "stray SBATCH_ variables": Fault(_resume_with_stray_variables, is_announced=True),
    "two submissions at once": Fault(_resume_twice, is_announced=True),
}
