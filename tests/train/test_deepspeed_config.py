"""A user's DeepSpeed config: keys that are passed on, that contradict the run, or are refused."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError
from pipeline.train.deepspeed import TUNING, decided, deepspeed_config

CONFIG = TrainConfig(
    global_batch=64, micro_batch=4, lr=3e-4, warmup_steps=20, num_steps=500, zero_stage=2,
    grad_clip=0.5,
)  # fmt: skip
RANKS = 8


def _merged(folder: Path, text: str | dict[str, Any], config: TrainConfig = CONFIG) -> Any:
    path = folder / "ds.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return deepspeed_config(replace(config, deepspeed_config=str(path)), RANKS)


def test_what_tunes_is_handed_on_and_what_agrees_changes_nothing(tmp_path: Path) -> None:
    agrees = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "communication_data_type": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 500, "warmup_num_steps": 20, "warmup_max_lr": 0.0003},
        },
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
    }
    assert _merged(tmp_path, agrees) == deepspeed_config(CONFIG, RANKS)
    zero = {"reduce_bucket_size": 5e7, "overlap_comm": True, "allgather_bucket_size": "auto"}
    found = _merged(tmp_path, agrees | {"zero_optimization": zero, "wall_clock_breakdown": False})
    assert found == deepspeed_config(CONFIG, RANKS) | {
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
        ({"train_batch_size": 128},
         r"train_batch_size = 128 contradicts train\.global_batch=64: write 64 or \"auto\", "
         r"or change train\.global_batch"),
        ({"gradient_accumulation_steps": 1},
         r"= 1 contradicts train\.global_batch=64 / \(train\.micro_batch=4 x 8 ranks\)"),
        ({"zero_optimization": {"stage": 3}}, r"stage = 3 contradicts train\.zero_stage=2"),
        ({"bf16": {"enabled": False}}, r"bf16\.enabled = false .* train\.precision=bf16"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled = true contradicts train\.precision"),
        ({"fp16": {"loss_scale": 0}}, r"only fp16\.enabled is known; remove it"),
        ({"optimizer": {"params": {"lr": 1e-3}}},
         r"optimizer\.params\.lr = 0\.001 contradicts train\.lr=0\.0003: write 0\.0003"),
        ({"optimizer": {"type": "Lamb"}}, r'"Lamb" contradicts train\.optimizer=AdamW'),
        ({"scheduler": {"type": "OneCycle"}}, r'"OneCycle" .* train\.schedule=linear'),
        ({"data_types": {"grad_accum_dtype": "bf16"}},
         r'"bf16" contradicts the engine: write "fp32" or "auto"'),
        ({"gradient_clipping": True}, r"gradient_clipping = true contradicts"),
        ({"checkpoint": {"load_universal": True}},
         r"checkpoint = .* is not supported: checkpoints are not DeepSpeed's here.*; remove it"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
         r'offload_optimizer\.device = "cpu" contradicts the engine'),
        ({"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}}},
         r"pin_memory = true is not supported: checkpoints read weights"),
        ({"zero_optimization": {"elastic_checkpoint": True}}, r"elastic_checkpoint = true may not"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, r"continue from wrong weights"),
        ({"flops_profiler": {"enabled": True}}, r"it patches torch's functions"),
        ({"zero_optimization": {"overlap_com": True}},
         r"zero_optimization\.overlap_com = true may not be set: .*; "
         r"did you mean 'zero_optimization\.overlap_comm'\?"),
        ({"overlap_comm": True}, r"overlap_comm = true .*'zero_optimization\.overlap_comm'"),
        ({"zero_optimisation": {"stage": 2}}, r"did you mean 'zero_optimization"),
        ({"unheard_of": 1}, r"unheard_of = 1 may not be set: .*; remove it"),
        ({"comms_logger": {"enabled": 1}}, r"comms_logger\.enabled = 1: expected true or false"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, r"= 0\.5: expected a whole number"),
        ({"zero_optimization": True}, r"zero_optimization = true: expected an object"),
        ('{"wall_clock_breakdown": true, "bf16": {"enabled": true, "enabled": false}}',
         r"duplicate key 'enabled'; remove one of the two"),
        ("{]", r"is not JSON"),
        ("[1]", r"expected an object \{\.\.\.\}, got \[1\]"),
    ],
    ids=range(27),
)  # fmt: skip
def test_what_cannot_stand_is_named(
    tmp_path: Path, text: str | dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "ds.json"))) as caught:
        _merged(tmp_path, text)
    assert re.search(message, str(caught.value)), caught.value


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = 1 .*; .*x = 2 may not be set"):
        _merged(tmp_path, {"train_batch_size": 1, "x": 2, "steps_per_print": 10})


def test_overlap_that_stage_one_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overlap_comm = true .* train\.zero_stage=1"):
        _merged(
            tmp_path, {"zero_optimization": {"overlap_comm": True}}, replace(CONFIG, zero_stage=1)
        )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        deepspeed_config(replace(CONFIG, deepspeed_config=str(tmp_path / "none.json")), RANKS)


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


def test_keys_are_those_of_deepspeed_and_all_others_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ASKED], capture_output=True, text=True, check=True
    )
    top, zero, comms = json.loads(done.stdout.splitlines()[-1])
    assert {"optimizer", "scheduler", "zero_optimization", "fp16", "aio"} <= set(top)
    inside = {f"zero_optimization.{name}" for name in zero}
    inside |= {f"comms_logger.{name}" for name in comms}
    own = decided(CONFIG, RANKS)
    for key in {*TUNING, *own}:
        block, _, name = key.partition(".")
        assert block in top, key
        if block in ("zero_optimization", "comms_logger"):
            assert f"{block}.{name.partition('.')[0]}" in inside, key
    known = {*TUNING, *own}
    prefixes = {".".join(key.split(".")[:n]) for key in known for n in (1, 2, 3)}
    others = {*top, *inside} - prefixes
    assert len(others) > 50
    for key in others:
        tree: Any = "a value"
        for name in reversed(key.split(".")):
            tree = {name: tree}
        with pytest.raises(ConfigError, match=re.escape(f'{key} = "a value" ')):
            _merged(tmp_path, tree)


def test_stage_zero_takes_no_deepspeed_config() -> None:
    with pytest.raises(ConfigError, match=r"has no meaning with train\.zero_stage=0"):
        replace(CONFIG, zero_stage=0, deepspeed_config="ds.json")


def test_compiling_at_stage_three_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.zero_stage=3 with train\.compile=true"):
        replace(CONFIG, zero_stage=3, compile=True)


def test_compiling_without_a_compiler_is_refused() -> None:
    code = (
        "import torch; from pipeline.errors import ConfigError; "
        "from pipeline.model.compiled import require_compiler\n"
        "try: require_compiler(torch.device('cpu'))\n"
        "except ConfigError as error: print(error)"
    )
    for compiler, said in (("g++", ""), ("no-such-compiler", "needs a C++ compiler, and none")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "CXX": compiler},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert said in done.stdout
        assert bool(done.stdout) == bool(said)
