"""What a benchmark ran on: versions, the GPU, its clocks and its measured peaks; missing packages.

python -m benchmarks.machine [FILE.json]
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "deepspeed", "numpy", "numba", "tensorboard")
_NEEDED = {
    "deepspeed": "ZeRO stage 1 (zero0 takes its place in the steps)",
    "transformers": "Hugging Face's subjects",
    "triton": "our kernels and torch.compile",
    "numba": "the loader: everything but attention",
    "yaml": "everything but attention",
    "sentencepiece": "the loader: everything but attention",
    "tensorboard": "the training run",
}
"""What is not measured without them."""
_QUERIES = ("clocks.sm,clocks.mem,temperature.gpu,power.draw", "clocks_event_reasons.active")
"""nvidia-smi refuses a whole query for one field that it does not know."""


def versions() -> dict[str, str]:
    """Versions of Python and of installed packages; torch tells those of CUDA and cuDNN."""
    import torch

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def missing() -> dict[str, str]:
    """Packages that are not there, and what is not measured for that."""
    return {name: what for name, what in _NEEDED.items() if find_spec(name) is None}


def describe() -> dict[str, Any]:
    """Device, versions, clocks, CPU."""
    import torch

    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu else 0.0
    found_peaks = peaks() if on_gpu else {}
    torch.cuda.empty_cache()  # of what `peaks` took
    return {
        "device": name, "memory_gib": round(memory, 1), "versions": versions(),
        "missing": missing(), "clocks": clocks(), "cpus": os.cpu_count(),
        "peaks": found_peaks,
    }  # fmt: skip


def peaks() -> dict[str, float]:
    """What the GPU reaches at best: FLOP/s of a large bf16 product, bytes/s of a copy.

    Random data, since zeros draw less power and let the clock rise.
    """
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copied = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(copied)
    return {
        "bf16_flop_per_s": 2 * 8192**3 / _median_s(lambda: a @ b),
        "copied_bytes_per_s": 2 * 2**30 / _median_s(lambda: target.copy_(copied)),
    }


def _median_s(work: Callable[[], Any], times: int = 20) -> float:
    """Median seconds of one call on the GPU, after three to warm up."""
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for _ in range(3):
        work()
    for start, stop in pairs:
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in pairs) / 1e3


def clocks() -> dict[str, str]:
    """What nvidia-smi says of the first GPU now; empty where there is none."""
    found: dict[str, str] = {}
    for query in _QUERIES:
        command = ["nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return found
        values = done.stdout.strip().split(", ")
        if done.returncode == 0 and len(values) == query.count(",") + 1:
            found |= zip(query.split(","), values, strict=True)
    return found


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is complete or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """Prints it, and what is missing in words."""
    found = describe()
    if len(sys.argv) > 1:
        write_json(Path(sys.argv[1]), found)
    sys.stdout.write(json.dumps(found) + "\n")
    for name, what in found["missing"].items():
        sys.stdout.write(f"missing: {name}; without it there is no {what}\n")


if __name__ == "__main__":
    main()
