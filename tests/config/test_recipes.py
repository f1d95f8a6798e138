"""What the recipes in configs/train say of themselves: FLOPs, days, corners of learning rates."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig
from launch.plan import plan
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.config.schedule import learning_rate

RECIPES = sorted((Path(__file__).parents[2] / "configs/train").glob("*.yaml"))


def _read(path: Path) -> PretrainConfig:
    config = load(PretrainConfig, path).config
    for place in config.batches.stretches:
        assert place.number < config.train.num_steps, "no phase comes after the end"
    config.batches.require_split(8)
    return config


def _flops(config: PretrainConfig, vocab_size: int) -> float:
    """Of the whole run, by `postnorm plan`: every token sees the whole row."""
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    return plan(config, ClusterConfig(), counts_activations=False).flops


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_flops_and_days_are_those_of_the_plan(path: Path) -> None:
    text = path.read_text()
    config = _read(path)
    [(vocabulary, stated)] = re.findall(r"vocabulary of ([\d,]+): ([\d.e+]+) FLOP", text)
    flops = _flops(config, int(vocabulary.replace(",", "")))
    assert float(stated) == pytest.approx(flops, rel=0.005), f"{flops:.2e}"
    [percent] = re.findall(r"Days at (\d+)% of the bf16 peak", text)
    lines = re.findall(r"\((\d+) TFLOP/s\): ([\d.]+) on 1, ([\d.]+) on 8, ([\d.]+) on 64", text)
    assert len(lines) == 2
    for peak, *days in lines:
        for gpus, number in zip((1, 8, 64), days, strict=True):
            seconds = flops / (float(peak) * 1e12 * float(percent) / 100 * gpus)
            # To the digits that are given.
            assert float(number) == pytest.approx(seconds / 86400, rel=0.04), (peak, gpus)


def test_published_corners_are_micro_steps_of_an_eighth_of_an_update() -> None:
    [path] = [path for path in RECIPES if path.stem == "roformer_v2-base"]
    config = _read(path).train
    published = {0: 0.0, 32_000: 1.0, 320_000: 0.5, 1_280_000: 0.1, 2_560_000: 0.01}
    for (first, start), (last, end) in pairwise(published.items()):
        for micro_step in range(first, last, 1_000):
            expected = start + (end - start) * (micro_step - first) / (last - first)
            # The warm-up starts one step above 0.
            found = learning_rate(micro_step // 8, config) / 1.76e-3
            assert found == pytest.approx(expected, abs=1 / 4000 + 1e-9)
    assert learning_rate(999_999, config) == pytest.approx(1.76e-5)


def test_bert_runs_nine_tenths_of_its_updates_at_length_128() -> None:
    [path] = [path for path in RECIPES if path.stem == "bert-base-nsp"]
    config = _read(path)
    stretches = config.batches.stretches
    assert [(each.number, each.seq_len) for each in stretches] == [(0, 128), (900_000, 512)]
    assert config.train.num_steps == 1_000_000


def test_a_modern_run_decays_at_its_full_length() -> None:
    [path] = [path for path in RECIPES if path.stem == "modern-base"]
    config = _read(path)
    last = config.batches.stretches[-1]
    decay_from = config.train.num_steps - (config.train.decay_steps or 0)
    assert decay_from <= last.number < decay_from + 1000
    slots = {place.size * place.seq_len for place in config.batches.stretches[-2:]}
    assert slots == {524_288}
