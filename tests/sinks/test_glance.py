"""What `status` and TensorBoard's first picture say of a run, against a run written by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.runtime.run_folder import RunFolder
from pipeline.sinks.glance import Glance, MetricLines, glance
from pipeline.sinks.overview import LOSS, RESTART, REWIND, pictures
from tests.support.ranks import CONFIG


def _line(attempt: int, step: int, kind: str = "train", **values: Any) -> dict[str, Any]:
    return {"attempt": attempt, "step": step, "kind": kind, "unix_s": 1e9 + step, **values}


STARTS = [
    {"attempt": 1, "resumed_from_step": None, "rewound": False},
    {"attempt": 2, "resumed_from_step": 10, "rewound": True},
    {"attempt": 3, "resumed_from_step": 20},  # of a version without rewinds
]
LINES = [
    _line(1, 0, "eval", loss=7.0, unigram_entropy=5.5),
    _line(1, 10, loss=6.0, stage=0.0, epoch=0.5, lr=2e-3, tokens_per_s=90.0),
    _line(1, 20, loss=1.0, stage=0.0, epoch=1.0, lr=2e-3, tokens_per_s=90.0),  # repeated
    _line(2, 20, loss=4.0, stage=0.0, epoch=1.0, lr=2e-3, tokens_per_s=90.0),
    _line(2, 20, "eval", loss=4.5, unigram_entropy=5.5),
    _line(2, 30, loss=0.5, stage=0.0, epoch=1.5, lr=2e-3, tokens_per_s=90.0),  # repeated
    _line(3, 30, loss=None, stage=1.0, epoch_wiki=0.1, epoch_web=0.2, lr=1e-3, tokens_per_s=80.0),
    _line(3, 40, loss=5.0, stage=1.0, epoch_wiki=0.3, epoch_web=0.4, lr=5e-4, tokens_per_s=70.0,
          elapsed_s=27.0),
    _line(3, 40, "eval", loss=5.2, unigram_entropy=5.5),
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> PretrainConfig:
    (tmp_path / "config.yaml").write_text(CONFIG)
    stages = "stages=[{name: long, steps: 25}, {name: good, steps: 55, data: {seq_len: 32}}]"
    overrides = [f"run_dir={tmp_path}", "data.dir=x", "model.vocab_size=1000", stages]
    return load(PretrainConfig, tmp_path / "config.yaml", [*overrides, "train.num_steps=80"]).config


def _written(folder: Path, lines: list[dict[str, Any]]) -> RunFolder:
    run = RunFolder(folder)
    with run.metrics.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    return run


def test_all_that_is_looked_at_first(tmp_path: Path, config: PretrainConfig) -> None:
    run = _written(tmp_path, LINES)
    found = glance(config, MetricLines(run).update(STARTS), STARTS)
    assert found == glance(config, MetricLines(run, slim=True).update(STARTS), STARTS)
    assert (found.step, found.num_steps, found.share_done, found.stage) == (40, 80, 0.5, "good")
    assert found.loss is not None
    assert (found.loss.newest, found.loss.first, found.loss.best) == (5.0, 6.0, 4.0)
    assert (found.loss.step, found.loss.first_step, found.loss.best_step) == (40, 10, 20)
    assert found.held_out is not None
    assert (found.held_out.newest, found.held_out.first, found.held_out.best) == (5.2, 7.0, 4.5)
    assert (found.unigram_entropy, found.uniform_guess) == (5.5, math.log(1000))
    assert (found.lr, found.tokens_per_s) == (5e-4, 70.0)
    assert found.epochs == {"long": 1.0, "good/wiki": 0.3, "good/web": 0.4}
    assert (found.restarts, found.rewinds, found.stage_steps) == ((20,), (10,), (30,))


def test_losses_and_marks_stand_where_they_belong(tmp_path: Path, config: PretrainConfig) -> None:
    chart, numbers = pictures(config, MetricLines(_written(tmp_path, LINES)).update(STARTS), STARTS)
    assert chart.shape == numbers.shape == (215, 320, 3)

    def places(colour: tuple[int, int, int], top: int = 34) -> list[tuple[int, int]]:
        found = np.argwhere((chart[top:] == colour).all(-1))
        return [(int(x), int(y) + top) for y, x in found]

    # Steps 0 to 40 over columns 34 to 314; the lowest loss is 4, and the highest 7.
    for colour, step in ((RESTART, 20), (REWIND, 10)):
        columns = [x for x, _ in places(colour)]
        assert columns
        assert all(abs(x - (34 + 280 * step / 40)) <= 1 for x in columns)
    (left, high), (right, low) = min(places(LOSS)), max(places(LOSS))
    assert abs(left - (34 + 280 * 10 / 40)) <= 1  # its first line is of step 10
    assert abs(right - 314) <= 1
    nats = (low - high) / (198 - 34) * (7 - 4 + 2 * 0.15)
    assert nats == pytest.approx(6.0 - 5.0, abs=0.05)


def test_a_run_of_which_little_is_known(tmp_path: Path, config: PretrainConfig) -> None:
    starts = [{"attempt": 1, "resumed_from_step": None}]
    run = RunFolder(tmp_path)
    nothing = glance(config, MetricLines(run).update(starts), starts)
    assert pictures(config, [], starts)[0].shape == (215, 320, 3)
    assert nothing == Glance(0, 80, 0.0, "long", *[None] * 6, {}, (), (), ())
    old = [_line(1, 5, loss=3.0), _line(1, 5, "eval", loss=3.5, perplexity=33.0)]
    found = glance(config, MetricLines(_written(tmp_path, old)).update(starts), starts)
    assert (found.unigram_entropy, found.uniform_guess) == (None, math.log(1000))
    assert (found.lr, found.tokens_per_s, found.epochs) == (None, None, {})


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    lines = MetricLines(_written(tmp_path, LINES[:3]))
    assert len(lines.update(STARTS)) == 3
    with RunFolder(tmp_path).metrics.open("a") as file:
        file.write('{"step": 20, "ki')  # being written
        file.flush()
        assert len(lines.update(STARTS)) == 3
        file.write("\n")  # its writer was killed, and the next one begins a line
    _written(tmp_path, LINES[3:5])
    # What the first start computed after step 10 is not valid any more.
    assert lines.update(STARTS) == [*LINES[:2], *LINES[3:5]]
    assert MetricLines(RunFolder(tmp_path)).update(STARTS) == lines.kept
    # A third start has not logged a line yet: what it goes back from is not valid either.
    assert MetricLines(RunFolder(tmp_path)).valid(STARTS[:2]) == lines.kept
    third = {"attempt": 3, "resumed_from_step": 10}
    assert MetricLines(RunFolder(tmp_path)).valid([*STARTS[:2], third]) == LINES[:2]
