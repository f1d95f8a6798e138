"""Documents of a parquet file: one row each, read page by page; and records written into one."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped,import-not-found]
import pyarrow.parquet as pq  # type: ignore[import-untyped,import-not-found]

from data_prep.readers.encodings import decode
from data_prep.readers.records import Fields, value_at
from data_prep.readers.text import (
    BEGINNING_BYTES,
    DAMAGED,
    BrokenFileError,
    FileOrigin,
    Items,
    open_binary,
    whole_document,
)
from data_prep.types import Metadata

# Rows in memory at a time, and what is read of a column at a time.
_ROWS = 256
_BUFFER_BYTES = 1 << 20
_GROUP_ROWS = 4096


def documents(place: FileOrigin, fields: Fields) -> Items:
    """Yield the rows of one file; without a column of ids, ids are row numbers from 0.

    Raises:
        DataError: a text is too long.
        BrokenFileError: the file is damaged here. A file that was cut short is so from its start,
            because parquet keeps its table of contents at the end.
    """
    num_rows, row = 1, -1
    with open_binary(place.path) as file:
        try:
            table = pq.ParquetFile(
                file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            names, num_rows = tuple(table.schema_arrow.names), table.metadata.num_rows
            columns = _columns(table.schema_arrow, fields)
            if not any(name in columns for name in fields.text):
                whole = f"{place.source}/{place.name}"
                yield fields.no_text("column", whole, b"", there=names, rows=num_rows)
                return
            for row, record in enumerate(_records(table, list({*columns.values()}))):
                own_id, metadata = value_at(record, fields.id), fields.metadata_of(record)
                fields.seen.update(metadata, () if own_id is None else (fields.id,))
                text = fields.text_of(record, b"\n")
                if text is None:
                    yield fields.no_text("column", place.at(row), b"", there=names)
                elif len(text) > place.max_bytes:
                    yield place.too_long(place.at(row), text[:BEGINNING_BYTES], len(text))
                else:
                    plain_id = decode(own_id, "utf-8") if isinstance(own_id, bytes) else own_id
                    document_id = place.own(plain_id, row)
                    yield from whole_document(text, document_id, _for_json(metadata))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the operating system, not of the format
            raise BrokenFileError(DAMAGED, str(error), rows=num_rows - row - 1) from error


def _columns(schema: Any, fields: Fields) -> dict[str, str]:
    """Return which top-level column holds each field that is there, and of texts is text."""
    columns = {}
    for name in fields.wanted:
        kind, root = _type_at(schema, name)
        # Of several texts one that holds a number rejects its rows, as in JSON.
        is_one = name in fields.text and len(fields.text) == 1
        if kind is not None and (not is_one or _holds_text(kind)):
            columns[name] = root
    return columns


def _type_at(schema: Any, name: str) -> tuple[Any, str]:
    """Return a field's type and top-level column; `a.b` is b of the structures, or lists, in a."""
    if schema.get_field_index(name) >= 0:
        return schema.field(name).type, name
    first, _, rest = name.partition(".")
    kind = schema.field(first).type if rest and schema.get_field_index(first) >= 0 else None
    while kind is not None and _is_list(kind):
        kind = kind.value_type
    inner = _type_at(pa.schema(kind), rest)[0] if kind and pa.types.is_struct(kind) else None
    return inner, first


def _is_list(kind: Any) -> bool:
    names = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def _holds_text(kind: Any) -> bool:
    while _is_list(kind):
        kind = kind.value_type
    return _binary_type(kind) is not None


def _binary_type(kind: Any) -> Any:
    """Choose the type to read a text column as: Arrow does not check that strings are UTF-8."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    is_text = any(getattr(pa.types, f"is_{name}")(kind) for name in names)
    return pa.large_binary() if is_text else None


def _records(table: Any, roots: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of some top-level columns, texts as bytes."""
    # Group by group, so that a damaged one costs nothing of those before it.
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(
            batch_size=_ROWS, row_groups=[group], columns=roots, use_threads=False
        ):
            values = {root: _column(batch.column(root)) for root in roots}
            for i in range(batch.num_rows):
                yield {root: column[i].as_py() for root, column in values.items()}


def _column(column: Any) -> Any:
    """Return a column, texts as bytes, of any depth."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(_as_binary(column.type), safe=False)


def _as_binary(kind: Any) -> Any:
    """Return a type with texts as bytes, of any depth, since bytes that are no text are counted."""
    if _is_list(kind):
        return pa.large_list(_as_binary(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(_as_binary(part.type)) for part in kind])
    if pa.types.is_timestamp(kind):  # Python's have no nanoseconds
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else _binary_type(kind) or kind


def _for_json(values: Metadata) -> Metadata:
    """Make values that JSON can hold; dates and decimal numbers become text."""
    made: Metadata = json.loads(json.dumps(values, default=_plain)) if values else {}
    return made


def _plain(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def write_records(path: Path, records: Iterator[dict[str, Any]], names: Sequence[str]) -> None:
    """Write records into columns of text; values that are no text are written as JSON."""
    schema = pa.schema([(name, pa.large_string()) for name in names])

    def flat(record: dict[str, Any]) -> dict[str, str | None]:
        plain = {k: v for k, v in record.items() if v is None or isinstance(v, str)}
        return {k: plain[k] if k in plain else json.dumps(v) for k, v in record.items()}

    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := [flat(record) for record in islice(records, _GROUP_ROWS)]:
            writer.write_table(pa.Table.from_pylist(group, schema))
