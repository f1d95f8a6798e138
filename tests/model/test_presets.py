"""The named architectures: published sizes, packing, alpha, initialisation."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.model import layers
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import Trace
from pipeline.model.layout import packed, padded, rows
from tests.support.grids import first_in_ci

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
SMALL = ("vocab_size=60", "num_layers=3", "hidden_size=24", "num_heads=3", "ffn_size=40",
         "dropout=0.0", "attention_dropout=0.0")  # fmt: skip
FAMILIES = sorted({preset.rpartition("-")[0] for preset in PRESETS})


def config(preset: str, *overrides: str) -> ModelConfig:
    return load(ModelConfig, CONFIGS / f"{preset}.yaml", overrides).config


def num_parameters(preset: str, vocab_size: int) -> int:
    with torch.device("meta"):
        model = MaskedLanguageModel(config(preset, f"vocab_size={vocab_size}"))
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_published_size_is_there() -> None:
    sizes = {"bert": "base large small", "roberta": "base large", "roformer": "base small",
             "realformer": "base large small xlarge", "roformer_v2": "base large small",
             "realformer_v2": "base large small", "albert": "base",
             "electra": "base small"}  # fmt: skip
    expected = {f"{family}-{size}" for family, names in sizes.items() for size in names.split()}
    assert set(PRESETS) == expected


DEEP = {"score_residual": "mean", "residual": "deepnorm", "init": "deepnorm"}


@pytest.mark.parametrize(
    ("size", "carried"), [("base", DEEP), ("large", DEEP), ("small", {"score_residual": "mean"})]
)
def test_realformer_v2_differs_in_its_carry_and_start(size: str, carried: dict[str, str]) -> None:
    ours, theirs = (
        asdict(config(f"{family}-{size}")) for family in ("realformer_v2", "roformer_v2")
    )
    differs = {name: value for name, value in ours.items() if value != theirs[name]}
    assert differs == {**carried, "attention_dropout": 0.0}


# Published, in millions: RoFormerV2 at vocabulary 12,000, RealFormer (google-research
# `realformer/README.md`) with a pooler at 30,522.
@pytest.mark.parametrize(("preset", "vocab_size", "millions", "tolerance"), [
    ("roformer_v2-small", 12_000, 15.23, 0.005), ("realformer_v2-small", 12_000, 15.23, 0.005),
    ("roformer_v2-base", 12_000, 94.15, 0.005), ("realformer_v2-base", 12_000, 94.15, 0.005),
    ("roformer_v2-large", 12_000, 314.28, 0.005), ("realformer_v2-large", 12_000, 314.28, 0.005),
    ("realformer-small", 30_522, 30, 1.5), ("realformer-base", 30_522, 110, 1.5),
    ("realformer-large", 30_522, 340, 5), ("realformer-xlarge", 30_522, 1000, 80),
])  # fmt: skip
def test_published_sizes(preset: str, vocab_size: int, millions: float, tolerance: float) -> None:
    assert num_parameters(preset, vocab_size) / 1e6 == pytest.approx(millions, abs=tolerance)


THEIRS = {"bert": "Bert", "roberta": "Roberta", "roformer": "RoFormer", "albert": "Albert",
          "electra": "Electra"}  # fmt: skip


@pytest.mark.parametrize(
    "preset", first_in_ci(p for p in reversed(PRESETS) if p.split("-")[0] in THEIRS)
)
def test_sizes_are_those_of_transformers(preset: str) -> None:
    ours = config(preset)
    name = THEIRS[preset.split("-")[0]]
    values: dict[str, Any] = {
        "vocab_size": 21_128, "hidden_size": ours.hidden_size, "num_hidden_layers":
        ours.num_layers, "num_attention_heads": ours.num_heads, "intermediate_size": ours.ffn_size,
        "max_position_embeddings": ours.max_positions, "type_vocab_size": ours.type_vocab_size,
        "embedding_size": ours.embedding_width,
    }  # fmt: skip
    with torch.device("meta"):
        cls = getattr(transformers, f"{name}ForMaskedLM")
        theirs = cls(cls.config_class(**values))
    # RoFormer's table of angles is a parameter to transformers.
    count = sum(p.numel() for n, p in theirs.named_parameters() if "embed_positions" not in n)
    assert num_parameters(preset, 21_128) == count


def _grads(model: MaskedLanguageModel, x: Tensor, direction: Tensor) -> list[Tensor]:
    model.zero_grad()
    (x * direction).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", [*FAMILIES, "mean", "entropy", "pre"])
def test_packed_padded_and_rows_are_one_model(family: str) -> None:
    extra = {
        "mean": ["score_residual=mean"], "entropy": ["attention_scale=entropy_invariant"],
        "pre": ["norm_placement=pre", "residual=plain"],
    }.get(family, [])  # fmt: skip
    preset = "realformer_v2-small" if extra else f"{family}-base"
    torch.manual_seed(0)
    model = MaskedLanguageModel(config(preset, *SMALL, "init=unit", *extra)).double()
    lengths = torch.tensor([7, 1, 19, 4])
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    ids = torch.randint(60, (31,))
    row, slots = torch.repeat_interleave(lengths), torch.arange(31)
    column = slots - ends[row]
    padded_ids = torch.full((4, 19), 7).index_put((row, column), ids)
    direction = torch.randn(31, 60, dtype=torch.float64)

    found = model(ids, packed(ends, 19, 31), slots)
    expected = model(padded_ids, padded(lengths, 19), row * 19 + column)
    # All four in one row, behind each other, with 5 slots of padding.
    documents = torch.cat((row + 1, torch.zeros(5, dtype=torch.int64)))[None]
    positions = torch.cat((column, torch.zeros(5, dtype=torch.int64)))[None]
    row_ids = torch.cat((ids, torch.full((5,), 7)))[None]
    together = model(row_ids, rows(documents, positions), slots)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-12)
    grads = _grads(model, expected, direction)
    assert len(grads) >= 2
    for other in (found, together):
        for grad, wanted in zip(_grads(model, other, direction), grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("extra", [
    "norm_placement=post", "norm_placement=pre residual=plain", "norm_eps=0.1", "residual=deepnorm",
    "residual=rezero",
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_alpha_zero_makes_every_block_the_identity(family: str, extra: str) -> None:
    torch.manual_seed(0)
    model = MaskedLanguageModel(config(f"{family}-base", *SMALL, *extra.split())).bfloat16()
    ids, layout = torch.randint(60, (2, 9)), padded(torch.tensor([9, 6]), 9)
    trace = Trace()
    model.encoder.set_alpha(0.0)
    model.encoder(ids, layout, trace=trace)
    embedded, *after = trace.hidden
    assert len(after) == 3
    if "norm_placement=pre" in extra:
        after[-1] = embedded  # the final norm stands behind the last block
    assert all(torch.equal(hidden, embedded) for hidden in after)


def _plain_residual(self: layers.Residual, x: Tensor, update: Tensor, _: Tensor) -> Tensor:
    update = self.dropout(update)
    update = update if self.gain is None else self.gain * update
    return (x if self.keep == 1.0 else self.keep * x) + update


def _plain_block(residual: Any, norm: Any, x: Tensor, update: Tensor, shared: Any) -> Tensor:
    return norm(residual(x, update, shared.alpha))  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_alpha_one_is_the_plain_block_bitwise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MaskedLanguageModel(config(f"{family}-base", *SMALL))
    batch = torch.randint(60, (2, 9)), padded(torch.tensor([9, 6]), 9), torch.arange(18)
    found = model(*batch)
    # The plain block, written down without an alpha.
    monkeypatch.setattr(layers.Residual, "forward", _plain_residual)
    monkeypatch.setattr(layers, "_join_and_norm", _plain_block)
    assert torch.equal(found, model(*batch))
    monkeypatch.undo()
    model.encoder.set_alpha(0.5)
    assert not torch.equal(found, model(*batch))


def test_changing_alpha_does_not_recompile() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = MaskedLanguageModel(config("realformer_v2-base", *SMALL))
    batch = torch.randint(60, (2, 9)), padded(torch.tensor([9, 6]), 9), torch.arange(18)
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for alpha in (0.0, 0.25, 0.5, 1.0):
        model.encoder.set_alpha(alpha)
        # Rotation is written in another way where it is compiled.
        assert torch.allclose(fast(*batch), model(*batch), rtol=0, atol=1e-5)
    assert len(compiled) == 1


# Standard deviation of a standard normal cut at -2 and 2: sqrt(1 - 2 a phi(a) / Z).
CUT = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


def _formula(init: str, name: str, size: dict[str, int]) -> float:
    """Standard deviation after the cut; the formulas are in `pipeline/model/encoder.py`."""
    width, inner, depth = size["hidden_size"], size["ffn_size"], size["num_layers"]
    fan_in = inner if "feed_forward.output" in name else width
    fan_out = inner if "feed_forward.inner" in name else width
    if init == "bert":
        return 0.02 * CUT
    if init == "deepnorm" and "embedding" not in name:
        gain = 1.0 if name.endswith((".q", ".k", "head_dense.weight")) else (8 * depth) ** -0.25
        return gain * math.sqrt(2 / (fan_in + fan_out))
    return (depth**-0.5 if init == "rsqrt_depth" else 1.0) / math.sqrt(fan_in)


@pytest.mark.parametrize("size", first_in_ci([
    {"num_layers": 4, "hidden_size": 128, "ffn_size": 512, "num_heads": 2},
    {"num_layers": 2, "hidden_size": 256, "ffn_size": 768, "num_heads": 4},
]))  # fmt: skip
@pytest.mark.parametrize("init", ["unit", "rsqrt_depth", "bert", "deepnorm"])
def test_initialisation_follows_its_formula(init: str, size: dict[str, int]) -> None:
    torch.manual_seed(0)
    base = ModelConfig(
        vocab_size=2000, bias=True, norm_affine=True, mlm_head="bert", init=init, **size
    )  # type: ignore[arg-type]
    groups: dict[str, list[Tensor]] = {}
    for name, value in MaskedLanguageModel(base).state_dict().items():
        if value.ndim < 2:
            expected = torch.ones_like(value) if "norm.weight" in name else torch.zeros_like(value)
            assert torch.equal(value, expected), name
        elif "layers" in name:
            parts = value.chunk(3) if "qkv" in name else (value,)
            for letter, part in zip("qkv" if "qkv" in name else " ", parts, strict=True):
                group = ".".join(name.split(".")[3:5]).replace("qkv", letter)
                groups.setdefault(group, []).append(part.flatten())
        elif value.numel() > 1000:
            groups.setdefault(name, []).append(value.flatten())
    assert len(groups) == 8
    for name, pieces in groups.items():
        values = torch.cat(pieces).double()
        std = _formula(init, name, size)
        # The sample deviation of n values of this (nearly normal) law errs by about std/sqrt(2n).
        assert abs(float(values.std()) - std) < 4 * std / math.sqrt(2 * len(values)), name
        assert abs(float(values.mean())) < 4 * std / math.sqrt(len(values)), name
        assert 1.9 * std / CUT < float(values.abs().max()) <= 2 * std / CUT * 1.0001, name
