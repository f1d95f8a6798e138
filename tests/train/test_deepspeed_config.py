"""A user's DeepSpeed config: keys that are passed on, and keys that are refused."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError
from pipeline.train.deepspeed import TUNING, deepspeed_config
from tests.support.processes import python

CONFIG = TrainConfig(global_batch=64, micro_batch=4, lr=3e-4, warmup_steps=20, num_steps=500,
                     zero_stage=2, grad_clip=0.5)  # fmt: skip


def _merged(folder: Path, text: str | dict[str, Any], config: TrainConfig = CONFIG) -> Any:
    path = folder / "ds.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return deepspeed_config(replace(config, deepspeed_config=str(path)))


def test_what_tunes_is_handed_on_and_auto_changes_nothing(tmp_path: Path) -> None:
    left_to_the_run = {"train_batch_size": "auto", "gradient_clipping": "auto",
                       "bf16": {"enabled": "auto"},
                       "optimizer": {"type": "auto", "params": {"lr": "auto"}},
                       "zero_optimization": {"stage": "auto"}}  # fmt: skip
    assert _merged(tmp_path, left_to_the_run) == deepspeed_config(CONFIG)
    zero = {"reduce_bucket_size": 5e7, "overlap_comm": True, "allgather_bucket_size": "auto"}
    tuned = {"zero_optimization": zero, "wall_clock_breakdown": False}
    found = _merged(tmp_path, left_to_the_run | tuned)
    assert found == deepspeed_config(CONFIG) | {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000, "overlap_comm": True},
        "wall_clock_breakdown": False,
    }
    assert type(found["zero_optimization"]["reduce_bucket_size"]) is int


def test_what_deepspeed_reports_is_heard(tmp_path: Path) -> None:
    assert _merged(tmp_path, {"comms_logger": {"enabled": True}})["log_level"] == "info"
    quiet = _merged(tmp_path, {"wall_clock_breakdown": True, "log_level": "error"})
    assert quiet["log_level"] == "error"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"train_batch_size": 128}, r"train_batch_size = 128 .*train\.global_batch"),
        ({"gradient_accumulation_steps": 1}, r"= 1 .* train\.global_batch and train\.mi"),
        ({"zero_optimization": {"stage": 3}}, r"stage = 3 .*train\.zero_s"),
        ({"bf16": {"enabled": False}}, r"bf16\.enabled = false .* train\.precision"),
        ({"fp16": {"loss_scale": 0}}, r"train\.precision"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, r"optimizer\.params\.lr = 0\.001 .*train\.opt"),
        ({"scheduler": {"type": "OneCycle"}}, r'"OneCycle" .* train\.schedule'),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype"),
        ({"checkpoint": {"load_universal": True}}, r"checkpoint\.load_universal = true"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, r'device = "cpu"'),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size = 2"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
        ({"zero_optimization": {"overlap_com": True}}, r"overlap_com = .*n\.overlap_comm'\?"),
        ({"overlap_comm": True}, r"overlap_comm = true .*'zero_optimization\.overlap_comm'"),
        ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization"),
        ({"unheard_of": 1}, "unheard_of = 1 .*; remove it"),
        ({"comms_logger": {"enabled": 1}}, r"comms_logger\.enabled = 1: expected true or false"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, r"= 0\.5: expected a whole number"),
        ({"zero_optimization": True}, "zero_optimization = true: expected an object"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "duplicate key 'enabled'"),
        ("{]", "not JSON"),
        ("[1]", r"got \[1\]"),
    ],
    ids=range(22),
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "ds.json"))) as caught:
        _merged(tmp_path, text)
    assert re.search(message, str(caught.value)), caught.value


def test_all_mistakes_are_named_at_once_and_overlap_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = 1 .*; .*x = 2 may not be set"):
        _merged(tmp_path, {"train_batch_size": 1, "x": 2, "steps_per_print": 10})
    zero = {"zero_optimization": {"overlap_comm": True}}
    with pytest.raises(ConfigError, match=r"overlap_comm = true: train\.zero_stage=1"):
        _merged(tmp_path, zero, replace(CONFIG, zero_stage=1))
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        deepspeed_config(replace(CONFIG, deepspeed_config=str(tmp_path / "none.json")))


_ASKED = """
import json
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.comm.config import CommsLoggerConfig

asked = set()

class Recorder(dict):
    def get(self, key, default=None):
        asked.add(key)
        return super().get(key, default)
    def __contains__(self, key):
        asked.add(key)
        return super().__contains__(key)
    def __getitem__(self, key):
        asked.add(key)
        return super().__getitem__(key)
    def keys(self):
        return self

def names(model):
    return [field.alias or name for name, field in model.model_fields.items()]

DeepSpeedConfig(Recorder(train_micro_batch_size_per_gpu=1))
print(json.dumps([sorted(asked), names(DeepSpeedZeroConfig), names(CommsLoggerConfig)]))
"""


@pytest.mark.usefixtures("processes")
def test_keys_are_those_of_deepspeed_and_all_others_are_refused(tmp_path: Path) -> None:
    top, zero, comms = json.loads(python("-c", _ASKED).splitlines()[-1])
    assert {"optimizer", "scheduler", "zero_optimization", "fp16", "aio"} <= set(top)
    inside = {f"zero_optimization.{name}" for name in zero}
    inside |= {f"comms_logger.{name}" for name in comms}
    for key in TUNING:
        block, _, name = key.partition(".")
        assert block in top, key
        if block in ("zero_optimization", "comms_logger"):
            assert f"{block}.{name.partition('.')[0]}" in inside, key
    prefixes = {".".join(key.split(".")[:n]) for key in TUNING for n in (1, 2)}
    others = {*top, *inside} - prefixes
    assert len(others) > 50
    for key in others:
        tree: Any = "a value"
        for name in reversed(key.split(".")):
            tree = {name: tree}
        with pytest.raises(ConfigError, match=re.escape(f'{key} = "a value" ')):
            _merged(tmp_path, tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_stage": 0, "deepspeed_config": "ds.json"}, r"train\.zero_stage=0"),
        ({"zero_stage": 3, "compile": True}, r"train\.zero_stage=3 with train\.compile=true"),
    ],
)
def test_stages_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.usefixtures("processes")
def test_compiling_without_a_compiler_is_refused() -> None:
    code = (
        "import torch; from pipeline.errors import ConfigError; "
        "from pipeline.model.compiled import require_compiler\n"
        "try: require_compiler(torch.device('cpu'))\n"
        "except ConfigError as error: print(error)"
    )
    for compiler, said in (("g++", ""), ("no-such-compiler", "needs a C++ compiler, and none")):
        found = python("-c", code, env={**os.environ, "CXX": compiler})
        assert said in found
        assert bool(found) == bool(said)
