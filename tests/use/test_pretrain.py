"""`postnorm.pretrain` in a process that has other work: what it returns, raises and leaves."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import postnorm
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, DataError
from tests.support.ranks import CONFIG, Ranks, Starter, losses

TWICE = """
import json, logging, os, signal, sys
import postnorm
config, first, second, data = sys.argv[1:]
mine = logging.StreamHandler(sys.stderr)
logging.basicConfig(level=logging.ERROR, handlers=[mine])
before = dict(os.environ)
overrides = {"data.dir": data, "train.num_steps": 12, "checkpoint.every_steps": 6}
results = [
    postnorm.pretrain(config, {**overrides, "run_dir": first}),
    postnorm.pretrain(config, [f"{k}={json.dumps(v)}" for k, v in overrides.items()]
                      + [f"run_dir={second}", "seed=4", "train.zero_stage=1"]),
    postnorm.pretrain(config, {**overrides, "run_dir": first, "train.num_steps": 15}),
]
try:
    postnorm.pretrain(config, {**overrides, "run_dir": first, "model.num_layers": 3})
except postnorm.PostnormError as error:
    refused = str(error)
assert [result.finished for result in results] == [True] * 3
assert os.environ == before
assert logging.getLogger().handlers == [mine] and logging.getLogger().level == logging.ERROR
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
import torch
assert not torch.distributed.is_initialized()
print(json.dumps({"refused": refused, "results": [
    [str(r.run_dir), r.exit_code, r.step, r.loss, r.held_out_loss] for r in results
]}))
"""


def _config(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(CONFIG)
    return path


def test_runs_in_sequence(dataset: DatasetIndex, tmp_path: Path, start_ranks: type[Ranks]) -> None:
    paths = [_config(tmp_path), tmp_path / "first", tmp_path / "second", dataset.folder]
    done = subprocess.run(
        [sys.executable, "-c", TWICE, *map(str, paths)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [row[:3] for row in found["results"]] == [[str(tmp_path / "first"), 0, 12],
                                                     [str(tmp_path / "second"), 0, 12],
                                                     [str(tmp_path / "first"), 0, 15]]  # fmt: skip
    assert "model" in found["refused"]
    # The same numbers as the command has, which is a process of its own.
    steps = ("train.num_steps=12", "checkpoint.every_steps=6")
    start_ranks(tmp_path / "command", dataset, *steps, world_size=1).ended()
    expected = losses(tmp_path / "command")
    first = {step: loss for step, loss in losses(tmp_path / "first").items() if step <= 12}
    assert first == expected
    assert found["results"][0][3] == expected[12]
    assert losses(tmp_path / "second") != expected
    log = (tmp_path / "second/logs/rank-00000.log").read_text()
    assert str(tmp_path / "second") in log
    assert str(tmp_path / "first") not in log


def test_ranks_of_a_launcher_call_it(
    dataset: DatasetIndex, tmp_path: Path, start_command: Starter, straight_run: Path
) -> None:
    script = (
        "import sys, postnorm\n"
        "result = postnorm.pretrain(sys.argv[1], {'run_dir': sys.argv[2], 'data.dir': sys.argv[3],"
        " 'train.num_steps': 40})\n"
        "sys.exit(result.exit_code)\n"
    )
    words = [sys.executable, "-c", script, str(_config(tmp_path)), str(tmp_path / "run")]
    ranks = start_command([*words, str(dataset.folder)], 2, tmp_path / "out")
    assert [rank.wait(300) for rank in ranks] == [0, 0], (tmp_path / "out").read_text()
    assert losses(tmp_path / "run") == losses(straight_run)


def test_mistakes_are_named_and_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    config = _config(tmp_path)
    before = (dict(os.environ), logging.getLogger().handlers[:], signal.getsignal(signal.SIGINT))
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        postnorm.pretrain(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=r"train\.lrr.*lr"):
        postnorm.pretrain(config, {"train.lrr": 1e-4})
    with pytest.raises(ConfigError, match="is one text; expected a dictionary, or a list such as"):
        postnorm.pretrain(config, "train.lr=1e-4")
    with pytest.raises(ConfigError, match="a value is object; expected numbers"):
        postnorm.pretrain(config, {"train.lr": object()})
    with pytest.raises(DataError, match="no-data"):
        postnorm.pretrain(config, {"run_dir": tmp_path / "run", "data.dir": tmp_path / "no-data"})
    errors: list[Exception] = []

    def in_thread() -> None:
        try:
            postnorm.pretrain(config)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert "signals reach only the main thread" in str(errors[0])
    assert before == (dict(os.environ), logging.getLogger().handlers[:],
                      signal.getsignal(signal.SIGINT))  # fmt: skip
