"""What a resumed run must share with its checkpoint."""

import json
from dataclasses import replace

from pipeline.config.data import DataConfig, MixConfig, PhaseConfig
from pipeline.config.runs import PretrainConfig


def test_what_decides_the_data_is_kept_and_how_it_is_read_is_not() -> None:
    data = DataConfig(dir="unused", mix=(MixConfig(source="wiki", weight=2.0),))
    phase = PhaseConfig(tokens=1e9, seq_len=128)
    config = PretrainConfig(run_dir="unused", data=data, phases=(phase,))
    kept = config.identity_at()
    assert kept == json.loads(json.dumps(kept))  # what a manifest gives back
    assert kept["data"]["mix"] == [{"source": "wiki", "weight": 2.0}]
    assert kept["phases"] == [
        {"tokens": 1e9, "seq_len": 128, "global_batch": None, "ramp_from": None, "ramp_step": None}
    ]
    how = {"workers": 3, "prefetch_steps": 9, "stage_dir": "/scratch", "stage_gb": 1.0}
    elsewhere = replace(data, dir="elsewhere", **how)
    other = replace(config, data=elsewhere, phases=(replace(phase, micro_batch=4),))
    assert other.identity_at() == kept


def test_the_optimizer_is_kept_and_its_schedule_is_not() -> None:
    config = PretrainConfig(run_dir="unused", data=DataConfig(dir="unused"))
    assert config.identity_at()["train"] == {"global_batch": 512, "precision": "bf16",
                                        "optimizer": "adamw"}  # fmt: skip
    cosine = replace(config, train=replace(config.train, schedule="cosine", lr=1.0))
    assert cosine.identity_at() == config.identity_at()
    assert (
        replace(config, data=replace(config.data, at_least_one=True)).identity_at()
        != config.identity_at()
    )
