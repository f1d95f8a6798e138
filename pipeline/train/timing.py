"""Clocks and gauges of one rank: time, its own work, memory, and marks for a profiler."""

import resource
import time

import torch
from torch.profiler import record_function


class Clock:
    """Training time of one rank: all time in the loop, over all attempts.

    Ranks take rank 0's time, which they learn with each log line and not in between, so that a
    schedule that depends on it is the same on all ranks and no step waits for it. Time of an
    attempt after the last log line before its checkpoint is not counted.
    """

    def __init__(self, elapsed_s: float) -> None:
        self._start_s = time.perf_counter() - elapsed_s

    def read_s(self) -> float:
        """Return the seconds of training so far."""
        return time.perf_counter() - self._start_s


class LocalComputeTimer:
    """Time that a rank works on its own, between the moments when it waits for others.

    All ranks end a step together, so a step's time is the slowest rank's everywhere and does not
    tell which rank that is. Only work between two collectives is a rank's own: at ZeRO stage 1 the
    forward and backward passes of a step, at stage 2 the first forward pass, at stage 3 only the
    wait for data, because every layer's pass begins with a collective.

    The host synchronises with the device in `take_s` only.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._sum_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began: torch.cuda.Event | float | None = None

    def begin(self) -> None:
        """Begin a stretch of work, after the work given to the device so far (a collective)."""
        self._began = _event() if self._on_gpu else time.perf_counter()

    def end(self) -> None:
        """End the stretch after the work given to the device since; does nothing without one."""
        if isinstance(self._began, float):
            self._sum_s += time.perf_counter() - self._began
        elif self._began is not None:
            self._events.append((self._began, _event()))
        self._began = None

    def take_s(self) -> float:
        """Return the seconds of all stretches since the last call. Synchronises."""
        for _, last in self._events[-1:]:
            last.synchronize()
        total_s = self._sum_s + sum(a.elapsed_time(b) for a, b in self._events) / 1e3
        self._sum_s, self._events = 0.0, []
        return float(total_s)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def memory_peaks(device: torch.device) -> tuple[float, float, float]:
    """Return bytes of GPU memory allocated and reserved since the last call, and the host's peak.

    The host's peak counts from the start of the process.
    """
    # Linux counts in KiB.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    if device.type != "cuda":
        return 0.0, 0.0, host
    allocated = float(torch.cuda.max_memory_allocated(device))
    reserved = float(torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return allocated, reserved, host


PREFIX = "postnorm:"
BEGIN, END, DATA, FORWARD, HEAD, BODY, UPDATE = (
    "begin",
    "end",
    "data",
    "forward",
    "head",
    "body",
    "update",
)
"""What is done from a mark to the next: BODY is what is no HEAD in a backward pass."""


def mark(phase: str) -> None:
    """Begin another phase of the host; costs microseconds where nothing is profiled."""
    with record_function(PREFIX + phase):
        pass
