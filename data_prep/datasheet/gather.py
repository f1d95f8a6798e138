"""Gathers `report.json`: all numbers of the datasheet, for the whole dataset and by source.

Bytes are UTF-8 bytes of text. Lengths are those of the documents that the last mask keeps.

Beginnings of rejected texts show people the effect of a rule. They come from the first pieces that
have them, so they are the same on every rerun. The number of pieces and bytes to read is limited,
so that it takes seconds for any corpus; a rare reason may have no sample.
"""

import base64
import datetime
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean.normalise import normalise
from data_prep.config import FiltersConfig, PrepConfig, SourceConfig
from data_prep.corpus import Progress
from data_prep.filters.mask import Masker
from data_prep.ingest import merged, shown
from data_prep.pieces import read_documents, read_lines
from data_prep.readers.encodings import storable
from data_prep.stage import INGEST_STAGES, REPEATED_IDS, Done, StageCounts
from pipeline.config.load import provenance
from pipeline.data.format import SPLITS, DatasetIndex, read_index

REPORT_FILE = "report.json"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EDGES = sorted({math.ceil(10 ** (tenth / 10)) for tenth in range(111)})
"""Edges of the histogram's bins in bytes, ten a decade up to 100 GB; a bin holds its lower edge."""
_PIECE_STAGES = {"ingest": INGEST_STAGES, "lines": ("lines",)}
"""Stages that write the text of every piece, and the names under which they count."""
_TOTALS = ["tokens", "documents", "text_bytes", "characters", "unknown", "byte_pieces", "blocks"]

Mask = Callable[[str], str]

SAMPLES = 3
"""Number for one reason, from different sources if there are enough."""
SAMPLE_CHARS = 200
_MAX_PIECES = 8  # of a source
_MAX_BYTES = 8_000_000  # of a piece
_MAX_PAIRS = 24
_WINDOW_CHARS = 4000
# Personal data that the end of the window cuts through is not recognised; the longest number or
# local part of an address is shorter than this.
_UNSURE_CHARS = 256
_ESCAPED = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|([nrtbf])|([\"/\\]))")


def gather(progress: Progress) -> dict[str, Any]:
    """Gather the report; the index must be written."""
    corpus, records = progress.corpus, progress.results
    index = read_index(corpus.output)
    [trained], [deduplicated] = records["tokenizer"], records["dedup"]
    notes = _sum(done.result["notes"] for done in records["ingest"])
    # Ingestion counts them within a piece, stage dedup over all pieces.
    notes[REPEATED_IDS] = deduplicated.result["repeated_ids"]
    notes["files and folders that cannot be read"] = len(corpus.unreadable)
    reasons = {stage: _reason(stage, records[stage]) for stage in progress.masks}
    lengths = {source.name: Counter[int]() for source in corpus.config.sources}
    sources = {name: _source(progress, name, reasons, of) for name, of in lengths.items()}
    rejected = {
        name: {k: v for stage in INGEST_STAGES for k, v in of["stages"][stage]["rejected"].items()}
        for name, of in sources.items()
    }
    files = [
        (piece.source.name, corpus.work / "ingest" / f"{name}.rejected.jsonl.zst")
        for piece, name in zip(corpus.pieces, progress.pieces.names, strict=True)
    ]
    tokenizer_report = corpus.work / "tokenizer" / "tokenizer.report.json"
    return {
        "key": corpus.key,
        "fingerprint": index.fingerprint,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "vocab_size": index.vocab_size,
        "tokenizer_sample_bytes": trained.result["sample_bytes"],
        "tokenizer_sample": trained.result["sample"],
        "unigram_entropy_nats": index.unigram_entropy_nats,
        "totals": index.totals,
        "num_shards": len(index.shards),
        "num_blocks": len(index.blocks),
        "shard_bytes": {split: _shard_bytes(index, split) for split in SPLITS},
        "stages": {name: counts.to_json() for name, counts in _stages(progress).items()},
        "notes": {name: count for name, count in notes.items() if count},
        "repeated_ids": deduplicated.result["examples"],
        "decontaminate": {
            name: value
            for done in records.get("decontaminate", [])
            for name, value in done.result.items()
            if name in ("sets", "items", "ignored_ngrams")
        },
        "sources": sources,
        "length_edges": EDGES,
        "lengths": distribution(sum(lengths.values(), Counter())),
        "tokenizer_report": json.loads(tokenizer_report.read_bytes()),
        "rejected_samples": collect(corpus.config, files, records["ingest"], rejected),
        "near_pairs": near_pairs(progress),
        "settings": asdict(corpus.config),
        "provenance": provenance(),
    }


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for part in counts:
        total.update(part)
    return total


def _stages(progress: Progress) -> dict[str, StageCounts]:
    """Count documents and bytes of all stages that take or drop text, in order."""
    records = progress.results
    groups = [(stage, names) for stage, names in _PIECE_STAGES.items() if stage in records]
    groups += [(stage, (stage,)) for stage in (*progress.masks, "shards")]
    return {
        name: StageCounts.total(done.result[name] for done in records[stage])
        for stage, names in groups
        for name in names
    }


def _shard_bytes(index: DatasetIndex, split: str) -> dict[str, int]:
    sizes = [shard.num_bytes for shard in index.shards if shard.split == split]
    return {
        "shards": len(sizes),
        "blocks": len(index.split_blocks(split)),
        "total": sum(sizes),
        "smallest": min(sizes),
        "largest": max(sizes),
    }


def _source(
    progress: Progress, name: str, reasons: Mapping[str, str], lengths: Counter[int]
) -> dict[str, Any]:
    """Report on one source, and count the lengths in bytes of the documents that are left of it.

    `reasons`: those for which masks drop documents, by stage.
    """
    corpus, records = progress.corpus, progress.results
    own = [i for i, piece in enumerate(corpus.pieces) if piece.source.name == name]
    ingested = [records["ingest"][i].result for i in own]
    files = [file for i in own for file in corpus.pieces[i].files]
    totals = {
        split: _sum(done.result["sources"][split].get(name, {}) for done in records["shards"])
        for split in SPLITS
    }
    whole = _sum(totals.values())
    stages = {
        each: StageCounts.total(records[stage][i].result[each] for i in own)
        for stage, names in _PIECE_STAGES.items()
        if stage in records
        for each in names
    }
    stages |= _masked(progress, own, reasons, lengths)
    stages["shards"] = _sharded(list(stages.values())[-1], whole)
    return {
        "files": len({file.path for file in files}),
        "file_bytes": sum(file.range_bytes for file in files),
        "stages": {stage: counts.to_json() for stage, counts in stages.items()},
        "scripts": dict(sorted(_sum(result["scripts"] for result in ingested).items())),
        "metadata": {
            field: {"documents": counts.documents, "values": shown(counts)}
            for field, counts in merged(result["metadata"] for result in ingested).items()
        },
        "notes": {k: count for k, count in _sum(r["notes"] for r in ingested).items() if count},
        "lengths": distribution(lengths),
        **{key: whole[key] for key in _TOTALS},
        "unknown_share": round(whole["unknown"] / max(1, whole["tokens"]), 6),
        "byte_piece_share": round(whole["byte_pieces"] / max(1, whole["tokens"]), 6),
        "totals": {split: {key: of[key] for key in _TOTALS} for split, of in totals.items()},
    }


def _masked(
    progress: Progress, own: list[int], reasons: Mapping[str, str], lengths: Counter[int]
) -> dict[str, StageCounts]:
    """Count by stage what masks drop of some pieces, and the lengths of what is left."""
    pieces = progress.pieces
    stages = {stage: StageCounts() for stage in progress.masks}
    for name in (pieces.names[i] for i in own):
        sizes = pieces.sizes(name)
        left = np.ones(len(sizes), dtype=bool)
        for stage, folder in progress.masks.items():
            kept = np.load(folder / f"{name}.keep.npy")
            stages[stage].mask(sizes[left], kept[left], reasons[stage])
            left = kept
        lengths.update(sizes[left].tolist())
    return stages


def _sharded(before: StageCounts, whole: Counter[str]) -> StageCounts:
    """Count for stage shards what came from the stage `before`, and what the shards hold."""
    counts = StageCounts(
        before.documents_out, before.bytes_out, whole["documents"], whole["text_bytes"]
    )
    if lost := counts.documents_in - counts.documents_out:
        counts.reject("no tokens", counts.bytes_in - counts.bytes_out, lost)
    return counts


def _reason(stage: str, done: list[Done]) -> str:
    """Return the reason for which a mask drops documents, or its name if there are several."""
    reasons = {reason for record in done for reason in record.result[stage]["rejected"]}
    return reasons.pop() if len(reasons) == 1 else stage


def distribution(lengths: Mapping[int, int]) -> dict[str, Any]:
    """Return the histogram over `EDGES`, and quantiles, which are lengths of documents.

    At least a share q of the documents is no longer than the quantile q. `half_of_text`: half of
    the bytes are in documents of at least this length. `lengths`: bytes -> number of documents.
    """
    if not lengths:
        return {"histogram": [0] * (len(EDGES) - 1), "quantiles": {}}
    values, counts = np.array(sorted(lengths.items()), dtype=np.int64).T
    histogram = np.histogram(values, EDGES, weights=counts)[0].astype(np.int64)
    up_to, text = np.cumsum(counts), np.cumsum((values * counts)[::-1])
    quantiles = {"min": int(values[0])}
    for q in QUANTILES:
        quantiles[str(q)] = int(values[np.searchsorted(up_to, math.ceil(q * int(up_to[-1])))])
    quantiles["max"] = int(values[-1])
    quantiles["half_of_text"] = int(values[::-1][np.searchsorted(text, int(text[-1]) / 2)])
    return {"histogram": histogram.tolist(), "quantiles": quantiles}


def collect(
    config: PrepConfig,
    pieces: Sequence[tuple[str, Path]],
    ingested: Sequence[Done],
    rejected: dict[str, dict[str, list[int]]],
) -> dict[str, list[dict[str, str]]]:
    """Collect samples of every reason: reason -> up to `SAMPLES` of {"source", "id", "text"}.

    Args:
        config: settings of masking.
        pieces: source and `.rejected.jsonl.zst` of every piece.
        ingested: records of stage ingest, one per piece.
        rejected: source -> reason -> [documents, bytes] of ingestion and filters.
    """
    maskers = {source.name: mask_of(config.filters_of(source)) for source in config.sources}
    samples: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    wanted = _wanted(rejected)
    num_read = Counter[str]()
    for (source, path), done in zip(pieces, ingested, strict=True):
        reasons = {reason for stage in INGEST_STAGES for reason in done.result[stage]["rejected"]}
        here = reasons & wanted[source].keys()
        if not here or num_read[source] == _MAX_PIECES:
            continue
        num_read[source] += 1
        mask = maskers[source]
        for record in _records(path):
            reason = record["reason"]
            if reason not in wanted[source]:
                continue
            text = beginning(record, reason in done.result["ingest"]["rejected"], mask)
            samples[reason].append({"source": source, "id": mask(record["id"]), "text": text})
            wanted[source][reason] -= 1
            wanted[source] += Counter()  # drops reasons that are complete
            if not here & wanted[source].keys():
                break
    return dict(sorted(samples.items()))


def near_pairs(progress: Progress) -> list[dict[str, Any]]:
    """Collect near duplicates that were dropped at the lowest similarity, `SAMPLES` of a source.

    Returns:
        {"source", "jaccard", "threshold", "dropped", "kept"}; the last two are {"id", "text"}, a
        document's text from where they begin to differ.
    """
    if "near" not in progress.results:
        return []
    [done] = progress.results["near"]
    pieces, config = progress.pieces, progress.corpus.config
    left = Counter({source.name: SAMPLES for source in config.sources})
    chosen: list[tuple[int, int, float, SourceConfig]] = []
    for document, kept, jaccard in sorted(done.result["at_limit"], key=lambda pair: pair[2]):
        [(piece, _)] = pieces.split(np.array([document]))
        source = progress.corpus.pieces[piece].source
        if left[source.name] and len(chosen) < _MAX_PAIRS:
            left[source.name] -= 1
            chosen.append((document, kept, jaccard, source))
    records: dict[int, dict[str, Any]] = {}
    for piece, numbers in pieces.split(np.unique([pair[:2] for pair in chosen]).astype(np.int64)):
        rows = set((numbers - pieces.starts[piece]).tolist())
        found = read_documents(pieces.documents_path(pieces.names[piece]), rows)
        records.update(zip(numbers.tolist(), found, strict=True))
    return [
        {
            "source": source.name,
            "jaccard": jaccard,
            "threshold": config.near_threshold_of(source),
            **side_by_side(records[document], records[kept], mask_of(config.filters_of(source))),
        }
        for document, kept, jaccard, source in chosen
    ]


def side_by_side(
    dropped: Mapping[str, Any], kept: Mapping[str, Any], mask: Mask
) -> dict[str, dict[str, str]]:
    """Return id and text of two similar documents, from the line where they begin to differ."""
    texts = [dropped["text"], kept["text"]]
    equal = (one == other for one, other in zip(*texts, strict=False))
    same = next((i for i, is_equal in enumerate(equal) if not is_equal), min(map(len, texts)))
    start = texts[0].rfind("\n", 0, same) + 1
    shown_texts = [beginning({"raw": text[start:]}, False, mask) for text in texts]
    return {
        name: {"id": mask(record["id"]), "text": text}
        for name, record, text in zip(
            ("dropped", "kept"), (dropped, kept), shown_texts, strict=True
        )
    }


def _wanted(rejected: dict[str, dict[str, list[int]]]) -> dict[str, Counter[str]]:
    """Divide the samples of each reason among the sources that lose most text for it."""
    sources_of: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for source, reasons in rejected.items():
        for reason, (_, num_bytes) in reasons.items():
            sources_of[reason].append((num_bytes, source))
    wanted = {source: Counter[str]() for source in rejected}
    for reason, sizes in sources_of.items():
        largest = [source for _, source in sorted(sizes, key=lambda size: (-size[0], size[1]))]
        for number in range(SAMPLES):
            source = largest[number % min(len(largest), SAMPLES)]
            wanted[source][reason] += 1
    return wanted


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Read rejected documents from the beginning of a file."""
    left = _MAX_BYTES
    for record in read_lines(path):
        yield record
        left -= len(record.get("raw", "")) + len(record.get("raw_base64", ""))
        if left < 0:
            return


def mask_of(sets: Sequence[FiltersConfig]) -> Mask:
    """Return the function that masks personal data as the rules of a source say."""
    maskers = [Masker(rules.mask) for rules in sets if rules.mask.enabled]

    def mask(text: str) -> str:
        for masker in maskers:
            text = masker(text)[0]
        return text

    return mask


def beginning(record: dict[str, Any], is_unread: bool, mask: Mask) -> str:
    """Return the beginning of a rejected document as a page may show it, without personal data.

    The raw text of one that `is_unread` may be a line of JSON.
    """
    raw = record.get("raw")
    if raw is None:
        raw = base64.b64decode(record["raw_base64"]).decode(errors="replace")
    text = raw[:_WINDOW_CHARS]
    if is_unread:
        # In `tel:\n13812345678` as JSON writes it, the n would hide the beginning of a number.
        text = _ESCAPED.sub(_unescaped, text)
    text = mask(normalise(storable(text)))
    # Spaces replace the line breaks within numbers, so the mask finds more of them now.
    text = mask(" ".join(text.split()))
    if len(raw) > _WINDOW_CHARS:
        text = text[:-_UNSURE_CHARS]
    return text if len(text) <= SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]}…"


def _unescaped(match: re.Match[str]) -> str:
    code, space, char = match.groups()
    return chr(int(code, 16)) if code else " " if space else str(char)
