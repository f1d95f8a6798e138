"""Residual and RMSNorm in one pass, compiled ahead of time; `test_interpreted.py` runs them."""

import sys
from typing import Any

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.config.train import Implementation, KernelsConfig
from pipeline.errors import ConfigError
from pipeline.kernels.choose import choose, expected_on_gpu
from tests.support.grids import first_in_ci
from tests.support.triton import NEEDS_TRITON

# Hidden size, dropout and dtype: the sizes of the models, and the ends.
SIZES = [(768, 0.1, torch.bfloat16), (4096, 0.1, torch.float32), (40, 0.1, torch.bfloat16),
         *((size, dropout, torch.bfloat16) for size in (384, 1024) for dropout in (0.0, 0.1)),
         (768, 0.0, torch.bfloat16), (4096, 0.1, torch.bfloat16),
         (1536, 0.1, torch.float32)]  # fmt: skip
# Each size on one of the capabilities, in turn, then on the other.
CASES = [((90, 80)[(n + turn) % 2], *size) for turn in range(2) for n, size in enumerate(SIZES)]


@NEEDS_TRITON
@pytest.mark.skipif(sys.platform != "linux", reason="ptxas is Linux's")
@pytest.mark.parametrize(("capability", "size", "dropout", "dtype"), first_in_ci(CASES, 3))
def test_compiled_kernels(capability: int, size: int, dropout: float, dtype: torch.dtype) -> None:
    from benchmarks.tiles import compiled, found_in, name_of, norm

    for launch in norm(size, dropout, dtype):
        name, counts = name_of(launch), found_in(compiled(launch, capability))
        assert counts["local stores"] == counts["local loads"] == 0, name
        assert counts["narrow stores"] == counts["narrow loads"] == 0, name
        assert counts["wide stores"] > 0 < counts["wide loads"], name
        # So that an SM has 32 warps at a time.
        assert counts["registers"] <= 64, name


def _choose(asked: Implementation, **model: Any) -> None:
    config = ModelConfig(**model)
    choose(KernelsConfig(residual_norm=asked), config, "bf16", torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"norm_affine": True}, "norm_affine=True, .* the kernel is for rmsnorm without gain"),
        ({"hidden_size": 36}, "hidden_size=36, expected a multiple of 8 up to 4096"),
        ({"hidden_size": 4104}, "hidden_size=4104, expected a multiple of 8 up to 4096"),
        ({}, "the device is cpu|Triton is not installed"),
    ],
)
def test_what_cannot_be_fused_is_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels.residual_norm=fused: .*({said})"):
        _choose("fused", **model)
    _choose("auto", **model)


def test_what_a_gpu_will_choose() -> None:
    config = ModelConfig(score_residual="sum")
    auto, reference = KernelsConfig(), KernelsConfig(attention="reference", loss="reference")
    assert expected_on_gpu(auto, config, "bf16") == (True, True, True)
    assert expected_on_gpu(auto, config, "fp32") == (False, False, False)
    assert expected_on_gpu(reference, config, "bf16") == (False, True, False)
    forced = KernelsConfig(attention="fused", residual_norm="fused", loss="fused")
    assert expected_on_gpu(forced, config, "fp32") == (True, True, True)
    layernorm = ModelConfig(score_residual="sum", num_heads=16, norm="layernorm")
    assert expected_on_gpu(auto, layernorm, "bf16") == (False, False, True)
