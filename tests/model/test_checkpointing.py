"""Activation checkpointing: the same gradients to the bit, from less memory, as `cost` says."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from pipeline.config.model import ModelConfig
from pipeline.kernels import attention
from pipeline.model.cost import TrainingPass
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import Trace
from pipeline.model.layout import rows
from pipeline.objectives import activations
from tests.model.test_cost import loss_of
from tests.support.grids import first_in_ci

CONFIG = ModelConfig(vocab_size=300, num_layers=5, hidden_size=40, num_heads=4, ffn_size=96,
                     dropout=0.1, attention_dropout=0.1)  # fmt: skip
BATCH, SEQ_LEN, NUM_MASKED = 3, 24, 10


def _model(config: ModelConfig, dtype: torch.dtype, group_size: int | None) -> MaskedLanguageModel:
    torch.manual_seed(1)
    model = MaskedLanguageModel(config).to(dtype).train()
    if group_size is not None:
        model.encoder.checkpoint_activations(group_size)
    return model


def _loss(model: MaskedLanguageModel) -> torch.Tensor:
    """Of the same tokens, with the same dropout, each time."""
    torch.manual_seed(2)
    model.encoder.set_alpha(0.7)
    return loss_of(model, BATCH, SEQ_LEN, NUM_MASKED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group_size", first_in_ci([2, 1, 9]))
@pytest.mark.parametrize("score_residual", ["none", "sum", "mean"])
@pytest.mark.parametrize("changes", [
    {}, {"norm_placement": "pre", "share_layers": True, "residual": "rezero"},
], ids=["post", "pre"])  # fmt: skip
def test_losses_and_gradients_are_the_same_bits(
    changes: dict[str, Any], score_residual: str, group_size: int, dtype: torch.dtype
) -> None:
    config = replace(CONFIG, **changes, score_residual=score_residual)  # type: ignore[arg-type]
    plain, checkpointed = _model(config, dtype, None), _model(config, dtype, group_size)
    losses = _loss(plain), _loss(checkpointed)
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


def test_dropout_of_what_comes_after_and_a_trace_are_as_without() -> None:
    drawn = []
    for group_size in (None, 2):
        _loss(_model(CONFIG, torch.float32, group_size)).backward()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    model, trace = _model(CONFIG, torch.float32, 2), Trace()
    layout = rows(torch.ones(1, 8, dtype=torch.int32), torch.arange(8)[None])
    model.encoder(torch.arange(8)[None], layout, trace=trace).sum().backward()
    assert len(trace.probabilities) == CONFIG.num_layers
    assert len(trace.hidden) == CONFIG.num_layers + 1


class Storages(TorchDispatchMode):
    """Remembers what operators made, without keeping it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._own:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive_bytes(self) -> int:
        gc.collect()
        return sum(size for storage, size in self._made.values() if not storage.expired())


def alive_bytes(
    config: ModelConfig, dtype: torch.dtype, group_size: int | None, *, fused: bool = False
) -> int:
    """Bytes that live on between forward and backward pass, besides weights."""
    model = _model(config, dtype, group_size)
    if fused:
        model.encoder.fuse_attention()
        model.encoder.fuse_residual_norms()
    with Storages(model) as storages:
        loss = _loss(model)
        found = storages.alive_bytes()
    loss.backward()
    return found


PASSES = first_in_ci([
    ("sum", 2, torch.bfloat16), ("none", 1, torch.float32), ("sum", 1, torch.float32),
    ("none", 2, torch.bfloat16),
], 2)  # fmt: skip


def _counted(config: ModelConfig, dtype: torch.dtype, group_size: int | None) -> dict[str, int]:
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    share = NUM_MASKED / (BATCH * SEQ_LEN)
    return activations.activation_bytes(
        TrainingPass(config, BATCH, SEQ_LEN, precision, share, group_size)
    )


@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.parametrize(("score_residual", "group_size", "dtype"), PASSES)
def test_memory_is_what_cost_says(score_residual: str, group_size: int, dtype: torch.dtype) -> None:
    config = replace(CONFIG, score_residual=score_residual)  # type: ignore[arg-type]
    counted = _counted(config, dtype, group_size)
    lasting = sum(counted[name] for name in ("embeddings", "layer inputs", "head and loss"))
    # The input of the group that is computed again counts with what it computes.
    lasting += BATCH * SEQ_LEN * config.hidden_size * dtype.itemsize
    # What all layers share: the rotary tables in fp32, the mask, and four int32 of the layout.
    shared = BATCH * SEQ_LEN * (config.head_size * 4 + SEQ_LEN + 4 * 4)
    assert alive_bytes(config, dtype, group_size) == pytest.approx(lasting + shared, abs=300)
    assert counted["total"] < _counted(config, dtype, None)["total"]


@pytest.mark.long
@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.parametrize(("score_residual", "group_size", "dtype"), PASSES)
def test_peak_of_a_step_is_what_cost_says(
    score_residual: str, group_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has no fused attention with dropout.
    drops = CONFIG.attention_dropout if score_residual != "none" else 0.0
    config = replace(CONFIG, score_residual=score_residual, attention_dropout=drops)
    model, alive = _model(config, dtype, group_size), []
    run_layers = model.encoder._run_layers

    def sampled(*given: Any) -> Any:
        result = run_layers(*given)
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        alive.append(storages.alive_bytes() - sum(each.nbytes for each in gradients))
        return result

    # Not the attention of short rows in bf16, which keeps its probabilities.
    monkeypatch.setattr(attention, "_SHORT", 0)
    monkeypatch.setattr(model.encoder, "_run_layers", sampled)
    with Storages(model) as storages, set_checkpoint_early_stop(False):
        loss = _loss(model)
        del alive[:]
        loss.backward()
    counted, tokens = _counted(config, dtype, group_size), BATCH * SEQ_LEN
    # Head and loss are freed by then; what they leave is the gradient of the output matrix.
    kept = counted["total"] - counted["head and loss"] + 300 * config.hidden_size * dtype.itemsize
    # The layout; the output of a group and its gradient, and those of the scores, in fp32.
    passing = tokens * (SEQ_LEN + 16) + 2 * tokens * config.hidden_size * dtype.itemsize
    if score_residual != "none":
        passing += 2 * tokens * config.num_heads * SEQ_LEN * 4
    assert kept <= max(alive) <= kept + passing
