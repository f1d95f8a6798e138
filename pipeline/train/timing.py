"""What a device is, and what it and this process hold.

How long a rank works by itself, between the moments when it waits for others.

A step ends on all ranks together, so its time is the slowest rank's everywhere and says nothing of
who that is. What a rank does between two collectives is its own: at ZeRO stage 1 the forward and
backward passes of a step, at stage 2 the first forward pass, at stage 3 nothing but the wait for
data, since every layer's pass begins with a collective.
"""

import resource
import time

import torch


def device_name(device: torch.device) -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def memory_peaks(device: torch.device) -> tuple[float, float, float]:
    """Bytes: GPU allocated and reserved since the last call, and host memory since the start."""
    # Linux counts in KiB.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    if device.type != "cuda":
        return 0.0, 0.0, host
    allocated = float(torch.cuda.max_memory_allocated(device))
    reserved = float(torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return allocated, reserved, host


class OwnTime:
    """Adds up stretches of work on the device; no host synchronisation before `take_s`."""

    def __init__(self, device: torch.device) -> None:
        """Nothing was measured yet."""
        self._on_gpu = device.type == "cuda"
        self._sum_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began: torch.cuda.Event | float | None = None

    def begin(self) -> None:
        """A stretch begins behind what was given to the device so far, a collective."""
        self._began = _event() if self._on_gpu else time.perf_counter()

    def end(self) -> None:
        """It ends, with what the device was given since; nothing happens if none has begun."""
        if isinstance(self._began, float):
            self._sum_s += time.perf_counter() - self._began
        elif self._began is not None:
            self._events.append((self._began, _event()))
        self._began = None

    def take_s(self) -> float:
        """Seconds of all stretches since the last call. Synchronises."""
        for _, last in self._events[-1:]:
            last.synchronize()
        found = self._sum_s + sum(a.elapsed_time(b) for a, b in self._events) / 1e3
        self._sum_s, self._events = 0.0, []
        return float(found)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
