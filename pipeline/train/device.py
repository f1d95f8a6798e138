"""What a device can do at most, and what it and this process hold."""

import resource

import torch

_PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
}
"""Dense bf16 FLOP/s, from NVIDIA's data sheets (they print twice as much, with sparsity); the first
entry that the device's name contains counts."""


def peak_flops(name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its name, such as `NVIDIA H100 80GB HBM3`; None: not known.

    `GH200` and the like are other devices, and a MIG slice is a part of one.
    """
    words = name.replace("-", " ")
    if " MIG " in words:
        return None
    for known, flops in _PEAK_BF16_FLOPS.items():
        if f" {known} " in f" {words} ":
            return flops
    return None


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
