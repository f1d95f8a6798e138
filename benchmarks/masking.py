"""Speed of masking, as one JSON line: millions of tokens a CPU-second of one process.

    python -m benchmarks.masking

64 sequences of 512 slots with 1.5 tokens a word, the best of 20; beside each Bernoulli mode the
array code of `tests/support/mask_reference.py`, with the same masks. `first_call_s`: CPU
seconds of a new process's first batch with an empty cache of compiled code, and with a filled one.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from pipeline.config.data import DataConfig
from pipeline.data.masking import mask_tokens
from pipeline.data.random import Purpose
from tests.support.mask_reference import VOCABULARY, batch_of, mask_by_arrays

_KEY = (1, Purpose.MASK)
_MODES = (("whole_word", "bernoulli"), ("token", "bernoulli"), ("whole_word", "exact"),
          ("token", "exact"), ("span", "exact"))  # fmt: skip
_FIRST_CALL = """
import time
from pipeline.config.data import DataConfig
from pipeline.data.random import Purpose
from tests.support.mask_reference import VOCABULARY, batch_of
from pipeline.data.masking import mask_tokens
batch = batch_of(1, 64)
start = time.process_time()
mask_tokens(batch, config=DataConfig(dir=""), vocabulary=VOCABULARY, key=(1, Purpose.MASK))
print(time.process_time() - start)
"""


def _speed(call: Callable[[], object], tokens: int, repeats: int) -> float:
    best = float("inf")
    for _ in range(20):
        start = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time() - start) / repeats)
    return round(tokens / best / 1e6, 1)


def _first_call(cache: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_CALL], env={**os.environ, "NUMBA_CACHE_DIR": cache},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return round(float(done.stdout), 2)


def main() -> None:
    """Measures every mode."""
    batch = batch_of(64, 512, start_share=2 / 3)
    result: dict[str, Any] = {
        "python": platform.python_version(), "numpy": np.__version__, "numba": version("numba"),
        "machine": platform.machine(), "slots": batch.tokens.size,
    }  # fmt: skip
    for mode, selection in _MODES:
        config = DataConfig(dir="", masking=mode, mask_selection=selection)  # type: ignore[arg-type]
        found = mask_tokens(batch, config=config, vocabulary=VOCABULARY, key=_KEY)
        speeds = {"compiled": _speed(
            lambda c=config: mask_tokens(batch, config=c, vocabulary=VOCABULARY, key=_KEY),  # type: ignore[misc]
            batch.tokens.size, 20,
        )}  # fmt: skip
        if selection == "bernoulli":
            assert (found.tokens == mask_by_arrays(batch, config, VOCABULARY, _KEY)[0]).all()
            speeds["arrays"] = _speed(
                lambda c=config: mask_by_arrays(batch, c, VOCABULARY, _KEY),  # type: ignore[misc]
                batch.tokens.size, 1,
            )  # fmt: skip
        result[f"{mode} {selection}"] = speeds
    with tempfile.TemporaryDirectory() as cache:
        result["first_call_s"] = {"empty": _first_call(cache), "filled": _first_call(cache)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
