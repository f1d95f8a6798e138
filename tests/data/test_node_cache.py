"""Shared arrays: made once, never changed under a reader, and gone with their processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.data.node_cache import Key, NodeCache

SLOTS = 3
Make = Callable[[], list[npt.NDArray[np.int64]]]


def _key(number: int) -> Key:
    return (1, number, 0, 0, 0)


def _maker(number: int, made: list[int] | None = None) -> Make:
    def make() -> list[npt.NDArray[np.int64]]:
        if made is not None:
            made.append(number)
        return [np.full(1000, number), np.arange(number)]

    return make


def _check(cache: NodeCache, number: int, make: Make | None = None) -> None:
    with cache.get(_key(number), make or _maker(number)) as (filled, counted):
        assert (filled == number).all()
        assert len(filled) == 1000
        assert counted.tolist() == list(range(number))


def _open(name: str) -> NodeCache:
    return NodeCache(f"{name} {os.environ['PYTEST_CURRENT_TEST']}", 20_000, SLOTS)


def test_arrays_of_every_type_come_back_as_they_were() -> None:
    made = [np.arange(5, dtype=kind) for kind in ("u1", "u2", "u4", "i4", "i8")]
    cache = _open("types")
    for again in (False, True):
        with cache.get(_key(1), lambda: made) as found:
            for array, expected in zip(found, made, strict=True):
                assert array.dtype == expected.dtype
                assert array.tolist() == expected.tolist()
                assert (array is expected) is not again
    with cache.get(_key(1), lambda: pytest.fail("it is there")) as other:
        assert other[4].tolist() == [0, 1, 2, 3, 4]


def test_what_one_has_made_the_others_read_until_the_longest_unused_is_replaced() -> None:
    caches, made = [_open("read"), _open("read")], list[int]()
    for number in (1, 2, 3, 2, 1):
        for cache in caches:
            _check(cache, number, _maker(number, made))
    assert made == [1, 2, 3]
    _check(_open("other content"), 2, _maker(2, made))
    assert made == [1, 2, 3, 2]
    one, other, made = _open("lru"), _open("lru"), list[int]()
    for number in (1, 2, 3):
        _check(one, number, _maker(number, made))
    _check(other, 1, _maker(1, made))
    _check(one, 4, _maker(4, made))  # in place of 2
    for number in (1, 3, 4):
        _check(other, number, _maker(number, made))
    assert made == [1, 2, 3, 4]
    with one.get(_key(1), _maker(1, made)) as (filled, _):
        for number in range(5, 15):
            _check(other, number, _maker(number, made))
        assert (filled == 1).all()
    _check(other, 1, _maker(1, made))
    assert made == [1, 2, 3, *range(4, 15)]


def test_within_a_block_others_are_read_and_made_but_never_in_its_place() -> None:
    cache, made = _open("nested"), list[int]()
    with ExitStack() as stack:
        outer = [stack.enter_context(cache.get(_key(n), _maker(n, made)))[0] for n in (1, 2)]
        for number in (3, 4, 5, 3):  # one slot is left to them
            _check(cache, number, _maker(number, made))
        with cache.get(_key(6), _maker(6, made)):
            _check(cache, 7, _maker(7, made))  # none is left
        assert [set(array.tolist()) for array in outer] == [{1}, {2}]
    assert made == [1, 2, 3, 4, 5, 3, 6, 7]
    _check(_open("nested"), 6, _maker(6, made))
    assert made[-1] == 7, "locks of blocks that have ended are free, and what they made is there"


def test_what_does_not_fit_or_fails_is_made_again() -> None:
    cache, made = _open("large"), list[int]()
    for _ in range(2):
        with cache.get(_key(1), lambda: [np.zeros(10_000, np.int64)]) as [array]:
            assert len(array) == 10_000
    with pytest.raises(ZeroDivisionError), cache.get(_key(2), lambda: [np.arange(1 // 0)]):
        pass
    _check(_open("large"), 2, _maker(2, made))
    assert made == [2]


@pytest.mark.usefixtures("processes")
def test_a_killed_maker_is_replaced_and_nothing_is_left_behind() -> None:
    context, before = multiprocessing.get_context("fork"), _shared_memory()
    ours, theirs = context.Pipe()
    maker = context.Process(target=_hang_while_making, args=(theirs,))
    maker.start()
    ours.recv()
    cache = _open("killed")  # from the process that is about to die
    assert _is_open(cache.address)
    os.kill(maker.pid or 0, signal.SIGKILL)
    maker.join()
    _check(cache, 1)
    assert _shared_memory() <= before
    assert not _is_open(cache.address)
    made = list[int]()
    _check(_open("killed"), 1, _maker(1, made))
    assert made == [1], "the memory of the first ones is not handed out any more"


def _shared_memory() -> set[str]:
    """Return the named memory of this machine, without semaphores: other tests make them."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def _hang_while_making(pipe: Connection) -> None:
    def make() -> list[npt.NDArray[np.int64]]:
        pipe.send("making")
        signal.pause()
        return []

    with _open("killed").get(_key(1), make):
        pass


def _is_open(address: str) -> bool:
    """Tell whether a process listens there; other tests have addresses of their own."""
    return f"@{address}\n" in Path("/proc/net/unix").read_text()


@pytest.mark.usefixtures("processes")
def test_a_forked_child_does_not_keep_the_door_of_its_parent() -> None:
    context, cache = multiprocessing.get_context("fork"), _open("forked")
    ours, theirs = context.Pipe()
    child = context.Process(target=theirs.recv)
    child.start()
    made = list[int]()
    _check(cache, 1)
    _check(_open("forked"), 1, _maker(1, made))
    assert not made, "the parent goes on handing it out"
    del cache
    _check(_open("forked"), 1, _maker(1, made))
    assert made == [1], "the address is free for the next one"
    ours.send(None)
    child.join()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("is_inherited", [False, True])
def test_processes_that_are_killed_never_spoil_what_others_read(is_inherited: bool) -> None:
    context = multiprocessing.get_context("fork")
    keeper = _open("hammer")
    of_child = keeper if is_inherited else None
    processes = [
        context.Process(target=_hammer, args=(of_child, seed, seed < 2)) for seed in range(4)
    ]
    for process in processes:
        process.start()
    signal.sigtimedwait([], 0.3)
    for process in processes[:2]:
        os.kill(process.pid or 0, signal.SIGKILL)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-9, -9, 0, 0]
    _check(keeper, 3)


def _hammer(cache: NodeCache | None, seed: int, endless: bool) -> None:
    cache, rng = cache or _open("hammer"), np.random.default_rng(seed)
    count = 0
    while endless or count < 400:
        _check(cache, int(rng.integers(1, 9)))
        count += 1
