"""The datasheet of a dataset: `datasheet.html` and `datasheet.md`, from `report.json` alone.

The questions are those of Gebru et al. 2018, "Datasheets for Datasets", arXiv 1803.09010, as far as
data preparation can answer them by numbers.
"""

import json
from pathlib import Path
from typing import Any

from data_prep.datasheet import rejected as datasheet_rejected
from data_prep.datasheet import sources as datasheet_sources
from data_prep.datasheet.cells import Sources, number, share, size, tree
from data_prep.datasheet.charts import count, percent, short
from data_prep.datasheet.page import (
    Bullets,
    Cell,
    Code,
    Details,
    Section,
    Table,
    Text,
    Tiles,
    to_html,
    to_markdown,
)
from data_prep.datasheet.report import REPORT_FILE
from pipeline.config import strict_yaml
from pipeline.errors import DataError
from pipeline.runtime.files import write_atomic

HTML_FILE = "datasheet.html"
MARKDOWN_FILE = "datasheet.md"


def write(folder: Path) -> tuple[Path, Path]:
    """Writes both pages into a dataset's folder.

    Raises:
        DataError: the folder is no finished dataset, or one of another version.
    """
    path = folder / REPORT_FILE
    try:
        report = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: {folder} is no finished dataset; "
            "run `python -m data_prep run CONFIG` to its end, or correct the folder"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is damaged (no JSON: {error}); {_AGAIN}") from None
    try:
        title, subtitle, sections = make(report)
    except KeyError as error:
        raise DataError(f"{path} has no {error}: another version wrote it; {_AGAIN}") from error
    pages = {HTML_FILE: to_html, MARKDOWN_FILE: to_markdown}
    for name, page in pages.items():
        write_atomic(folder / name, page(title, subtitle, sections).encode())
    return folder / HTML_FILE, folder / MARKDOWN_FILE


_AGAIN = "run `python -m data_prep run CONFIG` again"


def make(report: dict[str, Any]) -> tuple[str, str, list[Section]]:
    """Title, subtitle and sections of the page."""
    sources = Sources(report)
    notes = _notes(report)
    sections = [
        Section("", [_headline(report)]),
        datasheet_sources.funnel(sources),
        datasheet_sources.table(sources),
        datasheet_sources.scripts(sources),
        datasheet_sources.lengths(sources),
        datasheet_rejected.by_source(sources),
        datasheet_rejected.duplicates(sources),
        datasheet_rejected.benchmarks(sources),
        datasheet_rejected.reasons(sources),
        datasheet_sources.tokens(sources),
        Section("Tokenizer", _tokenizer(sources)),
        *([Section("Notes", notes)] if notes else []),
        Section("Known limits", [Bullets(_limits(report))]),
        Section("Settings and versions", _made_with(report)),
        Section("How to check it", [Text(_VERIFY), Code(_VERIFY_COMMANDS)]),
    ]
    title = f"Datasheet of {Path(report['settings']['output_dir'])}"
    finished = report["finished"].replace("T", " ").replace("+00:00", " UTC")
    return title, f"fingerprint {report['fingerprint']}, finished {finished}", sections


def _headline(report: dict[str, Any]) -> Tiles:
    totals = report["totals"].values()
    stages = list(report["stages"].values())
    tokens, documents, text = (
        sum(total[name] for total in totals) for name in ("tokens", "documents", "text_bytes")
    )
    held_out = report["totals"]["eval"]
    return Tiles(
        [
            ("Tokens", short(tokens), f"{count(tokens)}, {count(held_out['tokens'])} held out"),
            ("Documents", count(documents) if documents < 1e6 else short(documents),
             f"{count(held_out['documents'])} of them held out"),
            ("Text", short(text, "B"), f"{count(text)} bytes of UTF-8"),
            ("Left of the input", percent(text, stages[0]["bytes_in"]),
             f"of {short(stages[0]['bytes_in'], 'B')} of text, "
             f"{percent(documents, stages[0]['documents_in'])} of its documents"),
            ("Sources", count(len(report["sources"])), _largest(report)),
            ("Shards", count(report["num_shards"]),
             f"{count(report['num_blocks'])} blocks, "
             f"{short(sum(s['total'] for s in report['shard_bytes'].values()), 'B')}"),
        ]
    )  # fmt: skip


def _largest(report: dict[str, Any]) -> str:
    sizes: dict[str, int] = {name: source["tokens"] for name, source in report["sources"].items()}
    largest = max(sizes, key=lambda name: sizes[name])
    if len(sizes) == 1:
        return largest
    return f"the largest, {largest}, has {percent(sizes[largest], sum(sizes.values()))} of tokens"


def _tokenizer(sources: Sources) -> list[Any]:
    report = sources.report
    settings = report["settings"]["tokenizer"]
    tokens, text, characters = (
        sum(source[name] for source in sources.of.values())
        for name in ("tokens", "text_bytes", "characters")
    )
    made = (
        {"Taken from": settings["file"]}
        if settings["file"]
        else {
            "Algorithm": settings["model_type"],
            "Character coverage": f"{settings['character_coverage']:g}",
            "Text that it was trained on": short(report["tokenizer_sample_bytes"], "B"),
        }
    )
    rows = {
        "Vocabulary": f"{count(report['vocab_size'])} tokens",
        **made,
        "Bytes a token": f"{text / tokens:.3f}",
        "Characters a token": f"{characters / tokens:.3f}",
        "Unigram entropy of the training tokens": f"{report['unigram_entropy_nats']:.3f} nats",
    }
    drawn = [
        [sources.name(name), number(sample["documents"]), size(sample["bytes"]),
         share(sample["bytes"], report["tokenizer_sample_bytes"])]
        for name in sources.names
        if (sample := report["tokenizer_sample"].get(name, {"bytes": 0}))["bytes"]
    ]  # fmt: skip
    training = Table(("Trained on", "Documents", "Text", "Share"), drawn)
    blocks: list[Any] = [Table(("", ""), [[Cell(name), Cell(row)] for name, row in rows.items()])]
    return [*blocks, *([training] if drawn else []), *_measured(report)]


def _measured(report: dict[str, Any]) -> list[Any]:
    found = report.get("tokenizer_report")
    return [Details("Measured on a sample of each source", tree(found))] if found else []


def _notes(report: dict[str, Any]) -> list[Any]:
    rows = [[Cell(name), number(value)] for name, value in report["notes"].items()]
    return [Table(("", "Count"), rows)] if rows else []


def _limits(report: dict[str, Any]) -> list[str]:
    settings = report["settings"]
    near = settings["dedup"]
    mask = settings["filters"]["mask"]
    return [
        "Scripts are counted by letters; languages are not told apart, and nobody judged what the "
        "texts say: facts, bias and licences are those of the sources.",
        "Personal data is found by its form (addresses, numbers): names and postal addresses stay."
        if mask["enabled"]
        else "Personal data was not masked.",
        f"Near duplicates are found by an estimate (threshold {near['threshold']}, not below "
        f"{near['min_chars']} characters): some stay."
        if near["near_duplicates"]
        else "Near duplicates were not looked for: a held-out text may be nearly one of training.",
        "Texts of evaluation sets were looked for letter by letter: paraphrases stay."
        if report["decontaminate"]
        else "Texts of evaluation sets were not looked for.",
        "Of copies in several sources the first in the order of the config is kept; what a source "
        "lost to duplicates depends on its place.",
        f"The held-out split is {settings['shards']['eval_fraction']:.2%} of the documents, drawn "
        "by hash of their ids.",
        "Samples of rejected texts are the first ones found, not typical ones.",
    ]


def _made_with(report: dict[str, Any]) -> list[Any]:
    versions = [[Cell(name), Cell(version)] for name, version in report["provenance"].items()]
    settings = Code(strict_yaml.dump(report["settings"]))
    return [Table(("Package", "Version"), versions), Details("All settings", [settings])]


_VERIFY = (
    "verify reads all shards again and compares every member with its sha256 in the index. The "
    "fingerprint is the hash of the index and is in every checkpoint that was trained on it. The "
    "same config and files give the same fingerprint, with any number of processes."
)
_VERIFY_COMMANDS = """python -m data_prep verify FOLDER
python -m data_prep datasheet FOLDER    # makes this page again, from report.json
python -m data_prep run FOLDER/resolved.yaml output_dir=ANOTHER    # makes the dataset again"""
