"""Which parameters decay, and which of their matrices an optimizer tells apart."""

import logging
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.config.train import Optimizer, TrainConfig
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.objectives.choose import make_objective
from pipeline.train.optimizers import muon
from pipeline.train.optimizers.muon import orthogonal
from pipeline.train.optimizers.slices import (
    TensorSlice,
    hidden_matrices,
    matrix_slices,
    squared_norm,
)
from pipeline.train.optimizers.table import OPTIMIZERS, make_optimizer

MODEL = ModelConfig(vocab_size=50, num_layers=2, hidden_size=8, num_heads=2, ffn_size=12,
                    activation="swiglu", bias=True, norm_affine=True, mlm_head="bert")  # fmt: skip


def test_the_table_has_what_a_config_may_name() -> None:
    assert tuple(OPTIMIZERS) == get_args(Optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_matrices_decay_and_the_log_says(
    optimizer: Optimizer, caplog: pytest.LogCaptureFixture
) -> None:
    model = MaskedLanguageModel(MODEL)
    config = TrainConfig(
        optimizer=optimizer, weight_decay=0.3,
        lamb_bias_correction=True if optimizer == "lamb" else None,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        made = make_optimizer(model, config)
    sizes: dict[tuple[float, bool], list[int]] = {}
    for name, parameter in model.named_parameters():
        is_vector = name.endswith("bias") or "norm" in name
        is_apart = optimizer == "muon" and ".layers." in name and not is_vector
        key = 0.0 if is_vector else 0.3, is_apart
        sizes.setdefault(key, []).append(parameter.numel())
    assert len(caplog.messages) == len(made.param_groups) == len(sizes)
    for group, message in zip(made.param_groups, caplog.messages, strict=True):
        is_apart = group.get("is_apart", False)
        expected = sizes[group["weight_decay"], is_apart]
        assert [parameter.numel() for parameter in group["params"]] == expected
        assert message == (
            f"{optimizer}{' of hidden matrices' * is_apart}: weight decay {group['weight_decay']} "
            f"on {len(expected)} tensors of {sum(expected):,} parameters"
        )


@pytest.mark.parametrize("kind", ["mlm", "rtd", "mlm_sbo"])
def test_hidden_are_the_linear_maps_of_layers_alone(kind: str) -> None:
    config = ModelConfig(vocab_size=50, num_layers=2, hidden_size=8, num_heads=2, ffn_size=12,
                         embedding_size=4, pooler=True, positions="learned")  # fmt: skip
    model = make_objective(ObjectiveConfig(kind=kind)).make_model(config)  # type: ignore[arg-type]
    expected = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    assert hidden_matrices(model).keys() == expected
    assert len(expected) == (16 if kind == "rtd" else 8)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_matrices_stored_as_one_are_told_apart() -> None:
    model = MaskedLanguageModel(MODEL)
    whole = [TensorSlice(name, tuple(parameter.shape), 0, parameter.numel(),
                         parameter.detach().flatten(), 0)
             for name, parameter in model.named_parameters()]  # fmt: skip
    matrices, pieces = matrix_slices(model, _shapes(model), whole)
    assert [piece.name for piece in pieces] == list(matrices)
    assert all(piece.shape == matrices[piece.name] and piece.start == 0 for piece in pieces)
    found = {piece.name: piece.of(piece.partition).view(piece.shape) for piece in pieces}
    for index, layer in enumerate(model.encoder.layers):
        for stored, parts in (("attention.qkv", 3), ("feed_forward.inner", 2)):
            for part, matrix in enumerate(layer.get_submodule(stored).weight.chunk(parts)):
                name = f"encoder.layers.{index}.{stored}.weight/{part}"
                assert torch.equal(found[name], matrix)
    assert len(matrices) == len(whole) + 2 * (2 + 1)


@pytest.mark.parametrize("length", [1, 7, 64, 65, 200])
def test_pieces_cut_anywhere_cover_each_element_once(length: int) -> None:
    model = MaskedLanguageModel(MODEL)
    parameter = dict(model.named_parameters())["encoder.layers.0.attention.qkv.weight"]
    name, total = "encoder.layers.0.attention.qkv.weight", parameter.numel()
    values = torch.arange(total).float()
    slices = [
        # Ten elements of something else before each piece.
        TensorSlice(name, tuple(parameter.shape), at, min(length, total - at),
                    torch.cat((torch.full((10,), -1.0), values[at : at + length])), 10)
        for at in range(0, total, length)
    ]  # fmt: skip
    _, pieces = matrix_slices(model, _shapes(model), slices)
    for part in range(3):
        mine = [piece for piece in pieces if piece.name == f"{name}/{part}"]
        found = torch.cat([each.of(each.partition) for each in mine])
        assert torch.equal(found, values.chunk(3)[part])
        ends = [0, *(each.start + each.numel for each in mine)]
        assert [each.start for each in mine] == ends[:-1]


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16), (1, 7), (7, 1)])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_orthogonal_update_has_the_directions_of_a_matrix_alone(
    shape: tuple[int, int], size: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(shape)
    [found] = orthogonal((matrix * size).to(dtype)[None], 5).double()
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    # In the matrix' own directions the result is diagonal, near 1.
    inside = left.mT @ found @ right.mT
    values = inside.diagonal()
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert (inside - torch.diag(values)).abs().max() < tolerance
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert (found - left @ torch.diag(values) @ right).norm() < 4 * tolerance


def test_matrices_together_are_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 9), (9, 6), (4, 4), *[(6, 9)] * 4, (4, 4)]
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    calls: list[torch.Size] = []

    def counted(stacked: Tensor, num_iterations: int) -> Tensor:
        calls.append(stacked.shape)
        return orthogonal(stacked, num_iterations)

    monkeypatch.setattr(muon, "orthogonal", counted)
    alone, together = (muon.orthogonal_all(matrices, 5, at_once) for at_once in (1, 3))
    # As many at a time whatever there is: a product's bits may depend on its batch.
    assert calls[len(shapes) :] == [(3, 6, 9), (3, 6, 9), (3, 9, 6), (3, 4, 4)]
    for one, other, shape in zip(alone, together, shapes, strict=True):
        assert one.shape == shape
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 30_000_001])
def test_squared_norm_is_that_of_float64(size: int) -> None:
    # Of one sign and size: fp32's partial sums stop growing by them.
    flat = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5
    exact = float(np.square(flat.numpy(), dtype=np.float64).sum())
    assert squared_norm(flat).item() == pytest.approx(exact, rel=1e-6)
    if size > 1:
        flat[size // 2] = float("nan")
        assert squared_norm(flat).isnan()
