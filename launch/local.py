"""`python -m launch local`: a run on this machine, started again when a rank dies.

Each attempt is a torchrun of its own. torchrun's own `--max-restarts` is not used: with torch 2.13
and gloo, restarted ranks find the dead ranks' addresses in the store and fail to connect.
"""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pipeline.errors import (
    EXIT_FAILED_DO_NOT_RETRY,
    EXIT_FAILED_RETRY,
    EXIT_FINISHED,
    EXIT_PREEMPTED,
    EXIT_STOPPED,
)
from pipeline.runtime.env import RUN_DIR_VARIABLE

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS_WITHOUT_PROGRESS = 2


def run_local(config_path: str, overrides: list[str], run_dir: Path, num_ranks: int) -> int:
    """Runs to the end, or until an attempt cannot help.

    Args:
        config_path: YAML file, for the trainer.
        overrides: `section.key=value` texts, for the trainer.
        run_dir: the run's folder, as the config has it.
        num_ranks: processes on this machine.

    Returns:
        An exit code of `pipeline.errors`.
    """
    misses = 0
    while True:
        before = _newest_checkpoint(run_dir)
        code = _attempt(config_path, overrides, run_dir, num_ranks)
        if code != EXIT_FAILED_RETRY:
            return code
        after = _newest_checkpoint(run_dir)
        misses = misses + 1 if after == before else 0
        if misses >= _MAX_ATTEMPTS_WITHOUT_PROGRESS:
            logger.error(
                "error: %d attempts in a row without a new checkpoint (newest: %s); see %s/logs",
                misses, after or "none", run_dir,
            )  # fmt: skip
            return EXIT_FAILED_RETRY
        logger.warning("a rank failed; starting again from checkpoint %s", after or "none")


def _attempt(config_path: str, overrides: list[str], run_dir: Path, num_ranks: int) -> int:
    """One start of all ranks; their own records tell how it ended, torchrun's code does not."""
    records = run_dir / "exit" / "local"
    shutil.rmtree(records, ignore_errors=True)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={num_ranks}", "-m", "pipeline", "pretrain", config_path, *overrides,
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
    codes = [int(path.read_text()) for path in records.glob("rank-*")]
    if EXIT_FAILED_DO_NOT_RETRY in codes:
        return EXIT_FAILED_DO_NOT_RETRY
    if EXIT_STOPPED in codes:
        return EXIT_STOPPED
    for code in (EXIT_FINISHED, EXIT_PREEMPTED):
        if codes == [code] * num_ranks:
            return code
    return EXIT_FAILED_RETRY


def _newest_checkpoint(run_dir: Path) -> str:
    path = run_dir / "checkpoints" / "latest"
    return path.read_text().strip() if path.exists() else ""
