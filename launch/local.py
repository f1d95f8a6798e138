"""Processes of this machine: a whole run (`submit --local`), many, or one rank (`rank`).

A local run is restarted when a rank dies. The ranks are plain processes and not torchrun's: it
answers Ctrl-C and every failure with a traceback of its own, and with torch 2.13 and gloo the ranks
that it restarts find the dead ranks' addresses in its store and fail to connect.
"""

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from launch.decide import JobAttempt, Limits, end_attempt, read_end
from launch.records import EVALUATE, progress
from pipeline.errors import (
    EXIT_FAILED_DO_NOT_RETRY,
    EXIT_FAILED_RETRY,
    EXIT_FINISHED,
    EXIT_PREEMPTED,
    EXIT_STOPPED,
    ConfigError,
)
from pipeline.runtime import env, summary
from pipeline.runtime.env import RUN_DIR_VARIABLE, START_VARIABLE
from pipeline.runtime.notify import notify_end
from pipeline.runtime.run_folder import RunFolder, record_exit

logger = logging.getLogger(__name__)

_NO_FAILURE = (EXIT_FINISHED, EXIT_PREEMPTED)
_TO_END_S = 30.0
_LOOK_EVERY_S = 0.1
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def run_local(words: list[str], kind: str, run_dir: Path, num_ranks: int, limits: Limits) -> int:
    """Run to the end, or until another attempt cannot help, and return the exit code.

    `words` are the module of the ranks and its arguments.

    Raises:
        RunFolderError: the folder cannot be written.
        KeyboardInterrupt: a signal ended the ranks, and not all of them had saved.
    """
    RunFolder(run_dir).create()
    # The time makes the id new: attempts of an earlier call do not count, since a person may have
    # fixed what stopped it.
    job, restart = f"local-{time.time_ns()}", 0
    while True:
        before = progress(kind, run_dir)
        start = f"{job}.{restart}"
        is_asked = _run_ranks(words, run_dir, num_ranks, start)
        nodes = (socket.gethostname(),)
        begun = JobAttempt(job=job, restart=restart, nodes=nodes, before=before, ranks=num_ranks)
        attempt = read_end(begun, kind, run_dir)
        decision = end_attempt(attempt, limits, run_dir)
        has_saved = attempt.codes == (EXIT_PREEMPTED,) * num_ranks
        goes_on = not (has_saved or is_asked)
        if kind != EVALUATE:
            notify_end(run_dir, start, decision.word, decision.reason, goes_on=goes_on)
        if has_saved:
            return EXIT_PREEMPTED  # asked to stop, of which rank 0 has told
        if decision.word != "requeue":
            quiet = decision.exit_code in (EXIT_FINISHED, EXIT_STOPPED)
            logger.log(logging.INFO if quiet else logging.ERROR, "end: %s", decision.reason)
            return decision.exit_code
        if is_asked:
            raise KeyboardInterrupt(attempt.newest)
        logger.warning("starting again: %s", decision.reason)
        restart += 1


def _run_ranks(words: list[str], run_dir: Path, num_ranks: int, start: str) -> bool:
    """Run all ranks once, and return whether a signal asked them to stop.

    The ranks' records say how it ended. A second signal kills them.
    """
    group = {
        # Before the environment, so that a value of the user's wins.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
        **os.environ,
        RUN_DIR_VARIABLE: str(run_dir),
        START_VARIABLE: start,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    processes: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        _send(processes, number if len(asked) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        for rank in map(str, range(num_ranks)):
            command = [*env.module_command(words[0]), *words[1:]]
            variables = {**group, "RANK": rank, "LOCAL_RANK": rank}
            processes.append(subprocess.Popen(command, env=variables))
        if asked:
            _send(processes, asked[0])  # those that came after the signal
        _wait(processes)
    finally:
        _send(processes, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
    return bool(asked)


def _wait(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait until all ranks have ended; where one fails, the others get a while to end, too."""
    failed_s: float | None = None
    while None in [rank.poll() for rank in ranks]:
        is_failed = any(rank.returncode not in (None, *_NO_FAILURE) for rank in ranks)
        if is_failed and failed_s is None:
            failed_s = time.monotonic()
            # Otherwise they wait for the dead one in a collective, until that times out.
            _send(ranks, signal.SIGTERM)
        if failed_s is not None and time.monotonic() - failed_s > _TO_END_S:
            _send(ranks, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)


def _send(processes: Sequence["subprocess.Popen[bytes]"], number: int) -> None:
    for process in processes:
        process.send_signal(number)  # nothing, to one that has ended


def _free_port() -> int:
    with socket.socket() as free:
        # Somebody may take it before rank 0 does: then the attempt fails, and the next asks for
        # another.
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_side_by_side(
    commands: Mapping[str, tuple[list[str], Path]], jobs: int, ranks: int
) -> dict[str, int]:
    """Run commands of `ranks` processes each, `jobs` at a time, with their output in files.

    Signals are passed on, and none starts after one. Return the exit codes by name, EXIT_PREEMPTED
    for those that a signal let save or kept from starting.

    Raises:
        KeyboardInterrupt: a signal ended the runs, and not all of them had saved.
    """
    waiting, running = list(commands), dict[int, tuple[str, subprocess.Popen[bytes]]]()
    codes: dict[str, int] = {}
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        _send([process for _, process in running.values()], number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        with summary.progress("runs", len(commands), "run", logs=False) as advance:
            while running or (waiting and not asked):
                for slot in set(range(jobs)) - set(running):
                    if waiting and not asked:
                        name = waiting.pop(0)
                        running[slot] = (name, _start(*commands[name], slot, jobs, ranks))
                        logger.info("%s: started, output in %s", name, commands[name][1])
                        if asked:  # by a signal that came while it started
                            _send([running[slot][1]], asked[0])
                time.sleep(_LOOK_EVERY_S)
                for slot, (name, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        codes[name] = process.returncode
                        told = f"{len(codes)} of {len(commands)} have ended"
                        logger.info("%s: exit code %d; %s", name, process.returncode, told)
                        advance(1)
    finally:
        _send([process for _, process in running.values()], signal.SIGTERM)
        for number, handler in before.items():
            signal.signal(number, handler)
    unsaved = [name for name, code in codes.items() if code not in _NO_FAILURE]
    if asked and unsaved:
        raise KeyboardInterrupt(f"not all runs had saved: {', '.join(unsaved)}")
    return {**codes, **dict.fromkeys(waiting, EXIT_PREEMPTED)}


def combined_exit_code(codes: Iterable[int]) -> int:
    """Combine exit codes: 0 if all finished, else the most severe one.

    A run that cannot go on comes first, then one that failed otherwise, one that a person stopped,
    and one that saved and waits to be started again.
    """
    known = (EXIT_PREEMPTED, EXIT_STOPPED, EXIT_FAILED_RETRY, EXIT_FAILED_DO_NOT_RETRY)
    given = {code if code in known else EXIT_FAILED_RETRY for code in codes if code}
    return max(given, key=known.index, default=EXIT_FINISHED)


def _start(
    command: list[str], log: Path, slot: int, jobs: int, ranks: int
) -> "subprocess.Popen[bytes]":
    """Start one of several commands with its share of the cores and GPUs of this machine."""
    cores = (os.cpu_count() or 1) // (jobs * ranks)
    variables = {"OMP_NUM_THREADS": str(max(1, cores)), **os.environ}
    gpus = _gpus()
    if gpus:
        mine = [gpus[(slot * ranks + rank) % len(gpus)] for rank in range(ranks)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(mine))
    with log.open("ab") as file:
        # In a session of its own, Ctrl-C reaches it once, by us, and not by the terminal as well.
        return subprocess.Popen(
            command, stdout=file, stderr=file, env=variables, start_new_session=True
        )


def _gpus() -> list[str]:
    """List the GPUs that commands may use, by number or name."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    devices = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((name for name in devices if name.isdigit()), key=int)


def run_program(words: Sequence[str]) -> int:
    """Run the user's program as one rank of a job, pass signals on, and record its exit code.

    RANK, WORLD_SIZE and the others are in its environment, and it should end with a code of
    `pipeline.errors` (0: done, 75: saved, start again, 2: do not retry). Where signal N ended it,
    the code is 128 + N.

    Returns:
        That code, but 0 for 75.
    """
    process, run_dir = env.process_info(), env.launched_run_dir()
    if run_dir is None:
        raise ConfigError(f"{RUN_DIR_VARIABLE} is not set: only job scripts call this command")
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # Before the program starts: by default SIGUSR1 would end this process and leave the program.
    for name in _PASSED_ON:
        signal.signal(name, pass_on)
    try:
        child = subprocess.Popen(words)
    except OSError as error:
        record_exit(Path(run_dir), process, ConfigError.exit_code)
        raise ConfigError(f"{words[0]} cannot be started: {error.strerror}") from None
    for missed in early:
        child.send_signal(missed)
    code = child.wait()
    code = code if code >= 0 else 128 - code
    record_exit(Path(run_dir), process, code)
    # srun ends all ranks with the first that fails, and some may still save; the record counts.
    return EXIT_FINISHED if code == EXIT_PREEMPTED else code
