"""SLURM's commands that print what the real ones printed.

Lines are those of SLURM 22.05 on a cluster of four nodes, asked in the formats that
`launch.queue` asks in; the stand-ins refuse to answer to another format.
"""

import os
import sys
from pathlib import Path

from tests.support.processes import write_program

SQUEUE_FORMAT = (
    "JobArrayID:0|,ArrayJobID:0|,State:0|,Reason:0|,Partition:0|,NodeList:0|,RestartCnt:0|,"
    "SubmitTime:0|,StartTime:0|,EndTime:0|,TimeLimit:0|,exit_code:0|,Comment:0"
)
SACCT_FORMAT = "JobID,State,Reason,Partition,NodeList,Submit,Start,End,Timelimit,ExitCode,Comment"
UNKNOWN_JOB = "slurm_load_jobs error: Invalid job id specified"
NO_ACCOUNTING = "Slurm accounting storage is disabled"
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
TIMED_OUT = "slurm_load_jobs error: Socket timed out on send/recv operation"

_COMMAND = """\
#!{python} -IS
import os, sys
from pathlib import Path
folder = Path({folder!r})
name = Path(sys.argv[0]).name
with (folder / f"{{name}}.calls").open("a") as file:
    print(" ".join(sys.argv[1:]), file=file)
for steering in ("SQUEUE_USERS", "SCANCEL_STATE", "SACCT_FORMAT"):
    assert steering not in os.environ, steering
forms = [word.split("=", 1)[1] for word in sys.argv if word.lower().startswith("--format=")]
assert forms in ([], [{squeue!r}], [{sacct!r}]), forms
answers = sorted(folder.glob(f"{{name}}.answer.*"))
code, _, text = answers[0].read_text().partition("\\n")
if len(answers) > 1:
    answers[0].unlink()
(sys.stderr if int(code) else sys.stdout).write(text)
sys.exit(int(code))
"""


class RecordedSlurm:
    """The commands, in a folder that comes first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "sacct", "scancel", "scontrol", "sbatch"):
            text = _COMMAND.format(
                python=sys.executable, folder=str(folder), squeue=SQUEUE_FORMAT, sacct=SACCT_FORMAT
            )
            write_program(folder / name, text)
        self.says("squeue", UNKNOWN_JOB, code=1)
        self.says("sacct", NO_ACCOUNTING, code=1)
        self.path = f"{folder}{os.pathsep}{os.environ['PATH']}"

    def says(self, command: str, *answers: str, code: int = 0) -> None:
        """What a command answers, one call after the other; the last one from then on."""
        for path in self.folder.glob(f"{command}.answer.*"):
            path.unlink()
        for number, text in enumerate(answers):
            self._answer(command, number, text, code)

    def recovers(self, command: str, error: str, times: int, text: str) -> None:
        """A command fails a few times and then answers."""
        self.says(command, *[error] * times, code=1)
        self._answer(command, times, text, 0)

    def calls(self, command: str) -> list[str]:
        path = self.folder / f"{command}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def _answer(self, command: str, number: int, text: str, code: int) -> None:
        path = self.folder / f"{command}.answer.{number:03d}"
        path.write_text(f"{code}\n{text}\n")
