"""What the GPU measurements are to reach, and what of it they did."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]
"""By part: `checks`, `attention`, `steps`, `training` ...; what was not run is not there."""
TILES = "tiles of the kernels, milliseconds"
"""The check that times them; `*` marks the fastest."""


@dataclass(frozen=True)
class Goal:
    """A number to reach."""

    text: str
    target: float
    measure: Callable[[Results], float | None]
    """None: not measured."""
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
        """The goal as a sentence."""
        if self.ratio is None:
            return "not measured"
        if self.ratio >= 1:
            return "reached"
        return f"missed by {1 - self.ratio:.1%}"


def cases(results: Results, beginning: str, length: int) -> list[dict[str, Any]]:
    """What was measured of each subject whose name begins so, without failed ones.

    Of several micro-batches the first one, which is the largest.
    """
    found = []
    for name, of in results.get("steps", {}).get("subjects", {}).items():
        sizes = [at for size, at in of.get("cases", {}).items() if size.startswith(f"s{length} ")]
        if name.startswith(beginning) and sizes and "error" not in sizes[0]:
            found += [at for at in sizes[:1] if at["tokens_per_s"]]
    return found


def best(results: Results, beginning: str, length: int) -> dict[str, Any] | None:
    """The fastest of them by the median of its rounds."""
    return max(cases(results, beginning, length), key=lambda at: at["median"], default=None)


def of_peak(beginning: str, length: int) -> Callable[[Results], float | None]:
    """FLOP/s of the fastest over those of a large product of matrices."""

    def measure(results: Results) -> float | None:
        at = best(results, beginning, length)
        return None if at is None else at.get("of_peak")

    return measure


def over(one: str, other: str, lengths: tuple[int, ...]) -> Callable[[Results], float | None]:
    """Median of the rounds' ratios, of the fastest of each; the lowest of the lengths."""

    def measure(results: Results) -> float | None:
        ratios = []
        for length in lengths:
            a, b = best(results, one, length), best(results, other, length)
            if a is None or b is None:
                return None
            pairs = zip(a["tokens_per_s"], b["tokens_per_s"], strict=False)
            ratios.append(statistics.median(x / y for x, y in pairs))
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


def value(part: str, name: str) -> Callable[[Results], float | None]:
    """A number of a part."""

    def measure(results: Results) -> float | None:
        found = results.get(part, {}).get(name)
        return None if found is None else float(found)

    return measure


def _off_the_plan(results: Results) -> float | None:
    """How far the peaks of memory are from the plan; the worse of plain and carried scores."""
    found = [
        abs(at["peak_gib"] / at["plan_gib"] - 1)
        for beginning in (f"{_V2}auto/compile/zero1", f"{_REAL}auto/compile/zero1")
        for at in cases(results, beginning, 512)
        if "peak_gib" in at
    ]
    return max(found, default=None)


_V2, _REAL, _ROBERTA = "ours/roformer_v2-base/", "ours/realformer_v2-base/", "ours/roberta-base/"
_LARGE, _PEER = "ours/roformer_v2-large/", "hf/roberta-base/"
_FUSED, _EAGER = "auto/compile/zero1", "auto/plain/zero1"
_PEAK = "of the measured bf16 peak"
GOALS = (
    Goal("RoFormerV2 base, s128", 0.60, of_peak(_V2, 128), _PEAK),
    Goal("RoFormerV2 base, s512", 0.60, of_peak(_V2, 512), _PEAK),
    Goal("RoFormerV2 large, s128", 0.60, of_peak(_LARGE, 128), _PEAK),
    Goal("RoFormerV2 large, s512", 0.60, of_peak(_LARGE, 512), _PEAK),
    Goal("RoFormerV2 over Hugging Face's RoBERTa at its best, base, s128 and s512", 2.0,
         over(_V2, _PEER, (128, 512))),
    Goal("RoFormerV2 over our RoBERTa, base, compiled, s128", 1.3,
         over(_V2 + _FUSED, _ROBERTA + _FUSED, (128,))),
    Goal("RoFormerV2 over our RoBERTa, base, compiled, s512", 1.2,
         over(_V2 + _FUSED, _ROBERTA + _FUSED, (512,))),
    Goal("RoFormerV2 over our RoBERTa, base, eager, s128", 1.3,
         over(_V2 + _EAGER, _ROBERTA + _EAGER, (128,))),
    Goal("RoFormerV2 over our RoBERTa, base, eager, s512", 1.2,
         over(_V2 + _EAGER, _ROBERTA + _EAGER, (512,))),
    Goal("RealFormerV2 over RoFormerV2, base, s128", 0.95,
         over(_REAL + _FUSED, _V2 + _FUSED, (128,))),
    Goal("RealFormerV2 over RoFormerV2, base, s512", 0.85,
         over(_REAL + _FUSED, _V2 + _FUSED, (512,))),
    Goal("RealFormerV2 fused over eager, base, s512, attention alone", 4.0, _core),
    Goal("peak memory off the plan, base, s512", 0.05, _off_the_plan, at_most=True),
    Goal("error of fused attention against float64", 5e-3, value("checks", "worst_fused_error"),
         at_most=True),
    Goal("data wait in a real training run", 0.01, value("training", "data_wait"), at_most=True),
    Goal("loss of the first steps off the CPU's", 0.01,
         value("training", "first_steps_difference"), at_most=True),
)  # fmt: skip
"""One H100 or H200, vocabulary of 50,000, bf16, real optimizer steps. The peak is that of a large
bf16 product on the same GPU; 0.60 of an H200's is 790,000 tokens/s at s512 and 850,000 at s128 for
base, 236,000 and 250,000 for large. The error is the relative Frobenius error of outputs and
gradients, worst case; the limit is plain PyTorch's in bf16. Where DeepSpeed is missing, zero0 runs
in place of zero1, and ratios of zero1 are not measured."""


def judge(results: Results) -> list[Verdict]:
    """All goals."""
    return [Verdict(goal, goal.measure(results)) for goal in GOALS]
