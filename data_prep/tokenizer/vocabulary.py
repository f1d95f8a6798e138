"""Stage tokenizer: trains sentencepiece on a sample of bounded size, or takes a given tokenizer.

Writes tokenizer.model (sentencepiece) or tokenizer.json (WordPiece), and tokenizer.report.json with
measurements on a sample of every source.

Samples are of the kept documents, drawn by hash of their ids, so that neither the order of files
nor the number of tasks matters. The training sample takes each source's documents with the lowest
hashes, the sample for measurements those with the highest: they overlap only where a source has too
little text. Needs 24 bytes of memory a document of the largest source, and the memory of a source's
sample. Lengths are those of documents as the shards have them, in characters (code points), UTF-8
bytes and tokens without [CLS] and [SEP].
"""

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from data_prep.config import DEFAULT_VOCAB_SIZE, SourceConfig, TokenizerConfig
from data_prep.corpus import Progress
from data_prep.pieces import Pieces, hash_share, read_documents
from data_prep.stage import Estimate, Result, Size, StageTask, make_key
from data_prep.tokenizer.existing_tokenizer import GivenTokenizer
from data_prep.word_boundaries import HAN
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.tokenizer import sentencepiece
from pipeline.tokenizer.load import DatasetTokenizer, load_tokenizer
from pipeline.tokenizer.sentencepiece import Spelling
from pipeline.tokenizer.wordpiece import CONTINUES

logger = logging.getLogger(__name__)

# Sentencepiece skips longer lines without a warning; 4 bytes a character at most.
_MAX_LINE_CHARS = 10_000
_MEASURED_BYTES = 4_000_000  # of each source
_MOST_UNKNOWN = 0.01
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_LISTED = 10
_CONTEXT = 20


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


@dataclass(frozen=True)
class Sample:
    """Documents of one source."""

    source: str
    documents: dict[tuple[str, int], int]
    """(piece, row) -> its bytes in the sample, in the order of the hashes; all documents but the
    last are whole."""

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return sum(self.documents.values())

    def texts(self, pieces: Pieces) -> Iterator[str]:
        """Read the documents' texts, in the order of `documents`."""
        texts: dict[tuple[str, int], bytes] = {}
        rows: dict[str, list[int]] = {}
        for name, row in sorted(self.documents):
            rows.setdefault(name, []).append(row)
        for name, wanted in rows.items():
            documents = read_documents(pieces.documents_path(name), set(wanted))
            for row, document in zip(wanted, documents, strict=True):
                texts[name, row] = document["text"].encode()[: self.documents[name, row]]
        for place in self.documents:
            yield texts.pop(place).decode(errors="ignore")


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
    sizes = source_bytes(job.pieces, source_of)
    weights = {source.name: source.weight for source in job.sources}
    budget = 0 if job.given else job.config.sample_mb * 1_000_000
    budgets = [allot(sizes, weights, budget), dict.fromkeys(sizes, _MEASURED_BYTES)]
    training, others = draw(job.pieces, source_of, budgets)
    if job.given:
        write_atomic(path, job.given.content)
    else:
        write_atomic(path, _train(job, training))
    made = load_tokenizer(path)
    report_path = task.path(".report.json")
    report = measure(made, job.pieces, others, training)
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


def _train(job: VocabularyJob, training: list[Sample]) -> bytes:
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


def _lines(pieces: Pieces, parts: list[Sample]) -> Iterator[str]:
    for part in parts:
        for text in part.texts(pieces):
            for line in text.split("\n"):
                for start in range(0, len(line), _MAX_LINE_CHARS):
                    yield line[start : start + _MAX_LINE_CHARS]


# Samples


def allot(sizes: Mapping[str, int], weights: Mapping[str, float], budget: int) -> dict[str, int]:
    """Split a number of bytes over sources in proportion to weight times size.

    A source that has less than its part gives all its text; the others share the rest.
    """
    given: dict[str, int] = {}
    while waiting := [name for name in sorted(sizes) if name not in given]:
        left = budget - sum(given.values())
        total = sum(weights[name] * sizes[name] for name in waiting)
        parts = {n: left * weights[n] * sizes[n] / total if total else 0.0 for n in waiting}
        short = [name for name in waiting if parts[name] >= sizes[name]]
        given |= {n: sizes[n] for n in short} if short else {n: int(parts[n]) for n in waiting}
    return given


def draw(
    pieces: Pieces, source_of: Mapping[str, str], budgets: Sequence[Mapping[str, int]]
) -> list[list[Sample]]:
    """Draw two samples of every source: with the lowest, and with the highest hashes.

    Args:
        pieces: documents to choose from.
        source_of: piece -> name of its source.
        budgets: bytes by source, of the first sample and of the second.
    """
    drawn: list[list[Sample]] = [[], []]
    for source in sorted(set(source_of.values())):
        names = [name for name in pieces.names if source_of[name] == source]
        rows = [pieces.kept_rows(name) for name in names]
        sizes = np.concatenate([pieces.kept_sizes(name) for name in names])
        hashes = np.concatenate([_hashes(pieces, n, r) for n, r in zip(names, rows, strict=True)])
        firsts = np.cumsum([0, *map(len, rows)])
        # Texts come in this order: sentencepiece's unigram model depends on the order of lines.
        order = np.argsort(hashes, order=("id", "text"))
        for samples, budget, way in zip(drawn, budgets, (order, order[::-1]), strict=True):
            ends = np.cumsum(sizes[way])
            documents = {}
            for i in range(int(np.searchsorted(ends - sizes[way], budget[source]))):
                at = int(way[i])
                piece = int(np.searchsorted(firsts, at, side="right")) - 1
                place = (names[piece], int(rows[piece][at - firsts[piece]]))
                excess = max(0, int(ends[i]) - budget[source])
                documents[place] = int(sizes[at]) - excess
            samples.append(Sample(source, documents))
    return drawn


def source_bytes(pieces: Pieces, source_of: Mapping[str, str]) -> dict[str, int]:
    """Count the kept bytes of every source."""
    totals = dict.fromkeys(sorted(set(source_of.values())), 0)
    for name in pieces.names:
        totals[source_of[name]] += int(pieces.kept_sizes(name).sum())
    return totals


def _hashes(pieces: Pieces, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Return hashes of the ids, and of the texts to order documents that share an id."""
    texts = np.load(pieces.texts / f"{name}.hashes.npy")
    hashes = np.zeros(len(texts), dtype=[("id", "<f8"), ("text", "<u8")])
    hashes["id"] = [hash_share(i, "sample") for i in pieces.ids(name)]
    hashes["text"] = texts[:, 0]
    return cast("npt.NDArray[np.void]", hashes[rows])


# Measurements


@dataclass
class _Measured:
    """Counts of one source."""

    lengths: list[int] = field(default_factory=list)
    sums: Counter[str] = field(default_factory=Counter)
    unknown_texts: Counter[str] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)
    """First character that does not come back -> lines."""
    examples: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Lost character -> (normalised text, decoded text) around it."""


def measure(
    tokenizer: DatasetTokenizer, pieces: Pieces, parts: list[Sample], training: list[Sample]
) -> dict[str, Any]:
    """Measure a tokenizer on `parts`: {"vocabulary": ..., "sources": {name: ...}}, plain values.

    `training` is the tokenizer's training sample, in the same order of sources.
    """
    used = np.zeros(tokenizer.vocab_size, dtype=bool)
    sources = {}
    for part, trained in zip(parts, training, strict=True):
        measured = _Measured()
        for text in part.texts(pieces):
            _add_document(tokenizer, text, measured, used)
        overlap = len(part.documents.keys() & trained.documents.keys())
        sources[part.source] = {**_source(measured), "documents_also_trained_on": overlap}
    return {"vocabulary": _vocabulary(tokenizer, used), "sources": sources}


def _add_document(
    tokenizer: DatasetTokenizer, text: str, into: _Measured, used: npt.NDArray[np.bool_]
) -> None:
    encoded, spelling = tokenizer.spell(text)
    ids = np.array(encoded, dtype=np.uint32)
    used[ids] = True
    into.lengths.append(len(ids))
    unknown = np.flatnonzero(ids == tokenizer.unk_id)
    is_byte = tokenizer.is_byte[ids]
    into.sums.update(characters=len(text), bytes=len(text.encode()), tokens=len(ids))
    into.sums.update(unknown=len(unknown), byte_pieces=int(np.count_nonzero(is_byte)))
    into.unknown_texts.update(_spelled(spelling, ids, unknown))
    for line in text.split("\n"):
        _round_trip(tokenizer, line, into)


def _spelled(
    spelling: Spelling, ids: npt.NDArray[np.uint32], places: npt.NDArray[np.int64]
) -> Iterator[str]:
    """Yield the text of some tokens."""
    if len(places):
        surface, offsets = spelling.surface(ids)
        ends = np.append(offsets[1:], len(surface))
        for start, end in zip(offsets[places].tolist(), ends[places].tolist(), strict=True):
            yield surface[start:end].strip()


def _round_trip(tokenizer: DatasetTokenizer, line: str, into: _Measured) -> None:
    """Compare a decoded line with the original, without white space, which WordPiece drops."""
    expected = "".join(tokenizer.normalise(line).split())
    decoded = "".join(tokenizer.decode(tokenizer.encode(line)).split())
    into.sums["line_characters"] += len(expected)
    if decoded == expected:
        into.sums["same_characters"] += len(expected)
        return
    pairs = zip(expected, decoded, strict=False)
    shorter = min(len(expected), len(decoded))
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
    character = expected[place : place + 1]
    into.differences[character] += 1
    around = slice(max(0, place - _CONTEXT), place + _CONTEXT)
    example = (expected[around], decoded[around])
    # The smallest example, not the first one met: that would depend on the order of files.
    into.examples[character] = min(example, into.examples.get(character, example))


def _source(measured: _Measured) -> dict[str, Any]:
    sums, lengths = measured.sums, sorted(measured.lengths)
    quantiles = {
        f"{share:g}": lengths[round(share * (len(lengths) - 1))] for share in _QUANTILES if lengths
    }
    names = ("character", "lines", "text", "decoded")
    differences = [
        dict(zip(names, (character, count, *measured.examples[character]), strict=True))
        for character, count in _most(measured.differences)
    ]
    return {
        "documents": len(lengths),
        **{name: sums[name] for name in ("characters", "bytes", "tokens")},
        "characters_per_token": _ratio(sums["characters"], sums["tokens"]),
        "bytes_per_token": _ratio(sums["bytes"], sums["tokens"]),
        "tokens_per_document": quantiles,
        "unknown_share": _ratio(sums["unknown"], sums["tokens"]),
        "byte_piece_share": _ratio(sums["byte_pieces"], sums["tokens"]),
        "unknown_texts": _most(measured.unknown_texts),
        "round_trip_share": _ratio(sums["same_characters"], sums["line_characters"]),
        "round_trip_differences": differences,
    }


def _vocabulary(tokenizer: DatasetTokenizer, used: npt.NDArray[np.bool_]) -> dict[str, Any]:
    ids = tokenizer.vocabulary.in_text
    pieces = [
        tokenizer.piece(token).removeprefix(CONTINUES).strip() or tokenizer.piece(token)
        for token in ids[~tokenizer.is_byte[ids]].tolist()
    ]
    scripts = Counter({"Han": 0, "Latin": 0, "digits": 0, "other": 0})
    scripts.update(map(script, pieces))
    return {
        "kind": tokenizer.vocabulary.kind,
        "size": tokenizer.vocab_size,
        "special": len(tokenizer.vocabulary.special),
        "never_in_text": tokenizer.vocab_size - len(ids) - len(tokenizer.vocabulary.special),
        "words_never_in_text": _words_of_no_text(tokenizer, ids),
        "bytes": int(np.count_nonzero(tokenizer.is_byte)),
        "pieces": len(pieces),
        "unused_in_sample_share": _ratio(int(np.count_nonzero(~used[ids])), len(ids)),
        "single_character_share": _ratio(sum(len(piece) == 1 for piece in pieces), len(pieces)),
        "scripts": dict(scripts),
        "longest": sorted(pieces, key=lambda piece: (-len(piece), piece))[:_LISTED],
    }


def _words_of_no_text(tokenizer: DatasetTokenizer, ids: npt.NDArray[np.int64]) -> list[str]:
    """List words of several Chinese characters that the tokenizer splits before it looks."""
    never = np.setdiff1d(np.arange(tokenizer.vocab_size), ids).tolist()
    pieces = [tokenizer.piece(token).removeprefix(CONTINUES) for token in never]
    return [piece for piece in pieces if len(piece) > 1 and set(map(script, piece)) == {"Han"}]


def script(piece: str) -> str:
    """Name the script of a piece: `Han` or `Latin` by any such letter, `digits`, or `other`."""
    if any(first <= ord(character) <= last for character in piece for first, last in HAN):
        return "Han"
    if any(unicodedata.name(character, "").startswith("LATIN") for character in piece):
        return "Latin"
    return "digits" if piece.isdigit() else "other"


def _most(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_LISTED]


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
