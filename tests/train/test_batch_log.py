"""The log of batches: real ranks, killed writers, lines cut anywhere, damage in the middle."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.data.record import BatchRecord, read_batches
from pipeline.errors import DataError
from pipeline.train.batch_log import BatchLog
from tests.support.ranks import start
from tests.train.batch_log_main import part_of_hash


class Group:
    """Ranks of `batch_log_main`."""

    def __init__(self, run_dir: Path, *arguments: int, world_size: int = 2) -> None:
        run_dir.mkdir(exist_ok=True)
        self._output = run_dir.parent / f"output-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "tests.train.batch_log_main", str(run_dir)]
        self.processes = start([*command, *map(str, arguments)], world_size, self._output)

    def ended(self, code: int = 0) -> str:
        codes = {process.wait(100) for process in self.processes}
        output = self._output.read_text()
        assert codes == {code}, output
        return output


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Path]:
    """A group of this process only."""
    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


def _records(first: int, stop: int) -> list[BatchRecord]:
    return [BatchRecord(b, b * 8, 8, 64, b + 1, b * 0x9E3779B97F4A7C15 % 2**64)
            for b in range(first, stop)]  # fmt: skip


def _log(run_dir: Path, cursor: int, records: list[BatchRecord]) -> None:
    log = BatchLog(run_dir, cursor, True)
    for record in records:
        log.add(record)
        if record.batch % 3 == 0:
            log.flush()
    log.flush()


@pytest.mark.usefixtures("processes")
def test_hashes_are_added_over_ranks_and_a_change_on_one_stops_all(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    Group(run_dir, 0, 88).ended()
    records = read_batches(run_dir)
    for batch, record in enumerate(records):
        total = (part_of_hash(batch, 0) + part_of_hash(batch, 1)) % 2**64
        step = None if batch % 3 == 2 else batch - batch // 3 + 1
        assert record == BatchRecord(batch, batch * 8, 8, 64, step, total)
    assert len(records) == 11
    content = (run_dir / "batches.tsv").read_bytes()
    said = Group(run_dir, 40, 120, 9).ended(2).splitlines()
    lines = sorted(line for line in said if line.startswith("rank "))
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank}: batch 9 at sequence 72 has hash")
        assert f"{records[9].hash:016x}" in line
        assert f"{(records[9].hash + 1) % 2**64:016x}" in line
        assert "this attempt sees other data than an earlier one" in line
    assert len(lines) == 2
    # Trying again must not make the proof disappear.
    assert (run_dir / "batches.tsv").read_bytes() == content
    Group(run_dir, 40, 120).ended()
    assert [record.batch for record in read_batches(run_dir)] == list(range(15))
    assert (run_dir / "batches.tsv").read_bytes().startswith(content)
    # Damage that rank 0 finds when it opens the file stops all ranks, too.
    (run_dir / "batches.tsv").write_bytes(content.replace(b"\t64\t", b"\tx\t", 1))
    assert Group(run_dir, 40, 120).ended(2).count("batches.tsv, line 2:") == 2


@pytest.mark.usefixtures("processes")
def test_a_killed_run_leaves_lines_that_the_next_one_goes_on_from(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    group = Group(run_dir, 0, 8 * 10**9, world_size=1)
    path = run_dir / "batches.tsv"
    while not path.exists() or path.stat().st_size < 20_000:
        assert group.processes[0].poll() is None
        time.sleep(0.01)
    group.processes[0].kill()
    group.ended(-signal.SIGKILL)
    done = len(read_batches(run_dir))
    assert done > 100
    Group(run_dir, 800, 8 * (done + 50), world_size=1).ended()
    assert [record.batch for record in read_batches(run_dir)] == list(range(done + 50))


def test_a_last_line_cut_at_any_byte_is_dropped(alone: Path) -> None:
    _log(alone, 0, _records(0, 4))
    path = alone / "batches.tsv"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        assert read_batches(alone) == _records(0, 3)
        _log(alone, 16, _records(2, 4))
        assert path.read_bytes() == whole, size
    header = whole.index(b"\n") + 1
    for size in range(header + 1):  # killed while the first attempt began
        path.write_bytes(whole[:size])
        _log(alone, 0, _records(0, 4))
        assert path.read_bytes() == whole, size


def test_an_attempt_that_was_killed_early_hides_nothing_from_the_next(alone: Path) -> None:
    _log(alone, 0, _records(0, 9))
    _log(alone, 24, _records(3, 5))
    changed = _records(3, 9)
    changed[4] = changed[4]._replace(hash=1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"batch 7 at sequence 56 has hash 0{15}1 \(8 sequenc"):
            _log(alone, 24, changed)
    for change in ({"seq_len": 65}, {"sequences": 7}):
        with pytest.raises(DataError, match=r"move .* away or choose another run_dir"):
            _log(alone, 64, [_records(8, 9)[0]._replace(**change)])
    assert read_batches(alone) == _records(0, 9)


def test_a_step_that_is_skipped_this_time_is_written_as_such(alone: Path) -> None:
    _log(alone, 0, _records(0, 9))
    again = _records(3, 6)
    again[1] = again[1]._replace(step=None)
    _log(alone, 24, again)
    assert read_batches(alone) == [*_records(0, 3), *again, *_records(6, 9)]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (b"\n2\t16\t", b"\n2\t17\t", 4),  # cursor
        (b"\n2\t16\t", b"\n3\t16\t", 4),  # number
        (b"\n2\t16\t8\t64\t3\t", b"\n2\t16\t9\t64\t3\t", 5),  # size, known by the next
        (b"\n2\t16\t8\t64\t3\t", b"\n2\t16\t8\t64\tskippes\t", 4),
        (b"\n2\t16\t8\t64\t3\t", b"\n2\t16\t8\t64\t", 4),
        (b"\n2\t16\t8\t64\t3\t", b"\n2\t16\t8\t64\t3\t0", 4),  # 17 digits
        (b"\n2\t16\t", b"\n\n2\t16\t", 4),
        (b"\n2\t16\t", b"\n2\t-6\t", 4),
        (b"\n2\t16\t", b"\n2\t" + b"9" * 19 + b"\t", 4),
        (b"\nbatch", b"x", 1),
    ],
)
def test_damage_is_named_by_its_line(alone: Path, old: bytes, new: bytes, line: int) -> None:
    _log(alone, 0, _records(0, 6))
    path = alone / "batches.tsv"
    text = b"\n" + path.read_bytes()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new)[1 if line > 1 else 0 :])
    for attempt in (lambda: BatchLog(alone, 48, True), lambda: read_batches(alone)):
        with pytest.raises(DataError, match=rf"line {line}: .*Restore .* or move it away"):
            attempt()


def test_a_file_that_does_not_reach_to_the_cursor_is_refused(alone: Path) -> None:
    _log(alone, 0, _records(0, 6))
    with pytest.raises(DataError, match="line 7 ends at sequence 48, followed by the end"):
        BatchLog(alone, 56, True)
    with pytest.raises(DataError, match="line 2 ends at sequence 8, followed by 16"):
        BatchLog(alone, 12, True)


def test_a_run_from_before_the_log_starts_it(alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="is missing"):
        read_batches(alone)
    _log(alone, 80, _records(10, 14))
    assert "is missing: a new one starts at sequence 80" in caplog.text
    assert read_batches(alone) == _records(10, 14)
    _log(alone, 96, _records(12, 16))
    assert read_batches(alone) == _records(10, 16)
    _log(alone, 40, _records(5, 7))
    assert "begins later: a new one starts at sequence 40" in caplog.text
    assert read_batches(alone) == _records(5, 7)
