"""The batches of a run: where each begins, how large it is, and what does not fit."""

from itertools import islice
from typing import Any

import pytest

from pipeline.config.data import BatchPlan, PhaseConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.schema import build
from pipeline.config.strict_yaml import parse
from pipeline.errors import ConfigError


def _plan(*phases: PhaseConfig, **more: int) -> BatchPlan:
    return BatchPlan(phases, **{"seq_len": 512, "global_batch": 64, "micro_batch": 8, **more})


def _all(plan: BatchPlan, count: int) -> list[tuple[int, int]]:
    return [(place.size, place.seq_len) for place in islice(plan.batches_from(0), count)]


def test_without_phases_all_batches_are_equal() -> None:
    plan = _plan()
    assert _all(plan, 5) == [(64, 512)] * 5
    assert plan.at(640) == (10, 640, 64, 8, 512, 0)
    assert plan.seq_lens == [512]


def test_a_phase_ends_with_the_batch_that_reaches_its_tokens() -> None:
    # 128 x 256 slots are 32,768 a batch: three reach 70,000.
    plan = _plan(PhaseConfig(tokens=70_000, seq_len=128, global_batch=256))
    assert _all(plan, 5) == [(256, 128)] * 3 + [(64, 512)] * 2
    assert _all(_plan(PhaseConfig(tokens=65_536, seq_len=128, global_batch=256)), 3) == [
        (256, 128), (256, 128), (64, 512),
    ]  # fmt: skip
    assert plan.seq_lens == [128, 512]


def test_a_ramp_grows_in_steps_with_equally_many_tokens() -> None:
    plan = _plan(PhaseConfig(tokens=4 * 64 * 512, ramp_from=16, micro_batch=4))
    # 16, 32, 48, each for a third of 131,072 slots: 6, 3 and 2 batches; then 64.
    assert _all(plan, 13) == [(16, 512)] * 6 + [(32, 512)] * 3 + [(48, 512)] * 2 + [(64, 512)] * 2
    sizes = _plan(PhaseConfig(tokens=1, ramp_from=16, ramp_step=24, micro_batch=8))
    assert _all(sizes, 3) == [(16, 512), (40, 512), (64, 512)]


def test_batches_are_found_by_cursor_number_and_sequence() -> None:
    first = PhaseConfig(tokens=70_000, seq_len=128, global_batch=256)
    plan = _plan(first, PhaseConfig(tokens=4 * 64 * 512, ramp_from=16))
    places = list(islice(plan.batches_from(0), 30))
    cursor = 0
    for number, place in enumerate(places):
        assert (place.number, place.cursor) == (number, cursor)
        assert plan.at(cursor) == plan.number(number) == place
        assert plan.holding(cursor) == plan.holding(cursor + place.size - 1) == place
        for off in (1, place.size - 1):
            with pytest.raises(ConfigError, match=f"sequence {cursor + off}"):
                plan.at(cursor + off)
        cursor += place.size


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"global_batch": 60}, r"phases\.0: a batch of 60 must be a multiple of train\.micro"),
        ({"micro_batch": 5}, r"a batch of 64 must be a multiple of phases\.0\.micro_batch=5"),
        ({"ramp_from": 24}, r"ramp_from=24 by ramp_step=24 to 64"),
        ({"ramp_from": 64}, r"no batch grows from ramp_from=64"),
        ({"ramp_step": 8}, r"phases\.0\.ramp_step=8 without ramp_from"),
    ],
)
def test_phases_that_do_not_fit_are_refused(phase: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(PhaseConfig(tokens=1e6, **phase))


def test_every_stretch_must_split_over_the_ranks() -> None:
    plan = _plan(PhaseConfig(tokens=1e6, ramp_from=16))
    plan.require_split(2)
    with pytest.raises(ConfigError, match=r"phases\.0: .* 16 .*=8 x 4 "):
        plan.require_split(4)


def test_phases_are_part_of_the_config() -> None:
    text = """
    {run_dir: x, data: {dir: y}, train: {global_batch: 64, micro_batch: 8},
     phases: [{tokens: 1e9, seq_len: 128, global_batch: 256}]}
    """
    assert build(PretrainConfig, parse(text, "test")).batches.seq_lens == [128, 512]
    with pytest.raises(ConfigError, match=r"phases\.0\.tokens is required"):
        build(PretrainConfig, parse(text.replace("tokens: 1e9, ", ""), "test"))
    bad = text.replace("seq_len: 128", "seq_len: 1024").replace(
        "train:", "model: {positions: learned, max_positions: 512}, train:"
    )
    with pytest.raises(ConfigError, match=r"data\.seq_len=1024 .* 512 "):
        build(PretrainConfig, parse(bad, "test"))
