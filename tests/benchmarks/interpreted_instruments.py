"""The instruments that run our kernels, in Triton's interpreter; run by `test_instruments.py`."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attention, attention_subjects, gpu_checks, tiles
from pipeline.config.runs import PretrainConfig
from pipeline.kernels.common_triton import Launch
from pipeline.kernels.tiles import Kernel, Target, Tile
from pipeline.model.encoder import EncoderModel
from pipeline.train.build import make_model


def test_attention_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "attention.json"
    monkeypatch.setattr(sys, "argv", ["attention", "--tiny", "--models", "base", "--seq-len", "16",
                                      "--tokens", "32", "--rounds", "2", "--out", str(out),
                                      "--subjects", "carried mean", "eager mean", "plain, math",
                                      "plain, cuDNN"])  # fmt: skip
    attention.main()
    found = json.loads(out.read_text())
    assert set(found["cases"]) == {"base s16 32 packed", "base s16 32 full"}
    for case in found["cases"].values():
        for name in ("carried mean", "eager mean", "plain, math"):
            assert case["subjects"][name]["ms"] > 0
            assert case["subjects"][name]["turns"] == 2
        assert case["subjects"]["plain, math"]["x_flash"] == 1
    for kind in ("full", "packed"):
        checked = found["checks"]["carried mean"][kind]
        assert set(checked) == {"out", "dq", "dk", "dv", "scores", "dcarry"}
        assert max(checked.values()) < gpu_checks.FLOOR


SIZE = gpu_checks.Size(torch.device("cpu"), tiny=True)


def test_checks_find_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_subjects.call_carried

    def wrong(qkv: Tensor, *others: Any) -> Any:
        return right(1.05 * qkv, *others)

    monkeypatch.setattr(attention_subjects, "call_carried", wrong)
    with pytest.raises(AssertionError, match=r"expected 0\.005 at most"):
        gpu_checks.attention(SIZE)


def test_checks_find_a_wrong_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(config: PretrainConfig, *others: Any) -> EncoderModel:
        model = make_model(config, *others)
        if config.kernels.attention == "fused":
            model.encoder.layers[0].register_forward_hook(lambda _, __, out: (out[0] * 2, out[1]))
        return model

    monkeypatch.setattr(gpu_checks, "make_model", wrong)
    with pytest.raises(AssertionError, match="attention fused: error of gradients"):
        gpu_checks.model_parts(SIZE)
    with pytest.raises(AssertionError, match="losses differ"):
        gpu_checks.training(SIZE)


def test_checks_find_too_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "_GRAPHS", 3)
    with pytest.raises(AssertionError, match="4 graphs were compiled, expected 3 at most"):
        gpu_checks.compiled(SIZE)


def test_a_tile_that_gives_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = tiles.Layer.launch

    def wrong(layer: tiles.Layer, kernel: Kernel, tile: Tile, gpu: Target) -> Launch:
        made = launch(layer, kernel, tile, gpu)
        if kernel == "backward_queries" and tile.queries == 64:
            made.arguments["scale"] *= 1.05
        return made

    monkeypatch.setattr(tiles.Layer, "launch", wrong)
    layer = tiles.Layer.make(16, 32, 0.0, tokens=32, heads=1, device="cpu")
    deadline = time.monotonic() + 600
    found = {
        kernel: (tile, ms)
        for kernel, tile, ms in tiles.fastest(layer, Target((9, 0)), deadline, attention.LIMIT)
    }
    tile, ms = found["backward_queries"]
    assert tile is not None
    assert tile.queries == 128
    [said] = [name for name, value in ms.items() if value == float("inf")]
    assert said == "64 x 16, 4 warps, stages 3 is wrong by 5.0e-02"
    # The window's kernel stands beside the three in its place.
    assert {"apart", "16 x 16, 4 warps, stages 1"} == set(found["backward_window"][1])
    # Nothing begins when no time is left.
    assert not list(tiles.fastest(layer, Target((9, 0)), time.monotonic(), attention.LIMIT))
