"""The Python code of docs/formats.md reads what the project's own loader reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.random import philox
from pipeline.data.reader import BlockReader
from pipeline.data.run_order import TrainSteps
from tests.support.pages import ROOT, blocks
from tests.support.steps import open_steps


@pytest.fixture(scope="module")
def code() -> dict[str, Callable[..., Any]]:
    """The functions of the page, by name."""
    page = blocks(ROOT / "docs" / "formats.md")
    names: dict[str, Any] = {}
    for block in page:
        if block.kind == "python":
            assert len(block.text.splitlines()) <= 35
            exec(compile(block.text, block.name, "exec"), names)
    return names


@pytest.fixture(scope="module")
def steps(dataset: DatasetIndex) -> TrainSteps:
    data = DataConfig(dir=str(dataset.folder), seq_len=64, window_blocks=3, masking="whole_word")
    return open_steps(dataset, PretrainConfig(run_dir="unused", seed=5, data=data))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_documents(dataset: DatasetIndex, code: dict[str, Any], split: str) -> None:
    expected = []
    reader = BlockReader(dataset)
    for row in dataset.split_blocks(split).tolist():
        block = reader.block(row)
        ends = block.doc_ends.tolist()
        for name, begin, end in zip(block.document_ids, [0, *ends[:-1]], ends, strict=True):
            tokens, starts = block.tokens[begin:end], block.word_starts(begin, end)
            expected.append((name, tokens.tolist(), starts.tolist()))
    found = [
        (name, tokens.tolist(), starts.tolist())
        for name, tokens, starts in code["documents"](dataset.folder, split)
    ]
    assert len(found) == dataset.totals[split]["documents"] > 10
    assert found == expected
    # A word of several tokens tells the order of bits from its reverse.
    assert any(not all(starts) for _, _, starts in found)


def test_random_words(code: dict[str, Any]) -> None:
    for counter, key in (((1, 2, 3, 4), (5, 6)), ((2**32 - 1,) * 4, (2**32 - 1,) * 2)):
        assert code["philox"](counter, key) == tuple(int(word) for word in philox(counter, key))


def test_masks_of_a_step(steps: TrainSteps, code: dict[str, Any]) -> None:
    """All sequences of a step in the second epoch."""
    epoch = int(steps.split.counts[64].sum())
    cursor = (epoch // steps.plan.at(0).size + 1) * steps.plan.at(0).size
    place = steps.plan.at(cursor)
    locations = steps.order.segment(cursor).locate(cursor, place.size)
    assert set(locations.epochs.tolist()) == {1}
    slots = steps.split.slots(locations, 64)
    [batch] = steps.of(cursor).of.inputs(
        slots, locations, place.number, micro_batch=place.size, places=np.arange(place.size)
    )
    found = [
        row * 64 + slot
        for row in range(place.size)
        for slot in code["predicted_slots"](
            slots.word_starts[row], slots.maskable[row], int(locations.sample_ids[row]), 1, 5
        )
    ]
    assert len(found) > 100
    np.testing.assert_array_equal(found, batch.inputs["masked_index"])
