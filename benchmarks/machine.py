"""What a benchmark ran on: versions, the GPU and its clocks; which packages are missing.

python -m benchmarks.machine [FILE.json]
"""

import json
import os
import platform
import subprocess
import sys
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
    """Of Python and of the packages that are there; CUDA's and cuDNN's by torch."""
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
    return {
        "device": name, "memory_gib": round(memory, 1), "versions": versions(),
        "missing": missing(), "clocks": clocks(), "cpus": os.cpu_count(),
    }  # fmt: skip


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
