"""Ranks as processes of this machine: a whole run (`submit --local`), or one rank (`rank`).

A local run is restarted when a rank dies. Each attempt is a torchrun of its own: torchrun's own
`--max-restarts` is not used, because with torch 2.13 and gloo restarted ranks find the dead ranks'
addresses in the store and fail to connect.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from launch.decide import Attempt, Limits, end_attempt, exit_codes, is_done
from launch.records import newest_checkpoint
from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED, EXIT_STOPPED, ConfigError
from pipeline.runtime import env
from pipeline.runtime.env import RUN_DIR_VARIABLE
from pipeline.runtime.run_folder import RunFolder, record_exit

logger = logging.getLogger(__name__)

_JOB = "local"
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def run_local(words: list[str], kind: str, run_dir: Path, num_ranks: int, limits: Limits) -> int:
    """Run to the end, or until another attempt cannot help, and return the exit code.

    `words` are the module of the ranks and its arguments.
    """
    # The time makes the id new: attempts of an earlier call do not count, since a person may have
    # fixed what stopped it.
    job, restart = f"{_JOB}-{time.time_ns()}", 0
    while True:
        before = newest_checkpoint(run_dir)
        _run_ranks(words, run_dir, num_ranks)
        codes = exit_codes(run_dir, _JOB)
        attempt = Attempt(
            job=job,
            restart=restart,
            nodes=(socket.gethostname(),),
            before=before,
            after=newest_checkpoint(run_dir),
            codes=codes,
            ranks=num_ranks,
            is_done=is_done(kind, run_dir, codes, num_ranks),
        )
        decision = end_attempt(attempt, limits, run_dir)
        if attempt.codes == (EXIT_PREEMPTED,) * num_ranks:
            return EXIT_PREEMPTED  # a person or a supervisor asked the ranks to stop
        if decision.word != "requeue":
            quiet = decision.exit_code in (EXIT_FINISHED, EXIT_STOPPED)
            logger.log(logging.INFO if quiet else logging.ERROR, "end: %s", decision.reason)
            return decision.exit_code
        logger.warning("starting again: %s", decision.reason)
        restart += 1


def _run_ranks(words: list[str], run_dir: Path, num_ranks: int) -> None:
    """Start all ranks once and wait; the ranks' records say how it ended, not torchrun's code."""
    shutil.rmtree(RunFolder(run_dir).exits(_JOB), ignore_errors=True)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={num_ranks}", "-m", *words]
    variables = {"OMP_NUM_THREADS": str(threads), **os.environ, RUN_DIR_VARIABLE: str(run_dir)}
    process = subprocess.Popen(command, env=variables)
    try:
        process.wait()
    except BaseException:
        # torchrun passes SIGTERM on; ranks that are past their start save.
        process.terminate()
        process.wait()
        raise


def run_program(words: Sequence[str]) -> int:
    """Run the user's program as one rank of a job, pass signals on, and record its exit code.

    RANK, WORLD_SIZE and the others are in its environment, and it should end with a code of
    `pipeline.errors` (0: done, 75: saved, start again, 2: do not retry). Where signal N ended it,
    the code is 128 + N.
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
    return code
