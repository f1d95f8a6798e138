"""Schedules and optimizers as they are written in a config, and what of them does not fit."""

import re
from typing import Any

import pytest

from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.schema import build
from pipeline.config.strict_yaml import parse
from pipeline.config.train import SpikeConfig, TrainConfig
from pipeline.errors import ConfigError


def _read(text: str) -> TrainConfig:
    return build(TrainConfig, parse(text, "test"), "train")


@pytest.mark.parametrize(("text", "message"), [
    ("schedule: wds", r"expected one of linear, .*did you mean 'wsd'"),
    ("schedule: wsd", r"train\.schedule=wsd needs train\.decay_steps; set it"),
    ("{schedule: wsd, decay_steps: 10}", r"needs train\.decay_shape"),
    ("decay_steps: 10", r"train\.decay_steps=10 has no meaning with train\.schedule=linear"),
    ("{schedule: cosine, decay_shape: linear}", r"set train\.schedule=wsd"),
    ("{schedule: wsd, decay_steps: 901, decay_shape: linear}",
     r"warmup_steps=100 and train\.decay_steps=901 are more than train\.num_steps=1000"),
    ("schedule: piecewise", r"needs train\.lr_points"),
    ("{schedule: piecewise, lr_points: [{step: 100, factor: 1.5}]}",
     r"train\.lr_points\.0\.factor = 1\.5 .*expected >= 0, <= 1"),
    ("{schedule: piecewise, lr_points: [{step: 200, factor: 1}, {step: 200, factor: 0}]}",
     r"lr_points\.1\.step=200 does not come after the point before it, at 200"),
    ("{schedule: piecewise, lr_points: [{step: 99, factor: 1}]}",
     r"lr_points\.0\.step=99 lies in the warm-up of train\.warmup_steps=100"),
    ("{schedule: piecewise, min_lr_ratio: 0.1, lr_points: [{step: 100, factor: 1}]}",
     r"min_lr_ratio=0\.1 has no meaning with train\.schedule=piecewise"),
    ("schedule: time_budget", r"needs train\.budget_hours"),
    ("{schedule: time_budget, budget_hours: 0}", r"expected > 0"),
    ("budget_hours: 3", r"set train\.schedule=time_budget"),
    ("optimizer: lamb", r"train\.optimizer=lamb needs train\.lamb_bias_correction"),
    ("lamb_bias_correction: false", r"has no meaning with train\.optimizer=adamw"),
    ("{optimizer: lamb, lamb_bias_correction: true, muon_momentum: 0.9}",
     r"train\.muon_momentum=0\.9 has no meaning with train\.optimizer=lamb"),
    ("muon_ns_steps: 4", r"set train\.optimizer=muon"),
    *((f"{{optimizer: muon, muon_momentum: {of}, muon_momentum_warmup_steps: 9}}",
       rf"warmup_steps=9 raises .* from 0\.85, and train\.muon_momentum={of}")
      for of in (0.8, 0.85)),
    *((f"{{optimizer: {name}, zero_stage: 3}}",
       rf"zero_stage=3 with train\.optimizer={name} .*: .*set train\.zero_stage=2, or train\.opt")
      for name in ("muon", "stable_adamw")),
])  # fmt: skip
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(text)


@pytest.mark.parametrize(("values", "said"), [
    ({}, None),
    ({"spikes": SpikeConfig(window_steps=8, steps_in_a_row=8)}, None),
    ({"spikes": SpikeConfig(window_steps=8, steps_in_a_row=9)}, "so that no spike is ever found"),
    ({"data": DataConfig(dir="d", masking="ngram", mask_selection="exact", ngram_weights=(4, 3))},
     None),
    ({"data": DataConfig(dir="d", masking="span", mask_selection="exact", ngram_weights=(4, 3))},
     "data.ngram_weights has no effect with data.masking=span"),
])  # fmt: skip
def test_what_has_no_effect_is_warned_of(values: dict[str, Any], said: str | None) -> None:
    found = PretrainConfig(**{"run_dir": "r", "data": DataConfig(dir="d"), **values}).warnings()
    assert len(found) == (said is not None)
    assert not said or said in found[0]


@pytest.mark.parametrize(("field", "value"), [
    ("decay_steps", "10"), ("decay_shape", "linear"), ("budget_hours", "2"),
    ("lr_points", "[{step: 5, factor: 1}]"), ("lamb_bias_correction", "false"),
    ("muon_momentum", "0.9"), ("muon_momentum_warmup_steps", "5"), ("muon_ns_steps", "3"),
])  # fmt: skip
def test_what_a_refusal_says_to_write_is_taken(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _read(f"{{{field}: {value}}}")
    [left_out] = re.findall(rf"\(train\.{field}=(\S+) on the command line\)", str(refused.value))
    assert _read(f"{field}: {left_out}") == _read("{}")
