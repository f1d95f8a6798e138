"""`python -m pipeline inspect RUN --step N`: documents, packing, text and masks of a step."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from pipeline.config.batches import BatchPlace
from pipeline.config.schedule import mask_ratio
from pipeline.data.dataset import Batch
from pipeline.data.order import Locations
from pipeline.data.packing import Packing
from pipeline.data.steps import Share
from pipeline.errors import DataError
from pipeline.inspect.run import OpenedRun


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one, in a sequence."""

    document_id: str
    first_token: int
    """The first of the document's tokens that is here."""
    stop_token: int
    num_document_tokens: int
    slots: tuple[int, int]
    """First slot, [CLS], and one past the last, [SEP]."""


@dataclass(frozen=True)
class Sequence:
    """A sequence of a step."""

    place: int
    """Position in the step's batch."""
    sample_id: int
    epoch: int
    source: str
    shard: str
    block: str
    pieces: tuple[Piece, ...]
    input_ids: tuple[int, ...]
    """Without padding."""
    masked: tuple[int, ...]
    """Slots to predict."""
    targets: tuple[int, ...]
    """Their original tokens."""


@dataclass(frozen=True)
class Ranks:
    """Which part of a step is shown: all of it, or a rank's."""

    rank: int | None
    world_size: int | None


def step_text(run: OpenedRun, place: BatchPlace, ranks: Ranks, *, as_json: bool) -> Iterator[str]:
    """Describe a step: a head and its sequences with their text, or one JSON object a sequence.

    Raises:
        DataError: there is no such rank, or a shard is damaged.
    """
    share = _share(run, place, ranks)
    batches = run.steps.micro_batches(place.cursor, Share(0, 1))
    if not as_json:
        yield from _head(run, place, sum(batch.hash for batch in batches) % 2**64, share)
    for number, sequence in enumerate(_sequences(run, place, batches)):
        if number in share:
            yield _as_json(sequence) if as_json else _as_text(run, sequence, place)


def _share(run: OpenedRun, place: BatchPlace, ranks: Ranks) -> range:
    """Find the places of the step that are asked for."""
    if ranks.rank is None:
        return range(place.size)
    world_size = ranks.world_size or run.world_size
    if world_size is None:
        raise DataError(
            f"--rank {ranks.rank}: {run.folder} does not say how many ranks it has; give "
            "--world-size"
        )
    if not 0 <= ranks.rank < world_size:
        raise DataError(f"--rank {ranks.rank} must be 0 to {world_size - 1}, of {world_size} ranks")
    run.config.batches.require_split(world_size)
    each = place.size // world_size
    return range(ranks.rank * each, (ranks.rank + 1) * each)


def _head(run: OpenedRun, place: BatchPlace, found: int, share: range) -> Iterator[str]:
    record = run.record(place.number)
    yield (
        f"batch {place.number} of {run.folder}: sequences {place.cursor:,} to "
        f"{place.cursor + place.size - 1:,} of the run, {place.size} x {place.seq_len} slots, mask "
        f"ratio {mask_ratio(place.number, run.config.data):g}"
    )
    epochs = run.steps.order.epochs(place.cursor)
    yield "epochs before it: " + ", ".join(f"{name} {value:.4f}" for name, value in epochs.items())
    if record is None:
        yield f"hash {found:016x}; the run has not logged this batch"
    else:
        outcome = f"step {record.step}" if record.step is not None else "a skipped step"
        equal = "as the run logged it"
        if record.hash != found:
            equal = f"BUT THE RUN LOGGED {record.hash:016x}: it was trained on something else"
        yield f"hash {found:016x}, {equal}, in {outcome}"
    if len(share) < place.size:
        yield f"the rank's part: places {share.start} to {share.stop - 1}"


def _sequences(run: OpenedRun, place: BatchPlace, batches: list[Batch]) -> Iterator[Sequence]:
    segment = run.steps.order.segment(place.cursor)
    places = segment.locate(place.cursor, place.size)
    number = 0
    for batch in batches:
        for row in range(len(batch.input_ids)):
            one = places.rows(number, number + 1)
            block = int(one.blocks[0])
            if one.leftover[0]:
                packing = segment.leftovers[block]
            else:
                packing = run.steps.split.packing(block, place.seq_len)
            yield _sequence(run, number, one, packing, batch, row)
            number += 1


def _sequence(
    run: OpenedRun, number: int, one: Locations, packing: Packing, batch: Batch, row: int
) -> Sequence:
    index, split = run.index, run.steps.split
    position = int(one.blocks[0])
    block, of_index = split.block(position), int(split.rows[position])
    seq_len = batch.input_ids.shape[1]
    first = row * seq_len
    mine = slice(*np.searchsorted(batch.inputs["masked_index"], (first, first + seq_len)).tolist())
    pieces, slot = [], 0
    for piece in packing.pieces(int(one.sequences[0])):
        document = int(packing.piece_doc[piece])
        begin = int(block.doc_ends[document - 1]) if document else 0
        start, stop = int(packing.piece_start[piece]), int(packing.piece_stop[piece])
        end = slot + stop - start + 2
        pieces.append(
            Piece(
                document_id=block.document_ids[document],
                first_token=start - begin,
                stop_token=stop - begin,
                num_document_tokens=int(block.doc_ends[document]) - begin,
                slots=(slot, end),
            )
        )
        slot = end
    assert slot == int(np.count_nonzero(batch.documents[row]))
    return Sequence(
        place=number,
        sample_id=int(one.sample_ids[0]),
        epoch=int(one.epochs[0]),
        source=index.sources[int(index.block_source[of_index])].name,
        shard=index.shards[int(index.blocks.shard[of_index])].file,
        block=index.block_key(of_index),
        pieces=tuple(pieces),
        input_ids=tuple(batch.input_ids[row][:slot].tolist()),
        masked=tuple((batch.inputs["masked_index"][mine] - first).tolist()),
        targets=tuple(batch.inputs["targets"][mine].tolist()),
    )


def _as_json(sequence: Sequence) -> str:
    return json.dumps(asdict(sequence), ensure_ascii=False)


def _as_text(run: OpenedRun, sequence: Sequence, place: BatchPlace) -> str:
    lines = [
        "",
        f"place {sequence.place}: sample {sequence.sample_id}, epoch {sequence.epoch}, source "
        f"{sequence.source}, block {sequence.block} of {sequence.shard}, {len(sequence.input_ids)} "
        f"of {place.seq_len} slots filled, {len(sequence.masked)} to predict",
    ]
    for piece in sequence.pieces:
        lines.append(
            f"  document {piece.document_id}: tokens {piece.first_token} to {piece.stop_token - 1} "
            f"of {piece.num_document_tokens}, slots {piece.slots[0]} to {piece.slots[1] - 1}"
        )
        lines.append("    " + _marked(run, sequence, piece).replace("\n", "\n    "))
    return "\n".join(lines)


def _marked(run: OpenedRun, sequence: Sequence, piece: Piece) -> str:
    """Write a piece's text; masked tokens stand as {original -> what the model sees}."""
    originals = dict(zip(sequence.masked, sequence.targets, strict=True))
    parts, slot, stop = [], piece.slots[0] + 1, piece.slots[1] - 1
    while slot < stop:
        first, is_masked = slot, slot in originals
        while slot < stop and (slot in originals) == is_masked:
            slot += 1
        shown = list(sequence.input_ids[first:slot])
        if not is_masked:
            parts.append(_text(run, shown))
            continue
        wanted = [originals[s] for s in range(first, slot)]
        seen = "same" if shown == wanted else _text(run, shown).strip()
        text = _text(run, wanted)
        space = " " if text.startswith(" ") else ""
        parts.append(f"{space}{{{text.strip()} -> {seen}}}")
    return "".join(parts).strip()


def _text(run: OpenedRun, ids: list[int]) -> str:
    """Decode tokens; decoding drops a space at their beginning, which is put back."""
    text = run.tokenizer.decode(ids)
    return f" {text}" if run.tokenizer.piece(ids[0]).startswith(" ") else text
