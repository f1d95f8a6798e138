"""`python -m pipeline inspect RUN --find ID`: the steps in which a document was or will be seen."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqdm import tqdm

from pipeline.data.record import Ledger, read_ledger
from pipeline.errors import DataError
from pipeline.inspect.opened import OpenedRun

_THREADS = 16
"""More than cores: they wait for the storage."""


@dataclass(frozen=True)
class Found:
    """Where a document stands in the dataset."""

    block: int
    """Position in the training split."""
    tokens: range
    """Of the block."""


def find_text(run: OpenedRun, document_id: str) -> Iterator[str]:
    """Lines about a document: where it is, and one for each time that it is seen.

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
    yield (
        f"seen {count} times in {num_batches:,} batches"
        if count
        else (f"not seen in the {num_batches:,} batches of the run")
    )


def find(run: OpenedRun, document_id: str) -> Found:
    """Looks a document up by its id; reads the ids of all blocks until it is found."""
    split = run.steps.split
    # As it stands in the block's JSON; most blocks need not be parsed.
    needle = json.dumps(document_id, ensure_ascii=False).encode()
    with ThreadPoolExecutor(_THREADS) as pool:
        metas = pool.map(lambda row: split.reader.meta_json(int(row)), split.rows)
        progress = tqdm(metas, total=len(split.rows), unit="block", desc="find", disable=None)
        try:
            for block, meta in enumerate(progress):
                if needle in meta:
                    ids = json.loads(meta)["document_ids"]
                    if document_id in ids:
                        ends = split.reader.doc_ends(int(split.rows[block]))
                        row = ids.index(document_id)
                        return Found(block, range(int(ends[row - 1]) if row else 0, int(ends[row])))
        finally:
            pool.shutdown(cancel_futures=True)
    example = split.block(0).document_ids[0]
    raise DataError(
        f"no document of the training split of {run.index.folder} has the id {document_id!r}; ids "
        f"look like {example!r}"
    )


def skipped_text(run: OpenedRun) -> Iterator[str]:
    """Lines about the batches that were read but not trained on.

    Raises:
        DataError: the run logs no batches.
    """
    if not run.records:
        raise DataError(f"{run.folder} has logged no batches, so what was skipped is not known")
    ledger = read_ledger(run.folder)
    skipped = [record for record in run.records if record.step is None]
    for record in skipped:
        places = run.steps.order.segment(record.cursor).locate(record.cursor, record.sequences)
        samples = ", ".join(
            f"{epoch}/{sample}"
            for epoch, sample in zip(
                places.epochs.tolist(), places.sample_ids.tolist(), strict=True
            )
        )
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
        yield f"a run with 'train.skip_batches=[{ranges}]' leaves out what the spikes did"


def _why_skipped(run: OpenedRun, ledger: Ledger, batch: int) -> str:
    if any(each.first_batch <= batch <= each.last_batch for each in ledger.rewinds):
        return "left out after a loss spike"
    if any(each.first <= batch <= each.last for each in run.config.train.skip_batches):
        return "left out by train.skip_batches"
    if found := ledger.non_finite.get(batch):
        ranks = ", ".join(found.ranks) or "none"
        return f"gradient norm {found.grad_norm}, ranks whose loss is no number: {ranks}"
    return "not finite, of a version without a ledger"
