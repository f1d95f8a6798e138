"""Divides the time of profiled steps among categories, from a trace of torch's profiler.

Each moment counts once. The name of a kernel or an operator decides its category.
"""

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline.train.timing import BEGIN, DATA, END, HEAD, PREFIX, UPDATE

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
            r"|^(forward|delta|turn|backward_(window|keys|queries))_kernel|triton_tem_\w*bmm",
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
class Span:
    """The run of a kernel or an operator, in microseconds of the trace's clock."""

    start: float
    stop: float
    category: str
    name: str


@dataclass(frozen=True)
class Timeline:
    """Milliseconds of all profiled steps together."""

    wall_ms: float
    by_category: dict[str, float]
    """Each of `CATEGORIES`; they add up to the wall time."""
    by_name: dict[tuple[str, str], float]
    """Time of each (category, kernel or operator); several at once count in full."""


def read_timeline(trace: dict[str, Any]) -> Timeline:
    """Divide the time between the marks `BEGIN` and `END`.

    With a GPU, a moment belongs to the kernel or copy that ran; communication counts only while
    nothing else ran, so it is the part that is not hidden. Without a GPU a moment belongs to the
    innermost operator of the thread that set the marks. The rest is waiting for data, if the host
    did so, or idle.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted(
        (float(event["ts"]), event["name"].removeprefix(PREFIX), event["tid"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)
    )
    begin = next(ts for ts, phase, _ in marks if phase == BEGIN)
    end = next(ts for ts, phase, _ in reversed(marks) if phase == END)
    phases = _Phases([(ts, phase) for ts, phase, _ in marks])
    if any(event.get("cat") in _ON_DEVICE for event in events):
        spans = list(_device_spans(events, phases))
    else:
        thread = next(tid for _, phase, tid in marks if phase == BEGIN)
        operators = (e for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread)
        spans = list(_host_spans(list(operators), phases))
    spans = [
        Span(max(s.start, begin), min(s.stop, end), s.category, s.name)
        for s in spans
        if s.stop > begin and s.start < end
    ]
    by_name: dict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        by_name[span.category, span.name] += (span.stop - span.start) / 1e3
    return Timeline((end - begin) / 1e3, _divide(spans, begin, end, phases), dict(by_name))


class _Phases:
    """The phases of the host."""

    def __init__(self, marks: list[tuple[float, str]]) -> None:
        self.marks = marks

    def at(self, moments: list[float]) -> list[str]:
        """Return the phase at each moment of a list in any order."""
        phases, number = [""] * len(moments), -1
        for index in sorted(range(len(moments)), key=moments.__getitem__):
            while number + 1 < len(self.marks) and self.marks[number + 1][0] <= moments[index]:
                number += 1
            phases[index] = self.marks[number][1] if number >= 0 else ""
        return phases

    def waiting(self, begin: float, end: float) -> Iterator[tuple[float, float]]:
        """Yield the stretches in which the host waited for data."""
        ends = [ts for ts, _ in self.marks[1:]] + [end]
        for (start, phase), stop in zip(self.marks, ends, strict=True):
            if phase == DATA and stop > begin and start < end:
                yield max(start, begin), min(stop, end)


def _device_spans(events: list[dict[str, Any]], phases: _Phases) -> Iterator[Span]:
    """Yield kernels and copies; a kernel belongs to the phase in which it was launched."""
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    operators = {
        event["args"]["External id"]: event["name"]
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    ran = [event for event in events if event.get("cat") in _ON_DEVICE]
    moments = [launched.get(e.get("args", {}).get("correlation"), float(e["ts"])) for e in ran]
    for event, phase in zip(ran, phases.at(moments), strict=True):
        operator = operators.get(event.get("args", {}).get("External id"), "")
        start = float(event["ts"])
        kind = category(event["name"], phase, operator)
        yield Span(start, start + float(event["dur"]), kind, event["name"])


def _host_spans(operators: list[dict[str, Any]], phases: _Phases) -> Iterator[Span]:
    """Yield operators without those inside them; unknown ones count to those around them."""
    operators.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    kinds = phases.at([float(event["ts"]) for event in operators])
    around: list[tuple[float, str, str]] = []  # stop, category, name
    at = 0.0
    for event, phase in zip(operators, kinds, strict=True):
        start = float(event["ts"])
        while around and around[-1][0] <= start:
            stop, kind, name = around.pop()
            if stop > at:
                yield Span(at, stop, kind, name)
                at = stop
        if around and start > at:
            yield Span(at, start, around[-1][1], around[-1][2])
        kind = category(event["name"], phase)
        if kind == OTHER and around:
            kind = around[-1][1]
        around.append((start + float(event["dur"]), kind, event["name"]))
        at = max(at, start)
    while around:
        stop, kind, name = around.pop()
        if stop > at:
            yield Span(at, stop, kind, name)
            at = stop


def _divide(spans: list[Span], begin: float, end: float, phases: _Phases) -> dict[str, float]:
    """Return the milliseconds of each category, counting each moment once."""
    last = {COMMUNICATION: 1, OTHER: 2, DATA_WAIT: 3, IDLE: 4}
    rows = [(s.start, s.stop, last.get(s.category, 0), s.category) for s in spans]
    rows += [
        (start, stop, last[DATA_WAIT], DATA_WAIT) for start, stop in phases.waiting(begin, end)
    ]
    rows.append((begin, end, last[IDLE], IDLE))
    rows.sort()
    edges = sorted({edge for row in rows for edge in row[:2]})
    total = dict.fromkeys(CATEGORIES, 0.0)
    active: list[tuple[int, float, float, str]] = []  # by rank; then what began first
    number = 0
    for left, right in pairwise(edges):
        while number < len(rows) and rows[number][0] <= left:
            start, stop, rank, kind = rows[number]
            heapq.heappush(active, (rank, start, stop, kind))
            number += 1
        while active[0][2] <= left:
            heapq.heappop(active)
        total[active[0][3]] += (right - left) / 1e3
    return total
