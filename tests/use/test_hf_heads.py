"""The exported modelling file as a user of transformers meets it, and every head in it."""

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.hf_common_tests import ARCHITECTURES, load_modeling
from pipeline.config.model import ModelConfig
from pipeline.model.architecture import WEIGHTS_FILE
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import Layout, rows
from pipeline.use.convert import load_own_hf
from pipeline.use.hf import HEADS
from tests.parity.test_hugging_face import randomised

SIZES = {"vocab_size": 40, "num_layers": 3, "hidden_size": 16, "num_heads": 2, "ffn_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "all else": {
        **ARCHITECTURES["all else"], "max_positions": 12, "position_offset": 2, "embedding_size": 12
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def modeling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    yield load_modeling(tmp_path_factory.mktemp("modeling"))
    del sys.modules["modeling_postnorm"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def _config(modeling: ModuleType, kind: str = "roformer_v2", **changes: Any) -> Any:
    values = asdict(ModelConfig(**{**SIZES, **KINDS[kind]}))
    return modeling.PostnormConfig(**values, pad_token_id=0, **changes)


def _model(modeling: ModuleType, name: str, config: Any, *, train: bool = False) -> Any:
    return randomised(getattr(modeling, f"Postnorm{name}")(config)).train(train)


def _ids(*shape: int) -> Tensor:
    return torch.randint(5, 40, shape)


def _layout(ids: Tensor) -> Layout:
    return rows(torch.ones_like(ids), torch.arange(ids.shape[1]).expand_as(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_trainer_s_model(modeling: ModuleType, kind: str) -> None:
    ours = MaskedLanguageModel(ModelConfig(**{**SIZES, **KINDS[kind]})).eval()
    theirs = _model(modeling, "ForMaskedLM", _config(modeling, kind))
    names = {name.removeprefix("postnorm."): each for name, each in theirs.state_dict().items()}
    ours.load_state_dict(names)
    ids = _ids(2, 7)
    found = ours(ids, _layout(ids), torch.arange(14))
    assert torch.allclose(found, theirs(ids).logits.flatten(0, 1), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_who_sees_whom(modeling: ModuleType, kind: str) -> None:
    """Two texts in a row that do not see each other are two rows."""
    model = _model(modeling, "Model", _config(modeling, kind))
    ids, text = _ids(1, 8), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    allowed = (text[:, None] == text[None, :])[None, None]
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    expected = torch.cat(
        [model(ids[:, :3]).last_hidden_state, model(ids[:, 3:]).last_hidden_state], 1
    )
    added = torch.zeros(1, 1, 8, 8).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, allowed.long(), added):
        found = model(ids, attention_mask=mask, position_ids=places).last_hidden_state
        assert torch.allclose(found, expected, atol=1e-5)
    if kind == "roformer_v2":
        classifier = _model(modeling, "ForSequenceClassification", _config(modeling, pool="mean"))
        with pytest.raises(ValueError, match="which tokens are padding"):
            classifier(ids, attention_mask=allowed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ForMaskedLM", "ForSequenceClassification"])
def test_weights_may_lie_elsewhere(modeling: ModuleType, kind: str, name: str) -> None:
    model, ids = _model(modeling, name, _config(modeling, kind)), _ids(2, 7)
    with torch.no_grad():
        expected = model(ids).logits
        accelerate.cpu_offload(model, execution_device="cpu")
        assert model._encoder.token_embedding.weight.device.type == "meta"
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_all_linear_layers(modeling: ModuleType, kind: str, tmp_path: Path) -> None:
    model = _model(modeling, "ForSequenceClassification", _config(modeling, kind), train=True)
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", r=2, lora_dropout=0.0)
    adapted = peft.get_peft_model(model, lora)
    # peft leaves out the classifier, which it trains whole.
    layers = [name for name, each in adapted.named_modules() if hasattr(each, "lora_A")]
    assert len(layers) >= 4 * SIZES["num_layers"]
    assert not any("classifier" in name for name in layers)
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2)
    for _ in range(3):
        adapted(_ids(4, 7), labels=torch.tensor([0, 1, 1, 0])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = _ids(2, 7)
    expected = adapted.eval()(ids).logits
    adapted.merge_and_unload().save_pretrained(tmp_path)
    merged = modeling.PostnormForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
    own = load_own_hf(tmp_path).model.encoder(ids, _layout(ids))
    assert torch.allclose(own, merged.postnorm(ids).last_hidden_state, atol=1e-5)


def test_a_config_without_arguments_is_the_default(modeling: ModuleType, tmp_path: Path) -> None:
    config = modeling.PostnormConfig()
    assert config.num_attention_heads == ModelConfig().num_heads
    for name, value in asdict(ModelConfig()).items():
        assert getattr(config, name) == (value if name != "vocab_size" else 30522), name
    theirs = modeling.PostnormConfig(num_hidden_layers=2, hidden_dropout_prob=0.3)
    assert (theirs.num_layers, theirs.dropout) == (2, 0.3)
    changed = _config(modeling, "all else")
    changed.save_pretrained(tmp_path)
    again = modeling.PostnormConfig.from_pretrained(tmp_path, attention_probs_dropout_prob=0.2)
    assert again.attention_dropout == 0.2
    again = modeling.PostnormConfig.from_pretrained(tmp_path)
    assert {name: getattr(again, name) for name in asdict(ModelConfig())} == asdict(
        ModelConfig(**{**SIZES, **KINDS["all else"]})
    )


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_and_positions_may_be_given(modeling: ModuleType, kind: str) -> None:
    model, ids = _model(modeling, "Model", _config(modeling, kind)), _ids(2, 7)
    expected = model(ids).last_hidden_state
    embeds, positions = model.get_input_embeddings()(ids), torch.arange(7)[None]
    given = model(inputs_embeds=embeds, position_ids=positions).last_hidden_state
    assert torch.allclose(given, expected, atol=1e-6)
    turned = model(ids, position_ids=positions.flip(-1)).last_hidden_state
    assert not torch.allclose(turned, expected, atol=1e-3)
    # Slots turned around with their positions are the same sequence.
    again = model(ids.flip(-1), position_ids=positions.flip(-1)).last_hidden_state
    assert torch.allclose(again.flip(1), expected, atol=1e-5)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="pass input_ids or inputs_embeds, and not both"):
            model(**wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_are_asked_for(modeling: ModuleType, kind: str) -> None:
    ids, mask = _ids(2, 7), torch.ones(2, 7)
    mask[1, 5:] = 0
    asked = {"output_hidden_states": True, "output_attentions": True}
    for name in ("Model", *(f"For{head}" for head in HEADS if head != "MultipleChoice")):
        model = _model(modeling, name, _config(modeling, kind))
        plain, full = model(ids, mask), model(ids, mask, **asked)
        assert plain.hidden_states is None
        assert plain.attentions is None
        assert torch.allclose(plain[0], full[0], atol=1e-5)
        assert [tuple(each.shape) for each in full.hidden_states] == [(2, 7, 16)] * 4
        assert [tuple(each.shape) for each in full.attentions] == [(2, 2, 7, 7)] * 3
        for each in full.attentions:
            assert torch.allclose(each.sum(-1), torch.ones(2, 2, 7))
            assert not each[1, :, :, 5:].any()
        as_tuple = model(ids, mask, return_dict=False, **asked)
        assert isinstance(as_tuple, tuple)
        assert torch.equal(as_tuple[0], full[0])
        model.config.output_hidden_states = True
        assert len(model(ids, mask).hidden_states) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_see_nothing_and_stand_on_the_left(modeling: ModuleType, kind: str) -> None:
    model, ids = _model(modeling, "Model", _config(modeling, kind)), _ids(2, 8)
    right = torch.ones(2, 8)
    right[1, 5:] = 0
    expected = model(ids, attention_mask=right)
    seen = right[:, None, :, None].bool() & right[:, None, None, :].bool()
    for mask in (seen, torch.zeros(2, 1, 8, 8).masked_fill(~seen, -torch.inf)):
        found = model(ids, attention_mask=mask, output_attentions=True)
        states = found.last_hidden_state
        assert torch.allclose(states[1, :5], expected.last_hidden_state[1, :5], atol=1e-5)
        assert bool(states.isfinite().all())
    left, places = right.flip(-1), torch.arange(8).expand(2, -1)
    moved = torch.stack((ids[0], ids[1].roll(3)))
    places = torch.stack((places[0], (places[1] - 3).clamp(min=0)))
    found = model(moved, attention_mask=left, position_ids=places)
    if kind == "all else":  # it has a pooler
        assert torch.allclose(found.pooler_output, expected.pooler_output, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attentions", [False, True])
def test_rows_of_padding_give_no_nan(modeling: ModuleType, kind: str, attentions: bool) -> None:
    model = _model(modeling, "ForSequenceClassification", _config(modeling, kind), train=True)
    ids, mask = _ids(3, 6), torch.ones(3, 6)
    mask[1] = 0
    mask[2, 4:] = 0
    found = model(ids, mask, labels=torch.tensor([0, 1, 1]), output_attentions=attentions)
    found.loss.backward()
    assert bool(found.logits.isfinite().all())
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(bool(grad.isfinite().all()) for grad in grads)
    model.eval()
    assert torch.allclose(model(ids, mask).logits[0], model(ids[:1]).logits[0], atol=1e-5)


def test_too_long_a_row_is_refused_and_losses_are_means(modeling: ModuleType) -> None:
    model = _model(modeling, "ForMaskedLM", _config(modeling, "all else"))
    assert model(_ids(1, 10)).logits.shape == (1, 10, 40)
    with pytest.raises(ValueError, match=r"has 11 positions, this model has 10; .*max_length=10"):
        model(_ids(1, 11))
    with pytest.raises(ValueError, match=r"has 11 positions, this model has 10"):
        model(_ids(1, 2), position_ids=torch.tensor([[0, 10]]))
    assert _model(modeling, "Model", _config(modeling))(_ids(1, 600))[0].shape == (1, 600, 16)
    assert modeling.PostnormForMaskedLM.accepts_loss_kwargs is False


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_keeps_gradients(modeling: ModuleType, kind: str) -> None:
    model = _model(modeling, "ForTokenClassification", _config(modeling, kind), train=True)
    ids = _ids(2, 7)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, labels=torch.ones_like(ids)).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    for name, grad in gradients().items():
        assert (grad is None) == (plain[name] is None)
        assert grad is None or torch.equal(grad, plain[name]), name
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("kind", KINDS)
def test_resized_vocabulary_is_read_back(modeling: ModuleType, kind: str, tmp_path: Path) -> None:
    model = _model(modeling, "ForMaskedLM", _config(modeling, kind))
    ids = _ids(2, 7)
    before = model(ids).logits
    model.resize_token_embeddings(45)
    after = model(ids).logits
    assert after.shape == (2, 7, 45)
    assert torch.allclose(after[..., :40], before, atol=1e-6)
    model.save_pretrained(tmp_path)
    again = modeling.PostnormForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.config.vocab_size == 45
    assert torch.equal(again(ids).logits, after)
    own = load_own_hf(tmp_path).model.eval()(ids, _layout(ids), torch.arange(14))
    assert torch.allclose(own, after.flatten(0, 1), atol=1e-6)
    model.resize_token_embeddings(38)
    assert model(ids % 38).logits.shape == (2, 7, 38)


@pytest.mark.parametrize("head", HEADS)
def test_each_class_is_saved_and_loaded(modeling: ModuleType, head: str, tmp_path: Path) -> None:
    own = getattr(modeling, f"PostnormFor{head}")
    model = _model(modeling, f"For{head}", _config(modeling, "all else", num_labels=3))
    model.save_pretrained(tmp_path / "one")
    again, said = own.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = _ids(2, 4, 7) if head == "MultipleChoice" else _ids(2, 7)
    assert torch.equal(again.eval()(ids)[0], model(ids)[0])
    # The encoder alone, and the encoder with a new head.
    base = modeling.PostnormModel.from_pretrained(tmp_path / "one").eval()
    encoded = base(ids.flatten(0, -2)).last_hidden_state
    assert torch.equal(encoded, model.postnorm(ids.flatten(0, -2)).last_hidden_state)


def test_earlier_exports_are_read_by_this_project(modeling: ModuleType, tmp_path: Path) -> None:
    model = _model(modeling, "ForMaskedLM", _config(modeling, "all else"))
    model.save_pretrained(tmp_path)
    state = {name.removeprefix("postnorm."): each for name, each in model.state_dict().items()}
    # They had the encoder's prefix on the head, too.
    save_file({f"postnorm.{name}": each for name, each in state.items()}, tmp_path / WEIGHTS_FILE)
    found = load_own_hf(tmp_path).model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], each) for name, each in state.items())


def test_what_a_file_lacks_is_initialised_alone(modeling: ModuleType, tmp_path: Path) -> None:
    config = _config(modeling, "carried", num_labels=2)
    wide = modeling.PostnormConfig(**{**config.to_dict(), "hidden_size": 128, "num_layers": 2})
    model = _model(modeling, "ForMaskedLM", wide)
    state = model.state_dict()
    kept = {name: each for name, each in state.items() if "layers.0.attention.qkv" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    loaded = modeling.PostnormForSequenceClassification.from_pretrained(tmp_path)
    found = loaded.state_dict()
    assert all(torch.equal(found[name], each) for name, each in kept.items() if name in found)
    # DeepNorm: Xavier for queries and keys, (8 * 2)^(-1/4) of it for values.
    query, key, value = found["postnorm.encoder.layers.0.attention.qkv.weight"].chunk(3)
    for part, gain in ((query, 1.0), (key, 1.0), (value, 0.5)):
        assert float(part.std()) == pytest.approx(gain * math.sqrt(2 / 256), rel=0.05)
    assert bool((found["classifier.weight"] != 0).all())
    assert not found["classifier.bias"].any()
    assert loaded.postnorm.encoder.alpha == 1


def test_sentence_losses(modeling: ModuleType) -> None:
    ids, cases = _ids(4, 6), {
        "single_label_classification": (torch.tensor([2, 0, 1, 2]), F.cross_entropy),
        "multi_label_classification": (
            torch.randint(0, 2, (4, 3)).float(), F.binary_cross_entropy_with_logits
        ),
    }  # fmt: skip
    config = _config(modeling, num_labels=3)
    model = _model(modeling, "ForSequenceClassification", config)
    for kind, (labels, loss) in cases.items():
        for said in (None, kind):
            config.problem_type = said
            found = model(ids, labels=labels)
            assert torch.allclose(found.loss, loss(found.logits, labels))  # type: ignore[operator]
    model = _model(modeling, "ForSequenceClassification", _config(modeling, num_labels=1))
    found = model(ids, labels=torch.tensor([0.5, 1, -2, 3]))
    squares = (found.logits[:, 0] - torch.tensor([0.5, 1, -2, 3])) ** 2
    assert torch.allclose(found.loss, squares.mean())


def test_losses_of_tokens_answers_and_choices(modeling: ModuleType) -> None:
    config = _config(modeling, num_labels=3)
    ids, tags = _ids(2, 6), torch.randint(0, 3, (2, 6))
    tags[0, 3:] = -100
    found = _model(modeling, "ForTokenClassification", config)(ids, labels=tags)
    shares = found.logits.log_softmax(-1)
    gold = [-shares[row, at, tags[row, at]] for row, at in (tags != -100).nonzero().tolist()]
    assert torch.allclose(found.loss, torch.stack(gold).mean())

    model = _model(modeling, "ForQuestionAnswering", config)
    found = model(ids, start_positions=torch.tensor([1, 9]), end_positions=torch.tensor([[3], [5]]))
    start = -found.start_logits[0].log_softmax(-1)[1]
    ends = -found.end_logits.log_softmax(-1)[[0, 1], [3, 5]]
    assert torch.allclose(found.loss, (start + ends.mean()) / 2)

    model = _model(modeling, "ForMultipleChoice", config)
    ids, mask = _ids(2, 4, 6), torch.ones(2, 4, 6)
    mask[0, 1, 3:] = 0
    found = model(ids, mask, labels=torch.tensor([3, 0]))
    each = [model(ids[:1, 1:2, :3]).logits, model(ids[1:, :1]).logits]
    assert torch.allclose(torch.cat(each), found.logits[[0, 1], [1, 0]][:, None], atol=1e-5)
    assert torch.allclose(found.loss, F.cross_entropy(found.logits, torch.tensor([3, 0])))


@pytest.mark.parametrize("pool", ["cls", "mean", "first_last_avg", "pooler"])
def test_sentence_heads_read_what_the_config_says(modeling: ModuleType, pool: str) -> None:
    model = _model(modeling, "ForSequenceClassification", _config(modeling, "all else", pool=pool))
    ids, mask = _ids(1, 7), torch.tensor([[0, 1, 1, 1, 1, 0, 0]])
    states = model.postnorm(ids, mask, output_hidden_states=True)
    last, first = (states.hidden_states[at][0] for at in (-1, 1))
    expected = {
        "cls": last[1],
        "mean": last[1:5].mean(0),
        "first_last_avg": (first + last)[1:5].mean(0) / 2,
        "pooler": torch.tanh(model.postnorm.encoder.pooler(last[1])),
    }[pool]
    assert torch.allclose(model(ids, mask).logits[0], model.classifier(expected), atol=1e-5)


@pytest.mark.parametrize("pool", ["Mean", "max", "pooler"])
def test_a_pool_that_there_is_not_is_refused(modeling: ModuleType, pool: str) -> None:
    for name in ("ForSequenceClassification", "ForMultipleChoice"):
        with pytest.raises(ValueError, match=f"pool='{pool}', this model has cls, mean, first_"):
            _model(modeling, name, _config(modeling, pool=pool))
