"""The one place that runs SLURM's commands; it retries while the controller does not answer."""

import logging
import re
import shlex
import subprocess
import time
from collections.abc import Sequence

from pipeline.errors import EXIT_FAILED_RETRY, ConfigError, PostnormError
from pipeline.runtime.env import child_environment

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a command is retried for a person who waits; job scripts have more time."""
# Twice a MessageTimeout of 60 s; SLURM's default is 10 s.
_CALL_S = 120.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
# Measured on 22.05: without a controller each command fails by itself after 9 to 20 s (at most
# twice `MessageTimeout`), with exit code 1 like any other error, so only the message tells them
# apart.
_UNREACHED = ("Unable to contact slurm controller", "Unable to contact slurm daemon")
# With these the request may have reached the controller.
_UNANSWERED = (
    "Socket timed out",
    "Unexpected message received",
    "Zero Bytes were transmitted",
    "Connection timed out",
)
# sbatch names the limit (QOSMaxSubmitJobPerUserLimit, AssocMaxSubmitJobLimit), then the policy,
# which is the same text for limits on sizes and times.
_TOO_MANY = re.compile("MaxSubmitJob|job submit limit")
_ACCESS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""How commands find the controller."""
# Options of SLURM by another way than the profile; the job, step or group of processes that this
# shell may itself be in; and what has no meaning beyond this login session.
# A list of exceptions, not of permissions: users rely on proxies and variables of W&B and NCCL
# without knowing it.
_WITHHELD = re.compile(
    r"(SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO|SLURM|SLURMD)_.*|"
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|POSTNORM_(RUN_DIR|START)|"
    r"SSH_.*|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|XDG_(SESSION|SEAT|VTNR|RUNTIME).*|"
    r"DBUS_SESSION_BUS_ADDRESS|WINDOWID|TMUX.*|STY"
)


class NoSlurmError(ConfigError):
    """This machine has no SLURM commands."""


class SlurmError(PostnormError):
    """SLURM refused what was asked of it."""


class TooManyJobsError(SlurmError):
    """A limit of the site, probably one on jobs in the queue (MaxSubmitJobs)."""


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
    controller was not reached at all. The command gets the variables of `passed_on`, so that no
    option of SLURM among them has an effect.

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
        # What did not reach the controller changed nothing, so even sbatch may be tried again.
        # sbatch is not repeatable: it may have submitted.
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


def passed_on() -> dict[str, str]:
    """Return the variables of this shell that SLURM's commands get and, by sbatch, a job."""
    kept_back = set(withheld())
    return {name: text for name, text in child_environment().items() if name not in kept_back}


def withheld() -> list[str]:
    """List the variables of this shell that a job does not get."""
    names = sorted(child_environment())
    return [name for name in names if _WITHHELD.fullmatch(name) and name not in _ACCESS]


def withheld_line() -> str:
    """List the variables of this shell that a job does not get, as a comment of a script."""
    return f"# not passed on from this shell: {' '.join(withheld()) or 'nothing'}"


def _run(command: Sequence[str], stdin: str) -> tuple[int, str, str]:
    """Run once and return exit code, output and message."""
    environment = passed_on()
    if command[0] != "sbatch":  # a job would inherit it, and its own squeue print such times
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
    try:
        output = run_command(["sbatch", "--parsable", *words], script, repeatable=False)
    except SlurmError as error:
        if _TOO_MANY.search(str(error)):
            raise TooManyJobsError(str(error)) from None
        raise
    # On a site of several clusters sbatch prints id;cluster; some sites print lines of their own.
    job = re.search(r"^(\d+)(;\S+)?$", output, re.MULTILINE)
    if not job:
        raise NoAnswerError(
            f"sbatch printed {output!r}, expected the id of a job: it may have submitted one; see "
            "`squeue --me`"
        )
    return job[1]
