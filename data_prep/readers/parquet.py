"""Documents of a parquet file: one row each, read page by page; and records written into one."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped,import-not-found]
import pyarrow.parquet as pq  # type: ignore[import-untyped,import-not-found]

from data_prep.readers.encodings import decode
from data_prep.readers.items import DAMAGED, BrokenFileError, FileOrigin, Metadata, Rejected
from data_prep.readers.records import Fields
from data_prep.readers.text import Items, open_binary, whole_document

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
    with open_binary(place.path) as file:
        try:
            table = pq.ParquetFile(
                file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            text_field = fields.text
            if not _is_text(table.schema_arrow, text_field):
                columns = f"{table.metadata.num_rows} rows of {table.schema_arrow.names}"
                reason = f"no text in column {text_field!r}"
                yield Rejected(f"{place.source}/{place.name}", reason, columns.encode())
                return
            for row, text, own_id, metadata in _rows(table, fields):
                if text is None:
                    yield Rejected(place.at(row), f"no text in column {text_field!r}", b"")
                    continue
                if len(text) > place.max_bytes:
                    raise place.too_long(f"row {row}")
                plain_id = decode(own_id, "utf-8") if isinstance(own_id, bytes) else own_id
                yield from whole_document(text, place.own(plain_id, row), metadata)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the operating system, not of the format
            raise BrokenFileError(DAMAGED, str(error)) from error


def _is_text(schema: Any, name: str) -> bool:
    kind = _type_at(schema, name)
    return kind is not None and _binary_type(kind) is not None


def _type_at(schema: Any, name: str) -> Any:
    """Return the type of a column, `a.b` being b of the structures in a; None if there is none."""
    if schema.get_field_index(name) >= 0:
        return schema.field(name).type
    first, _, rest = name.partition(".")
    kind = schema.field(first).type if rest and schema.get_field_index(first) >= 0 else None
    return _type_at(pa.schema(kind), rest) if kind and pa.types.is_struct(kind) else None


def _binary_type(kind: Any) -> Any:
    """Choose the type to read a text column as: Arrow does not check that strings are UTF-8."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    is_text = any(getattr(pa.types, f"is_{name}")(kind) for name in names)
    return pa.large_binary() if is_text else None


def _rows(
    table: Any, fields: Fields
) -> Iterator[tuple[int, bytes | None, bytes | int | None, Metadata]]:
    wanted = (fields.text, fields.id, *fields.metadata)
    columns = [name for name in wanted if _type_at(table.schema_arrow, name)]
    row = 0
    # Group by group, so that a damaged one costs nothing of those before it.
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(
            batch_size=_ROWS, row_groups=[group], columns=columns, use_threads=False
        ):
            values = {name: _column(batch, name) for name in columns}
            for i in range(batch.num_rows):
                given = {k: values[k][i].as_py() for k in fields.metadata if k in values}
                yield (
                    row,
                    values[fields.text][i].as_py(),
                    values[fields.id][i].as_py() if fields.id in values else None,
                    _for_json({k: value for k, value in given.items() if value is not None}),
                )
                row += 1


def _column(batch: Any, name: str) -> Any:
    """Return a column, texts as bytes."""
    if batch.schema.get_field_index(name) >= 0:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        binary = _binary_type(column.type)
        return column.cast(binary) if binary else column
    first, _, rest = name.partition(".")
    inner = batch.column(first)
    # Unlike `field`, `flatten` gives null where the structure is null.
    return _column(pa.RecordBatch.from_arrays(inner.flatten(), schema=pa.schema(inner.type)), rest)


def _for_json(values: dict[str, Any]) -> Metadata:
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
