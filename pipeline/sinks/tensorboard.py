"""Writes a run's numbers as TensorBoard's event files, with a layout of charts for a first look.

`tensorboard --logdir runs` names each run by its folder. The tab "Custom Scalars" has the layout.
"""

import io
import os
import socket
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from pipeline.runtime.run_folder import RunFolder
from pipeline.sinks.base import LossyFile, SinkContext

# Tags are regular expressions that TensorBoard matches from the beginning of a tag.
_CHARTS: dict[str, dict[str, str]] = {
    "First look": {
        "loss and unigram entropy (nats)": "quality/(loss|unigram_entropy)$",
        "held-out loss and unigram entropy (nats)": "quality/(held_out_loss|unigram_entropy)$",
        "learning rate": "health/lr$",
        "alpha": "health/alpha$",
        "tokens a second": "speed/tokens_per_s$",
        "gradient norm": "health/grad_norm$",
    },
    "Layers": {
        "gradient norm": "layers/grad_norm_",
        "update norm over weight norm": "layers/update_ratio_",
        "attention entropy (nats)": "layers/attention_entropy_",
    },
    "Health": {
        "skipped steps, batches left out, rewinds": (
            "health/(skipped_steps|left_out_batches|rewinds)$"
        ),
        "share of time waiting for data": "speed/data_wait$",
        "step time (s)": "speed/(step|own)_s_",
        "memory (GB)": "speed/.*_gb$",
    },
    "Sources": {
        "held-out loss (nats)": "quality/held_out_loss_",
        "epochs": "data/epoch",
    },
}


class TensorBoard:
    """One event file of an attempt; TensorBoard shows its steps in place of an earlier one's."""

    def __init__(self, start: SinkContext) -> None:
        """Prepare the file; the first record creates it."""
        # The name that torch's SummaryWriter gives; TensorBoard reads files in this order.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        purge_step = 0 if start.resumed_step is None else start.resumed_step + 1
        beginning = _event(file_version="brain.Event:2") + _event(
            session_log=SessionLog(status=SessionLog.START), step=purge_step
        )
        self._file = LossyFile(RunFolder(start.run_dir).tensorboard / name, beginning)
        charts = {
            title: {name: ["Multiline", [tag]] for name, tag in of.items()}
            for title, of in _CHARTS.items()
        }
        # SummaryWriter.add_hparams would open a second folder, shown as another run.
        settings = summary.hparams(start.settings, {"quality/held_out_loss": 0.0})
        self._show(0, summary.custom_scalars(charts), *settings)
        self.write_text(0, "run", f"**{start.name}**, attempt {start.attempt}: `{start.run_dir}`")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show numbers."""
        self._show(step, *(summary.scalar(tag, value) for tag, value in values.items()))

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Show a text."""
        self._show(step, summary.text(name, markdown))

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Show an image."""
        self._show(step, summary.image(name, pixels, dataformats="HWC"))

    def _show(self, step: int, *summaries: Any) -> None:
        self._file.append(b"".join(_event(summary=each, step=step) for each in summaries))

    def close(self) -> None:
        """Warn about lost records."""
        self._file.tell()


def _event(**content: Any) -> bytes:
    """Frame data as a record of an event file."""
    buffer = io.BytesIO()
    event = Event(wall_time=time.time(), **content)
    # Not torch's SummaryWriter: it writes from its own thread, whose errors surface in some later
    # call, and it never writes again after one.
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
