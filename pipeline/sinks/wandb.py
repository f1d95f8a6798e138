"""Shows a run's numbers in Weights & Biases: `monitor.sinks: [tensorboard, wandb]`.

Needs `pip install 'postnorm[wandb]'` and, once, `wandb login`. WANDB_PROJECT (default: postnorm),
WANDB_ENTITY and WANDB_MODE=offline do what they do elsewhere. Files lie in RUN/wandb; what was
written offline is uploaded by `wandb sync RUN/wandb/offline-run-*`. A resumed run goes on as the
same one, whose id is in RUN/sinks/wandb.
"""

import html
import secrets

import numpy as np
import numpy.typing as npt
import wandb

from pipeline.runtime import env
from pipeline.sinks.base import SinkContext


class WeightsAndBiases:
    """One attempt of a run in Weights & Biases."""

    def __init__(self, start: SinkContext) -> None:
        """Open the run, or go on with it."""
        env.set_default("WANDB_PROJECT", "postnorm")
        self._run = wandb.init(
            id=start.kept_id("wandb", lambda: secrets.token_hex(8)),
            resume="allow",
            reinit="create_new",  # after a rewind, one process has a second attempt
            name=start.name,
            dir=start.run_dir,
            config=start.settings,
            allow_val_change=True,
            # Standard output is not redirected: it is the log of the rank.
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step only rises, and a run that goes back after a loss spike repeats steps.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show numbers."""
        self._run.log({"step": step, **values})

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Show a text, as it is."""
        page = f"<pre>{html.escape(markdown)}</pre>"
        self._run.log({"step": step, f"text/{name}": wandb.Html(page)})

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Show an image."""
        self._run.log({"step": step, name: wandb.Image(pixels)})

    def close(self) -> None:
        """Write or upload what is left."""
        self._run.finish()
