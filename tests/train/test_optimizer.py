"""Which parameters decay, and which of their matrices have ratios of their own."""

import logging

import numpy as np
import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.config.train import TrainConfig
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.train.optimizer import TensorSlice, make_optimizer, matrix_slices, squared_norm

MODEL = ModelConfig(vocab_size=50, num_layers=2, hidden_size=8, num_heads=2, ffn_size=12,
                    activation="swiglu", bias=True, norm_affine=True, mlm_head="bert")  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_matrices_decay_and_the_log_says(optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    model = MaskedLanguageModel(MODEL)
    config = TrainConfig(
        optimizer=optimizer,  # type: ignore[arg-type]
        lamb_bias_correction=True if optimizer == "lamb" else None, weight_decay=0.3,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        made = make_optimizer(model, config)
    sizes: dict[float, list[int]] = {0.3: [], 0.0: []}
    for name, parameter in model.named_parameters():
        is_vector = name.endswith("bias") or "norm" in name
        sizes[0.0 if is_vector else 0.3].append(parameter.numel())
    assert len(caplog.messages) == len(made.param_groups) == 2
    for group, message in zip(made.param_groups, caplog.messages, strict=True):
        expected = sizes[group["weight_decay"]]
        assert [parameter.numel() for parameter in group["params"]] == expected
        assert message == (
            f"{optimizer}: weight decay {group['weight_decay']} on {len(expected)} tensors of "
            f"{sum(expected):,} parameters"
        )
        assert group.get("adapts", True) == (group["weight_decay"] > 0 or optimizer == "adamw")


def _shapes(model: MaskedLanguageModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_matrices_stored_as_one_are_told_apart() -> None:
    model = MaskedLanguageModel(MODEL)
    whole = [TensorSlice(name, tuple(parameter.shape), 0, parameter.numel(),
                         parameter.detach().flatten(), 0)
             for name, parameter in model.named_parameters()]  # fmt: skip
    names, pieces = matrix_slices(model, _shapes(model), whole)
    assert [piece.name for piece in pieces] == names
    found = {piece.name: piece.of(piece.partition) for piece in pieces}
    for index, layer in enumerate(model.encoder.layers):
        for stored, parts in (("attention.qkv", 3), ("feed_forward.inner", 2)):
            for part, matrix in enumerate(layer.get_submodule(stored).weight.chunk(parts)):
                name = f"encoder.layers.{index}.{stored}.weight/{part}"
                assert torch.equal(found[name], matrix.flatten())
    assert len(names) == len(whole) + 2 * (2 + 1)


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


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 30_000_001])
def test_squared_norm_is_that_of_float64(size: int) -> None:
    # Of one sign and size: fp32's partial sums stop growing by them.
    flat = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5
    exact = float(np.square(flat.numpy(), dtype=np.float64).sum())
    assert squared_norm(flat).item() == pytest.approx(exact, rel=1e-6)
    if size > 1:
        flat[size // 2] = float("nan")
        assert squared_norm(flat).isnan()
