"""The fused kernels without a GPU, compiled ahead of time; `test_interpreted.py` runs them.

Without a GPU nothing here says how fast they are.
"""

import sys
from typing import Any

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.config.train import Implementation, KernelsConfig
from pipeline.errors import ConfigError
from pipeline.kernels.choose import choose
from tests.support.grids import first_in_ci
from tests.support.triton import NEEDS_TRITON

CPU = torch.device("cpu")


# Capability, longest window, head size and dropout. The first two have each capability, each way of
# the backward pass and the ends of head sizes.
CASES = [(90, 512, 128, 0.1), (80, 128, 64, 0.1), (90, 64, 64, 0.1), (80, 512, 128, 0.1),
         (90, 128, 64, 0.0), (90, 512, 64, 0.1), (80, 512, 64, 0.1), (90, 128, 64, 0.1),
         (100, 128, 64, 0.1), (100, 512, 64, 0.1), (80, 64, 128, 0.1)]  # fmt: skip


@pytest.mark.long
@NEEDS_TRITON
@pytest.mark.skipif(sys.platform != "linux", reason="ptxas is Linux's")
@pytest.mark.parametrize(("capability", "longest", "head_size", "dropout"), first_in_ci(CASES, 2))
def test_compiled_kernels(capability: int, longest: int, head_size: int, dropout: float) -> None:
    """In the tiles that are taken where nothing was measured."""
    from benchmarks.tiles import SHARED_KIB, Layer, compiled, found_in, name_of
    from pipeline.kernels.tiles import Target

    layer = Layer.make(longest, head_size, dropout, tokens=8 * longest)
    launches = list(layer.launches(Target((capability // 10, capability % 10))))
    assert len(launches) in (3, 5)  # a window of at most a tile, and longer ones
    for launch in launches:
        name, counts = name_of(launch), found_in(compiled(launch, capability))
        assert counts["local stores"] == counts["local loads"] == 0, name
        assert counts["narrow stores"] == counts["narrow loads"] == 0, name
        assert counts["wide loads"] > 0, name
        if name == "delta":
            continue
        assert counts["wide stores"] > 0, name
        if name == "turn":
            continue
        assert counts[{80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[capability]] > 0, name
        assert counts["shared"] <= SHARED_KIB[capability] * 1024, name


def _chosen(attention: Implementation, **model: Any) -> bool:
    config = ModelConfig(**{"score_residual": "sum", **model})
    return choose(KernelsConfig(attention=attention), config, "bf16", CPU).attention


def test_choice_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert not _chosen("auto")
    assert not _chosen("reference")
    said = [each.message.split(" (")[0] for each in caplog.records]
    assert said == ["attention: PyTorch", "residual and norm: PyTorch", "loss: PyTorch"] * 2
    with pytest.raises(ConfigError, match=r"attention=fused: (the device is cpu|Triton is)"):
        _chosen("fused")
    with pytest.raises(ConfigError, match="flash attention over documents is for GPUs"):
        _chosen("fused", score_residual="none")
    with pytest.raises(ConfigError, match="is 24, expected one of 32, 64, 128"):
        _chosen("fused", hidden_size=48, num_heads=2)
    with pytest.raises(ConfigError, match="is 12, flash attention takes multiples of 8 up to 256"):
        _chosen("fused", score_residual="none", hidden_size=24, num_heads=2)
