"""Checks of texts in a cluster profile that become shell words or options of sbatch."""

import re
from collections.abc import Iterable

from pipeline.errors import ConfigError

# As sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:...].
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII)
_OPTION = re.compile(r"(?:--)?([a-z][a-z0-9-]*)(?:=(.+))?")

# Variables that the launcher sets itself, or that would mislead it.
_OWN_VARIABLES = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|SBATCH|SRUN|POSTNORM)_.*"
)
SET_OPTIONS = frozenset({
    "account", "array", "chdir", "comment", "cpus-per-task", "dependency", "error", "exclude",
    "export", "export-file", "get-user-env", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "job-name", "kill-on-invalid-dep", "mem", "no-kill", "no-requeue", "nodes",
    "ntasks", "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "parsable", "partition",
    "qos", "requeue", "signal", "test-only", "time", "wait", "wrap",
})  # fmt: skip
"""Options of sbatch that the launcher sets, or that would break what its scripts rely on."""


def seconds(text: str, name: str) -> int:
    """Convert a time limit to seconds.

    Raises:
        ConfigError: sbatch would not accept it.
    """
    match = _TIME.fullmatch(text)
    if not match:
        raise ConfigError(
            f"{name}={text!r}: expected minutes, hours:minutes:seconds or "
            'days-hours:minutes:seconds, such as "1-12:00:00"'
        )
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        units = (3600, 60, 1)  # days-hours:minutes:seconds
    else:
        units = (3600, 60, 1) if len(numbers) == 3 else (60, 1, 0)
    total = sum(number * unit for number, unit in zip(numbers, units, strict=False))
    return int(days or 0) * 86400 + total


def mebibytes(text: str, name: str) -> float:
    """Read a memory size as sbatch does: a whole number, of MiB unless it says K, M, G or T.

    Raises:
        ConfigError: sbatch would not accept it.
    """
    match = _MEMORY.fullmatch(text)
    if not match:
        raise ConfigError(
            f"{name}={text!r}: expected a whole number and K, M, G or T, such as 500G; leave it "
            "out for the partition's default"
        )
    return int(match[1]) * _MIB[match[2].upper()]


def require(pattern: str, text: str, name: str, expected: str) -> None:
    """Check a text that is not empty against a pattern.

    Raises:
        ConfigError: the pattern does not match all of it.
    """
    if text and not re.fullmatch(pattern, text):
        raise ConfigError(f"{name}={text!r}: expected {expected}")


def require_variables(texts: Iterable[str], name: str) -> None:
    """Check `NAME=value` texts.

    Raises:
        ConfigError: one has another form, is given twice, or is set by the launcher.
    """
    seen: dict[str, str] = {}
    for text in texts:
        match = _VARIABLE.fullmatch(text)
        if not match:
            raise ConfigError(
                f"{name}: {text!r} is not a variable; expected NAME=value on one line, such as "
                "NCCL_SOCKET_IFNAME=ib0"
            )
        if _OWN_VARIABLES.fullmatch(match[1]):
            raise ConfigError(
                f"{name}: {text!r}: the launcher sets {match[1]} itself; leave it out"
            )
        if match[1] in seen:
            raise ConfigError(
                f"{name}: {match[1]} is given twice, {seen[match[1]]!r} and {text!r}; keep one"
            )
        seen[match[1]] = text


def require_options(texts: Iterable[str], name: str, taken: Iterable[str]) -> None:
    """Check further options of sbatch, such as `--switches=1`.

    Args:
        texts: options with or without the dashes.
        name: name of the field, for messages.
        taken: long names of options that are set elsewhere.

    Raises:
        ConfigError: one is not a long option, is given twice, or is set elsewhere.
    """
    seen: set[str] = set()
    for text in texts:
        match = _OPTION.fullmatch(text)
        if not match:
            raise ConfigError(
                f"{name}: {text!r} is not an option; expected --name or --name=value on one line, "
                "such as --switches=1"
            )
        # sbatch accepts any prefix of a name that fits one option only (getopt_long).
        same = sorted(option for option in taken if option.startswith(match[1]))
        if same:
            raise ConfigError(
                f"{name}: {text!r}: the launcher or another field sets --{same[0]}; leave it out"
            )
        if match[1] in seen:
            raise ConfigError(f"{name}: --{match[1]} is given twice; keep one")
        seen.add(match[1])


def option(text: str) -> tuple[str, str | bool]:
    """Split an option that `require_options` accepted; the value is True if it has none."""
    name, _, value = text.removeprefix("--").partition("=")
    return name, value or True
