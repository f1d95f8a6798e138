"""Where numbers go: console, metrics.jsonl and TensorBoard (its only door). Rank 0 writes."""

import json
import logging
import math
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from pipeline.runtime.files import METRICS_FILE
from pipeline.runtime.log import duration_text

logger = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tensorboard"


class Sinks:
    """Writers of one attempt of a run."""

    def __init__(self, run_dir: Path, attempt: int, resumed_step: int | None) -> None:
        """Opens the files to append.

        Steps that an earlier attempt logged and this one computes again stand twice in
        metrics.jsonl, told apart by "attempt"; TensorBoard shows the later ones.
        """
        self._attempt = attempt
        path = run_dir / METRICS_FILE
        # A killed attempt may have left half a line.
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")
        self._tensorboard = SummaryWriter(
            str(run_dir / TENSORBOARD_FOLDER),
            purge_step=0 if resumed_step is None else resumed_step + 1,
            flush_secs=10,
        )

    def write(
        self, step: int, kind: str, values: dict[str, float], section: str | None = None
    ) -> None:
        """Records named numbers of a step.

        Args:
            step: applied optimizer steps.
            kind: `train`, `eval`, `skip` or `save`.
            values: JSON has no NaN, so it is written as null.
            section: of TensorBoard; by default `kind`.
        """
        shown = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "kind": kind, "attempt": self._attempt, "unix_s": time.time()}
        self._file.write(json.dumps(record | shown) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{section or kind}/{name}", value, step)

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Shows a text in TensorBoard."""
        self._tensorboard.add_text(name, markdown, step)

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Shows an image of (height, width, 3) in TensorBoard."""
        self._tensorboard.add_image(name, pixels, step, dataformats="HWC")

    def write_settings(self, settings: dict[str, bool | str | float]) -> None:
        """Lists the run in TensorBoard's table of hyperparameters, beside its held-out loss."""
        # SummaryWriter.add_hparams would open a second folder, a run of its own.
        for summary in hparams(settings, {"eval/loss": 0.0}):
            self._tensorboard._get_file_writer().add_summary(summary)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        self._tensorboard.close()


def console_line(step: int, num_steps: int, values: dict[str, float], eta_s: float) -> str:
    """One line for people."""
    return (
        f"step {step:>{len(str(num_steps))}}/{num_steps}  loss {values['loss']:.4f}  "
        f"acc {values['accuracy']:.3f}  lr {values['lr']:.2e}  alpha {values['alpha']:.3f}  "
        f"norm {values['grad_norm']:.2f}  {values['tokens_per_s']:,.0f} tok/s  "
        f"wait {values['data_wait']:.1%}  skipped {values['skipped_steps']:.0f}  "
        f"ETA {duration_text(eta_s)}"
    )
