"""What GPUs can do at most, by their names, from NVIDIA's data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceLimits:
    """Of one GPU."""

    bf16_flops: float
    """Dense FLOP/s; the sheets print twice as much, with sparsity."""
    memory_gib: float | None
    """None: the name does not tell."""
    bandwidth: float | None
    """Of its memory, bytes/s; likewise."""


KNOWN = {
    "A100 80GB": DeviceLimits(312e12, 80, 2.04e12),
    "A100 40GB": DeviceLimits(312e12, 40, 1.56e12),
    "A100": DeviceLimits(312e12, None, None),
    "H100 PCIe": DeviceLimits(756e12, 80, 2.0e12),
    "H100 NVL": DeviceLimits(835e12, 94, 3.9e12),
    "H100": DeviceLimits(989e12, 80, 3.35e12),
    "H200": DeviceLimits(989e12, 141, 4.8e12),
}
"""The first entry whose words a device's name contains counts."""


def limits(name: str) -> DeviceLimits | None:
    """Those of a device by its name, such as `NVIDIA H100 80GB HBM3`; None: not known.

    `GH200` and the like are other devices, and a MIG slice is a part of one.
    """
    words = name.replace("-", " ").split()
    if "MIG" in words:
        return None
    for known, found in KNOWN.items():
        if set(known.split()) <= set(words):
            return found
    return None
