"""`python -m launch submit --local`: a run on this machine, started again when a rank dies.

Each attempt is a torchrun of its own. torchrun's own `--max-restarts` is not used: with torch 2.13
and gloo, restarted ranks find the dead ranks' addresses in the store and fail to connect.
"""

import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from launch.decide import Attempt, Limits, end_attempt, exit_codes, is_done, newest_checkpoint
from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED, EXIT_STOPPED
from pipeline.runtime.env import RUN_DIR_VARIABLE
from pipeline.runtime.files import EXIT_FOLDER

logger = logging.getLogger(__name__)

_JOB = "local"


def run_local(words: list[str], kind: str, run_dir: Path, num_ranks: int, limits: Limits) -> int:
    """Runs to the end, or until an attempt cannot help.

    Args:
        words: module of the ranks and its arguments.
        kind: of the job.
        run_dir: the run's folder, as the config has it.
        num_ranks: processes on this machine.
        limits: when to give up.

    Returns:
        An exit code of `pipeline.errors`.
    """
    # Attempts of an earlier call do not count: a person may have mended what stopped it.
    job, restart = f"{_JOB}-{time.time_ns()}", 0
    while True:
        before = newest_checkpoint(run_dir)
        _run_ranks(words, run_dir, num_ranks)
        codes = exit_codes(run_dir, _JOB)
        attempt = Attempt(
            job=job, restart=restart, nodes=(socket.gethostname(),), before=before,
            after=newest_checkpoint(run_dir), codes=codes, ranks=num_ranks,
            is_done=is_done(kind, run_dir, codes, num_ranks),
        )  # fmt: skip
        decision = end_attempt(attempt, limits, run_dir)
        if attempt.codes == (EXIT_PREEMPTED,) * num_ranks:
            return EXIT_PREEMPTED  # whoever asked the ranks to stop wants them to
        if decision.word != "requeue":
            quiet = decision.exit_code in (EXIT_FINISHED, EXIT_STOPPED)
            logger.log(logging.INFO if quiet else logging.ERROR, "end: %s", decision.reason)
            return decision.exit_code
        logger.warning("starting again: %s", decision.reason)
        restart += 1


def _run_ranks(words: list[str], run_dir: Path, num_ranks: int) -> None:
    """One start of all ranks; their own records tell how it ended, torchrun's code does not."""
    shutil.rmtree(run_dir / EXIT_FOLDER / _JOB, ignore_errors=True)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={num_ranks}", "-m", *words,
    ]  # fmt: skip
    variables = {"OMP_NUM_THREADS": str(threads), **os.environ, RUN_DIR_VARIABLE: str(run_dir)}
    process = subprocess.Popen(command, env=variables)
    try:
        process.wait()
    except BaseException:
        # torchrun passes it on; the ranks save, if they are past their start.
        process.terminate()
        process.wait()
        raise
