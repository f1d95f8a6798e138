"""Span boundaries: runs against a loop over slots, sums and gradients against plain formulas."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import postnorm
from pipeline.checkpoints.state import read_weights
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.config.runs import PretrainConfig
from pipeline.data.dataset import Batch
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import MicroBatch
from pipeline.data.order import Locations
from pipeline.data.packing import PackedSequences
from pipeline.data.random import Purpose
from pipeline.errors import ConfigError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import rows
from pipeline.objectives.boundary import BoundaryModel, SpanBoundaries
from pipeline.objectives.choose import make_objective
from pipeline.objectives.inputs import PARTS, MaskedInputs
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.objectives.parts import find_boundaries
from pipeline.runtime.checkpoints import FOLDER, published
from tests.support.mask_reference import VOCABULARY, batch_of
from tests.support.ranks import CONFIG, records

SBO = ObjectiveConfig(kind="mlm_sbo", boundary_weight=0.7)
SPANS = DataConfig(dir="unused", masking="span", mask_selection="exact", mask_prob=0.3)
MODEL = ModelConfig(vocab_size=VOCABULARY.size, num_layers=2, hidden_size=32, num_heads=2,
                    ffn_size=64, bias=True, norm="layernorm", norm_affine=True, mlm_head="bert",
                    embedding_size=24, dropout=0.0, attention_dropout=0.0, init="bert")  # fmt: skip


def expected_boundaries(
    selected: npt.NDArray[np.bool_], documents: npt.NDArray[np.int32]
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Each target as (number of the masked slot, left, right, place); first of long runs."""
    num_rows, num_slots = selected.shape
    found, long_runs, number = [], [], 0
    for row in range(num_rows):
        slot = 0
        while slot < num_slots:
            stop = slot
            mine = documents[row, slot]
            while stop < num_slots and selected[row, stop] and documents[row, stop] == mine:
                stop += 1
            if stop == slot:
                slot += 1
                continue
            has_left = slot > 0 and documents[row, slot - 1] == documents[row, slot]
            has_right = stop < num_slots and documents[row, stop] == documents[row, slot]
            if stop - slot > 20:
                long_runs.append(number)
            elif has_left and has_right:
                base = row * num_slots
                found += [
                    (number + place, base + slot - 1, base + stop, place)
                    for place in range(stop - slot)
                ]
            number += stop - slot
            slot = stop
    return found, long_runs


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.97, 1.0])
def test_boundaries_are_those_of_a_loop_over_slots(share: float) -> None:
    draw = np.random.default_rng(int(100 * share))
    seen_targets = seen_long = 0
    for _ in range(60):
        shape = (draw.integers(1, 5), draw.integers(1, 70))
        # Documents that nothing separates, and selected slots at their borders.
        documents = np.sort(draw.integers(0, 4, shape), axis=1).astype(np.int32)
        selected = draw.random(shape) < share
        found = find_boundaries(np.flatnonzero(selected), documents)
        expected, long_runs = expected_boundaries(selected, documents)
        columns = (found.index, found.left, found.right, found.place)
        assert list(zip(*(each.tolist() for each in columns), strict=True)) == expected
        assert found.too_long.tolist() == long_runs
        seen_targets, seen_long = seen_targets + len(expected), seen_long + len(long_runs)
    assert (seen_targets > 0) == (0 < share < 1)
    assert (seen_long > 0) == (share > 0.5)


def made(
    inputs: MaskedInputs, num_rows: int, micro_batch: int, document_length: int = 13
) -> list[Batch]:
    """Micro-batches of random words in short documents."""
    batch = batch_of(num_rows, 130, document_length=document_length)
    places = np.tile(np.arange(130) % document_length, (num_rows, 1))
    slots = PackedSequences(
        batch.tokens, batch.documents, places, batch.word_starts, batch.maskable
    )
    nothing = np.zeros(num_rows, np.int64)
    places = Locations(nothing, nothing, nothing, batch.sample_ids, nothing.astype(bool))
    return inputs(slots, places, 0, micro_batch=micro_batch, places=np.arange(len(places.blocks)))


def inputs_of(objective: ObjectiveConfig, **data: Any) -> MaskedInputs:
    return MaskedInputs(replace(SPANS, **data), VOCABULARY, 5, Purpose.MASK, PARTS[objective.kind])


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_micro_batches_have_the_same_boundaries_however_they_are_cut(micro_batch: int) -> None:
    inputs = inputs_of(SBO, mask_prob=0.6)
    # Documents as long as a row, so that some runs are too long.
    [whole] = made(inputs, 8, 8, document_length=130)
    parts = made(inputs, 8, micro_batch, document_length=130)
    masked = slots = 0
    joined: dict[str, list[int]] = {name: [] for name in whole.inputs}
    for part in parts:
        moved = {name: array.tolist() for name, array in part.inputs.items()}
        for name in ("masked_index", "boundary_left", "boundary_right"):
            moved[name] = [value + slots for value in moved[name]]
        moved["boundary_index"] = [value + masked for value in moved["boundary_index"]]
        for name, values in moved.items():
            joined[name] += values
        assert part.weights["sbo"] == len(part.inputs["boundary_index"])
        masked, slots = masked + len(part.inputs["targets"]), slots + part.input_ids.size
    assert joined == {name: array.tolist() for name, array in whole.inputs.items()}
    selected = np.zeros(whole.documents.shape, bool)
    selected.flat[whole.inputs["masked_index"]] = True
    expected, long_runs = expected_boundaries(selected, whole.documents)
    names = ("boundary_index", "boundary_left", "boundary_right", "boundary_place")
    columns = (whole.inputs[name].tolist() for name in names)
    assert list(zip(*columns, strict=True)) == expected
    assert sum(part.counts["long_runs"] for part in parts) == len(long_runs) > 0
    assert sum(part.hash for part in parts) % 2**64 == whole.hash


def test_beside_the_boundaries_everything_is_as_in_mlm() -> None:
    for plain, spans in zip(
        made(inputs_of(ObjectiveConfig()), 6, 2), made(inputs_of(SBO), 6, 2), strict=True
    ):
        assert plain.inputs.keys() == {"masked_index", "targets"}
        assert plain.weights.keys() == {"loss"}
        for name, array in plain.inputs.items():
            assert np.array_equal(array, spans.inputs[name])
        assert np.array_equal(plain.input_ids, spans.input_ids)
        assert (plain.hash, plain.weights["loss"]) == (spans.hash, spans.weights["loss"])
        # Runs in documents of thirteen tokens are short, and [CLS] and [SEP] bound all of them.
        assert len(spans.inputs["boundary_index"]) == len(spans.inputs["targets"]) > 0
        nothing = inputs_of(SBO).without_targets(spans)
        assert set(nothing.weights.values()) == {0.0}
        assert all(len(array) == 0 for array in nothing.inputs.values())


def expected_sums(model: BoundaryModel, batch: MicroBatch) -> tuple[Tensor, Tensor, float]:
    """Mean loss of masked tokens, that of boundary targets, and the share of these that is hit.

    Token after token, from the hidden states.
    """
    layout, given = rows(batch.documents, batch.positions), batch.inputs
    x_TD = model.encoder(batch.input_ids, layout).flatten(0, 1)
    table, head = model.encoder.token_embedding.weight, model.objective
    mlm = F.cross_entropy(model.head(x_TD[given["masked_index"]]), given["targets"])

    def norm(x: Tensor, layer: Any) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + layer.eps).sqrt() * layer.weight + layer.bias

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    losses, hits = [], 0
    for which, left, right, place in zip(
        *(given[f"boundary_{name}"].tolist() for name in ("index", "left", "right", "place")),
        strict=True,
    ):
        h = torch.cat((x_TD[left], x_TD[right], head.place.weight[place]))
        h = norm(gelu(head.inner.weight @ h + head.inner.bias), head.inner_norm)
        h = norm(gelu(head.outer.weight @ h + head.outer.bias), head.outer_norm)
        assert head.bias is not None
        logits = table @ h + head.bias
        target = int(given["targets"][which])
        losses.append(logits.logsumexp(0) - logits[target])
        hits += int(logits.argmax()) == target
    return mlm, torch.stack(losses).mean(), hits / len(losses)


def test_sums_and_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(1)
    model = BoundaryModel(MODEL).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("objective."):
                parameter.add_(0.3 * torch.randn_like(parameter))
    objective = make_objective(SBO)
    [batch] = map(MicroBatch.of, made(inputs_of(SBO), 2, 2))
    assert len(batch.inputs["boundary_index"]) > 30
    sums = objective(model, batch)
    assert objective.losses == {"loss": 1.0, "sbo": 0.7}
    means = {name: each.total / each.weight for name, each in sums.items()}
    total = means["loss"] + objective.losses["sbo"] * means["sbo"]
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(total, parameters)
    mlm, sbo, share = expected_sums(model, batch)
    assert abs((means["loss"] - mlm).item()) < 1e-10
    assert abs((means["sbo"] - sbo).item()) < 1e-10
    assert means["sbo_accuracy"].item() == pytest.approx(share)
    expected = torch.autograd.grad(mlm + 0.7 * sbo, parameters)
    for name, one, other in zip(names, gradients, expected, strict=True):
        scale = other.abs().max().clamp(min=1e-6)
        assert ((one - other).abs().max() / scale).item() < 1e-8, name
        assert not name.startswith("objective.") or other.abs().max() > 0, name


def test_everything_else_starts_and_counts_as_in_mlm() -> None:
    torch.manual_seed(7)
    model = make_objective(SBO).make_model(MODEL)
    torch.manual_seed(7)
    plain = MaskedLanguageModel(MODEL)
    weights = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, weights.pop(name)), name
    assert weights
    assert all(name.startswith("objective.") for name in weights)
    [batch] = map(MicroBatch.of, made(inputs_of(SBO), 2, 2))
    sums = SpanBoundaries(SBO)(model, batch)
    for name, (total, weight) in MaskedLanguageModeling()(plain, batch).items():
        assert (sums[name].total, sums[name].weight) == (total, weight)
    logits = model(
        batch.input_ids, rows(batch.documents, batch.positions), batch.inputs["masked_index"]
    )
    assert logits.shape == (len(batch.inputs["targets"]), MODEL.vocab_size)


def test_no_boundary_gives_zero_with_a_gradient() -> None:
    model = BoundaryModel(MODEL)
    inputs = inputs_of(SBO)
    [batch] = made(inputs, 2, 2)
    sums = SpanBoundaries(SBO)(model, MicroBatch.of(inputs.without_targets(batch)))
    assert [each.item() for pair in sums.values() for each in pair] == [0.0] * 8
    (sums["loss"].total + sums["sbo"].total).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_the_followed_loss_and_what_does_not_fit() -> None:
    objective = make_objective(SBO)
    assert objective.tracked_loss({"loss": 2.0, "sbo": 5.0}) == 2.0
    assert objective.tracked_loss({"loss": 2.0}) == 2.0  # a batch without boundaries
    for name in objective.losses:
        assert math.isnan(objective.tracked_loss({"loss": 2.0, "sbo": 5.0, name: math.nan}))
    assert objective.tracked_loss({"loss": 2.0, "sbo": math.inf}) == math.inf
    with pytest.raises(ConfigError, match=r"masking=whole_word makes none; set data\.masking"):
        PretrainConfig(run_dir="unused", data=DataConfig(dir="unused"), objective=SBO)
    with pytest.raises(ConfigError, match=r"boundary_weight=2.* set objective\.kind=mlm_sbo"):
        ObjectiveConfig(boundary_weight=2.0)


@pytest.mark.long
def test_a_run_learns_and_works_without_its_head(tmp_path: Path, dataset: DatasetIndex) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(CONFIG)
    words = [f"data.dir={dataset.folder}", "data.masking=span", "data.mask_selection=exact",
             "objective.kind=mlm_sbo", "train.zero_stage=0", "train.num_steps=12",
             "monitor.sinks=[]", "train.alpha_warmup_steps=2", "checkpoint.every_steps=6",
             "monitor.eval_every_steps=12"]  # fmt: skip
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert postnorm.pretrain(config, [*words, f"run_dir={whole}"]).finished
    # As if it had been killed after the save of step 6.
    shutil.copytree(whole, parted)
    shutil.rmtree(published(parted / FOLDER)[0])
    (parted / "done.json").unlink()
    assert postnorm.pretrain(config, [*words, f"run_dir={parted}"]).finished
    assert {"accuracy", "sbo", "sbo_accuracy", "long_runs"} <= records(whole)[-1].keys()
    before, after = (line["sbo"] for line in records(whole, "eval"))
    assert after < before - 0.3
    ends = [read_weights(published(folder / FOLDER)[0]) for folder in (whole, parted)]
    assert any(name.startswith("objective.") for name in ends[0])
    assert ends[0].keys() == ends[1].keys()
    assert not [name for name, each in ends[0].items() if not torch.equal(each, ends[1][name])]
    assert load(PretrainConfig, whole / "resolved.yaml", []).config.objective.kind == "mlm_sbo"
    assert np.isfinite(postnorm.load(whole).encode(["a list of strings"])).all()


def test_divided_weights(tmp_path: Path, dataset: DatasetIndex, processes: None) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(CONFIG)
    logged = []
    for stage in (0, 3):
        folder = tmp_path / f"stage-{stage}"
        postnorm.pretrain(config, [
            f"run_dir={folder}", f"data.dir={dataset.folder}", "data.masking=span",
            "data.mask_selection=exact", "objective.kind=mlm_sbo", f"train.zero_stage={stage}",
            "train.precision=fp32", "train.num_steps=4", "train.warmup_steps=1",
            "train.alpha_warmup_steps=1", "monitor.eval_every_steps=1000", "monitor.sinks=[]",
        ])  # fmt: skip
        logged.append([(line["loss"], line["sbo"]) for line in records(folder)])
    assert len(logged[0]) == 4
    assert np.abs(np.array(logged[0]) - np.array(logged[1])).max() < 1e-4
