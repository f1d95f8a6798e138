"""Time and memory of the MLM loss against the loss of all logits, both ways; one JSON line.

    python -m benchmarks.vocabulary_loss
    python -m benchmarks.vocabulary_loss --rows 9830 --width 768 --vocabulary 50000 --dtype bfloat16

The second line is a micro-batch of 65,536 tokens, and the default where there is a GPU. "plain" is
F.cross_entropy(F.linear(x, W).float()) and the accuracy, as PyTorch has them, "compiled" the same
under torch.compile (GPU only), "reference" and "fused" (GPU only) our `vocabulary_loss`. Each runs
in a process of its own. "ms": best of the repeats, CPU time of one thread or, on a GPU, time
between events. "peak_mib": what was held at most beyond x and W, by the process or, on a GPU, by
torch's allocator. Ratios are over plain.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import cpu_seconds, peak_mib
from pipeline.kernels import loss as ours

ON_CPU, ON_GPU = ("plain", "reference"), ("plain", "compiled", "reference", "fused")


@dataclass(frozen=True)
class Spec:
    """What all subjects compute."""

    rows: int
    width: int
    vocabulary: int
    dtype: str
    budget_mib: float
    """Memory for the logits of one chunk of ours."""
    repeats: int
    device: str


def _plain(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight).float()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return loss, (logits.argmax(-1) == targets).sum()


def _subject(name: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    if name == "plain":
        return _plain
    if name == "compiled":
        return torch.compile(_plain)
    return lambda x, weight, targets: ours.vocabulary_loss(
        x, weight, None, targets, fused=name == "fused"
    )


def measure(name: str, spec: Spec) -> dict[str, float]:
    """Milliseconds, MiB and, for comparison, the loss; in this process."""
    ours.LOGITS_BYTES = int(spec.budget_mib * 2**20)
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)  # those that wait for others use CPU time
    weight = torch.randn(spec.vocabulary, spec.width, device=device).mul_(spec.width**-0.5)
    x = torch.randn(spec.rows, spec.width, dtype=dtype, device=device).requires_grad_()
    weight = weight.to(dtype).requires_grad_()
    targets = torch.randint(spec.vocabulary, (spec.rows,), device=device)
    function, losses = _subject(name), []

    def step() -> None:
        x.grad = weight.grad = None
        loss, _ = function(x, weight, targets)
        # A mean, as in training: its gradient has another scale.
        (loss * (1 / spec.rows)).backward()
        losses.append(loss.detach())

    if device.type == "cuda":
        step()  # compiles
        torch.cuda.synchronize()
        x.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = min(_gpu_seconds(step) for _ in range(spec.repeats))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        before_mib = peak_mib()
        step()
        peak = peak_mib() - before_mib
        seconds = cpu_seconds(step, spec.repeats)
    return {"ms": 1e3 * seconds, "peak_mib": peak, "loss": losses[-1].item() / spec.rows}


def _gpu_seconds(step: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _in_its_own_process(name: str, spec: Spec) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.vocabulary_loss", "--subject", name]
    for field, value in asdict(spec).items():
        command += [f"--{field.replace('_', '-')}", str(value)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(spec: Spec, run: Callable[[str, Spec], dict[str, float]]) -> dict[str, Any]:
    """All subjects, and their ratios over plain.

    Args:
        spec: the case.
        run: measures one.
    """
    names = ON_GPU if spec.device == "cuda" else ON_CPU
    found = {name: run(name, spec) for name in names}
    for one in found.values():
        for key in ("ms", "peak_mib"):
            one[f"{key}_ratio"] = one[key] / max(found["plain"][key], 1e-9)
    return {
        name: {key: round(value, 3) for key, value in one.items()} for name, one in found.items()
    }


def _parsed() -> tuple[str | None, Spec]:
    has_gpu = torch.cuda.is_available()
    size = (9830, 768, 50_000) if has_gpu else (1024, 256, 8000)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=size[0], help="masked tokens")
    parser.add_argument("--width", type=int, default=size[1], help="of the embedding")
    parser.add_argument("--vocabulary", type=int, default=size[2])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"],
                        default="bfloat16" if has_gpu else "float32")  # fmt: skip
    parser.add_argument("--budget-mib", type=float, default=256.0 if has_gpu else 8.0,
                        help="logits of our chunks; training has 256")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20 if has_gpu else 5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu else "cpu")
    parser.add_argument("--subject", choices=ON_GPU, help="measures one in this process")
    arguments = vars(parser.parse_args())
    return arguments.pop("subject"), Spec(**arguments)


def main() -> None:
    """Prints the line."""
    subject, spec = _parsed()
    if subject is not None:
        sys.stdout.write(json.dumps(measure(subject, spec)) + "\n")
        return
    found = {
        "benchmark": "vocabulary_loss", **asdict(spec), **compare(spec, _in_its_own_process),
        "gpu": torch.cuda.get_device_name() if spec.device == "cuda" else None,
        "triton": version("triton") if find_spec("triton") else None,
        "torch": version("torch"), "python": platform.python_version(),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
