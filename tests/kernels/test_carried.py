"""The fused kernels without a GPU: interpreted, in a process of their own, and compiled ahead.

Without a GPU nothing here says how fast they are.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError
from pipeline.kernels.choice import takes_fused
from pipeline.model.encoder import MaskedLanguageModel

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
CPU = torch.device("cpu")


def _python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@NEEDS_TRITON
def test_interpreted_kernels() -> None:
    out = _python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted.py",
        TRITON_INTERPRET="1",
    )  # fmt: skip
    assert " passed" in out


# Capability, longest window, head size, dropout and dtype: each tile that is chosen.
CASES = [
    "90-64-64-0.1-bfloat16", "90-128-64-0-bfloat16", "90-512-64-0.1-bfloat16",
    "90-512-128-0.1-bfloat16", "80-64-64-0.1-bfloat16", "80-512-64-0.1-bfloat16",
    "80-512-128-0.1-bfloat16", "80-64-128-0.1-bfloat16",
]  # fmt: skip


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ptxas is Linux's")
def test_compiled_kernels() -> None:
    found = json.loads(_python("-m", "tests.kernels.ahead_of_time", *CASES))
    assert len(found) == 3 * 2 + 5 * 4
    for name, counts in found.items():
        assert counts["local stores"] == counts["local loads"] == 0, name
        assert counts["narrow stores"] == counts["narrow loads"] == 0, name
        assert counts["wide loads"] > 0, name
        if "delta" in name:
            continue
        assert counts["wide stores"] > 0, name
        assert counts["HGMMA" if name.startswith("90") else "HMMA"] > 0, name
        # What a program may have on sm_80 and sm_90.
        assert counts["shared"] <= (227 if name.startswith("90") else 163) * 1024, name


def test_choice_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert not takes_fused("auto", carries=True, head_size=64, precision="bf16", device=CPU)
    assert not takes_fused("reference", carries=True, head_size=64, precision="bf16", device=CPU)
    assert [r.message.split(" (")[0] for r in caplog.records] == ["attention: PyTorch"] * 2
    with pytest.raises(ConfigError, match=r"train\.attention=fused: (the device is cpu|Triton is)"):
        takes_fused("fused", carries=True, head_size=64, precision="bf16", device=CPU)
    with pytest.raises(ConfigError, match="score_residual=none"):
        takes_fused("fused", carries=False, head_size=64, precision="bf16", device=CPU)
    with pytest.raises(ConfigError, match="is 24, expected one of 32, 64, 128"):
        takes_fused("fused", carries=True, head_size=24, precision="bf16", device=CPU)


def test_models_without_carried_scores_are_left_alone() -> None:
    model = MaskedLanguageModel(ModelConfig(vocab_size=8, hidden_size=24, num_heads=3))
    model.encoder.fuse_attention()
    assert not model.encoder._fuses
