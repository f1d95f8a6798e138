"""Writes a run's numbers to console, metrics.jsonl and TensorBoard (its only door). For rank 0.

A run goes on if its numbers cannot be written: they are lost, the log says how many, and every
later write tries again. torch's SummaryWriter is not used: it writes from its own thread, whose
errors surface in some later call, and it never writes again after one.
"""

import io
import json
import logging
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from pipeline.runtime.files import AppendedFile
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import duration

logger = logging.getLogger(__name__)

_SHORT = {"accuracy": "acc"}

_TELL_EVERY_S = 600.0


class Sinks:
    """The writers of one attempt of a run."""

    def __init__(self, run_dir: Path, attempt: int, resumed_step: int | None) -> None:
        """Prepare the files; the first record creates them.

        Steps that an earlier attempt logged and this one computes again are twice in metrics.jsonl,
        with different "attempt"; TensorBoard shows the later ones.
        """
        self._attempt = attempt
        self._lines = _Lossy(RunFolder(run_dir).metrics)
        # The name that torch's SummaryWriter gives; TensorBoard reads files in this order.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        purge_step = 0 if resumed_step is None else resumed_step + 1
        beginning = _event(file_version="brain.Event:2") + _event(
            session_log=SessionLog(status=SessionLog.START), step=purge_step
        )
        self._events = _Lossy(RunFolder(run_dir).tensorboard / name, beginning)

    def write(
        self, step: int, kind: str, values: dict[str, float], section: str | None = None
    ) -> None:
        """Record named numbers of a step.

        The kind is `train`, `eval`, `skip`, `save` or `straggler`, and by default TensorBoard's
        section. NaN, which JSON lacks, is written as null.
        """
        shown = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "kind": kind, "attempt": self._attempt, "unix_s": time.time()}
        self._lines.append((json.dumps(record | shown) + "\n").encode(), b"\n")
        scalars = [
            summary.scalar(f"{section or kind}/{name}", value) for name, value in values.items()
        ]
        self._show(step, *scalars)

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Show a text in TensorBoard."""
        self._show(step, summary.text(name, markdown))

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Show an image of (height, width, 3) in TensorBoard."""
        self._show(step, summary.image(name, pixels, dataformats="HWC"))

    def write_settings(self, settings: dict[str, bool | str | float]) -> None:
        """List the run in TensorBoard's table of hyperparameters, beside its held-out loss."""
        # SummaryWriter.add_hparams would open a second folder, shown as another run.
        self._show(0, *summary.hparams(settings, {"eval/loss": 0.0}))

    def _show(self, step: int, *summaries: Any) -> None:
        self._events.append(b"".join(_event(summary=each, step=step) for each in summaries))

    def close(self) -> None:
        """Warn about lost records and close the files."""
        self._lines.tell()
        self._events.tell()


class _Lossy:
    """A file of records, which loses records while it cannot be written."""

    def __init__(self, path: Path, beginning: bytes = b"") -> None:
        self._path, self._beginning = path, beginning
        self._file = AppendedFile(path)
        self._lost = self._told_of = 0
        self._told_s = float("-inf")
        self._error: OSError | None = None

    def append(self, record: bytes, end: bytes = b"") -> None:
        try:
            self._file.append(record, self._beginning, end)
        except OSError as error:
            self._error = error
            self._lost += 1
            if time.monotonic() - self._told_s >= _TELL_EVERY_S:
                self.tell()
            return
        if self._error is not None:
            logger.warning(
                "%s is written again; %d records were lost in between", self._path, self._lost
            )
            self._error, self._lost, self._told_of = None, 0, 0
            self._told_s = float("-inf")

    def tell(self) -> None:
        """Warn about records lost since the last warning."""
        if self._lost > self._told_of:
            logger.warning(
                "%s cannot be written: %s; %d records are lost so far, training goes on. Free "
                "space or fix the folder: every later write tries again",
                self._path,
                self._error,
                self._lost,
            )
            self._told_of, self._told_s = self._lost, time.monotonic()


def _event(**content: Any) -> bytes:
    """Frame data as a record of an event file."""
    buffer = io.BytesIO()
    event = Event(wall_time=time.time(), **content)
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def console_line(
    step: int, num_steps: int, means: dict[str, float], values: dict[str, float], eta_s: float
) -> str:
    """One line for people; `means` are the objective's, `values` all numbers of the line."""
    return (
        f"step {step:>{len(str(num_steps))}}/{num_steps}  {means_text(values['loss'], means)}  "
        f"lr {values['lr']:.2e}  alpha {values['alpha']:.3f}  "
        f"norm {values['grad_norm']:.2f}  {values['tokens_per_s']:,.0f} tok/s  "
        f"wait {values['data_wait']:.1%}  skipped {values['skipped_steps']:.0f}  "
        f"ETA {duration(eta_s)}"
    )


def means_text(loss: float, means: dict[str, float]) -> str:
    """Return the minimised loss and the objective's other means, as `loss 3.1204  acc 0.421`."""
    others = [
        f"{_SHORT.get(name, name)} {mean:.3f}" for name, mean in means.items() if name != "loss"
    ]
    return "  ".join([f"loss {loss:.4f}", *others])
