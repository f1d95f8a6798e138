"""Measurements of a tokenizer on the text of each source: to choose one, and for the datasheet.

They are taken on a sample of every source, as far as possible from text that the tokenizer was not
trained on. Lengths are those of documents as the shards have them, in characters (code points),
UTF-8 bytes and tokens without [CLS] and [SEP].
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.pieces import Pieces
from data_prep.tokenizer.sample import Sample
from data_prep.words import HAN
from pipeline.tokenizer.sentencepiece import Spelling
from pipeline.tokenizer.wordpiece import CONTINUES, DatasetTokenizer

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_LISTED = 10
_CONTEXT = 20


@dataclass
class _Measured:
    """Counts of one source."""

    lengths: list[int] = field(default_factory=list)
    characters: int = 0
    num_bytes: int = 0
    unknown: int = 0
    byte_pieces: int = 0
    unknown_texts: Counter[str] = field(default_factory=Counter)
    line_characters: int = 0
    same_characters: int = 0
    differences: Counter[str] = field(default_factory=Counter)
    """First character that does not come back -> lines."""
    examples: dict[str, tuple[str, str]] = field(default_factory=dict)
    """That character -> (normalised text, decoded text) around it."""


def measure(
    tokenizer: DatasetTokenizer, pieces: Pieces, parts: list[Sample], training: list[Sample]
) -> dict[str, Any]:
    """Measure a tokenizer.

    Args:
        tokenizer: the dataset's.
        pieces: all pieces.
        parts: sample of each source to measure on.
        training: the tokenizer's training sample, in the same order of sources.

    Returns:
        {"vocabulary": ..., "sources": {name: ...}}, plain values.
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
    into.characters += len(text)
    into.num_bytes += len(text.encode())
    into.byte_pieces += int(np.count_nonzero(tokenizer.is_byte[ids]))
    unknown = np.flatnonzero(ids == tokenizer.unk_id)
    into.unknown += len(unknown)
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
    into.line_characters += len(expected)
    if decoded == expected:
        into.same_characters += len(expected)
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
    tokens = sum(measured.lengths)
    lengths = sorted(measured.lengths)
    quantiles = {
        f"{share:g}": lengths[round(share * (len(lengths) - 1))] for share in _QUANTILES if lengths
    }
    differences = []
    for character, count in _most(measured.differences):
        text, decoded = measured.examples[character]
        differences.append(
            {"character": character, "lines": count, "text": text, "decoded": decoded}
        )
    return {
        "documents": len(lengths),
        "characters": measured.characters,
        "bytes": measured.num_bytes,
        "tokens": tokens,
        "characters_per_token": _ratio(measured.characters, tokens),
        "bytes_per_token": _ratio(measured.num_bytes, tokens),
        "tokens_per_document": quantiles,
        "unknown_share": _ratio(measured.unknown, tokens),
        "byte_piece_share": _ratio(measured.byte_pieces, tokens),
        "unknown_texts": _most(measured.unknown_texts),
        "round_trip_share": _ratio(measured.same_characters, measured.line_characters),
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
        "bytes": int(np.count_nonzero(tokenizer.is_byte)),
        "pieces": len(pieces),
        "unused_in_sample_share": _ratio(int(np.count_nonzero(~used[ids])), len(ids)),
        "single_character_share": _ratio(sum(len(piece) == 1 for piece in pieces), len(pieces)),
        "scripts": dict(scripts),
        "longest": sorted(pieces, key=lambda piece: (-len(piece), piece))[:_LISTED],
    }


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
