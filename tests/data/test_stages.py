"""The data of stages: same data goes on, other data begins, whoever computes it."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config.data import DataConfig, PhaseConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.stages import StageConfig
from pipeline.config.train import TrainConfig
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import TrainLoader
from pipeline.data.run_order import DataRank, StageData, TrainSteps
from pipeline.data.stages import PastData, is_there, open_indexes, stage_data
from pipeline.errors import ConfigError, DataError
from pipeline.objectives.choose import make_objective
from pipeline.objectives.inputs import train_inputs
from pipeline.train import stages
from tests.support.steps import open_steps, rows_of_step
from tests.support.variants import Variants

_BATCH = 12


def _config(dataset: DatasetIndex, *stages: StageConfig, **more: Any) -> PretrainConfig:
    total = sum(stage.steps or 0 for stage in stages) or 40
    return PretrainConfig(
        run_dir="unused", seed=5, stages=stages,
        data=DataConfig(dir=str(dataset.folder), seq_len=64, window_blocks=2),
        train=TrainConfig(global_batch=_BATCH, micro_batch=1, num_steps=total,
                          schedule="stages" if stages else "linear", warmup_steps=1),
        **more)  # fmt: skip


def _stages(config: PretrainConfig, current: int = 0, known: Sequence[str] = ()) -> list[StageData]:
    indexes = open_indexes(config.timeline, current, known)
    return stage_data(
        config.timeline,
        indexes,
        config.train_data_of,
        train_inputs,
        lambda index, lengths: (index, sequences_at(index, lengths, None)),
    )


def _steps(stages: list[StageData], *, sharing: bool = False) -> TrainSteps:
    first = stages[0]
    given = first.index, first.config, first.inputs, first.counts
    return TrainSteps(*given, stages=stages, sharing=sharing)


def _rows(steps: TrainSteps, count: int, first: int = 0) -> list[Any]:
    found, cursor = [], steps.plan.number(first).cursor
    for _ in range(count):
        found.append(steps.micro_batches(cursor, DataRank(0, 1)))
        cursor += steps.plan.at(cursor).size
    return found


def _hashes(steps: TrainSteps, count: int, first: int = 0) -> list[int]:
    return [sum(batch.hash for batch in batches) % 2**64 for batches in _rows(steps, count, first)]


def test_stages_of_other_lengths_are_phases_in_full(dataset: DatasetIndex) -> None:
    stages = _config(dataset, StageConfig(name="a", steps=7),
                     StageConfig(name="b", steps=9, data={"seq_len": 128}),
                     StageConfig(name="c", steps=9))  # fmt: skip
    slots = _BATCH * 64
    phases = _config(dataset, phases=(PhaseConfig(tokens=7 * slots),
                                      PhaseConfig(tokens=9 * 2 * slots, seq_len=128)))  # fmt: skip
    assert _hashes(_steps(_stages(stages)), 25) == _hashes(open_steps(dataset, phases), 25)


def test_runs_that_part_in_a_later_stage_share_nothing_on_a_node(two_sources: DatasetIndex) -> None:
    """Windows of one place are then others, and were taken from each other."""

    def shared(weight: float) -> Any:
        config = _config(two_sources, StageConfig(name="a", steps=5), StageConfig(
            name="b", steps=40, data={"mix": [{"source": "small", "weight": weight}]}
        ))  # fmt: skip
        opened.append(_steps(_stages(config), sharing=True))  # it is there as long as they are
        return opened[-1].split._shared.folder

    opened: list[TrainSteps] = []
    assert shared(3.0) == shared(3.0) != shared(1.5)


def test_a_stage_with_other_masks_goes_on_in_the_same_order(dataset: DatasetIndex) -> None:
    plain = open_steps(dataset, _config(dataset))
    masked = _steps(_stages(_config(
        dataset, StageConfig(name="a", steps=5),
        StageConfig(name="b", steps=9, data={"mask_prob": 0.4, "mask_prob_end": 0.1,
                                             "mask_prob_steps": 4}))))  # fmt: skip
    for number in range(14):
        cursor = plain.plan.number(number).cursor
        one, other = (steps.located(cursor, DataRank(0, 1))[0] for steps in (plain, masked))
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert _hashes(plain, 5) == _hashes(masked, 5)
    # The schedule of a stage's mask share begins with the stage.
    ratios = [masked.mask_ratio(masked.plan.number(number)) for number in (4, 5, 7, 9, 13)]
    assert ratios == pytest.approx([0.15, 0.4, 0.25, 0.1, 0.1])


def test_other_data_begins_at_its_first_sequence(variants: Variants) -> None:
    base, changed = variants["base"], variants["changed"]
    config = _config(base, StageConfig(name="a", steps=5),
                     StageConfig(name="b", steps=6, data={"dir": str(changed.folder)}))  # fmt: skip
    steps = _steps(_stages(config))
    border = steps.plan.number(5).cursor
    found = steps.located(border, DataRank(0, 1))[0]
    alone = open_steps(changed, _config(changed))
    first = alone.order.segments[0].orders[0].windows(0, 1)[0]
    # The first window of blocks; in an order and with masks of the stage's own.
    assert set(found.blocks.tolist()) <= set(first.blocks.tolist())
    assert steps.epochs(border)  # those of the stage before
    assert max(steps.epochs(border + _BATCH).values()) < 0.1
    other_masks = {batch.input_ids.tobytes() for batch in _rows(alone, 6)[0]}
    assert not other_masks & {batch.input_ids.tobytes() for batch in _rows(steps, 1, 5)[0]}


def test_data_has_one_name_in_neighbouring_stages(variants: Variants) -> None:
    base, changed = variants["base"], variants["changed"]
    again = {"dir": f"{base.folder}/"}
    config = _config(base, StageConfig(name="a", steps=5),
                     StageConfig(name="b", steps=5, data=again))  # fmt: skip
    with pytest.raises(ConfigError, match=r"stages\.1\.data\.dir=.*/ is the data of stage 0 \(a\)"):
        open_indexes(config.timeline)
    # A run that has begun it so stays as it is.
    assert len(open_indexes(config.timeline, 1, [base.fingerprint] * 2)) == 2
    # With other data between them it begins anew under any name, at any length.
    apart = _config(base, StageConfig(name="a", steps=5),
                    StageConfig(name="b", steps=5, data={"dir": str(changed.folder)}),
                    StageConfig(name="c", steps=5, data={**again, "seq_len": 128}))  # fmt: skip
    [batch, *_] = _rows(_steps(_stages(apart)), 1, 10)[0]
    assert batch.input_ids.shape[1] == 128


def test_sources_go_on_where_they_stood_under_another_mix(variants: Variants) -> None:
    two = variants["two sources"]
    config = _config(two, StageConfig(name="a", steps=30),
                     StageConfig(name="b", steps=40,
                                 data={"mix": [{"source": "two", "weight": 2.0}]}))  # fmt: skip
    steps = _steps(_stages(config))
    border = steps.plan.number(30).cursor
    before, after = (steps.of(cursor).order.epochs(border) for cursor in (0, border))
    assert before.keys() == after.keys() == {"one", "two"}
    assert after == pytest.approx(before, abs=0.02)
    # Within the first epoch no sequence comes twice, whatever the weights.
    seen: Counter[tuple[int, int, int]] = Counter()
    for number in range(70):
        place = steps.plan.number(number)
        if max(steps.epochs(place.cursor + place.size).values()) >= 1:
            break
        located = steps.located(place.cursor, DataRank(0, 1))[0]
        seen.update(zip(located.blocks.tolist(), located.sequences.tolist(),
                        located.leftover.tolist(), strict=True))  # fmt: skip
    assert number > 32
    assert max(seen.values()) == 1


def test_sources_go_on_where_one_is_left_out_and_comes_back(variants: Variants) -> None:
    two = variants["two sources"]
    without = {"mix": [{"source": "one", "weight": 0.0}]}
    config = _config(two, StageConfig(name="a", steps=12),
                     StageConfig(name="b", steps=6, data=without),
                     StageConfig(name="c", steps=20))  # fmt: skip
    steps = _steps(_stages(config))
    first, second = (steps.plan.number(number).cursor for number in (12, 18))
    begun, left, back = (steps.epochs(cursor) for cursor in (first, second, second + 5 * _BATCH))
    assert begun["one"] == left["one"] < back["one"]
    assert begun["two"] < left["two"] < back["two"]
    seen: Counter[tuple[int, int, int]] = Counter()  # the rest of a window is a stage's own
    for number in range(38):
        place = steps.plan.number(number)
        if max(steps.epochs(place.cursor + place.size).values()) >= 1:
            break
        located = steps.located(place.cursor, DataRank(0, 1))[0]
        if 12 <= number < 18:
            of = two.block_source[two.split_blocks("train")][located.blocks]
            assert {two.sources[source].name for source in of} == {"two"}
        seen.update(zip(located.blocks.tolist(), located.sequences.tolist(),
                        (located.leftover * place.stage).tolist(), strict=True))  # fmt: skip
    assert number > 18
    assert max(seen.values()) == 1


def test_sources_that_are_grouped_otherwise_begin_anew_with_a_word(
    variants: Variants, caplog: pytest.LogCaptureFixture
) -> None:
    alike = {"mix": [{"source": name, "weight": 1.0} for name in ("one", "two")]}
    two, plain = variants["two sources"], StageConfig(name="a", steps=5)
    equal = StageConfig(name="b", steps=5, data=alike)
    steps = _steps(_stages(_config(two, equal, plain)))
    begun = max(steps.epochs(5 * _BATCH).values())
    assert max(steps.epochs(6 * _BATCH).values()) < begun / 2
    assert "(one + two, then one, two): all of them begin anew" in caplog.text
    caplog.clear()
    # The other way round they stay two.
    steps = _steps(_stages(_config(two, plain, equal)))
    before, after = (steps.of(cursor).order.epochs(5 * _BATCH) for cursor in (0, 5 * _BATCH))
    assert before == pytest.approx(after, abs=0.02)
    assert min(after.values()) > 0
    assert not caplog.text
    # One weight for all is no weight, as in the first stage: `coverage` counts passes by it.
    double = {"mix": [{"source": name, "weight": 2.0} for name in ("one", "two")]}
    pair = [StageConfig(name=name, steps=5, data=double) for name in "ab"]
    steps = _steps(_stages(_config(two, *pair)))
    assert [of.weight for at in (0, 5 * _BATCH) for of in steps.of(at).order.groups] == [1, 1]


def test_ranks_and_workers_make_the_same_batches(variants: Variants) -> None:
    config = _config(variants["base"], StageConfig(name="a", steps=3),
                     StageConfig(name="b", steps=3, data={"seq_len": 128}),
                     StageConfig(name="c", steps=3,
                                 data={"dir": str(variants["changed"].folder)}))  # fmt: skip
    stages = _stages(config)
    steps, wanted = _steps(stages), _hashes(_steps(stages), 9)
    for world_size in (2, 3, 4):
        for number in range(9):
            cursor = steps.plan.number(number).cursor
            parts = [steps.micro_batches(cursor, DataRank(rank, world_size))
                     for rank in range(world_size)]  # fmt: skip
            assert rows_of_step(steps, cursor, parts)[1] % 2**64 == wanted[number]
    first = stages[0]
    loader = TrainLoader(first.index, first.config, first.inputs, DataRank(0, 1), first.counts,
                         stages)  # fmt: skip
    made = loader.steps_from(0)
    assert [sum(batch.hash for batch in next(made)) % 2**64 for _ in range(9)] == wanted


def test_data_of_a_stage_that_is_over_may_be_gone(variants: Variants) -> None:
    base, changed = variants["base"], variants["changed"]
    second = StageConfig(name="b", steps=6, data={"dir": str(changed.folder)})
    whole = _config(base, StageConfig(name="a", steps=5), second)
    gone = _config(base, StageConfig(name="a", steps=5, data={"dir": "/nowhere"}), second)
    with pytest.raises(DataError, match=r"stage 0 \(a\).*nowhere"):
        open_indexes(gone.timeline)
    known = [base.fingerprint, changed.fingerprint]
    found = open_indexes(gone.timeline, 1, known)
    assert found[0] == PastData("/nowhere", base.fingerprint)
    assert is_there(found[1])
    left = _steps(_stages(gone, 1, known))
    assert _hashes(left, 6, 5) == _hashes(_steps(_stages(whole)), 6, 5)
    [border] = gone.timeline.borders
    assert left.epochs(border) == {}, "what was seen of it is not known"
    assert left.epochs(border + 1)
    # Not where the next stage goes on in it.
    longer = {"dir": "/nowhere", "seq_len": 128}
    needed = _config(base, StageConfig(name="a", steps=5, data={"dir": "/nowhere"}),
                     StageConfig(name="b", steps=5, data=longer))  # fmt: skip
    with pytest.raises(DataError, match="nowhere"):
        open_indexes(needed.timeline, 1, known)


@pytest.mark.parametrize(
    ("cursor", "read"),
    [(None, {"base", "changed"}), (24, {"base", "changed"}), (72, {"changed"})],
)
def test_data_of_stages_that_are_over_is_not_copied_to_the_node(
    variants: Variants, monkeypatch: pytest.MonkeyPatch, cursor: int | None, read: set[str]
) -> None:
    base, changed = variants["base"], variants["changed"]
    config = _config(base, StageConfig(name="a", steps=5),
                     StageConfig(name="b", steps=6, data={"dir": str(changed.folder)}))  # fmt: skip
    newest = cursor and SimpleNamespace(cursor=cursor)
    monkeypatch.setattr(stages, "newest_of", lambda config: newest)
    monkeypatch.setattr(stages.dist, "on_first", lambda function, what: function())
    copied = set()

    def where_read(index: DatasetIndex) -> DatasetIndex:
        copied.add(index.fingerprint)
        return index

    objective = make_objective(config.objective)
    found = stages.train_stages(config, open_indexes(config.timeline), objective, where_read)
    assert [stage.number for stage in found] == [0, 1], "its held-out text is looked at"
    assert copied == {variants[name].fingerprint for name in read}
