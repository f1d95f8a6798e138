"""Stages a dataset as a program: DATASET STAGE_DIR [STOP_BEFORE].

With STOP_BEFORE it stops itself (SIGSTOP) before it writes that block, counted from 0, whose lock
it has.
"""

import itertools
import os
import signal
import sys
from typing import Any

from pipeline.data import cache
from pipeline.data.format import read_index
from pipeline.data.staging import stage
from pipeline.errors import PostnormError
from pipeline.runtime import log

if __name__ == "__main__":
    folder, stage_dir, *stop_before = sys.argv[1:]
    log.to_console()
    if stop_before:
        real, calls = cache.BlockCache._keep, itertools.count()

        def keep(*arguments: Any) -> Any:
            if next(calls) == int(stop_before[0]):
                os.kill(os.getpid(), signal.SIGSTOP)
            return real(*arguments)

        cache.BlockCache._keep = keep  # type: ignore[method-assign]
    try:
        stage(read_index(folder), stage_dir)
    except PostnormError as error:
        print(error)
        sys.exit(error.exit_code)
