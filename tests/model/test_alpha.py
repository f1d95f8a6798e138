"""Alpha is a buffer of the encoder: in fp32, set in place, and in no checkpoint."""

import copy

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import padded

CONFIG = ModelConfig(vocab_size=40, num_layers=3, hidden_size=16, num_heads=2, ffn_size=32)
# Between two numbers of bf16: 0.3 would become 0.30078125.
ALPHA = 0.3


def _model() -> MaskedLanguageModel:
    torch.manual_seed(0)
    return MaskedLanguageModel(CONFIG).eval()


def _batch() -> tuple[torch.Tensor, ...]:
    return torch.arange(18).view(2, 9), padded(torch.tensor([9, 6]), 9), torch.arange(18)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_module_keeps_alpha_in_fp32(dtype: torch.dtype) -> None:
    model = _model()
    model.encoder.set_alpha(ALPHA)
    cast = model.to(dtype)
    assert cast.encoder.token_embedding.weight.dtype == dtype
    assert cast.encoder.alpha.dtype == torch.float32
    assert cast.encoder.alpha.item() == pytest.approx(ALPHA, abs=1e-7)
    cast.encoder.set_alpha(0.7)
    assert cast.encoder.alpha.item() == pytest.approx(0.7, abs=1e-7)


def test_alpha_is_one_tensor_of_the_module_and_no_weight() -> None:
    model = _model()
    model.encoder.set_alpha(ALPHA)
    assert not [name for name in model.state_dict() if "alpha" in name]
    assert copy.deepcopy(model).encoder.alpha.item() == pytest.approx(ALPHA, abs=1e-7)
    with torch.device("meta"):
        model = MaskedLanguageModel(CONFIG)
    assert model.encoder.token_embedding.weight.is_meta
    assert model.encoder.alpha.item() == 1.0
    model.load_state_dict(_model().state_dict(), assign=True)
    assert torch.equal(model.eval()(*_batch()), _model()(*_batch()))
    model = _model().bfloat16()
    before = model.encoder.alpha
    model.encoder.set_alpha(ALPHA)
    assert model.encoder.alpha is before
    at_one = _model().bfloat16()
    assert not torch.equal(model(*_batch()), at_one(*_batch()))
    model.encoder.set_alpha(1.0)
    assert torch.equal(model(*_batch()), at_one(*_batch()))
