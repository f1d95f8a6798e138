"""A page of sections, written as HTML in one file and as Markdown for GitHub.

Both are made from the same blocks, so they say the same. A `Cell` has a text and may have a picture
of it for HTML. All text is escaped here; `html` fields come from `data_prep.datasheet.charts`.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from data_prep.datasheet.charts import escape, printable
from data_prep.datasheet.page_style import STYLE

# Also what GitHub would make a link of.
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$@]|:(?=//)|(?<=www)\.)")


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    is_number: bool = False
    html: str = ""
    """Shown instead of the text; already escaped."""
    heat: float = 0.0
    """Strength of the background, 0 to 1."""


@dataclass(frozen=True)
class Table:
    """Rows of equal length. A column without texts is a picture, which Markdown leaves out."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    has_total: bool = False
    """The last row is the sum of the others."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text to be shown as it is."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A chart; its numbers must stand beside it as a table, for Markdown and for all readers."""

    html: str


@dataclass(frozen=True)
class Tiles:
    """The few numbers that matter: label, value, and what to know about it."""

    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away."""

    summary: str
    blocks: "Sequence[Block]"


Block = Table | Text | Bullets | Code | Figure | Tiles | Details


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def to_html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """One file: no scripts, no network; well-formed XML."""
    links = "".join(
        f'<a href="#part-{i}">{escape(section.title)}</a>'
        for i, section in enumerate(sections)
        if section.title
    )
    body = "\n".join(_html_section(i, section) for i, section in enumerate(sections))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body><main>
<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>
<nav>{links}</nav>
{body}
</main></body></html>
"""


def to_markdown(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The same with tables instead of charts."""
    parts = [f"# {_md(title)}", _md(subtitle)]
    for section in sections:
        if section.title:
            parts.append(f"## {_md(section.title)}")
        parts += filter(None, map(_md_block, section.blocks))
    return "\n\n".join(parts) + "\n"


def _html_section(number: int, section: Section) -> str:
    head = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return (
        f'<section id="part-{number}">{head}{"".join(map(_html_block, section.blocks))}</section>'
    )


def _html_block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Figure(drawn):
            return f"<figure>{drawn}</figure>"
        case Tiles(items):
            tiles = "".join(
                f"<div><dt>{escape(label)}</dt><dd><b>{escape(value)}</b>"
                f"<small>{escape(detail)}</small></dd></div>"
                for label, value, detail in items
            )
            return f'<dl class="tiles">{tiles}</dl>'
        case Details(summary, blocks):
            inner = "".join(map(_html_block, blocks))
            return f"<details><summary>{escape(summary)}</summary>{inner}</details>"
        case Table():
            return _html_table(block)


def _html_table(table: Table) -> str:
    numbers = [any(row[i].is_number for row in table.rows) for i in range(len(table.head))]
    head = "".join(
        f'<th scope="col"{_NUMBER if is_number else ""}>{escape(name)}</th>'
        for name, is_number in zip(table.head, numbers, strict=True)
    )
    # Without names of columns it is a list of facts, which needs not be as wide as the page.
    begin = f"<table><thead><tr>{head}</tr></thead>" if any(table.head) else _FACTS
    rows = [f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in table.rows]
    total = f"<tfoot>{rows.pop()}</tfoot>" if table.has_total else ""
    return f'<div class="scroll">{begin}<tbody>{"".join(rows)}</tbody>{total}</table></div>'


_NUMBER = ' class="n"'
_FACTS = '<table class="facts">'


def _html_cell(cell: Cell) -> str:
    heat = f' style="--heat:{100 * min(1, cell.heat):.0f}%"' if cell.heat > 0 else ""
    content = cell.html or f"<bdi>{escape(cell.text)}</bdi>"
    # What is nothing should not draw the eye.
    kind = ' class="n zero"' if cell.text in ("0", "0 B", "–") else _NUMBER
    return f"<td{kind if cell.is_number else ''}{heat}>{content}</td>"


def _md_block(block: Block) -> str:
    match block:
        case Text(text):
            return _md(text)
        case Bullets(items):
            return "\n".join(f"- {_md(item)}" for item in items)
        case Code(text):
            longest = max(map(len, re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}\n{printable(text).strip()}\n{fence}"
        case Figure():
            return ""
        case Tiles(items):
            rows = [[Cell(item[0]), Cell(item[1], is_number=True), Cell(item[2])] for item in items]
            return _md_table(Table(("", "", ""), rows))
        case Details(summary, blocks):
            inner = "\n\n".join(filter(None, map(_md_block, blocks)))
            return f"<details><summary>{escape(summary)}</summary>\n\n{inner}\n\n</details>"
        case Table():
            return _md_table(block)


def _md_table(table: Table) -> str:
    columns = range(len(table.head))
    shown = [i for i in columns if not table.rows or any(row[i].text for row in table.rows)]
    marks = {i: "---:" if any(row[i].is_number for row in table.rows) else "---" for i in columns}
    lines = [[_md(table.head[i]) for i in shown], [marks[i] for i in shown]]
    rows = [[_md(row[i].text) for i in shown] for row in table.rows]
    if table.has_total:
        rows[-1] = [f"**{text}**" if text else "" for text in rows[-1]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (*lines, *rows))


def _md(text: str) -> str:
    """One line in which nothing is taken for a mark-up."""
    line = _MARKDOWN.sub(r"\\\1", " ".join(printable(text).split()))
    return html.escape(line, quote=False)
