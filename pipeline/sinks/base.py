"""Where a run's numbers go: metrics.jsonl always, and the sinks that `monitor.sinks` names.

A sink is a class that is made from a `SinkContext` and has the methods of `Sink`. Packages add
theirs by an entry point of the group `postnorm.sinks`. A run goes on if its numbers cannot be
written.
"""

import json
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.config.load import resolved_text
from pipeline.config.runs import RunConfig
from pipeline.config.schema import walk
from pipeline.errors import ConfigError
from pipeline.runtime.files import AppendedFile, write_atomic
from pipeline.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

GROUP = "postnorm.sinks"
# A table, not entry points: jobs run a copy of the code that is not installed.
_BUILT_IN = {
    "tensorboard": "pipeline.sinks.tensorboard:TensorBoard",
    "wandb": "pipeline.sinks.wandb:WeightsAndBiases",
    "mlflow": "pipeline.sinks.mlflow:MLflow",
}
_TELL_EVERY_S = 600.0
_MOST_WAITING = 10_000
"""Records that wait for a slow sink; later ones are lost to it."""
# How long the end of a run waits for a slow sink; torchrun kills a rank 30 s after a SIGTERM.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class SinkContext:
    """What a sink is made from: one attempt of a run, on rank 0."""

    run_dir: Path
    attempt: int
    """1 for the first."""
    resumed_step: int | None
    """Step of the checkpoint that the attempt goes on from, if any."""
    config: RunConfig

    @property
    def name(self) -> str:
        """The run's name for people: its folder with the one above, as `runs/mine`."""
        return "/".join(self.run_dir.absolute().parts[-2:])

    @property
    def settings(self) -> dict[str, bool | str | float]:
        """Every value of the config by its path."""
        return {
            path: value if isinstance(value, (bool, str, int, float)) else str(value)
            for path, _, value in walk(self.config)
        }

    def kept_id(self, service: str, make: Callable[[], str]) -> str:
        """Return the id under which a service knows this run; kept in the run's folder."""
        path = RunFolder(self.run_dir).sink_id(service)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, f"{make()}\n".encode())
        return path.read_text(encoding="utf-8").strip()


Start = SinkContext
"""Earlier name of `SinkContext`, which sinks of users may import."""


class Sink(Protocol):
    """Shows a run's numbers somewhere. All calls come from one thread; errors lose the record."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show numbers of a step by their tags, such as `quality/loss`; NaN and infinity too."""

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Show a text."""

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Show an image of (height, width, 3)."""

    def close(self) -> None:
        """Finish what was begun; the run may go on in a later attempt."""


Opener = Callable[[SinkContext], Sink]


def find_sinks(names: Sequence[str]) -> dict[str, Opener]:
    """Look up sinks by name.

    Raises:
        ConfigError: there is no such sink, or what it needs is not installed.
    """
    known = {name: EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    known |= {entry.name: entry for entry in entry_points(group=GROUP)}
    openers = {}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"monitor.sinks: {name!r} is not known, expected some of {', '.join(known)}"
                f"{f'; did you mean {near[0]!r}?' if near else ''}. A package adds its own as an "
                f"entry point of the group {GROUP}"
            )
        try:
            openers[name] = known[name].load()
        except ImportError as error:
            remedy = f"run `pip install 'postnorm[{name}]'`" if name in _BUILT_IN else "install it"
            raise ConfigError(
                f"monitor.sinks: {name} needs a package that is not installed ({error}); {remedy}, "
                f"or take {name} out of monitor.sinks"
            ) from None
    return openers


class Sinks:
    """The writers of one attempt of a run. For rank 0."""

    def __init__(self, start: SinkContext, openers: dict[str, Opener]) -> None:
        """Prepare the files; the first record creates them.

        Steps that an earlier attempt logged and this one computes again are twice in metrics.jsonl,
        with different "attempt".
        """
        self._attempt = start.attempt
        self._lines = LossyFile(RunFolder(start.run_dir).metrics)
        self._workers = [_Worker(name, opener, start) for name, opener in openers.items()]
        self.write_text(0, "config", as_code(resolved_text(start.config)))

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Record named numbers of a step.

        The kind is `train`, `eval`, `probe`, `skip`, `save`, `straggler`, `plateau`,
        `divergence` or `stage`. NaN, which JSON lacks, is written as null.
        """
        shown = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "kind": kind, "attempt": self._attempt, "unix_s": time.time()}
        self._lines.append((json.dumps(record | shown) + "\n").encode(), b"\n")
        tagged = {tag_of(kind, name): value for name, value in values.items()}
        self._give(lambda sink: sink.write(step, tagged))

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Show a text."""
        self._give(lambda sink: sink.write_text(step, name, markdown))

    def write_image(self, step: int, name: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Show an image of (height, width, 3)."""
        self._give(lambda sink: sink.write_image(step, name, pixels))

    def _give(self, call: Callable[[Sink], None]) -> None:
        for worker in self._workers:
            worker.give(call)

    def close(self) -> None:
        """Warn about lost records and close the files."""
        self._lines.tell()
        for worker in self._workers:
            worker.close()


_HEALTH = {"grad_norm", "skipped_steps", "left_out_batches", "rewinds", "restarts", "lr", "alpha"}
_TO_BEAT = ("unigram_entropy", "uniform_guess")
_DATA = re.compile(r"tokens|fill|batch|seq_len|epoch(_.*)?|share_done|num_.*|.*_documents")
_SPEED = re.compile(r".*_(s|gb|per_s|wait|device)|(step|own)_s_.*|slowest_rank|mfu")
_LAYERS = re.compile(r"(grad_norm|update_ratio|attention_entropy)_.+")


def tag_of(kind: str, name: str) -> str:
    """Return the section and name under which sinks show a number of metrics.jsonl.

    Sections are quality/, speed/, health/, data/, layers/ and probes/. Means that an objective
    names itself are quality.
    """
    if kind in ("skip", "straggler", "plateau", "divergence", "stage"):
        return f"health/{kind}_{name}"
    if kind == "save":
        return f"speed/{name}"
    if kind == "probe":
        return f"speed/{name}" if name == "probe_s" else f"probes/{name.removeprefix('accuracy_')}"
    if _LAYERS.fullmatch(name):
        return f"layers/{name}"
    if kind == "eval":
        section = "data" if name.startswith("num_") else "quality"  # sources have any name
        return f"{section}/{name if name in _TO_BEAT else f'held_out_{name}'}"
    if name in _HEALTH:
        return f"health/{name}"
    if _DATA.fullmatch(name):
        return f"data/{name}"
    return f"{'speed' if _SPEED.fullmatch(name) else 'quality'}/{name}"


class _Worker:
    """Calls one sink from a thread of its own, and counts what it loses."""

    def __init__(self, name: str, opener: Opener, start: SinkContext) -> None:
        self._name = name
        self._calls: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_MOST_WAITING)
        self._given = self._lost = 0
        # A thread each, so that a slow service costs records but no steps: W&B and MLflow may block
        # for minutes.
        self._thread = threading.Thread(
            target=self._run, args=(opener, start), name=f"sink {name}", daemon=True
        )
        self._thread.start()

    def give(self, call: Callable[[Sink], None]) -> None:
        self._given += 1
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lose(f"it is too slow, {_MOST_WAITING:,} records wait for it")

    def close(self) -> None:
        """Let the sink finish, and warn about what was lost."""
        deadline = time.monotonic() + _PATIENCE_S
        try:
            self._calls.put(None, timeout=_PATIENCE_S)
        except queue.Full:
            deadline = time.monotonic()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._lose("it does not answer", self._calls.qsize())
        if self._lost:
            logger.warning(
                "sink %s lost %d of %d records; metrics.jsonl has all numbers",
                self._name,
                min(self._lost, self._given),  # the request to end waits with them
                self._given,
            )

    def _run(self, opener: Opener, start: SinkContext) -> None:
        sink: Sink | None = None
        try:
            sink = opener(start)
        except Exception as error:  # noqa: BLE001 - whatever a service raises, training goes on
            self._lose(f"it cannot be opened: {type(error).__name__}: {error}", 0)
        while (call := self._calls.get()) is not None:
            if sink is None:
                self._lost += 1
            else:
                self._try(lambda: call(sink))
        if sink is not None:
            self._try(sink.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - likewise
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, reason: str, count: int = 1) -> None:
        if not self._lost:
            logger.warning("sink %s fails: %s; training goes on without it", self._name, reason)
        self._lost += count


class LossyFile:
    """A file of records, which loses records while it cannot be written.

    The log says how many were lost, and every later write tries again.
    """

    def __init__(self, path: Path, beginning: bytes = b"") -> None:
        """Name the file, and what it begins with; the first record creates it."""
        self._path, self._beginning = path, beginning
        self._file = AppendedFile(path)
        self._lost = self._told_of = 0
        self._told_s = float("-inf")
        self._error: OSError | None = None

    def append(self, record: bytes, end: bytes = b"") -> None:
        """Write a record, or lose it."""
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
                "Writing to %s works again; %d records were lost meanwhile", self._path, self._lost
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


def as_code(text: str) -> str:
    """Indent a text, so that Markdown shows it as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())
