"""The one place that runs SLURM's commands; it retries while the controller does not answer.

Measured on 22.05: without a controller each command fails by itself after 9 to 20 s (at most twice
`MessageTimeout`), with exit code 1 like any other error, so only the message tells them apart.
"""

import logging
import shlex
import subprocess
import time
from collections.abc import Sequence

from pipeline.errors import EXIT_FAILED_RETRY, ConfigError, PostnormError
from pipeline.runtime.env import child_environment

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a command is retried for a person who waits; job scripts have more time."""
_CALL_S = 120.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_UNREACHED = ("Unable to contact slurm controller", "Unable to contact slurm daemon")
_UNANSWERED = (
    "Socket timed out",
    "Unexpected message received",
    "Zero Bytes were transmitted",
    "Connection timed out",
)
"""With these the request may have reached the controller."""
# Variables of the user that would change what is printed, or which jobs are meant.
_STEERING = ("SQUEUE_", "SACCT_", "SCANCEL_")


class NoSlurmError(ConfigError):
    """This machine has no SLURM commands."""


class SlurmError(PostnormError):
    """SLURM refused what was asked of it."""


class NoAnswerError(SlurmError):
    """SLURM's controller did not answer, so nothing is known of its jobs."""

    exit_code = EXIT_FAILED_RETRY


def run_command(
    command: Sequence[str],
    stdin: str = "",
    *,
    repeatable: bool = True,
    patience_s: float = PATIENCE_S,
) -> str:
    """Run a SLURM command and return its output. Times are printed as Unix seconds.

    While the controller does not answer it is retried; one that is not `repeatable` only where the
    controller was not reached at all. sbatch is not repeatable: it may have submitted.

    Raises:
        NoSlurmError: the command does not exist here.
        NoAnswerError: the controller did not answer.
        SlurmError: SLURM refused.
    """
    end_s, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
    while True:
        code, output, message = _run(command, stdin)
        if code == 0:
            return output
        words = [word for word in command if not word.startswith("--")]
        refusal = f"{shlex.join(words)} failed ({code}): {message}"
        again = _UNREACHED if not repeatable else _UNREACHED + _UNANSWERED
        if not any(text in message for text in _UNREACHED + _UNANSWERED):
            raise SlurmError(refusal)
        if time.monotonic() + wait_s > end_s or not any(text in message for text in again):
            raise NoAnswerError(
                f"{refusal}; SLURM's controller does not answer, so nothing is known of its jobs, "
                "which run on without it: try again later (`scontrol ping` says whether it is back)"
            )
        logger.warning("SLURM's controller does not answer; trying again in %.0f s", wait_s)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _run(command: Sequence[str], stdin: str) -> tuple[int, str, str]:
    """Run once and return exit code, output and message."""
    environment = {
        name: value for name, value in child_environment().items() if not name.startswith(_STEERING)
    }
    environment["SLURM_TIME_FORMAT"] = "%s"
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_CALL_S,
            env=environment,
        )
    except FileNotFoundError:
        raise NoSlurmError(
            f"{command[0]} was not found: this machine has no SLURM, or its commands are not in "
            "PATH; use a login node of the cluster (or print scripts with --dry-run)"
        ) from None
    except subprocess.TimeoutExpired:
        return -1, "", f"Socket timed out: no answer in {_CALL_S:.0f} s"
    return done.returncode, done.stdout, (done.stderr or done.stdout).strip()


def sbatch(words: Sequence[str], script: str = "") -> str:
    """Submit a script, a file among the words or a text, and return the job's id."""
    output = run_command(["sbatch", "--parsable", *words], script, repeatable=False)
    # On a site of several clusters sbatch prints id;cluster.
    return output.strip().partition(";")[0]
