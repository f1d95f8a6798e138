"""What the GPU measurements are to reach, and what of it they did."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]
"""By file: `correctness`, `attention`, `step`, `training`; what was not run is not there."""


@dataclass(frozen=True)
class Goal:
    """A number to reach."""

    text: str
    target: float
    measure: Callable[[Results], float | None]
    """None: not measured."""
    floor: float | None = None
    """Below it something is wrong."""
    unit: str = ""
    at_most: bool = False
    """The target is an upper limit."""


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was measured."""

    goal: Goal
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """1 or more: reached."""
        if self.measured is None:
            return None
        if self.goal.at_most:
            return self.goal.target / max(self.measured, 1e-12)
        return self.measured / self.goal.target

    @property
    def text(self) -> str:
        """In words."""
        if self.ratio is None:
            return "not measured"
        if self.ratio >= 1:
            return "reached"
        missed = f"missed by {1 - self.ratio:.1%}"
        floor = self.goal.floor
        if floor is not None and self.measured is not None and self.measured < floor:
            missed += ", below the floor"
        return missed


def speeds(results: Results, beginning: str, length: int) -> dict[str, list[float]]:
    """tokens/s of the rounds of each subject whose name begins so, without failed ones."""
    found = {}
    for name, of in results.get("step", {}).get("subjects", {}).items():
        at = of.get("lengths", {}).get(str(length), {})
        if name.startswith(beginning) and at.get("tokens_per_s") and "error" not in at:
            found[name] = at["tokens_per_s"]
    return found


def best(results: Results, beginning: str, length: int) -> list[float] | None:
    """The rounds of the fastest of them by its median."""
    return max(speeds(results, beginning, length).values(), key=statistics.median, default=None)


def speed(beginning: str, length: int) -> Callable[[Results], float | None]:
    """Median tokens/s of the fastest."""

    def measure(results: Results) -> float | None:
        rounds = best(results, beginning, length)
        return None if rounds is None else statistics.median(rounds)

    return measure


def over(one: str, other: str, lengths: tuple[int, ...]) -> Callable[[Results], float | None]:
    """Median of the rounds' ratios, of the fastest of each; the lowest of the lengths."""

    def measure(results: Results) -> float | None:
        ratios = []
        for length in lengths:
            a, b = best(results, one, length), best(results, other, length)
            if a is None or b is None:
                return None
            ratios.append(statistics.median(x / y for x, y in zip(a, b, strict=False)))
        return min(ratios)

    return measure


def _core(results: Results) -> float | None:
    """Eager over fused at base, s512, packed rows, the largest micro-batch; the lower of both."""
    cases = results.get("attention", {}).get("cases", {})
    chosen = [case for name, case in cases.items()
              if name.startswith("base s512") and name.endswith("packed")]  # fmt: skip
    chosen.sort(key=lambda case: -case.get("tokens", 0))
    for case in chosen:
        of = case.get("subjects", {})
        ratios = [
            of[f"eager {kind}"]["ms"] / of[f"carried {kind}"]["ms"]
            for kind in ("sum", "mean")
            if "ms" in of.get(f"eager {kind}", {}) and "ms" in of.get(f"carried {kind}", {})
        ]
        if ratios:
            return min(ratios)
    return None


def _error(results: Results) -> float | None:
    value = results.get("correctness", {}).get("worst_fused_error")
    return None if value is None else float(value)


def _wait(results: Results) -> float | None:
    value = results.get("training", {}).get("data_wait")
    return None if value is None else float(value)


_V2, _REAL, _ROBERTA = "ours/roformer_v2-base/", "ours/realformer_v2-base/", "ours/roberta-base/"
_LARGE, _PEER = "ours/roformer_v2-large/", "hf/roberta-base/"
_RATE = "tokens/s"
GOALS = (
    Goal("RoFormerV2 base, s128", 850e3, speed(_V2, 128), 740e3, _RATE),
    Goal("RoFormerV2 base, s512", 790e3, speed(_V2, 512), 660e3, _RATE),
    Goal("RoFormerV2 large, s128", 250e3, speed(_LARGE, 128), 235e3, _RATE),
    Goal("RoFormerV2 large, s512", 236e3, speed(_LARGE, 512), 235e3, _RATE),
    Goal("RealFormerV2 over RoFormerV2, base, s128", 0.95, over(_REAL, _V2, (128,))),
    Goal("RealFormerV2 over RoFormerV2, base, s512", 0.85, over(_REAL, _V2, (512,))),
    Goal("RealFormerV2 fused over eager, base, s512, step", 2.0,
         over(f"{_REAL}auto/", f"{_REAL}reference/plain/", (512,))),
    Goal("RealFormerV2 fused over eager, base, s512, attention alone", 4.0, _core),
    Goal("RoFormerV2 over our RoBERTa, base, s128", 1.3, over(_V2, _ROBERTA, (128,))),
    Goal("RoFormerV2 over our RoBERTa, base, s512", 1.2, over(_V2, _ROBERTA, (512,))),
    Goal("RoFormerV2 over Hugging Face's RoBERTa at its best, base, s128 and s512", 2.0,
         over(_V2, _PEER, (128, 512))),
    Goal("error of fused attention against float64", 5e-3, _error, at_most=True),
    Goal("data wait in a real training run", 0.01, _wait, at_most=True),
)  # fmt: skip
"""One H200, vocabulary of 50,000, bf16, real optimizer steps. The error is the relative Frobenius
error of outputs and gradients, worst case; the limit is plain PyTorch's in bf16."""


def judge(results: Results) -> list[Verdict]:
    """All goals."""
    return [Verdict(goal, goal.measure(results)) for goal in GOALS]
