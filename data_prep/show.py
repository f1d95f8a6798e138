"""`python -m data_prep show`: one document's way through the stages, or what was rejected and why.

Intermediate files are enough to find which piece of the input a document came from; the original
is then read from the input itself.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from data_prep import corpus, ingest
from data_prep.chain import walk
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus
from data_prep.documents import Document
from data_prep.stage import Done, Stage, finished
from pipeline.errors import DataError

_SHOWN_CHARS = 2000


def document_text(config: PrepConfig, document_id: str) -> str:
    """The original of a document, what it became, and which stage dropped it, if one did.

    Raises:
        DataError: no document of that id was ingested.
    """
    given = corpus.find(config)
    done_stages = _complete_stages(given)
    if "ingest" not in done_stages:
        raise DataError("documents can be shown when stage ingest is complete; see `status`")
    found = [_in_piece(given, number, document_id, done_stages)
             for number in _pieces_of(given, document_id)]  # fmt: skip
    shown = [text for text in found if text]
    if not shown:
        raise DataError(
            f"no document has the id {document_id!r}; ids are SOURCE/NAME of the document, or "
            "SOURCE/FILE@OFFSET where it has none, such as the ones in "
            f"{given.work / 'ingest'}/00000.ids.jsonl.zst"
        )
    return "\n\n".join(shown)


def rejected_text(config: PrepConfig, reason: str, limit: int) -> str:
    """Documents and lines that were rejected, up to `limit` a reason.

    Args:
        config: the preparation.
        reason: part of the reason; empty for all.
        limit: how many are shown of each.
    """
    given = corpus.find(config)
    counts = Counter[str]()
    parts = []
    stages = ["ingest", *(["lines"] if config.dedup.lines else [])]
    folders = [given.work / stage for stage in stages]
    for path in (p for folder in folders for p in sorted(folder.glob("*.rejected.jsonl.zst"))):
        for record in ingest.read_lines(path):
            if reason not in record["reason"]:
                continue
            counts[record["reason"]] += 1
            if counts[record["reason"]] <= limit:
                why = f"{record['reason']} {record.get('detail', '')}".rstrip()
                raw = record.get("raw") or f"base64: {record.get('raw_base64', '')}"
                parts.append(f"--- {record['id']}: {why}\n{_cut(raw)}")
    totals = [f"{name}: {count:,}" for name, count in counts.most_common()]
    return "\n".join([*parts, "---", *(totals or [f"nothing was rejected for {reason!r}"])])


def _complete_stages(given: Corpus) -> dict[str, Stage]:
    found: dict[str, Stage] = {}

    def visit(stage: Stage) -> list[Done] | None:
        records = [finished(task) for task in stage.tasks]
        if not all(records):
            return None
        found[stage.name] = stage
        return [done for done in records if done]

    walk(given, visit)
    return found


def _pieces_of(given: Corpus, document_id: str) -> Iterator[int]:
    wanted = np.uint64(ingest.id_hash(document_id))
    for number, piece in enumerate(given.pieces):
        if document_id.startswith(f"{piece.source.name}/"):
            hashes = np.load(given.work / "ingest" / f"{number:05d}.id_hashes.npy")
            if (hashes == wanted).any():
                yield number


def _in_piece(given: Corpus, number: int, document_id: str, stages: dict[str, Stage]) -> str:
    """Every document of a piece that has the id."""
    piece, name = given.pieces[number], f"{number:05d}"
    max_bytes = given.config.clean.max_document_mb * 1_000_000
    originals = [
        item for item in ingest.items(piece, max_bytes, [])
        if isinstance(item, Document) and item.id == document_id
    ]  # fmt: skip
    lines = [f"--- {document_id}, in {piece.files[0].path} and {len(piece.files) - 1} more files"]
    lines += [f"original, {len(item.text):,} characters:\n{_cut(item.text)}" for item in originals]
    texts = [stage for stage in ("ingest", "lines") if stage in stages]
    for stage in texts:
        path = given.work / stage / name
        lines += [
            f"rejected: {record['reason']} {record.get('detail', '')}".rstrip()
            for record in ingest.read_lines(Path(f"{path}.rejected.jsonl.zst"))
            if record["id"] == document_id
        ]
        done = "ingested as" if stage == "ingest" else "without lines that were seen before"
        for row, text in _texts(path, document_id):
            lines.append(f"{done}:\n{_cut(text)}")
            if stage == texts[-1]:
                lines += _masks(given.work, name, row, stages)
    return "\n".join(lines)


def _texts(path: Path, document_id: str) -> Iterator[tuple[int, str]]:
    """Rows and texts of a piece's documents that have the id."""
    ids = ingest.read_lines(Path(f"{path}.ids.jsonl.zst"))
    rows = {row for row, key in enumerate(ids) if key == document_id}
    documents = ingest.read_documents(Path(f"{path}.jsonl.zst"))
    for row, document in enumerate(islice(documents, max(rows, default=-1) + 1)):
        if row in rows:
            yield row, document["text"]


def _masks(work: Path, name: str, row: int, stages: dict[str, Stage]) -> list[str]:
    """What the stages that drop whole documents say about one."""
    lines = []
    for stage in stages:
        path = work / stage / f"{name}.keep.npy"
        if path.exists():
            kept = bool(np.load(path, mmap_mode="r")[row])
            lines.append(f"stage {stage}: {'kept' if kept else 'dropped'}")
            if not kept:
                break
    return lines


def _cut(text: str) -> str:
    more = len(text) - _SHOWN_CHARS
    return text if more <= 0 else f"{text[:_SHOWN_CHARS]}\n[{more:,} more characters]"
