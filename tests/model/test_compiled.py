"""Compiled layers: how many graphs they are, and what they keep.

What they compute: `tests/distributed`.
"""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.config.model import ModelConfig
from pipeline.model import compiled
from pipeline.model.compiled import CompiledLayer, num_graphs
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import FeedForward, _ReluProduct
from pipeline.model.layout import packed


def _forget() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _pass(model: MaskedLanguageModel, *lengths: int) -> None:
    layout = packed(torch.tensor([0, *lengths]).cumsum(0), max(lengths), sum(lengths))
    ids = torch.arange(sum(lengths)) % 50
    model(ids, layout, torch.arange(0, len(ids), 3)).sum().backward()


def _model(score_residual: Literal["none", "sum", "mean"]) -> MaskedLanguageModel:
    config = ModelConfig(
        vocab_size=50, num_layers=5, hidden_size=32, num_heads=2, ffn_size=40, dropout=0.0,
        attention_dropout=0.0, score_residual=score_residual,
    )  # fmt: skip
    model = MaskedLanguageModel(config).train()
    model.encoder.run_layers_by(CompiledLayer(backend="eager"))
    return model


@pytest.mark.long
def test_layers_of_any_number_and_length_are_few_graphs() -> None:
    model = _model("mean")
    _pass(model, 9, 5)
    assert num_graphs() == 2  # the first layer has no scores from below
    _pass(model, 12, 5, 3)
    assert num_graphs() == 4
    _pass(model, 7, 8, 4, 2)
    assert num_graphs() == 4


@pytest.mark.long
def test_many_graphs_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_MANY_GRAPHS", 0)
    _pass(_model("none"), 9, 5)
    [said] = [each.message for each in caplog.records if "compiled" in each.message]
    assert "layers were compiled 1 times, expected 0 at most" in said


def test_relu_in_the_epilogue_is_that_of_two_operators() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, d_out = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((12, 5), (7, 5), (12, 7))
    )
    found = []
    for product in (_ReluProduct.apply, lambda a, b: F.relu(F.linear(a, b))):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = product(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, d_out)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_layers_keep_no_flags_beside_what_relu_gave() -> None:
    config = ModelConfig(vocab_size=50, hidden_size=16, num_heads=2, ffn_size=24)
    assert config.activation == "relu"
    feed_forward, kept = FeedForward(config), []
    # The partition of inductor, without its compiler.
    run = torch.compile(feed_forward, backend="aot_eager_decomp_partition", fullgraph=True)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(torch.randn(2, 3, 16, requires_grad=True))
    assert out.shape == (2, 3, 16)
    assert torch.bool not in kept
    assert torch.float32 in kept
