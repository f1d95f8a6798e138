"""A run's data as the files of its folder describe it: its batches, a document, what was skipped.

Of a step it shows documents, packing, text and masks. Nothing here needs torch, a GPU or as many
ranks as the run has.
"""

import json
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeline.config.data import BatchSpec, TrainDataConfig
from pipeline.config.runs import load_run
from pipeline.config.stages import Timeline
from pipeline.config.train import BatchRange
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import Batch, PackedSplit
from pipeline.data.format import DatasetIndex
from pipeline.data.ledger import Ledger, read_ledger
from pipeline.data.order import Locations
from pipeline.data.packing import Packing
from pipeline.data.pairs import Pair
from pipeline.data.reader import Block
from pipeline.data.record import BatchRecord, number_of_step, read_batches
from pipeline.data.run_order import DataRank, StageData, TrainSteps
from pipeline.data.stages import Counts, open_indexes, stage_data
from pipeline.errors import DataError
from pipeline.objectives.inputs import train_inputs
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import progress
from pipeline.tokenizer.load import DatasetTokenizer, load_tokenizer

# More than cores: they wait for the storage.
_THREADS = 16


@dataclass(frozen=True)
class OpenedRun:
    """A run folder and the dataset that it is trained on."""

    folder: Path
    config: TrainDataConfig
    num_steps: int
    """`train.num_steps`."""
    skip_batches: tuple[BatchRange, ...]
    """`train.skip_batches`."""
    index: DatasetIndex
    """Of the data of the first stage that is there."""
    timeline: Timeline
    stages: list[StageData]
    """The stages whose data is there."""
    records: list[BatchRecord]
    """Batches that were computed, as far as the run has logged them."""
    world_size: int | None
    """Ranks of the newest start, if one is recorded."""

    @cached_property
    def steps(self) -> TrainSteps:
        """The run's batches, made as training makes them."""
        first = self.stages[0]
        return TrainSteps(first.index, first.config, first.inputs, first.counts, stages=self.stages)

    @cached_property
    def tokenizer(self) -> DatasetTokenizer:
        """The dataset's tokenizer."""
        return load_tokenizer(self.index.folder / self.index.tokenizer_file)

    def batch_of_step(self, step: int) -> BatchSpec:
        """Find the batch of an optimizer step, 1 for the first.

        The batch of a step to come is found as if no further step were skipped.

        Raises:
            DataError: there is no such step.
        """
        return self.config.batches.number(number_of_step(step, self.num_steps, self.records))

    def batch(self, number: int) -> BatchSpec:
        """Find a batch by its number, 0 for the first (DataError: the number is negative)."""
        if number < 0:
            raise DataError(f"--batch {number}: batches are counted from 0")
        return self.config.batches.number(number)

    def record(self, batch: int) -> BatchRecord | None:
        """Look up what the run logged about a batch; None if it did not, or not yet."""
        # Lines of the log follow one another without a gap.
        place = batch - self.records[0].batch if self.records else -1
        return self.records[place] if 0 <= place < len(self.records) else None

    def num_batches(self) -> int:
        """Count the batches of the whole run, if no further one is skipped."""
        return self.num_steps + sum(record.step is None for record in self.records)


def open_run(folder: Path, overrides: Sequence[str] = ()) -> OpenedRun:
    """Open a run folder.

    The override `data.dir=...` says where the dataset lies on this machine.

    Raises:
        RunFolderError: the folder is not that of a started run.
        DataError: the dataset is not the one that the run was started with.
    """
    run = RunFolder.started(folder)
    newest = read_json_lines(run.attempts)[-1]
    config = load_run(run.resolved, overrides).config
    stages = [
        replace(stage, data=replace(stage.data, dir=run.as_started(stage.data.dir)))
        for stage in config.timeline.stages
    ]
    newest_fingerprints = newest.get("fingerprints", [newest.get("fingerprint")])
    records = read_batches(folder) if run.batches.is_file() else []
    current = records[-1].stage if records else 0
    timeline = config.timeline.at_home(stages)
    indexes = open_indexes(timeline, current, newest_fingerprints)
    for stage, index, expected in zip(stages, indexes, newest_fingerprints, strict=False):
        if expected not in (None, index.fingerprint):
            field = f"stages.{stage.number}.data.dir" if config.stages else "data.dir"
            raise DataError(
                f"{index.folder} has fingerprint {index.fingerprint}, the run was started with "
                f"{expected}; give the folder of that dataset as {field}=FOLDER"
            )

    def opened(index: DatasetIndex, lengths: Sequence[int]) -> tuple[DatasetIndex, Counts]:
        return index, sequences_at(index, lengths, folder, config.objective)

    data = stage_data(timeline, indexes, config.train_data_of, train_inputs, opened)
    return OpenedRun(
        folder=folder,
        config=data[0].config,
        num_steps=config.train.num_steps,
        skip_batches=config.train.skip_batches,
        index=data[0].index,
        timeline=timeline,
        stages=data,
        records=records,
        world_size=newest.get("world_size"),
    )


def find_text(run: OpenedRun, document_id: str) -> Iterator[str]:
    """Describe where a document is, with one line for each time that it is seen.

    Raises:
        DataError: the training split has no such document.
    """
    split, block, tokens = find(run, document_id)
    index, row = split.reader.index, int(split.rows[block])
    yield (
        f"document {document_id}: {len(tokens)} tokens, source "
        f"{index.sources[int(index.block_source[row])].name}, block {index.block_key(row)} of "
        f"{index.shards[int(index.blocks.shard[row])].file}"
    )
    plan, num_batches = run.config.batches, run.num_batches()
    stop = plan.number(num_batches).cursor
    done = run.records[-1].batch if run.records else -1
    skipped = sum(record.step is None for record in run.records)
    count = 0
    for place in run.steps.places(split, block, tokens, stop):
        batch = plan.holding(place)
        record = run.record(batch.number)
        if record is not None:
            when = "a skipped step" if record.step is None else f"step {record.step}"
        elif batch.number > done:
            when = f"step {batch.number + 1 - skipped}, to come"
        else:
            when = "a step that the run did not log"
        epoch = int(run.steps.segment(place).locate(place, 1).epochs[0])
        where = f", {run.timeline.stages[batch.stage].title}" if run.timeline.has_stages else ""
        yield f"  batch {batch.number} ({when}{where}), place {place - batch.cursor}, epoch {epoch}"
        count += 1
    if count:
        yield f"seen {count} times in {num_batches:,} batches"
        if run.config.objective.pairs == "nsp":
            yield "mlm_nsp replaces the second part of about half of the pieces: --step shows which"
    else:
        yield f"not seen in the {num_batches:,} batches of the run"


def find(run: OpenedRun, document_id: str) -> tuple[PackedSplit, int, range]:
    """Look up a document's training split, its block there, and its tokens in that.

    Reads the ids of all blocks until it is found.

    Raises:
        DataError: the training split has no such document.
    """
    # As it stands in the block's JSON: most blocks need not be parsed.
    needle = json.dumps(document_id, ensure_ascii=False).encode()
    for split in run.steps.splits:
        if found := _find_in(split, document_id, needle):
            return split, *found
    example = run.steps.split.block(0).document_ids[0]
    folders = " and ".join(str(split.reader.index.folder) for split in run.steps.splits)
    raise DataError(
        f"no document of the training split of {folders} has the id {document_id!r}; ids "
        f"look like {example!r}"
    )


def _find_in(split: PackedSplit, document_id: str, needle: bytes) -> tuple[int, range] | None:
    total = len(split.rows)
    with ThreadPoolExecutor(_THREADS) as pool, progress("find", total, "block") as advance:
        metas = pool.map(lambda row: split.reader.meta_json(int(row)), split.rows)
        try:
            for block, meta in enumerate(metas):
                advance(1)
                if needle not in meta:
                    continue
                ids = json.loads(meta)["document_ids"]
                if document_id in ids:
                    ends = split.reader.doc_ends(int(split.rows[block]))
                    row = ids.index(document_id)
                    first = int(ends[row - 1]) if row else 0
                    return block, range(first, int(ends[row]))
        finally:
            pool.shutdown(cancel_futures=True)
    return None


def skipped_text(run: OpenedRun) -> Iterator[str]:
    """Describe the batches that were read but not trained on.

    Raises:
        DataError: the run logs no batches.
    """
    if not run.records:
        raise DataError(f"{run.folder} has logged no batches, so what was skipped is not known")
    ledger = read_ledger(run.folder)
    skipped = [record for record in run.records if record.step is None]
    for record in skipped:
        places = run.steps.segment(record.cursor).locate(record.cursor, record.sequences)
        pairs = zip(places.epochs.tolist(), places.sample_ids.tolist(), strict=True)
        samples = ", ".join(f"{epoch}/{sample}" for epoch, sample in pairs)
        yield (
            f"batch {record.batch}: sequences {record.cursor:,} to "
            f"{record.cursor + record.sequences - 1:,}, hash {record.hash:016x}; "
            f"{_why_skipped(run, ledger, record.batch)}; epoch/sample {samples}"
        )
    for each in ledger.rewinds:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.unix_s))
        yield (
            f"{when}: {each.reason}; back from step {each.from_step:,} to {each.to_step:,}, "
            f"without batches {each.first_batch} to {each.last_batch}"
        )
    for again in ledger.diverged:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(again.unix_s))
        yield (
            f"{when}: {again.reason}; back from step {again.from_step:,} to {again.to_step:,}, "
            "without leaving out a batch"
        )
    yield f"{len(skipped)} of {len(run.records):,} batches were skipped"
    if ledger.rewinds:
        ranges = ", ".join(
            f"{{first: {each.first_batch}, last: {each.last_batch}}}" for each in ledger.rewinds
        )
        yield f"another run leaves out the same batches with 'train.skip_batches=[{ranges}]'"


def _why_skipped(run: OpenedRun, ledger: Ledger, batch: int) -> str:
    if any(each.first_batch <= batch <= each.last_batch for each in ledger.rewinds):
        return "left out when the run went back"
    if any(each.first <= batch <= each.last for each in run.skip_batches):
        return "left out by train.skip_batches"
    if found := ledger.non_finite.get(batch):
        ranks = ", ".join(found.ranks) or "none"
        causes = [f"gradient norm {found.grad_norm}, ranks whose loss is not finite: {ranks}"]
        return "; ".join([*causes, *found.gradients])
    return "not finite; the version that skipped it kept no ledger"


@dataclass(frozen=True)
class DocumentPiece:
    """A document, or a part of one, in a sequence."""

    document_id: str
    first_token: int
    """The first of the document's tokens that is here."""
    stop_token: int
    num_document_tokens: int
    slots: tuple[int, int]
    """First slot, [CLS], and one past the last, [SEP]."""


@dataclass(frozen=True)
class SegmentPart:
    """A run of tokens of one document in a segment of a pair."""

    segment: int
    document_id: str
    first_token: int
    stop_token: int


@dataclass(frozen=True)
class PairPiece(DocumentPiece):
    """A piece that was made a pair of segments; the document's tokens are those it was made of."""

    label: int | None
    """1: the second segment does not follow the first; None: there is only one."""
    cut_in_sentence: bool
    parts: tuple[SegmentPart, ...]
    """What stands in the segments, in order."""


@dataclass(frozen=True)
class StepSequence:
    """A sequence of a step."""

    place: int
    sample_id: int
    epoch: int
    source: str
    shard: str
    block: str
    pieces: tuple[DocumentPiece, ...]
    input_ids: tuple[int, ...]
    """Without padding."""
    masked: tuple[int, ...]
    """Slots to predict."""
    targets: tuple[int, ...]


def step_text(
    run: OpenedRun, place: BatchSpec, rank: int | None, world_size: int | None, *, as_json: bool
) -> Iterator[str]:
    """Describe a step: a head and its sequences with their text, or one JSON object a sequence.

    A rank's part of them, or all without a rank.

    Raises:
        DataError: there is no such rank, or a shard is damaged.
    """
    share = _share(run, place, rank, world_size or run.world_size)
    batches = run.steps.micro_batches(place.cursor, DataRank(0, 1))
    if not as_json:
        yield from _head(run, place, sum(batch.hash for batch in batches) % 2**64, share)
    for number, sequence in enumerate(_sequences(run, place, batches)):
        if number in share:
            shown = json.dumps(asdict(sequence), ensure_ascii=False) if as_json else ""
            yield shown or _as_text(run, sequence, place)


def _share(
    run: OpenedRun, place: BatchSpec, rank: int | None, world_size: int | None
) -> Collection[int]:
    """Find the places of the step that are asked for."""
    if rank is None:
        return range(place.size)
    if world_size is None:
        raise DataError(
            f"--rank {rank}: {run.folder} does not say how many ranks it has; give --world-size"
        )
    if not 0 <= rank < world_size:
        raise DataError(f"--rank {rank} must be 0 to {world_size - 1}, of {world_size} ranks")
    run.config.batches.require_split(world_size)
    _, places = run.steps.located(place.cursor, DataRank(rank, world_size))
    return sorted(places.tolist())


def _head(run: OpenedRun, place: BatchSpec, found: int, share: Collection[int]) -> Iterator[str]:
    record = run.record(place.number)
    yield (
        f"batch {place.number} of {run.folder}: sequences {place.cursor:,} to "
        f"{place.cursor + place.size - 1:,} of the run, {place.size} x {place.seq_len} slots, mask "
        f"ratio {run.steps.mask_ratio(place):g}"
        + (f", {run.timeline.stages[place.stage].title}" if run.timeline.has_stages else "")
    )
    epochs = run.steps.epochs(place.cursor)
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
        yield f"the rank's part: places {', '.join(map(str, share))}"


def _sequences(run: OpenedRun, place: BatchSpec, batches: list[Batch]) -> Iterator[StepSequence]:
    segment, split = run.steps.segment(place.cursor), run.steps.of(place.cursor).split
    places = segment.locate(place.cursor, place.size)
    number = 0
    for batch in batches:
        for row in range(len(batch.input_ids)):
            one = places.rows(number, number + 1)
            block = int(one.blocks[0])
            if one.leftover[0]:
                packing = segment.leftovers[block]
            else:
                packing = split.packing(block, place.seq_len)
            yield _sequence(split, number, one, packing, batch, row)
            number += 1


def _sequence(
    split: PackedSplit, number: int, one: Locations, packing: Packing, batch: Batch, row: int
) -> StepSequence:
    index = split.reader.index
    position = int(one.blocks[0])
    block, of_index = split.block(position), int(split.rows[position])
    seq_len = batch.input_ids.shape[1]
    first = row * seq_len
    mine = slice(*np.searchsorted(batch.inputs["masked_index"], (first, first + seq_len)).tolist())
    pieces, slot = list[DocumentPiece](), 0
    pairs = split.pairs(one, packing)
    for count, piece in enumerate(packing.pieces(int(one.sequences[0]))):
        document = int(packing.piece_doc[piece])
        begin = int(block.doc_ends[document - 1]) if document else 0
        start, stop = int(packing.piece_start[piece]), int(packing.piece_stop[piece])
        end = slot + int(np.count_nonzero(batch.documents[row] == count + 1))
        made = DocumentPiece(
            document_id=block.document_ids[document],
            first_token=start - begin,
            stop_token=stop - begin,
            num_document_tokens=int(block.doc_ends[document]) - begin,
            slots=(slot, end),
        )
        pieces.append(made if pairs is None else _as_pair(made, block, pairs[count]))
        slot = end
    assert slot == int(np.count_nonzero(batch.documents[row]))
    return StepSequence(
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


def _as_pair(piece: DocumentPiece, block: Block, pair: Pair) -> PairPiece:
    parts = []
    for number, (start, stop) in enumerate(pair.parts.tolist()):
        if start == stop:
            continue
        document = int(np.searchsorted(block.doc_ends, start, side="right"))
        begin = int(block.doc_ends[document - 1]) if document else 0
        of_document = block.document_ids[document]
        parts.append(SegmentPart(number // 2, of_document, start - begin, stop - begin))
    return PairPiece(
        **vars(piece), label=pair.label, cut_in_sentence=pair.in_sentence, parts=tuple(parts)
    )


def _as_text(run: OpenedRun, sequence: StepSequence, place: BatchSpec) -> str:
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
        if isinstance(piece, PairPiece):
            lines.append("    " + _pair_text(piece))
        lines.append("    " + _marked(run, sequence, piece).replace("\n", "\n    "))
    return "\n".join(lines)


def _pair_text(piece: PairPiece) -> str:
    """Describe what stands in the segments, where tokens of another document do, and the label."""
    if piece.label is None:
        return "no pair: the piece has too few words, or its block no other text"
    segments = []
    for segment in range(2):
        runs = [
            ("" if part.document_id == piece.document_id else f"document {part.document_id}: ")
            + f"tokens {part.first_token} to {part.stop_token - 1}"
            for part in piece.parts
            if part.segment == segment
        ]
        segments.append(f"segment {segment} {', '.join(runs)}")
    follows = "does not follow" if piece.label else "follows"
    cut = ", cut within a sentence" if piece.cut_in_sentence else ""
    return f"{'; '.join(segments)}; label {piece.label}: the second {follows} the first{cut}"


def _marked(run: OpenedRun, sequence: StepSequence, piece: DocumentPiece) -> str:
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
    """Decode tokens; sentencepiece drops a space at their beginning, which is put back."""
    text = run.tokenizer.decode(ids).replace("\n", "\\n")  # a sequence stays on one line
    is_dropped = run.tokenizer.piece(ids[0]).startswith(" ") and not text.startswith(" ")
    return f" {text}" if is_dropped else text
