"""Blocks kept on a disk: below their bound, whole or not there, and the right ones."""

import hashlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.cache import BlockCache, Bytes, CacheCounts
from pipeline.errors import DataError, StorageError
from tests.support.damage import flip

SIZE = 1000


class _Blocks:
    """Blocks by number, as a store would give them."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def data(self, number: int) -> Bytes:
        return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)

    def sha256(self, number: int) -> bytes:
        return hashlib.sha256(self.data(number).tobytes()).digest()

    def fetch(self, number: int) -> Bytes:
        self.fetched.append(number)
        return self.data(number)

    def get(
        self, cache: BlockCache, number: int, fetch: Callable[[], Bytes] | None = None
    ) -> Bytes:
        """Read a block, which is always the right one."""
        expected = self.data(number)

        def check(data: Bytes) -> None:
            if not np.array_equal(data, expected):
                raise DataError(f"block {number} is damaged")

        found = cache.get(self.sha256(number), fetch or (lambda: self.fetch(number)), check)
        assert np.array_equal(found, expected)
        return found


def _files(cache: BlockCache) -> list[Path]:
    return sorted(path for path in cache.folder.glob("*/*"))


def _size(cache: BlockCache) -> int:
    return sum(path.stat().st_size for path in _files(cache))


def test_a_block_is_fetched_once_also_by_another_process_s_cache(tmp_path: Path) -> None:
    blocks = _Blocks()
    for cache in (BlockCache(tmp_path, 10 * SIZE), BlockCache(tmp_path, 10 * SIZE)):
        for number in (1, 2, 1, 3):
            blocks.get(cache, number)
    assert blocks.fetched == [1, 2, 3]
    assert cache.counts() == CacheCounts(3 * SIZE, 3, 3 * SIZE, 0)
    part = cache.part(blocks.sha256(2), 10, 20)
    assert part is not None
    assert np.array_equal(part, blocks.data(2)[10:30])
    assert cache.part(blocks.sha256(4), 10, 20) is None


def test_the_bound_holds_after_every_block(tmp_path: Path) -> None:
    blocks, chance = _Blocks(), np.random.default_rng(7)
    bound = 20 * SIZE + SIZE // 2
    caches = [BlockCache(tmp_path, bound) for _ in range(2)]
    for step, number in enumerate(chance.integers(0, 60, 200).tolist()):
        blocks.get(caches[step % 2], number)
        assert _size(caches[0]) <= bound
        assert caches[0].counts().kept_bytes >= _size(caches[0])
    assert _size(caches[0]) > bound * 3 // 4


@pytest.mark.parametrize(("room", "most"), [(0.75, 0.35), (0.5, 0.6), (0.25, 0.82)])
def test_room_for_a_share_of_the_blocks_saves_it(tmp_path: Path, room: float, most: float) -> None:
    # If what was unused for longest went first, 1 - room^2 / 2 would be fetched.
    number, blocks, chance = 160, _Blocks(), np.random.default_rng(3)
    cache = BlockCache(tmp_path, int(number * room * SIZE))
    shares = []
    for _ in range(3):
        blocks.fetched.clear()
        for block in chance.permutation(number).tolist():
            blocks.get(cache, block)
        shares.append(len(blocks.fetched) / number)
    assert shares[0] == 1
    print(f"room for {room:.0%}: {shares[1:]} fetched in later epochs")
    assert max(shares[1:]) < most, shares


def test_a_damaged_block_is_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks, cache = _Blocks(), BlockCache(tmp_path, 10 * SIZE)
    blocks.get(cache, 1)
    [path] = _files(cache)
    flip(path, 500)
    blocks.get(cache, 1)
    path.write_bytes(path.read_bytes()[:400])
    blocks.get(cache, 1)
    blocks.get(cache, 1)
    assert blocks.fetched == [1, 1, 1]
    assert cache.counts().damaged_blocks == 2
    assert str(path) in caplog.text
    assert "2 so far" in caplog.text


def test_a_block_that_came_damaged_is_fetched_once_more(tmp_path: Path) -> None:
    blocks, cache = _Blocks(), BlockCache(tmp_path, 10 * SIZE)
    answers = [blocks.data(2), blocks.data(1)]
    blocks.get(cache, 1, lambda: answers.pop(0))
    with pytest.raises(DataError, match="block 3 is damaged"):
        blocks.get(cache, 3, lambda: blocks.data(4))
    assert len(_files(cache)) == 1
    assert cache.counts().damaged_blocks == 0, "that is not this disk's fault"


def test_a_store_that_fails_leaves_nothing(tmp_path: Path) -> None:
    blocks, cache = _Blocks(), BlockCache(tmp_path, 10 * SIZE)

    def fail() -> Bytes:
        raise StorageError("the store is gone")

    with pytest.raises(StorageError, match="the store is gone"):
        blocks.get(cache, 1, fail)
    assert _files(cache) == []
    blocks.get(cache, 1)


@pytest.mark.parametrize("what", ["no room", "no folder", "a full disk"])
def test_a_cache_that_cannot_keep_gives_blocks_all_the_same(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, cache = _Blocks(), BlockCache(tmp_path / "cache", SIZE // 2)
    if what == "no folder":
        (tmp_path / "cache").write_text("a file")
    if what == "a full disk":
        cache = BlockCache(tmp_path / "cache", 10 * SIZE)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
    blocks.get(cache, 1)
    blocks.get(cache, 1)
    assert blocks.fetched == [1, 1]
    assert _files(cache) == []
    assert caplog.text.count("blocks are not kept" if what != "no room" else "no room") == 1
    if what != "no room":
        with pytest.raises(OSError, match=r"full|space|exists|directory"):
            cache.fill(blocks.sha256(1), lambda: blocks.data(1), lambda _: None, 0)


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_goes_first(tmp_path: Path, in_memory: bool) -> None:
    blocks, cache = _Blocks(), BlockCache(tmp_path, 16 * SIZE, in_memory)
    for number in (*range(16), 0, 1, 16):
        blocks.get(cache, number)
        time.sleep(0.002)  # the clock of files
    blocks.fetched.clear()
    for number in (0, 1, 16):
        blocks.get(cache, number)
    assert blocks.fetched == []
    blocks.get(cache, 2)
    blocks.get(cache, 15)
    assert blocks.fetched == ([2] if in_memory else [15])


def test_threads_that_want_a_block_wait_for_the_one_that_fetches_it(tmp_path: Path) -> None:
    blocks, cache = _Blocks(), BlockCache(tmp_path, 10 * SIZE)
    started, goes_on = threading.Event(), threading.Event()

    def fetch() -> Bytes:
        started.set()
        assert goes_on.wait(60)
        return blocks.fetch(1)

    threads = [threading.Thread(target=blocks.get, args=(cache, 1, fetch)) for _ in range(3)]
    threads[0].start()
    assert started.wait(60)
    for thread in threads[1:]:
        thread.start()
    blocks.get(cache, 2)  # others are not held up
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(blocks.fetched) == [1, 2]


def _killed(folder: Path, at: str, pipe: Connection) -> None:
    """Begin to keep a block, and be killed in the middle of it."""
    blocks, cache, real = _Blocks(), BlockCache(folder, 10 * SIZE), Path.open

    def die(*_: object) -> None:
        pipe.send(None)
        signal.pause()

    def opened(path: Path, mode: str = "r", *rest: object) -> object:
        file = real(path, mode, *rest)  # type: ignore[call-overload]
        if mode == "r+b" and path.suffix == ".part":
            file.write(blocks.data(1)[:300].tobytes())
            file.flush()
            die()
        return file

    setattr(Path, *(("replace", die) if at == "before its name" else ("open", opened)))
    blocks.get(cache, 1)


def _writing(folder: Path, at: str) -> multiprocessing.process.BaseProcess:
    """A process that stands still in the middle of keeping a block."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_killed, args=(folder, at, theirs))
    process.start()
    assert ours.poll(60)
    return process


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("at", ["in the middle", "before its name"])
def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_block(tmp_path: Path, at: str) -> None:
    process = _writing(tmp_path, at)
    blocks, cache = _Blocks(), BlockCache(tmp_path, 10 * SIZE)
    [part] = _files(cache)
    assert part.suffix == ".part"
    assert cache.part(blocks.sha256(1), 0, 10) is None
    waits = threading.Thread(target=blocks.get, args=(cache, 1))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive(), "the writer lives, and has the block"
    process.kill()
    process.join()
    waits.join(60)
    assert blocks.fetched == [1]
    assert [path.suffix for path in _files(cache)] == [""]


@pytest.mark.usefixtures("processes")
def test_what_a_killed_writer_left_goes_when_room_is_made(tmp_path: Path) -> None:
    process = _writing(tmp_path, "before its name")
    blocks, cache = _Blocks(), BlockCache(tmp_path, 10 * SIZE)
    for number in range(2, 40):
        blocks.get(cache, number)
        assert _size(cache) <= cache.max_bytes
    assert any(path.suffix for path in _files(cache)), "its writer lives"
    process.kill()
    process.join()
    for number in range(40, 60):
        blocks.get(cache, number)
    assert not any(path.suffix for path in _files(cache))
    assert cache.counts().kept_bytes == _size(cache)
