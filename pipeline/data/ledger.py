"""RUN/ledger.jsonl: batches that a run did not train on although it could have, and why.

    {"kind": "non_finite", "batch": 41, ...}   a gradient was not finite: no rank took the step
    {"kind": "rewind", "first_batch": 90, ...} the loss jumped: the run went back and left them out
    {"kind": "diverged", "from_step": 70, ...} ranks held different weights: it went back, no more

A run that repeats steps after a kill meets its non-finite batches again and writes them again: the
last line about a batch counts. Lines about rewinds decide what is trained on; they are written
before the run goes back. `batches.tsv` has every batch, with its hash.

Apart from `record.py`, because that needs numpy: `status` reads the ledger where there is none.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.errors import DataError
from pipeline.runtime.files import retry_storage, write_atomic
from pipeline.runtime.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A step that was not taken."""

    batch: int
    """Its number from 0, in `batches.tsv`."""
    cursor: int
    """Its first sequence in the run's order."""
    step: int
    """The step that it would have been, from 1."""
    grad_norm: str
    """Over all ranks: `inf` or `nan`, which JSON has no numbers for."""
    ranks: dict[str, list[int]]
    """Ranks whose loss was NaN or infinite -> places of their sequences in the batch, from 0.

    Empty if all losses were finite, and a gradient was not.
    """
    samples: list[list[int]]
    """[epoch, sample id] of every sequence of the batch; `pipeline inspect --batch` shows them."""
    unix_s: float
    gradients: list[str] = field(default_factory=list)
    """Where all losses were finite: rank, host and tensor of gradients that were not when they were
    computed again. Empty if they were finite then: a device or the network erred in passing."""


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """A spike of the loss, or a state that is not finite, and what was done about it."""

    first_batch: int
    last_batch: int
    first_cursor: int
    """First sequence of the first one."""
    stop_cursor: int
    """One past the last sequence of the last one."""
    high_batches: list[int]
    """Batches with a loss above the limit."""
    loss: float | None
    """The largest of these steps, nats; None if no loss was the reason."""
    limit: float | None
    """The loss above which a step was high."""
    from_step: int
    """Steps applied when the run turned round."""
    to_step: int
    """Step of the checkpoint that it went back to."""
    unix_s: float
    unsound: list[str] = field(default_factory=list)
    """Rank and tensor of values that were not finite, if those were the reason."""

    @property
    def reason(self) -> str:
        """Why the run went back, for people."""
        if self.loss is None:
            return f"the state was not finite: {'; '.join(self.unsound)}"
        return (
            f"the loss jumped up to {self.loss:.4f}, above {self.limit:.4f} in batches "
            f"{self.high_batches[0]} to {self.high_batches[-1]}"
        )


@dataclass(frozen=True, kw_only=True)
class Diverged:
    """Copies of the state that differed between ranks; the run went back and repeats its steps."""

    from_step: int
    """Steps applied when it was seen."""
    to_step: int
    """Step of the checkpoint that the run went back to."""
    unix_s: float
    found: list[str]
    """Ranks, hosts and tensors."""

    @property
    def reason(self) -> str:
        """Why the run went back, for people."""
        more = f"; and {len(self.found) - 1} more" if len(self.found) > 1 else ""
        return f"copies of the state differed: {self.found[0]}{more}"


Record = NonFinite | Rewind | Diverged
_KINDS: dict[str, type[Record]] = {"non_finite": NonFinite, "rewind": Rewind, "diverged": Diverged}


@dataclass(frozen=True)
class Ledger:
    """What a run's ledger holds."""

    non_finite: dict[int, NonFinite]
    rewinds: list[Rewind]
    diverged: list[Diverged]

    @property
    def newest_return(self) -> Rewind | Diverged:
        """Why the run went back last; it did."""
        returns: list[Rewind | Diverged] = [*self.rewinds, *self.diverged]
        return max(returns, key=lambda each: each.unix_s)

    def is_spoiled(self, cursor: int, rewinds: int) -> bool:
        """Return whether a checkpoint was trained on batches that were left out later.

        `rewinds` is how many the run had made when it was saved.
        """
        return any(cursor > each.first_cursor for each in self.rewinds[rewinds:])


def read_ledger(run_dir: Path) -> Ledger:
    """Read a run's ledger; without a file it is empty (DataError: a line is damaged)."""
    ledger, path = Ledger({}, [], []), RunFolder(run_dir).ledger
    text = _read(path).decode(errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values = json.loads(line)
            record = _KINDS[values.pop("kind")](**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}, line {number}: {line[:200]!r}, expected the fields of a record of the "
                f"kinds {', '.join(_KINDS)} ({error!r}). It decides which batches are left out: "
                "continue with the version that wrote it, or restore the file from a copy"
            ) from error
        if isinstance(record, Rewind):
            ledger.rewinds.append(record)
        elif isinstance(record, Diverged):
            ledger.diverged.append(record)
        else:
            ledger.non_finite[record.batch] = record
    return ledger


def add_to_ledger(run_dir: Path, record: Record) -> None:
    """Add a record and flush it to disk; a kill leaves the file unchanged.

    Raises:
        OSError: the file cannot be written.
    """
    path = RunFolder(run_dir).ledger
    [kind] = [name for name, cls in _KINDS.items() if isinstance(record, cls)]
    line = json.dumps({"kind": kind, **asdict(record)}) + "\n"
    # The whole file again, not an append: half a line would stop every later start of the run.
    write_atomic(path, _read(path) + line.encode())


def copy_ledger(run_dir: Path, target: Path) -> None:
    """Give a folder the ledger of a run, empty if it has none (OSError: that does not work)."""
    write_atomic(RunFolder(target).ledger, _read(RunFolder(run_dir).ledger))


def _read(path: Path) -> bytes:
    # Not by `exists`: where storage fails, some versions of Python take that for no.
    try:
        return retry_storage(path.read_bytes, lambda: f"reading {path}")
    except FileNotFoundError:
        return b""
