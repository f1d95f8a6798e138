"""`python -m tests.distributed.dying_in_save_main pretrain ...`: rank 1 dies when it saves."""

import os
import runpy
import signal
from pathlib import Path

from pipeline.train.engine import Engine

_original = Engine.save_files


def _dying(engine: Engine, folder: Path) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    _original(engine, folder)


if __name__ == "__main__":
    Engine.save_files = _dying  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
