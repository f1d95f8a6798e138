"""A user's program as a rank of a job: signals passed on, its exit code left for the launcher."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pipeline.errors import ConfigError
from pipeline.runtime import env
from pipeline.runtime.files import record_exit

_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def run_program(words: Sequence[str]) -> int:
    """Runs it and waits.

    Args:
        words: the program and its arguments; it finds RANK, WORLD_SIZE and the others in its
            environment, and is to end with a code of `pipeline.errors` (0: done, 75: saved, start
            again, 2: do not try again).

    Returns:
        Its exit code; 128 + N if signal N ended it.

    Raises:
        ConfigError: there is no such program, or this is no rank of a job.
    """
    process, run_dir = env.process_info(), env.launched_run_dir()
    if run_dir is None:
        raise ConfigError(f"{env.RUN_DIR_VARIABLE} is not set: this is for job scripts")
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    for name in _PASSED_ON:
        signal.signal(name, pass_on)
    try:
        child = subprocess.Popen(words)
    except OSError as error:
        record_exit(Path(run_dir), process, ConfigError.exit_code)
        raise ConfigError(f"{words[0]} cannot be started: {error.strerror}") from None
    for missed in early:
        child.send_signal(missed)
    code = child.wait()
    code = code if code >= 0 else 128 - code
    record_exit(Path(run_dir), process, code)
    return code
