"""What `benchmarks.attention` compares: one layer's attention, between projections and rotary.

Each subject is made for a `Case` and is called on (T, N, H) bf16 queries, keys and values, or on
the tensor of all three, and if it carries on the scores of the layer below. It returns the output
and, if it carries, the scores.
Letters: T tokens end to end, N heads, H head size, B rows of S tokens, W slots of a row of scores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.kernels.attention import probabilities, raw_scores, weighted_values
from pipeline.kernels.carried import carried_attention, scores_of
from pipeline.kernels.choose import Windows
from pipeline.kernels.flash import flash_attention
from pipeline.model.layout import Layout, rows

Result = tuple[Tensor, Tensor | None]


class NotPossibleError(Exception):
    """A subject that there is not, or that cannot take a case: the reason."""


@dataclass(frozen=True)
class Case:
    """A micro-batch of one layer."""

    name: str
    num_heads: int
    head_size: int
    documents: Tensor
    """(B, S) int64 numbers of documents, on the device; equal ones side by side."""

    @property
    def is_full(self) -> bool:
        """Whether each row is one document, so that no mask is needed."""
        return bool((self.documents == self.documents[:, :1]).all())

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, N, H)."""
        return self.documents.numel(), self.num_heads, self.head_size

    @property
    def scale(self) -> float:
        """Factor of q k^T."""
        return 1.0 / math.sqrt(self.head_size)

    def layout(self) -> Layout:
        """Attention layout as the model makes it."""
        positions = torch.zeros_like(self.documents)
        return rows(self.documents, positions)

    def ends(self) -> tuple[Tensor, int]:
        """(D + 1,) int32 document ends from 0, and the tokens of the longest document."""
        changes = self.documents[:, 1:] != self.documents[:, :-1]
        starts = F.pad(changes, (1, 0), value=True).flatten().nonzero()[:, 0]
        last = starts.new_tensor([self.documents.numel()])
        ends = torch.cat((starts, last)).int()
        return ends, int(ends.diff().max())

    def pairs(self) -> int:
        """Pairs of tokens that see each other."""
        lengths = self.ends()[0].diff().long()
        return int((lengths * lengths).sum())


@dataclass(frozen=True)
class Attention:
    """A subject made for a case."""

    run: Callable[..., Result]
    """Function of q, k, v, and the carry if there is one."""
    carry: "Carry | None" = None
    """None: nothing is carried."""
    is_packed: bool = False
    """Takes (T, 3, N, H) in place of the three, as the linear layer before gives them."""


@dataclass(frozen=True)
class Carry:
    """How a subject stores scores."""

    make: Callable[[Tensor], Tensor]
    """Converts (B, N, S, S) fp32 to the subject's form."""
    values: Callable[[Tensor], Tensor]
    """Back to (B, N, S, S) fp32; what no one sees is anything."""
    gradient_values: Callable[[Tensor], Tensor]
    """The same of a gradient."""


def call_carried(
    qkv: Tensor, carry: Tensor | None, windows: Windows, scale: float, num_summed: Tensor,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The one place that knows the signature of our fused kernels."""
    return carried_attention(
        qkv, carry, windows, scale=scale, num_summed=num_summed, dropout=dropout
    )


def carried(case: Case, num_summed: int, dropout: float = 0.0) -> Attention:
    """Our fused kernels."""
    windows = case.layout().windows()
    assert windows is not None
    num_rows, length = case.documents.shape
    summed = torch.tensor(float(num_summed), device=case.documents.device)

    def make(scores_BNSS: Tensor) -> Tensor:
        # The kernels' own, in their own format; then its values are written over.
        tokens, *head = case.shape
        zeros = torch.zeros(tokens, 3, *head, dtype=torch.bfloat16, device=scores_BNSS.device)
        _, carry = call_carried(zeros, None, windows, case.scale, summed)
        scores_of(carry)[..., :length].copy_(scores_BNSS.transpose(0, 1).flatten(1, 2))
        return carry.detach()

    def by_rows(values: Tensor) -> Tensor:
        return values[..., :length].unflatten(1, (num_rows, length)).transpose(0, 1).float()

    def run(qkv: Tensor, carry: Tensor) -> Result:
        return call_carried(qkv, carry, windows, case.scale, summed, dropout)

    values = Carry(make, lambda carry: by_rows(scores_of(carry)), by_rows)
    return Attention(run, values, is_packed=True)


def _eager(case: Case, num_summed: int, *, compiled: bool) -> Attention:
    allowed, scale = case.layout().allowed, case.scale
    num_rows, length = case.documents.shape

    def core(q: Tensor, k: Tensor, v: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (_to_rows(each, num_rows, length) for each in (q * scale, k, v))
        scores = raw_scores(q, k, carry)
        share = probabilities(scores, allowed, num_summed)
        return weighted_values(share, v, 0.0).transpose(1, 2).flatten(0, 1), scores

    run = torch.compile(core, dynamic=False, fullgraph=True) if compiled else core
    return Attention(run, _in_rows(torch.float32))


def _fallback(case: Case) -> Attention:
    """S = baddbmm(S below, q, k); O by SDPA's memory-efficient kernel with S below as its bias."""
    allowed = case.layout().allowed
    num_rows, length = case.documents.shape

    def run(q: Tensor, k: Tensor, v: Tensor, carry: Tensor) -> Result:
        q, k, v = (_to_rows(each, num_rows, length) for each in (q, k, v))
        bias = carry if case.is_full else carry.masked_fill(~allowed, float("-inf"))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=case.scale)
        scores = torch.baddbmm(
            carry.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=case.scale
        ).view_as(carry)
        return out.transpose(1, 2).flatten(0, 1), scores

    return Attention(run, _in_rows(torch.bfloat16))


def _plain(case: Case, backend: SDPBackend) -> Attention:
    """SDPA; a mask of bool only: cuDNN misreads an fp32 one beside bf16 queries."""
    num_rows, length = case.documents.shape
    mask = None if case.is_full else case.layout().allowed
    if mask is not None and backend == SDPBackend.FLASH_ATTENTION:
        raise NotPossibleError("flash attention of torch takes no mask")
    if mask is not None and backend == SDPBackend.CUDNN_ATTENTION and length % 128 == 64:
        raise NotPossibleError("cuDNN gives NaN there (pytorch issue 196678)")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
        q, k, v = (_to_rows(each, num_rows, length) for each in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale)
        return out.transpose(1, 2).flatten(0, 1), None

    return Attention(run)


def flash_documents(case: Case, dropout: float = 0.0) -> Attention:
    """Torch's flash kernel over documents end to end, as our models call it."""
    if case.documents.device.type == "cpu":
        raise NotPossibleError("torch has no flash attention over documents on a CPU")
    ends, longest = case.ends()

    def run(qkv: Tensor) -> Result:
        return flash_attention(qkv, ends, longest, scale=case.scale, dropout=dropout), None

    return Attention(run, is_packed=True)


def _cudnn_documents(case: Case) -> Attention:
    """cuDNN's kernel over documents end to end; torch's own modules do not call it so."""
    if case.documents.device.type == "cpu":
        raise NotPossibleError("cuDNN has no kernels for a CPU")
    ends, longest = case.ends()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
        out, *_ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, ends, ends, longest, longest, True, 0.0, False, False, scale=case.scale
        )
        return out, None

    return Attention(run)


SUBJECTS: dict[str, Callable[[Case], Attention]] = {
    "carried sum": lambda case: carried(case, 1),
    "carried mean": lambda case: carried(case, 2),
    "eager sum": lambda case: _eager(case, 1, compiled=False),
    "eager mean": lambda case: _eager(case, 2, compiled=False),
    "baddbmm and SDPA efficient": _fallback,
    "plain, cuDNN": lambda case: _plain(case, SDPBackend.CUDNN_ATTENTION),
    "plain, flash": lambda case: _plain(case, SDPBackend.FLASH_ATTENTION),
    "plain, efficient": lambda case: _plain(case, SDPBackend.EFFICIENT_ATTENTION),
    "plain, math": lambda case: _plain(case, SDPBackend.MATH),
    "plain, flash over documents": flash_documents,
    "plain, cuDNN over documents": _cudnn_documents,
    "eager sum, compiled": lambda case: _eager(case, 1, compiled=True),
    "eager mean, compiled": lambda case: _eager(case, 2, compiled=True),
}
"""`mean` is the second layer of a running mean. `plain` carries nothing. What takes seconds to
compile comes last."""


def carries(name: str) -> bool:
    """Whether a subject carries scores."""
    return not name.startswith("plain")


def num_summed(name: str) -> int:
    """What the scores are divided by."""
    return 2 if "mean" in name else 1


def _in_rows(dtype: torch.dtype) -> Carry:
    return Carry(lambda scores: scores.to(dtype, copy=True), Tensor.float, Tensor.float)


def _to_rows(x_TNH: Tensor, num_rows: int, length: int) -> Tensor:
    return x_TNH.unflatten(0, (num_rows, length)).transpose(1, 2)
