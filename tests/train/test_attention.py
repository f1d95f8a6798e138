"""A run with the fused kernels, interpreted, has the losses of one with plain PyTorch."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from tests.support.ranks import Ranks, losses

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
SETTINGS = ("data.seq_len=32", "model.num_layers=3", "model.num_heads=1",
            "model.attention_dropout=0", "model.dropout=0", "train.precision=fp32",
            "train.num_steps=3", "train.warmup_steps=1",
            "train.alpha_warmup_steps=2", "train.zero_stage=0", "train.global_batch=2",
            "monitor.eval_every_steps=3", "monitor.eval_sequences=2")  # fmt: skip
PARTS = {"attention": "attention", "residual_norm": "residual and norm"}


def test_losses_are_the_same(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ranks: type[Ranks]
) -> None:
    found = {}
    for name, said in (("reference", "PyTorch"), ("fused", "fused kernels")):
        if name == "fused":
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        asked = [f"kernels.{part}={name}" for part in PARTS]
        run = start_ranks(tmp_path / name, dataset, *SETTINGS, *asked, world_size=1).ended()
        for part, title in PARTS.items():
            assert f"{title}: {said} (kernels.{part}={name})" in run.output
        found[name] = losses(tmp_path / name)
    assert len(found["fused"]) == 3
    assert found["fused"] == pytest.approx(found["reference"], rel=2e-5)
