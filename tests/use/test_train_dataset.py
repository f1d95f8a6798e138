"""`postnorm.TrainDataset` against the trainer's own loader, bit for bit."""

import json
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import TrainLoader
from pipeline.data.run_order import DataRank
from pipeline.errors import ConfigError, DataError
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.use.train_dataset import Item, TrainDataset
from tests.support.grids import first_in_ci

OPTIONS: dict[str, Any] = {"seq_len": 64, "window_blocks": 2, "masking": "span",
                           "mask_selection": "exact", "mask_prob": 0.3, "mask_prob_end": 0.1,
                           "mask_prob_steps": 4}  # fmt: skip


def _trainer_s(
    dataset: DatasetIndex, tmp_path: Path, rank: int, micro_batch: int, cursor: int = 0
) -> Iterator[Item]:
    """Micro-batches as a run of two ranks has them."""
    config = tmp_path / "train.yaml"
    config.write_text(
        f"run_dir: unset\nseed: 3\ndata: {json.dumps({'dir': str(dataset.folder), **OPTIONS})}\n"
        f"train: {{global_batch: 8, micro_batch: {micro_batch}}}\n"
    )
    train = load(PretrainConfig, config).config.train_data
    inputs = MaskedLanguageModeling().train_inputs(train, dataset)
    for batches in TrainLoader(dataset, train, inputs, DataRank(rank, 2)).steps_from(cursor):
        for batch in batches:
            yield {"input_ids": batch.input_ids, "positions": batch.positions,
                   "segments": torch.zeros_like(batch.input_ids), "documents": batch.documents,
                   "cu_seqlens": batch.cu_seqlens, **batch.inputs}  # fmt: skip


def _data(dataset: DatasetIndex, rank: int = 0, **changes: Any) -> TrainDataset:
    options = {"global_batch": 8, "world_size": 2, "micro_batch": 2, "seed": 3, **OPTIONS}
    return TrainDataset(dataset.folder, rank=rank, **{**options, **changes})


def _require_equal(found: Iterator[Item], expected: Iterator[Item], count: int) -> None:
    pairs = list(zip(islice(found, count), islice(expected, count), strict=True))
    assert len(pairs) == count
    for one, other in pairs:
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
            assert tensor.dtype == other[name].dtype


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_same_items(rank: int, micro_batch: int, dataset: DatasetIndex, tmp_path: Path) -> None:
    data = _data(dataset, rank, micro_batch=micro_batch)
    _require_equal(iter(data), _trainer_s(dataset, tmp_path, rank, micro_batch), 24)
    assert data.num_sequences > 100
    if micro_batch == 4:
        whole = _data(dataset, rank, micro_batch=None)
        _require_equal(iter(whole), iter(_data(dataset, rank, micro_batch=4)), 3)


@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_a_state_continues_right_after(taken: int, dataset: DatasetIndex, tmp_path: Path) -> None:
    data = _data(dataset)
    assert len(list(islice(data, taken))) == taken
    state = json.loads(json.dumps(data.state_dict()))
    assert state == _data(dataset).state_dict(num_taken=taken)
    assert state == data.state_dict(num_taken=taken)  # since it was made, whoever counted
    again = _data(dataset)
    again.load_state_dict(state)
    expected = islice(_trainer_s(dataset, tmp_path, 0, 2), taken, None)
    _require_equal(iter(again), expected, 6)
    assert again.state_dict(num_taken=6) == _data(dataset).state_dict(num_taken=taken + 6)
    # The iteration that was begun goes on in a second one, too.
    expected = islice(_trainer_s(dataset, tmp_path, 0, 2), taken, None)
    _require_equal(iter(data), expected, 6)


def test_a_state_after_steps_continues_on_others(dataset: DatasetIndex, tmp_path: Path) -> None:
    data = _data(dataset)
    assert len(list(islice(data, 4))) == 4
    alone = _data(dataset, world_size=1, micro_batch=8)
    alone.load_state_dict(data.state_dict())
    [step] = islice(alone, 1)
    halves = [next(iter(_trainer_s(dataset, tmp_path, rank, 4, cursor=16))) for rank in (0, 1)]
    # Several ranks have a step sorted by block.
    both = torch.cat([half["input_ids"] for half in halves])
    assert sorted(step["input_ids"].tolist()) == sorted(both.tolist())


def test_another_state_is_refused(dataset: DatasetIndex) -> None:
    state = _data(dataset).state_dict()
    for changes in ({"seed": 4}, {"seq_len": 32}, {"global_batch": 16}, {"window_blocks": 3}):
        [(name, value)] = changes.items()
        with pytest.raises(DataError, match=rf"{name} was \d+, is {value}"):
            _data(dataset, **changes).load_state_dict(state)
    mix = [{"source": "topics", "weight": 2.0}]
    for changes in ({"mix": mix}, {"masking": "whole_word"}, {"mask_prob": 0.31}):
        [name] = changes
        with pytest.raises(DataError, match=rf"data\.{name} was .*, is "):
            _data(dataset, **changes).load_state_dict(state)
    _data(dataset, workers=1).load_state_dict(state)
    earlier = {name: value for name, value in state.items() if name != "data"}
    _data(dataset).load_state_dict(earlier)
    with pytest.raises(DataError, match="fingerprint was 'other', is"):
        _data(dataset).load_state_dict({**state, "fingerprint": "other"})
    within = _data(dataset).state_dict(num_taken=1)
    with pytest.raises(DataError, match="parts was 2, is 1"):
        _data(dataset, micro_batch=4).load_state_dict(within)
    # As many parts, of other sequences: a rank alone does not sort a step by block.
    with pytest.raises(DataError, match="ranks was 2, is 1"):
        _data(dataset, world_size=1, micro_batch=4).load_state_dict(within)
    of_before = {name: value for name, value in within.items() if name != "ranks"}
    _data(dataset).load_state_dict(of_before)


def test_items_of_pairs_are_those_of_their_objective(dataset: DatasetIndex) -> None:
    data = _data(dataset, objective="mlm_sop")
    items = list(islice(data, 5))
    for item in items:
        firsts = item["input_ids"].view(-1)[item["pair_first"]]
        assert (firsts == dataset.vocabulary.cls).all()
        assert len(item["pair_labels"]) == len(firsts) > 0
        assert item["segments"].unique().tolist() == [0, 1]
    state = data.state_dict()
    again = _data(dataset, objective="mlm_sop")
    again.load_state_dict(_data(dataset, objective="mlm_sop").state_dict(num_taken=3))
    _require_equal(iter(again), iter(items[3:]), 2)
    plain = _data(dataset)
    with pytest.raises(DataError, match="objective was 'mlm_sop', is 'mlm'"):
        plain.load_state_dict(state)
    with pytest.raises(DataError, match="objective was 'mlm', is 'mlm_sop'"):
        again.load_state_dict(plain.state_dict())


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("context", "num_workers"), first_in_ci([("fork", 2), ("spawn", 2), ("fork", 1)], 2)
)
def test_workers_of_a_data_loader_divide_the_items(
    context: str, num_workers: int, dataset: DatasetIndex, tmp_path: Path
) -> None:
    data = _data(dataset)
    data.load_state_dict(data.state_dict(num_taken=3))
    options = {"batch_size": None, "num_workers": num_workers, "multiprocessing_context": context}
    items = iter(DataLoader(data, **options))  # type: ignore[arg-type]
    _require_equal(items, islice(_trainer_s(dataset, tmp_path, 0, 2), 3, None), 10)
    with pytest.raises(DataError, match=r"workers of a DataLoader are ahead .* num_workers=0"):
        data.state_dict()
    assert data.state_dict(num_taken=10) == _data(dataset).state_dict(num_taken=13)
    with pytest.raises(DataError, match=r"began a second time.*state_dict\(num_taken\)"):
        next(iter(DataLoader(data, **options)))  # type: ignore[arg-type]
    data.load_state_dict(data.state_dict(num_taken=10))
    again = iter(DataLoader(data, **options))  # type: ignore[arg-type]
    _require_equal(again, islice(_trainer_s(dataset, tmp_path, 0, 2), 13, None), 2)


@pytest.mark.usefixtures("processes")
def test_own_workers_keep_the_state_exact(dataset: DatasetIndex, tmp_path: Path) -> None:
    data = _data(dataset, workers=2, prefetch_steps=4)
    found = iter(DataLoader(data, batch_size=None))
    _require_equal(found, _trainer_s(dataset, tmp_path, 0, 2), 5)
    assert data.state_dict() == _data(dataset).state_dict(num_taken=5)
    del found


def test_no_state_is_from_before_the_start(dataset: DatasetIndex) -> None:
    with pytest.raises(DataError, match="num_taken=-3"):
        _data(dataset).state_dict(num_taken=-3)


def test_it_can_be_pickled(dataset: DatasetIndex) -> None:
    data = _data(dataset)
    assert len(list(islice(data, 3))) == 3
    _require_equal(iter(pickle.loads(pickle.dumps(data))), iter(data), 2)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"world_size": 3}, ConfigError, "global_batch=8 .*micro_batch=2 x 3"),
    ({"world_size": 3, "micro_batch": None}, ConfigError, "global_batch=8"),
    ({"micro_batch": 3}, ConfigError, "micro_batch=3"),
    ({"rank": 2}, ConfigError, "rank=2 .*world_size=2"),
    ({"global_batch": 0}, ConfigError, "global_batch=0"),
    ({"global_batch": 8.0}, ConfigError, "global_batch.*8.0.*whole numbers"),
    ({"seed": "a"}, ConfigError, "seed.*'a'.*whole numbers"),
    ({"seed": -1}, ConfigError, "seed=-1"),
    ({"mask_pob": 0.2}, ConfigError, "mask_pob.*mask_prob"),
    ({"mask_prob": 2}, ConfigError, "mask_prob = 2"),
    ({"objective": "nsp"}, ConfigError, "nsp.*mlm_nsp"),
])  # fmt: skip
def test_mistakes_are_named(
    changes: dict[str, Any], error: type[Exception], message: str, dataset: DatasetIndex
) -> None:
    with pytest.raises(error, match=message):
        _data(dataset, **changes)
