"""One layer's attention, forward and backward: fused carried scores beside what else there is.

    python -m benchmarks.attention [--data DATASET] [--out attention.json] [--budget-s 120]

`benchmarks/attention_subjects.py` has the subjects. First every subject is compared with float64 at
a small shape, output, scores and all gradients; one that fails, or errs more than `LIMIT`, is
reported with its error and not timed. Then, shape by shape, all take turns, `--rounds` times: A B C
A B C. A turn is as many passes as take some milliseconds, between two CUDA events; the figure is
the median of the turns, the spread the range between their quartiles over it; "host-bound" marks
what waited for Python. The layer is one in the middle of a model: carried scores come in with a
gradient and go out with one.

Rows are full, or packed with the documents of DATASET as our loader packs them; without --data
their lengths are drawn from a log-normal distribution (seeded; median 120 tokens, or a quarter of
a row). GB/s count the bytes that
`pipeline/profile/step.py` says must move, TFLOP/s the formula's FLOPs: a subject that moves
or computes more has lower figures. "x flash" is the time over that of the fastest plain
attention of the same shape.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.attention_subjects import (
    SUBJECTS,
    Attention,
    Case,
    NotPossibleError,
    carries,
    num_summed,
)
from benchmarks.machine import write_json
from pipeline.profile.step import attention_work

HEADS = {"base": 12, "large": 16}
LIMIT = 1.5e-2
"""Relative Frobenius error at which bf16 is wrong rather than coarse; the measured floor of plain
PyTorch in bf16 is 5e-3."""
_TURN_MS = 20.0
_D_SCORES = 2.0**-7
"""Gradient of the scores that go out, exact in all formats."""


def packed_documents(
    num_rows: int, length: int, data: Path | None, device: torch.device
) -> Tensor:  # fmt: skip
    """(B, S) numbers of documents in packed rows; each slot of padding sees itself alone."""
    if data is not None:
        from benchmarks.step_subjects import Setting, parse, read_batches, run_config

        setting = Setting(str(data.resolve()), 1 << 16, 1)
        subject = parse("ours/roformer_v2-base/auto/plain/zero0")
        config = run_config(subject, setting, length, num_rows * length)
        return read_batches(config, setting)[0].documents.long().to(device)
    generator, mean = torch.Generator().manual_seed(0), math.log(min(120, length / 4))
    rows = []
    for _ in range(num_rows):
        lengths = torch.empty(length).log_normal_(mean, 1.0, generator=generator).int() + 2
        numbers = torch.repeat_interleave(torch.arange(length), lengths.clamp(max=length))
        rows.append(numbers[:length])
    return torch.stack(rows).to(device)


def full_documents(num_rows: int, length: int, device: torch.device) -> Tensor:
    """Rows of one document each."""
    return torch.arange(num_rows, device=device)[:, None].expand(-1, length).contiguous()


class Inputs:
    """Inputs of one pass, the same for every run of a case."""

    def __init__(self, case: Case) -> None:
        """Draws them."""
        self._case = case
        generator = self._generator(1)
        drawn = [
            torch.randn(
                case.shape, dtype=torch.bfloat16, device=case.documents.device, generator=generator
            )
            for _ in range(4)
        ]
        self.qkv = [each.requires_grad_() for each in drawn[:3]]
        self.d_out = drawn[3]

    def scores(self) -> Tensor:
        """(B, N, S, S) fp32 that fp16 and bf16 can hold."""
        (num_rows, length), case = self._case.documents.shape, self._case
        shape = num_rows, case.num_heads, length, length
        return torch.randn(
            shape, dtype=torch.bfloat16, device=case.documents.device, generator=self._generator(2)
        ).float()

    def d_scores(self) -> Tensor:
        """(B, N, S, S) fp32: constant, 0 where no one sees it."""
        (num_rows, length), case = self._case.documents.shape, self._case
        allowed = case.layout().allowed.expand(num_rows, case.num_heads, length, length)
        return allowed * _D_SCORES

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self._case.documents.device).manual_seed(seed)


class Pass:
    """A subject with its inputs, ready to run forward and backward."""

    def __init__(self, made: Attention, inputs: Inputs) -> None:
        """Makes carry and its gradient in the subject's own format."""
        self.made, self.inputs = made, inputs
        self._leaves = list(inputs.qkv)
        if made.is_packed:
            self._leaves = [torch.stack(inputs.qkv, 1).detach().requires_grad_()]
        self._grads = [inputs.d_out]
        if made.carry is not None:
            self._leaves.append(made.carry.make(inputs.scores()).requires_grad_())
            like = self._leaves[-1]
            # What no one sees is not looked at in the kernels' own format.
            ours = like.ndim == 3
            self._grads.append(
                torch.full_like(like, _D_SCORES) if ours else inputs.d_scores().to(like.dtype)
            )

    def __call__(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, ...]]:
        """Results, and gradients of q, k, v and the carry."""
        out, scores = self.made.run(*self._leaves)
        outputs = [out] if scores is None else [out, scores]
        grads = torch.autograd.grad(outputs, self._leaves, self._grads)
        if self.made.is_packed:
            grads = (*grads[0].unbind(1), *grads[1:])
        return (out, scores), grads


def expected(case: Case, name: str, dropout_BNSS: Tensor | None = None) -> dict[str, Tensor]:
    """Compute in float64 out, scores and the gradients of q, k, v and carry; 0 where nothing sees.

    Args:
        case: the micro-batch.
        name: of the subject.
        dropout_BNSS: factors of the probabilities, 0 or 1 / (1 - p); None: all 1.
    """
    inputs, num_rows = Inputs(case), case.documents.shape[0]
    allowed = case.layout().allowed
    leaves = [each.detach().double().requires_grad_() for each in inputs.qkv]
    q, k, v = (each.unflatten(0, (num_rows, -1)).transpose(1, 2) for each in leaves)
    scores = case.scale * q @ k.transpose(-1, -2)
    if carries(name):
        leaves.append(inputs.scores().double().requires_grad_())
        scores = scores + leaves[-1]
    shares = (scores / num_summed(name)).masked_fill(~allowed, float("-inf")).softmax(-1)
    if dropout_BNSS is not None:
        shares = shares * dropout_BNSS.double()
    out = (shares @ v).transpose(1, 2).flatten(0, 1)
    loss = (out * inputs.d_out.double()).sum()
    if carries(name):
        loss = loss + (scores * inputs.d_scores().double()).sum()
    grads = torch.autograd.grad(loss, leaves)
    found = dict(zip(("dq", "dk", "dv", "dcarry"), grads, strict=False)) | {"out": out.detach()}
    if carries(name):
        found["scores"] = scores.detach() * allowed
    return found


def errors(
    case: Case, name: str, made: Attention, dropout_BNSS: Tensor | None = None
) -> dict[str, float]:
    """Relative Frobenius errors against float64; arguments as of `expected`."""
    wanted = expected(case, name, dropout_BNSS)
    (out, scores), grads = Pass(made, Inputs(case))()
    hidden = ~case.layout().allowed
    found = {"out": out} | dict(zip(("dq", "dk", "dv"), grads, strict=False))
    if made.carry is not None and scores is not None:
        read = {"scores": made.carry.values(scores), "dcarry": made.carry.gradient_values(grads[3])}
        found |= {key: value.masked_fill(hidden, 0.0) for key, value in read.items()}
    return {
        key: float((value.detach().double() - wanted[key]).norm() / wanted[key].norm())
        for key, value in found.items()
    }


def _attempt(work: Callable[[], Any]) -> Any:
    """What it returns, or its error as text."""
    try:
        return work()
    except NotPossibleError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a subject that fails is a result
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def check(subjects: list[str], device: torch.device, size: tuple[int, int]) -> dict[str, Any]:
    """Errors of each subject at small shapes, full and packed; text where it failed."""
    heads, length = size
    shapes = {
        "full": full_documents(2, length, device),
        "packed": packed_documents(2, length, None, device),
    }
    found: dict[str, Any] = {}
    for name in subjects:
        of: dict[str, Any] = {}
        for shape, documents in shapes.items():
            case = Case(shape, heads, 64 if device.type == "cuda" else 32, documents)
            found_here = _attempt(lambda c=case, n=name: errors(c, n, SUBJECTS[n](c)))
            if isinstance(found_here, dict):
                worst = max(found_here.values())
                if not worst <= LIMIT:  # nor NaN
                    of[f"{shape}: wrong"] = f"error {worst:.2e}, expected {LIMIT} at most"
            of[shape] = found_here
        found[name] = of
    return found


def is_right(checked: dict[str, Any], shape: str) -> str | None:
    """Why a subject is not timed at full or packed rows; None if it is."""
    if f"{shape}: wrong" in checked:
        return f"wrong: {checked[f'{shape}: wrong']}"
    return None if isinstance(checked[shape], dict) else str(checked[shape])


def time_case(case: Case, subjects: list[str], rounds: int, left_s: float) -> dict[str, Any]:
    """Times of all subjects that can run, in turns."""
    deadline = time.monotonic() + left_s
    inputs, found, passes = Inputs(case), {}, {}
    longest = case.ends()[1]
    # What was compiled for other shapes counts against a limit of torch's.
    torch._dynamo.reset()
    for name in subjects:
        if time.monotonic() > deadline:
            found[name] = {"not measured": "no time was left in the budget to warm it up"}
            continue
        made = _attempt(lambda n=name: _warm(Pass(SUBJECTS[n](case), inputs)))
        if isinstance(made, str):
            found[name] = {"not measured": made}
        else:
            passes[name] = made
    turns: dict[str, list[float]] = {name: [] for name in passes}
    hosts: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        for name, (run, count) in passes.items():
            device_ms, host_ms = _turn_ms(run, count, case.documents.device)
            turns[name].append(device_ms / count)
            hosts[name].append(host_ms / count)
    for name, times in turns.items():
        work = attention_work(
            case.shape[0], case.pairs(), case.num_heads, case.head_size,
            carries=carries(name), longest=longest,
        )  # fmt: skip
        ms = statistics.median(times)
        quartiles = [ms] * 3
        if len(times) > 1:
            quartiles = statistics.quantiles(times, n=4, method="inclusive")
        host_ms = statistics.median(hosts[name])
        found[name] = {
            "ms": ms, "spread": (quartiles[2] - quartiles[0]) / ms, "turns": len(times),
            "passes": passes[name][1], "host_ms": host_ms,
            # Kernels then wait for Python, and the time is not theirs.
            "host_bound": case.documents.device.type == "cuda" and host_ms > 0.95 * ms,
            "gb_per_s": work.num_bytes / ms / 1e6,
            "tflop_per_s": work.flops / ms / 1e9,
        }  # fmt: skip
    plain = [one["ms"] for name, one in found.items() if not carries(name) and "ms" in one]
    for one in found.values():
        if plain and "ms" in one:
            one["x_flash"] = one["ms"] / min(plain)
    return found


def _warm(run: Pass) -> tuple[Pass, int]:
    """Runs a few times; how many passes make a turn. Gradients that are not finite are an error."""
    device = run.inputs.d_out.device
    for _ in range(2):
        (out, _), grads = run()
    for name, each in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=False):
        if not bool(each.isfinite().all()):
            raise ValueError(f"{name} is not finite at this shape")
    ms, _ = _turn_ms(run, 1, device)
    return run, max(1, min(50, round(_TURN_MS / ms)))


def _turn_ms(run: Pass, count: int, device: torch.device) -> tuple[float, float]:
    """Time of some passes on the device, and the host's to launch them."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            run()
        return ((time.perf_counter() - began) * 1e3,) * 2
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # the turn before was another's
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    for _ in range(count):
        run()
    stop.record()
    host_ms = (time.perf_counter() - began) * 1e3
    stop.synchronize()
    return float(start.elapsed_time(stop)), host_ms


def main() -> None:
    """Checks, measures and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="prepared dataset, for real documents")
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS),
                        help="default: all but math")  # fmt: skip
    parser.add_argument("--models", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--seq-len", type=int, nargs="+", default=[512, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--flash", help="other kernels in the place of torch's flash attention, "
                        "such as FA3 of the package flash_attn_interface")  # fmt: skip
    parser.add_argument(
        "--tiny", action="store_true", help="one head of 32 and three subjects, for tests"
    )
    arguments = parser.parse_args()
    if arguments.subjects is None:
        few = ["carried mean", "eager mean", "plain, math"]
        arguments.subjects = few if arguments.tiny else [n for n in SUBJECTS if n != "plain, math"]
    if arguments.flash:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(arguments.flash)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline = time.monotonic() + arguments.budget_s
    found: dict[str, Any] = {
        "flash": arguments.flash or "torch's",
        "benchmark": "attention", "machine": machine.describe(), "cases": {},
        "checks": check(arguments.subjects, device, (1, 32) if arguments.tiny else (4, 256)),
    }  # fmt: skip
    shapes = [
        (model, tokens, length, rows)
        for tokens in arguments.tokens
        for rows in ("packed", "full")
        for model in arguments.models
        for length in arguments.seq_len
    ]
    for number, (model, tokens, length, shape) in enumerate(shapes):
        name = f"{model} s{length} {tokens} {shape}"
        left_s = deadline - time.monotonic()
        if left_s < 1:
            found["cases"][name] = {"not measured": "no time was left in the budget"}
            continue
        num_rows = max(1, tokens // length)
        documents = (
            full_documents(num_rows, length, device) if shape == "full"
            else packed_documents(num_rows, length, arguments.data, device)
        )  # fmt: skip
        heads, size = (1, 32) if arguments.tiny else (HEADS[model], 64)
        case = Case(name, heads, size, documents)
        reasons = {n: is_right(found["checks"][n], shape) for n in arguments.subjects}
        right = [n for n, reason in reasons.items() if reason is None]
        if device.type == "cuda":
            torch.cuda.empty_cache()
        timed = time_case(case, right, arguments.rounds, left_s / (len(shapes) - number))
        wrong = {n: {"not measured": reason} for n, reason in reasons.items() if reason}
        found["cases"][name] = {
            "tokens": case.shape[0], "heads": heads, "head_size": size, "pairs": case.pairs(),
            "longest": case.ends()[1], "subjects": timed | wrong,
        }  # fmt: skip
        write_json(arguments.out, found)
    write_json(arguments.out, found)
    sys.stdout.write(json.dumps(found) + "\n")
    if not any("ms" in one for case in found["cases"].values()
               for one in case.get("subjects", {}).values()):  # fmt: skip
        sys.exit(f"no attention could be timed; {arguments.out} says why")


if __name__ == "__main__":
    main()
