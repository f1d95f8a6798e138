"""The loss by chunks against autograd through all logits in float64.

`test_interpreted.py` runs this file once more, with the fused kernel instead of plain PyTorch.
"""

import os
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError
from pipeline.kernels import loss as module
from pipeline.kernels.loss import rows_of_chunk, vocabulary_loss
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import padded
from tests.support.grids import first_in_ci
from tests.support.triton import NEEDS_TRITON

FUSED = os.environ.get("TRITON_INTERPRET") == "1"
BY_ROWS = module._by_kernel if FUSED else module._by_torch
EXACT = 2e-6  # relative error in fp32, of losses and (Frobenius) of gradients
OF_PLAIN = 1.1  # errors in bf16 over those of plain PyTorch; 1.05 was the largest found


def make(num_rows: int, width: int, size: int, dtype: torch.dtype, bias: bool) -> list[Tensor]:
    """x, W, b and targets; logits have a deviation of about 3."""
    generator = torch.Generator().manual_seed(num_rows + size)
    x = torch.randn(num_rows, width, generator=generator) * 3
    weight = torch.randn(size, width, generator=generator) * width**-0.5
    values = [x, weight, torch.randn(size, generator=generator)][: 2 + bias]
    targets = torch.randint(size, (num_rows,), generator=generator)
    return [*(value.to(dtype) for value in values), targets]


def gradients(loss: Tensor, leaves: list[Tensor], scale: float) -> list[Tensor]:
    return [found.double() / scale for found in torch.autograd.grad(loss * scale, leaves)]


def expected(inputs: list[Tensor], dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Loss and gradients by autograd through all logits."""
    *values, targets = inputs
    leaves = [value.detach().to(dtype).requires_grad_() for value in values]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits.float() if dtype == torch.bfloat16 else logits, targets,
                           reduction="sum")  # fmt: skip
    return [loss.detach().double(), *gradients(loss, leaves, scale)]


def computed(inputs: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    *values, targets = inputs
    leaves = [value.detach().requires_grad_() for value in values]
    x, weight, bias = leaves if len(leaves) == 3 else [*leaves, None]
    loss, _ = vocabulary_loss(x, weight, bias, targets, fused=FUSED)  # type: ignore[arg-type]
    return [loss.detach().double(), *gradients(loss, leaves, scale)]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((f - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True)]


@pytest.fixture(params=first_in_ci([3, 1, 1000]))
def chunk(request: pytest.FixtureRequest) -> int:
    """Rows that the budget allows at a time."""
    return int(request.param)


def allow(rows: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_BYTES", rows * size * dtype.itemsize)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", [5, 64, 4099])
def test_fp32(chunk: int, size: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(chunk, size, torch.float32, monkeypatch)
    inputs = make(8, 16, size, torch.float32, bias)
    assert max(errors(computed(inputs), expected(inputs, torch.float64))) < EXACT


@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_bf16(chunk: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(chunk, 4099, torch.bfloat16, monkeypatch)
    inputs = make(12, 32, 4099, torch.bfloat16, True)
    wanted = expected(inputs, torch.float64)
    plain = errors(expected(inputs, torch.bfloat16, scale), wanted)
    for mine, theirs in zip(errors(computed(inputs, scale), wanted), plain, strict=True):
        assert mine < OF_PLAIN * theirs + 1e-6


@pytest.mark.skipif(FUSED, reason="the kernel computes whole chunks")
@pytest.mark.parametrize("rows_at_once", [1000, 100])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_many_rows(bias: bool, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than stay in the cache, in chunks that are filled up with zeros."""
    allow(rows_at_once, 64, torch.float64, monkeypatch)
    inputs = make(301, 16, 64, torch.float64, bias)
    assert max(errors(computed(inputs), expected(inputs, torch.float64))) < 1e-14


class _Shapes(TorchDispatchMode):
    """Shapes of the factors of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen.add(tuple(each.shape for each in args[:2]))
        return func(*args, **(named or {}))


@pytest.mark.skipif(FUSED, reason="concerns CPUs alone")
def test_numbers_of_rows_have_few_shapes() -> None:
    with _Shapes() as shapes:
        for num_rows in range(560, 660, 7):
            computed(make(num_rows, 4, 5, torch.float32, False))
    assert len(shapes.seen) == 3 * len({576, 640, 704})


def test_the_kernel_takes_no_float64() -> None:
    x, weight, targets = make(8, 16, 64, torch.float64, False)
    with pytest.raises(ConfigError, match=r"this is torch\.float64; set kernels.loss=reference"):
        vocabulary_loss(x, weight, None, targets, fused=True)


def test_chunks_are_equal_and_within_the_budget() -> None:
    row = module.LOGITS_BYTES // 10
    assert [rows_of_chunk(n, row) for n in (0, 1, 10, 11, 20, 21, 95)] == [1, 1, 10, 6, 10, 7, 10]
    assert rows_of_chunk(7, 2 * module.LOGITS_BYTES) == 1


def test_no_rows() -> None:
    x, weight, bias = (torch.zeros(shape, requires_grad=True) for shape in [(0, 4), (6, 4), (6,)])
    loss, correct = vocabulary_loss(x, weight, bias, torch.zeros(0, dtype=torch.int64), fused=FUSED)
    assert (loss.item(), correct.item()) == (0.0, 0.0)
    loss.backward()
    for each in (x, weight, bias):
        assert not each.grad.any()


class _Largest(TorchDispatchMode):
    """Most elements that an operator's result had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        result = func(*args, **(named or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        # Triton's interpreter looks at memory as bytes.
        tensors = [each for each in made if isinstance(each, torch.Tensor)]
        sizes = [each.numel() for each in tensors if each.is_floating_point()]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_no_tensor_exceeds_the_budget(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, size = 60, 8, 300
    allow(10, size, dtype, monkeypatch)
    *values, targets = make(rows, width, size, dtype, True)
    x, weight, bias = (value.requires_grad_() for value in values)
    with _Largest() as plain:
        F.cross_entropy(F.linear(x, weight, bias).float(), targets).backward()
    assert plain.elements == rows * size
    with _Largest() as found:
        vocabulary_loss(x, weight, bias, targets, fused=FUSED)[0].backward()
    assert found.elements == max(10 * size, rows * width, size * width)
    with _Largest() as found, torch.no_grad():
        vocabulary_loss(x, weight, bias, targets, fused=FUSED)
    assert found.elements == 10 * size


def test_what_needs_no_gradient_costs_nothing() -> None:
    x, weight, targets = make(6, 8, 32, torch.float32, False)
    product = 2 * 6 * 8 * 32
    wanted = expected([x, weight, targets], torch.float64)
    for of_x, of_weight in [(False, False), (True, False), (False, True), (True, True)]:
        leaves = [x.clone().requires_grad_(of_x), weight.clone().requires_grad_(of_weight)]
        with FlopCounterMode(display=False) as count:
            loss, _ = vocabulary_loss(*leaves, None, targets, fused=FUSED)
            if of_x or of_weight:
                loss.backward()
        assert count.get_total_flops() == product * (1 + of_x + of_weight)
        for leaf, gradient, needed in zip(leaves, wanted[1:], (of_x, of_weight), strict=True):
            assert (leaf.grad is not None) == needed
            if leaf.grad is not None:
                assert errors([leaf.grad.double()], [gradient])[0] < EXACT
        with FlopCounterMode(display=False) as count, torch.no_grad():
            assert not vocabulary_loss(*leaves, None, targets, fused=FUSED)[0].requires_grad
        assert count.get_total_flops() == product


def test_backward_again_and_twice() -> None:
    x, weight, targets = make(6, 8, 32, torch.float32, False)
    x.requires_grad_()
    loss, _ = vocabulary_loss(x, weight, None, targets, fused=FUSED)
    [first] = torch.autograd.grad(loss, x, retain_graph=True)
    [again] = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(first, again)
    with pytest.raises(NotImplementedError, match="leave out create_graph"):
        torch.autograd.grad(loss * 2, x, create_graph=True)


def test_checkpointing_and_compiling() -> None:
    """Both give the same bits."""
    *values, targets = make(6, 8, 32, torch.float32, True)

    def found(wrap: Any) -> list[Tensor]:
        leaves = [value.clone().requires_grad_() for value in values]
        loss = wrap(lambda *inputs: vocabulary_loss(*inputs, targets, fused=FUSED)[0])(*leaves)
        return [loss, *torch.autograd.grad(loss, leaves)]

    wraps = [lambda f: lambda *a: checkpoint(f, *a, use_reentrant=False)]
    if not FUSED:  # Triton's interpreter cannot be traced
        wraps.append(lambda f: torch.compile(f, backend="aot_eager"))
    for wrap in wraps:
        for one, other in zip(found(wrap), found(lambda f: f), strict=True):
            assert torch.equal(one, other)


def by_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, hits and gradients of rows; the memory around the rows is full of NaN."""
    rows, size = logits.shape
    memory = torch.full((rows + 2 + 4096 // size, size), torch.nan, dtype=logits.dtype)
    place = memory[1 : rows + 1]
    place.copy_(logits)
    losses, hits = torch.full((2, rows), torch.nan)
    BY_ROWS(place, targets, losses, hits, True)
    assert memory[0].isnan().all()
    assert memory[rows + 1 :].isnan().all()
    return losses, hits, place


@pytest.mark.parametrize("size", first_in_ci([13, 5000, 1, 2048], 2))
def test_one_row_reads_and_writes_itself_alone(size: int) -> None:
    logits, targets = torch.randn(1, size) * 4, torch.tensor([size - 1])
    losses, hits, gradient = by_rows(logits, targets)
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, targets)
    loss.backward()
    assert losses.item() == pytest.approx(loss.item(), rel=EXACT)
    assert bool(hits) == (int(logits.argmax()) == size - 1)
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-5, atol=1e-7)


def test_the_first_of_equal_logits_is_the_likeliest() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (90, 50), generator=generator).bfloat16()
    logits[:10] = 0
    targets = torch.randint(50, (90,), generator=generator)
    targets[:10] = torch.arange(10)
    first = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    targets[10:40] = first[10:40]
    hits = by_rows(logits, targets)[1]
    assert torch.equal(hits.bool(), first == targets)
    assert hits[:10].tolist() == [1.0] + [0.0] * 9


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("place", [0, 3000], ids=["target", "other"])
@pytest.mark.parametrize("value", [INF, NAN, -INF], ids=str)
def test_logits_that_are_not_finite(value: float, place: int) -> None:
    logits, targets = torch.randn(3, 4099), torch.zeros(3, dtype=torch.int64)
    whole = by_rows(logits, targets)
    logits[1, place] = value
    losses, _, gradient = by_rows(logits, targets)
    leaf = logits.clone().requires_grad_()
    wanted = F.cross_entropy(leaf, targets, reduction="none")
    wanted.sum().backward()
    assert losses.isfinite().tolist() == wanted.isfinite().tolist()
    assert losses.isfinite()[1] == (value == -INF and place > 0)
    assert torch.equal(gradient[1].isfinite(), leaf.grad[1].isfinite())  # type: ignore[index]
    for row in (0, 2):
        assert losses[row] == whole[0][row]
        assert torch.equal(gradient[row], whole[2][row])
    assert by_rows(torch.full((1, 7), -INF), torch.zeros(1, dtype=torch.int64))[0].isnan()


@pytest.mark.parametrize("target", [-100, -1, 32, 1 << 40])
def test_targets_that_are_no_tokens_are_not_passed_over(target: int) -> None:
    inputs = make(6, 8, 32, torch.float32, False)
    inputs[-1][3] = target
    if FUSED:
        assert all(each.isnan().any() for each in computed(inputs))
    else:
        with pytest.raises(RuntimeError, match=f"index {target} is out of bounds"):
            computed(inputs)


@pytest.mark.parametrize(
    "head", [{"mlm_head": "bert", "bias": True}, {"mlm_head": "linear"}], ids=["bert", "linear"]
)
@pytest.mark.parametrize("embedding_size", [None, 12])
def test_the_model_gives_its_logits_loss(head: dict[str, Any], embedding_size: int | None) -> None:
    config = ModelConfig(vocab_size=50, num_layers=1, hidden_size=24, num_heads=2, ffn_size=40,
                         dropout=0.0, embedding_size=embedding_size, attention_dropout=0.0,
                         **head)  # fmt: skip
    torch.manual_seed(0)
    model = MaskedLanguageModel(config)
    batch = torch.randint(50, (2, 8)), padded(torch.tensor([8, 5]), 8), torch.tensor([0, 3, 11])
    targets = torch.tensor([7, 1, 49])
    logits = model(*batch)
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    if FUSED:
        model.fuse_loss()
    loss, correct = model(*batch, targets=targets)
    assert loss.item() == pytest.approx(wanted.item(), rel=EXACT)
    assert float(correct) == int((logits.argmax(-1) == targets).sum())
    parameters = list(model.parameters())
    for found, other in zip(torch.autograd.grad(loss, parameters, allow_unused=True),
                            torch.autograd.grad(wanted, parameters, allow_unused=True),
                            strict=True):  # fmt: skip
        assert (found is None) == (other is None)
        if found is not None and other is not None:
            torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


@NEEDS_TRITON
@pytest.mark.skipif(FUSED or sys.platform != "linux", reason="ptxas is Linux's")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("size", first_in_ci([50_000, 30_522, 21_128], 2))
def test_compiled_kernel(capability: int, size: int) -> None:
    from benchmarks.tiles import compiled, cross_entropy, found_in

    counts = found_in(compiled(cross_entropy(size), capability))
    assert counts["local stores"] == counts["local loads"] == counts["narrow stores"] == 0
    assert counts["narrow loads"] == 1  # of the target's logit
    # All other accesses are of 16 bytes where rows are multiples of them.
    assert (counts["wide loads"] > 0) == (counts["wide stores"] > 0) == (size % 8 == 0)
