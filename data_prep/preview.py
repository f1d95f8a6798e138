"""`prep try`: what the rules of a config would do to a sample of each source.

Documents go through the reader, normalisation and the rules as in a run, and besides every value
that a rule has a limit for is measured, also behind the rule that rejects first. Where near
duplicates are dropped, those of the sample whose similarity is near the limit are shown in pairs.
Nothing is written but the page.

The sample of a source is drawn by hash of the documents' ids, from the beginnings of up to
`_MAX_PIECES` parts spread evenly over its files, `_MAX_BYTES` of text in all: the same on every
rerun, in seconds for any corpus, and not quite the whole corpus.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import inputs
from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig, PrepConfig, SourceConfig
from data_prep.datasheet.gather import beginning, mask_of, side_by_side
from data_prep.datasheet.page import colours, fill, percent
from data_prep.dedup.minhash import agreements, signatures, similarity
from data_prep.dedup.near import bucket_pairs, settings_of
from data_prep.documents import ReadStats, read_piece
from data_prep.filters.rules import Chain, Dropped
from data_prep.pieces import hash_share
from data_prep.types import Document, Rejected
from pipeline.errors import DataError
from pipeline.runtime.files import write_atomic
from pipeline.runtime.summary import progress, table

EXAMPLES = 10
"""Documents shown for a reason, of all sources together."""
BINS = 40
"""Bins of a distribution; the last one also holds all larger values."""
_MAX_PIECES = 32
_MAX_BYTES = 128_000_000
_PIECE_BYTES = 4_000_000
_LOGARITHMIC_FROM = 50.0  # numbers of words and characters, in contrast to shares
_BLOCKS = " ▁▂▃▄▅▆▇█"
_TEXT_BINS = 20


@dataclass
class Measured:
    """What a rule measured of the documents of one source that reach the rules."""

    limit: float
    is_lowest: bool
    """Whether the limit is the lowest value that passes."""
    values: list[float] = field(default_factory=list)

    def beyond(self) -> int:
        """Count the values that the rule rejects."""
        sign = -1 if self.is_lowest else 1
        return sum(sign * value > sign * self.limit for value in self.values)


@dataclass
class Tried:
    """What became of the sample of one source."""

    documents: int = 0
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason -> documents, by the first rule that fails."""
    rules: dict[str, Measured] = field(default_factory=dict)


def try_filters(config: PrepConfig, documents: int) -> dict[str, Any]:
    """Apply the rules to a sample of about so many documents, equally many of each source.

    Returns:
        {"sources": {name: {"documents", "kept", "rejected": {reason: documents}, "rules": {rule:
        {"limit", "is_lowest", "beyond", "quantiles": {"0.05", "0.5", "0.95"}, "histogram"}}}},
        "scales": {rule: [largest value, is logarithmic]}, "examples": {reason: [{"source", "id",
        "detail", "text"}]}, "near": see `_near_pairs`}; `beyond` counts the documents that the rule
        alone would reject, and `histogram` has `BINS` counts up to the largest value.

    Raises:
        DataError: an input is unusable, or an own rule raised.
    """
    quota = -(-documents // len(config.sources))
    tried: dict[str, Tried] = {}
    examples: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    kept: list[dict[str, Any]] = []
    with progress("try", quota * len(config.sources), "document") as advance:
        for source in config.sources:
            of = tried[source.name] = Tried()
            chain = Chain(config.filters_of(source), source.name)
            mask = mask_of(config.filters_of(source))
            for item in sample(config, source, quota):
                reason, detail = _try(config.clean_of(source), chain, item, of.rules)
                of.documents += 1
                of.kept += not reason
                if reason:
                    of.rejected[reason] += 1
                    is_unread = isinstance(item, Rejected)
                    raw = (
                        item.text
                        if isinstance(item, Document)
                        else item.raw.decode(errors="replace")
                    )
                    shown = {"id": mask(item.id), "text": beginning({"raw": raw}, is_unread, mask)}
                    examples[reason].append({"source": source.name, **shown, "detail": detail})
                elif config.dedup.near_duplicates and isinstance(item, Document):
                    text = normalise(item.text, config.clean_of(source))
                    kept.append({"source": source, "id": item.id, "text": text})
                advance(1)
    scales = _scales(tried.values())
    return {
        "sources": {name: _to_json(of, scales) for name, of in tried.items()},
        "scales": scales,
        "examples": {reason: _spread(examples[reason]) for reason in sorted(examples)},
        "near": _near_pairs(config, kept),
    }


def _near_pairs(config: PrepConfig, documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the documents of the sample with one another.

    Returns:
        Up to `EXAMPLES` pairs, those nearest to the limit first: {"source", "jaccard", "threshold",
        "dropped", "kept"} as in the datasheet; one below the threshold would stay.
    """
    if not documents:
        return []
    settings = settings_of(config.dedup)
    parts = [signatures([document["text"]], settings) for document in documents]
    bands = np.concatenate([part.bands for part in parts])
    sketches = np.concatenate([part.sketch for part in parts])
    signed = np.flatnonzero(bands[:, 0]).astype(np.uint32)
    of_bands = [bucket_pairs(bands[signed, band], signed) for band in range(bands.shape[1])]
    pairs = np.unique(np.concatenate(of_bands))
    halves = pairs >> np.uint64(32), pairs & np.uint64(2**32 - 1)
    later, earlier = (half.astype(int) for half in halves)
    jaccard = similarity(agreements(sketches[later], sketches[earlier]))
    thresholds = [config.near_threshold_of(document["source"]) for document in documents]
    limits = np.array(thresholds)[later]
    nearest = np.argsort(abs(jaccard - limits), kind="stable")
    shown = []
    for i in [i for i in nearest.tolist() if jaccard[i] < 1][:EXAMPLES]:
        dropped, kept = documents[later[i]], documents[earlier[i]]
        numbers = {"jaccard": round(float(jaccard[i]), 3), "threshold": float(limits[i])}
        texts = side_by_side(dropped, kept, mask_of(config.filters_of(dropped["source"])))
        shown.append({"source": dropped["source"].name, **numbers, **texts})
    return shown


def sample(config: PrepConfig, source: SourceConfig, quota: int) -> list[Document | Rejected]:
    """Draw up to `quota` documents and unreadable lines of a source, as the module says."""
    items = enumerate(_first(config, source))
    drawn = heapq.nsmallest(quota, ((hash_share(item.id, "try"), i, item) for i, item in items))
    return [item for _, _, item in sorted(drawn, key=lambda entry: entry[1])]


def _first(config: PrepConfig, source: SourceConfig) -> Iterator[Document | Rejected]:
    """Read the beginnings of parts that are spread over a source."""
    pieces = inputs.pieces(source, inputs.find(source).files, _PIECE_BYTES)
    count = min(len(pieces), _MAX_PIECES)
    for piece in (pieces[len(pieces) * i // count] for i in range(count)):
        left = _MAX_BYTES // count
        for item in read_piece(piece, config.clean_of(source), ReadStats(), only_head=True):
            yield item
            left -= len(item.text if isinstance(item, Document) else item.raw)
            if left < 0:
                break


def _try(
    clean: CleanConfig, chain: Chain, item: Document | Rejected, measured: dict[str, Measured]
) -> tuple[str, str]:
    """Apply the rules to one document; return the reason to reject it, if any, and the value.

    What each rule measures is added to `measured`.
    """
    if isinstance(item, Rejected):
        return item.reason, item.detail
    text = normalise(item.text, clean)
    if len(text) < clean.min_chars:
        return f"shorter than {clean.min_chars} characters", str(len(text))
    for rule, value, limit, is_lowest in (c for rules in chain.sets for c in rules.measure(text)):
        measured.setdefault(rule, Measured(limit or 0.0, is_lowest)).values.append(value)
    outcome = chain.apply(text, item)
    return (outcome.reason, outcome.detail) if isinstance(outcome, Dropped) else ("", "")


def document_text(config: PrepConfig, document_id: str) -> str:
    """Describe what every rule measures of one document, and what becomes of it.

    Raises:
        DataError: no source has a document of this id, or an own rule raised.
    """
    for source in config.sources:
        if not document_id.startswith(f"{source.name}/"):
            continue
        chain, clean = Chain(config.filters_of(source), source.name), config.clean_of(source)
        files = inputs.find(source).files
        for piece in inputs.pieces(
            source, files, inputs.piece_mb(files, config.piece_mb) * 1_000_000
        ):
            for item in read_piece(piece, clean, ReadStats(), only_head=True):
                if item.id == document_id:
                    return _one(clean, chain, item)
    raise DataError(
        f"no document has the id {document_id!r}; expected SOURCE/ID, or SOURCE/FILE@OFFSET for "
        "documents without an id of their own, as `prep try CONFIG` shows them"
    )


def _one(clean: CleanConfig, chain: Chain, item: Document | Rejected) -> str:
    rules: dict[str, Measured] = {}
    reason, detail = _try(clean, chain, item, rules)
    rows = [("rule", "measured", "", "limit", "")]
    for rule, measured in rules.items():
        sign, failed = ">=" if measured.is_lowest else "<=", "rejects" if measured.beyond() else ""
        rows.append((rule, f"{measured.values[-1]:.4g}", sign, f"{measured.limit:g}", failed))
    became = f"rejected: {reason} {detail}".rstrip() if reason else "kept"
    return "\n".join([f"{item.id}: {became}", *(table(rows, right=[1, 3]) if rows[1:] else ())])


def _spread(examples: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Choose `EXAMPLES` examples of a reason, in turn from all sources that have some."""
    by_source: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for example in examples:
        by_source[example["source"]].append(example)
    turns = zip_longest(*by_source.values())
    return [example for turn in turns for example in turn if example][:EXAMPLES]


def _scales(tried: Iterable[Tried]) -> dict[str, tuple[float, bool]]:
    """Choose for every rule the largest value that is drawn, the same for all sources."""
    rules: defaultdict[str, list[Measured]] = defaultdict(list)
    for of in tried:
        for rule, measured in of.rules.items():
            rules[rule].append(measured)
    scales = {}
    for rule, parts in rules.items():
        most = float(np.quantile([value for part in parts for value in part.values], 0.995))
        largest = max(most, *(1.25 * part.limit for part in parts)) or 1.0
        scales[rule] = (largest, largest > _LOGARITHMIC_FROM)
    return scales


def place(value: float, scale: Sequence[Any]) -> float:
    """Return where a value stands on its axis, from 0 to 1."""
    largest, is_logarithmic = scale
    share = math.log1p(value) / math.log1p(largest) if is_logarithmic else value / largest
    return min(1.0, share)


def _to_json(of: Tried, scales: dict[str, tuple[float, bool]]) -> dict[str, Any]:
    rules = {}
    for rule, measured in of.rules.items():
        places = (int(place(value, scales[rule]) * BINS) for value in measured.values)
        counts = Counter(min(BINS - 1, bin_) for bin_ in places)
        quantiles = np.quantile(measured.values, (0.05, 0.5, 0.95)).round(6).tolist()
        rules[rule] = {
            "limit": measured.limit,
            "is_lowest": measured.is_lowest,
            "beyond": measured.beyond(),
            "quantiles": dict(zip(("0.05", "0.5", "0.95"), quantiles, strict=True)),
            "histogram": [counts[i] for i in range(BINS)],
        }
    rejected = dict(of.rejected.most_common())
    return {"documents": of.documents, "kept": of.kept, "rejected": rejected, "rules": rules}


def _reasons(result: dict[str, Any]) -> list[str]:
    """List the reasons of all sources, the most frequent first."""
    counts = sum((Counter(of["rejected"]) for of in result["sources"].values()), Counter[str]())
    return [reason for reason, _ in counts.most_common()]


def text_of(result: dict[str, Any]) -> str:
    """Format a result for a terminal."""
    every = result["sources"].values()
    rows = [
        ("rejected by", *result["sources"]),
        *(
            (reason, *(percent(of["rejected"].get(reason, 0), of["documents"]) for of in every))
            for reason in _reasons(result)
        ),
        ("in all", *(percent(of["documents"] - of["kept"], of["documents"]) for of in every)),
        ("documents tried", *(f"{of['documents']:,}" for of in every)),
    ]
    lines = list(table(rows, right=range(1, len(rows[0]))))
    for name, of in result["sources"].items():
        lines += ["", *_measured_text(name, of["rules"], result["scales"])]
    for reason, examples in result["examples"].items():
        lines += ["", f"{reason}:"]
        lines += [f"  {each['id']} {each['detail']}\n    {each['text']}" for each in examples]
    if result["near"]:
        lines += ["", "near duplicates at the limit, from where they differ:"]
    for pair in result["near"]:
        fate = f"{'goes' if pair['jaccard'] >= pair['threshold'] else 'stays'}"
        fate += f", limit {pair['threshold']:g}"
        lines.append(f"  similarity {pair['jaccard']:.2f}, the first one {fate}")
        sides = (pair["dropped"], pair["kept"])
        lines += [f"    {side['id']}: {side['text']}" for side in sides]
    return "\n".join(lines)


def _measured_text(name: str, rules: dict[str, Any], scales: dict[str, Any]) -> Iterable[str]:
    rows: list[tuple[str, ...]] = [
        ("", f"measured in {name}", "5%", "median", "95%", "limit", "rejects alone")
    ]
    for rule, numbers in rules.items():
        drawn = _drawn(numbers["histogram"], place(numbers["limit"], scales[rule]))
        limit = f"{'>=' if numbers['is_lowest'] else '<='} {numbers['limit']:g}"
        shown = [f"{value:.3g}" for value in numbers["quantiles"].values()]
        alone = percent(numbers["beyond"], sum(numbers["histogram"]))
        rows.append((drawn, rule, *shown, limit, alone))
    return table(rows, right=range(2, 7)) if rows[1:] else [f"{name}: nothing measured"]


def _drawn(counts: Sequence[int], limit: float) -> str:
    """Draw a histogram in one line, with the limit as a bar between two columns."""
    step = len(counts) // _TEXT_BINS
    merged = [sum(counts[i : i + step]) for i in range(0, len(counts), step)]
    peak = max([1, *merged])
    columns = [_BLOCKS[math.ceil(8 * number / peak)] for number in merged]
    columns.insert(round(limit * len(columns)), "│")
    return "".join(columns)


def write_page(config: PrepConfig, result: dict[str, Any], path: Path) -> None:
    """Write the page about a result: one file without scripts and without links to a network."""
    context = {
        **result,
        **colours(list(result["sources"])),
        "reasons": _reasons(result),
        "config": config,
        "place": place,
        "bins": BINS,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, fill("trial.html", context).encode())
