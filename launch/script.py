"""What the job scripts of training and of data preparation share."""

import shlex
from collections.abc import Mapping

from pipeline.errors import ConfigError


def sbatch_lines(options: Mapping[str, object]) -> list[str]:
    """`#SBATCH` lines: those of every job, and `options` that are not empty (True: no value).

    SLURM truncates logs on requeue unless told to append, and leaves a job whose dependency failed
    in the queue for ever unless told to cancel it.
    """
    given = [
        name if value is True else f"{name}={value}"
        for name, value in options.items()
        if value != ""
    ]
    every = ["open-mode=append", "requeue", "kill-on-invalid-dep=yes"]
    return [f"#SBATCH --{option}" for option in (*given, *every)]


def slurm_path(folder: str) -> str:
    """A folder as SLURM reads it in `--output`: `%` is no pattern, quoted as by a shell.

    Raises:
        ConfigError: SLURM would look for another folder, and fail the job without a word.
    """
    if {"\\", "\n"} & set(folder):
        raise ConfigError(
            f"log folder {folder!r}: SLURM cannot write to a folder with a backslash or a line "
            "break in its name; rename it"
        )
    return shlex.quote(folder.replace("%", "%%"))


REQUEUE = """\
# SLURM ends this script once the job is requeued, and changes the excluded nodes only of a job that
# does not run: the script lives on until it has named them.
ended=
trap 'ended=1' TERM
# The controller may be restarting.
for try in 1 2 3 4 5 6 7 8 9 10; do
  if scontrol requeue "$job" || [ -n "$ended" ]; then
    # Leaving before SLURM says so would count as the end of the job.
    for ((left = 300; left > 0; left--)); do [ -z "$ended" ] || break; sleep 1; done
    for ((left = 10; left > 0; left--)); do
      [ -n "${without:-}" ] || break
      scontrol update jobid="$job" excnodelist="$without" && break
      sleep 1
    done
    exit 0
  fi
  sleep 30
done
echo "end: the job could not be requeued, submit it again"; exit 1
"""
"""Last lines of a script: starts job `$job` again from the queue, not on the nodes `$without`."""
