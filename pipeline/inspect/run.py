"""A run's data as the files of its folder describe it: its batches, a document, what was skipped.

Nothing here needs torch, a GPU or as many ranks as the run has.
"""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tqdm import tqdm

from pipeline.config.batches import BatchPlace
from pipeline.config.data import TrainDataConfig
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import BatchRange
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.ledger import Ledger, read_ledger
from pipeline.data.record import BatchRecord, read_batches
from pipeline.data.steps import TrainSteps
from pipeline.errors import DataError
from pipeline.objectives.inputs import train_steps
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder
from pipeline.tokenizer.wordpiece import DatasetTokenizer, load_tokenizer

_THREADS = 16
"""More than cores: they wait for the storage."""


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
    records: list[BatchRecord]
    """Batches that were computed, as far as the run has logged them."""
    world_size: int | None
    """Ranks of the newest start, if one is recorded."""

    @cached_property
    def steps(self) -> TrainSteps:
        """The run's batches, made as training makes them."""
        counts = sequences_at(self.index, self.config.batches.seq_lens, self.folder)
        return train_steps(self.index, self.config, counts)

    @cached_property
    def tokenizer(self) -> DatasetTokenizer:
        """The dataset's tokenizer."""
        return load_tokenizer(self.index.folder / self.index.tokenizer_file)

    def batch_of_step(self, step: int) -> BatchPlace:
        """Find the batch of an optimizer step, 1 for the first.

        The batch of a step to come is found as if no further step were skipped.

        Raises:
            DataError: there is no such step.
        """
        if not 1 <= step <= self.num_steps:
            raise DataError(
                f"--step {step}: the run has steps 1 to {self.num_steps} (train.num_steps)"
            )
        number = step - 1
        for record in reversed(self.records):
            if record.step is not None and record.step <= step:
                number = record.batch + step - record.step
                if record.step < step:
                    # Skipped batches behind the last step that was applied are not steps.
                    number += sum(r.step is None and r.batch > record.batch for r in self.records)
                break
        return self.config.batches.number(number)

    def batch(self, number: int) -> BatchPlace:
        """Find a batch by its number, 0 for the first.

        Raises:
            DataError: the number is negative.
        """
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

    Args:
        folder: of the run.
        overrides: such as `data.dir=...`, where the dataset lies elsewhere on this machine.

    Raises:
        RunFolderError: the folder is not that of a started run.
        DataError: the dataset is not the one that the run was started with.
    """
    run = RunFolder.started(folder)
    newest = read_json_lines(run.attempts)[-1]
    config = load(PretrainConfig, run.resolved, overrides).config
    index = read_index(config.data.dir)
    expected = newest.get("fingerprint", index.fingerprint)
    if expected != index.fingerprint:
        raise DataError(
            f"{index.folder} has fingerprint {index.fingerprint}, the run was started with "
            f"{expected}; give the folder of that dataset as data.dir=FOLDER"
        )
    return OpenedRun(
        folder=folder,
        config=config.train_data,
        num_steps=config.train.num_steps,
        skip_batches=config.train.skip_batches,
        index=index,
        records=read_batches(folder) if run.batches.is_file() else [],
        world_size=newest.get("world_size"),
    )


@dataclass(frozen=True)
class DocumentPlace:
    """Where a document stands in the dataset."""

    block: int
    """Position in the training split."""
    tokens: range
    """Tokens of the block."""


def find_text(run: OpenedRun, document_id: str) -> Iterator[str]:
    """Describe where a document is, with one line for each time that it is seen.

    Raises:
        DataError: the training split has no such document.
    """
    found = find(run, document_id)
    index, split, order = run.index, run.steps.split, run.steps.order
    row = int(split.rows[found.block])
    yield (
        f"document {document_id}: {len(found.tokens)} tokens, source "
        f"{index.sources[int(index.block_source[row])].name}, block {index.block_key(row)} of "
        f"{index.shards[int(index.blocks.shard[row])].file}"
    )
    plan, num_batches = run.config.batches, run.num_batches()
    stop = plan.number(num_batches).cursor
    done = run.records[-1].batch if run.records else -1
    skipped = sum(record.step is None for record in run.records)
    count = 0
    for place in order.places(found.block, found.tokens, stop):
        batch = plan.holding(place)
        record = run.record(batch.number)
        if record is not None:
            when = "a skipped step" if record.step is None else f"step {record.step}"
        elif batch.number > done:
            when = f"step {batch.number + 1 - skipped}, to come"
        else:
            when = "a step that the run did not log"
        segment = order.segment(place)
        epoch = int(segment.locate(place, 1).epochs[0])
        yield f"  batch {batch.number} ({when}), place {place - batch.cursor}, epoch {epoch}"
        count += 1
    if count:
        yield f"seen {count} times in {num_batches:,} batches"
    else:
        yield f"not seen in the {num_batches:,} batches of the run"


def find(run: OpenedRun, document_id: str) -> DocumentPlace:
    """Look a document up by its id; reads the ids of all blocks until it is found.

    Raises:
        DataError: the training split has no such document.
    """
    split = run.steps.split
    # As it stands in the block's JSON: most blocks need not be parsed.
    needle = json.dumps(document_id, ensure_ascii=False).encode()
    with ThreadPoolExecutor(_THREADS) as pool:
        metas = pool.map(lambda row: split.reader.meta_json(int(row)), split.rows)
        progress = tqdm(metas, total=len(split.rows), unit="block", desc="find", disable=None)
        try:
            for block, meta in enumerate(progress):
                if needle not in meta:
                    continue
                ids = json.loads(meta)["document_ids"]
                if document_id in ids:
                    ends = split.reader.doc_ends(int(split.rows[block]))
                    row = ids.index(document_id)
                    first = int(ends[row - 1]) if row else 0
                    return DocumentPlace(block, range(first, int(ends[row])))
        finally:
            pool.shutdown(cancel_futures=True)
    example = split.block(0).document_ids[0]
    raise DataError(
        f"no document of the training split of {run.index.folder} has the id {document_id!r}; ids "
        f"look like {example!r}"
    )


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
        places = run.steps.order.segment(record.cursor).locate(record.cursor, record.sequences)
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
            f"loss spike, {when}: up to {each.loss:.4f}, above {each.limit:.4f} in batches "
            f"{each.high_batches[0]} to {each.high_batches[-1]}; back from step {each.from_step:,} "
            f"to {each.to_step:,}, without batches {each.first_batch} to {each.last_batch}"
        )
    yield f"{len(skipped)} of {len(run.records):,} batches were skipped"
    if ledger.rewinds:
        ranges = ", ".join(
            f"{{first: {each.first_batch}, last: {each.last_batch}}}" for each in ledger.rewinds
        )
        yield f"another run leaves out the same batches with 'train.skip_batches=[{ranges}]'"


def _why_skipped(run: OpenedRun, ledger: Ledger, batch: int) -> str:
    if any(each.first_batch <= batch <= each.last_batch for each in ledger.rewinds):
        return "left out after a loss spike"
    if any(each.first <= batch <= each.last for each in run.skip_batches):
        return "left out by train.skip_batches"
    if found := ledger.non_finite.get(batch):
        ranks = ", ".join(found.ranks) or "none"
        return f"gradient norm {found.grad_norm}, ranks whose loss is not finite: {ranks}"
    return "not finite; the version that skipped it kept no ledger"
