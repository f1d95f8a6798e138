"""Replaced-token detection against loops in plain Python and the encoder written in numpy."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config.data import DataConfig
from pipeline.config.load import build
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig, generator_of
from pipeline.config.runs import PretrainConfig
from pipeline.data.dataset import Batch
from pipeline.data.loader import MicroBatch, document_bounds
from pipeline.data.order import Locations
from pipeline.data.packing import PackedSequences
from pipeline.data.random import Purpose
from pipeline.errors import ConfigError
from pipeline.kernels import loss as kernel
from pipeline.model.layout import rows
from pipeline.objectives import rtd
from pipeline.objectives.inputs import PARTS, MaskedInputs
from pipeline.objectives.rtd import ReplacedTokenDetection, ReplacedTokenModel
from tests.model import reference
from tests.support.mask_reference import VOCABULARY

RTD = ObjectiveConfig(kind="rtd", generator_size=0.5)
OBJECTIVE = ReplacedTokenDetection(RTD)
CONFIG = ModelConfig(vocab_size=29, num_layers=2, hidden_size=16, num_heads=2, ffn_size=24,
                     embedding_size=12, positions="learned", max_positions=16, norm="layernorm",
                     norm_affine=True, bias=True, mlm_head="bert", activation="gelu",
                     score_residual="sum", dropout=0.0, attention_dropout=0.0)  # fmt: skip
ROWS, LENGTH = 2, 10


def _model(seed: int = 1) -> ReplacedTokenModel:
    """In float64, with biases and gains that are not those of the start."""
    torch.manual_seed(seed)
    model = OBJECTIVE.make_model(CONFIG).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def _batch(seed: int = 1) -> MicroBatch:
    """Two documents in the first row; the second ends with three slots of padding."""
    chosen = np.random.default_rng(seed)
    documents = np.ones((ROWS, LENGTH), np.int32)
    documents[0, 6:], documents[1, 7:] = 2, 0
    positions = np.tile(np.arange(LENGTH), (ROWS, 1))
    positions[0, 6:] -= 6
    masked = np.array([1, 2, 5, 7, 11, 14, 15])
    return MicroBatch(
        input_ids=torch.from_numpy(chosen.integers(5, 29, (ROWS, LENGTH))),
        documents=torch.from_numpy(documents),
        positions=torch.from_numpy(positions),
        segments=None,
        cu_seqlens=torch.from_numpy(document_bounds(documents)),
        inputs={
            "masked_index": torch.from_numpy(masked),
            "targets": torch.from_numpy(chosen.integers(5, 29, len(masked))),
            "uniform": torch.from_numpy(chosen.random(len(masked), np.float32)),
        },
        weights={"loss": float(len(masked)), "discriminator": 17.0},
        counts={},
        num_tokens=17,
        hash=0,
    )


def _only_row(batch: MicroBatch, row: int) -> MicroBatch:
    """One of the two rows as a micro-batch of its own."""
    mine = batch.inputs["masked_index"] // LENGTH == row
    inputs = {name: each[mine] for name, each in batch.inputs.items()}
    inputs["masked_index"] = inputs["masked_index"] - row * LENGTH
    documents = batch.documents[row : row + 1]
    return replace(batch, input_ids=batch.input_ids[row : row + 1], documents=documents,
                   positions=batch.positions[row : row + 1], inputs=inputs,
                   cu_seqlens=torch.from_numpy(document_bounds(documents.numpy())))  # fmt: skip


def _run(model: ReplacedTokenModel, batch: MicroBatch) -> tuple[Tensor, ...]:
    given = {name: batch.inputs[name] for name in ("targets", "uniform")}
    layout = rows(batch.documents, batch.positions)
    found = model(batch.input_ids, layout, batch.inputs["masked_index"], **given)
    assert isinstance(found, tuple)
    return found


class _Plain:
    """The objective in numpy and loops, by the article; ids that were drawn may be given."""

    def __init__(
        self, weights: dict[str, Any], batch: MicroBatch, drawn: list[int] | None = None
    ) -> None:
        ids, documents = batch.input_ids.numpy(), batch.documents.numpy()
        positions = batch.positions.numpy()
        masked = batch.inputs["masked_index"].tolist()
        targets = batch.inputs["targets"].tolist()
        begin = "objective.generator."
        of_generator = {
            name: value for name, value in weights.items()
            if "embedding." in name or name.startswith("encoder.embedding_norm")
        } | {name.removeprefix(begin): value
             for name, value in weights.items() if name.startswith(begin)}  # fmt: skip
        logits = reference.logits(
            of_generator, generator_of(CONFIG, RTD), ids, documents, positions, masked
        )
        shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        self.generator = -sum(math.log(row[t]) for row, t in zip(shares, targets, strict=True))
        self.hits = sum(int(row.argmax() == t) for row, t in zip(shares, targets, strict=True))
        self.drawn = drawn or [
            next(i for i in range(29) if row[: i + 1].sum() > u)
            for row, u in zip(shares, batch.inputs["uniform"].tolist(), strict=True)
        ]
        filled = ids.copy()
        filled.reshape(-1)[masked] = self.drawn
        # Hidden states are logits of a table of unit vectors.
        of_encoder = {
            name: value for name, value in weights.items() if not name.startswith("objective.")
        }
        hidden = self._hidden(of_encoder, filled, documents, positions)
        head = {name: weights[f"objective.discriminator.{name}"] for name in
                ("dense.weight", "dense.bias", "output.weight", "output.bias")}  # fmt: skip
        inner = hidden @ head["dense.weight"].T + head["dense.bias"]
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        scores = (inner @ head["output.weight"].T + head["output.bias"])[:, 0]
        wrong = {i for i, d, t in zip(masked, self.drawn, targets, strict=True) if d != t}
        real = [i for i in range(ROWS * LENGTH) if documents.reshape(-1)[i]]
        self.discriminator = sum(
            math.log1p(math.exp(-scores[i] if i in wrong else scores[i])) for i in real
        )
        self.replaced = len(wrong)
        self.scores = scores

    @staticmethod
    def _hidden(weights: Any, ids: Any, documents: Any, positions: Any) -> Any:
        w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        hidden = np.zeros((*ids.shape, CONFIG.hidden_size))
        for row in range(len(ids)):
            for number in set(documents[row].tolist()):
                here = documents[row] == number
                hidden[row, here] = reference._document(
                    w, CONFIG, ids[row, here], positions[row, here], 1.0
                )
        return hidden.reshape(-1, CONFIG.hidden_size)


def _weights(model: ReplacedTokenModel) -> dict[str, Any]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def test_losses_and_gradients_are_those_of_the_article() -> None:
    model, batch = _model(), _batch()
    # One guess is made right, so that a drawn token counts as original.
    right = _Plain(_weights(model), batch).drawn[2]
    batch.inputs["targets"][2] = right
    expected = _Plain(_weights(model), batch)
    *_, drawn, scores = _run(model, batch)
    assert drawn.tolist() == expected.drawn
    assert 0 < expected.replaced < len(drawn)
    assert scores.flatten().tolist() == pytest.approx(expected.scores.tolist(), rel=1e-9)
    assert OBJECTIVE.tracked_loss({"loss": 3.0, "discriminator": 0.4}) == 3.0
    sums = OBJECTIVE(model, batch)
    found = {name: [each.item() for each in pair] for name, pair in sums.items()}
    assert found["loss"] == pytest.approx([expected.generator, 7])
    assert found["accuracy"] == [expected.hits, 7]
    assert found["sampled_accuracy"] == [7 - expected.replaced, 7]
    assert found["discriminator"] == pytest.approx([expected.discriminator, 17])

    (sums["loss"].total / 7 + 50 * sums["discriminator"].total / 17).backward()
    chosen = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        weights = _weights(model)
        flat = weights[name].reshape(-1)
        assert parameter.grad is not None
        # A row of the table that the batch has; elsewhere any element.
        at = 12 * right if name == "encoder.token_embedding.weight" else chosen.integers(len(flat))
        values = []
        for change in (1e-5, -1e-5):
            flat[at] += change
            # What is drawn does not follow the weights: there is no gradient through it.
            one = _Plain(weights, batch, expected.drawn)
            values.append(one.generator / 7 + 50 * one.discriminator / 17)
            flat[at] -= change
        slope = (values[0] - values[1]) / 2e-5
        assert parameter.grad.flatten()[at].item() == pytest.approx(slope, rel=1e-5, abs=1e-6), name


def test_the_discriminator_moves_the_tables_but_nothing_else_of_the_generator() -> None:
    model = _model()
    OBJECTIVE(model, _batch())["discriminator"].total.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("objective.generator."):
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
    model.zero_grad()
    OBJECTIVE(model, _batch())["loss"].total.backward()
    moved = {name for name, each in model.named_parameters() if each.grad is not None}
    shared = {f"encoder.{table}_embedding.weight" for table in ("token", "position", "segment")}
    shared |= {"encoder.embedding_norm.weight", "encoder.embedding_norm.bias"}
    assert {name for name in moved if not name.startswith("objective.generator.")} == shared


def test_each_table_is_saved_once_and_a_reloaded_model_has_the_same_losses() -> None:
    model, other, batch = _model(1), _model(2), _batch()
    state = model.state_dict()
    tables = [name for name in state if "_embedding." in name or "embedding_norm" in name]
    assert all(name.startswith("encoder.") for name in tables)
    assert len(tables) == 5
    assert sum(value.shape[0] == 29 and value.ndim == 2 for value in state.values()) == 1
    assert state.keys() == {name for name, _ in model.named_parameters()}
    other.load_state_dict(state)
    expected, found = OBJECTIVE(model, batch), OBJECTIVE(other, batch)
    assert all(torch.equal(found[name].total, expected[name].total) for name in expected)


def test_draws_follow_from_the_batch_alone_and_alpha_is_of_both_encoders() -> None:
    model, batch = _model(), _batch()
    whole = _run(model, batch)[2]
    assert torch.equal(whole, _run(model, batch)[2])
    parts = [_run(model, _only_row(batch, row))[2] for row in range(ROWS)]
    assert torch.equal(torch.cat(parts), whole)
    before = _run(model, batch)
    model.set_alpha(0.25)
    after = _run(model, batch)
    assert [float(each.alpha) for each in model.encoders] == [0.25, 0.25]
    assert before[0] != after[0]


def test_without_targets_it_gives_the_generators_logits_and_adds_nothing() -> None:
    model, batch = _model(), _batch()
    layout = rows(batch.documents, batch.positions)
    logits = model(batch.input_ids, layout, batch.inputs["masked_index"])
    assert isinstance(logits, Tensor)
    picked = logits.log_softmax(-1).gather(1, batch.inputs["targets"][:, None])
    assert -picked.sum().item() == pytest.approx(_run(model, batch)[0].item())
    inputs = {name: each[:0] for name, each in batch.inputs.items()}
    nothing = replace(batch, inputs=inputs, weights=dict.fromkeys(batch.weights, 0.0))
    sums = OBJECTIVE(model, nothing)
    assert all(each.item() == 0 for pair in sums.values() for each in pair)


def test_draws_at_even_steps_give_each_token_its_share() -> None:
    # Each id is found for an interval as long as its probability: at N even steps, N p times but
    # for the two ends.
    torch.manual_seed(0)
    count, x, weight = 4000, 3 * torch.randn(1, 4), torch.randn(13, 4)
    uniform = torch.arange(count) / count
    for temperature in (1.0, 0.5):
        found = rtd.draw_tokens(x.expand(count, -1), weight, None, uniform, temperature)
        shares = ((x.double() @ weight.double().T)[0] / temperature).softmax(-1)
        assert (torch.bincount(found, minlength=13) - count * shares).abs().max() < 1.01
        assert torch.equal(found, found.sort().values)


def test_no_draw_gives_a_token_of_probability_0_and_nan_gives_an_id() -> None:
    never = torch.tensor([-math.inf, 0.0, 0.3, -math.inf, 1.0, -math.inf, -math.inf])
    ends = torch.tensor([0.0, 1 - 2.0**-24, 1.0])
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        x, weight = torch.zeros(3, 2, dtype=kind), torch.zeros(7, 2, dtype=kind)
        assert rtd.draw_tokens(x, weight, never.to(kind), ends, 1.0).tolist() == [1, 4, 4]
        found = rtd.draw_tokens(x, weight, never.to(kind) + math.nan, ends, 1.0)
        assert 0 <= int(found.min()) <= int(found.max()) < 7


def test_chunks_of_rows_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, uniform = torch.randn(50, 4), torch.randn(13, 4), torch.rand(50)
    whole = rtd.draw_tokens(x, weight, None, uniform, 1.0)
    monkeypatch.setattr(kernel, "LOGITS_BYTES", 13 * 20 * 7)
    assert torch.equal(rtd.draw_tokens(x, weight, None, uniform, 1.0), whole)


def test_sums_of_the_discriminator_written_out() -> None:
    chosen = np.random.default_rng(0)
    # Many equal logits, some of them 0, which is not above 0; padding has the largest.
    logits = chosen.integers(-3, 4, 60) / 2.0
    replaced, counted = chosen.random(60) < 0.3, chosen.random(60) < 0.8
    logits[~counted] = 9.0
    losses = [math.log1p(math.exp(-z if r else z)) for z, r in zip(logits, replaced, strict=True)]
    good = [z for z, r, c in zip(logits, replaced, counted, strict=True) if c and not r]
    bad = [z for z, r, c in zip(logits, replaced, counted, strict=True) if c and r]
    ordered = sum((b > g) + 0.5 * (b == g) for b in bad for g in good)
    expected = {
        "discriminator": [sum(x for x, c in zip(losses, counted, strict=True) if c), sum(counted)],
        "auc": [ordered, len(bad) * len(good)],
        "precision": [sum(b > 0 for b in bad), sum(z > 0 for z in (*good, *bad))],
        "recall": [sum(b > 0 for b in bad), len(bad)],
    }
    assert len({*good} & {*bad}) > 3
    for kind in (torch.float64, torch.bfloat16):
        sums = rtd.detection_sums(
            torch.from_numpy(logits).to(kind), torch.from_numpy(replaced), torch.from_numpy(counted)
        )
        assert sums.keys() == expected.keys()
        for name, pair in sums.items():
            assert [each.item() for each in pair] == pytest.approx(expected[name], rel=1e-6), name
    assert {each.dtype for pair in sums.values() for each in pair} == {torch.float32}


def _made(
    kind: ObjectiveConfig, micro_batch: int, *, epoch: int = 0, purpose: Purpose = Purpose.MASK
) -> list[Batch]:
    """Micro-batches of 64 sequences of one document with 126 words."""
    shape = 64, 128
    tokens = np.random.default_rng(0).integers(5, 1000, shape)
    tokens[:, 0], tokens[:, -1] = VOCABULARY.cls, VOCABULARY.sep
    maskable = np.ones(shape, np.bool_)
    maskable[:, [0, -1]] = False
    slots = PackedSequences(tokens=tokens, documents=np.ones(shape, np.int32),
                            positions=np.tile(np.arange(128), (64, 1)),
                            word_starts=np.ones(shape, np.bool_), maskable=maskable)  # fmt: skip
    numbers, nothing = np.arange(64), np.zeros(64, np.int64)
    # Numbers of samples that need more than 32 bits.
    where = Locations(nothing + epoch, nothing, numbers, numbers * 2**30, nothing > 0)
    data = DataConfig(dir="none", masking="token", mask_selection="exact", replace_mask_prob=0.85,
                      replace_random_prob=0.0)  # fmt: skip
    made = MaskedInputs(data, VOCABULARY, 7, purpose, PARTS[kind.kind])
    return made(slots, where, 0, micro_batch=micro_batch, places=np.arange(len(where.blocks)))


def test_inputs_are_masks_or_the_token_itself_and_a_draw_for_each() -> None:
    [whole] = _made(RTD, 64)
    [plain] = _made(ObjectiveConfig(), 64)
    assert np.array_equal(whole.input_ids, plain.input_ids)
    assert whole.hash != plain.hash
    assert whole.weights == {"loss": 64 * 19.0, "discriminator": 64 * 128.0}
    seen = whole.input_ids.reshape(-1)[whole.inputs["masked_index"]]
    is_mask = seen == VOCABULARY.mask
    assert np.array_equal(seen[~is_mask], whole.inputs["targets"][~is_mask])
    # 1,216 tokens, 0.85 of them; five standard deviations are 0.051.
    assert abs(is_mask.mean() - 0.85) < 0.051
    uniform = whole.inputs["uniform"]
    assert uniform.dtype == np.float32
    assert 0 <= uniform.min() < uniform.max() < 1
    assert len(np.unique(uniform)) > 1210
    for other in (_made(RTD, 64, epoch=1), _made(RTD, 64, purpose=Purpose.EVAL_MASK)):
        assert np.isin(other[0].inputs["uniform"], uniform).mean() < 0.01


def test_a_split_into_micro_batches_changes_nothing() -> None:
    [whole], parts = _made(RTD, 64), _made(RTD, 16)
    for name in ("targets", "uniform"):
        joined = np.concatenate([part.inputs[name] for part in parts])
        assert np.array_equal(joined, whole.inputs[name])
    assert sum(part.hash for part in parts) % 2**64 == whole.hash
    assert sum(part.weights["discriminator"] for part in parts) == 64 * 128


def test_tokens_are_drawn_by_their_probabilities() -> None:
    # Chi-square over 13 tokens, so 12 degrees of freedom: 39.13 is passed once in 10,000 times.
    draws = [_made(RTD, 64, epoch=epoch)[0].inputs["uniform"] for epoch in range(4)]
    uniform = torch.from_numpy(np.concatenate(draws))
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4) / 2, torch.randn(13, 4)
    found = rtd.draw_tokens(x.expand(len(uniform), -1), weight, None, uniform, 1.0)
    expected = len(uniform) * (x.double() @ weight.double().T)[0].softmax(-1)
    assert len(uniform) == 4864
    assert expected.min() > 20
    assert ((torch.bincount(found, minlength=13) - expected).square() / expected).sum() < 39.13


def test_the_generator_has_whole_heads_and_a_config_that_fits() -> None:
    base = ModelConfig(vocab_size=99, num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072)
    quarter = generator_of(base, ObjectiveConfig(kind="rtd"))
    assert (quarter.hidden_size, quarter.num_heads, quarter.ffn_size) == (192, 3, 768)
    assert (quarter.num_layers, quarter.embedding_width, quarter.head_size) == (12, 768, 64)
    third = generator_of(
        base, ObjectiveConfig(kind="rtd", generator_size=1 / 3, generator_layers=0.5)
    )
    assert (third.hidden_size, third.num_layers) == (256, 6)
    values = {"run_dir": "none", "data": {"dir": "none"}, "objective": {"kind": "rtd"}}
    wanted = "data.replace_mask_prob=0.85 data.replace_random_prob=0"
    with pytest.raises(ConfigError, match=wanted):
        build(PretrainConfig, values, "test", [])
    ours = wanted.split()
    assert build(PretrainConfig, values, "test", ours).objective.discriminator_weight == 50
    with pytest.raises(ConfigError, match=wanted):
        build(PretrainConfig, values, "test", [*ours, "data.similar=table.npy"])
    train = {"num_steps": 20, "warmup_steps": 1}
    stage = {
        "name": "b",
        "steps": 10,
        "data": {"replace_mask_prob": 0.8, "replace_random_prob": 0.1},
    }
    stages = {"train": train, "stages": [{"name": "a", "steps": 10}, stage]}
    with pytest.raises(ConfigError, match=f"stage b: .*{wanted}"):
        build(PretrainConfig, values | stages, "test", ours)
    with pytest.raises(ConfigError, match=r"objective\.temperature=2\.0 has no meaning"):
        build(PretrainConfig, values, "test", ["objective.kind=mlm", "objective.temperature=2"])
