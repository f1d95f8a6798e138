"""Stage tokenizer: trains sentencepiece on a sample of bounded size, or takes a given tokenizer.

Writes tokenizer.model (sentencepiece) or tokenizer.json (WordPiece), and tokenizer.report.json with
measurements on a sample of every source.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.config import DEFAULT_VOCAB_SIZE, SourceConfig, TokenizerConfig
from data_prep.corpus import Progress
from data_prep.pieces import Pieces
from data_prep.stage import Estimate, Result, Size, StageTask, make_key
from data_prep.tokenizer import sample
from data_prep.tokenizer.existing_tokenizer import GivenTokenizer
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.tokenizer import sentencepiece
from pipeline.tokenizer.load import load_tokenizer

logger = logging.getLogger(__name__)

# Sentencepiece skips longer lines without a warning; 4 bytes a character at most.
_MAX_LINE_CHARS = 10_000
_MEASURED_BYTES = 4_000_000  # of each source
_MOST_UNKNOWN = 0.01


@dataclass(frozen=True)
class VocabularyJob:
    """Kept documents to sample from."""

    pieces: Pieces
    sources: tuple[SourceConfig, ...]
    """The source of each piece."""
    config: TokenizerConfig
    given: GivenTokenizer | None
    keep_breaks: bool
    """Whether a trained tokenizer keeps line breaks."""
    path: Path


def tasks(progress: Progress, folder: Path) -> list[StageTask[VocabularyJob]]:
    """Make the one task of this stage."""
    corpus, config = progress.corpus, progress.corpus.config.tokenizer
    newline = corpus.config.clean.newline
    sources = tuple(piece.source for piece in corpus.pieces)
    key = make_key(
        [done.digest for done in progress.written],
        progress.kept.digest,
        asdict(config),
        corpus.tokenizer and corpus.tokenizer.sha256,
        [[source.name, source.weight] for source in sources],
        *([newline] if newline != "space" else []),
    )
    path = progress.tokenizer_path
    keep_breaks = newline == "token"
    job = VocabularyJob(progress.pieces, sources, config, corpus.tokenizer, keep_breaks, path)
    return [StageTask("tokenizer", folder, key, job)]


def run(task: StageTask[VocabularyJob]) -> Result:
    """Train or copy the tokenizer, and measure it."""
    job, path = task.payload, task.payload.path
    source_of = dict(zip(job.pieces.names, (s.name for s in job.sources), strict=True))
    sizes = sample.source_bytes(job.pieces, source_of)
    weights = {source.name: source.weight for source in job.sources}
    budget = 0 if job.given else job.config.sample_mb * 1_000_000
    budgets = [sample.allot(sizes, weights, budget), dict.fromkeys(sizes, _MEASURED_BYTES)]
    training, others = sample.draw(job.pieces, source_of, budgets)
    if job.given:
        write_atomic(path, job.given.content)
    else:
        write_atomic(path, _train(job, training))
    made = load_tokenizer(path)
    report_path = task.path(".report.json")
    report = sample.measure(made, job.pieces, others, training)
    write_json_atomic(report_path, report)
    _warn(report)
    of_sources = {
        part.source: {
            "documents": len(part.documents),
            "bytes": part.num_bytes,
            "source_bytes": sizes[part.source],
            "weight": weights[part.source],
        }
        for part in training
    }
    sample_bytes = sum(part.num_bytes for part in training)
    result = {"sample_bytes": sample_bytes, "sample": of_sources, "vocab_size": made.vocab_size}
    return result, [path, report_path]


def _warn(report: dict[str, Any]) -> None:
    """Warn of a vocabulary that does not go with the text."""
    for name, source in report["sources"].items():
        if source["unknown_share"] > _MOST_UNKNOWN:
            examples = ", ".join(repr(text) for text, _ in source["unknown_texts"][:5])
            logger.warning(
                "source %s: %.1f%% of its tokens are unknown, such as %s; take a vocabulary for "
                "this text, or check tokenizer.lowercase and the source's encoding",
                name,
                100 * source["unknown_share"],
                examples,
            )
    if words := report["vocabulary"]["words_never_in_text"]:
        logger.warning(
            "tokenizer.file: %d words of several Chinese characters can be in no text, such as "
            "%s: each character is a token; remove them, or set tokenizer.split_chinese=false",
            len(words),
            ", ".join(words[:5]),
        )


def _train(job: VocabularyJob, training: list[sample.Sample]) -> bytes:
    """Train on the sample; a small corpus gets a smaller vocabulary if the config names none."""

    def train(vocab_size: int) -> bytes:
        model = sentencepiece.train(
            _lines(job.pieces, training),
            vocab_size=vocab_size,
            model_type=job.config.model_type,
            character_coverage=job.config.character_coverage,
        )
        return sentencepiece.keep_line_breaks(model) if job.keep_breaks else model

    try:
        return train(job.config.vocab_size or DEFAULT_VOCAB_SIZE)
    except sentencepiece.VocabularyTooLargeError as error:
        if job.config.vocab_size is not None:
            raise
        logger.warning(
            "the text supports a vocabulary of %s tokens, not the default of %s: it is taken",
            f"{error.largest:,}",
            f"{DEFAULT_VOCAB_SIZE:,}",
        )
        return train(error.largest)


def estimates(size: Size) -> dict[str, Estimate]:
    """Estimate the cost; the sample is drawn from all documents, so all are read."""
    sample_bytes = min(size.text_bytes, size.config.tokenizer.sample_mb * 1e6)
    s_per_mb = 2.4 if size.config.tokenizer.model_type == "unigram" else 0.2
    cpu_s = size.text_bytes / 1e6 / 150 + sample_bytes / 1e6 * s_per_mb
    return {"tokenizer": Estimate(1, cpu_s, 2e6, 100e6 + 17 * sample_bytes, 3)}


def _lines(pieces: Pieces, parts: list[sample.Sample]) -> Iterator[str]:
    for part in parts:
        for text in part.texts(pieces):
            for line in text.split("\n"):
                for start in range(0, len(line), _MAX_LINE_CHARS):
                    yield line[start : start + _MAX_LINE_CHARS]
