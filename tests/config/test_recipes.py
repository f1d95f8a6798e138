"""What the recipes in configs/train say of themselves: FLOPs, days, corners of learning rates."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.grid import read_sweep
from launch.cluster import ClusterConfig
from launch.plan import RunPlan, plan
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.config.schedule import learning_rate
from tests.config.test_stages import save

FOLDER = Path(__file__).parents[2] / "configs/train"
RECIPES = sorted(FOLDER.glob("*.yaml"))
ON_TWO_CORES = {"speedrun-small", "small-zh"}


def _read(path: Path) -> PretrainConfig:
    config = load(PretrainConfig, path).config
    for place in config.batches.stretches:
        assert place.number < config.train.num_steps, "no phase comes after the end"
    config.batches.require_split(1 if path.stem in ON_TWO_CORES else 8)
    return config


def _planned(config: PretrainConfig, vocab_size: int = 8000) -> RunPlan:
    """The whole run by `postnorm plan`: every token sees the whole row."""
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    return plan(config, ClusterConfig(), counts_activations=False)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_flops_and_days_are_those_of_the_plan(path: Path) -> None:
    text = path.read_text()
    config = _read(path)
    [(vocabulary, stated)] = re.findall(r"vocabulary of ([\d,]+): ([\d.e+]+) FLOP", text)
    flops = _planned(config, int(vocabulary.replace(",", ""))).flops
    assert float(stated) == pytest.approx(flops, rel=0.005), f"{flops:.2e}"
    if path.stem in ON_TWO_CORES:
        return
    [percent] = re.findall(r"Days at (\d+)% of the bf16 peak", text)
    lines = re.findall(r"\((\d+) TFLOP/s\): ([\d.]+) on 1, ([\d.]+) on 8, ([\d.]+) on 64", text)
    assert len(lines) == 2
    for peak, *days in lines:
        for gpus, number in zip((1, 8, 64), days, strict=True):
            seconds = flops / (float(peak) * 1e12 * float(percent) / 100 * gpus)
            # To the digits that are given.
            assert float(number) == pytest.approx(seconds / 86400, rel=0.04), (peak, gpus)


def test_published_corners_are_micro_steps_of_an_eighth_of_an_update() -> None:
    config = _read(FOLDER / "roformer_v2-base.yaml").train
    published = {0: 0.0, 32_000: 1.0, 320_000: 0.5, 1_280_000: 0.1, 2_560_000: 0.01}
    for (first, start), (last, end) in pairwise(published.items()):
        for micro_step in range(first, last, 1_000):
            expected = start + (end - start) * (micro_step - first) / (last - first)
            # The warm-up starts one step above 0.
            found = learning_rate(micro_step // 8, config) / 1.76e-3
            assert found == pytest.approx(expected, abs=1 / 4000 + 1e-9)
    assert learning_rate(999_999, config) == pytest.approx(1.76e-5)


def test_bert_runs_nine_tenths_of_its_updates_at_length_128() -> None:
    config = _read(FOLDER / "bert-base-nsp.yaml")
    stretches = config.batches.stretches
    assert [(each.number, each.seq_len) for each in stretches] == [(0, 128), (900_000, 512)]
    assert config.train.num_steps == 1_000_000


def test_a_modern_run_decays_at_its_full_length() -> None:
    config = _read(FOLDER / "modern-base.yaml")
    last = config.batches.stretches[-1]
    decay_from = config.train.num_steps - (config.train.decay_steps or 0)
    assert decay_from <= last.number < decay_from + 1000
    slots = {place.size * place.seq_len for place in config.batches.stretches[-2:]}
    assert slots == {524_288}


def _rates(config: PretrainConfig) -> list[tuple[float, float]]:
    """The learning rate of each stage's first step, behind the warm-up, and of its last one."""
    timeline, warmup = config.timeline, config.train.warmup_steps
    found = []
    for stage in timeline.stages:
        first = stage.first_batch or warmup
        last = stage.first_batch + stage.steps - 1
        found.append(tuple(timeline.learning_rate(step, stage.number) for step in (first, last)))
    return found


@pytest.mark.parametrize(("name", "tokens", "seq_lens", "masks", "rates"), [
    ("modernbert-base", (1.72e12, 250e9, 50e9), (1024, 8192, 8192), (0.3, 0.3, 0.3),
     [(8e-4, 8e-4), (3e-4, 3e-4), (3e-4, 3e-7)]),
    ("ettin-base", (1.7e12, 250e9, 50e9), (1024, 7999, 7999), (0.3, 0.3, 0.15),
     [(8e-4, 8e-4), (8e-4, 4e-4), (4e-4, 1.6e-5)]),
    ("mmbert-base", (2.3e12, 600e9), (1024, 8192), (0.3, 0.15), [(8e-4, 8e-4)] * 2),
])  # fmt: skip
def test_stages_are_the_published_ones(
    name: str, tokens: tuple[float, ...], seq_lens: tuple[int, ...], masks: tuple[float, ...],
    rates: list[tuple[float, float]],
) -> None:  # fmt: skip
    config = _read(FOLDER / f"{name}.yaml")
    stages, planned = config.timeline.stages, _planned(config)
    for stage, expected in zip(stages, tokens, strict=True):
        slots = sum(one.slots for one in planned.stretches if one.stage == stage.title)
        # Up to a batch more, the slots of the first stage's phases counted as they are.
        assert expected <= slots < expected + stage.train.global_batch * stage.data.seq_len
    assert tuple(stage.data.seq_len for stage in stages) == seq_lens
    assert tuple(stage.data.mask_prob for stage in stages) == masks
    bases = [stage.model.rotary_base for stage in stages]
    assert bases == [10_000, *[160_000] * (len(stages) - 1)]
    assert sum(_rates(config), ()) == pytest.approx(sum(rates, ()))
    # A batch has as many tokens in each stage, but for Ettin's odd length; so has a forward pass.
    for size in ("global_batch", "micro_batch"):
        slots = [getattr(stage.train, size) * stage.data.seq_len for stage in stages]
        assert slots == pytest.approx([slots[0]] * len(slots), rel=0.03)
    shares = {config.eval_data_of(stage).data.mask_prob for stage in stages}
    assert shares == {0.15}


def test_each_recipe_with_stages_has_a_run_at_demo_size(tmp_path: Path) -> None:
    sweep = FOLDER.parent / "sweeps/demo-stages.yaml"
    _, runs = read_sweep(str(sweep), (), str(tmp_path))
    with_stages = {path.stem: _read(path) for path in RECIPES if _read(path).stages}
    assert {run.point["config"] for run in runs} == with_stages.keys()
    for run in runs:
        config, stages = with_stages[run.point["config"]], run.config.timeline.stages
        assert _rates(run.config) == _rates(config)
        for stage, published in zip(stages, config.timeline.stages, strict=True):
            assert stage.steps * stage.train.global_batch * stage.data.seq_len < 500_000
            assert stage.data.mask_prob == published.data.mask_prob
            assert stage.model.rotary_base == published.model.rotary_base


def test_the_decays_of_mmbert_go_on_from_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _read(FOLDER / "mmbert-base.yaml")
    monkeypatch.chdir(tmp_path)
    folder = save(Path(config.run_dir), config, config.train.num_steps)
    sweep = FOLDER.parent / "sweeps/mmbert-decays.yaml"
    _, runs = read_sweep(str(sweep), (), str(tmp_path))
    assert len({run.config.timeline.stages[-1].data.dir for run in runs}) == 3
    for run in runs:
        before, (decay,) = run.config.timeline.stages[:2], run.config.timeline.stages[2:]
        assert [(one.name, one.steps) for one in before] == [
            (one.name, one.steps) for one in config.timeline.stages
        ]
        assert run.config.origin == folder.resolve()
        assert (decay.data.mask_prob, decay.data.seq_len) == (0.05, 8192)
        assert decay.model.rotary_base == 160_000
        assert _rates(run.config)[-1] == pytest.approx((8e-4, 1.6e-5))
        assert _planned(run.config).slots == pytest.approx(100e9, rel=1e-3)
