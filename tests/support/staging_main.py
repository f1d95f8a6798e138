"""Stages a dataset as a program: DATASET STAGE_DIR [STOP_AFTER].

With STOP_AFTER it stops itself (SIGSTOP) before that chunk of 64 KB, counted from 0.
"""

import itertools
import os
import signal
import sys
from typing import Any

from pipeline.data import staging
from pipeline.data.format import read_index
from pipeline.errors import PostnormError
from pipeline.runtime import log

if __name__ == "__main__":
    folder, stage_dir, *stop_after = sys.argv[1:]
    log.to_console()
    staging._CHUNK_BYTES = 1 << 16
    if stop_after:
        real, calls = staging.read_range, itertools.count()

        def read_range(*arguments: Any) -> Any:
            if next(calls) == int(stop_after[0]):
                os.kill(os.getpid(), signal.SIGSTOP)
            return real(*arguments)

        staging.read_range = read_range
    try:
        staging.stage(read_index(folder), stage_dir)
    except PostnormError as error:
        print(error)
        sys.exit(error.exit_code)
