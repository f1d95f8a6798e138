"""A stand-in for nvidia-smi that answers and refuses as the real one does.

With `--format=csv,noheader,nounits` values are divided by comma and space, what a GPU does not have
is `[N/A]`, and one field that the driver does not know makes it refuse the query in one line.
"""

import json
import sys
from pathlib import Path

from tests.support.processes import write_program

_SCRIPT = """\
#!{python} -S
import json, sys, time
state = json.loads(open({state!r}).read())
time.sleep(state["sleep_s"])
if state["error"]:
    print(state["error"]); sys.exit(state["code"])
query, _, fields = sys.argv[1].partition("=")
what = query.removeprefix("--query-")
assert sys.argv[2] == "--format=csv,noheader,nounits", sys.argv
rows = state["apps"] if what == "compute-apps" else state["gpus"]
known = set(state["known"][what])
for field in fields.split(","):
    if field not in known:
        print(f'Field "{{field}}" is not a valid field to query.\\n'); sys.exit(2)
for row in rows:
    print(", ".join(str(row.get(field, "[N/A]")) for field in fields.split(",")))
"""
_GPU_FIELDS = [
    "index", "uuid", "name", "driver_version", "memory.total", "memory.used",
    "ecc.errors.uncorrected.volatile.total", "retired_pages.pending",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
]  # fmt: skip
"""Of a driver before 535, which does not know `clocks_event_reasons`."""


class FakeSmi:
    """The command, in a folder that comes first in PATH; healthy H100s until told otherwise."""

    def __init__(self, folder: Path, num_gpus: int = 2) -> None:
        folder.mkdir()
        self.folder = folder
        self.gpus = [
            {
                "index": i, "uuid": f"GPU-0000000{i}-aaaa", "gpu_uuid": f"GPU-0000000{i}-aaaa",
                "name": "NVIDIA H100 80GB HBM3", "driver_version": "550.54.15",
                "memory.total": 81559, "memory.used": 4,
                "ecc.errors.uncorrected.volatile.total": 0,
                "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
                "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
                "remapped_rows.pending": "0", "remapped_rows.failure": "0",
            }
            for i in range(num_gpus)
        ]  # fmt: skip
        self.apps: list[dict[str, object]] = []
        self.error, self.code, self.sleep_s = "", 0, 0.0
        program = _SCRIPT.format(python=sys.executable, state=str(folder / "state.json"))
        write_program(folder / "nvidia-smi", program)
        self.save()

    def save(self) -> None:
        """Lets the command answer so from now on."""
        known = {
            "gpu": _GPU_FIELDS,
            "compute-apps": ["gpu_uuid", "pid", "process_name"],
            "remapped-rows": ["gpu_uuid", "remapped_rows.pending", "remapped_rows.failure"],
        }
        state = {
            "gpus": self.gpus, "apps": self.apps, "known": known,
            "error": self.error, "code": self.code, "sleep_s": self.sleep_s,
        }  # fmt: skip
        (self.folder / "state.json").write_text(json.dumps(state))
