"""What was not trained on, in a file that is whole or says that it is not."""

from pathlib import Path

import pytest

from pipeline.data.ledger import NonFinite, Rewind, add_to_ledger, read_ledger
from pipeline.errors import DataError


def _rewind(first: int, last: int) -> Rewind:
    return Rewind(first_batch=first, last_batch=last, first_cursor=8 * first,
                  stop_cursor=8 * last + 8, high_batches=[last - 1, last], loss=7.5, limit=3.0,
                  from_step=last, to_step=first - 1, unix_s=1.0)  # fmt: skip


def _non_finite(batch: int, unix_s: float) -> NonFinite:
    return NonFinite(batch=batch, cursor=8 * batch, step=batch, grad_norm="inf",
                     ranks={"1": [4, 8]}, samples=[[0, 3], [1, 4]], unix_s=unix_s)  # fmt: skip


def test_records_come_back_and_the_last_about_a_batch_counts(tmp_path: Path) -> None:
    assert read_ledger(tmp_path).rewinds == []
    records = [_non_finite(5, 1.0), _rewind(10, 20), _non_finite(5, 2.0), _rewind(30, 31)]
    for record in records:
        add_to_ledger(tmp_path, record)
    ledger = read_ledger(tmp_path)
    assert ledger.rewinds == [records[1], records[3]]
    assert ledger.non_finite == {5: records[2]}


def test_checkpoints_from_a_spike_are_spoiled(tmp_path: Path) -> None:
    for record in (_rewind(10, 20), _rewind(30, 31)):
        add_to_ledger(tmp_path, record)
    ledger = read_ledger(tmp_path)
    assert not ledger.is_spoiled(cursor=80, rewinds=0)  # its next batch is the first one
    assert ledger.is_spoiled(cursor=88, rewinds=0)
    # Saved after the first rewind: it never saw batches 10 to 20.
    assert not ledger.is_spoiled(cursor=240, rewinds=1)
    assert ledger.is_spoiled(cursor=248, rewinds=1)
    assert not ledger.is_spoiled(cursor=999, rewinds=2)


@pytest.mark.parametrize(
    "line", ['{"kind": "rewind", "first_batch": 3}', "{", '{"first_batch": 3}', "3"]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    add_to_ledger(tmp_path, _rewind(10, 20))
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"line 2: .*restore"):
        read_ledger(tmp_path)
