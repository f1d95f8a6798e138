"""The share of rows of evaluation sets that have text in common with a corpus, for `benchmark`.

A row is shared if one of its texts has an n-gram in common with a document of the corpus, or, being
too short for one, stands in a document as a whole. Letters, n-grams and the search are those of
`data_prep.decontaminate.search`; documents and rows are normalised as the corpus is. Documents are
counted as they are in the files: rules and deduplication are not applied.
"""

import hashlib
import io
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from data_prep import inputs
from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig, DecontaminateConfig, PrepConfig, SourceConfig
from data_prep.corpus import RESOLVED_FILE
from data_prep.decontaminate.search import RULE, Finder, Tables
from data_prep.dedup.minhash import fold, shingle_hashes, shingle_lengths
from data_prep.documents import ReadStats, read_piece
from data_prep.pieces import batches
from data_prep.types import Document, InputFile
from pipeline.config.load import load
from pipeline.errors import DataError
from pipeline.runtime.files import write_json_atomic

logger = logging.getLogger(__name__)

_PIECE_BYTES = 64_000_000


def write_overlap(rows: Path, corpus: list[str], config: DecontaminateConfig, out: Path) -> None:
    """Count the shared rows of a file of rows and write the numbers as JSON.

    A count of the same rows and settings, of files of the same sizes and times, is kept.

    Args:
        rows: a line a row: {"set": name, "texts": [...]}.
        corpus: inputs as a source takes them, or folders of datasets, which stand for their inputs.
        config: lengths of n-grams and of short texts.
        out: the file to write: settings, documents read, a key of all that was counted, and of
            each set `rows`, `shared` and `too_short`, rows of which no text is long enough to
            search for.

    Raises:
        DataError: the corpus has no documents, or the file of rows is not as it should be.
    """
    content = rows.read_bytes()
    try:
        lines = [line for line in content.decode().split("\n") if line.strip()]
        read = [(row["set"], row["texts"]) for row in map(json.loads, lines)]
        if not all(isinstance(t, list) and all(isinstance(x, str) for x in t) for _, t in read):
            raise TypeError("texts is not a list of strings")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{rows}: {type(error).__name__}: {error}; expected lines of "
            '{"set": name, "texts": [...]}'
        ) from None
    sources, clean = _sources(corpus)
    listed = [(source, inputs.find(source).files, own) for source, own in sources]
    of = content, corpus, config, clean, listed, RULE
    key = hashlib.sha256(repr(of).encode()).hexdigest()
    if _key_of(out) == key:
        logger.info("%s is a count of these rows and files", out)
        return
    texts = {text: normalise(text, clean) for _, parts in read for text in parts}
    search = _Search(sorted(set(texts.values())), config)
    num_documents = 0
    for batch in batches(_documents(listed)):
        num_documents += len(batch)
        search.take([document["text"] for document in batch])
    if not num_documents:
        raise DataError(f"{', '.join(corpus)}: no document was found; give text or a dataset")
    verdicts = {text: search.verdict(plain) for text, plain in texts.items()}
    sets: dict[str, dict[str, int]] = defaultdict(lambda: {"rows": 0, "shared": 0, "too_short": 0})
    for name, parts in read:
        seen = [verdicts[text] for text in parts]
        sets[name]["rows"] += 1
        sets[name]["shared"] += True in seen
        sets[name]["too_short"] += all(verdict is None for verdict in seen)
    lengths = ("ngram", "ngram_cjk", "min_chars", "min_chars_cjk")
    counted = {"corpus": corpus, "key": key, **{name: getattr(config, name) for name in lengths}}
    write_json_atomic(out, {**counted, "documents": num_documents, "sets": sets})


def _key_of(out: Path) -> str | None:
    try:
        return str(json.loads(out.read_bytes())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sources(corpus: list[str]) -> tuple[list[tuple[SourceConfig, CleanConfig]], CleanConfig]:
    """Return the sources, each with how it is cleaned, and how rows are."""
    sources: list[tuple[SourceConfig, CleanConfig | None]] = []
    cleans: list[CleanConfig] = []
    for text in corpus:
        resolved = Path(text).expanduser() / RESOLVED_FILE
        if resolved.is_file():
            prep = load(PrepConfig, resolved).config
            sources += [(source, prep.clean_of(source)) for source in prep.sources]
            cleans += [prep.clean_of(source) for source in prep.sources]
        else:
            sources.append((SourceConfig(name="corpus", inputs=(text,)), None))
    if len({(clean.nfkc, clean.simplified) for clean in cleans}) > 1:
        raise DataError(
            f"{', '.join(corpus)}: the datasets clean text in different ways, and rows are cleaned "
            "as the corpus is; count them apart"
        )
    of_rows = cleans[0] if cleans else CleanConfig()
    return [(source, own or of_rows) for source, own in sources], of_rows


def _documents(
    listed: list[tuple[SourceConfig, tuple[InputFile, ...], CleanConfig]],
) -> Iterator[dict[str, str]]:
    for source, files, clean in listed:
        for piece in inputs.pieces(source, files, _PIECE_BYTES):
            logger.info("searching %s", ", ".join(file.name for file in piece.files))
            for item in read_piece(piece, clean, ReadStats()):
                if isinstance(item, Document):
                    yield {"text": normalise(item.text, clean)}


class _Search:
    """Tables of distinct texts, and which of their rows the corpus has shown so far."""

    def __init__(self, texts: Iterable[str], config: DecontaminateConfig) -> None:
        self._lengths = (config.ngram, config.ngram_cjk)
        tables = Tables(config, io.StringIO())
        tables.add_set("rows", batches({"place": "", "text": text} for text in texts))
        arrays = tables.arrays()
        self._ngrams, _, _, whole, letters = arrays
        self._is_found = np.zeros(len(self._ngrams) + len(whole), dtype=bool)
        self._rows_of_whole = {
            letters[begin:end].tobytes(): len(self._ngrams) + row
            for row, (_, _, begin, end) in enumerate(whole.tolist())
        }
        self._finder = Finder(arrays, config)

    def take(self, documents: list[str]) -> None:
        """Look up documents of the corpus."""
        for overlaps in self._finder.find(documents):
            for overlap in overlaps:
                self._is_found[overlap.rows] = True

    def verdict(self, text: str) -> bool | None:
        """Return whether a text is shared; None if it is too short to search for."""
        letters, _ = fold([text])
        [hashes] = shingle_hashes(letters, self._lengths, by_half=True)
        ends = np.arange(len(letters)) + shingle_lengths(letters, *self._lengths, by_half=True)
        hashes = hashes[ends <= len(letters)]
        if len(hashes):
            # Texts of equal n-grams share a row of the table.
            return bool(self._is_found[np.searchsorted(self._ngrams, hashes)].any())
        row = self._rows_of_whole.get(letters.tobytes())
        return None if row is None else bool(self._is_found[row])
