"""Texts in files, what is read from them, and their preparation, also up to a stage."""

import json
from pathlib import Path
from typing import Any

from data_prep import corpus
from data_prep.chain import walk
from data_prep.config import PrepConfig, SourceConfig
from data_prep.documents import read_file
from data_prep.inputs import encoding_of, find
from data_prep.stage import Done, Stage, run_tasks
from data_prep.types import Document, Rejected
from pipeline.config.load import load


def run_before(config: PrepConfig, stop: str) -> dict[str, list[Done]]:
    """Runs the stages before `stop` and returns their records by name."""
    records: dict[str, list[Done]] = {}

    def visit(stage: Stage) -> list[Done] | None:
        if stage.name == stop:
            return None
        records[stage.name] = run_tasks(stage, config.workers)
        return records[stage.name]

    walk(corpus.find(config), visit)
    return records


def config_of(prep_config: Path, output: Path, source: Path | str, *overrides: str) -> PrepConfig:
    """The config of the tests' dataset, of another folder and other texts."""
    inputs = f"sources=[{{name: topics, inputs: [{source}]}}]"
    return load(PrepConfig, prep_config, [f"output_dir={output}", inputs, *overrides]).config


def write_texts(path: Path, texts: list[str], first: int = 0) -> Path:
    rows = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(texts, start=first)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def read_source(
    path: Path, max_bytes: int = 1_000_000, **settings: Any
) -> list[Document | Rejected]:
    """All items of a file, or of the one file in a folder."""
    source = SourceConfig(name="s", inputs=(str(path),), **settings)
    [file] = find(source).files
    return list(read_file(file, source, max_bytes, encoding_of(file, source) or "utf-8"))


def texts_of(items: list[Document | Rejected]) -> list[str]:
    """Texts of those that are no rejections."""
    return [item.text for item in items if isinstance(item, Document)]


def reasons_of(items: list[Document | Rejected]) -> list[str]:
    """Reasons of the rejections."""
    return [item.reason for item in items if isinstance(item, Rejected)]
