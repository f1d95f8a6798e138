"""Measures where the time of a run's training steps goes on this machine, and its roofline.

The time of profiled steps is divided among categories: a moment counts once, and the name of a
kernel or an operator, an event of torch's profiler, decides its category.
"""

import math
import re
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import schedule
from pipeline.config.objective import generator_of
from pipeline.config.runs import PretrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.data.objects import open_index
from pipeline.data.run_order import DataRank
from pipeline.model.cost import flops_per_token, limits
from pipeline.objectives.choose import make_objective
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.summary import table
from pipeline.train.build import make_model, open_data
from pipeline.train.engine import Engine, close_process_group, init_process_group
from pipeline.train.pretraining import with_vocabulary
from pipeline.train.timing import (
    BEGIN,
    BODY,
    DATA,
    END,
    FORWARD,
    HEAD,
    PREFIX,
    UPDATE,
    device_name,
    mark,
)

GEMM = "GEMM"
ATTENTION = "attention"
NORMS = "norms and elementwise"
HEAD_LOSS = "head and loss"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
DATA_WAIT = "data wait"
OTHER = "other"
IDLE = "idle or host"

CATEGORIES = (GEMM, ATTENTION, NORMS, HEAD_LOSS, OPTIMIZER, COMMUNICATION, DATA_WAIT, OTHER, IDLE)

# The first match counts: names of CUTLASS's and cuDNN's flash kernels contain words of GEMMs, those
# of softmax and norms contain words of reductions.
_BY_NAME = tuple(
    (category, re.compile(words, re.IGNORECASE))
    for category, words in (
        (COMMUNICATION, r"nccl|gloo|^c10d::|all_?reduce|all_?gather|reduce_?scatter"),
        # torch's multi-tensor kernels and DeepSpeed's; nothing else of a step uses them.
        (OPTIMIZER, r"multi_tensor_apply|adam|lamb"),
        (OTHER, r"^mem(cpy|set)\b|^aten::(_to_copy|copy_|_pin_memory|_local_scalar_dense)$"),
        (
            ATTENTION,
            r"flash|fmha|sdpa|attention|attn|softmax"
            # Kernels of pipeline/kernels/carried_triton.py.
            r"|^(forward|delta|turn(_back)?|backward_(window|keys|queries))_kernel|triton_tem_\w*bmm",
        ),
        # On a CPU compiled code is one event, and torch.compile does not fuse products.
        (NORMS, r"layer_?norm|rms_?norm|residual|CompiledFxGraph"),
        (
            GEMM,
            r"gemm|nvjet|cutlass|xmma|cublas|wgmma|split_?k|triton_tem_|triton_mm"
            r"|^(void )?(ampere|hopper|sm\d\d)_|^aten::(mm|addmm|linear|matmul|_addmm_activation)$"
            r"|^(aten|mkldnn|mkl)::\w*linear",
        ),
        (
            NORMS,
            r"elementwise|vectorized|reduce|triton_|norm|dropout|native|index|gather|scatter"
            r"|embedding|cat_?array|copy|fill|sort|scan|cub::|rotary|transpose|where|^aten::",
        ),
    )
)

# An operator tells more than the library's kernel that it launches: linear layers are `mm` and
# `addmm`, so batched products belong to attention.
_BY_OPERATOR = {
    "aten::bmm": ATTENTION,
    "aten::baddbmm": ATTENTION,
    "aten::_softmax": ATTENTION,
    "aten::_softmax_backward_data": ATTENTION,
    "aten::mm": GEMM,
    "aten::addmm": GEMM,
}

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_LAUNCH_NAME = re.compile(r"cuda|cu[A-Z]")


def category(name: str, phase: str = "", operator: str = "") -> str:
    """Return one of `CATEGORIES`; `OTHER` for an unknown name.

    `phase` is the host's when it started it: `HEAD` and `UPDATE` decide. `operator` launched it.
    """
    by_name = next((each for each, words in _BY_NAME if words.search(name)), OTHER)
    if by_name == COMMUNICATION:
        return by_name
    if phase == UPDATE:
        return OPTIMIZER
    if phase == HEAD:
        return HEAD_LOSS
    if by_name == OTHER:
        return by_name
    return _BY_OPERATOR.get(operator) or _BY_OPERATOR.get(name) or by_name


@dataclass(frozen=True)
class StepTimeline:
    """Milliseconds of all profiled steps together."""

    wall_ms: float
    by_category: dict[str, float]
    """Each of `CATEGORIES`; they add up to the wall time."""
    by_name: dict[tuple[str, str], float]
    """Time of each (category, kernel or operator); several at once count in full."""


_Interval = tuple[float, float]
"""Begin and end in microseconds of the profiler's clock."""


def read_timeline(events: Iterable[Any]) -> StepTimeline:
    """Divide the time between the marks `BEGIN` and `END` of a profile's `events()`.

    With a GPU, a moment belongs to the kernel or copy that ran; communication counts only while
    nothing else ran, so it is the part that is not hidden, and a copy while no kernel ran. Without
    a GPU a moment belongs to the innermost operator of the thread that set the marks. The rest is
    waiting for data, if the host did so, or idle.
    """
    events = list(events)
    marks = sorted(
        (event.time_range.start, event.name.removeprefix(PREFIX), event.thread)
        for event in events
        if event.activity_type == "user_annotation" and event.name.startswith(PREFIX)
    )
    starts = [start for start, _, _ in marks]
    begin, _, thread = next(mark for mark in marks if mark[1] == BEGIN)
    end = next(start for start, phase, _ in reversed(marks) if phase == END)

    def phase_at(moment: float) -> str:
        number = bisect_right(starts, moment)
        return marks[number - 1][1] if number else ""

    phases = zip(marks, [*starts[1:], end], strict=True)
    waits = [
        (max(start, begin), min(stop, end))
        for (start, phase, _), stop in phases
        if phase == DATA and stop > begin and start < end
    ]
    by_name: dict[tuple[str, str], float] = defaultdict(float)
    if any(event.activity_type in _ON_DEVICE for event in events):
        intervals: dict[str, list[_Interval]] = defaultdict(list)
        for kind, event in _on_device(events, phase_at):
            start, stop = max(event.time_range.start, begin), min(event.time_range.end, end)
            if stop > start:
                intervals[kind].append((start, stop))
                by_name[kind, event.name] += (stop - start) / 1e3
        total = _divide({**intervals, DATA_WAIT: waits})
    else:
        total, waited = dict.fromkeys(CATEGORIES, 0.0), 0.0
        for event in events:
            at, own_ms = event.time_range.start, event.self_cpu_time_total / 1e3
            if event.activity_type != "cpu_op" or event.thread != thread or not begin <= at < end:
                continue
            kind = _on_host(event, phase_at)
            total[kind] += own_ms
            by_name[kind, event.name] += own_ms
            waited += own_ms if phase_at(at) == DATA else 0.0
        total[DATA_WAIT] = max(0.0, _length(waits) / 1e3 - waited)
    wall_ms = (end - begin) / 1e3
    total[IDLE] = wall_ms - sum(total.values())
    return StepTimeline(wall_ms, total, dict(by_name))


def _on_device(events: list[Any], phase_at: Callable[[float], str]) -> Iterator[tuple[str, Any]]:
    """Yield kernels and copies with their categories; the phase is that of their launch."""
    launched = {e.id: e.time_range.start for e in events if e.activity_type in _LAUNCHES}
    operators = {e.id: e.name for e in events if e.activity_type == "cpu_op"}
    for event in events:
        if event.activity_type in _ON_DEVICE:
            phase = phase_at(launched.get(event.id, event.time_range.start))
            yield category(event.name, phase, operators.get(event.linked_correlation_id, "")), event


def _on_host(event: Any, phase_at: Callable[[float], str]) -> str:
    """Return the category of an operator; an unknown one counts to the one around it."""
    kind = category(event.name, phase_at(event.time_range.start))
    while kind == OTHER and event.cpu_parent is not None:
        event = event.cpu_parent
        kind = category(event.name, phase_at(event.time_range.start))
    return kind


def _divide(intervals: dict[str, list[_Interval]]) -> dict[str, float]:
    """Return the milliseconds of each category, counting each moment once: the first one has it."""
    order = [kind for kind in CATEGORIES if kind not in (COMMUNICATION, OTHER, DATA_WAIT)]
    total, seen, covered = dict.fromkeys(CATEGORIES, 0.0), list[_Interval](), 0.0
    for kind in (*order, COMMUNICATION, OTHER, DATA_WAIT):
        seen += intervals.get(kind, [])
        length = _length(seen)
        total[kind], covered = (length - covered) / 1e3, length
    return total


def _length(intervals: Iterable[_Interval]) -> float:
    """Return the length of the union of intervals."""
    length, last = 0.0, -math.inf
    for start, stop in sorted(intervals):
        length += max(0.0, stop - max(start, last))
        last = max(last, stop)
    return length


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
    index = open_index(config.data)
    config = with_vocabulary(config, index)
    device = init_process_group(process, config.train.collective_timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        # Counts of sequences are stored there if the dataset's folder is not writable.
        config = replace(config, run_dir=folder)
        objective = make_objective(config.objective)
        model = make_model(config, objective, device)
        share = DataRank(process.rank, process.world_size)
        loader, _ = open_data(
            config.train_data, config.eval_data, config.run_dir, index, objective, share
        )
        engine = Engine(model, config.train, process, device)
        model.set_alpha(schedule.alpha(config.train.num_steps, config.train.alpha_warmup_steps))
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


def profiled(step: Callable[[], None], count: int, trace_file: Path | None = None) -> StepTimeline:
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
    if trace_file is not None:
        profiler.export_chrome_trace(str(trace_file))
    events = list(profiler.events() or ())
    if not all(hasattr(event, "activity_type") for event in events):
        # torch 2.11 keeps neither the kind of an event nor the operator that launched it.
        recorded = profiler.profiler.kineto_results.events()
        on_device = [e for e in recorded if e.device_type().name != "CPU"]
        name_kinds(events, {e.correlation_id(): e.linked_correlation_id() for e in on_device})
    return read_timeline(events)


def name_kinds(events: Iterable[Any], operators: dict[int, int]) -> None:
    """Set `activity_type` and `linked_correlation_id` of events of a torch that sets neither.

    `operators`: the id of the operator that launched it, by the id of a kernel or copy.
    """
    for event in events:
        on_host = event.device_type.name == "CPU"
        if event.is_user_annotation:
            kind = "user_annotation" if on_host else "gpu_user_annotation"
        elif on_host:
            kind = "cuda_runtime" if _LAUNCH_NAME.match(event.name) else "cpu_op"
        else:
            kind = "gpu_memcpy" if event.name.startswith("Mem") else "kernel"
        event.activity_type = kind
        event.linked_correlation_id = 0 if on_host else operators.get(event.id, 0)


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
class PartCost:
    """FLOPs and bytes of a part of a step."""

    flops: float
    num_bytes: float

    def __mul__(self, times: float) -> "PartCost":
        return PartCost(self.flops * times, self.num_bytes * times)

    def least_s(self, device: str) -> float | None:
        """Return the seconds at the limits of a device, by its name; None if they are unknown."""
        known = limits(device)
        if known is None or known.bandwidth is None:
            return None
        return max(self.flops / known.bf16_flops, self.num_bytes / known.bandwidth)


def attention_work(
    tokens: int, pairs: float, num_heads: int, head_size: int, *, carries: bool, longest: int
) -> PartCost:
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
    return PartCost(
        flops=12.0 * pairs * num_heads * head_size,
        num_bytes=float(
            12 * tokens * num_heads * head_size * _BF16 + of_scores * pairs * num_heads
        ),
    )


def model_work(config: PretrainConfig, batches: list[MicroBatch]) -> dict[str, PartCost]:
    """Return the work of the encoder's GEMMs and attention over micro-batches, in bf16.

    The generator's, too. GEMMs include padding; the bytes that they move are not counted.
    """
    encoders = [config.model]
    if config.objective.kind == "rtd":
        encoders.append(generator_of(config.model, config.objective))
    slots = sum(batch.input_ids.numel() for batch in batches)
    pairs = sum(2 * int(batch.positions.sum()) + batch.num_tokens for batch in batches)
    longest = max(int(batch.positions.max()) + 1 for batch in batches)
    seq_len = max(batch.input_ids.shape[-1] for batch in batches)
    flops = flops_per_token(config.model, seq_len, objective=config.objective)
    carries = config.model.score_residual != "none"
    layers = [
        attention_work(
            slots, pairs, each.num_heads, each.head_size, carries=carries, longest=longest
        )
        * each.num_layers
        for each in encoders
    ]
    attention = PartCost(sum(each.flops for each in layers), sum(each.num_bytes for each in layers))
    return {GEMM: PartCost(3 * flops.body * slots, 0.0), ATTENTION: attention}


def roofline(
    config: PretrainConfig, batches: list[MicroBatch], timeline: StepTimeline, device: str
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
    timeline: StepTimeline,
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
        # Not strict: the shares of the roofline follow those of the categories.
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
        f"traced {profile.step_ms:.2f} ms:"
    ]
    rows = [("", "ms a step", "share", "of roofline")]
    for name, ms in profile.categories_ms.items():
        of = f"{profile.roofline[name]:.1%}" if name in profile.roofline else ""
        rows.append((name, f"{ms:.2f}", f"{ms / profile.step_ms:.1%}", of))
    lines += table(rows, right=(1, 2, 3))
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
