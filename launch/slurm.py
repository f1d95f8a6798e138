"""SLURM's commands."""

import shlex
import subprocess

from pipeline.errors import ConfigError, PostnormError


class SlurmError(PostnormError):
    """SLURM refused what was asked of it."""


def slurm(command: list[str], stdin: str = "") -> str:
    """Output of a command."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not there") from None
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise SlurmError(f"{shlex.join(command)} failed ({done.returncode}): {message}")
    return done.stdout
