"""Stand-ins for SLURM's commands, for error paths and for machines without SLURM.

`sbatch` writes down what it was given. A new job is shown as the script, the environment and, if
it is there, the file `plugin` ask for it; the file `environment` has the names of the variables
that it got. `scancel` writes down its arguments, `squeue` prints the file `queue`, `sinfo` a
partition of four nodes, `scontrol show` the file `config`. `scontrol update` writes down its
arguments, too, `scontrol requeue` ends the script that calls it, as SLURM does, and `sleep` does
not.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import write_program

_SBATCH = """\
#!{python}
import json, os, re, shlex, sys
from pathlib import Path

folder = Path({folder!r})
if "--test-only" in sys.argv:
    sys.exit(print("sbatch: Job 7 to start at 2026-01-01T00:00:00", file=sys.stderr))
last = sys.argv[-1]
script = sys.stdin.read() if last.startswith("-") else Path(last).read_text()
with (folder / "calls.jsonl").open("a") as file:
    print(json.dumps([sys.argv, script]), file=file)
job = 100 + len((folder / "calls.jsonl").read_text().splitlines())
if (folder / "fails_at").exists() and int((folder / "fails_at").read_text()) == job:
    sys.exit("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
             "(job submit limit, user's size and/or time limits)")
# The environment wins over the script.
asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.M))
asked |= {{name[7:].lower().replace("timelimit", "time"): text
          for name, text in os.environ.items() if name.startswith("SBATCH_")}}
more = (folder / "plugin").read_text() if (folder / "plugin").exists() else "{{}}"
asked |= json.loads(more)
gpus = asked.get("gres") or ("gpu:" + asked["gpus-per-node"] if "gpus-per-node" in asked else "")
(folder / "job").write_text("|".join([
    *(asked.get(name, "") for name in ("partition", "account", "qos", "time", "nodes",
                                       "cpus-per-task", "mem")),
    "gres:" + gpus if gpus else "", asked.get("reservation", "(null)"),
    "0" if "no_requeue" in asked else "1", "".join(shlex.split(asked.get("comment", "")))]))
(folder / "environment").write_text("\\n".join(sorted(os.environ)))
print(f"{{job}};cluster" if (folder / "clusters").exists() else job)
"""
_SHELL = {
    "scancel": 'echo "$*" >>"{folder}/cancelled"',
    "squeue": '[[ "$*" != *tres-per-node* ]] || exec cat "{folder}/job"\ncat "{folder}/queue"',
    "scontrol": '[[ "$*" != *show* ]] || exec cat "{folder}/config"\n'
    '[[ "$*" == update* ]] && exec echo "$*" >>"{folder}/updated"\n'
    'echo "$*" >>"{folder}/requeued"; kill -TERM "$PPID"',
    "sinfo": "for n in 1 2 3 4; do echo 'train*|up|infinite|1-infinite|node'$n'|64|64000|gpu:8|"
    "(null)'; done",
    "sleep": ":",
}


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests themselves ignore it."""
    gc.collect()
    gc.disable()  # Python swallows what is raised in a callback of gc; hypothesis has one
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        gc.enable()


class FakeSlurm:
    """The commands, in a folder that comes first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for answer in ("config", "queue"):
            (folder / answer).touch()
        write_program(folder / "sbatch", _SBATCH.format(python=sys.executable, folder=str(folder)))
        for name, line in _SHELL.items():
            self.add(name, line.format(folder=folder))
        self.environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

    def add(self, name: str, line: str) -> None:
        write_program(self.folder / name, f"#!/bin/bash\n{line}\n")

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        """Arguments and script of each call of sbatch."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found: list[Any] = [json.loads(line) for line in lines]
        return [(arguments[1:], script) for arguments, script in found]

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []
