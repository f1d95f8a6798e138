"""Measures where the time of a run's training steps goes on this machine, and its roofline."""

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import schedule
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import read_index
from pipeline.data.loader import MicroBatch
from pipeline.data.run_order import Share
from pipeline.model.cost import flops_per_token, limits
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.profile.timeline import ATTENTION, CATEGORIES, GEMM, Timeline, read_timeline
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.train.build import make_model, with_vocabulary
from pipeline.train.data import open_data
from pipeline.train.engine import Engine, close_process_group, init_process_group
from pipeline.train.timing import BEGIN, BODY, DATA, END, FORWARD, HEAD, device_name, mark

_SHOWN = 12
_BF16 = 2
_WINDOW = 128


@dataclass(frozen=True)
class Profile:
    """Times of a step: means over the profiled steps and over the ranks."""

    device: str
    num_ranks: int
    steps: int
    step_ms: float
    untraced_step_ms: float
    """The same for as many steps before, without the profiler: the real time of a step."""
    tokens_per_s: float
    """Tokens, without padding, of all ranks in the steps without the profiler."""
    categories_ms: dict[str, float]
    """They add up to `step_ms`."""
    roofline: dict[str, float]
    """GEMM and attention: the least time that the device could take, over the time taken."""
    kernels: list[tuple[str, str, float]]
    """The longest kernels of rank 0: category, name, ms."""


def profile_run(
    config: PretrainConfig,
    process: ProcessInfo,
    *,
    steps: int,
    warm_up: int,
    trace_file: Path | None = None,
) -> Profile:
    """Profile a few steps from random weights with the run's loader, and keep nothing.

    Nothing is read from or written to `run_dir`. Collective.

    `init_from` is not read. Rank 0's trace is for ui.perfetto.dev; `.gz` compresses it.
    """
    config.batches.require_split(process.world_size)
    index = read_index(config.data.dir)
    config = with_vocabulary(config, index)
    device = init_process_group(process, config.train.collective_timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        # Counts of sequences are stored there if the dataset's folder is not writable.
        config = replace(config, run_dir=folder)
        objective = MaskedLanguageModeling()
        model = make_model(config, objective, device)
        share = Share(process.rank, process.world_size)
        loader, _ = open_data(config, index, objective, share)
        engine = Engine(model, config.train, process, device)
        model.encoder.set_alpha(
            schedule.alpha(config.train.num_steps, config.train.alpha_warmup_steps)
        )
        seen: list[list[MicroBatch]] = []
        batches = loader.steps_from(0)

        def step() -> None:
            mark(DATA)
            seen.append(next(batches))
            mark(FORWARD)
            engine.train_step(seen[-1], objective, config.train.lr)

        with head_marked(model.encoder):
            for _ in range(warm_up):
                step()
            seen.clear()
            untraced = _untraced(step, steps, seen)
            seen.clear()
            timeline = profiled(step, steps, trace_file if process.is_first else None)
        profile = _profile(config, process, device, timeline, seen, untraced)
        close_process_group()
    return profile


def profiled(step: Callable[[], None], count: int, trace_file: Path | None = None) -> Timeline:
    """Run steps under torch's profiler and divide their time.

    `step` sets its marks, `DATA` or `FORWARD` first.
    """
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        _wait(on_gpu)
        mark(BEGIN)
        for _ in range(count):
            step()
        _wait(on_gpu)
        mark(END)
    with tempfile.TemporaryDirectory() as folder:
        path = trace_file or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        raw = path.read_bytes()
    return read_timeline(json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw))


@contextmanager
def head_marked(encoder: nn.Module) -> Iterator[None]:
    """Mark the head and the loss: from the encoder's output to its gradient.

    The encoder returns a tensor, or an object whose first element is one.
    """

    def after(_: nn.Module, __: Any, output: Any) -> None:
        hidden: Tensor = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: mark(BODY))  # type: ignore[no-untyped-call]
        mark(HEAD)

    handle = encoder.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of a part of a step."""

    flops: float
    num_bytes: float

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.num_bytes * times)

    def least_s(self, device: str) -> float | None:
        """Return the seconds at the limits of a device, by its name; None if they are unknown."""
        known = limits(device)
        if known is None or known.bandwidth is None:
            return None
        return max(self.flops / known.bf16_flops, self.num_bytes / known.bandwidth)


def attention_work(
    tokens: int, pairs: float, num_heads: int, head_size: int, *, carries: bool, longest: int
) -> Work:
    """Return one layer's work forward and backward in bf16, without rotary and projections.

    FLOPs are those of the formula, as in `cost.py`: 4 P N H forward, twice as many backward,
    without what fused kernels compute a second time. Bytes: queries, keys, values and output are
    read or written 4 times forward and 8 times backward. Carried scores (fp16, their gradient bf16)
    are read and written forward; backward reads the scores, and reads and writes the gradient. If a
    row of scores is longer than a tile of 128, the gradient is read once more.

    T tokens; P, `pairs`, is sum(n^2) over documents of n tokens; N heads of size H. `carries` is
    for a middle layer of a model with carried scores.
    """
    of_scores = (10 + 2 * (longest > _WINDOW)) if carries else 0
    return Work(
        flops=12.0 * pairs * num_heads * head_size,
        num_bytes=float(
            12 * tokens * num_heads * head_size * _BF16 + of_scores * pairs * num_heads
        ),
    )


def model_work(config: PretrainConfig, batches: list[MicroBatch]) -> dict[str, Work]:
    """Return the work of the encoder's GEMMs and attention over micro-batches, in bf16.

    GEMMs include padding; the bytes that they move are not counted.
    """
    model = config.model
    slots = sum(batch.input_ids.numel() for batch in batches)
    pairs = sum(2 * int(batch.positions.sum()) + batch.num_tokens for batch in batches)
    longest = max(int(batch.positions.max()) + 1 for batch in batches)
    flops = flops_per_token(model, max(batch.input_ids.shape[-1] for batch in batches))
    layer = attention_work(
        slots,
        pairs,
        model.num_heads,
        model.head_size,
        carries=model.score_residual != "none",
        longest=longest,
    )
    return {GEMM: Work(3 * flops.body * slots, 0.0), ATTENTION: layer * model.num_layers}


def roofline(
    config: PretrainConfig, batches: list[MicroBatch], timeline: Timeline, device: str
) -> dict[str, float]:
    """Divide the least time by the time taken; empty in fp32 or for an unknown device."""
    if config.train.precision != "bf16":
        return {}
    shares = {}
    for name, work in model_work(config, batches).items():
        least_s, taken_ms = work.least_s(device), timeline.by_category[name]
        if least_s is not None and taken_ms:
            shares[name] = 1e3 * least_s / taken_ms
    return shares


def _profile(
    config: PretrainConfig,
    process: ProcessInfo,
    device: torch.device,
    timeline: Timeline,
    seen: list[list[MicroBatch]],
    untraced: tuple[float, float],
) -> Profile:
    steps, name = len(seen), device_name(device)
    batches = [batch for step in seen for batch in step]
    shares = roofline(config, batches, timeline, name)
    mine = [timeline.wall_ms, *untraced, *timeline.by_category.values(), *shares.values()]
    everyone = torch.tensor(dist.gather(mine), dtype=torch.float64)
    wall_ms, untraced_ms, tokens, *rest = everyone.mean(0).tolist()
    longest = sorted(timeline.by_name.items(), key=lambda item: -item[1])[:_SHOWN]
    return Profile(
        device=name,
        num_ranks=process.world_size,
        steps=steps,
        step_ms=wall_ms / steps,
        untraced_step_ms=untraced_ms / steps,
        tokens_per_s=tokens * process.world_size / untraced_ms * 1e3,
        categories_ms={key: value / steps for key, value in zip(CATEGORIES, rest, strict=False)},
        roofline=dict(zip(shares, rest[len(CATEGORIES) :], strict=True)),
        kernels=[(kind, kernel, ms / steps) for (kind, kernel), ms in longest],
    )


def profile_text(profile: Profile) -> str:
    """Format a profile as a table."""
    has_limits = limits(profile.device) is not None
    lines = [
        f"{profile.device}, {profile.num_ranks} ranks, {profile.steps} steps: "
        f"{profile.untraced_step_ms:.2f} ms a step, {profile.tokens_per_s:,.0f} tokens/s; "
        f"traced {profile.step_ms:.2f} ms:",
        f"{'':<24}{'ms a step':>10}{'share':>9}{'of roofline':>13}",
    ]
    for name, ms in profile.categories_ms.items():
        of = f"{profile.roofline[name]:.1%}" if name in profile.roofline else ""
        lines.append(f"{name:<24}{ms:>10.2f}{ms / profile.step_ms:>9.1%}{of:>13}")
    if not has_limits:
        lines.append(f"no roofline: the limits of {profile.device!r} are unknown")
    lines.append("longest:")
    lines += [f"{ms:>9.2f} ms  {kind:<22} {name[:90]}" for kind, name, ms in profile.kernels]
    return "\n".join(lines)


def _untraced(
    step: Callable[[], None], count: int, seen: list[list[MicroBatch]]
) -> tuple[float, float]:
    """Return the milliseconds of all steps without the profiler, and this rank's tokens in them."""
    on_gpu = torch.cuda.is_available()
    dist.barrier()
    _wait(on_gpu)
    began = time.perf_counter()
    for _ in range(count):
        step()
    _wait(on_gpu)
    elapsed_ms = (time.perf_counter() - began) * 1e3
    return elapsed_ms, float(sum(batch.num_tokens for each in seen for batch in each))


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
