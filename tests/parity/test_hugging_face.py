"""Hidden states and MLM logits against transformers on random weights, and the way there and back.

Biases, gains and shifts are random too: at their start, 0 and 1, they could not be told apart.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import Trace
from pipeline.model.layout import packed, padded
from pipeline.use.convert import hugging_face
from pipeline.use.folder import load_model
from pipeline.use.hf import ROFORMER_LONGEST, export_hf
from pipeline.use.surgery import convert
from tests.support.grids import first_in_ci

SIZES = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 40, "type_vocab_size": 2,
         "attn_implementation": "eager"}  # fmt: skip
LENGTHS = torch.tensor([17, 5, 11])


# The model of transformers, and how its config differs from SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {}),
    "roberta": (
        "RobertaForMaskedLM", {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
    ),
    "roformer": ("RoFormerForMaskedLM", {"pad_token_id": 0}),
    "bert gelu_new": ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
    "roformer rotary_value": ("RoFormerForMaskedLM", {"pad_token_id": 0, "rotary_value": True}),
    "roformer factorised": (
        "RoFormerForMaskedLM", {"pad_token_id": 0, "embedding_size": 24, "hidden_act": "relu"}
    ),
}  # fmt: skip


def randomised(model: nn.Module) -> nn.Module:
    """In evaluation mode, with something added to each parameter."""
    with torch.no_grad():
        # RoFormer's table of sinusoids is frozen.
        for parameter in (each for each in model.parameters() if each.requires_grad):
            scale = 0.3 * parameter.std() if parameter.ndim > 1 else 0.2
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


def make(name: str) -> nn.Module:
    """A transformers model of random weights, in evaluation mode."""
    torch.manual_seed(0)
    model_name, config = FAMILIES[name]
    cls = getattr(transformers, model_name)
    return randomised(cls(cls.config_class(**{**SIZES, **config})))


def converted(model: nn.Module, folder: Path) -> MaskedLanguageModel:
    """The same model of ours, by way of its files."""
    model.save_pretrained(folder / "hf")
    assert convert(folder / "hf", folder / "ours").read.left_out == []
    return load_model(folder / "ours").model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """(B, S) ids, attention mask and segments, padded at the end."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 97, (3, 17), generator=generator)
    mask = (torch.arange(17) < LENGTHS[:, None]).long()
    return ids, mask, torch.randint(0, 2, ids.shape, generator=generator)


def theirs(model: nn.Module, name: str, *, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    ids, mask, segments = batch()
    if name == "roberta":
        ids, segments = ids.masked_fill(mask == 0, 1), torch.zeros_like(segments)
    if name.startswith("roformer"):
        # Its table of angles is made in float32 whatever the model's dtype; make it exact.
        table = model.roformer.encoder.embed_positions.weight
        half = table.shape[1] // 2
        rows = torch.arange(table.shape[0], dtype=torch.float64)[:, None]
        angles = rows * 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
        table.data = torch.cat((angles.sin(), angles.cos()), dim=1).to(dtype)
    with torch.no_grad():
        out = model(
            input_ids=ids, attention_mask=mask, token_type_ids=segments, output_hidden_states=True
        )
    return list(out.hidden_states), out.logits


def ours(model: MaskedLanguageModel, name: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states and logits of padded input, and logits of the same tokens packed."""
    ids, mask, segments = batch()
    if name == "roberta":
        segments = torch.zeros_like(segments)
    layout, trace = padded(LENGTHS, 17), Trace(keep_probabilities=False)
    seen, ends = mask.bool(), torch.cat((torch.tensor([0]), LENGTHS.cumsum(0)))
    with torch.no_grad():
        x = model.encoder(ids, layout, segments=segments, trace=trace)
        layout = packed(ends, 17, int(LENGTHS.sum()))
        packed_x = model.encoder(ids[seen], layout, segments=segments[seen])
        return trace.hidden, model.head(x), model.head(packed_x)


def assert_same_logits(mine: MaskedLanguageModel, model: nn.Module, name: str) -> None:
    _, expected = theirs(model, name, dtype=torch.float64)
    seen = batch()[1].bool()
    assert float((ours(mine, name)[1] - expected)[seen].abs().max()) <= 1e-11


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", first_in_ci(FAMILIES, 3))
def test_states_are_equal(name: str, dtype: torch.dtype, largest: float, tmp_path: Path) -> None:
    model = make(name)
    mine = converted(model, tmp_path).to(dtype)
    expected_hidden, expected_logits = theirs(model.to(dtype), name, dtype=dtype)
    hidden, logits, packed_logits = ours(mine, name)
    seen = batch()[1].bool()
    assert len(hidden) == len(expected_hidden) == 4
    for mine_h, their_h in zip([*hidden, logits], [*expected_hidden, expected_logits], strict=True):
        assert float((mine_h - their_h)[seen].abs().max()) <= largest
    assert float((packed_logits - expected_logits[seen]).abs().max()) <= 10 * largest
    assert float(expected_logits.std()) > 0.1


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("name", "form"),
    first_in_ci(
        [("bert", "bin"), ("bert", "sharded"), *((name, "safetensors") for name in FAMILIES)], 5
    ),
)
def test_there_and_back_is_bit_identical(name: str, form: str, tmp_path: Path) -> None:
    model = make(name)
    source = tmp_path / "hf"
    if form == "bin":
        model.config.save_pretrained(source)
        torch.save(model.state_dict(), source / "pytorch_model.bin")
    else:
        model.save_pretrained(source, max_shard_size="40KB" if form == "sharded" else "5GB")
        assert (source / "model.safetensors.index.json").exists() == (form == "sharded")
    convert(source, tmp_path / "ours", family=None, overrides=[])
    export_hf(tmp_path / "ours", tmp_path / "back")
    again = type(model).from_pretrained(tmp_path / "back")
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for key in before:
        if not key.endswith("embed_positions.weight"):
            assert torch.equal(before[key], after[key]), key
    assert all(key in before for key in load_file(tmp_path / "back" / "model.safetensors"))
    for key, value in model.config.to_dict().items():
        if key in SIZES or key in FAMILIES[name][1] or key == "layer_norm_eps":
            found = getattr(again.config, key)
            if name.startswith("roformer") and key == "max_position_embeddings":
                value = max(value, ROFORMER_LONGEST)  # angles are computed and have no end
            same = {found, value} == {"gelu_new", "gelu_pytorch_tanh"} or found == value
            assert same, (key, found, value)


def test_pooler_is_taken_along(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = randomised(transformers.BertForPreTraining(transformers.BertConfig(**SIZES)))
    source.save_pretrained(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "ours", family=None, overrides=[]).read
    assert report.left_out == ["cls.seq_relationship.bias", "cls.seq_relationship.weight"]
    mine = load_model(tmp_path / "ours").model
    ids, mask, segments = batch()
    with torch.no_grad():
        expected = source.bert(ids, mask, segments).pooler_output
        x = mine.encoder(ids, padded(LENGTHS, 17), segments=segments)
        torch.testing.assert_close(mine.encoder.pool(x[:, 0]), expected)


def test_pre_norm_is_roberta_prelayernorm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.RobertaPreLayerNormConfig(**{**SIZES, "type_vocab_size": 1})
    model = randomised(transformers.RobertaPreLayerNormForMaskedLM(config))
    moved = {"attention_norm": "attention.LayerNorm",
             "feed_forward_norm": "intermediate.LayerNorm"}  # fmt: skip
    mine = converted(make("roberta"), tmp_path)
    mine = MaskedLanguageModel(replace(mine.config, norm_placement="pre", norm_eps=1e-12)).eval()
    theirs_state = model.state_dict()
    state = {key.replace("_prelayernorm.", "."): value for key, value in theirs_state.items()}
    weights = {}
    for key in mine.state_dict():
        found = hugging_face(key, "roberta")
        for ours_, theirs_ in moved.items():
            if f".{ours_}." in key:
                number, kind = key.split(".")[2], key.rpartition(".")[2]
                found = (f"roberta.encoder.layer.{number}.{theirs_}.{kind}",)
        if "final_norm" in key:
            found = (f"roberta.LayerNorm.{key.rpartition('.')[2]}",)
        weights[key] = torch.cat([state[one] for one in found])
    mine.load_state_dict(weights)
    assert_same_logits(mine.double(), model.double(), "roberta")


def test_albert_shares_layers_and_factorises() -> None:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        **{**SIZES, "embedding_size": 16, "hidden_act": "gelu_new"}, inner_group_num=1
    )
    model = randomised(transformers.AlbertForMaskedLM(config))
    mine = MaskedLanguageModel(
        ModelConfig(
            vocab_size=97, num_layers=3, hidden_size=48, num_heads=4, ffn_size=80,
            embedding_size=16, positions="learned", max_positions=40, norm="layernorm",
            norm_affine=True, bias=True, activation="gelu_tanh", share_layers=True,
            mlm_head="bert", embedding_dropout="after_norm",
        )
    ).eval()  # fmt: skip
    state = model.state_dict()
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    modules = {"encoder.token_embedding": ["albert.embeddings.word_embeddings"],
               "encoder.segment_embedding": ["albert.embeddings.token_type_embeddings"],
               "encoder.position_embedding": ["albert.embeddings.position_embeddings"],
               "encoder.embedding_norm": ["albert.embeddings.LayerNorm"],
               "encoder.embedding_projection": ["albert.encoder.embedding_hidden_mapping_in"],
               "encoder.layers.0.attention.qkv": [
                   f"{layer}.attention.{part}" for part in ("query", "key", "value")
               ],
               "encoder.layers.0.attention.output": [f"{layer}.attention.dense"],
               "encoder.layers.0.attention_norm": [f"{layer}.attention.LayerNorm"],
               "encoder.layers.0.feed_forward.inner": [f"{layer}.ffn"],
               "encoder.layers.0.feed_forward.output": [f"{layer}.ffn_output"],
               "encoder.layers.0.feed_forward_norm": [f"{layer}.full_layer_layer_norm"],
               "head_dense": ["predictions.dense"],
               "head_norm": ["predictions.LayerNorm"]}  # fmt: skip
    weights = {"head_bias": state["predictions.bias"]}
    for key in mine.state_dict():
        module, _, kind = key.rpartition(".")
        if module:
            weights[key] = torch.cat([state[f"{m}.{kind}"] for m in modules[module]])
    mine.load_state_dict(weights)
    assert_same_logits(mine.double(), model.double(), "albert")


def test_untied_output_is_refused(tmp_path: Path) -> None:
    model = make("bert")
    state = dict(model.state_dict())
    state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"] + 1
    model.config.save_pretrained(tmp_path / "hf")
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"decoder\.weight differs from"):
        convert(tmp_path / "hf", tmp_path / "ours", family=None, overrides=[])
    assert not (tmp_path / "ours").exists()
