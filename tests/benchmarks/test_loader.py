"""The comparison of loaders counts the same text for all, and says what it could not measure."""

import json

import numpy as np
import pytest

from benchmarks import loader, loader_subjects
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex
from pipeline.data.reader import BlockReader

pytestmark = pytest.mark.long
_SLOTS, _BATCH = 64, 8


@pytest.fixture(scope="module")
def spec(dataset: DatasetIndex, tmp_path_factory: pytest.TempPathFactory) -> loader.Spec:
    folder = tmp_path_factory.mktemp("peers")
    special_ids = [dataset.vocabulary.cls, dataset.vocabulary.sep]
    return loader.Spec(str(dataset.folder), str(folder), _SLOTS, _BATCH, 0.05, special_ids)


@pytest.fixture(scope="module")
def text_a_row(dataset: DatasetIndex, spec: loader.Spec) -> float:
    return loader.write_rows(dataset, spec)


def _expected_rows(dataset: DatasetIndex) -> tuple[list[int], list[bool]]:
    """All documents between [CLS] and [SEP], and where words start, document by document."""
    ids, starts = [], []
    reader = BlockReader(dataset)
    for row in dataset.split_blocks("train").tolist():
        block, begin = reader.block(row), 0
        for end in block.doc_ends.tolist():
            words = block.word_starts(begin, end).tolist()
            ids += [dataset.vocabulary.cls, *block.tokens[begin:end], dataset.vocabulary.sep]
            starts += [True, *words, True]
            begin = end
    return ids, starts


def test_peers_get_documents(dataset: DatasetIndex, spec: loader.Spec, text_a_row: float) -> None:
    ids, starts = _expected_rows(dataset)
    rows, offsets = spec.rows(), spec.rows("offsets")
    assert len(rows) == len(ids) // _SLOTS
    assert rows.reshape(-1).tolist() == ids[: rows.size]
    touches = offsets[:, 1:, 0] == offsets[:, :-1, 1]
    assert (touches == ~np.array(starts[: rows.size]).reshape(rows.shape)[:, 1:]).all()
    text = sum(token not in spec.special_ids for token in ids[: rows.size])
    assert text_a_row == pytest.approx(text / len(rows))


def test_ours_yields_all_text_but_of_a_last_step(dataset: DatasetIndex, spec: loader.Spec) -> None:
    batches = list(loader_subjects.ours(spec, "whole_word")())
    pieces = sum(int(batch.documents.max(1).values.sum()) for batch in batches)
    text = sum(batch.num_tokens for batch in batches) - 2 * pieces
    # What does not fill a step of 8 batches is left out.
    num_sequences = sequences_at(dataset, [_SLOTS], None)[_SLOTS][dataset.split_blocks("train")]
    left_out = int(num_sequences.sum()) - len(batches) * _BATCH
    assert 0 <= left_out < 8 * _BATCH
    assert 0 <= dataset.totals["train"]["tokens"] - text <= left_out * (_SLOTS - 2)


@pytest.mark.usefixtures("text_a_row")
@pytest.mark.parametrize("reader", ["memmap", "webdataset"])
def test_readers_yield_each_row_at_most_once(spec: loader.Spec, reader: str) -> None:
    if reader in loader_subjects._WRITERS:
        loader_subjects._WRITERS[reader](spec)
    batches = loader_subjects.READERS[reader](spec, "none")()
    found = [tuple(row) for batch in batches for row in batch.tolist()]
    rows = [tuple(row) for row in spec.rows().tolist()]
    assert len(found) == len(rows) // _BATCH * _BATCH
    assert found != rows[: len(found)]
    for row in found:
        rows.remove(row)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_table_has_figures_and_reasons(dataset: DatasetIndex, spec: loader.Spec) -> None:
    subjects = (loader.OURS, ("memmap", "none"), ("litdata", "none"))
    measured = loader.compare(dataset, spec, 1, ["no-such-python"], subjects)
    found = measured["subjects"]
    assert found["ours, whole_word"]["cpu"][0] > 0
    assert found["ours, whole_word"]["peak_mib"] > found["ours, whole_word"]["torch_mib"] > 50
    assert "no-such-python" in found["litdata, none"]["not measured"]
    assert "fastest_masked" not in measured
    assert measured["goals"]["times_fastest_masked >= 3"] == "not measured"
    result = {"batch": _BATCH, "rounds": 1, "tokens": 1, "documents": 1, "versions": {},
              "seq_len": {_SLOTS: measured}}  # fmt: skip
    table = loader._table(json.loads(json.dumps(result)))
    assert "| litdata | none | not measured: " in table
    assert f"| ours | whole_word | {found['ours, whole_word']['cpu'][0]} |" in table
