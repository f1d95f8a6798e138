"""Starts `pipeline.use.probe` on a checkpoint, and takes one that fails out of the way."""

import json
import logging
import subprocess
import time
from pathlib import Path

from pipeline.checkpoints.manifest import LATEST_FILE, REJECTED, published
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, RejectedError
from pipeline.runtime import env
from pipeline.runtime.files import sync_path, write_atomic

logger = logging.getLogger(__name__)

_PROGRAM = "pipeline.use.probe"


class Probe:
    """One look at a checkpoint by another process. To be used by rank 0, from any thread."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False

    def run(self, path: Path) -> float | None:
        """Waits for the verdict.

        Returns:
            Seconds that it took; None if there is no verdict: the process was cancelled, killed or
            did not start.

        Raises:
            RejectedError: the checkpoint is unusable; it has another name now.
        """
        if self._cancelled:
            return None
        started = time.perf_counter()
        # Without a GPU, whose memory the run needs.
        variables = env.child_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        self._process = subprocess.Popen(
            [*env.module_command(_PROGRAM), str(path)],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._cancelled:
            self._process.kill()
        output, complaints = self._process.communicate()
        took_s = time.perf_counter() - started
        if self._cancelled:
            logger.warning("the probe of %s was given up: the run stops", path)
            return None
        code = self._process.returncode
        found = _parsed(output)
        if code == EXIT_FINISHED and "num_parameters" in found:
            logger.info(
                "probe: %s is good: %s parameters and their optimizer state, read by another "
                "process in %.1f s", path, f"{found['num_parameters']:,}", took_s,
            )  # fmt: skip
            return took_s
        if code == EXIT_FAILED_DO_NOT_RETRY and "error" in found:
            raise _rejection(path, str(found["error"]))
        logger.warning(
            "the probe of %s came to no verdict, exit code %s: %s", path, code, complaints[-2000:]
        )
        return None

    def cancel(self) -> None:
        """Ends a process that runs; the checkpoint keeps its name."""
        self._cancelled = True
        if self._process is not None:
            self._process.kill()


def _rejection(path: Path, reason: str) -> RejectedError:
    """Hides a checkpoint from every later start."""
    hidden = path.with_name(f"{REJECTED}{path.name}-{time.time_ns() // 1_000_000}")
    path.rename(hidden)
    earlier = published(path.parent)
    latest = path.parent / LATEST_FILE
    if earlier:
        write_atomic(latest, f"{earlier[0].name}\n".encode())
    else:
        latest.unlink(missing_ok=True)
    sync_path(path.parent)
    return RejectedError(
        f"checkpoint {path.name} was read back and rejected: {reason}. It is {hidden} now, remove "
        f"it when you have seen enough; {earlier[0] if earlier else 'no checkpoint'} is before it. "
        "Check storage and memory, then start the run again"
    )


def _parsed(output: str) -> dict[str, object]:
    try:
        found = json.loads(output)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
