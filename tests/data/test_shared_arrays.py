"""Shared arrays: made once, never changed under a reader, and gone with their processes."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.data.cache import SharedArrays

Make = Callable[[], list[npt.NDArray[np.int64]]]


def _maker(number: int, made: list[int] | None = None) -> Make:
    def make() -> list[npt.NDArray[np.int64]]:
        if made is not None:
            made.append(number)
        return [np.full(1000, number), np.arange(number)]

    return make


def _check(arrays: SharedArrays, number: int, make: Make | None = None) -> None:
    filled, counted = arrays.get((1, number), make or _maker(number))
    assert (filled == number).all()
    assert len(filled) == 1000
    assert counted.tolist() == list(range(number))


def _open(name: str, num_views: int = 1) -> SharedArrays:
    """Arrays with room for three keys."""
    return SharedArrays(f"{name} {os.environ['PYTEST_CURRENT_TEST']}", 3 * 8400, num_views)


def test_arrays_of_every_type_come_back_as_they_were() -> None:
    made = [np.arange(n, dtype=kind) for n, kind in enumerate(("u1", "u2", "u4", "i4", "i8"), 3)]
    for shared in (_open("types"), _open("types")):
        found = shared.get((1,), lambda: [*made, made[0][:0]])
        for array, expected in zip(found, [*made, made[0][:0]], strict=True):
            assert (array.dtype, array.tolist()) == (expected.dtype, expected.tolist())
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 1
    assert _open("types").get((2,), lambda: made)[4].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_what_one_has_made_the_others_read_until_the_longest_unused_is_replaced() -> None:
    both, made = [_open("read"), _open("read")], list[int]()
    for number in (1, 2, 3, 2, 1):
        for shared in both:
            _check(shared, number, _maker(number, made))
    assert made == [1, 2, 3]
    _check(_open("other content"), 2, _maker(2, made))
    assert made == [1, 2, 3, 2]
    first, _ = both[0].get((1, 1), _maker(1, made))
    for number in (4, 5, 6, 7):
        _check(both[1], number, _maker(number, made))
    assert (first == 1).all(), "what is in use stays what it is"
    _check(both[1], 1, _maker(1, made))
    assert made == [1, 2, 3, 2, 4, 5, 6, 7, 1]


def test_views_are_kept_and_what_fails_or_does_not_fit_is_made_again() -> None:
    shared, made = _open("views", num_views=2), list[int]()
    arrays = shared.get((1,), _maker(1, made))
    assert shared.get((1,), _maker(1, made)) is arrays
    for number in (2, 3):
        shared.get((number,), _maker(number, made))
    assert shared.get((1,), _maker(1, made)) is not arrays
    assert made == [1, 2, 3]
    large = lambda: [np.zeros(10_000, np.int64)]  # noqa: E731
    assert len(_open("large").get((1,), large)[0]) == 10_000
    with pytest.raises(ZeroDivisionError):
        shared.get((5,), lambda: [np.arange(1 // 0)])
    _check(_open("views"), 5, _maker(5, made))
    assert made == [1, 2, 3, 5]


def _kill_while_making() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    maker = context.Process(target=_hang_while_making, args=(theirs,))
    maker.start()
    ours.recv()
    os.kill(maker.pid or 0, signal.SIGKILL)
    maker.join()


def _hang_while_making(pipe: Connection) -> None:
    def make() -> list[npt.NDArray[np.int64]]:
        pipe.send("making")
        signal.pause()
        return []

    _open("killed").get((1, 1), make)


@pytest.mark.usefixtures("processes")
def test_a_killed_maker_is_replaced_and_nothing_is_left_behind() -> None:
    shared = _open("killed")
    folder = shared.folder
    _kill_while_making()
    _check(shared, 1)
    del shared
    gc.collect()
    assert not folder.exists(), "the last one removes it"
    _kill_while_making()
    assert folder.exists()
    _check(_open("another"), 1)
    assert not folder.exists(), "what a killed one left goes when another one opens its own"


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _open("stranger").folder
    folder.mkdir()
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        values = list(real(path))
        values[4] += 1 if path == folder else 0
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(PermissionError, match="another user"):
        _open("stranger")
    folder.rmdir()


@pytest.mark.usefixtures("processes")
def test_processes_that_are_killed_never_spoil_what_others_read() -> None:
    context = multiprocessing.get_context("fork")
    keeper = _open("hammer")
    processes = [context.Process(target=_hammer, args=(seed, seed < 2)) for seed in range(4)]
    for process in processes:
        process.start()
    signal.sigtimedwait([], 0.3)
    for process in processes[:2]:
        os.kill(process.pid or 0, signal.SIGKILL)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-9, -9, 0, 0]
    _check(keeper, 3)


def _hammer(seed: int, endless: bool) -> None:
    shared, rng = _open("hammer"), np.random.default_rng(seed)
    count = 0
    while endless or count < 400:
        _check(shared, int(rng.integers(1, 9)))
        count += 1
