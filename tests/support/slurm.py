"""A real SLURM cluster of several nodes on this machine, and the faults that clusters have.

    with SlurmCluster(folder) as cluster:
        job = cluster.sbatch("#!/bin/bash\\nsrun hostname\\n", "--nodes=2")
        cluster.poweroff(2)
        cluster.wait_for(job, "COMPLETED")

`python -m tests.support.slurm` opens a shell in which sbatch, squeue and the others speak to one.
Nothing of a cluster outlives the process that started it; see `slurm_machines`.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import psutil

from tests.support import slurm_conf, slurm_machines
from tests.support.leftovers import environment_of
from tests.support.processes import write_program
from tests.support.slurm_machines import CLIENTS, Machines

ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
     "TIMEOUT")
)  # fmt: skip
"""States that a job stays in, unless a person requeues it."""

_TAKES_JOBS = ("idle", "planned", "mixed", "allocated")


def why_not() -> str:
    """What is missing for a cluster, and how to install it; empty if nothing is."""
    needed = ("slurmctld", "slurmd", *CLIENTS)
    missing = [name for name in needed if not slurm_machines.program(name)]
    if not missing:
        return ""
    return (
        f"needs SLURM ({', '.join(missing)} not found): "
        "apt-get install slurm-wlm iproute2, which needs no configuration"
    )


class SlurmCluster:
    """Nodes are numbered from 1; jobs are named by their id as text, `7_1` for an array's element.

    Everything that waits is bounded, and fails with the jobs and the end of the controller's log.
    """

    def __init__(self, folder: Path, *, num_nodes: int = 4,
                 settings: Mapping[str, object] | None = None,
                 machines: Machines | None = None) -> None:  # fmt: skip
        """Prepares a cluster of at most 9 nodes, in a new folder on a short path.

        `settings` are lines of slurm.conf, `machines` the best kind that this user may have by
        default.
        """
        self.folder = folder
        self._settings = dict(settings or {})
        self._machines = machines or slurm_machines.make(folder, num_nodes)
        self.nodes = [node.name for node in self._machines.nodes]
        self.can_cut_network = self._machines.can_cut_network
        self._off: set[int] = set()
        self._cut: set[int] = set()
        self._of_earlier_tests: set[str] = set()
        own = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
        self._daemon_environment = {**own, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment = {**self._daemon_environment,
                            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}  # fmt: skip
        """For programs that call SLURM's commands."""

    def __enter__(self) -> "SlurmCluster":
        """Starts the controller and all nodes, and waits until they take jobs."""
        slurm_conf.write(
            self.folder, self._machines.controller, self._machines.nodes, self._settings
        )
        try:
            self._machines.start()
            self._write_clients()
            self.start_controller()
            for number in range(1, len(self.nodes) + 1):
                self.boot(number)
            self.wait_for_nodes()
        except BaseException:
            self._machines.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything at once; only `folder` stays."""
        self._machines.stop()

    # Jobs.

    def run(self, *command: str, stdin: str = "") -> str:
        """What a program prints, such as `scontrol`, run where SLURM's commands are at hand."""
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False,
                              timeout=60, env=self.environment)  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, script: str, *options: str) -> str:
        return self.run("sbatch", "--parsable", *options, stdin=script).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job, such as JobState, Restarts, NodeList, Reason."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """Such as PENDING, RUNNING, COMPLETING or one of ENDED."""
        return self.job(job)["JobState"]

    def jobs(self) -> dict[str, str]:
        """States of all jobs that were ever submitted, each element of an array for itself."""
        lines = self.run(
            "squeue", "--noheader", "--states=all", "--array", "--format=%i %T"
        ).splitlines()
        return dict(line.split() for line in reversed(lines))  # type: ignore[misc]

    def wait_for(self, job: str, *states: str, timeout_s: float = 60) -> str:
        """Waits for one of some states, by default one that a job stays in, and returns it.

        Fails as soon as the job has ended in another one.
        """
        wanted = states or tuple(ENDED)

        def is_there() -> bool:
            state = self.state(job)
            assert state in wanted or state not in ENDED, f"job {job}: {state}\n{self.tell()}"
            return state in wanted

        self.wait_until(is_there, f"job {job} {' or '.join(wanted)}", timeout_s=timeout_s)
        return self.state(job)

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}\n{self.tell()}"
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """Cancels all jobs and waits until they have left their nodes."""
        left = {job.partition("_")[0] for job, state in self.jobs().items() if state not in ENDED}
        if left:
            self.run("scancel", *left)
        self.wait_until(lambda: not set(self.jobs().values()) - ENDED, "all jobs cancelled")

    def tell(self) -> str:
        """For a failure: jobs and nodes, details and logs of this test's jobs, slurmctld's log."""
        logs = [self.folder / "log/slurmctld.log"]
        parts = []
        if self._machines.has_controller:  # without, each question takes half a minute
            jobs = [job for job in self.jobs() if job not in self._of_earlier_tests]
            questions = ["squeue --states=all", "sinfo --Node --long --partition=train"]
            questions += [f"scontrol show job {job}" for job in jobs]
            parts += [self._try_to_run(question.split()) for question in questions]
            logs += [Path(self.job(job).get("StdOut", "none")) for job in jobs]
        for log in filter(Path.is_file, logs):
            lines = log.read_text(errors="replace").splitlines()[-25:]
            parts.append("\n".join([f"end of {log}:", *lines, ""]))
        return "\n".join(parts)

    # Faults.

    def poweroff(self, number: int) -> None:
        """Ends everything on a node at once.

        The controller notices after 5 to 30 s, whatever SlurmdTimeout says.
        """
        self._machines.poweroff(number)
        self._off.add(number)

    def boot(self, number: int) -> None:
        slurmd = slurm_machines.program("slurmd")
        assert slurmd
        command = [slurmd, "-D", "-N", self.nodes[number - 1]]
        self._machines.boot(number, command, self._daemon_environment)
        self._off.discard(number)

    def netcut(self, number: int) -> None:
        """Cuts a node off the network, while its processes live on; see `can_cut_network`."""
        self._machines.cable(number, plugged=False)
        self._cut.add(number)

    def netheal(self, number: int) -> None:
        self._machines.cable(number, plugged=True)
        self._cut.discard(number)

    def start_controller(self) -> None:
        """Starts the controller's daemon and waits until it answers."""
        slurmctld = slurm_machines.program("slurmctld")
        assert slurmctld
        self._machines.run_controller([slurmctld, "-D"], self._daemon_environment)

        def answers() -> bool:
            assert self._machines.has_controller, f"slurmctld has ended\n{self.tell()}"
            return "is UP" in self._try_to_run(["scontrol", "ping"])

        self.wait_until(answers, "slurmctld answers")

    def kill_controller(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends the controller's daemon; SIGTERM lets it save its state."""
        self._machines.kill_controller(number)

    def restart_controller(self) -> None:
        self.kill_controller(signal.SIGTERM)
        self.start_controller()

    @contextmanager
    def preempting(self) -> Iterator[str]:
        """A job in partition `high` on all nodes, while the block runs."""
        options = ["--exclusive", "--partition=high", "--output=/dev/null"]
        job = self.sbatch("#!/bin/bash\nsleep 1000\n", f"--nodes={len(self.nodes)}", *options)
        try:
            yield job
        finally:
            self.run("scancel", job)

    def processes(self, number: int) -> list[psutil.Process]:
        """All processes of a node, with their ids as seen from here."""
        return self._machines.processes(number)

    def tasks(self, job: str) -> dict[int, psutil.Process]:
        """The processes that srun started for a job, by rank, to be killed or stopped."""
        found = {}
        number = self.job(job)["JobId"]
        for process in chain.from_iterable(map(self.processes, range(1, len(self.nodes) + 1))):
            with suppress(OSError, psutil.Error):
                variables = environment_of(process)
                parent = process.parent()
                is_started = parent and parent.name().startswith("slurmstepd")
                # The batch script has the rank of a task and no step.
                if (is_started and variables.get("SLURM_JOB_ID") == number
                        and "SLURM_STEP_ID" in variables):  # fmt: skip
                    found[int(variables["SLURM_PROCID"])] = process
        return found

    def wait_for_tasks(self, job: str, ranks: int) -> None:
        """Waits until all ranks of a job are processes."""
        self.wait_for(job, "RUNNING")
        self.wait_until(lambda: len(self.tasks(job)) == ranks, f"job {job} has {ranks} tasks")

    def node_states(self) -> dict[str, str]:
        """Such as idle, allocated or down; with `*` while a node does not answer."""
        columns = ["--noheader", "--Node", "--partition=train", "--format=%N %T"]
        lines = self.run("sinfo", *columns).splitlines()
        return dict(line.split() for line in lines)  # type: ignore[misc]

    def wait_for_nodes(self) -> None:
        """Waits until all nodes take jobs."""

        def missing() -> set[str]:
            states = self.node_states().items()
            return set(self.nodes) - {name for name, state in states if state in _TAKES_JOBS}

        self.wait_until(lambda: not missing(), "all nodes take jobs")

    def mend(self) -> None:
        """Undoes all faults and cancels all jobs, for the next test."""
        if not self._machines.has_controller:
            self.start_controller()
        for number in sorted(self._cut):
            self.netheal(number)
        for number in sorted(self._off):
            self.boot(number)
        self.cancel_all()
        self.wait_until(lambda: "*" not in str(self.node_states()), "all nodes answer")
        for name, state in self.node_states().items():
            if "drain" in state:  # refused where it just got its right to jobs by itself
                self._try_to_run(["scontrol", "update", f"nodename={name}", "state=resume"])
        self.wait_for_nodes()
        self._of_earlier_tests = set(self.jobs())

    def _write_clients(self) -> None:
        """Commands of SLURM that work from here; jobs get the PATH that there was before."""
        (self.folder / "bin").mkdir(exist_ok=True)
        for name in CLIENTS:
            path = slurm_machines.program(name)
            assert path
            words = shlex.join(["env", f"PATH={os.environ['PATH']}", *self._machines.wrap(path)])
            write_program(self.folder / "bin" / name, f'#!/bin/sh\nexec {words} "$@"\n')

    def _try_to_run(self, command: list[str]) -> str:
        try:
            return self.run(*command)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return f"{error}\n"


if __name__ == "__main__":
    if why_not():
        sys.exit(why_not())
    with tempfile.TemporaryDirectory(prefix="slurm-") as home, SlurmCluster(Path(home)) as cluster:
        print(f"cluster in {home}; it ends with this shell")
        subprocess.run([os.environ.get("SHELL", "bash")], env=cluster.environment, check=False)
