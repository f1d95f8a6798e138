"""`prep try`: what the rules of a config would do to a sample of each source.

Documents go through the reader, normalisation and the rules as in a run, and besides every value
that a rule has a limit for is measured, also behind the rule that rejects first. Nothing is written
but the page.

The sample of a source is drawn by hash of the documents' ids, from the beginnings of up to
`_MAX_PIECES` parts spread evenly over its files, `_MAX_BYTES` of text in all: the same on every
rerun, in seconds for any corpus, and not quite the whole corpus.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import inputs
from data_prep.clean.normalise import normalise
from data_prep.config import PrepConfig, SourceConfig
from data_prep.datasheet.gather import Mask, beginning, mask_of
from data_prep.datasheet.page import OTHER, fill, percent
from data_prep.filters.rules import Chain, Check, Dropped
from data_prep.pieces import hash_share
from data_prep.readers.documents import ReadStats, read_piece
from data_prep.readers.items import Document, Rejected
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
class Tried:
    """What became of the sample of one source."""

    documents: int = 0
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason -> documents, by the first rule that fails."""
    limits: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Rule -> limit, and whether that is the lowest value that passes."""
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Rule -> measured values of the documents that reach the rules."""


def try_filters(config: PrepConfig, documents: int) -> dict[str, Any]:
    """Apply the rules to a sample of about so many documents, equally many of each source.

    Returns:
        {"sources": {name: {"documents", "kept", "rejected": {reason: documents}, "rules": {rule:
        {"limit", "is_lowest", "beyond", "quantiles": {"0.05", "0.5", "0.95"}, "histogram"}}}},
        "scales": {rule: [largest value, is logarithmic]}, "examples": {reason: [{"source", "id",
        "detail", "text"}]}}; `beyond` counts the documents that the rule alone would reject, and
        `histogram` has `BINS` counts up to the largest value.

    Raises:
        DataError: an input is unusable, or an own rule raised.
    """
    quota = -(-documents // len(config.sources))
    tried: dict[str, Tried] = {}
    examples: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    with progress("try", quota * len(config.sources), "document") as advance:
        for source in config.sources:
            of = tried[source.name] = Tried()
            chain = Chain(config.filters_of(source), source.name)
            mask = mask_of(config.filters_of(source))
            for item in sample(config, source, quota):
                reason, detail = _try(config, chain, item, of)
                if reason:
                    text = {"source": source.name, **_shown(item, mask), "detail": detail}
                    examples[reason].append(text)
                advance(1)
    scales = _scales(tried.values())
    return {
        "sources": {name: _to_json(of, scales) for name, of in tried.items()},
        "scales": scales,
        "examples": {reason: _spread(examples[reason]) for reason in sorted(examples)},
    }


def sample(config: PrepConfig, source: SourceConfig, quota: int) -> list[Document | Rejected]:
    """Draw up to `quota` documents and unreadable lines of a source, as the module says."""
    drawn = heapq.nsmallest(
        quota,
        ((hash_share(item.id, "try"), i, item) for i, item in enumerate(_first(config, source))),
    )
    return [item for _, _, item in sorted(drawn, key=lambda entry: entry[1])]


def _first(config: PrepConfig, source: SourceConfig) -> Iterator[Document | Rejected]:
    """Read the beginnings of parts that are spread over a source."""
    pieces = inputs.pieces(source, inputs.find(source).files, _PIECE_BYTES)
    count = min(len(pieces), _MAX_PIECES)
    for piece in (pieces[len(pieces) * i // count] for i in range(count)):
        left = _MAX_BYTES // count
        for item in read_piece(piece, config.clean, ReadStats(), only_head=True):
            yield item
            left -= len(item.text if isinstance(item, Document) else item.raw)
            if left < 0:
                break


def _try(config: PrepConfig, chain: Chain, item: Document | Rejected, of: Tried) -> tuple[str, str]:
    """Apply the rules to one document; return the reason to reject it, if any, and the value."""
    of.documents += 1
    if isinstance(item, Rejected):
        of.rejected[item.reason] += 1
        return item.reason, item.detail
    text = normalise(item.text, config.clean)
    if len(text) < config.clean.min_chars:
        reason = f"shorter than {config.clean.min_chars} characters"
        of.rejected[reason] += 1
        return reason, str(len(text))
    for rule, value, limit, is_lowest in measured(chain, text):
        of.limits[rule] = (limit or 0.0, is_lowest)
        of.values[rule].append(value)
    outcome = chain.apply(text, item)
    if isinstance(outcome, Dropped):
        of.rejected[outcome.reason] += 1
        return outcome.reason, outcome.detail
    of.kept += 1
    return "", ""


def measured(chain: Chain, text: str) -> Iterator[Check]:
    """Measure a normalised text by every rule that has a limit, in the order of the rules."""
    for rules in chain.sets:
        yield from rules.measure(text)


def document_text(config: PrepConfig, document_id: str) -> str:
    """Describe what every rule measures of one document, and what becomes of it.

    Raises:
        DataError: no source has a document of this id, or an own rule raised.
    """
    for source in config.sources:
        if not document_id.startswith(f"{source.name}/"):
            continue
        chain = Chain(config.filters_of(source), source.name)
        files = inputs.find(source).files
        for piece in inputs.pieces(source, files, config.piece_mb * 1_000_000):
            for item in read_piece(piece, config.clean, ReadStats(), only_head=True):
                if item.id == document_id:
                    return _one(config, chain, item)
    raise DataError(
        f"no document has the id {document_id!r}; expected SOURCE/ID, or SOURCE/FILE@OFFSET for "
        "documents without an id of their own, as `prep try CONFIG` shows them"
    )


def _one(config: PrepConfig, chain: Chain, item: Document | Rejected) -> str:
    of = Tried()
    reason, detail = _try(config, chain, item, of)
    rows = [("rule", "measured", "", "limit", "")]
    for rule, (limit, is_lowest) in of.limits.items():
        [value] = of.values[rule][-1:]
        failed = "rejects" if (value < limit if is_lowest else value > limit) else ""
        rows.append((rule, f"{value:.4g}", ">=" if is_lowest else "<=", f"{limit:g}", failed))
    became = f"rejected: {reason} {detail}".rstrip() if reason else "kept"
    return "\n".join([f"{item.id}: {became}", *(table(rows, right=[1, 3]) if rows[1:] else ())])


def _shown(item: Document | Rejected, mask: Mask) -> dict[str, str]:
    is_unread = isinstance(item, Rejected)
    raw = item.raw.decode(errors="replace") if isinstance(item, Rejected) else item.text
    return {"id": mask(item.id), "text": beginning({"raw": raw}, is_unread, mask)}


def _spread(examples: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Choose `EXAMPLES` examples of a reason, in turn from all sources that have some."""
    by_source: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for example in examples:
        by_source[example["source"]].append(example)
    turns = [
        (turn, number)
        for turn in range(EXAMPLES)
        for number, of in enumerate(by_source.values())
        if turn < len(of)
    ]
    sources = list(by_source.values())
    return [sources[number][turn] for turn, number in turns[:EXAMPLES]]


def _scales(tried: Iterable[Tried]) -> dict[str, tuple[float, bool]]:
    """Choose for every rule the largest value that is drawn, the same for all sources."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    limits: defaultdict[str, float] = defaultdict(float)
    for of in tried:
        for rule, (limit, _) in of.limits.items():
            values[rule] += of.values[rule]
            limits[rule] = max(limits[rule], limit)
    scales = {}
    for rule, of_rule in values.items():
        largest = max(float(np.quantile(of_rule, 0.995)), 1.25 * limits[rule]) or 1.0
        scales[rule] = (largest, largest > _LOGARITHMIC_FROM)
    return scales


def place(value: float, scale: Sequence[Any]) -> float:
    """Return where a value stands on its axis, from 0 to 1."""
    largest, is_logarithmic = scale
    share = math.log1p(value) / math.log1p(largest) if is_logarithmic else value / largest
    return min(1.0, share)


def _to_json(of: Tried, scales: dict[str, tuple[float, bool]]) -> dict[str, Any]:
    rules = {}
    for rule, (limit, is_lowest) in of.limits.items():
        values = of.values[rule]
        counts = [0] * BINS
        for value in values:
            counts[min(BINS - 1, int(place(value, scales[rule]) * BINS))] += 1
        quantiles = np.quantile(values, (0.05, 0.5, 0.95)).round(6).tolist()
        rules[rule] = {
            "limit": limit,
            "is_lowest": is_lowest,
            "beyond": sum(value < limit if is_lowest else value > limit for value in values),
            "quantiles": dict(zip(("0.05", "0.5", "0.95"), quantiles, strict=True)),
            "histogram": counts,
        }
    rejected = dict(of.rejected.most_common())
    return {"documents": of.documents, "kept": of.kept, "rejected": rejected, "rules": rules}


def text_of(result: dict[str, Any]) -> str:
    """Format a result for a terminal."""
    sources, scales = result["sources"], result["scales"]
    reasons = Counter[str]()
    for of in sources.values():
        reasons.update(of["rejected"])
    rows = [("rejected by", *sources)]
    rows += [
        (
            reason,
            *(percent(of["rejected"].get(reason, 0), of["documents"]) for of in sources.values()),
        )
        for reason, _ in reasons.most_common()
    ]
    rows.append(
        (
            "in all",
            *(percent(of["documents"] - of["kept"], of["documents"]) for of in sources.values()),
        )
    )
    rows.append(("documents tried", *(f"{of['documents']:,}" for of in sources.values())))
    lines = list(table(rows, right=range(1, len(rows[0]))))
    for name, of in sources.items():
        rows = [("", f"measured in {name}", "5%", "median", "95%", "limit", "rejects alone")]
        for rule, numbers in of["rules"].items():
            drawn = _drawn(numbers["histogram"], place(numbers["limit"], scales[rule]))
            sign = ">=" if numbers["is_lowest"] else "<="
            shown = [f"{value:.3g}" for value in numbers["quantiles"].values()]
            alone = percent(numbers["beyond"], sum(numbers["histogram"]))
            rows.append((drawn, rule, *shown, f"{sign} {numbers['limit']:g}", alone))
        lines += [
            "",
            *(table(rows, right=range(2, 7)) if rows[1:] else [f"{name}: nothing measured"]),
        ]
    for reason, examples in result["examples"].items():
        lines += ["", f"{reason}:"]
        lines += [f"  {each['id']} {each['detail']}\n    {each['text']}" for each in examples]
    return "\n".join(lines)


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
    names = list(result["sources"])
    reasons = Counter[str]()
    for of in result["sources"].values():
        reasons.update(of["rejected"])
    context = {
        **result,
        "colours": {name: min(i, OTHER) for i, name in enumerate(names)},
        "legend": [*names[:OTHER], *([f"{len(names) - OTHER} more"] if names[OTHER:] else [])],
        "reasons": [reason for reason, _ in reasons.most_common()],
        "config": config,
        "place": place,
        "bins": BINS,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, fill("trial.html", context).encode())
