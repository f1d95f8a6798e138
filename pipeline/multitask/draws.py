"""Which tasks a step draws: a pure function of seed and step.

A step is a number of draws with replacement. The rows of a draw follow from how often its task was
drawn before, so that ranks, workers and restarts change nothing.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.data.random import Purpose, philox

Ints = npt.NDArray[np.int64]
_CHUNK = 4096
"""Steps whose draws are counted together."""


def shares(
    sizes: Sequence[float], cap: float | None, temperature: float
) -> npt.NDArray[np.float64]:
    """(tasks,) probabilities proportional to min(size, cap)^(1 / temperature).

    Source: Raffel et al. 2020, arXiv 1910.10683, section 3.5.2.
    """
    capped = np.minimum(np.asarray(sizes, np.float64), np.inf if cap is None else cap)
    weights = capped ** (1 / temperature)
    return np.asarray(weights / weights.sum())


class Draws:
    """The tasks of every step."""

    def __init__(self, probabilities: Sequence[float], per_step: int, seed: int) -> None:
        self._bounds = np.cumsum(probabilities)
        self._num, self._per_step, self._seed = len(probabilities), per_step, seed
        # All are kept: a resume needs each, and one holds a number a task for 4,096 steps.
        self._before = lru_cache(maxsize=None)(self._counted)

    def of_step(self, step: int) -> Ints:
        """(per_step,) numbers of the tasks that a step draws, rising."""
        return np.sort(self._drawn(step, 1)[0])

    def before(self, step: int) -> Ints:
        """(tasks,) how often each task was drawn in all earlier steps."""
        chunk, rest = divmod(step, _CHUNK)
        counts = np.bincount(self._drawn(chunk * _CHUNK, rest).reshape(-1), minlength=self._num)
        for earlier in range(chunk):
            counts = counts + self._before(earlier)
        return counts

    def _counted(self, chunk: int) -> Ints:
        drawn = self._drawn(chunk * _CHUNK, _CHUNK)
        return np.bincount(drawn.reshape(-1), minlength=self._num)

    def _drawn(self, first: int, num: int) -> Ints:
        """(num, per_step) tasks of steps from `first` on."""
        steps = np.arange(first, first + num)[:, None]
        words, _, _, _ = philox(
            (steps, np.arange(self._per_step)[None, :], 0, 0), (self._seed, Purpose.TASK_DRAWS)
        )
        found = np.searchsorted(self._bounds, words / 2.0**32, side="right")
        # The last bound may lie below 1 by rounding.
        return np.minimum(found, self._num - 1).astype(np.int64)
