"""The GPUs of a node as nvidia-smi tells of them.

A field that a driver does not know makes nvidia-smi refuse the whole query, with `Field "NAME" is
not a valid field to query.`; retired pages exist before Ampere only, throttle reasons had another
name before driver 535. So those fields are asked for apart, and what is refused is left out. What
a GPU does not have reads `[N/A]` or `[Not Supported]`, what failed `[GPU is lost]` or `ERR!`.
"""

import csv
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from launch.preflight.config import PreflightConfig, version_of
from launch.preflight.record import Finding, GpuFacts

_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
_ECC = "ecc.errors.uncorrected.volatile.total"
_HEALTH = {
    _ECC: "uncorrected memory errors since its driver was loaded",
    "retired_pages.pending": "pages of memory wait to be retired",
    "clocks_event_reasons.hw_thermal_slowdown": "it is slowed down by its temperature",
    "clocks_throttle_reasons.hw_thermal_slowdown": "it is slowed down by its temperature",
    "clocks_event_reasons.hw_power_brake_slowdown": "it is slowed down by its power supply",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "it is slowed down by its power supply",
}
_ROWS = {
    "remapped_rows.pending": "rows of memory wait to be remapped",
    "remapped_rows.failure": "rows of memory could not be remapped",
}
_REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')
_MOST_USED_MIB = 2048
"""Of an idle GPU: drivers and daemons hold some hundred MiB."""
_MPS = "nvidia-cuda-mps-server"


class _SmiError(Exception):
    """nvidia-smi is not there or gives no answer; says which."""


@dataclass(frozen=True)
class _Gpu:
    index: str
    uuid: str
    name: str
    driver: str
    total_mib: str
    used_mib: str

    @property
    def title(self) -> str:
        return f"GPU {self.index} ({self.uuid})"


def check_gpus(
    config: PreflightConfig, num_gpus: int, environ: Mapping[str, str]
) -> tuple[GpuFacts, list[Finding]]:
    """Looks at the GPUs that a job was given on this node.

    Args:
        config: what is expected of them.
        num_gpus: that the profile asks for on each node.
        environ: of this process; nvidia-smi does not read CUDA_VISIBLE_DEVICES.
    """
    try:
        listed = [_Gpu(*row) for row in _query("gpu", _FIELDS)]
    except (_SmiError, TypeError) as error:
        text = f"{error}; expected {num_gpus} GPUs: look at the driver of the node"
        return GpuFacts([], ""), [Finding("GPUs", text, "few")]
    gpus = _given(listed, num_gpus, environ)
    facts = GpuFacts([gpu.name for gpu in gpus], gpus[0].driver if gpus else "")
    found = [*_expected(config, gpus, listed, num_gpus), *_in_use(gpus), *_health(gpus)]
    return facts, found


def _given(listed: list[_Gpu], num_gpus: int, environ: Mapping[str, str]) -> list[_Gpu]:
    """Those of this job: where no cgroup hides the others, SLURM names them in the environment."""
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if visible and all(name.isdecimal() or name.startswith("GPU-") for name in visible):
        return [gpu for gpu in listed if {gpu.index, gpu.uuid} & set(visible)]
    return listed[:num_gpus]  # ranks count from 0


def _expected(
    config: PreflightConfig, gpus: list[_Gpu], listed: list[_Gpu], num_gpus: int
) -> list[Finding]:
    found = []
    if len(gpus) < num_gpus:
        text = (
            f"{len(gpus)} GPUs, expected gpus_per_node={num_gpus}; nvidia-smi lists {len(listed)}, "
            "and CUDA_VISIBLE_DEVICES may leave some out"
        )
        found.append(Finding("GPU count", text, "few"))
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        text = f"GPUs are not alike: {', '.join(names)}"
        found.append(Finding("GPU names", text, "node"))
    if others := [name for name in names if config.gpu not in name]:
        text = f"GPUs are {', '.join(others)}, expected preflight.gpu={config.gpu!r}"
        found.append(Finding("GPU names", text, "all"))
    drivers = {gpu.driver for gpu in gpus}
    for driver in sorted(d for d in drivers if version_of(d) < version_of(config.min_driver)):
        text = f"GPU driver {driver}, expected preflight.min_driver={config.min_driver} or newer"
        found.append(Finding("GPU driver", text, "all"))
    return found


def _in_use(gpus: list[_Gpu]) -> list[Finding]:
    """Memory and processes of others: this job has started nothing yet."""
    found = []
    for gpu in gpus:
        if not gpu.used_mib.isdecimal():
            text = f"{gpu.title} does not answer: its used memory reads {gpu.used_mib!r}"
            found.append(Finding("GPU state", text, "node"))
        elif int(gpu.used_mib) > _MOST_USED_MIB:
            text = (
                f"{gpu.title}: {gpu.used_mib} of {gpu.total_mib} MiB are in use before the job "
                f"has started anything, expected at most {_MOST_USED_MIB}"
            )
            found.append(Finding("GPU in use", text, "node"))
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    try:
        rows = _query("compute-apps", ("gpu_uuid", "pid", "process_name"))
    except _SmiError:
        return found
    for row in rows:
        if len(row) == 3 and row[0] in by_uuid and _MPS not in row[2]:
            text = f"{by_uuid[row[0]].title} is used by process {row[1]}, {row[2]}"
            found.append(Finding("GPU in use", text, "node"))
    return found


def _health(gpus: list[_Gpu]) -> list[Finding]:
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    found = []
    for what, uuid, fields in (
        ("gpu", "uuid", dict(_HEALTH)),
        ("remapped-rows", "gpu_uuid", dict(_ROWS)),
    ):
        for row in _query_known(what, uuid, fields):
            gpu = by_uuid.get(row[0])
            for (name, meaning), value in zip(fields.items(), row[1:], strict=False):
                if gpu is None or not _is_set(value):
                    continue
                count = f"{value} " if name == _ECC else ""
                text = f"{gpu.title}: {count}{meaning} ({name}); reset it, or drain the node"
                found.append(Finding("GPU health", text, "node"))
    return found


def _query_known(what: str, uuid: str, fields: dict[str, str]) -> list[list[str]]:
    """Rows of what this driver knows of `fields`; the others are removed from it."""
    while fields:
        try:
            return _query(what, (uuid, *fields))
        except _SmiError as error:
            refused = _REFUSED.search(str(error))
            if refused is None or refused[1] not in fields:
                return []
            del fields[refused[1]]
    return []


def _is_set(value: str) -> bool:
    return value in ("Yes", "Active") or (value.isdecimal() and int(value) > 0)


def _query(what: str, fields: tuple[str, ...]) -> list[list[str]]:
    """Rows of a query, without units.

    Raises:
        _SmiError: nvidia-smi is missing or refuses.
    """
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise _SmiError(f"nvidia-smi cannot be started: {error.strerror}") from error
    output = done.stdout.strip()
    if done.returncode or "Unable to determine the device handle" in output:
        raise _SmiError(f"nvidia-smi failed ({done.returncode}): {output}")
    rows = csv.reader(output.splitlines(), skipinitialspace=True)
    return [[value.strip() for value in row] for row in rows if len(row) == len(fields)]
