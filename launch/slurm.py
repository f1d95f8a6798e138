"""The one place that runs SLURM's commands; it retries while the controller does not answer.

Measured on 22.05: without a controller each command fails by itself after 9 to 20 s (at most twice
`MessageTimeout`), with exit code 1 like any other error, so only the message tells them apart.
"""

import logging
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence

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
# Options by another way: a person's, or those of the job that this runs in.
_STEERING = (
    "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SLURM_",
)  # fmt: skip
_ACCESS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""How commands find the controller."""
_JOBS_GET = re.compile(
    "HOME|USER|LOGNAME|SHELL|PATH|LANG|LC_[A-Z]+|TZ|"
    # Modules: the command, and where it looks; not what is loaded, which would not be loaded again.
    r"BASH_ENV|MODULE(PATH|SHOME|S_CMD)|LMOD_\w+|BASH_FUNC_(module|ml|_module_raw)(%%|\(\))"
)


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
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a SLURM command and return its output. Times are printed as Unix seconds.

    While the controller does not answer it is retried; one that is not `repeatable` only where the
    controller was not reached at all. sbatch is not repeatable: it may have submitted. Options of
    SLURM in the environment have no effect; `environment` is passed instead of this process's.

    Raises:
        NoSlurmError: the command does not exist here.
        NoAnswerError: the controller did not answer.
        SlurmError: SLURM refused.
    """
    end_s, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
    while True:
        code, output, message = _run(command, stdin, environment)
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


def job_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the variables that a job gets from this shell: the usual ones, and some by name.

    Raises:
        ConfigError: one of the names is not set.
    """
    every = child_environment()
    if missing := [name for name in names if name not in every]:
        raise ConfigError(
            f"environment of the cluster profile names {', '.join(missing)}, which this shell does "
            "not have; set it, or leave it out"
        )
    return {name: text for name, text in every.items() if _JOBS_GET.fullmatch(name)} | {
        name: every[name] for name in names
    }


def _run(
    command: Sequence[str], stdin: str, given: Mapping[str, str] | None
) -> tuple[int, str, str]:
    """Run once and return exit code, output and message."""
    every = child_environment()
    own = {name: text for name, text in every.items() if not name.startswith(_STEERING)}
    access = {name: every[name] for name in _ACCESS & every.keys()}
    environment = {**(own if given is None else given), **access, "SLURM_TIME_FORMAT": "%s"}
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


def sbatch(words: Sequence[str], script: str = "", *, environment: Mapping[str, str]) -> str:
    """Submit a script, a file among the words or a text, and return the job's id."""
    command = ["sbatch", "--parsable", *words]
    output = run_command(command, script, repeatable=False, environment=environment)
    # On a site of several clusters sbatch prints id;cluster.
    return output.strip().partition(";")[0]
