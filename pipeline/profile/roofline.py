"""What attention must at least compute and move, and how long a device takes for it.

Letters: T tokens, N heads, H head size; P pairs of tokens that see each other, sum(n^2) over
documents of n tokens.
"""

from dataclasses import dataclass

from pipeline.model.cost import limits

_BF16 = 2
_WINDOW = 128


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of something."""

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

    FLOPs are those of the formula, as in `cost.py`: 4 P N H forward, twice as many backward; what
    fused kernels compute a second time is not counted. Bytes: queries, keys, values and output are
    read or written 4 times forward and 8 times backward. Carried scores (fp16, their gradient
    bf16) are read and written forward, and backward the scores are read and the gradient read and
    written; where a row of scores is longer than a tile of 128, the gradient is read once more.

    Args:
        tokens: T.
        pairs: P.
        num_heads: N.
        head_size: H.
        carries: a layer in the middle of a model with carried scores; else plain attention.
        longest: tokens of the longest document.
    """
    of_scores = (10 + 2 * (longest > _WINDOW)) if carries else 0
    return Work(
        flops=12.0 * pairs * num_heads * head_size,
        num_bytes=float(
            12 * tokens * num_heads * head_size * _BF16 + of_scores * pairs * num_heads
        ),
    )
