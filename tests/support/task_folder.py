"""A folder of made-up files that are read as a task."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.load import build
from pipeline.tasks.readers import TaskData, read_task
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import Example


class Folder:
    """Writes files and reads them as a task."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: Any) -> None:
        """Rows become JSON lines; text stays."""
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (self.path / name).write_bytes(content.encode())

    def write_parquet(self, name: str, rows: list[dict[str, Any]], **types: Any) -> None:
        """Types of columns are those of the rows unless given."""
        schema = pa.schema(list(types.items())) if types else None
        pq.write_table(pa.Table.from_pylist(rows, schema), self.path / name)

    def task(self, kind: str, **data: Any) -> TaskConfig:
        body = {"task": {"kind": kind}, "data": {"root": str(self.path), **data}}
        return build(TaskConfig, {**body, "input": {"max_length": 512}}, "test")

    def read(self, kind: str, content: Any, name: str = "a.json", **data: Any) -> TaskData:
        """Write train and read it."""
        self.write(name, content)
        return read_task(self.task(kind, train=[name], **data))

    def rows(self, kind: str, content: Any, name: str = "a.json", **data: Any) -> list[Example]:
        return list(self.read(kind, content, name, **data).splits["train"])
