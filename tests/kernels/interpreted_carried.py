"""The fused kernels in Triton's interpreter against float64; run by `test_interpreted.py`.

The interpreter must be asked for before Triton is imported, so this is a process of its own. All
buffers are full of NaN before the kernels write to them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.config.model import ModelConfig
from pipeline.config.train import KernelsConfig
from pipeline.errors import ConfigError
from pipeline.kernels import carried, common_triton, tiles
from pipeline.kernels import carried_triton as launches
from pipeline.kernels.attention import probabilities, raw_scores, weighted_values
from pipeline.kernels.carried import carried_attention, scores_of
from pipeline.kernels.choose import REFERENCE, Choice, Windows, choose
from pipeline.kernels.tiles import (
    KERNELS,
    Kernel,
    Shape,
    Target,
    Tile,
    candidates,
    fixed,
    tile_of,
)
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import rotary_tables, run_layer
from pipeline.model.layout import Layout, packed, padded, rows
from tests.support import kernel_checks
from tests.support.grids import first_in_ci
from tests.support.kernel_checks import checkpoint_ways, kept_by_rule

EXACT = 2e-6  # relative Frobenius error of fp32 kernels
OPERATOR: Any = torch.ops.postnorm.carried_attention
torch.set_num_threads(1)  # matrices are so small that threads only wait for each other


@pytest.fixture(autouse=True)
def _buffers_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_checks.fill_buffers_with_nan(carried, monkeypatch)


@pytest.fixture(params=["window", "tiles"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Either way of the backward pass over a window of at most a tile."""
    if request.param == "window":  # what the interpreter takes
        yield "window"
        return
    with fixed("backward_window", None):
        yield "tiles"


def windows_of(layout: Layout) -> Windows:
    found = layout.windows()
    assert found is not None
    return found


def ends(*lengths: int) -> Layout:
    return packed(torch.tensor([0, *lengths]).cumsum(0), max(lengths), sum(lengths))


def padding(num_slots: int, *lengths: int) -> Layout:
    return padded(torch.tensor(lengths), num_slots)


def documents(*lengths_of_rows: tuple[int, ...]) -> Layout:
    lengths = map(torch.tensor, lengths_of_rows)
    numbers = torch.stack([torch.arange(len(e)).repeat_interleave(e) for e in lengths])
    return rows(numbers, torch.zeros_like(numbers))


def seen(windows: Windows) -> Tensor:
    """(T, T) bool, from the queries' side of the spans."""
    keys = torch.arange(len(windows.spans))
    return (keys >= windows.spans[:, :1]) & (keys < windows.spans[:, 1:2])


def by_column(windows: Windows, width: int) -> tuple[Tensor, Tensor]:
    """(T, W) number of the token that a column of scores stands for, and whether it is seen."""
    start = torch.repeat_interleave(windows.bounds[:-1], windows.bounds.diff())
    columns = (start[:, None] + torch.arange(width)).long()
    is_token = columns < windows.bounds[-1]
    columns = columns.clamp(max=int(windows.bounds[-1]) - 1)
    return columns, torch.gather(seen(windows), 1, columns) & is_token


@dataclass
class Chain:
    """Layers of attention, a loss on all outputs and on the last scores, and its gradients."""

    outputs: list[Tensor]
    scores: Tensor  # (N, T, T), 0 where not seen
    gradients: list[Tensor]  # of all queries, then keys, then values


def make(layers: int, tokens: int, heads: int, size: int, spread: float = 1.0) -> list[Tensor]:
    """q, k and v, each (L, T, N, H) float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (layers, tokens, heads, size)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return [q * spread, k, v]


def directions(like: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    layers, tokens, heads, size = like.shape
    out = torch.randn((layers, tokens, heads, size), generator=generator, dtype=torch.float64)
    return out, torch.randn((heads, tokens, tokens), generator=generator, dtype=torch.float64)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By complex numbers: a pair is one, and turns by another."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    turns = torch.complex(cos.double(), sin.double())[:, None]
    return torch.view_as_real(pairs * turns).flatten(-2)


def expected(inputs: list[Tensor], windows: Windows, *, mean: bool = False,
             kept: Tensor | None = None, dropout: float = 0.0,
             angles: tuple[Tensor, Tensor] | None = None,
             token_scale: Tensor | None = None) -> Chain:  # fmt: skip
    """In float64; `kept` (L, N, T, T) is dropout's mask."""
    leaves = [each.double().clone().requires_grad_() for each in inputs]
    allowed, outputs = seen(windows), []
    scores = torch.zeros(())
    for number, (q, k, v) in enumerate(zip(*leaves, strict=True)):
        if angles is not None:
            q, k = turned(q, *angles), turned(k, *angles)
        if token_scale is not None:
            q = q * token_scale.double()[:, None, None]
        scores = scores + torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
        logits = scores / (number + 1 if mean else 1)
        share = torch.softmax(logits.masked_fill(~allowed, -1e300), -1) * allowed
        if kept is not None:
            share = share * kept[number] / (1 - dropout)
        outputs.append(torch.einsum("nqk,knh->qnh", share, v))
    on_out, on_scores = directions(leaves[0])
    loss = sum((o * d).sum() for o, d in zip(outputs, on_out, strict=True))
    loss = loss + (scores * allowed * on_scores).sum()
    found = torch.autograd.grad(loss, leaves)
    return Chain([o.detach() for o in outputs], scores.detach() * allowed, list(found))


def computed(inputs: list[Tensor], windows: Windows, dtype: torch.dtype, *, mean: bool = False,
             compact: bool | None = None, loss_scale: float = 1.0, dropout: float = 0.0,
             angles: tuple[Tensor, Tensor] | None = None,
             token_scale: Tensor | None = None) -> Chain:  # fmt: skip
    leaves = [each.to(dtype).clone().requires_grad_() for each in inputs]
    outputs, carry = [], None
    scale = inputs[0].shape[-1] ** -0.5
    cos, sin = angles or (None, None)
    for number, qkv in enumerate(torch.stack(leaves, 2)):
        num_summed = number + 1 if mean else 1
        seed = torch.tensor([SEED + number]) if dropout else None
        if compact is None:
            compact = dtype != torch.float32
        out, carry, *_ = OPERATOR(qkv, carry, windows.spans, windows.bounds, cos, sin, token_scale,
                                  seed, torch.tensor(float(num_summed)), windows.longest, scale,
                                  dropout, compact)  # fmt: skip
        outputs.append(out)
    assert carry is not None
    on_out, on_scores = directions(leaves[0])
    columns, there = by_column(windows, carry.shape[-1])
    on_carry = torch.gather(on_scores, 2, columns.expand(len(on_scores), -1, -1)) * there
    # What no one sees has no gradient, whatever is handed down: NaN here.
    on_carry = on_carry.masked_fill(~there, torch.nan)
    grads = [loss_scale * d.to(dtype) for d in on_out]
    found = torch.autograd.grad(
        [*outputs, carry], leaves, [*grads, (loss_scale * on_carry).to(carry.dtype)]
    )
    scores = torch.zeros(on_scores.shape, dtype=torch.float64)
    values = scores_of(carry).double().masked_fill(~there, 0.0)
    scores = scores.scatter_add(2, columns.expand(len(scores), -1, -1), values)
    return Chain(
        [o.detach().double() for o in outputs], scores, [g.double() / loss_scale for g in found]
    )


def plain(inputs: list[Tensor], windows: Windows) -> Chain:
    """With bf16 matrix products and fp32 scores, in PyTorch."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    allowed, outputs, carry = seen(windows), [], None
    for q, k, v in zip(*leaves, strict=True):
        q, k, v = (each.transpose(0, 1) for each in (q * q.shape[-1] ** -0.5, k, v))
        carry = raw_scores(q, k, carry)
        share = probabilities(carry, allowed, 1).masked_fill(~allowed, 0.0)
        outputs.append(weighted_values(share, v, 0.0).transpose(0, 1))
    on_out, on_scores = directions(leaves[0])
    grads = [*(d.bfloat16() for d in on_out), (on_scores * allowed).float()]
    found = torch.autograd.grad([*outputs, carry], leaves, grads)  # type: ignore[list-item]
    scores = carry.detach().double() * allowed  # type: ignore[union-attr]
    return Chain([o.detach().double() for o in outputs], scores, [g.double() for g in found])


SEED = 1234567890123


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def errors(found: Chain, wanted: Chain) -> tuple[float, float, float]:
    """Of outputs, scores and gradients, the largest."""
    return (
        max(error(f, w) for f, w in zip(found.outputs, wanted.outputs, strict=True)),
        error(found.scores, wanted.scores),
        max(error(f, w) for f, w in zip(found.gradients, wanted.gradients, strict=True)),
    )


def assert_all(found: tuple[float, ...], tolerance: float) -> None:
    assert all(each <= tolerance for each in found), found  # max would pass over a NaN


def assert_exact(
    inputs: list[Tensor], windows: Windows, kept: Tensor | None = None, **options: Any
) -> None:
    found = computed(inputs, windows, torch.float32, **options)
    assert_all(errors(found, expected(inputs, windows, kept=kept, **options)), EXACT)


LAYOUTS = {
    "documents beyond a tile": lambda: documents((70, 60, 5)),
    "padded": lambda: padding(40, 40, 7, 33), "lengths 1 to 128": lambda: ends(5, 77, 128, 33, 1),
    "documents of rows": lambda: documents((5, 20, 7), (32,)),
    "beyond a tile": lambda: ends(130, 3), "padded beyond a tile": lambda: padding(140, 140, 20),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mean"),
    first_in_ci([
        ("documents beyond a tile", True), ("padded", True), *((name, False) for name in LAYOUTS),
    ]),
)  # fmt: skip
def test_fp32(name: str, mean: bool) -> None:
    windows = windows_of(LAYOUTS[name]())
    assert_exact(make(3, len(windows.spans), 2, 32), windows, mean=mean)


@pytest.mark.parametrize("mean", [False, True])
def test_four_layers_on_either_path(mean: bool, path: str) -> None:
    windows = windows_of(ends(9, 20))
    assert_exact(make(4, 29, 2, 32), windows, mean=mean)


def test_sequence_that_sees_nothing(path: str) -> None:
    layout = padding(20, 20, 9)
    assert layout.spans is not None
    layout.spans[20:] = 0
    windows = windows_of(layout)
    inputs = make(3, 40, 2, 32)
    found, wanted = computed(inputs, windows, torch.float32), expected(inputs, windows)
    assert_all(errors(found, wanted), EXACT)
    assert all(float(out[20:].abs().max()) == 0 for out in found.outputs)
    assert all(float(grad[:, 20:].abs().max()) == 0 for grad in found.gradients)


def angles_of(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """(T, H / 2) fp32 tables."""
    cos, sin = rotary_tables(torch.arange(tokens) % 50, size, 100.0, torch.float32)
    return cos[:, 0], sin[:, 0]


@pytest.mark.parametrize(
    ("name", "is_one_alone"),
    first_in_ci([("padded", False), ("padded", True), ("beyond a tile", False)], 2),
)
def test_positions_and_scales_of_queries(name: str, is_one_alone: bool, path: str) -> None:
    if path == "window" and name == "beyond a tile":
        pytest.skip("a window is one tile")
    windows = windows_of(LAYOUTS[name]())
    num_tokens = len(windows.spans)
    inputs = make(3, num_tokens, 2, 32)
    both = angles_of(num_tokens, 32), torch.rand(num_tokens)
    for angles, scales in [(both[0], None), (None, both[1])] if is_one_alone else [both]:
        assert_exact(inputs, windows, angles=angles, token_scale=scales)


@pytest.mark.parametrize(
    ("size", "length"), first_in_ci([(128, 130), (64, 20), (64, 130), (128, 20)])
)
def test_head_sizes(size: int, length: int) -> None:
    assert_exact(make(2, length, 1, size), windows_of(ends(length)))


@pytest.mark.parametrize("length", [140, 60])
def test_bf16_stays_within_its_floor(length: int) -> None:
    windows = windows_of(padding(length, length, 33))
    inputs = [each.bfloat16() for each in make(3, 2 * length, 1, 32)]
    wanted = expected(inputs, windows)
    found = errors(computed(inputs, windows, torch.bfloat16), wanted)
    floor = errors(plain(inputs, windows), wanted)
    print(length, found, floor)
    for mine, of_plain in zip(found, floor, strict=True):
        assert mine <= of_plain <= 5e-3


def test_narrow_storage_does_not_underflow() -> None:
    windows = windows_of(ends(60, 30))
    inputs = make(3, 90, 1, 32)
    wanted = expected(inputs, windows)
    found = [
        errors(computed(inputs, windows, torch.float32, compact=True, loss_scale=scale), wanted)
        for scale in (1.0, 1e-5, 1e-8)
    ]
    print(found)
    for out, scores, gradients in found:
        assert out <= 1e-3
        assert scores <= 5e-4  # fp16: 2^-11 at most
        assert gradients <= 3e-3  # bf16: 2^-9 at most
    # As good at any scale.
    assert max(each[2] for each in found) <= 1.1 * min(each[2] for each in found)


def test_scores_saturate(path: str) -> None:
    windows = windows_of(ends(30, 12))
    found = computed(make(3, 42, 2, 32, spread=4e4), windows, torch.bfloat16)
    assert float(found.scores.abs().max()) == 65504
    assert all(bool(each.isfinite().all()) for each in [*found.outputs, *found.gradients])


def packed_inputs(tokens: int) -> Tensor:
    """(T, 3, 1, 32) fp32."""
    inputs = make(1, tokens, 1, 32)
    return torch.stack([each[0].float() for each in inputs], 1).requires_grad_()


def test_gradients_of_several_users_add_up() -> None:
    windows = windows_of(ends(20))
    qkv = packed_inputs(20)
    nothing = [None] * 4
    _, carry, *_ = OPERATOR(
        qkv, None, windows.spans, windows.bounds, *nothing, torch.ones(()), 20, 1.0, 0.0, True
    )
    given = torch.full_like(carry, 1e-6)
    [once] = torch.autograd.grad(carry, qkv, given, retain_graph=True)
    [twice] = torch.autograd.grad([carry, carry], qkv, [given, given])
    assert float(once.abs().sum()) > 0
    torch.testing.assert_close(twice, 2 * once)


def kept_by_head(seed: int, tokens: int, heads: int, dropout: float) -> np.ndarray:
    """(N, T, T) by column."""
    return np.stack([kept_by_rule(seed, tokens, tokens, dropout, head) for head in range(heads)])


@pytest.mark.parametrize("length", first_in_ci([24, 130]))
def test_dropout_is_what_its_seed_says(length: int) -> None:
    windows = windows_of(ends(length))
    heads = 2 if length < 100 else 1
    inputs = make(2, length, heads, 32)
    masks = [torch.from_numpy(kept_by_head(SEED + n, length, heads, 0.25)) for n in range(2)]
    assert_exact(inputs, windows, torch.stack(masks), dropout=0.25)


# Each tile that any GPU may take, once; the window's for the length of its own.
TILES = sorted({
    (kernel, tile)
    for kernel in KERNELS
    for capability, drops, width in product(((8, 0), (9, 0), (10, 0)), (False, True), (128, 256))
    for tile in candidates(kernel, Shape(width, 32, drops), Target(capability))
    if tile is not None
}, key=lambda one: (-one[1].warps, one[1].queries, one))  # fmt: skip
# What the interpreter does not take by itself: blocks of queries in a window, and half the keys.
FIRST = [("backward_window", Tile(32, 128, 8, 2)), ("backward_keys", Tile(64, 32, 4, 2))]


@pytest.mark.parametrize(
    ("kernel", "tile"), first_in_ci([*FIRST, *(one for one in TILES if one not in FIRST)], 2)
)
def test_each_tile_gives_the_same(kernel: Kernel, tile: Tile) -> None:
    # Of two windows, one not a multiple of blocks; dropout counts columns from its start.
    length = 70 if kernel == "backward_window" else 130
    windows, masks = windows_of(ends(length)), kept_by_head(SEED, length, 1, 0.25)
    inputs, kept = make(1, length, 1, 32), torch.from_numpy(masks)[None]
    with fixed("backward_window", None), fixed(kernel, tile):
        assert_exact(inputs, windows, kept, dropout=0.25)
        assert_exact(inputs, windows, mean=True)


def test_tiles_that_were_measured_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiles, "TABLE", tmp_path / "tiles.json")
    gpu, shape = Target((9, 0), "a GPU, torch 2, Triton 3"), Shape(512, 64, False)
    first, second, *_ = candidates("forward", shape, gpu)
    assert tile_of("forward", shape, gpu) == first
    rows = {
        shape.key("forward"): {"tile": second},
        Shape(128, 64, True).key("backward_window"): {"tile": None},
        # Of an older revision: not offered any more.
        shape.key("backward_keys"): {"tile": [8, 8, 1, 1]},
    }
    tiles.write_table(gpu.name, rows)
    tiles.write_table("another GPU", {})
    assert tile_of("forward", shape, gpu) == second
    # All windows of several tiles are alike; other switches and GPUs are not.
    assert tile_of("forward", Shape(1024, 64, False), gpu) == second
    assert tile_of("forward", Shape(512, 64, True), gpu) == first
    assert tile_of("forward", shape, Target((9, 0), "another GPU")) == first
    assert tile_of("backward_window", Shape(128, 64, True), gpu) is None
    assert tile_of("backward_keys", shape, gpu) == candidates("backward_keys", shape, gpu)[0]
    tiles._fastest.cache_clear()


def test_dropout_looks_random() -> None:
    kept = np.stack([kept_by_head(SEED + n, 128, 2, 0.1) for n in range(2)]).astype(float)
    # 65,536 draws: the deviation of their mean is 0.0012.
    assert kept.mean() == pytest.approx(0.9, abs=0.005)
    kernel_checks.assert_neighbours_are_independent(kept)
    # Rows and columns keep as many as independent draws do: deviation 0.3 / sqrt(128).
    for axis in (2, 3):
        assert kept.mean(axis).std() == pytest.approx(0.3 / np.sqrt(128), rel=0.15)


@pytest.mark.parametrize("is_whole", first_in_ci([True, False]))
def test_the_operator_is_registered_as_torch_wants_it(is_whole: bool) -> None:
    qkv, windows = packed_inputs(16), windows_of(ends(16))
    given, numbers = (windows.spans, windows.bounds), (torch.ones(()), 16, 0.2, 0.0, False)
    carry, tables, scales = None, (None, None), None
    if is_whole:
        carry = torch.randn(1, 16, 16, requires_grad=True)
        tables, scales = angles_of(16, 32), torch.rand(16)
    torch.library.opcheck(OPERATOR, (qkv, carry, *given, *tables, scales, None, *numbers))


def _layers(inputs: list[Tensor], windows: Windows, wrap: Callable[..., Any]) -> Tensor:
    total, carry = torch.zeros(()), None
    for number, qkv in enumerate(torch.stack(inputs, 2)):

        def layer(qkv: Tensor, carry: Tensor | None, number: int = number) -> tuple[Tensor, Tensor]:
            return carried_attention(
                qkv * 1.5,
                carry,
                windows,
                scale=0.2,
                num_summed=torch.tensor(number + 1.0),
                dropout=0.2,
            )

        out, carry = wrap(layer, qkv, carry)
        total = total + (out * out).sum()
    return total


def test_checkpointing_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = launches.forward
    monkeypatch.setattr(launches, "forward", lambda *a: calls.append(1) or original(*a))
    windows = windows_of(ends(9, 3))
    found = {}
    for name, (wrap, calls_each) in checkpoint_ways(OPERATOR.default).items():
        torch.manual_seed(0)
        leaves = [each.float().requires_grad_() for each in make(2, 12, 1, 32)]
        calls.clear()
        _layers(leaves, windows, wrap).backward()
        assert len(calls) == 2 * calls_each, name
        found[name] = [each.grad for each in leaves]
    kernel_checks.assert_all_bits_are_the_same(found)


CONFIG = ModelConfig(vocab_size=50, num_layers=3, hidden_size=64, num_heads=2, ffn_size=40,
                     init="unit", dropout=0.0, attention_dropout=0.0,
                     score_residual="sum")  # fmt: skip


def _model(**changes: Any) -> MaskedLanguageModel:
    torch.manual_seed(0)
    return MaskedLanguageModel(ModelConfig(**{**vars(CONFIG), **changes}))


def results(model: MaskedLanguageModel, layout: Layout, alpha: float = 0.8) -> list[Tensor]:
    """Logits, and the gradients of all weights that have one."""
    torch.manual_seed(3)
    ids = torch.randint(0, 50, layout.positions.shape)
    model.encoder.set_alpha(alpha)
    logits = model(ids, layout, torch.arange(0, ids.numel(), 3))
    loss = torch.nn.functional.cross_entropy(logits.double(), torch.arange(len(logits)) % 50)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [logits.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize(
    ("changes", "layout"),
    first_in_ci([
        ({}, lambda: documents((5, 9, 2), (16,))),
        ({"attention_scale": "entropy_invariant"}, lambda: ends(5, 9, 2)),
        ({"score_residual": "mean"}, lambda: padding(16, 16, 5)),
        ({"num_heads": 1, "share_layers": True}, lambda: ends(131)),
    ], 2),
)  # fmt: skip
def test_the_model_is_the_same(changes: dict[str, Any], layout: Callable[[], Layout]) -> None:
    model = _model(**changes)
    wanted = results(model, layout())
    model.encoder.fuse_attention()
    found = results(model, layout())
    assert not torch.equal(found[0], wanted[0])  # it was another computation
    assert all(error(one, other) <= 2e-5 for one, other in zip(found, wanted, strict=True))


def test_a_compiled_layer_is_one_graph() -> None:
    """The first layer and all others, each of which divides by another number."""
    model = _model(score_residual="mean")
    model.encoder.fuse_attention()
    layout = documents((5, 9, 2), (16,))
    wanted = results(model, layout)
    torch._dynamo.reset()
    counters.clear()
    model.encoder.run_layers_by(torch.compile(run_layer, backend="aot_eager", fullgraph=True))
    for one, other in zip(results(model, layout), wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    ("dtype", "size", "said"), [(torch.float64, 32, "float64"), (torch.float32, 24, "have 24")]
)
def test_what_the_kernels_cannot_take(dtype: torch.dtype, size: int, said: str) -> None:
    qkv = torch.zeros(4, 3, 1, size, dtype=dtype)
    with pytest.raises(ConfigError, match=said):
        carried_attention(qkv, None, windows_of(ends(4)), scale=1.0, num_summed=torch.ones(()))


def test_a_triton_that_fails_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    config = ModelConfig(**{**vars(CONFIG), "num_heads": 1})
    assert choose(KernelsConfig(), config, "bf16", cpu) == Choice(True, True, True)

    def fail(_: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nmore of it")

    monkeypatch.setattr(common_triton, "try_triton", fail)
    assert choose(KernelsConfig(), config, "bf16", cpu) == REFERENCE
    with pytest.raises(ConfigError, match=r"here: RuntimeError: Failed to find C compiler\.;"):
        choose(KernelsConfig(loss="fused"), config, "bf16", cpu)
