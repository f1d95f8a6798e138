"""Values in a row of a file: texts, lists of choices, labels and places, each checked."""

import json
from typing import Any

from pipeline.errors import DataError
from pipeline.tasks.formats import FIXED_FORMATS, TABLES, Row, TableFile

OTHER_LABEL = "correct it, or name the key of another in data.fields.label"
_LIST_JOINER = "；"


def text_of(
    source: TableFile, row: Row, field: str, *, required: bool = True, joins: bool = True
) -> str:
    """Return a text of a row; `joins` that of a list is made of its items.

    Raises:
        DataError: the row has none, or something else.
    """
    key = source.column(field)
    value = row.values.get(key) if key is not None else ""
    if value is None or value != value:  # NaN, as in `choices_of`
        if not required and source.format in FIXED_FORMATS:
            return ""
        raise DataError(
            f"{row.where}: no {key!r}, named by data.fields.{field}; keys: {', '.join(row.values)}"
            + ("; a table without a header needs data.columns" if source.format in TABLES else "")
        )
    if isinstance(value, list) and joins:
        joiner = _LIST_JOINER if source.data.joiner is None else source.data.joiner
        return joiner.join(map(str, value))
    if isinstance(value, (list, dict)):
        raise DataError(
            f"{row.where}: {key!r} must be a text, got {str(value)[:80]!r}; name the key of one in "
            f"data.fields.{field}"
        )
    source.counts["texts that are empty"] += key is not None and not str(value).strip()
    return str(value)


def choices_of(source: TableFile, row: Row) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the choices of a row as they stand, and the file's names for them; () without."""
    key = source.column("choices")
    names: Any = ()
    value: Any = row.values.get(key) if isinstance(key, str) else None
    if isinstance(key, tuple):
        names, value = key, [row.values.get(name) for name in key]
        # NaN alone differs from itself; pandas writes it for an empty cell.
        while value and (value[-1] in (None, "") or value[-1] != value[-1]):
            value.pop()  # a row may have fewer
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value, names = ([part.get(name) for part in value] for name in ("text", "label"))
    elif isinstance(value, dict):
        value, names = value.get("text"), value.get("label") or ()
    if not isinstance(value, list) or len(value) < 2 or None in value or holds_lists(value):
        raise DataError(
            f"{row.where}: {key} is {str(value)[:80]!r} (keys: {', '.join(row.values)}); expected "
            "two choices or more: a list of texts, or {text: [...], label: [...]}, or set "
            "data.fields.choices to the list of the keys or columns that have one each"
        )
    return tuple(value), tuple(names)[: len(value)]


def holds_lists(value: Any) -> bool:
    """Whether a value is a list with lists in it."""
    return isinstance(value, list) and any(isinstance(part, list) for part in value)


def require_text(row: Row, text: str, part: str, start: int) -> None:
    """Check that a part stands in a text where the row says (DataError: it does not)."""
    if start < 0 or text[start : start + len(part)] != part:
        there = text[max(start, 0) : start + len(part)]
        raise DataError(
            f"{row.where}: character {start} should start {part!r}, but {there!r} is there; "
            "correct the offset (in characters, from 0)"
        )


def name_of(value: Any, row: Row) -> str:
    """Return a label as text (DataError: it is a list or a mapping)."""
    if isinstance(value, (dict, list)):
        raise DataError(f"{row.where}: label {value!r} must be a text or a number; {OTHER_LABEL}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1 and 1.0 are one number, and one class
    return json.dumps(value) if isinstance(value, bool) else str(value).strip()
