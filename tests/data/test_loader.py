"""Batches: the same whatever the world size, laid out as documented, read from real shards."""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import MonitorConfig, TrainConfig
from pipeline.data.format import CLS_ID, NUM_SPECIAL, PAD_ID, SEP_ID, DatasetIndex, read_index
from pipeline.data.loader import EvalLoader, MicroBatch, TrainLoader
from pipeline.data.reader import Block, BlockReader
from pipeline.data.run_order import DataRank, TrainSteps
from pipeline.errors import ConfigError, DataError
from pipeline.objectives.inputs import train_inputs
from tests.support.damage import flip
from tests.support.steps import eval_loader, train_loader


def _config(dataset: DatasetIndex, micro_batch: int = 4, seed: int = 5) -> PretrainConfig:
    return PretrainConfig(
        run_dir="unused",
        seed=seed,
        data=DataConfig(dir=str(dataset.folder), seq_len=64, window_blocks=3),
        train=TrainConfig(global_batch=48, micro_batch=micro_batch),
        monitor=MonitorConfig(eval_sequences=37),
    )


def _train(dataset: DatasetIndex, config: PretrainConfig, *share: int) -> TrainLoader:
    return train_loader(dataset, config, DataRank(*share))


def _eval(dataset: DatasetIndex, config: PretrainConfig, *share: int) -> EvalLoader:
    return eval_loader(dataset, config, DataRank(*share))


def _originals(batch: MicroBatch) -> torch.Tensor:
    ids = batch.input_ids.clone().view(-1)
    ids[batch.inputs["masked_index"]] = batch.inputs["targets"]
    return ids.view_as(batch.input_ids)


@pytest.mark.parametrize(("world_size", "micro_batch"), [(2, 4), (3, 8), (4, 1)])
def test_sums_are_those_of_one(dataset: DatasetIndex, world_size: int, micro_batch: int) -> None:
    """Its sequences and its hash: `test_layouts`."""

    def sums(config: PretrainConfig, world: int) -> tuple[int, ...]:
        parts = [b for r in range(world) for b in _train(dataset, config, r, world).step_batches(0)]
        targets = sum(len(batch.inputs["targets"]) for batch in parts)
        assert sum(batch.weights["loss"] for batch in parts) == targets
        unmasked = sum(batch.counts["unmasked_documents"] for batch in parts)
        return targets, unmasked, sum(batch.num_tokens for batch in parts)

    assert sums(_config(dataset, micro_batch), world_size) == sums(_config(dataset), 1)


@pytest.mark.parametrize("world_size", [3, 6])
def test_a_rank_needs_few_of_a_windows_blocks(dataset: DatasetIndex, world_size: int) -> None:
    steps = _train(dataset, _config(dataset, micro_batch=8), 0, 1).steps
    assert len(steps.split.rows) > 2 * 3
    of_rank = [set[int]() for _ in range(world_size)]
    [first] = steps.order.segments[0].orders[0].windows(0, 1)
    for cursor in range(0, len(first.order) - 47, 48):
        seen = []
        for rank in range(world_size):
            locations, places = steps.located(cursor, DataRank(rank, world_size))
            whole = steps.order.segment(cursor).locate(cursor, 48)
            for array, of_all in zip(locations, whole, strict=True):
                assert array.tolist() == of_all[places].tolist()
            of_rank[rank] |= set(locations.blocks.tolist())
            seen += places.tolist()
        assert sorted(seen) == list(range(48))
    # Each has all three blocks of a window if a step is not sorted. Sorted, the two inner edges of
    # blocks vary by a few sequences from step to step, so a rank on either side has both blocks.
    assert sum(len(blocks) for blocks in of_rank) <= world_size + 2 * 2 < 3 * world_size


def test_ranks_read_a_block_once(dataset: DatasetIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # a loader of an earlier test hands its blocks to this one's as well
    config = _config(dataset, micro_batch=4).train_data
    inputs, read = train_inputs(config, dataset), []
    block = BlockReader.block

    def counted(self: BlockReader, row: int) -> Block:
        read.append(row)
        return block(self, row)

    monkeypatch.setattr(BlockReader, "block", counted)
    alone = TrainSteps(dataset, config, inputs)
    ranks = [TrainSteps(dataset, config, inputs, sharing=True) for _ in range(6)]
    for cursor in range(0, 48 * 4, 48):
        for rank, steps in enumerate(ranks):
            found = steps.micro_batches(cursor, DataRank(rank, 6))
            expected = alone.micro_batches(cursor, DataRank(rank, 6))
            for one, other in zip(found, expected, strict=True):
                assert one.hash == other.hash
                np.testing.assert_array_equal(one.input_ids, other.input_ids)
    assert sorted(read) == sorted(2 * sorted(set(read)))


def test_batch_that_does_not_split_over_ranks_is_refused(dataset: DatasetIndex) -> None:
    with pytest.raises(ConfigError, match=r"train\.micro_batch=4 x 5"):
        _train(dataset, _config(dataset), 0, 5)


def test_an_epoch_holds_every_document_once(dataset: DatasetIndex) -> None:
    loader = _train(dataset, _config(dataset), 0, 1)
    inputs, documents = train_inputs(_config(dataset).train_data, dataset), []
    for position in range(int(loader.steps.split.counts[64].sum())):
        locations = loader.steps.order.segment(0).locate(position, 1)
        slots = loader.steps.split.slots(locations, 64)
        [made] = inputs(slots, locations, 0, micro_batch=1, places=np.arange(1))
        batch = MicroBatch.of(made)
        ids, numbers = _originals(batch)[0], batch.documents[0]
        for number in range(1, int(numbers.max()) + 1):
            piece = ids[numbers == number]
            assert (piece[0], piece[-1]) == (CLS_ID, SEP_ID)
            assert (piece[1:-1] >= NUM_SPECIAL).all()
            assert batch.positions[0][numbers == number].tolist() == list(range(len(piece)))
            documents.append(piece[1:-1].tolist())
        assert (ids[numbers == 0] == PAD_ID).all()
    reader = BlockReader(dataset)
    expected = []
    for row in dataset.split_blocks("train"):
        block = reader.block(int(row))
        for part in np.split(block.tokens, block.doc_ends[:-1]):
            expected += [part[at : at + 62].tolist() for at in range(0, len(part), 62)]
    assert sorted(documents) == sorted(expected)


def test_the_mask_ratio_follows_the_step_in_training_only(dataset: DatasetIndex) -> None:
    plain = _config(dataset)
    rising = replace(plain, data=replace(plain.data, mask_prob_end=0.6, mask_prob_steps=10))
    rates = []
    for step in (0, 5, 10, 30):
        maskable = targets = 0
        for batch in _train(dataset, rising, 0, 1).step_batches(48 * step):
            maskable += int((_originals(batch) >= NUM_SPECIAL).sum())
            targets += len(batch.inputs["targets"])
        rates.append(targets / maskable)
    # About 2,800 tokens of 1.5 tokens a word: standard errors of 0.9% to 1.3%.
    assert rates == pytest.approx([0.15, 0.375, 0.6, 0.6], abs=0.05)
    expected, found = (
        [batch for _, batch in _eval(dataset, config, 0, 1).batches()] for config in (plain, rising)
    )
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.inputs["masked_index"], other.inputs["masked_index"])


@pytest.mark.parametrize("versions", [None, 1, 3])
def test_masks_come_again_after_as_many_epochs_as_there_are_versions(
    dataset: DatasetIndex, versions: int | None
) -> None:
    plain = _config(dataset)
    config = replace(plain, data=replace(plain.data, mask_versions=versions))
    loader = _train(dataset, config, 0, 1)
    inputs = train_inputs(config.train_data, dataset)
    order, count = loader.steps.order.segment(0), int(loader.steps.split.counts[64].sum())
    ids_of: list[dict[int, bytes]] = []
    for epoch in range(4):
        locations = order.locate(epoch * count, count)
        assert set(locations.epochs) == {epoch}
        slots = loader.steps.split.slots(locations, 64)
        [made] = inputs(slots, locations, 0, micro_batch=count, places=np.arange(count))
        rows = MicroBatch.of(made).input_ids.numpy()
        ids_of.append({
            int(number): row.tobytes()
            for number, row in zip(locations.sample_ids, rows, strict=True)
        })  # fmt: skip
    for first in range(4):
        for second in range(first):
            same = versions is not None and (first - second) % versions == 0
            assert (ids_of[first] == ids_of[second]) == same, (first, second)


@pytest.mark.parametrize("at_least_one", [False, True])
def test_documents_without_a_mask_are_counted(dataset: DatasetIndex, at_least_one: bool) -> None:
    plain = _config(dataset)
    config = replace(plain, data=replace(plain.data, mask_prob=0.01, at_least_one=at_least_one))
    unmasked = 0
    for batch in _train(dataset, config, 0, 1).step_batches(0):
        rows = (batch.inputs["masked_index"] // 64).tolist()
        numbers = batch.documents.view(-1)[batch.inputs["masked_index"]].tolist()
        with_text = {
            (row, int(number))
            for row in range(len(batch.documents))
            for number in batch.documents[row][_originals(batch)[row] >= NUM_SPECIAL].unique()
        }
        missing = with_text - set(zip(rows, numbers, strict=True))
        assert batch.counts["unmasked_documents"] == len(missing)
        unmasked += len(missing)
    assert (unmasked == 0) == at_least_one


def test_steps_before_one_that_is_broken_are_given(dataset: DatasetIndex, tmp_path: Path) -> None:
    whole = _train(dataset, _config(dataset), 0, 1)
    places = [whole.steps.located(48 * k, DataRank(0, 1))[0] for k in range(40)]
    blocks = [set(each.blocks.tolist()) for each in places]
    new = next(k for k, used in enumerate(blocks) if used - blocks[0])
    first = new - 3
    assert whole.steps.together(48 * first, DataRank(0, 1)) > 3
    row = int(whole.steps.split.rows[min(blocks[new] - blocks[0])])
    shutil.copytree(dataset.folder, tmp_path / "copy")
    copy = read_index(tmp_path / "copy")
    shard = tmp_path / "copy" / copy.shards[copy.blocks.shard[row]].file
    flip(shard, int(copy.blocks.offset[row]))
    steps = _train(copy, _config(copy), 0, 1).steps_from(48 * first)
    for k in range(first, new):
        for found, expected in zip(next(steps), whole.step_batches(48 * k), strict=True):
            assert found.hash == expected.hash
            assert torch.equal(found.input_ids, expected.input_ids)
    with pytest.raises(DataError, match="is damaged"):
        next(steps)


def test_threads_read_the_same_as_one_alone(dataset: DatasetIndex) -> None:
    loader = _train(dataset, _config(dataset), 0, 1)
    cursors = [48 * (k % 5) for k in range(100)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(loader.step_batches, cursors))
    for cursor, batches in zip(cursors, together, strict=True):
        for batch, alone in zip(batches, loader.step_batches(cursor), strict=True):
            assert torch.equal(batch.input_ids, alone.input_ids)


def test_evaluation_set_is_the_same_for_every_run_and_world_size(dataset: DatasetIndex) -> None:
    def all_rows(world_size: int, seed: int) -> list[tuple[list[int], list[int]]]:
        rows = []
        for rank in range(world_size):
            for _, batch in _eval(dataset, _config(dataset, seed=seed), rank, world_size).batches():
                if not len(batch.inputs["targets"]):
                    continue  # the rank has nothing left
                targets = torch.full((batch.input_ids.numel(),), -1)
                targets[batch.inputs["masked_index"]] = batch.inputs["targets"]
                rows += zip(batch.input_ids.tolist(), targets.view(-1, 64).tolist(), strict=True)
        return sorted(rows)

    expected = all_rows(1, seed=5)
    assert len(expected) == 37
    assert (all_rows(3, seed=5), all_rows(2, seed=6)) == (expected, expected)


@pytest.mark.parametrize("world_size", [2, 7])
def test_every_rank_evaluates_equal_batches(two_sources: DatasetIndex, world_size: int) -> None:
    config = replace(_config(two_sources, micro_batch=1), monitor=MonitorConfig(eval_sequences=32))
    whole = _targets(two_sources, config, 0, 1)
    parts = [_targets(two_sources, config, rank, world_size) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    for batches in zip(*parts, strict=True):
        assert len({source for source, _ in batches}) == 1
    for source in range(2):
        expected = sorted(t for s, targets in whole if s == source for t in targets)
        found = sorted(t for part in parts for s, targets in part if s == source for t in targets)
        assert found == expected
    assert world_size == 2 or any(not targets for part in parts for _, targets in part)


def _targets(
    dataset: DatasetIndex, config: PretrainConfig, *share: int
) -> list[tuple[int, list[int]]]:
    batches = _eval(dataset, config, *share).batches()
    return [(source, batch.inputs["targets"].tolist()) for source, batch in batches]
