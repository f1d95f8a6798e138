"""The GPUs of a node as nvidia-smi reports them.

A field that a driver does not know makes nvidia-smi refuse the whole query, with `Field "NAME" is
not a valid field to query.`; retired pages exist before Ampere only, throttle reasons had another
name before driver 535. So those fields are asked for separately, and refused fields are left out.
A value that a GPU does not have reads `[N/A]` or `[Not Supported]`; one that cannot be read
`[GPU is lost]` or `ERR!`.
"""

import csv
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launch.cluster import PreflightConfig
from launch.preflight.record import Finding

_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
_ECC = "ecc.errors.uncorrected.volatile.total"
_HOT, _WEAK = "it is slowed down by its temperature", "it is slowed down by its power supply"
_HEALTH = {
    ("gpu", "uuid"): {
        _ECC: "uncorrected memory errors since its driver was loaded",
        "retired_pages.pending": "pages of memory wait to be retired",
        "clocks_event_reasons.hw_thermal_slowdown": _HOT,
        "clocks_throttle_reasons.hw_thermal_slowdown": _HOT,
        "clocks_event_reasons.hw_power_brake_slowdown": _WEAK,
        "clocks_throttle_reasons.hw_power_brake_slowdown": _WEAK,
    },
    ("remapped-rows", "gpu_uuid"): {
        "remapped_rows.pending": "rows of memory wait to be remapped",
        "remapped_rows.failure": "rows of memory could not be remapped",
    },
}
"""By query and the name of its UUID field: fields that are set where a GPU is not healthy."""
_REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')
_MOST_USED_MIB = 2048
"""Memory in use on an idle GPU at most: drivers and daemons hold some hundred MiB."""
_MPS = "nvidia-cuda-mps-server"


class _SmiError(Exception):
    """nvidia-smi does not exist or gives no answer."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node; numbers are texts as nvidia-smi prints them."""

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: str
    used_mib: str

    @property
    def title(self) -> str:
        """Name of the GPU in messages."""
        return f"GPU {self.index} ({self.uuid})"


def check_gpus(
    config: PreflightConfig, num_gpus: int, environ: Mapping[str, str]
) -> tuple[list[Gpu], list[Finding]]:
    """Check the GPUs that a job was given on this node; nvidia-smi ignores CUDA_VISIBLE_DEVICES."""
    try:
        listed = [Gpu(*row) for row in _query("gpu", _FIELDS)]
    except _SmiError as error:
        text = f"{error}; expected {num_gpus} GPUs: look at the driver of the node"
        return [], [Finding("GPUs", text, "all")]
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = listed[:num_gpus]  # ranks count from 0
    # Where no cgroup hides the GPUs of other jobs, SLURM names ours in the environment.
    if visible and all(name.isdecimal() or name.startswith("GPU-") for name in visible):
        gpus = [gpu for gpu in listed if {gpu.index, gpu.uuid} & set(visible)]
    findings = [*_misfits(config, gpus, num_gpus, len(listed)), *_in_use(gpus), *_health(gpus)]
    return gpus, findings


def _misfits(
    config: PreflightConfig, gpus: list[Gpu], num_gpus: int, num_listed: int
) -> Iterator[Finding]:
    if len(gpus) < num_gpus:
        text = (
            f"{len(gpus)} GPUs, expected gpus_per_node={num_gpus}; nvidia-smi lists {num_listed}, "
            "and CUDA_VISIBLE_DEVICES may leave some out"
        )
        yield Finding("GPU count", text, "all")
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        yield Finding("GPU names", f"GPUs differ: {', '.join(names)}", "node")
    if others := [name for name in names if config.gpu not in name]:
        text = f"GPUs are {', '.join(others)}, expected preflight.gpu={config.gpu!r}"
        yield Finding("GPU names", text, "all")
    lowest = _version(config.min_driver)
    for driver in sorted({gpu.driver for gpu in gpus if _version(gpu.driver) < lowest}):
        text = f"GPU driver {driver}, expected preflight.min_driver={config.min_driver} or newer"
        yield Finding("GPU driver", text, "all")


def _version(text: str) -> tuple[int, ...]:
    """Split a driver's version into numbers; () where it has none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _in_use(gpus: list[Gpu]) -> Iterator[Finding]:
    """Find memory and processes of others: this job has started nothing yet."""
    for gpu in gpus:
        if not gpu.used_mib.isdecimal():
            text = f"{gpu.title} does not answer: its used memory reads {gpu.used_mib!r}"
            yield Finding("GPU state", text, "node")
        elif int(gpu.used_mib) > _MOST_USED_MIB:
            text = (
                f"{gpu.title}: {gpu.used_mib} of {gpu.total_mib} MiB are in use before the job "
                f"has started anything, expected at most {_MOST_USED_MIB}"
            )
            yield Finding("GPU in use", text, "node")
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    try:
        rows = _query("compute-apps", ("gpu_uuid", "pid", "process_name"))
    except _SmiError:
        return
    for uuid, process, name in rows:
        if uuid in by_uuid and _MPS not in name:
            text = f"{by_uuid[uuid].title} is used by process {process}, {name}"
            yield Finding("GPU in use", text, "node")


def _health(gpus: list[Gpu]) -> Iterator[Finding]:
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for (what, uuid_field), meanings in _HEALTH.items():
        for uuid, values in _known_values(what, uuid_field, list(meanings)):
            for name, value in values.items():
                is_set = value in ("Yes", "Active") or (value.isdecimal() and int(value) > 0)
                if is_set and uuid in by_uuid:
                    trouble = f"{value} {meanings[name]}" if name == _ECC else meanings[name]
                    text = f"{by_uuid[uuid].title}: {trouble} ({name}); reset it, or drain the node"
                    yield Finding("GPU health", text, "node")


def _known_values(what: str, uuid_field: str, names: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the UUID of each GPU with those of the fields that this driver knows."""
    while names:
        try:
            rows = _query(what, (uuid_field, *names))
            return [(uuid, dict(zip(names, row, strict=True))) for uuid, *row in rows]
        except _SmiError as error:
            refused = _REFUSED.search(str(error))
            if refused is None or refused[1] not in names:
                return []
            names.remove(refused[1])
    return []


def _query(what: str, fields: tuple[str, ...]) -> list[list[str]]:
    """Return the rows of a query, without units."""
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
