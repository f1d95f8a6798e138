"""Sections of the datasheet about what is in the dataset."""

from itertools import pairwise
from typing import Any

from data_prep.datasheet.cells import Sources, number, ratio, share, size
from data_prep.datasheet.charts import OTHER, count, escape, histogram, short, sparkline
from data_prep.datasheet.page import Cell, Details, Figure, Section, Table, Text

_MEANINGS = {
    "input": "what the files hold",
    "ingest": "could be read",
    "normalise": "NFKC, spaces, length",
    "filter": "rules of the config",
    "lines": "repeated lines",
    "dedup": "exact duplicates",
    "near": "near duplicates",
    "decontaminate": "benchmark texts",
    "shards": "tokenised",
}
_QUANTILES = {"min": "Shortest", "0.05": "5%", "0.25": "25%", "0.5": "Median", "0.75": "75%",
              "0.95": "95%", "max": "Longest", "half_of_text": "Half of the text"}  # fmt: skip


def funnel(sources: Sources) -> Section:
    """Documents and bytes from stage to stage."""
    stages = sources.stages
    first = next(iter(stages))
    whole = {"documents": stages[first]["documents_in"], "bytes": stages[first]["bytes_in"]}
    rows = [_funnel_row(sources, first, "in", whole, [Cell("", is_number=True)] * 2)]
    for name, counts in stages.items():
        dropped = number(counts["documents_in"] - counts["documents_out"])
        lost = size(counts["bytes_in"] - counts["bytes_out"])
        rows.append(_funnel_row(sources, name, "out", whole, [dropped, lost]))
    head = ("After stage", "", "Documents", "Dropped", "", "Text", "Lost", "Left")
    note = (
        "Text is counted in bytes of UTF-8. It changes without a document being dropped where it "
        "is normalised, loses lines or is masked."
    )
    return Section("From input to shards", [*sources.legend(), Table(head, rows), Text(note)])


def _funnel_row(
    sources: Sources, stage: str, end: str, whole: dict[str, int], losses: list[Cell]
) -> list[Cell]:
    documents, text = (
        {name: source["stages"][stage][f"{key}_{end}"] for name, source in sources.of.items()}
        for key in ("documents", "bytes")
    )
    name = stage if end == "out" else "input"
    meaning = _MEANINGS.get(name, "")
    counts = sources.stages[stage]
    return [
        Cell(name, html=f"<b>{escape(name)}</b><small>{escape(meaning)}</small>"),
        sources.bar(documents, whole["documents"], "documents"),
        number(counts[f"documents_{end}"]),
        losses[0],
        sources.bar(text, whole["bytes"], "B"),
        size(counts[f"bytes_{end}"]),
        losses[1],
        share(counts[f"bytes_{end}"], whole["bytes"]),
    ]


def table(sources: Sources) -> Section:
    """One row a source."""
    totals = {
        name: {**source, "bytes_in": source["stages"]["ingest"]["bytes_in"]}
        for name, source in sources.of.items()
    }
    keys = ("documents", "text_bytes", "tokens", "characters", "bytes_in")
    whole = {key: sum(total[key] for total in totals.values()) for key in keys}
    weights = {source["name"]: source["weight"] for source in sources.report["settings"]["sources"]}
    is_weighted = any(weight != 1 for weight in weights.values())
    rows = []
    for name, total in totals.items():
        weight = [Cell(f"{weights[name]:g}", is_number=True)] if is_weighted else []
        row = _source_row(sources, total, whole, {name: total["tokens"]})
        rows.append([sources.name(name), *weight, *row])
    if len(rows) > 1:
        tokens = {name: total["tokens"] for name, total in totals.items()}
        row = _source_row(sources, whole, whole, tokens)
        rows.append([Cell("all"), *([Cell("")] if is_weighted else []), *row])
    head = [
        "Source", *(["Weight"] if is_weighted else []), "Documents", "Text", "Tokens",
        "Of all tokens", "", "Bytes a token", "Characters a token", "Left of its input",
    ]  # fmt: skip
    note = Text("The weight says how often training reads a source; sizes are unweighted.")
    all_rows = Table(head, rows, has_total=len(rows) > 1)
    return Section("Sources", [all_rows, note] if is_weighted else [all_rows])


def _source_row(
    sources: Sources, total: dict[str, int], whole: dict[str, int], tokens: dict[str, int]
) -> list[Cell]:
    return [
        number(total["documents"]),
        size(total["text_bytes"]),
        number(total["tokens"]),
        share(total["tokens"], whole["tokens"]),
        sources.bar(tokens, whole["tokens"], "tokens"),
        ratio(total["text_bytes"], total["tokens"]),
        ratio(total["characters"], total["tokens"]),
        share(total["text_bytes"], total["bytes_in"]),
    ]


def scripts(sources: Sources) -> Section:
    """Documents by script."""
    kinds = sorted({kind for source in sources.of.values() for kind in source["scripts"]})
    rows = []
    for name, source in sources.of.items():
        documents = sum(source["scripts"].values())
        cells = [share(source["scripts"].get(kind, 0), documents) for kind in kinds]
        rows.append([sources.name(name), number(documents), *cells])
    note = (
        "Share of the documents that pass the filters, before deduplication, by the script of at "
        "least 70% of a document's letters."
    )
    return Section("Scripts", [Table(("Source", "Documents", *kinds), rows), Text(note)])


def lengths(sources: Sources) -> Section:
    """How long the documents are that go to the shards."""
    edges, low, high = _used_bins(sources.report)
    counts = {n: source["lengths"]["histogram"][low:high] for n, source in sources.of.items()}
    series = [counts[name] for name in sources.names[:OTHER]]
    if rest := sources.names[OTHER:]:
        series.append([sum(column) for column in zip(*(counts[n] for n in rest), strict=True)])
    bins = [f"{short(a, 'B')} to {short(b, 'B')}" for a, b in pairwise(edges)]
    totals = sources.report["lengths"]["histogram"][low:high]
    titles = [_bin_title(bins[i], totals[i], counts, i) for i in range(len(bins))]
    whole = sources.report["lengths"]["quantiles"]
    label = f"Histogram of document lengths, from {count(whole.get('min', 0))} to " + (
        f"{count(whole.get('max', 0))} bytes, median {count(whole.get('0.5', 0))}"
    )
    drawn = histogram(edges, series, titles, label)
    rows = [_length_row(sources.name(n), s["lengths"], counts[n], n, sources.colours[n])
            for n, s in sources.of.items()]  # fmt: skip
    if len(rows) > 1:
        rows.append(_length_row(Cell("all"), sources.report["lengths"], totals, "all", OTHER))
    head = ("Source", "", *_QUANTILES.values())
    note = (
        "Bytes of UTF-8 of the documents that deduplication keeps; a Chinese character has 3. Ten "
        "columns a factor of ten. Half of the text is in documents of at least the last length."
    )
    by_bin = [[Cell(name), number(total)] for name, total in zip(bins, totals, strict=True)]
    return Section(
        "Document lengths",
        [
            *sources.legend(),
            Figure(drawn),
            Text(note),
            Table(head, rows, has_total=len(rows) > 1),
            Details("Documents by length", [Table(("Length", "Documents"), by_bin)]),
        ],
    )


def _used_bins(report: dict[str, Any]) -> tuple[list[int], int, int]:
    """Limits of the bins from the first to the last with documents, and which bins these are."""
    used = [i for i, number in enumerate(report["lengths"]["histogram"]) if number] or [0]
    low, high = used[0], used[-1] + 1
    return report["length_edges"][low : high + 1], low, high


def _bin_title(name: str, total: int, counts: dict[str, list[int]], i: int) -> str:
    parts = sorted(((of[i], source) for source, of in counts.items() if of[i]), reverse=True)
    shown = [f"{source} {count(documents)}" for documents, source in parts[:OTHER]]
    more = [f"{len(parts) - OTHER} more"] if len(parts) > OTHER else []
    detail = f" ({', '.join([*shown, *more])})" if len(counts) > 1 and shown else ""
    return f"{name}: {count(total)} documents{detail}"


def _length_row(
    label: Cell, lengths: dict[str, Any], counts: list[int], name: str, colour: int
) -> list[Cell]:
    quantiles = lengths["quantiles"]
    cells = [size(quantiles[key]) if quantiles else Cell("–", is_number=True) for key in _QUANTILES]
    return [label, Cell("", html=sparkline(counts, f"lengths of {name}", colour)), *cells]


def tokens(sources: Sources) -> Section:
    """Splits, blocks and shards."""
    report = sources.report
    rows = []
    for split, total in report["totals"].items():
        shards = report["shard_bytes"][split]
        rows.append([
            Cell(split), number(total["tokens"]), number(total["documents"]),
            size(total["text_bytes"]), number(shards["blocks"]), number(shards["shards"]),
            size(shards["total"]), size(shards["smallest"]), size(shards["largest"]),
        ])  # fmt: skip
    head = ("Split", "Tokens", "Documents", "Text", "Blocks", "Shards", "Size", "Smallest",
            "Largest")  # fmt: skip
    by_source = []
    for name, source in sources.of.items():
        cells = [number(source["totals"][split][key]) for key in ("tokens", "blocks")
                 for split in report["totals"]]  # fmt: skip
        lacking = [share(source[key], source["tokens"]) for key in ("unknown", "byte_pieces")]
        by_source.append([sources.name(name), *cells, *lacking])
    columns = [f"{key}, {split}" for key in ("Tokens", "Blocks") for split in report["totals"]]
    names = ("Source", *columns, "Unknown tokens", "Bytes of rare characters")
    return Section("Tokens and shards", [Table(head, rows), Table(names, by_source)])
