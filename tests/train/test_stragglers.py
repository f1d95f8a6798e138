"""When a rank is told to be slow."""

import numpy as np

from pipeline.train.run_logger import Stragglers

_STEP_S = 1.0


def _look(stragglers: Stragglers, *own_s: float, wait_s: float = 0.0) -> list[tuple[int, float]]:
    found = stragglers.look(np.full(len(own_s), wait_s), np.array(own_s), _STEP_S)
    return [(rank, factor) for rank, factor, _ in found]


def test_slow_in_three_intervals_is_told_once_and_what_costs_nothing_never() -> None:
    stragglers = Stragglers(["a", "a", "b", "b"])
    slow = (0.5, 0.5, 0.5, 0.7)
    assert [_look(stragglers, *slow) for _ in range(5)] == [[], [], [(3, 1.4)], [], []]
    assert _look(stragglers, 0.5, 0.5, 0.5, 0.6) == []  # as fast as the others again
    assert [_look(stragglers, *slow) for _ in range(3)] == [[], [], [(3, 1.4)]]
    trifle = Stragglers(["a", "b"])
    assert not any(_look(trifle, 0.001, 0.009) for _ in range(9))
    alone = Stragglers(["a"])
    assert not any(_look(alone, 0.9) for _ in range(9))
    together = Stragglers(["a", "b", "c"])
    assert not any(_look(together, 0.9, 0.95, 0.9) for _ in range(9))


def test_text_names_host_cause_and_cost() -> None:
    stragglers = Stragglers(["a", "b"])
    waits, computes = np.array([0.01, 0.41]), np.array([0.39, 0.19])
    [[], [], [(rank, factor, text)]] = [stragglers.look(waits, computes, 1.0) for _ in range(3)]
    assert (rank, round(factor, 6)) == (1, 1.5)
    for fact in ("rank 1 on b needs 1.50 times", "waiting for data", "600.0 ms", "400.0 ms", "20%"):
        assert fact in text
