"""`postnorm.submit`: a run handed to SLURM, or to processes of this machine, and a handle of it."""

import logging
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch import control
from launch.records import measured_save_s, newest
from launch.site import ask_sbatch, check, preemption, preemption_remarks, profile_here
from launch.status import RunReport, decision, run_report
from launch.submit import Origin, SubmissionPlan, prepare_mix, prepare_training, require_data
from launch.submit import submit as hand_over
from pipeline.config.load import warn_of_unusual
from pipeline.config.runs import load_run
from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED, EXIT_STOPPED, ConfigError, PostnormError
from pipeline.multitask.config import is_mix, load_mix
from pipeline.runtime import env
from pipeline.runtime.run_folder import RunFolder
from pipeline.use.pretrain import Overrides, PretrainResult, override_words, result_of

logger = logging.getLogger(__name__)

State = Literal["waiting", "running", "finished", "stopped", "cancelled", "failed", "unknown"]

_OVER = ("finished", "stopped", "cancelled", "failed")
# How long `wait` goes on where nobody knows the job: SLURM forgets ended ones after minutes.
_PATIENCE_S = 180.0
_LOCAL_LOG = "local.log"
_TO_END_S = 60.0


@dataclass(frozen=True)
class SubmittedStatus:
    """How a submitted run stands."""

    state: State
    """Waiting in the queue, on nodes, or how it ended; unknown if neither SLURM nor the run's own
    files can tell. A run that is being requeued is waiting."""
    reason: str
    """Why, in words, where something is known; else empty."""
    step: int
    """Last step that was logged."""
    loss: float | None
    """Training loss in nats at that step; None if no step was logged."""

    @property
    def is_over(self) -> bool:
        """Whether nothing follows by itself."""
        return self.state in _OVER


class SubmittedRun(ABC):
    """A handle of a run that other processes train."""

    def __init__(self, run_dir: Path, job: str) -> None:
        self.run_dir = run_dir
        """Absolute path."""
        self.job = job
        """SLURM's id; `local-PID` on this machine."""

    def __repr__(self) -> str:
        return f"<SubmittedRun {self.job} of {self.run_dir}>"

    def status(self) -> SubmittedStatus:
        """Ask SLURM, and read the run's files (SlurmError: the controller does not answer)."""
        state, reason = self._state()
        stands = result_of(self.run_dir, EXIT_FINISHED)
        return SubmittedStatus(state, reason, stands.step, stands.loss)

    def wait(self, timeout_s: float | None = None, poll_s: float = 10.0) -> SubmittedStatus:
        """Wait until the run is over, requeues included.

        Returns:
            How it ended; `unknown` where nobody has known the job for three minutes.

        Raises:
            TimeoutError: it is not over after `timeout_s`; it goes on.
        """
        began_s = known_s = time.monotonic()
        while True:
            status, now_s = self.status(), time.monotonic()
            if status.state != "unknown":
                known_s = now_s
            if status.is_over or now_s - known_s > _PATIENCE_S:
                return status
            left_s = float("inf") if timeout_s is None else began_s + timeout_s - now_s
            if left_s <= 0:
                raise TimeoutError(f"{self!r} is {status.state} after {timeout_s:g} s")
            time.sleep(min(poll_s, left_s))

    def result(self, timeout_s: float | None = None, poll_s: float = 10.0) -> PretrainResult:
        """Wait, and return what `postnorm.pretrain` would have.

        Raises:
            PostnormError: the run failed, was cancelled, or is not known any more.
            TimeoutError: as `wait`.
        """
        status = self.wait(timeout_s, poll_s)
        if status.state not in ("finished", "stopped"):
            why = f": {status.reason}" if status.reason else ""
            raise PostnormError(
                f"{self.run_dir}: job {self.job} is {status.state}{why}; logs are in "
                f"{RunFolder(self.run_dir).logs}"
            )
        return result_of(self.run_dir, self._exit_code(status))

    @abstractmethod
    def cancel(self, *, save: bool = True, save_s: float = 600.0) -> None:
        """End the run; with `save` it may first save, for at most `save_s`. Waits for its end."""

    @abstractmethod
    def _state(self) -> tuple[State, str]:
        """Find the state and its reason."""

    def _exit_code(self, status: SubmittedStatus) -> int:
        """Return the exit code of a run that finished or was stopped."""
        return EXIT_FINISHED if status.state == "finished" else EXIT_STOPPED


class _SlurmRun(SubmittedRun):
    def cancel(self, *, save: bool = True, save_s: float = 600.0) -> None:
        for line in control.cancel(self.run_dir, save=save, save_s=save_s):
            logger.info("%s", line)

    def _state(self) -> tuple[State, str]:
        report = run_report(self.run_dir)
        # An evaluation that was submitted meanwhile is no later job of the training.
        if (last := newest(report.submissions)[:1]) and last[0].job != self.job:
            return "unknown", f"job {last[0].job} was submitted after this one"
        return _state_of(report)


def _state_of(report: RunReport) -> tuple[State, str]:
    job = report.job
    if job is None:  # SLURM could not be asked
        return "unknown", report.queue_problem
    if job.is_alive:
        return ("waiting" if job.is_waiting else "running"), job.reason
    last = decision(report, job.job)
    if last:
        word: State = last["decision"]
        return word, str(last["reason"])
    if report.is_done:
        return "finished", ""
    if job.is_ended:
        # Its script came to no verdict: it was killed before.
        return ("cancelled" if job.state == "CANCELLED" else "failed"), job.state
    return "unknown", job.reason


class _LocalRun(SubmittedRun):
    def __init__(self, run_dir: Path, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(run_dir, f"local-{process.pid}")
        self._process = process
        self._is_cancelled = False

    def cancel(self, *, save: bool = True, save_s: float = 600.0) -> None:
        self._is_cancelled |= self._process.poll() is None
        if self._process.poll() is None and save:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(save_s)
            except subprocess.TimeoutExpired:
                logger.warning("%r has not saved in %g s: it is killed", self, save_s)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # its ranks are in its session
            self._process.wait(_TO_END_S)

    def _state(self) -> tuple[State, str]:
        code = self._process.poll()
        if code is None:
            return "running", ""
        if code == EXIT_FINISHED:
            return "finished", ""
        has_saved = code in (EXIT_PREEMPTED, EXIT_STOPPED)
        if self._is_cancelled and not has_saved:
            return "cancelled", "it had not saved"
        if code < 0:
            return "failed", f"killed by signal {-code}"
        lines = (RunFolder(self.run_dir).logs / _LOCAL_LOG).read_text(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "")
        return ("stopped" if has_saved else "failed"), said

    def _exit_code(self, status: SubmittedStatus) -> int:
        return int(self._process.returncode)


def submit(
    config: str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    cluster: str | os.PathLike[str] | None = None,
    local: bool = False,
    ranks: int = 1,
) -> SubmittedRun:
    """Hand a pre-training or multi-task run to SLURM, as `postnorm submit` does, and return at
    once.

    A copy of the code and of the config is what the job runs, whatever changes afterwards. The run
    goes on when this process ends; its folder and `postnorm status` know it then.

    Example:
        >>> run = postnorm.submit("train.yaml", cluster="h200.yaml")  # doctest: +SKIP
        >>> run.status().state, run.wait().state, run.result().held_out_loss  # doctest: +SKIP
        ('waiting', 'finished', 3.51)

    Args:
        config: YAML file of the run.
        overrides: values by dotted path, or texts as on the command line, "train.lr=1e-4".
        cluster: YAML file of the cluster profile; None: one GPU.
        local: run it here without SLURM, and start it again from its newest checkpoint if a rank
            dies. Its output is in RUN/logs/local.log.
        ranks: processes of a local run.

    Raises:
        ConfigError: the config, an override or the profile is wrong, or the run could not start.
        BusyError: a job of the run is in the queue.
        SlurmError: SLURM refused, or (NoSlurmError) is not there.
    """
    path, words = os.fspath(config), override_words(overrides)
    profile = None if cluster is None else os.fspath(cluster)
    source = Origin(path, tuple(words), profile, os.getcwd(), "postnorm.submit")
    if local:
        return _run_here(source, ranks)
    if ranks != 1:
        raise ConfigError(f"ranks={ranks} is for local=True; the profile says how many there are")
    draft = _draft(source)
    work_dir = draft.job.work_dir
    logger.info("%s", check(draft.cluster, draft.job.kind, work_dir=work_dir))
    save_s = measured_save_s(draft.run_dir)
    for remark in preemption_remarks(preemption(draft.cluster), save_s, draft.cluster):
        logger.warning("%s", remark)
    logger.info("%s", ask_sbatch(draft.script))
    return _SlurmRun(draft.run_dir, hand_over(draft))


def _draft(source: Origin) -> SubmissionPlan:
    cluster = profile_here(source.cluster)
    if is_mix(source.config):
        return prepare_mix(load_mix(source.config, source.overrides), cluster, source)
    config = load_run(source.config, source.overrides).config
    warn_of_unusual(config)
    return prepare_training(config, cluster, source)


def _run_here(source: Origin, ranks: int) -> SubmittedRun:
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: expected at least 1")
    if is_mix(source.config):
        run_dir = load_mix(source.config, source.overrides).config.run_dir
    else:
        config = load_run(source.config, source.overrides).config
        config.batches.require_split(ranks)
        require_data(config, source.work_dir)
        run_dir = config.run_dir
    folder = Path(source.work_dir, run_dir)
    RunFolder(folder).create()
    words: Sequence[str] = [
        *env.module_command("launch"),
        *("submit", source.config, *source.overrides, "--local", "--ranks", str(ranks)),
        *(["--cluster", source.cluster] if source.cluster else []),
    ]
    with (RunFolder(folder).logs / _LOCAL_LOG).open("wb") as log:
        # A session of its own: Ctrl-C here does not end it.
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    return _LocalRun(folder, process)
