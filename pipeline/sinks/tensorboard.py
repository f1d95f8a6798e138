"""Writes a run's numbers as TensorBoard's event files, with what one looks at first.

`tensorboard --logdir runs` names each run by its folder. Its plain address opens on all tags in
alphabetical order, so that a group of the first name holds the run as two pictures and its
most important numbers once more. The tab "Custom Scalars" has a layout of charts.
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

from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder
from pipeline.sinks.base import LossyFile, SinkContext
from pipeline.sinks.glance import MetricLines
from pipeline.sinks.overview import pictures

# Tags are regular expressions that TensorBoard matches from the beginning of a tag.
_CHARTS: dict[str, dict[str, str]] = {
    "First look": {
        "loss, held-out loss, unigram entropy, uniform guess (nats)": (
            "quality/(loss|held_out_loss|unigram_entropy|uniform_guess)$"
        ),
        "learning rate": "health/lr$",
        "tokens a second": "speed/tokens_per_s$",
        "share done": "data/share_done$",
        "epochs": "data/epoch",
        "restarts and rewinds": "health/(restarts|rewinds)$",
        "stage": "quality/stage$",
        "alpha": "health/alpha$",
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
    "Sources": {"held-out loss (nats)": "quality/held_out_loss_"},
}
GLANCE = "at_a_glance"
"""Tag of the chart, and group of the numbers that follow it."""
# Numbered: the order of a group is that of its tags.
_AT_A_GLANCE = {
    "quality/loss": "1_loss",
    "quality/held_out_loss": "2_held_out_loss",
    "data/share_done": "3_share_done",
    "health/lr": "4_learning_rate",
    "speed/tokens_per_s": "5_tokens_per_s",
    "data/epoch": "6_epochs",
    "quality/stage": "7_stage",
    "health/restarts": "8_restarts",
    "health/rewinds": "9_rewinds",
}
# Of a run of a week some 350 times two pictures of 5 KB.
_LEAST_PAUSE_S, _PAUSE_SHARE = 30.0, 0.02


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
        self._run, self._config = RunFolder(start.run_dir), start.config
        self._lines = MetricLines(self._run, slim=True)
        self._begun_s, self._drawn_s = time.monotonic(), float("-inf")
        self._step, self._is_drawn = 0, True

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show numbers, and now and then the pictures of the run."""
        first = {
            f"{GLANCE}/{_AT_A_GLANCE[tag]}": values[tag]
            for tag in _AT_A_GLANCE.keys() & values.keys()
        }
        self._show(step, *(summary.scalar(tag, value) for tag, value in (values | first).items()))
        if "quality/loss" not in values and "quality/held_out_loss" not in values:
            return
        self._step, self._is_drawn = step, False
        now_s = time.monotonic()
        pause_s = max(_LEAST_PAUSE_S, _PAUSE_SHARE * (now_s - self._begun_s))
        if now_s - self._drawn_s >= pause_s:
            self._draw()

    def _draw(self) -> None:
        """Draw what metrics.jsonl has, in which this step's line stands already."""
        attempts = read_json_lines(self._run.attempts)
        lines = self._lines.update(attempts)
        self._drawn_s, self._is_drawn = time.monotonic(), True
        chart, numbers = pictures(self._config, lines, attempts)
        self.write_image(self._step, GLANCE, chart)
        self.write_image(self._step, f"{GLANCE}/0_numbers", numbers)

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Show a text."""
        self._show(step, summary.text(name, markdown))

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Show an image."""
        self._show(step, summary.image(name, pixels, dataformats="HWC"))

    def _show(self, step: int, *summaries: Any) -> None:
        self._file.append(b"".join(_event(summary=each, step=step) for each in summaries))

    def close(self) -> None:
        """Draw the end, and warn about lost records."""
        if not self._is_drawn:
            self._draw()
        self._file.tell()


def _event(**content: Any) -> bytes:
    """Frame data as a record of an event file."""
    buffer = io.BytesIO()
    event = Event(wall_time=time.time(), **content)
    # Not torch's SummaryWriter: it writes from its own thread, whose errors surface in some later
    # call, and it never writes again after one.
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
