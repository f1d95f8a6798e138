"""`python -m tests.distributed.dying_in_save_main pretrain ...`: rank 1 dies when it saves.

Its file is written by then, and it has trained on; nothing is published.
"""

import os
import runpy
import signal

from pipeline.checkpoints import background
from pipeline.checkpoints.background import RankFiles

_original = background._flush_and_describe


def _dying(path: object) -> object:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return _original(path)  # type: ignore[arg-type]


if __name__ == "__main__":
    assert RankFiles.write.__globals__["_flush_and_describe"] is _original
    background._flush_and_describe = _dying  # type: ignore[assignment]
    runpy.run_module("pipeline", run_name="__main__")
