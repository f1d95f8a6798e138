"""`python -m tests.use.staged_main evaluate ...`: an evaluation that does not end by itself.

Each rank prints `evaluating` at its first batch. With LAST_RANK_DIES rank 1 then ends without a
word; else all ranks get batches without end.
"""

import os
import runpy
from collections.abc import Iterator

from pipeline.data.loader import EvalLoader, MicroBatch

_original = EvalLoader.batches


def _endless(loader: EvalLoader) -> Iterator[tuple[int, MicroBatch]]:
    os.write(1, b"evaluating\n")
    if os.environ.get("LAST_RANK_DIES"):
        if os.environ["RANK"] == "1":
            os._exit(9)
        yield from _original(loader)
        return
    while True:
        yield from _original(loader)


if __name__ == "__main__":
    EvalLoader.batches = _endless  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
