"""The kept text of a finished dataset, for other programs: JSON lines or parquet, a file a piece.

A record has `id`, `source`, `split` (train or eval), `text`, and the metadata of its source. The
text is that of the stage that wrote texts last, without the documents that later stages dropped.
"""

import json
import logging
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backports import zstd

from data_prep.chain import steps
from data_prep.config import PrepConfig
from data_prep.corpus import RESOLVED_FILE
from data_prep.datasheet.gather import REPORT_FILE
from data_prep.pieces import Pieces, read_documents
from data_prep.run import available_cores
from data_prep.stage import replacing, require_written
from pipeline.config.load import load
from pipeline.data.format import read_index
from pipeline.data.reader import BlockReader
from pipeline.errors import ConfigError, DataError
from pipeline.runtime.files import sha256_file
from pipeline.runtime.summary import progress

logger = logging.getLogger(__name__)

Format = Literal["jsonl", "parquet"]
SUFFIXES: dict[Format, str] = {"jsonl": ".jsonl.zst", "parquet": ".parquet"}


@dataclass(frozen=True)
class _Job:
    pieces: Pieces
    held_out: frozenset[str]
    fields: tuple[str, ...]
    folder: Path
    format: Format


def export(dataset: Path, out: Path, form: Format) -> tuple[int, list[Path]]:
    """Write the text of a dataset into a folder; return the number of documents, and the files.

    Raises:
        ConfigError: `out` holds something else.
        DataError: the dataset is not finished, its work/ is gone, or a file is not as it was
            written.
    """
    index = read_index(dataset)
    given = [f"output_dir={json.dumps(str(dataset))}"]
    config = load(PrepConfig, dataset / RESOLVED_FILE, given).config
    folders = {step.produces: dataset / "work" / step.name for step in steps(config)}
    texts, masks = folders["texts"], folders["masks"]
    paths = (path.relative_to(masks).as_posix() for path in masks.rglob("*.keep.npy"))
    names = tuple(sorted((path.removesuffix(".keep.npy") for path in paths), key=_file_name))
    report = json.loads((dataset / REPORT_FILE).read_bytes())
    wanted = report["stages"]["shards"]["documents_in"]  # some may have no tokens
    pieces, marker = Pieces(texts, masks, names), masks / "all.done.json"
    if not marker.is_file() or sum(len(pieces.kept_rows(name)) for name in names) != wanted:
        raise DataError(
            f"{dataset / 'work'} does not hold the {wanted:,} documents of the dataset; it was "
            "deleted, has files of an earlier and larger corpus, or another run is at work there: "
            "remove it, run the preparation again, then export"
        )
    expected = {f"{_file_name(name)}{SUFFIXES[form]}" for name in names}
    found = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if found - expected:
        raise ConfigError(f"{out} holds {sorted(found - expected)[0]}; choose an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    fields = tuple(dict.fromkeys(name for each in config.sources for name in each.metadata))
    reader = BlockReader(index)
    held_out = frozenset(
        document_id
        for row in index.split_blocks("eval").tolist()
        for document_id in reader.block(row).document_ids
    )
    written = json.loads(marker.read_bytes())["files"]
    for mask in (f"{name}.keep.npy" for name in names):
        require_written(masks / mask, sha256_file(masks / mask), written[mask]["sha256"], marker)
    job = _Job(pieces, held_out, fields, out, form)
    workers = min(config.workers or available_cores(), len(names))
    total = 0
    with (
        # Once a process: the held-out ids of a large corpus are megabytes.
        ProcessPoolExecutor(workers, initializer=_open, initargs=(job,)) as pool,
        progress("export", len(names), "piece", stays=True) as advance,
    ):
        for count in pool.map(_write, names):
            total += count
            advance(1)
    return total, sorted(path for path in out.iterdir() if path.name in expected)


_opened: list[_Job] = []


def _open(job: _Job) -> None:
    _opened[:] = [job]


def _file_name(piece: str) -> str:
    return piece.rpartition("/")[2]


def _write(name: str) -> int:
    """Write one piece; return the number of its documents."""
    [job] = _opened
    rows = set(job.pieces.kept_rows(name).tolist())
    if not rows:  # now; an earlier export into this folder may have had some
        (job.folder / f"{_file_name(name)}{SUFFIXES[job.format]}").unlink(missing_ok=True)
        return 0
    documents = read_documents(job.pieces.documents_path(name), rows)
    records = (_record(document, job.held_out) for document in documents)
    with replacing(job.folder / f"{_file_name(name)}{SUFFIXES[job.format]}") as path:
        if job.format == "parquet":
            # Imported here, because it is large and few exports need it.
            from data_prep.readers.parquet import write_records

            write_records(path, records, ("id", "source", "split", "text", *job.fields))
        else:
            with zstd.open(path, "wt", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return len(rows)


def _record(document: dict[str, Any], held_out: frozenset[str]) -> dict[str, Any]:
    return {
        "id": document["id"],
        "source": document["source"],
        "split": "eval" if document["id"] in held_out else "train",
        "text": document["text"],
        **document.get("metadata", {}),
    }
