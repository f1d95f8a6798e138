"""Sections of the datasheet about what is not in the dataset."""

from typing import Any

from data_prep.datasheet.cells import Sources, number, share, size
from data_prep.datasheet.charts import short
from data_prep.datasheet.page import Block, Cell, Details, Section, Table, Text
from data_prep.ingest import STAGES

_SHOWN_SOURCES = 8


def by_source(sources: Sources) -> Section:
    """Share of its text that each source lost at each stage."""
    stages = [name for name, counts in sources.stages.items() if counts["documents_in"]]
    rows = []
    for name, source in sources.of.items():
        rows.append([sources.name(name), *_losses(source["stages"], stages)])
    if len(rows) > 1:
        rows.append([Cell("all"), *_losses(sources.stages, stages)])
    note = "Text lost at each stage, of the text that came to it; the last column is of the input."
    head = ("Source", *stages, "In all")
    return Section(
        "What each stage removed", [Table(head, rows, has_total=len(rows) > 1), Text(note)]
    )


def _losses(stages: dict[str, Any], names: list[str]) -> list[Cell]:
    cells = [_loss(stages[name]["bytes_in"], stages[name]["bytes_out"]) for name in names]
    return [*cells, _loss(stages[names[0]]["bytes_in"], stages[names[-1]]["bytes_out"])]


def _loss(before: int, after: int) -> Cell:
    return share(before - after, before, heat=True)


def duplicates(sources: Sources) -> Section:
    """Exact and near duplicates of each source."""
    stages = {name: kind for name, kind in (("dedup", "Exact"), ("near", "Near"))
              if name in sources.stages}  # fmt: skip
    rows = [[sources.name(n), *_dropped(s["stages"], stages)] for n, s in sources.of.items()]
    if len(rows) > 1:
        rows.append([Cell("all"), *_dropped(sources.stages, stages)])
    head = [f"{kind}, {what}" for kind in stages.values()
            for what in ("documents", "text", "share")]  # fmt: skip
    note = (
        "A document is dropped if an equal or similar one came earlier. The share is of the text "
        "that came to the stage."
    )
    table = Table(("Source", *head), rows, has_total=len(rows) > 1)
    return Section("Duplicates", [table, Text(note)])


def _dropped(stages: dict[str, Any], names: dict[str, str]) -> list[Cell]:
    cells = []
    for name in names:
        counts = stages[name]
        lost = counts["bytes_in"] - counts["bytes_out"]
        cells += [number(counts["documents_in"] - counts["documents_out"]), size(lost),
                  share(lost, counts["bytes_in"], heat=True)]  # fmt: skip
    return cells


def benchmarks(sources: Sources) -> Section:
    """Documents that share text with evaluation sets; not the texts, which are best not spread."""
    found = sources.report["decontaminate"]
    rows = [
        [Cell(name), number(of["items"]), number(of["too short"]), number(of["documents"])]
        for name, of in found.get("sets", {}).items()
    ]
    if not rows:
        return Section("Evaluation sets", [Text("Their texts were not looked for.")])
    settings = sources.report["settings"]["decontaminate"]
    done = "dropped" if settings["action"] == "drop" else "only listed"
    note = (
        f"A document that shares {settings['ngram']} letters in a row ({settings['ngram_cjk']} in "
        f"Chinese) with an item was {done}. Items that are too short were not looked for."
    )
    head = ("Set", "Items", "Too short", "Documents found")
    return Section("Evaluation sets", [Table(head, rows), Text(note)])


def reasons(sources: Sources) -> Section:
    """Why documents were rejected, most bytes first, with samples."""
    found = [
        (num_bytes, documents, reason, stage)
        for stage, counts in sources.stages.items()
        for reason, (documents, num_bytes) in counts["rejected"].items()
    ]
    found.sort(key=lambda item: (-item[0], item[2], item[3]))
    if not found:
        return Section("Why it was rejected", [Text("Nothing was rejected.")])
    rows, details = [], []
    whole = next(iter(sources.stages.values()))["bytes_in"]
    for num_bytes, documents, reason, stage in found:
        parts = _by_source(sources, stage, reason)
        text = {name: part[1] for name, part in parts.items()}
        bar = sources.bar(text, found[0][0], "B")
        rows.append([Cell(reason), Cell(stage), number(documents), size(num_bytes),
                     share(num_bytes, whole), bar])  # fmt: skip
        details.append(_detail(sources, reason, parts, stage))
    items = "Documents or lines" if "lines" in sources.stages else "Documents"
    head = ("Reason", "Stage", items, "Text", "Of the input", "")
    masked = sources.report["settings"]["filters"]["mask"]["enabled"]
    note = "By source, and how rejected texts begin"
    note += ", with personal data masked:" if masked else ":"
    table = Table(head, rows)
    return Section("Why it was rejected", [*sources.legend(), table, Text(note), *details])


def _by_source(sources: Sources, stage: str, reason: str) -> dict[str, tuple[int, int]]:
    """Documents and bytes of the sources that have any, most bytes first."""
    parts = {
        name: tuple(source["stages"][stage]["rejected"].get(reason, (0, 0)))
        for name, source in sources.of.items()
    }
    ordered = sorted(parts.items(), key=lambda item: (-item[1][1], item[0]))
    return {name: (part[0], part[1]) for name, part in ordered if part[0]}


def _detail(
    sources: Sources, reason: str, parts: dict[str, tuple[int, int]], stage: str
) -> Details:
    rows = [[sources.name(name), number(documents), size(num_bytes)]
            for name, (documents, num_bytes) in list(parts.items())[:_SHOWN_SOURCES]]  # fmt: skip
    if more := list(parts.values())[_SHOWN_SOURCES:]:
        rows.append([Cell(f"{len(more)} more"), number(sum(part[0] for part in more)),
                     size(sum(part[1] for part in more))])  # fmt: skip
    blocks: list[Block] = [Table(("Source", "Documents", "Text"), rows)]
    # Other stages have reasons of the same name, but no samples.
    samples = sources.report["rejected_samples"].get(reason, [])
    if samples and stage in STAGES:
        lines = [[Cell(sample["id"]), Cell(sample["text"])] for sample in samples]
        blocks.append(Table(("Document", "Beginning"), lines))
    text = short(sum(part[1] for part in parts.values()), "B")
    return Details(f"{reason} ({stage}, {text})", blocks)
