"""What a run with stages will see: each stage's epochs and tokens, each dataset walked once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.runs import PretrainConfig, load_run
from pipeline.data.counts import packing_counts
from pipeline.data.format import DatasetIndex
from pipeline.data.order import Order
from pipeline.errors import DataError
from pipeline.inspect.coverage import coverage, coverage_text
from tests.support.checkpoints import make_checkpoint
from tests.support.variants import Variants

pytestmark = pytest.mark.long
_LONG = {"seq_len": 128}


def _config(tmp_path: Path, data: DatasetIndex, stages: list[dict[str, Any]]) -> PretrainConfig:
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps({
        "run_dir": str(tmp_path / "run"), "model": {"num_layers": 2, "hidden_size": 32,
        "num_heads": 2, "ffn_size": 64}, "data": {"dir": str(data.folder), "seq_len": 64},
        "train": {"global_batch": 8, "micro_batch": 4, "warmup_steps": 1}, "stages": stages,
    }))  # fmt: skip
    return load_run(path).config


def _epoch(index: DatasetIndex, seq_len: int) -> int:
    """Sequences of an epoch of the training split."""
    rows = np.flatnonzero([index.shards[shard].split == "train" for shard in index.blocks.shard])
    return int(packing_counts(index, seq_len, None).sequences[rows].sum())


def test_stages_say_what_they_see_and_each_dataset_is_walked_once(
    tmp_path: Path, variants: Variants
) -> None:
    base, changed = variants["base"], variants["changed"]
    epochs = {length: _epoch(base, length) for length in (64, 128)}
    # The border lies within an epoch, and the third stage begins other data, the last the first's.
    stable, long = epochs[64] * 2 // 5 // 8, epochs[128] // 2 // 4
    config = _config(tmp_path, base, [
        {"name": "stable", "steps": stable},
        {"name": "long", "steps": long, "data": _LONG, "train": {"global_batch": 4}},
        {"name": "other", "steps": 10, "data": {"dir": str(changed.folder)}},
        {"name": "again", "steps": 5},
    ])  # fmt: skip
    found = coverage(config)
    assert found.is_exact
    assert [(each.dir, each.stages) for each in found.datasets] == [
        (str(base.folder), ("stage 0 (stable)", "stage 1 (long)")),
        (str(changed.folder), ("stage 2 (other)",)),
    ]
    before = [next(iter(stage.epochs_before.values())) for stage in found.stages]
    after = [next(iter(stage.epochs_after.values())) for stage in found.stages]
    first = stable * 8 / epochs[64]
    assert before == [0, pytest.approx(first), 0, 0]
    assert after[0] == pytest.approx(first)
    assert after[1] == pytest.approx(first + long * 4 / epochs[128], abs=0.02)
    assert after[2:] == pytest.approx([10 * 8 / _epoch(changed, 64), 5 * 8 / epochs[64]])
    shapes = [(part.first_step, part.num_steps, part.global_batch, part.seq_len)
              for part in found.stretches]  # fmt: skip
    assert shapes == [(1, stable, 8, 64), (stable + 1, long, 4, 128),
                      (stable + long + 1, 10, 8, 64), (stable + long + 11, 5, 8, 64)]  # fmt: skip
    # Tokens with their specials over all slots of an epoch.
    for part in found.stretches[:2]:
        assert part.tokens == part.num_steps * part.fill * part.global_batch * part.seq_len
        assert 0.9 < part.fill <= 1
    pass_steps = stable + (epochs[64] * 3 / 5) * 64 / (4 * 128)
    assert found.datasets[0].pass_steps == pytest.approx(pass_steps, rel=0.03)
    text = "\n".join(coverage_text(found))
    assert f"{base.folder}, walked through stage 0 (stable), stage 1 (long):" in text
    assert "in what was walked, every token of every document is seen once" in text
    body = found.plain()
    assert body["sources"] == body["datasets"][0]["sources"]


def test_nothing_is_said_of_stages_behind_a_pass(tmp_path: Path, variants: Variants) -> None:
    base = variants["base"]
    steps = _epoch(base, 64) // 8 + 10
    found = coverage(_config(tmp_path, base, [
        {"name": "stable", "steps": steps}, {"name": "long", "steps": 5, "data": _LONG},
    ]))  # fmt: skip
    assert found.datasets[0].stages == ("stage 0 (stable)",)
    assert found.datasets[0].pass_steps == pytest.approx(_epoch(base, 64) / 8)


def test_a_loss_in_a_later_stages_data_is_found(
    tmp_path: Path, variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, changed = variants["base"], variants["changed"]
    config = _config(tmp_path, base, [
        {"name": "stable", "steps": 5},
        {"name": "other", "steps": 5, "data": {"dir": str(changed.folder)}},
    ])  # fmt: skip
    locate = Order.locate

    def one_for_another(order: Order, first: int, count: int) -> Any:
        found = locate(order, first, count)
        if order is not orders.setdefault("first", order) and first == 0:
            found.sequences[0] = found.sequences[1]
            found.blocks[0] = found.blocks[1]
        return found

    orders: dict[str, Order] = {}
    monkeypatch.setattr(Order, "locate", one_for_another)
    found = coverage(config)
    assert [each.is_exact for each in found.datasets] == [True, False]
    with pytest.raises(DataError, match=f"{changed.folder}: an epoch does not have every token"):
        list(coverage_text(found))


def test_data_of_a_coming_stage_is_missed(tmp_path: Path, variants: Variants) -> None:
    config = _config(tmp_path, variants["base"], [
        {"name": "stable", "steps": 5},
        {"name": "other", "steps": 5, "data": {"dir": str(tmp_path / "nowhere")}},
    ])  # fmt: skip
    with pytest.raises(DataError, match=r"stage 1 \(other\).*nowhere"):
        coverage(config)


def test_the_data_of_another_runs_stages_may_be_gone(tmp_path: Path, variants: Variants) -> None:
    base = variants["base"]
    of = str(make_checkpoint(tmp_path / "theirs", 5))
    gone = {"name": "stable", "steps": 5, "of": of, "data": {"dir": str(tmp_path / "gone")}}
    found = coverage(_config(tmp_path, base, [gone, {"name": "decay", "steps": 5}]))
    assert found.is_exact
    assert [stage.stage for stage in found.stages] == ["stage 1 (decay)"]
    [dataset] = found.datasets
    assert dataset.stages == ("stage 1 (decay)",)
    assert dataset.pass_steps == pytest.approx(_epoch(base, 64) / 8)
    assert [part.first_step for part in found.stretches] == [6]
    assert found.stages[0].epochs_before == {"one": 0}


def test_a_mix_that_a_stage_changes_is_followed(tmp_path: Path, variants: Variants) -> None:
    data = variants["two sources"]
    mix = [{"source": "two", "weight": 2}]
    found = coverage(_config(tmp_path, data, [
        {"name": "stable", "steps": 20}, {"name": "more", "steps": 20, "data": {"mix": mix}},
    ]))  # fmt: skip
    assert found.is_exact
    stable, more = found.stages
    assert more.epochs_before == stable.epochs_after
    ratios = [
        {name: more.epochs_after[name] - more.epochs_before[name] for name in ("one", "two")},
        stable.epochs_after,
    ]
    assert [each["two"] / each["one"] for each in ratios] == pytest.approx([2, 0.5], rel=0.1)
    unstaged = replace(_config(tmp_path, data, []), stages=())
    assert coverage(unstaged).stages == ()
