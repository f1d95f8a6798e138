"""What checks the kernels on a GPU finds those that are wrong, and passes those that are right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import attention, attention_subjects, gpu_checks
from benchmarks.attention_subjects import Attention, Case
from tests.support.triton import NEEDS_TRITON, Interpreter


def test_wrong_attention_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_subjects.SUBJECTS["eager sum"]

    def wrong(case: Case) -> Attention:
        made = right(case)
        return Attention(lambda q, k, v, carry: made.run(q * 1.1, k, v, carry), made.carry)

    monkeypatch.setitem(attention_subjects.SUBJECTS, "eager mean", wrong)
    device = torch.device("cpu")
    found = attention.check(["eager sum", "eager mean", "plain, cuDNN"], device, (1, 32))
    assert attention.is_right(found["eager sum"], "packed") is None
    assert "wrong: error" in str(attention.is_right(found["eager mean"], "packed"))
    assert "backend" in str(attention.is_right(found["plain, cuDNN"], "full"))


@NEEDS_TRITON
@pytest.mark.slow
def test_interpreted_instruments(interpreter: Interpreter) -> None:
    interpreter("tests/benchmarks/interpreted_instruments.py")


def softmax_attention(case: Case, dropout: float) -> Attention:
    """Attention of a GPU's kernels by plain PyTorch, with torch's own dropout."""
    allowed, (num_rows, _) = case.layout().allowed, case.documents.shape

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.float().unflatten(0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
        scores = case.scale * q @ k.transpose(-1, -2)
        shares = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out = torch.nn.functional.dropout(shares, dropout) @ v
        return out.transpose(1, 2).flatten(0, 1).to(torch.bfloat16), None

    return Attention(run)


def check_dropout(make: Callable[[Case, float], Attention]) -> dict[str, float]:
    size = gpu_checks.Size(torch.device("cpu"), tiny=True)
    size.dropout_length = 48  # more than a head's 32 dimensions: two passes read the mask
    return gpu_checks._dropout(size, "plain, cuDNN", make, 1e-2, 0.9)


def test_dropout_is_compared_with_float64_over_the_same_mask() -> None:
    found = check_dropout(softmax_attention)
    assert set(found) == {"s48 full", "s48 full kept", "s48 packed", "s48 packed kept"}
    assert 0 < found["s48 full"] < 5e-3


def test_wrong_dropout_is_found() -> None:
    def unscaled(case: Case, dropout: float) -> Attention:
        made = softmax_attention(case, dropout)
        return Attention(lambda *qkv: ((1 - dropout) * made.run(*qkv)[0], None))

    with pytest.raises(AssertionError, match=r"s48 full, dropout 0\.1: \{'out'"):
        check_dropout(unscaled)
    with pytest.raises(AssertionError, match="of the probabilities were kept"):
        check_dropout(lambda case, dropout: softmax_attention(case, 2 * dropout))
    with pytest.raises(AssertionError, match="another seed dropped the same"):
        check_dropout(lambda case, _: softmax_attention(case, 0.0))

    def other_mask_backward(case: Case, dropout: float) -> Attention:
        made = softmax_attention(case, dropout)

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
            out, _ = made.run(q, k, v)
            again, _ = made.run(q, k, v)  # drops others
            return again + (out - again).detach(), None

        return Attention(run)

    with pytest.raises(AssertionError, match="'dv'"):
        check_dropout(other_mask_backward)
