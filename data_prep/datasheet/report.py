"""What `report.json` says about a dataset: all numbers of the datasheet, whole and by source.

Bytes are UTF-8 bytes of text. Lengths are those of the documents that the last mask keeps.
"""

import datetime
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.corpus import Corpus
from data_prep.counts import Counts
from data_prep.datasheet import samples
from data_prep.datasheet.lengths import EDGES, Lengths
from data_prep.datasheet.report_sources import PIECE_STAGES, by_source
from data_prep.dedup import exact
from data_prep.stage import Done
from pipeline.config.load import provenance
from pipeline.data.format import SPLITS, DatasetIndex, read_index

REPORT_FILE = "report.json"


def make(
    corpus: Corpus, names: tuple[str, ...], masks: dict[str, Path], records: dict[str, list[Done]]
) -> dict[str, Any]:
    """Gathers everything; the index is written already. For the arguments see `by_source`."""
    made = read_index(corpus.output)
    [trained] = records["tokenizer"]
    notes = Counter[str]()
    for done in records["ingest"]:
        notes.update(done.result["notes"])
    [deduplicated] = records["dedup"]
    # Ingestion counts them within a piece, stage dedup over all pieces.
    notes[exact.REPEATED_IDS] = deduplicated.result["repeated_ids"]
    sources = by_source(corpus, names, masks, records)
    lengths = Lengths()
    for source in sources.values():
        lengths.merge(source.lengths)
    pieces = [
        (piece.source.name, corpus.work / "ingest" / f"{name}.rejected.jsonl.zst")
        for piece, name in zip(corpus.pieces, names, strict=True)
    ]
    rejected = {name: source.rejected_at_ingest() for name, source in sources.items()}
    return {
        "key": corpus.key,
        "fingerprint": made.fingerprint,
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "vocab_size": made.vocab_size,
        "tokenizer_sample_bytes": trained.result["sample_bytes"],
        "tokenizer_sample": trained.result["sample"],
        "unigram_entropy_nats": made.unigram_entropy_nats,
        "totals": made.totals,
        "num_shards": len(made.shards),
        "num_blocks": len(made.blocks),
        "shard_bytes": {split: _shard_bytes(made, split) for split in SPLITS},
        "stages": {name: counts.to_json() for name, counts in _stages(masks, records).items()},
        "notes": {name: count for name, count in notes.items() if count},
        "repeated_ids": deduplicated.result["examples"],
        "decontaminate": {
            name: value
            for done in records.get("decontaminate", [])
            for name, value in done.result.items()
            if name in ("sets", "items", "ignored_ngrams")
        },
        "sources": {name: source.to_json() for name, source in sources.items()},
        "length_edges": EDGES,
        "lengths": lengths.to_json(),
        "tokenizer_report": json.loads(_tokenizer_report(corpus).read_bytes()),
        "rejected_samples": samples.collect(corpus.config, pieces, records["ingest"], rejected),
        "settings": asdict(corpus.config),
        "provenance": provenance(),
    }


def _tokenizer_report(corpus: Corpus) -> Path:
    return corpus.work / "tokenizer" / "tokenizer.report.json"


def _stages(masks: dict[str, Path], records: dict[str, list[Done]]) -> dict[str, Counts]:
    """Counts of all stages that take or leave text, in order."""
    groups = [(stage, names) for stage, names in PIECE_STAGES.items() if stage in records]
    groups += [(stage, (stage,)) for stage in (*masks, "shards")]
    return {
        name: Counts.total(done.result[name] for done in records[stage])
        for stage, names in groups
        for name in names
    }


def _shard_bytes(made: DatasetIndex, split: str) -> dict[str, int]:
    sizes = [shard.num_bytes for shard in made.shards if shard.split == split]
    return {
        "shards": len(sizes),
        "blocks": len(made.split_blocks(split)),
        "total": sum(sizes),
        "smallest": min(sizes),
        "largest": max(sizes),
    }
