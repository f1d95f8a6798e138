"""Beginnings of rejected texts, which show people the effect of a rule.

They come from the first pieces that have them, so they are the same on every rerun. The number of
pieces and bytes to read is limited, so that it takes seconds for any corpus; a rare reason may have
no sample.
"""

import base64
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.clean.normalise import normalise
from data_prep.config import PrepConfig
from data_prep.counts import INGEST_STAGES
from data_prep.filters.mask import Masker
from data_prep.pieces import read_lines
from data_prep.readers.items import storable
from data_prep.stage import Done

Mask = Callable[[str], str]

SAMPLES = 3
"""Number for one reason, from different sources if there are enough."""
SAMPLE_CHARS = 200
_MAX_PIECES = 8  # of a source
_MAX_BYTES = 8_000_000  # of a piece
_WINDOW_CHARS = 4000
# Personal data that the end of the window cuts through is not recognised; the longest number or
# local part of an address is shorter than this.
_UNSURE_CHARS = 256
_ESCAPED = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|([nrtbf])|([\"/\\]))")


def collect(
    config: PrepConfig,
    pieces: Sequence[tuple[str, Path]],
    ingested: Sequence[Done],
    rejected: dict[str, dict[str, list[int]]],
) -> dict[str, list[dict[str, str]]]:
    """Collect samples of every reason.

    Args:
        config: settings of masking.
        pieces: source and `.rejected.jsonl.zst` of every piece.
        ingested: records of stage ingest, one per piece.
        rejected: source -> reason -> [documents, bytes] of ingestion and filters.

    Returns:
        Reason -> up to `SAMPLES` of {"source", "id", "text"}.
    """
    mask = _mask(config)
    samples: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    wanted = _wanted(rejected)
    num_read = Counter[str]()
    for (source, path), done in zip(pieces, ingested, strict=True):
        here = _reasons(done) & wanted[source].keys()
        if not here or num_read[source] == _MAX_PIECES:
            continue
        num_read[source] += 1
        for record in _records(path):
            reason = record["reason"]
            if reason not in wanted[source]:
                continue
            text = _beginning(record, reason in done.result["ingest"]["rejected"], mask)
            samples[reason].append({"source": source, "id": mask(record["id"]), "text": text})
            wanted[source][reason] -= 1
            wanted[source] += Counter()  # drops reasons that are complete
            if not here & wanted[source].keys():
                break
    return dict(sorted(samples.items()))


def _mask(config: PrepConfig) -> Mask:
    if not config.filters.mask.enabled:
        return lambda text: text
    masker = Masker(config.filters.mask)
    return lambda text: masker(text)[0]


def _wanted(rejected: dict[str, dict[str, list[int]]]) -> dict[str, Counter[str]]:
    """Divide the samples of each reason among the sources that lose most text for it."""
    sources_of: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for source, reasons in rejected.items():
        for reason, (_, num_bytes) in reasons.items():
            sources_of[reason].append((num_bytes, source))
    wanted = {source: Counter[str]() for source in rejected}
    for reason, sizes in sources_of.items():
        largest = [source for _, source in sorted(sizes, key=lambda size: (-size[0], size[1]))]
        for number in range(SAMPLES):
            source = largest[number % min(len(largest), SAMPLES)]
            wanted[source][reason] += 1
    return wanted


def _reasons(done: Done) -> set[str]:
    return {reason for stage in INGEST_STAGES for reason in done.result[stage]["rejected"]}


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Read rejected documents from the beginning of a file."""
    left = _MAX_BYTES
    for record in read_lines(path):
        yield record
        left -= len(record.get("raw", "")) + len(record.get("raw_base64", ""))
        if left < 0:
            return


def _beginning(record: dict[str, Any], is_unread: bool, mask: Mask) -> str:
    """Return the beginning of a document as a page may show it.

    Args:
        record: a line of a `.rejected.jsonl.zst`.
        is_unread: the raw text may be a line of JSON.
        mask: replaces personal data.
    """
    raw = record.get("raw")
    if raw is None:
        raw = base64.b64decode(record["raw_base64"]).decode(errors="replace")
    text = raw[:_WINDOW_CHARS]
    if is_unread:
        # In `tel:\n13812345678` as JSON writes it, the n would hide the beginning of a number.
        text = _ESCAPED.sub(_unescaped, text)
    text = mask(normalise(storable(text)))
    # Spaces replace the line breaks within numbers, so the mask finds more of them now.
    text = mask(" ".join(text.split()))
    if len(raw) > _WINDOW_CHARS:
        text = text[:-_UNSURE_CHARS]
    return text if len(text) <= SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]}…"


def _unescaped(match: re.Match[str]) -> str:
    code, space, char = match.groups()
    return chr(int(code, 16)) if code else " " if space else str(char)
