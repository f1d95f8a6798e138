"""Stage tokenizer: trains sentencepiece on a sample of bounded size, or takes a given tokenizer.

Writes tokenizer.model (sentencepiece) or tokenizer.json (WordPiece), and tokenizer.report.json on
what it does to a sample of every source.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.config import DEFAULT_VOCAB_SIZE, TokenizerConfig
from data_prep.stage import Done, Task, make_key
from data_prep.tokenizer import report as tokenizer_report
from data_prep.tokenizer import sample
from data_prep.tokenizer.given import GivenTokenizer
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.tokenizer import sentencepiece
from pipeline.tokenizer.wordpiece import load_tokenizer

# Sentencepiece skips longer lines without a word; 4 bytes a character at most.
_MAX_LINE_CHARS = 10_000
_REPORT_BYTES = 4_000_000  # of each source


@dataclass(frozen=True)
class VocabularyJob:
    """Kept documents to sample from."""

    kept: sample.Kept
    config: TokenizerConfig
    given: GivenTokenizer | None


def task(
    kept: sample.Kept,
    config: TokenizerConfig,
    given: GivenTokenizer | None,
    ingested: list[Done],
    deduplicated: Done,
    folder: Path,
) -> Task[VocabularyJob]:
    """The one task of this stage; `given` is what `read_given(config)` returned."""
    key = make_key(
        [done.digest for done in ingested], deduplicated.digest, asdict(config),
        given and given.sha256, [[source.name, source.weight] for source in kept.sources],
    )  # fmt: skip
    return Task("tokenizer", folder, key, VocabularyJob(kept, config, given))


def tokenizer_path(task: Task[VocabularyJob]) -> Path:
    """The tokenizer's file."""
    given = task.payload.given
    return task.path(given.suffix if given else ".model")


def run(task: Task[VocabularyJob]) -> tuple[dict[str, Any], list[Path]]:
    """Trains or copies the tokenizer, and reports on it."""
    job, path = task.payload, tokenizer_path(task)
    sizes = sample.source_bytes(job.kept)
    weights = {source.name: source.weight for source in job.kept.sources}
    budget = 0 if job.given else job.config.sample_mb * 1_000_000
    budgets = [sample.allot(sizes, weights, budget), dict.fromkeys(sizes, _REPORT_BYTES)]
    training, others = sample.draw(job.kept, budgets)
    if job.given:
        write_atomic(path, job.given.content)
    else:
        model = sentencepiece.train(
            _lines(job.kept, training),
            vocab_size=job.config.vocab_size or DEFAULT_VOCAB_SIZE,
            model_type=job.config.model_type,
            character_coverage=job.config.character_coverage,
        )
        write_atomic(path, model)
    made = load_tokenizer(path)
    report_path = task.path(".report.json")
    write_json_atomic(report_path, tokenizer_report.report(made, job.kept, others, training))
    result = {
        "sample_bytes": sum(part.num_bytes for part in training),
        "sample": {
            part.source: {
                "documents": len(part.documents), "bytes": part.num_bytes,
                "source_bytes": sizes[part.source], "weight": weights[part.source],
            }
            for part in training
        },
        "vocab_size": made.vocab_size,
    }  # fmt: skip
    return result, [path, report_path]


def _lines(kept: sample.Kept, parts: list[sample.Sample]) -> Iterator[str]:
    for part in parts:
        for text in part.texts(kept):
            for line in text.split("\n"):
                for start in range(0, len(line), _MAX_LINE_CHARS):
                    yield line[start : start + _MAX_LINE_CHARS]
