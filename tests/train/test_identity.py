"""What a resumed run must share with its checkpoint."""

import json
from dataclasses import replace

from pipeline.config.batches import PhaseConfig
from pipeline.config.data import DataConfig, MixConfig
from pipeline.config.run import PretrainConfig
from pipeline.train.checkpoint import identity


def test_runs_from_before_the_later_masking_fields_can_be_resumed() -> None:
    config = PretrainConfig(run_dir="unused", data=DataConfig(dir="unused"))
    # As written into the manifests of such runs.
    assert identity(config)["data"] == {
        "seq_len": 512, "window_blocks": 16, "masking": "whole_word", "mask_prob": 0.15,
        "replace_mask_prob": 0.8, "replace_random_prob": 0.1,
    }  # fmt: skip
    staged = replace(config, data=replace(config.data, stage_dir="/scratch"))
    assert identity(staged) == identity(config)
    changed = replace(
        config,
        data=replace(
            config.data, mask_selection="exact", mask_prob_end=0.3, mask_prob_steps=10,
            at_least_one=True,
        ),
    )  # fmt: skip
    assert identity(changed)["data"].items() - identity(config)["data"].items() == {
        ("mask_selection", "exact"), ("mask_prob_end", 0.3), ("mask_prob_steps", 10),
        ("at_least_one", True),
    }  # fmt: skip


def test_what_decides_the_data_is_kept_and_how_it_is_read_is_not() -> None:
    data = DataConfig(dir="unused", mix=(MixConfig(source="wiki", weight=2.0),))
    phase = PhaseConfig(tokens=1e9, seq_len=128)
    config = PretrainConfig(run_dir="unused", data=data, phases=(phase,))
    kept = identity(config)
    assert kept == json.loads(json.dumps(kept))  # what a manifest gives back
    assert kept["data"]["mix"] == [{"source": "wiki", "weight": 2.0}]
    assert kept["phases"] == [
        {"tokens": 1e9, "seq_len": 128, "global_batch": None, "ramp_from": None, "ramp_step": None}
    ]
    read = replace(
        config,
        data=replace(data, dir="elsewhere", workers=3, prefetch_steps=9, stage_dir="/scratch"),
        phases=(replace(phase, micro_batch=4),),
    )
    assert identity(read) == kept


def test_runs_from_before_other_optimizers_can_be_resumed() -> None:
    config = PretrainConfig(run_dir="unused", data=DataConfig(dir="unused"))
    assert identity(config)["train"] == {"global_batch": 512, "precision": "bf16"}
    lamb = replace(
        config, train=replace(config.train, optimizer="lamb", lamb_bias_correction=False)
    )
    assert identity(lamb)["train"]["optimizer"] == "lamb"
    cosine = replace(config, train=replace(config.train, schedule="cosine", lr=1.0))
    assert identity(cosine) == identity(config)
