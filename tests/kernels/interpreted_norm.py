"""Residual and RMSNorm in one pass, interpreted, against float64; run by `test_interpreted.py`.

A process of its own: the interpreter must be asked for before Triton is imported. All buffers are
full of NaN before the kernels write to them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError
from pipeline.kernels import norm as operator
from pipeline.kernels import rows_triton as kernels
from pipeline.kernels.choose import Choice
from pipeline.kernels.norm import residual_norm
from pipeline.model.compiled import CompiledLayer
from pipeline.model.cost import TrainingPass
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import Residual, RMSNorm, run_layer
from pipeline.model.layout import Layout, packed, padded, rows
from pipeline.objectives.activations import activation_bytes
from tests.kernels.interpreted_carried import EXACT, SEED, error, results
from tests.model.test_checkpointing import BATCH, NUM_MASKED, SEQ_LEN, alive_bytes
from tests.model.test_checkpointing import CONFIG as CHECKPOINTED
from tests.objectives.test_activations import MASKED_SHARE, kept_by_step
from tests.objectives.test_activations import SEQ_LEN as SLOTS_OF_STEP
from tests.support import kernel_checks
from tests.support.grids import first_in_ci
from tests.support.kernel_checks import checkpoint_ways, kept_by_rule

EPS = 1e-12
DEEPNORM = 24**0.25
OPERATOR: Any = torch.ops.postnorm.residual_norm


@pytest.fixture(autouse=True)
def _buffers_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_checks.fill_buffers_with_nan(operator, monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, update and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return [each.to(dtype) for each in drawn]


Results = list[Tensor]  # y, and the gradients of x and of the update


def results_of(join: Callable[[Tensor, Tensor], Tensor], drawn: list[Tensor]) -> Results:
    x, update, given = drawn
    x, update = x.clone().requires_grad_(), update.clone().requires_grad_()
    y = join(x, update)
    return [y.detach(), *torch.autograd.grad(y, [x, update], given)]


def expected(drawn: list[Tensor], alpha: float, keep: float, eps: float = EPS,
             factor: Tensor | float = 1.0) -> Results:  # fmt: skip
    """In float64; `factor` is dropout's."""

    def join(x: Tensor, update: Tensor) -> Tensor:
        joined = keep * x + alpha * factor * update
        return joined / (joined.square().mean(-1, keepdim=True) + eps).sqrt()

    return results_of(join, [each.double() for each in drawn])


def computed(
    drawn: list[Tensor], alpha: float, keep: float, eps: float = EPS, dropout: float = 0.0
) -> Results:
    more = torch.tensor(alpha), torch.tensor([SEED]) if dropout else None, keep, dropout, eps
    return results_of(lambda x, update: OPERATOR(x, update, *more)[0], drawn)


def plain(x: Tensor, update: Tensor, alpha: float, keep: float = 1.0) -> Tensor:
    """What the model does without the kernel."""
    residual = Residual(ModelConfig(dropout=0.0))
    residual.keep = keep
    wide = torch.promote_types(x.dtype, torch.float32)
    joined = residual(x, update, torch.tensor(alpha, dtype=wide))
    return RMSNorm(x.shape[-1], EPS, affine=False)(joined)


def rounded(alpha: float) -> float:
    return float(torch.tensor(alpha))


CASES = list(product([0.3, 1.0], [1.0, DEEPNORM]))


@pytest.mark.parametrize(
    ("tokens", "size"), first_in_ci([(1, 40), (7, 768), (33, 40), (1, 384), (2, 8), (3, 4096)], 2)
)
def test_fp32(tokens: int, size: int) -> None:
    drawn = draw(tokens, size, dtype=torch.float32)
    for alpha, keep in CASES:
        found = computed(drawn, alpha, keep)
        wanted = expected(drawn, rounded(alpha), keep)
        got = [error(f, w) for f, w in zip(found, wanted, strict=True)]
        assert all(each <= EXACT for each in got), (alpha, keep, got)


def test_large_eps_is_differentiated_exactly() -> None:
    # As large as the mean square: mean(y^2) is 1/3.
    drawn = draw(2, 9, 40, dtype=torch.float32)
    found, wanted = computed(drawn, 1.0, 1.0, eps=4.0), expected(drawn, 1.0, 1.0, eps=4.0)
    assert 0.2 < float(wanted[0].square().mean()) < 0.5
    assert all(error(f, w) <= EXACT for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("size", first_in_ci([768, 40]))
def test_bf16_is_nearer_than_plain_pytorch(size: int) -> None:
    drawn = draw(9, size, dtype=torch.bfloat16)
    for alpha, keep in CASES:
        wanted = expected(drawn, rounded(alpha), keep)
        found = [error(f, w) for f, w in zip(computed(drawn, alpha, keep), wanted, strict=True)]
        of_model = results_of(partial(plain, alpha=alpha, keep=keep), drawn)
        floor = [error(f, w) for f, w in zip(of_model, wanted, strict=True)]
        for mine, of_plain in zip(found, floor, strict=True):
            # Rounded once: at most 2^-9 of each value.
            assert mine <= min(of_plain, 2**-9), (alpha, keep, found, floor)


def test_chain_of_layers_in_bf16_is_nearer_than_plain_pytorch() -> None:
    """Four sub-layers with weights and relu, dropout off: the error that a model sees."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(64, 64, generator=generator).bfloat16() / 8 for _ in range(4)]
    x, given, _ = draw(50, 64, dtype=torch.bfloat16)
    fused = partial(residual_norm, alpha=torch.tensor(0.7), keep=1.0, dropout=0.0, eps=EPS)
    reference = partial(plain, alpha=rounded(0.7))

    def chain(join: Callable[..., Tensor], dtype: torch.dtype) -> Results:
        leaves = [leaf.to(dtype).requires_grad_() for leaf in (x.clone(), *weights)]
        hidden = leaves[0]
        for weight in leaves[1:]:
            hidden = join(hidden, torch.relu(hidden @ weight))
        return [hidden, *torch.autograd.grad(hidden, leaves, given.to(dtype))]

    wanted = chain(reference, torch.float64)
    found = [error(f, w) for f, w in zip(chain(fused, x.dtype), wanted, strict=True)]
    floor = [error(f, w) for f, w in zip(chain(reference, x.dtype), wanted, strict=True)]
    assert all(mine <= of_plain for mine, of_plain in zip(found, floor, strict=True))


def test_shapes_and_strides() -> None:
    x, update, given = draw(3, 5, 48, dtype=torch.float32)
    flat = computed([each.flatten(0, 1) for each in (x, update, given)], 0.3, 1.0)
    swapped = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in (x, update, given)]
    for drawn in ([x, update, given], swapped):
        for found, wanted in zip(computed(drawn, 0.3, 1.0), flat, strict=True):
            assert torch.equal(found, wanted.view(3, 5, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alpha_zero_is_the_identity_to_the_bit(dtype: torch.dtype) -> None:
    x, update, given = draw(7, 40, dtype=dtype)
    x[0, :4] = torch.tensor([-0.0, 1e-40, torch.inf, torch.nan])
    x[1], update[2], update[3, 5] = 0.0, torch.nan, -torch.inf  # 1 / rms is 1e6, NaN and 0
    for dropout in (0.0, 0.5):
        y, d_x, d_update = computed([x, update, given], 0.0, DEEPNORM, dropout=dropout)
        whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
        assert torch.equal(y.view(whole), x.view(whole))
        assert torch.equal(d_x.view(whole), given.view(whole))
        assert not d_update.any()


@pytest.mark.parametrize(
    ("bad", "dropout"),
    first_in_ci([
        (torch.nan, 0.5), (torch.inf, 0.0), (-torch.inf, 0.5), (torch.nan, 0.0), (torch.inf, 0.5),
        (-torch.inf, 0.0),
    ], 2),
)  # fmt: skip
def test_what_is_not_finite_is_seen(bad: float, dropout: float) -> None:
    dropped = (~torch.from_numpy(kept_by_rule(SEED, 3, 40, 0.5)[1])).nonzero()
    column = int(dropped[0])  # even where dropout drops it
    good = computed(draw(3, 40, dtype=torch.float32), 0.3, 1.0, dropout=dropout)
    for which in range(3):
        drawn = draw(3, 40, dtype=torch.float32)
        drawn[which][1, column] = bad
        found = computed(drawn, 0.3, 1.0, dropout=dropout)
        for each, other in zip(found, good, strict=True):
            is_its_gradient = which == 2 and each is found[0]
            assert bool(each[1].isfinite().all()) == is_its_gradient
            assert torch.equal(each[[0, 2]], other[[0, 2]])


@pytest.mark.parametrize(
    ("alpha", "size"), first_in_ci([(0.3, 768), (1.0, 40), (0.3, 40), (1.0, 768)], 2)
)
def test_dropout_is_what_its_seed_says(alpha: float, size: int) -> None:
    drawn = draw(9, size, dtype=torch.float32)
    factor = torch.from_numpy(kept_by_rule(SEED, 9, size, 0.25)) / 0.75
    found = computed(drawn, alpha, DEEPNORM, dropout=0.25)
    wanted = expected(drawn, rounded(alpha), DEEPNORM, factor=factor)
    got = [error(f, w) for f, w in zip(found, wanted, strict=True)]
    assert all(each <= EXACT for each in got), got


def _kept(seed: int, tokens: int, size: int, dropout: float) -> Tensor:
    """The mask, from the results alone; the same forwards and backwards."""
    x, update = torch.zeros(tokens, size, requires_grad=True), torch.ones(tokens, size)
    update.requires_grad_()
    y, _ = OPERATOR(x, update, torch.ones(()), torch.tensor([seed]), 1.0, dropout, EPS)
    [d_update] = torch.autograd.grad(y, update, torch.randn(tokens, size))
    assert torch.equal(y != 0, d_update != 0)
    return y.detach() != 0


def test_dropout_depends_on_the_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _kept(SEED, 20, 96, 0.3)
    monkeypatch.setattr(kernels, "_BLOCK", 128)  # a row a program, not 16
    assert torch.equal(_kept(SEED, 20, 96, 0.3), kept)
    assert torch.equal(_kept(SEED, 20, 40, 0.3), kept[:, :40])
    assert torch.equal(_kept(SEED, 7, 96, 0.3), kept[:7])


@pytest.mark.slow
def test_dropout_looks_random() -> None:
    kept = np.stack([_kept(SEED + n, 64, 768, 0.1).double().numpy() for n in range(2)])
    # 98,304 draws: the deviation of their mean is 0.3 / sqrt(98,304) = 0.00096.
    assert kept.mean() == pytest.approx(0.9, abs=5 * 0.00096)
    kernel_checks.assert_neighbours_are_independent(kept)
    # Tokens and columns keep as many as independent draws do.
    assert kept.mean(2).std() == pytest.approx(0.3 / np.sqrt(768), rel=0.2)
    assert kept.mean((0, 1)).std() == pytest.approx(0.3 / np.sqrt(128), rel=0.2)


@pytest.mark.parametrize(("alpha", "dropout"), first_in_ci([(0.5, 0.25), (1.0, 0.0)]))
def test_the_operator_is_registered_as_torch_wants_it(alpha: float, dropout: float) -> None:
    x, update, _ = draw(3, 5, 40, dtype=torch.float32)
    x, update = x.clone().requires_grad_(), update.clone().requires_grad_()
    seed = torch.tensor([SEED]) if dropout else None
    torch.library.opcheck(OPERATOR, (x, update, torch.tensor(alpha), seed, 1.5, dropout, EPS))


def test_checkpointing_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *a: calls.append(1) or original(*a))

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return residual_norm(x, x @ weight, torch.tensor(0.4), keep=1.0, dropout=0.3, eps=EPS)

    found = {}
    for name, (wrap, calls_each) in checkpoint_ways(OPERATOR.default).items():
        torch.manual_seed(0)
        leaves = [each.requires_grad_() for each in torch.randn(5, 16, 16)]
        calls.clear()
        hidden, after = leaves[0], torch.zeros(())
        for weight in leaves[1:]:
            hidden = wrap(layer, hidden, weight)
        after = torch.rand(2)
        hidden.pow(3).sum().backward()
        assert len(calls) == 4 * calls_each, name
        found[name] = [after, *(each.grad for each in leaves)]
    kernel_checks.assert_all_bits_are_the_same(found)


CONFIG = ModelConfig(vocab_size=50, num_layers=4, hidden_size=40, num_heads=2, ffn_size=40,
                     dropout=0.0, attention_dropout=0.0)  # fmt: skip


def _model(config: ModelConfig, *, fused: bool) -> MaskedLanguageModel:
    torch.manual_seed(0)
    model = MaskedLanguageModel(config)
    if fused:
        model.encoder.fuse_residual_norms()
    return model


def _layouts() -> dict[str, Layout]:
    documents = torch.arange(16).ge(9).int().expand(2, -1)
    return {
        "rows": rows(documents, torch.arange(16).expand(2, -1)),
        "padded": padded(torch.tensor([16, 5]), 16),
        "packed": packed(torch.tensor([0, 5, 14, 16]), 9, 16),
    }


@pytest.mark.parametrize(
    ("residual", "layout"),
    first_in_ci(product(("plain", "deepnorm"), ("rows", "packed", "padded")), 2),
)
def test_the_model_is_the_same(residual: str, layout: str) -> None:
    config = replace(CONFIG, residual=residual)  # type: ignore[arg-type]
    for alpha in (1.0, 0.0, 0.3):
        wanted = results(_model(config, fused=False), _layouts()[layout], alpha)
        found = results(_model(config, fused=True), _layouts()[layout], alpha)
        if alpha == 0.0:
            assert torch.equal(found[0], wanted[0])
        else:
            assert not torch.equal(found[0], wanted[0])  # it was another computation
        for one, other in zip(found, wanted, strict=True):
            if other.any():
                assert error(one, other) <= 2e-5
            else:
                assert not one.any()


def test_evaluation_drops_nothing() -> None:
    config, layout = replace(CONFIG, dropout=0.5), _layouts()["rows"]
    fused, reference = _model(config, fused=True).eval(), _model(config, fused=False).eval()
    wanted = results(reference, layout, 0.3)[0]
    assert error(results(fused, layout, 0.3)[0], wanted) <= 2e-5
    assert error(results(fused.train(), layout, 0.3)[0], wanted) > 0.1


@pytest.mark.slow  # by day: how often `CompiledLayer` compiles
@pytest.mark.usefixtures("processes")  # Inductor's
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_is_one_graph(backend: str) -> None:
    config, layout = replace(CONFIG, dropout=0.2), _layouts()["rows"]
    model = _model(config, fused=True)
    model.encoder.run_layers_by(torch.compile(run_layer, backend=backend, fullgraph=True))
    assert torch.equal(*[results(model, layout, 0.3)[0] for _ in range(2)])
    model.eval()
    found = results(model, layout, 0.3)
    model.encoder.run_layers_by(run_layer)
    for one, other in zip(found, results(model, layout, 0.3), strict=True):
        torch.testing.assert_close(one, other)


def test_lengths_and_alphas_do_not_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = _model(replace(CONFIG, dropout=0.2), fused=True)
    model.encoder.run_layers_by(CompiledLayer())
    for num_tokens, alpha in ((12, 0.0), (16, 0.3), (29, 0.6), (40, 1.0)):
        results(model, packed(torch.tensor([0, 5, num_tokens]), num_tokens - 5, num_tokens), alpha)
    assert len(graphs) <= 2, len(graphs)  # the second length makes the row length symbolic


@pytest.mark.parametrize("group_size", first_in_ci([3, 1]))
def test_checkpointed_layers_of_a_model_have_the_same_bits(group_size: int) -> None:
    config, layout = replace(CONFIG, dropout=0.2), _layouts()["packed"]
    wanted = results(_model(config, fused=True), layout, 0.3)
    model = _model(config, fused=True)
    model.encoder.checkpoint_activations(group_size)
    for one, other in zip(results(model, layout, 0.3), wanted, strict=True):
        assert torch.equal(one, other)


COSTS: dict[str, dict[str, Any]] = {
    "v2": {"score_residual": "sum"},
    "mean": {"score_residual": "mean", "attention_scale": "entropy_invariant"},
    "bert": {
        "score_residual": "sum", "positions": "learned", "activation": "gelu", "bias": True,
        "mlm_head": "bert", "embedding_size": 24,
    },
    "scaled": {
        "score_residual": "sum", "positions": "none", "attention_scale": "entropy_invariant",
        "residual": "deepnorm", "activation": "swiglu",
    },
    "no carry": {"share_layers": True},
}  # fmt: skip


@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.parametrize(
    ("dropout", "dtype"), first_in_ci([(0.1, torch.bfloat16), (0.0, torch.float32)])
)
@pytest.mark.parametrize("name", first_in_ci(COSTS, 2))
def test_activations_are_what_autograd_keeps(name: str, dropout: float, dtype: torch.dtype) -> None:
    config = ModelConfig(
        vocab_size=300, num_layers=3, hidden_size=64, num_heads=2, ffn_size=96, max_positions=64,
        dropout=dropout, attention_dropout=0.0 if name == "no carry" else dropout, **COSTS[name],
    )  # fmt: skip
    # Attention without carried scores is torch's, which has no kernel of documents for a CPU.
    fused = Choice(attention=name != "no carry", residual_norm=True)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    given = TrainingPass(config, 4, SLOTS_OF_STEP, precision, MASKED_SHARE, fused=fused)
    # A few scalars.
    assert activation_bytes(given)["total"] == pytest.approx(kept_by_step(given), abs=64)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_cpu")
def test_checkpointed_memory_is_what_cost_says() -> None:
    config = replace(CHECKPOINTED, score_residual="sum", num_layers=3, hidden_size=64, num_heads=2)
    tokens = BATCH * SEQ_LEN
    counted = activation_bytes(
        TrainingPass(config, BATCH, SEQ_LEN, "bf16", NUM_MASKED / tokens, 1, Choice(True, True))
    )
    lasting = sum(counted[name] for name in ("embeddings", "layer inputs", "head and loss"))
    # The input of the group that is computed again counts with what it computes.
    lasting += tokens * config.hidden_size * 2
    # What all layers share: the rotary tables in fp32, the mask, the spans and the layout.
    shared = tokens * (config.head_size * 4 + SEQ_LEN + 4 * 4)
    found = alive_bytes(config, torch.bfloat16, 1, fused=True)
    assert found == pytest.approx(lasting + shared, abs=300)


def test_what_the_kernel_cannot_take() -> None:
    x = torch.zeros(2, 16)
    call = partial(residual_norm, keep=1.0, dropout=0.0, eps=EPS)
    wrong: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {
        "torch.float64": (x.double(), x.double(), torch.ones(())),
        r"torch.bfloat16 \(2, 16\)": (x, x.bfloat16(), None),
        r"update .* \(16,\)": (x, x[0], torch.ones(())),
        "have 12": (x[:, :12], x[:, :12], torch.ones(())),
        "have 4104": (torch.zeros(1, 4104), torch.zeros(1, 4104), torch.ones(())),
        "requires it": (x, x, torch.zeros((), requires_grad=True)),
        r"alpha .* torch.float32 \(1,\)": (x, x, torch.zeros(1)),
        r"alpha .* torch.float64 \(\)": (x, x, torch.zeros((), dtype=torch.float64)),
    }  # fmt: skip
    for said, (x, update, alpha) in wrong.items():
        with pytest.raises(ConfigError, match=said):
            call(x, update, alpha)


@pytest.mark.parametrize(("changes", "said"), [
    ({"norm": "layernorm"}, "model.norm=layernorm"),
    ({"norm_placement": "pre"}, "norm_placement=pre"),
    ({"residual": "rezero"}, "residual=rezero"), ({"hidden_size": 42}, "model.hidden_size=42"),
])  # fmt: skip
def test_models_that_the_kernel_is_not_for(changes: dict[str, Any], said: str) -> None:
    model = MaskedLanguageModel(replace(CONFIG, num_heads=1, **changes))
    with pytest.raises(ConfigError, match=said):
        model.encoder.fuse_residual_norms()
