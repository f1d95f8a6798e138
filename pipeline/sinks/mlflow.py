"""Shows a run's numbers in MLflow: `monitor.sinks: [tensorboard, mlflow]`.

Needs `pip install 'postnorm[mlflow]'`. MLFLOW_TRACKING_URI names the server; without one, the
numbers lie in RUN/mlruns, and `mlflow ui --backend-store-uri RUN/mlruns` shows them.
MLFLOW_EXPERIMENT_NAME is postnorm by default. A resumed run goes on as the same one, whose id is in
RUN/sinks/mlflow.
"""

import re
import time

import mlflow
import numpy as np
import numpy.typing as npt
from mlflow.entities import Metric, Param
from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

from pipeline.runtime import env
from pipeline.sinks.base import SinkContext

_NOT_IN_NAMES = re.compile(r"[^/\w.\- ]")
_MOST_PARAMS, _LONGEST_VALUE = 100, 500
"""What a server takes at once, and of one value."""


class MLflow:
    """One attempt of a run in MLflow."""

    def __init__(self, start: SinkContext) -> None:
        """Open the run, or go on with it."""
        env.set_default("MLFLOW_DISABLE_TELEMETRY", "true")
        env.set_default("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = None if mlflow.is_tracking_uri_set() else (start.run_dir / "mlruns").absolute()
        self._client = mlflow.MlflowClient(uri.as_uri() if uri else None)
        self._id = start.kept_id("mlflow", lambda: self._create(start))
        self._client.update_run(self._id, status="RUNNING")

    def _create(self, start: SinkContext) -> str:
        name = MLFLOW_EXPERIMENT_NAME.get() or "postnorm"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run_id: str = self._client.create_run(number, run_name=start.name).info.run_id
        # Those of the first attempt: MLflow's never change. The text "config" has each attempt's.
        params = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in start.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        return run_id

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show numbers."""
        now_ms = time.time_ns() // 1_000_000
        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", tag), value, now_ms, step)
            for tag, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Keep a text as a file of the run."""
        self._client.log_text(self._id, markdown, f"{name}/{step:08d}.md")

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Keep an image as a file of the run."""
        self._client.log_image(self._id, pixels, f"{name}/{step:08d}.png")

    def close(self) -> None:
        """Mark the run as ended; a later attempt opens it again."""
        self._client.set_terminated(self._id)
