"""What a device is, and what it and this process hold."""

import resource

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
