"""Writes the datasheet of a dataset, `datasheet.html` and `datasheet.md`, from `report.json` alone.

The questions are those of Gebru et al. 2018, "Datasheets for Datasets", arXiv 1803.09010, as far as
data preparation can answer them by numbers. The template `page.jinja` holds all words; `parts.html`
and `parts.md` make sections, tables and charts of them, Markdown without the charts. Every value is
escaped.
"""

import functools
import html
import json
import operator
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import jinja2
from markupsafe import Markup

from data_prep.datasheet.gather import REPORT_FILE
from data_prep.stage import INGEST_STAGES
from pipeline.config import strict_yaml
from pipeline.errors import DataError
from pipeline.runtime.files import write_atomic

HTML_FILE = "datasheet.html"
MARKDOWN_FILE = "datasheet.md"
OTHER = 7
"""Colour of all sources behind the first seven, which have the colours 0 to 6."""
# Characters outside XML 1.0, and characters with a meaning in Markdown, links of GitHub included.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$@]|:(?=//)|(?<=www)\.)")
_AGAIN = "run `postnorm prep run CONFIG` again"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 240, 62, 24, 10  # of the histogram
_HALF_LABEL = 36  # half of its longest label, in the large letters for narrow screens


def write(folder: Path) -> tuple[Path, Path]:
    """Write both pages into a dataset's folder.

    Raises:
        DataError: the folder is not a finished dataset, or one of another version.
    """
    path = folder / REPORT_FILE
    try:
        report = json.loads(path.read_bytes())
        pages = {HTML_FILE: render(report), MARKDOWN_FILE: render(report, "md")}
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: {folder} is not a finished dataset; "
            "run `postnorm prep run CONFIG` to its end, or correct the folder"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is damaged (not valid JSON: {error}); {_AGAIN}") from None
    except (KeyError, jinja2.UndefinedError) as error:
        raise DataError(f"{path} lacks {error}: another version wrote it; {_AGAIN}") from error
    for name, text in pages.items():
        write_atomic(folder / name, text.encode())
    return folder / HTML_FILE, folder / MARKDOWN_FILE


def render(report: dict[str, Any], form: Literal["html", "md"] = "html") -> str:
    """Render a page. HTML is one well-formed file without scripts and links to a network.

    Raises:
        KeyError, jinja2.UndefinedError: the report is of another version.
    """
    given = report["sources"]
    names = sorted(given, key=lambda name: (-given[name]["tokens"], name))
    keys = ("documents", "text_bytes", "tokens", "characters")
    context = {
        "whole": {
            **{key: sum(source[key] for source in given.values()) for key in keys},
            "stages": report["stages"],
        },
        "weights": {source["name"]: source["weight"] for source in report["settings"]["sources"]},
        "used": [name for name, counts in report["stages"].items() if counts["documents_in"]],
        "report": report,
        "sources": {name: given[name] for name in names},
        **colours(names),
        "folder": str(Path(report["settings"]["output_dir"])),
        "lengths": _lengths(report, names),
        "reasons": _reasons(report, names),
        "tree": tree(report.get("tokenizer_report") or {}),
        "masked": _masked(report["settings"]),
        "settings": strict_yaml.dump(report["settings"]),
    }

    def by_source(*keys: str) -> dict[str, int]:
        return {name: functools.reduce(operator.getitem, keys, given[name]) for name in names}

    forms = {"parts": f"parts.{form}", "frame": f"frame.{form}"}
    page = fill("page.jinja", {**context, **forms, "by_source": by_source}, form)
    return page if form == "html" else re.sub(r"\n\s*\n", "\n\n", page).strip() + "\n"


def fill(template: str, context: dict[str, Any], form: Literal["html", "md"] = "html") -> str:
    """Fill a page of this folder; `parts.html` has what pages are made of.

    Raises:
        jinja2.UndefinedError: the context lacks a name that the page uses.
    """
    functions = {"count": count, "short": short, "percent": percent, "bar": bar, "spark": spark}
    return _environment(form).get_template(template).render(**functions, **context)


def colours(names: Sequence[str]) -> dict[str, Any]:
    """Give each source a colour; all behind the first seven share one, and a line of the legend."""
    more = [f"{len(names) - OTHER} more"] if len(names) > OTHER else []
    return {
        "colours": {name: min(i, OTHER) for i, name in enumerate(names)},
        "legend": [*names[:OTHER], *more],
    }


@functools.cache  # it keeps compiled templates
def _environment(form: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable if form == "html" else _markdown,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number_head"] = lambda name: f"#{name}"
    environment.filters["labelled"] = _labelled
    environment.filters["one_line"] = lambda text: Markup(" ".join(text.split()))
    environment.filters["not_blank"] = lambda text: Markup(re.sub(r"\s*\n\s*", "\n", text.strip()))
    environment.filters["fenced"] = _fenced
    return environment


def _masked(settings: dict[str, Any]) -> list[str]:
    """Name the sources whose rules mask personal data."""

    def masks(filters: Any) -> bool:
        sets = filters if isinstance(filters, list) else [filters]
        return any(rules["mask"]["enabled"] for rules in sets)

    default = settings["filters"]
    return [each["name"] for each in settings["sources"] if masks(each.get("filters") or default)]


def _labelled(rows: Markup, heads: Sequence[str]) -> Markup:
    """Give each cell of rows the head of its column, for screens too narrow for columns."""

    def row(match: re.Match[str]) -> str:
        names = iter(heads)

        def cell(found: re.Match[str]) -> str:
            name = next(names).lstrip("#~")
            return f'{found[0]} data-label="{html.escape(printable(name))}"' if name else found[0]

        return re.sub(r"<td(?=[ >])", cell, match[0])

    return Markup(re.sub(r"<tr>.*?</tr>", row, str(rows), flags=re.DOTALL))


def printable(value: Any) -> Any:
    """Replace each character of a text that a page cannot hold."""
    if not isinstance(value, str) or not _NOT_XML.search(value):
        return value
    # The type is kept: text that is escaped already is of a class of its own.
    return type(value)(_NOT_XML.sub("\ufffd", value))


def _markdown(value: Any) -> Any:
    """Return a text as a part of one line in which no character is taken for a mark-up."""
    value = printable(value)
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    line = _MARKDOWN.sub(r"\\\1", re.sub(r"\s+", " ", value))
    return Markup(html.escape(line, quote=False))


def _fenced(text: str) -> Markup:
    """Set a text between fences longer than those in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}\n{printable(text.strip())}\n{fence}")


def count(number: float) -> str:
    """Format a whole number with separators: 1,234,567."""
    return f"{number:,.0f}".replace("-", "−")


def short(number: float, unit: str = "") -> str:
    """Format a whole number with three digits: `12.3 M`, and `4.56 GB` with the unit B."""
    value, prefixes = float(number), iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while abs(value) >= 999.5 and (larger := next(prefixes, None)):
        value, prefix = value / 1000, larger
    digits = 0 if abs(value) >= 99.95 or not prefix else 1 if abs(value) >= 9.995 else 2
    shown = f"{value:.{digits}f}".replace("-", "−")
    return f"{shown} {prefix}{unit}".rstrip()


def percent(part: float, whole: float) -> str:
    """Format a share as `12.3%`; only nothing is shown as 0, only everything as 100%."""
    if not whole:
        return "–"
    share = part / whole
    if not part:
        return "0"
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}".replace("-", "−").replace("100.0%", "100%")


def bar(
    values: Mapping[str, int], colours: Mapping[str, int], whole: float, unit: str
) -> list[tuple[int, str, str]]:
    """Divide a bar of length `whole` among sources: (colour, width in %, title) of each part.

    All grey sources are one part. `unit` is the unit of the values, B for bytes.
    """
    parts = [(c, values.get(name, 0), name) for name, c in colours.items() if c < OTHER]
    grey = [values.get(name, 0) for name, c in colours.items() if c == OTHER]
    parts.append((OTHER, sum(grey), f"{len(grey)} more"))
    shown = []
    for colour, value, name in parts:
        if value > 0:
            text = short(value, "B") if unit == "B" else f"{count(value)} {unit}"
            shown.append((colour, f"{100 * value / (whole or 1):.3f}", f"{name}: {text}"))
    return shown


def spark(counts: Sequence[int]) -> str:
    """Draw a histogram of the size of a word, as an SVG path of height 20."""
    peak = max([1, *counts])
    steps = (
        f"M{i} 20V{20 - 20 * number / peak:.2f}h1V20z" for i, number in enumerate(counts) if number
    )
    return "".join(steps)


def histogram(edges: Sequence[int], series: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """Lay out stacked counts; all bins are equally wide, as on a logarithmic axis.

    Args:
        edges: (b + 1,) rising edges of the bins in bytes; a bin holds its lower edge.
        series: counts, (b,) each; the first is at the bottom, all after the seventh are grey.

    Returns:
        Coordinates: "lines" (x, y, x, y), "texts" (x, y, text, anchor), "columns" (colour, x, y,
        width, height) and "hovers" (x, y, width, height), one per bin.
    """
    peak = max([1, *map(sum, zip(*series, strict=True))])
    width = (_WIDTH - _LEFT - _HALF_LABEL) / (len(edges) - 1)
    places = [_LEFT + i * width for i in range(len(edges))]
    base = _HEIGHT - _BOTTOM

    def y(number: float) -> float:
        return base - (base - _TOP) * number / peak

    ticks = sorted({peak * i // 4 for i in range(5)})
    powers = [i for i, edge in enumerate(edges) if str(edge).strip("0") == "1"]
    # Of less than two decades, some other edges.
    marked = powers if len(powers) > 2 else range(0, len(edges), 1 + len(edges) // 8)
    columns = []
    for x, counts in zip(places, zip(*series, strict=True), strict=False):
        for colour, (number, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            if number:
                height = y(end - number) - y(end)
                columns.append((min(colour, OTHER), x, y(end), width - 0.7, height))
    return {
        "lines": [
            *((_LEFT, y(tick), _WIDTH, y(tick)) for tick in ticks),
            *((places[i], base, places[i], base + 4) for i in marked),
        ],
        "texts": [
            *((_LEFT - 6, y(tick) + 4, short(tick), "end") for tick in ticks),
            *((places[i], _HEIGHT - 6, short(edges[i], "B"), "middle") for i in marked),
        ],
        "columns": columns,
        # Over the whole height, so that people can also point at small columns.
        "hovers": [(x, _TOP, width, base - _TOP) for x in places[:-1]],
    }


def _lengths(report: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Lay out the histogram of lengths, from the first to the last bin with documents."""
    whole = report["lengths"]["histogram"]
    used = [i for i, number in enumerate(whole) if number] or [0]
    low, high = used[0], used[-1] + 1
    edges, totals = report["length_edges"][low : high + 1], whole[low:high]
    counts = {n: report["sources"][n]["lengths"]["histogram"][low:high] for n in names}
    series = [counts[name] for name in names[:OTHER]]
    if rest := names[OTHER:]:
        series.append([sum(column) for column in zip(*(counts[n] for n in rest), strict=True)])
    bins = [f"{short(a, 'B')} to {short(b, 'B')}" for a, b in pairwise(edges)]
    titles = []
    for i, name in enumerate(bins):
        parts = sorted(((of[i], source) for source, of in counts.items() if of[i]), reverse=True)
        listed = [f"{source} {count(documents)}" for documents, source in parts[:OTHER]]
        listed += [f"{len(parts) - OTHER} more"] if len(parts) > OTHER else []
        detail = f" ({', '.join(listed)})" if len(names) > 1 and listed else ""
        titles.append(f"{name}: {count(totals[i])} documents{detail}")
    shown = {"titles": titles, "table": list(zip(bins, totals, strict=True))}
    return {"histogram": histogram(edges, series), "counts": counts, "totals": totals, **shown}


def _reasons(report: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """List the reasons for rejections, most bytes first, with (source, documents, bytes)."""
    reasons = []
    for stage, counts in report["stages"].items():
        rejected = [(name, report["sources"][name]["stages"][stage]["rejected"]) for name in names]
        for reason, (documents, num_bytes) in counts["rejected"].items():
            parts = [(name, *of[reason]) for name, of in rejected if reason in of]
            parts.sort(key=lambda part: (-part[2], part[0]))
            # Other stages have reasons of the same name, but no samples.
            samples = report["rejected_samples"] if stage in INGEST_STAGES else {}
            shown = {"stage": stage, "reason": reason, "documents": documents, "bytes": num_bytes}
            by_source = {part[0]: part[2] for part in parts}
            more = {"by_source": by_source, "samples": samples.get(reason, [])}
            reasons.append({**shown, "parts": parts, **more})
    return sorted(reasons, key=lambda r: (-r["bytes"], r["reason"], r["stage"]))


def tree(value: Any) -> list[dict[str, Any]]:
    """Arrange any JSON value as tables {"head", "rows"} and folded parts {"summary", "blocks"}."""
    if not isinstance(value, Mapping):
        return [_table(value if isinstance(value, list) else [value])]
    flat = {key: _flat(part) for key, part in value.items()}
    blocks = []
    if len(flat) > 1 and all(flat.values()):
        # Parts become rows of one table, such as one a source; below it stands the rest of each.
        blocks = [_table([{"": key, **cells} for key, cells in flat.items()])]
        rest = {
            key: {name: v for name, v in part.items() if name not in flat[key] and v}
            for key, part in value.items()
        }
    else:
        scalars = _flat(value)
        blocks = [_table([[_words(key), v] for key, v in scalars.items()])] if scalars else []
        rest = {key: v for key, v in value.items() if key not in scalars}
    return blocks + [{"summary": _words(k), "blocks": tree(v)} for k, v in rest.items() if v]


def _flat(value: Any) -> dict[str, Any]:
    """Return the entries of a mapping that have no entries themselves."""
    entries = value.items() if isinstance(value, Mapping) else ()
    return {key: v for key, v in entries if not isinstance(v, (Mapping, list))}


def _table(items: Sequence[Any]) -> dict[str, Any]:
    """Make a table with a row for each mapping, list or single value."""
    lists = [item if isinstance(item, (Mapping, list)) else [item] for item in items]
    cells = [item if isinstance(item, Mapping) else dict(enumerate(item)) for item in lists]
    columns = list(dict.fromkeys(key for row in cells for key in row))
    rows = [[row.get(column, "") for column in columns] for row in cells]
    numeric = [any(isinstance(v, (int, float)) for v in of) for of in zip(*rows, strict=True)]
    names = ["" if isinstance(column, int) else _words(column) for column in columns]
    heads = [f"#{n}" if n and is_num else n for n, is_num in zip(names, numeric, strict=True)]
    return {"head": heads, "rows": rows}


def _words(key: object) -> str:
    return str(key).replace("_", " ")
