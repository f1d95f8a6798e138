"""Requests to a run from outside, by signals and by files in its folder; all ranks agree on them.

    touch RUN/STOP      save and end with exit code 3, after which the run is not restarted
    touch RUN/SAVE      save and go on; the file is removed when the save is done

Each rank's requests travel with a sum that every step makes anyway (`Engine.train_step`), so all
ranks know them at the end of the step without further communication.
"""

import logging
import time
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import EXIT_PREEMPTED, EXIT_STOPPED, StoppedError
from pipeline.runtime import dist
from pipeline.runtime.rank import agreed_signal
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.stop import StopRequest

logger = logging.getLogger(__name__)

# A look may cost milliseconds on a file system that many use.
_LOOK_EVERY_S = 2.0


class Wanted(NamedTuple):
    """Requests at the end of a step, of one rank or of all ranks together."""

    stop: bool
    """Save and end with exit code 75: a signal came."""
    halt: bool
    """Save and end with exit code 3: there is a STOP file."""
    save: bool
    """Save and go on: there is a SAVE file."""

    @property
    def ends(self) -> bool:
        """Whether the run must end."""
        return self.stop or self.halt

    @property
    def saves(self) -> bool:
        """Whether a checkpoint must be made at this step."""
        return self.ends or self.save


class Requests:
    """Looks for requests on this rank; rank 0 looks at the files."""

    def __init__(self, signals: StopRequest, run_dir: Path, *, is_first: bool) -> None:
        self._signals = signals
        run = RunFolder(run_dir)
        self._stop_file, self._save_file = run.stop, run.save
        self._is_first = is_first
        self._looked_s = float("-inf")
        self._halt = self._save = False
        self._saved_ns: int | None = None

    def refuse_if_stopped(self) -> None:
        """Refuse to start a run that a person has stopped. Collective.

        Raises:
            StoppedError: there is a STOP file.
        """
        with dist.raise_on_all_ranks():
            if self._is_first and self._stop_file.exists():
                raise StoppedError(
                    f"{self._stop_file} exists, so the run does not train; expected no such file: "
                    f"remove it (rm {self._stop_file}) and start again"
                )

    def ends_before_training(self) -> bool:
        """Return whether any rank has received a signal. Collective."""
        name = agreed_signal(self._signals)
        if name:
            logger.warning("stopped by %s before the first step; there is nothing to save", name)
        return bool(name)

    def own(self) -> Wanted:
        """Return this rank's requests; look at the files every few seconds."""
        now_s = time.monotonic()
        if self._is_first and now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._halt = self._stop_file.exists()
            self._save = self._modified_ns() not in (None, self._saved_ns)
        return Wanted(self._signals.requested, self._halt, self._save)

    def saved(self) -> None:
        """Remove the SAVE file after the save that it asked for."""
        if not self._is_first:
            return
        self._save, self._saved_ns = False, self._modified_ns()
        try:
            self._save_file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "saved, but %s cannot be removed: %s; touch it again to save again",
                self._save_file,
                error,
            )

    def end(self, wanted: Wanted, step: int) -> int:
        """Log why the run ends after its save, and return the exit code."""
        if wanted.halt:
            logger.warning(
                "stopped at step %d by %s; saved. Remove the file and start again to continue",
                step,
                self._stop_file,
            )
            return EXIT_STOPPED
        logger.warning(
            "stopped at step %d by %s; saved, start again to continue",
            step,
            self._signals.signal_name or "a signal to another rank",
        )
        return EXIT_PREEMPTED

    def _modified_ns(self) -> int | None:
        try:
            return self._save_file.stat().st_mtime_ns
        except OSError:
            return None
