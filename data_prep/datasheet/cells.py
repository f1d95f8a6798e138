"""What the sections of the datasheet share: the report by source, and cells of tables."""

from collections.abc import Mapping
from typing import Any

from data_prep.datasheet.charts import OTHER, Part, bar, count, escape, legend, percent, short
from data_prep.datasheet.page import Block, Cell, Details, Figure, Table


class Sources:
    """A report, its sources in the order of their tokens, and the colour of each.

    Raises:
        KeyError: the report is of another version.
    """

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.stages: dict[str, dict[str, Any]] = report["stages"]
        given: dict[str, dict[str, Any]] = report["sources"]
        self.names = sorted(given, key=lambda name: (-given[name]["tokens"], name))
        self.of = {name: given[name] for name in self.names}
        self.colours = {name: min(i, OTHER) for i, name in enumerate(self.names)}

    def name(self, source: str) -> Cell:
        """A source's name beside its colour."""
        mark = f'<i class="s{self.colours[source]}"></i>'
        return Cell(source, html=f'<span class="name">{mark}<bdi>{escape(source)}</bdi></span>')

    def bar(self, values: Mapping[str, int], whole: float, unit: str) -> Cell:
        """Values of sources, stacked; the grey ones are one part.

        Args:
            values: by source.
            whole: the longest that a bar can be.
            unit: behind the values, or B for bytes.
        """
        shown = {name: values.get(name, 0) for name in self.names}
        coloured = {name: v for name, v in shown.items() if self.colours[name] < OTHER}
        parts = [Part(self.colours[n], v, f"{n}: {_with(v, unit)}") for n, v in coloured.items()]
        rest = sum(shown.values()) - sum(coloured.values())
        parts.append(Part(OTHER, rest, f"{len(shown) - len(coloured)} more: {_with(rest, unit)}"))
        return Cell("", html=bar(parts, whole or 1))

    def legend(self) -> list[Block]:
        """What the colours mean, if there is more than one."""
        more = len(self.names) - OTHER
        names = [*self.names[:OTHER], *([f"{more} more"] if more > 0 else [])]
        return [Figure(legend(names))] if len(names) > 1 else []


def number(value: int) -> Cell:
    """A whole number."""
    return Cell(count(value), is_number=True)


def size(num_bytes: int) -> Cell:
    """Bytes with a prefix; all digits are under the mouse."""
    text = short(num_bytes, "B")
    exact = f'<span title="{count(num_bytes)} bytes">{text}</span>'
    return Cell(text, is_number=True, html=exact)


def share(part: float, whole: float, *, heat: bool = False) -> Cell:
    """A percentage."""
    strength = part / whole if heat and whole else 0.0
    return Cell(percent(part, whole), is_number=True, heat=strength)


def ratio(value: float, whole: float) -> Cell:
    """With two digits; a dash if there is nothing to divide by."""
    return Cell(f"{value / whole:.2f}" if whole else "–", is_number=True)


def tree(value: Any) -> list[Block]:
    """Tables of any JSON value, so that reports of others can be shown."""
    if isinstance(value, Mapping):
        return _tree_of_mapping(value)
    items = value if isinstance(value, list) else [value]
    if items and all(isinstance(item, Mapping) for item in items):
        columns = list(dict.fromkeys(key for item in items for key in item))
        found = [[_scalar(item.get(column, "")) for column in columns] for item in items]
        return [Table([_words(column) for column in columns], found)]
    if items and all(isinstance(item, list) and len(item) == len(items[0]) for item in items):
        return [Table([""] * len(items[0]), [list(map(_scalar, item)) for item in items])]
    return [Table(("",), [[_scalar(item)] for item in items])]


def _tree_of_mapping(value: Mapping[str, Any]) -> list[Block]:
    scalars = {key: v for key, v in value.items() if not isinstance(v, (Mapping, list))}
    blocks: list[Block] = []
    if scalars:
        blocks = [Table(("", ""), [[Cell(_words(k)), _scalar(v)] for k, v in scalars.items()])]
    rest = {key: v for key, v in value.items() if key not in scalars and v}
    parts = [v for v in rest.values() if isinstance(v, Mapping)]
    common = [
        key for key, v in (parts[0] if parts else {}).items()
        if not isinstance(v, (Mapping, list)) and all(key in part for part in parts)
    ]  # fmt: skip
    if not scalars and common and len(parts) == len(rest) > 1:
        # Things of one kind: side by side, and below what each has besides.
        rows = [[Cell(key), *(_scalar(part[c]) for c in common)] for key, part in rest.items()]
        blocks = [Table(["", *map(_words, common)], rows)]
        rest = {name: {k: v for k, v in part.items() if k not in common and v}
                for name, part in rest.items()}  # fmt: skip
    return blocks + [Details(_words(key), tree(v)) for key, v in rest.items() if v]


def _words(key: object) -> str:
    return str(key).replace("_", " ")


def _scalar(value: Any) -> Cell:
    if isinstance(value, bool) or value is None or not isinstance(value, (int, float)):
        return Cell(str(value))
    return Cell(count(value) if isinstance(value, int) else f"{value:.4g}", is_number=True)


def _with(value: int, unit: str) -> str:
    return short(value, "B") if unit == "B" else f"{count(value)} {unit}"
