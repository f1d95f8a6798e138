"""Stage tokenizer: trains sentencepiece on a sample of bounded size.

A document is in the sample if the hash of its id falls below the share that fits `sample_mb`, so
the sample does not depend on the order of files.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config import TokenizerConfig
from data_prep.ingest import read_documents
from data_prep.shards import hash_share
from data_prep.stage import Done, Task, make_key
from pipeline.data import tokenizer
from pipeline.runtime.files import write_atomic

# Sentencepiece skips longer lines without a word; 4 bytes a character at most.
_MAX_LINE_CHARS = 10_000


@dataclass(frozen=True)
class VocabularyJob:
    """Kept documents to sample from."""

    ingest_folder: Path
    dedup_folder: Path
    names: tuple[str, ...]
    kept_bytes: int
    config: TokenizerConfig


def task(job: VocabularyJob, ingested: list[Done], deduplicated: Done, folder: Path) -> Task[Any]:
    """The one task of this stage."""
    key = make_key([done.digest for done in ingested], deduplicated.digest, asdict(job.config))
    return Task("tokenizer", folder, key, job)


def run(task: Task[VocabularyJob]) -> tuple[dict[str, Any], list[Path]]:
    """Trains the model."""
    config = task.payload.config
    sample = _Sample(task.payload)
    path = task.path(".model")
    model = tokenizer.train(
        iter(sample),
        vocab_size=config.vocab_size,
        model_type=config.model_type,
        character_coverage=config.character_coverage,
    )
    write_atomic(path, model)
    trained = tokenizer.Tokenizer(path)
    return {"sample_bytes": sample.num_bytes, "vocab_size": trained.vocab_size}, [path]


class _Sample:
    """Iterates over the sample, counting its bytes."""

    def __init__(self, job: VocabularyJob) -> None:
        self._job = job
        self.num_bytes = 0

    def __iter__(self) -> Iterator[str]:
        job = self._job
        limit = job.config.sample_mb * 1_000_000
        share = min(1.0, limit / max(1, job.kept_bytes))
        for name in job.names:
            keep = np.load(job.dedup_folder / f"{name}.keep.npy")
            documents = read_documents(job.ingest_folder / f"{name}.jsonl.zst")
            for kept, document in zip(keep.tolist(), documents, strict=True):
                if not kept or hash_share(document["id"], "sample") >= share:
                    continue
                for line in _lines(document["text"]):
                    self.num_bytes += len(line.encode())
                    if self.num_bytes > limit:
                        return
                    yield line


def _lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, len(line), _MAX_LINE_CHARS):
            yield line[start : start + _MAX_LINE_CHARS]
