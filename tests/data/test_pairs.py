"""Pairs of segments: those of a plain Python version, without what would give labels away."""

import numpy as np
import pytest

from pipeline.config.data import DataConfig, PhaseConfig
from pipeline.config.model import ModelConfig
from pipeline.config.objective import MLM, ObjectiveConfig, ObjectiveKind, PairKind
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import MonitorConfig, TrainConfig
from pipeline.data.counts import packing_counts, sequences_at
from pipeline.data.dataset import Batch
from pipeline.data.format import CLS_ID, SEP_ID, DatasetIndex, Vocabulary
from pipeline.data.order import Locations
from pipeline.data.packing import PackedSequences, Packing, pack
from pipeline.data.pairs import (
    Pair,
    PairRule,
    Text,
    lay_out_pairs,
    pairs_of,
    sentence_marks,
    sentence_starts,
)
from pipeline.data.random import Purpose
from pipeline.data.reader import Block
from pipeline.data.run_order import DataRank
from pipeline.objectives.inputs import train_inputs
from tests.support import pair_leaks
from tests.support.reference_pairs import Made, ReferencePairs
from tests.support.steps import eval_loader, open_steps, start_workers

_MARKS = ["。", "．", " .", ".", "!", "?", ";", "...", "。”", "”", '"', ' "', ")", "（", ",", ":"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_MARKS] + [f" w{n}" for n in range(60)]
KINDS: tuple[PairKind, ...] = ("nsp", "sop")
VOCABULARY = Vocabulary(len(PIECES))


def _as_read(tokens: np.ndarray, ends: np.ndarray, bits: np.ndarray) -> Block:
    block = Block(tokens.astype(np.uint16), ends, bits.astype(np.uint8), b"")
    for array in (block.tokens, block.doc_ends, block.word_bits):
        array.flags.writeable = False
    return block


def _block(lengths: list[int], seed: int) -> Block:
    rng = np.random.default_rng(seed)
    ends = np.cumsum(lengths)
    tokens = rng.integers(4, len(PIECES), ends[-1])
    return _as_read(tokens, ends, rng.integers(0, 256, -(-ends[-1] // 8)))


def _rule(kind: PairKind) -> PairRule:
    return PairRule(kind, 77, Purpose.PAIRS, sentence_marks(PIECES))


def _locations(num_sequences: int, seed: int) -> Locations:
    """Every sequence of a block in some order, in some epoch, with large numbers."""
    rng = np.random.default_rng(seed)
    return Locations(
        epochs=rng.integers(0, 5, num_sequences),
        blocks=np.zeros(num_sequences, np.int64),
        sequences=rng.permutation(num_sequences),
        sample_ids=rng.integers(0, 1 << 50, num_sequences),
        leftover=np.zeros(num_sequences, np.bool_),
    )


def _laid_out(
    block: Block, seq_len: int, kind: PairKind, seed: int = 0
) -> tuple[PackedSequences, Packing, Locations]:
    packing = pack(block.doc_ends, seq_len, 3)
    locations = _locations(packing.num_sequences, seed)
    slots = PackedSequences.empty(packing.num_sequences, seq_len, pairs=True)
    for array in (*slots[:-1], slots.pairs.segments, slots.pairs.labels, slots.pairs.counts):
        array.view(np.uint8)[:] = 0xA5  # what is not written must show
    rule = _rule(kind)
    text = Text.of(block, sentence_starts(block, rule.marks))
    for rows in np.array_split(np.arange(packing.num_sequences), 3):
        lay_out_pairs(slots, rows, text, packing, locations, VOCABULARY, rule)
    return slots, packing, locations


def _require_row(slots: PackedSequences, row: int, block: Block, made: list[Made]) -> None:
    """Compares a row with pairs, slot by slot."""
    seq_len = slots.tokens.shape[1]
    starts = block.word_starts(0, len(block.tokens))
    expected: list[tuple[int, int, int, bool, bool, int, int]] = []
    for number, pair in enumerate(made, 1):
        label = -1 if pair.label is None else pair.label
        of_piece = [(CLS_ID, True, False, 0, label)]
        for segment, places in enumerate((pair.first, pair.second)):
            if places is None:
                continue
            assert places
            for count, place in enumerate(places):
                token = int(block.tokens[place])
                of_piece.append((token, bool(starts[place]) or not count, token > 4, segment, -1))
            of_piece.append((SEP_ID, True, False, segment, -1))
        expected += [
            (token, number, position, is_start, is_maskable, segment, at_label)
            for position, (token, is_start, is_maskable, segment, at_label) in enumerate(of_piece)
        ]
    assert len(expected) <= seq_len
    expected += [(0, 0, 0, True, False, 0, -1)] * (seq_len - len(expected))
    columns = (*slots[:-1], slots.pairs.segments, slots.pairs.labels)
    for found, wanted in zip(columns, zip(*expected, strict=True), strict=True):
        as_bytes = np.array(wanted, found.dtype).view(np.uint8)  # a bool may be neither 0 nor 1
        np.testing.assert_array_equal(found[row].view(np.uint8), as_bytes)
    assert slots.pairs.counts[row].tolist() == [
        sum(pair.in_sentence for pair in made),
        sum(pair.label is None for pair in made),
        sum(pair.alone for pair in made),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seq_len", "lengths"), [
    (8, [1, 2, 3, 4, 5, 6, 7, 30, 1, 1]), (32, [1, 300, 29, 30, 58, 7, 2, 90] * 5),
    (64, [*range(1, 130, 3)]), (64, [400]),
])  # fmt: skip
def test_pairs_are_those_of_the_reference(kind: PairKind, seq_len: int, lengths: list[int]) -> None:
    block = _block(lengths, seed=seq_len)
    slots, packing, locations = _laid_out(block, seq_len, kind)
    reference = ReferencePairs(block, PIECES, _rule(kind))
    starts = sentence_starts(block, _rule(kind).marks)
    assert starts.tolist() == [at for d in range(len(lengths)) for at in reference.sentences(d)]
    for row in range(packing.num_sequences):
        one = locations.rows(row, row + 1)
        place = int(one.sequences[0]), int(one.epochs[0]), int(one.sample_ids[0])
        made = reference.row(packing, *place)
        _require_row(slots, row, block, made)
        text = Text.of(block, starts)
        for found, pair in zip(pairs_of(text, packing, one, _rule(kind)), made, strict=True):
            places = [[*range(*part)] for part in found.parts.tolist()]
            assert places[0] + places[1] == pair.first
            assert places[2] + places[3] == (pair.second or [])
            assert (found.label, found.in_sentence) == (pair.label, pair.in_sentence)


def _pairs(block: Block, seq_len: int, rule: PairRule) -> list[tuple[Pair, int, int, int]]:
    """All pairs of a block that have a label, with start, stop and document of their pieces."""
    packing = pack(block.doc_ends, seq_len, 3)
    locations = _locations(packing.num_sequences, seed=9)
    text = Text.of(block, sentence_starts(block, rule.marks))
    found = []
    for row, sequence in enumerate(locations.sequences.tolist()):
        pairs = pairs_of(text, packing, locations.rows(row, row + 1), rule)
        for pair, piece in zip(pairs, packing.pieces(sequence), strict=True):
            bounds = packing.piece_start, packing.piece_stop, packing.piece_doc
            if pair.label is not None:
                found.append((pair, *(int(array[piece]) for array in bounds)))
    return found


def _prose(num_documents: int) -> Block:
    """Documents of 1 to 12 sentences of 3 to 20 words."""
    rng = np.random.default_rng(4)
    tokens, ends = list[int](), list[int]()
    for _ in range(num_documents):
        for _ in range(rng.integers(1, 13)):
            words = rng.integers(PIECES.index(" w0"), len(PIECES), rng.integers(3, 21))
            tokens += [*words.tolist(), PIECES.index("。")]
        ends.append(len(tokens))
    every = np.full(-(-len(tokens) // 8), 255)
    return _as_read(np.array(tokens), np.array(ends, np.int64), every)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_even_and_nothing_but_the_text_tells_them(kind: PairKind) -> None:
    block = _prose(1500)
    full_stop = PIECES.index("。")
    pairs = _pairs(block, 64, _rule(kind))
    labels = np.array([pair.label for pair, *_ in pairs])
    # Six standard deviations of a fair coin: fails by chance once in 10^8 runs of other seeds.
    assert abs(labels.mean() - 0.5) < 6 * 0.5 / len(labels) ** 0.5
    in_sentence = np.array([pair.in_sentence for pair, *_ in pairs])
    assert in_sentence.any()
    assert abs(labels[in_sentence].mean() - 0.5) < 6 * 0.5 / in_sentence.sum() ** 0.5
    for pair, _, stop, document in pairs:
        first, second = (
            [place for part in parts for place in range(*part)]
            for parts in (pair.parts[:2].tolist(), pair.parts[2:].tolist())
        )
        if pair.in_sentence:
            continue
        # Both sides of the middle [SEP] are bounds of sentences whatever the label.
        assert block.tokens[first[-1]] == full_stop
        assert second[0] == 0 or block.tokens[second[0] - 1] == full_stop
        if stop == block.doc_ends[document]:
            assert block.tokens[second[-1]] == full_stop


def test_a_pair_has_the_same_lengths_and_ends_with_either_label() -> None:
    block = _block([*range(1, 130, 3)] * 4, seed=2)
    marks, starts = sentence_marks(PIECES), block.word_starts(0, len(block.tokens))
    sentences = {*sentence_starts(block, marks).tolist(), len(block.tokens)}
    of_label = [dict[tuple[int, int], tuple[object, ...]](), {}]
    for seed in range(40):
        for pair, begin, stop, _ in _pairs(block, 64, _rule("nsp")._replace(seed=seed)):
            _, (_, cut), (first, last), _ = pair.parts.tolist()
            assert last - first == stop - cut
            of_document = int(np.searchsorted(block.doc_ends, first, side="right"))
            assert first > ([0, *block.doc_ends.tolist()])[of_document]
            assert last <= block.doc_ends[of_document]
            ends_word = last in block.doc_ends or bool(starts[last])
            shape = (first in sentences, last in sentences, last in block.doc_ends, ends_word,
                     int(marks[block.tokens[last - 1]]), pair.in_sentence)  # fmt: skip
            # The same cut of the same piece.
            of_label[int(bool(pair.label))][begin, cut] = shape
    both = of_label[0].keys() & of_label[1].keys()
    assert len(both) > 500
    assert all(of_label[0][place] == of_label[1][place] for place in both)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("corpus", pair_leaks.SENTENCES)
def test_classifiers_of_lengths_and_ends_guess(corpus: str, kind: PairKind) -> None:
    blocks = [pair_leaks.prose(corpus, seed) for seed in range(2)]
    parts = [
        pair_leaks.shown(block, pair_leaks.PIECES, 128, kind, seed)
        for seed, block in enumerate(blocks)
    ]
    # Of 8,000 held-out pairs; four standard deviations of a fair coin are 0.522.
    assert max(pair_leaks.told(parts, 16_000).values()) < 0.5 + 4 * 0.5 / 8_000**0.5


def test_pieces_without_another_text_have_no_label() -> None:
    slots, packing, _ = _laid_out(_block([500], seed=1), 32, "nsp")
    assert (slots.pairs.labels == -1).all()
    assert slots.pairs.counts.sum(axis=0).tolist() == [0, *2 * [len(packing.piece_doc)]]
    # Nor is it the true rest where the other documents are too short for all but single tokens.
    slots, packing, _ = _laid_out(_block([500, *[2] * 9], seed=1), 32, "nsp")
    num_pairs = len(packing.piece_doc) - slots.pairs.counts[:, 1].sum()
    assert slots.pairs.segments.sum() == 2 * num_pairs == 2 * (slots.pairs.labels >= 0).sum()


def test_what_ends_a_sentence() -> None:
    found = dict(zip(PIECES, sentence_marks(PIECES).tolist(), strict=True))
    ends = {piece for piece, mark in found.items() if mark == 1}
    assert ends == {"。", "．", " .", ".", "!", "?", ";", "...", "。”"}
    assert {piece for piece, mark in found.items() if mark == 2} == {"”", '"', ")"}


def _config(
    dataset: DatasetIndex, kind: ObjectiveKind, micro_batch: int = 4, seed: int = 5
) -> PretrainConfig:
    return PretrainConfig(
        run_dir="unused", seed=seed, model=ModelConfig(pooler=True),
        objective=ObjectiveConfig(kind=kind), monitor=MonitorConfig(eval_sequences=37),
        data=DataConfig(dir=str(dataset.folder), seq_len=64, window_blocks=3),
        train=TrainConfig(global_batch=24, micro_batch=micro_batch),
        phases=(PhaseConfig(tokens=24 * 32 * 3, seq_len=32, micro_batch=micro_batch),),
    )  # fmt: skip


def _joined(parts: list[Batch]) -> dict[str, np.ndarray]:
    """A step's arrays, its parts one behind the other."""
    seq_len = parts[0].input_ids.shape[1]
    before = np.cumsum([0, *(part.input_ids.size for part in parts)])
    found = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("input_ids", "documents", "positions", "segments")
    }
    for name in parts[0].inputs:
        offsets = before if name in ("masked_index", "pair_first") else 0 * before
        arrays = [part.inputs[name] + at for part, at in zip(parts, offsets, strict=False)]
        found[name] = np.concatenate(arrays)
    assert found["input_ids"].shape[1] == seq_len
    return found


@pytest.mark.parametrize("kind", ["mlm_nsp", "mlm_sop"])
def test_a_step_is_the_same_on_any_ranks(dataset: DatasetIndex, kind: ObjectiveKind) -> None:
    steps = open_steps(dataset, _config(dataset, kind))
    other = open_steps(dataset, _config(dataset, kind, micro_batch=2))
    name = kind.removeprefix("mlm_")
    cursors = [0, 24 * 3, 24 * 20]  # 32 slots; what is left of a window; 64 slots
    assert steps.order.segments[1].leftovers
    for cursor in cursors:
        parts = steps.micro_batches(cursor, DataRank(0, 1))
        whole, again = _joined(parts), _joined(other.micro_batches(cursor, DataRank(0, 1)))
        for field, array in whole.items():
            assert array.dtype == again[field].dtype
            np.testing.assert_array_equal(array, again[field], field)
        shares = [DataRank(rank, 3) for rank in range(3)]
        split = [batch for share in shares for batch in other.micro_batches(cursor, share)]
        places = np.concatenate([other.located(cursor, share)[1] for share in shares])
        for field in ("input_ids", "segments", "positions"):
            of_ranks = np.concatenate([getattr(batch, field) for batch in split])
            of_one = np.concatenate([getattr(part, field) for part in parts])
            np.testing.assert_array_equal(of_ranks, of_one[places], field)
        assert sum(part.hash for part in parts) % 2**64 == sum(b.hash for b in split) % 2**64
        for found in (parts, split):
            assert sum(part.weights[name] for part in found) == len(whole["pair_labels"]) > 12
        counts = [
            {key: sum(part.counts[key] for part in found) for key in parts[0].counts}
            for found in (parts, split)
        ]
        assert counts[0] == counts[1]
        # [CLS] of each pair, and a [SEP] behind each of its segments.
        ids = whole["input_ids"].reshape(-1)
        assert (ids[whole["pair_first"]] == CLS_ID).all()
        num_pieces = sum(int(row.max()) for row in whole["documents"])
        unpaired = counts[0]["num_unpaired"]
        assert len(whole["pair_first"]) == num_pieces - unpaired
        assert (ids == SEP_ID).sum() == 2 * num_pieces - unpaired
        assert not (ids[whole["masked_index"]] == SEP_ID).any()
        assert not np.isin(whole["targets"], [CLS_ID, SEP_ID]).any()
        assert set(np.unique(whole["segments"])) == {0, 1}


@pytest.mark.usefixtures("processes")
def test_workers_make_the_same_steps(dataset: DatasetIndex) -> None:
    config = _config(dataset, "mlm_nsp")
    steps, share = open_steps(dataset, config), DataRank(1, 2)
    counts = sequences_at(dataset, config.batches.seq_lens, None, config.objective)
    workers = start_workers(1, dataset, config, share, counts)
    try:
        workers.ask(24)
        made = workers.take()
    finally:
        workers.close()
    for found, expected in zip(made, steps.micro_batches(24, share), strict=True):
        assert found.hash == expected.hash
        np.testing.assert_array_equal(found.segments, expected.segments)


def test_the_hash_covers_segments_and_labels(dataset: DatasetIndex) -> None:
    config = _config(dataset, "mlm_sop").train_data
    steps = open_steps(dataset, _config(dataset, "mlm_sop"))
    locations = steps.order.segment(0).locate(0, 4)
    slots, make = steps.split.slots(locations, 32), train_inputs(config, dataset)

    def total(slots: PackedSequences) -> int:
        [batch] = make(slots, locations, 0, micro_batch=4, places=np.arange(len(locations.blocks)))
        return batch.hash

    first = tuple(np.argwhere(slots.pairs.labels >= 0)[0])
    for name in ("labels", "segments"):
        other = getattr(slots.pairs, name).copy()
        other[first] = 1 - other[first]
        assert total(slots._replace(pairs=slots.pairs._replace(**{name: other}))) != total(slots)


def test_held_out_pairs_are_the_same_for_every_run(dataset: DatasetIndex) -> None:
    configs = (_config(dataset, "mlm_nsp", seed=seed) for seed in (5, 6))
    loaders = (eval_loader(dataset, config, DataRank(0, 1)) for config in configs)
    one, other = ([batch for _, batch in loader.batches()] for loader in loaders)
    for first, second in zip(one, other, strict=True):
        assert first.hash == second.hash
        assert first.inputs["pair_labels"].equal(second.inputs["pair_labels"])
    labels = np.concatenate([batch.inputs["pair_labels"].numpy() for batch in one])
    assert 0.2 < labels.mean() < 0.8  # of some hundred pairs


def test_counts_of_pairs_have_a_file_of_their_own(dataset: DatasetIndex) -> None:
    plain = packing_counts(dataset, 48, None)
    pairs = packing_counts(dataset, 48, None, ObjectiveConfig(kind="mlm_sop"))
    for found, name in ((plain, "packing-48.npz"), (pairs, "packing-48-pairs.npz")):
        with np.load(dataset.folder / name) as stored:
            np.testing.assert_array_equal(stored["sequences_per_block"], found.sequences)
    assert (pairs.pieces >= plain.pieces).all()
    assert pairs.sequences.sum() > plain.sequences.sum()
    assert packing_counts(dataset, 48, None, MLM).sequences.tolist() == plain.sequences.tolist()
