"""Counted activations against real steps: what autograd keeps of them, on full models with data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.objective import MLM, ObjectiveConfig
from pipeline.data.loader import MicroBatch, document_bounds
from pipeline.kernels import attention
from pipeline.kernels.choose import REFERENCE, Choice
from pipeline.model.cost import TrainingPass
from pipeline.model.encoder import EncoderModel
from pipeline.objectives.activations import activation_bytes
from pipeline.objectives.choose import make_objective
from tests.model.test_checkpointing import Storages

ROOT = Path(__file__).parents[2]
FAMILIES = ("bert", "roformer", "realformer", "roformer_v2", "realformer_v2")
# A GPU pads sums of attention to 32 slots.
SEQ_LEN, MASKED_SHARE = 32, 0.15
ODD = {"norm_placement": "pre", "activation": "swiglu", "residual": "rezero", "embedding_size": 12,
       "share_layers": True, "norm_affine": True, "attention_scale": "entropy_invariant",
       "rotary_value": True}  # fmt: skip


def family(name: str, **changes: Any) -> ModelConfig:
    """A shipped architecture at a small size, with dropout where a CPU has a kernel for it."""
    path = ROOT / f"configs/model/{name}-base.yaml"
    config = load(ModelConfig, path, ["vocab_size=300"]).config
    small = {"num_layers": 3, "hidden_size": 40, "num_heads": 4, "ffn_size": 96, "dropout": 0.1}
    carries = config.score_residual != "none"
    small["attention_dropout"] = 0.1 if carries else 0.0
    return replace(config, **(small | changes))  # type: ignore[arg-type]


def micro_batch(rows: int, losses: list[str]) -> MicroBatch:
    """Random tokens, packed: two documents in each row."""
    documents = (1 + (np.arange(SEQ_LEN) >= SEQ_LEN // 3).astype(np.int32))[None].repeat(rows, 0)
    masked = round(MASKED_SHARE * rows * SEQ_LEN)
    index = torch.randperm(rows * SEQ_LEN)
    inputs = {"masked_index": index[:masked].clone(),
              "targets": torch.zeros(masked, dtype=torch.int64), "uniform": torch.rand(masked),
              "pair_first": index[:rows].clone(),
              "pair_labels": torch.zeros(rows, dtype=torch.int64),
              "boundary_index": torch.arange(masked), "boundary_left": index[:masked].clone(),
              "boundary_right": index[:masked].clone(),
              "boundary_place": torch.zeros(masked, dtype=torch.int64)}  # fmt: skip
    return MicroBatch(torch.randint(0, 300, (rows, SEQ_LEN)), torch.from_numpy(documents),
                      torch.arange(SEQ_LEN).expand(rows, -1).clone(), None,
                      torch.from_numpy(document_bounds(documents)), inputs,
                      dict.fromkeys(losses, 1.0), {}, rows * SEQ_LEN, 0)  # fmt: skip


def real_step(given: TrainingPass) -> tuple[EncoderModel, Callable[[], Tensor]]:
    """A real model, and what runs the forward pass of a step with it."""
    torch.manual_seed(1)
    objective = make_objective(given.objective)
    model = objective.make_model(given.config).train()
    model.to(torch.bfloat16 if given.precision == "bf16" else torch.float32)
    for encoder in model.encoders:
        encoder.checkpoint_activations(given.checkpoint_layers)
        if given.fused.attention:
            encoder.fuse_attention()
        if given.fused.residual_norm:
            encoder.fuse_residual_norms()
    batch = micro_batch(given.rows, list(objective.losses))

    def run() -> Tensor:
        sums = objective(model, batch)
        return torch.stack([sums[name].total.float() for name in objective.losses]).sum()

    return model, run


def kept_by_step(given: TrainingPass) -> int:
    """Bytes of the distinct storages that autograd keeps of a real step, without parameters.

    Not by a CPU's attention over short rows in bf16, which keeps its probabilities.
    """
    model, run = real_step(given)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # The graph, alive until the end, holds what is kept: no address comes twice.
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        patch.setattr(attention, "_SHORT", 0)
        loss = run()
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])  # one row is viewed, not copied, as a batch
def test_families(name: str, rows: int) -> None:
    given = TrainingPass(family(name), rows, SEQ_LEN, "fp32", MASKED_SHARE)
    # A few scalars.
    assert activation_bytes(given)["total"] == pytest.approx(kept_by_step(given), abs=64)


@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.parametrize("kind", ["mlm", "mlm_sbo", "mlm_nsp", "rtd"])
@pytest.mark.parametrize("changes", [{}, ODD], ids=["v2", "odd"])
def test_objectives(kind: str, changes: dict[str, Any]) -> None:
    objective = ObjectiveConfig(kind=kind)  # type: ignore[arg-type]
    if kind == "rtd":  # fewer layers in the generator, and another width
        objective = replace(objective, generator_size=0.5, generator_layers=0.4)
    changes = {"residual": "plain", "pooler": kind == "mlm_nsp"} | changes
    config = family("realformer_v2", **changes)
    given = TrainingPass(config, 3, SEQ_LEN, "fp32", MASKED_SHARE, objective=objective)
    assert activation_bytes(given)["total"] == pytest.approx(kept_by_step(given), abs=150)


def test_a_generator_too_narrow_for_a_kernel_is_counted_without_it() -> None:
    config = ModelConfig(vocab_size=99, num_layers=2, hidden_size=48, num_heads=4, ffn_size=96)
    fused = Choice(attention=False, residual_norm=True, loss=False)
    given = TrainingPass(config, 2, SEQ_LEN, fused=fused, objective=ObjectiveConfig(kind="rtd"))
    plain = replace(given, fused=REFERENCE)
    assert 0 < activation_bytes(given)["total"] < activation_bytes(plain)["total"]


@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16(name: str) -> None:
    given = TrainingPass(family(name), 3, SEQ_LEN, "bf16", MASKED_SHARE)
    # A CPU keeps the statistics of layernorm in bf16, a GPU in fp32.
    assert activation_bytes(given)["total"] == pytest.approx(kept_by_step(given), rel=0.01)


def test_a_gpu_keeps_a_byte_of_a_dropped_value_and_the_mask_of_plain_attention() -> None:
    given = TrainingPass(family("roformer_v2"), 3, SEQ_LEN, "bf16", MASKED_SHARE)
    without = replace(given, config=replace(given.config, dropout=0.0))
    tokens, masked = 3 * SEQ_LEN, round(MASKED_SHARE * 3 * SEQ_LEN)
    dropped = 40 * ((1 + 2 * 3) * tokens + masked)
    assert activation_bytes(given)["total"] - activation_bytes(without)["total"] == dropped
    flash = replace(given, fused=given.fused._replace(attention=True))
    plain, fused = activation_bytes(given)["attention"], activation_bytes(flash)["attention"]
    # In bf16, of each layer: the mask; and the product of which values are a view, beside turned
    # queries and keys, where heads of 10 come stacked.
    values = 3 * SEQ_LEN * SEQ_LEN + 2 * 40 * tokens
    assert plain - fused == pytest.approx(3 * 2 * values, abs=200)


def test_groups() -> None:
    given = TrainingPass(family("realformer"), 3, SEQ_LEN, "bf16", MASKED_SHARE)
    kept, tokens = activation_bytes(given), 3 * SEQ_LEN
    # Softmax in fp32, the same in bf16 after dropout, a byte for dropout and for the mask.
    assert kept["carried scores"] == 3 * tokens * SEQ_LEN * (4 * (4 + 2 + 1) + 1)
    # The input, and gelu's input and output.
    assert kept["feed-forward"] == 3 * tokens * (40 + 2 * 96) * 2
    parted = activation_bytes(replace(given, checkpoint_layers=2))
    assert parted["carried scores"] == 2 * kept["carried scores"] / 3
    # Two groups: x of each, of which one counts with what is computed again; scores of the second.
    assert parted["layer inputs"] == tokens * 40 * 2 + 4 * tokens * SEQ_LEN * 4
    assert kept["layer inputs"] == kept["generator"] == kept["pair head"] == 0
    assert kept["total"] == sum(size for name, size in kept.items() if name != "total")


def test_a_generator_of_half_the_layers_is_counted_by_its_own_layers() -> None:
    config = family("bert", num_layers=8)
    sizes = {share: activation_bytes(TrainingPass(
                 config, 2, SEQ_LEN, objective=ObjectiveConfig(kind="rtd", generator_layers=share)
             ))
             for share in (0.25, 0.5, 1.0)}  # fmt: skip
    per_layer = (sizes[0.5]["generator"] - sizes[0.25]["generator"]) / 2
    assert sizes[1.0]["generator"] - sizes[0.5]["generator"] == 4 * per_layer > 0
    assert sizes[1.0]["attention"] == sizes[0.25]["attention"]
    assert activation_bytes(TrainingPass(config, 2, SEQ_LEN, objective=MLM))["generator"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("as_on_cpu")
def test_a_generator_is_computed_again_when_what_the_encoder_kept_is_freed() -> None:
    given = TrainingPass(family("bert", num_layers=6), 3, SEQ_LEN, "fp32", MASKED_SHARE, 2,
                         objective=ObjectiveConfig(kind="rtd", generator_size=0.5))  # fmt: skip
    model, run = real_step(given)
    alive: dict[str, list[int]] = {"encoder": [], "generator": []}

    def sampled(run_layers: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
        def run_and_look(*arguments: Any) -> Any:
            result = run_layers(*arguments)
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            sizes.append(storages.alive_bytes() - sum(each.nbytes for each in gradients))
            return result

        return run_and_look

    with (Storages(model) as storages, set_checkpoint_early_stop(False),
          pytest.MonkeyPatch.context() as patch):  # fmt: skip
        for encoder, sizes in zip(model.encoders, alive.values(), strict=True):
            patch.setattr(encoder, "_run_layers", sampled(encoder._run_layers, sizes))
        loss = run()
        forward = {name: len(sizes) for name, sizes in alive.items()}
        loss.backward()
    encoder, generator = (max(alive[name][forward[name] :]) for name in alive)
    counted = activation_bytes(given)
    # Of the losses the gradient of the output matrix is left.
    kept = counted["total"] - counted["head and loss"]
    assert generator < kept <= encoder <= counted["total"] + 300 * 40 * 4
