"""Documents of a parquet file: one row each, read page by page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped,import-not-found]
import pyarrow.parquet as pq  # type: ignore[import-untyped,import-not-found]

from data_prep.readers.items import DAMAGED, BrokenFileError, Place, Rejected
from data_prep.readers.text import Items, decode, whole_document

# Rows in memory at a time, and what is read of a column at a time.
_ROWS = 256
_BUFFER_BYTES = 1 << 20


def documents(place: Place, text_field: str, id_field: str, max_bytes: int) -> Items:
    """Yield the rows of one file; without a column of ids, ids are row numbers from 0.

    Raises:
        DataError: a text is longer than `max_bytes`.
        BrokenFileError: the file is damaged here. A file that was cut short is so from its start,
            because parquet keeps its table of contents at the end.
    """
    with Path(place.path).open("rb") as file:
        try:
            table = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            if not _is_text(table.schema_arrow, text_field):
                columns = f"{table.metadata.num_rows} rows of {table.schema_arrow.names}"
                reason = f"no text in column {text_field!r}"
                yield Rejected(f"{place.source}/{place.name}", reason, columns.encode())
                return
            for row, text, own_id in _rows(table, text_field, id_field):
                if text is None:
                    yield Rejected(place.at(row), f"no text in column {text_field!r}", b"")
                    continue
                if len(text) > max_bytes:
                    raise place.too_long(f"row {row}", max_bytes)
                plain_id = decode(own_id, "utf-8") if isinstance(own_id, bytes) else own_id
                yield from whole_document(text, place.own(plain_id, row))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the operating system, not of the format
            raise BrokenFileError(DAMAGED, str(error)) from error


def _is_text(schema: Any, field: str) -> bool:
    index = schema.get_field_index(field)
    return index >= 0 and _binary_type(schema.field(index).type) is not None


def _binary_type(kind: Any) -> Any:
    """Choose the type to read a text column as: Arrow does not check that strings are UTF-8."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    is_text = any(getattr(pa.types, f"is_{name}")(kind) for name in names)
    return pa.large_binary() if is_text else None


def _rows(
    table: Any, text_field: str, id_field: str
) -> Iterator[tuple[int, bytes | None, bytes | int | None]]:
    has_id = table.schema_arrow.get_field_index(id_field) >= 0
    columns = [text_field, id_field] if has_id else [text_field]
    row = 0
    # Group by group, so that a damaged one costs nothing of those before it.
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(
            batch_size=_ROWS, row_groups=[group], columns=columns, use_threads=False
        ):
            texts = _values(batch.column(text_field))
            ids = _values(batch.column(id_field)) if has_id else [None] * len(texts)
            for text, own_id in zip(texts, ids, strict=True):
                yield row, text, own_id
                row += 1


def _values(column: Any) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    binary = _binary_type(column.type)
    values: list[Any] = (column.cast(binary) if binary else column).to_pylist()
    return values
