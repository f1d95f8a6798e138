"""Texts of evaluation sets in files of several forms.

An item is one text: every string in .json and .jsonl (values of any depth, not keys), every cell of
.tsv and .csv, every line of .txt. The encoding of a file is detected. A string without a space and
without a character of Thai, Chinese, Korean and the like is not an item: it is a label, an id or an
address.
"""

import csv
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.config import DecontaminateConfig, EvalSetConfig
from data_prep.inputs import COMPRESSED_SUFFIXES, matching_files, plain_name, refuse_changed
from data_prep.readers.encodings import decode, invalid_line, of_lines, storable
from data_prep.readers.text import detect_encoding, opened
from data_prep.types import InputFile
from pipeline.errors import DataError

SUFFIXES = (".jsonl", ".json", ".tsv", ".csv", ".txt")
Items = Iterator[tuple[str, str]]
Reading = Counter[str]
"""Kind of unreadable part -> number, filled while items are read."""
_LONGEST_CELL = 1 << 30
logger = logging.getLogger(__name__)


def find(config: DecontaminateConfig) -> dict[str, tuple[InputFile, ...]]:
    """List the files of every set, sorted by name; in folders, those with known suffixes."""
    return {chosen.name: _find(chosen) for chosen in config.sets}


def read(file: InputFile, reading: Reading) -> Items:
    """Yield (place, text) of every item of a file; unreadable parts are counted."""
    if not file.num_bytes:
        reading["empty files"] += 1
        return
    try:
        for place, text in _READERS[_suffix(file.path)](file, reading):
            if any(_parts_words(char) for char in text.strip()):
                yield f"{file.name}{place}", storable(text)
        refuse_changed(file)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}") from error


def _parts_words(char: str) -> bool:
    """Whether a character stands between words, or is of a script without spaces (Thai, Han)."""
    return (
        char.isspace()
        or "\u0e00" <= char < "\u10a0"  # Thai, Lao, Tibetan, Burmese
        or "\u1780" <= char < "\u1800"  # Khmer
        or char >= "\u2e80"
    )


def _find(chosen: EvalSetConfig) -> tuple[InputFile, ...]:
    owner = f"evaluation set {chosen.name!r}"
    files: dict[str, InputFile] = {}
    unreadable: list[str] = []
    for text in chosen.inputs:
        found = matching_files(owner, text, unreadable)
        others = [file.path for file, _ in found if _suffix(file.path) not in SUFFIXES]
        if others and len(found) == 1:
            raise DataError(f"{owner}: {others[0]} is of an unknown kind; {_KINDS}")
        if others:  # a set of parquet files with a description in JSON, say
            remark = "%s: %d files are not searched for, such as %s; %s"
            logger.warning(remark, owner, len(others), ", ".join(others[:3]), _KINDS)
        files = {file.path: file for file, _ in found if file.path not in others} | files
    if unreadable:
        raise DataError(
            f"{owner}: cannot be read: {'; '.join(unreadable[:3])}; repair or remove it"
        )
    if not files:
        raise DataError(f"{owner}: no usable file in {list(chosen.inputs)}; {_KINDS}")
    return tuple(sorted(files.values(), key=lambda file: (file.name, file.path)))


_KINDS = f"expected {', '.join(SUFFIXES)}, plain or with {', '.join(COMPRESSED_SUFFIXES)} behind"


def _suffix(path: str) -> str:
    return Path(plain_name(path)).suffix


def _lines(file: InputFile, reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield numbers from 1 and texts of all lines, without their ends."""
    encoding = detect_encoding(file.path) or "utf-8"
    with opened(file.path, encoding=encoding) as stream:
        encoding = of_lines(encoding)
        for number, raw in enumerate(stream.buffer, 1):
            line = decode(raw, encoding)
            if line is None:
                reading[invalid_line(encoding) + "s"] += 1
            else:
                yield number, line.rstrip("\r\n")
        if stream.problem:
            raise DataError(
                f"{file.path}: {stream.problem.reason} ({stream.problem}); its missing items "
                "could not be searched for: get the file again"
            )


def _txt(file: InputFile, reading: Reading) -> Items:
    for number, line in _lines(file, reading):
        yield f":{number}", line


def _tsv(file: InputFile, reading: Reading) -> Items:
    """Yield cells without quoting, as GLUE and CLUE have them."""
    for number, line in _lines(file, reading):
        for column, cell in enumerate(line.split("\t"), 1):
            yield f":{number}/{column}", cell


def _csv(file: InputFile, reading: Reading) -> Items:
    csv.field_size_limit(_LONGEST_CELL)
    lines = (line + "\n" for _, line in _lines(file, reading))
    rows = csv.reader(lines, strict=True)
    try:
        for cells in rows:
            for column, cell in enumerate(cells, 1):
                yield f":{rows.line_num}/{column}", cell
    except csv.Error as error:
        raise DataError(
            f"{file.path}, line {rows.line_num}: not valid CSV ({error}); expected commas between "
            'cells and "" for a quote in a quoted cell; a tab-separated file needs the suffix .tsv'
        ) from error


def _json(file: InputFile, reading: Reading) -> Items:
    """Read one value per line if the first line is one by itself, or else one value in all."""
    lines = _lines(file, reading)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    try:
        json.loads(first[1])
    except (ValueError, RecursionError):
        text = "\n".join(line for _, line in chain([first], lines))
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{file.path}: neither JSON ({error}, counted from line {first[0]}) nor a JSON "
                "value on the first line; expected one value, or one a line: correct the file, or "
                "leave it out of decontaminate.sets"
            ) from error
        yield from _strings(value, "")
        return
    yield from _values(file, chain([first], lines), reading)


def _values(file: InputFile, lines: Iterable[tuple[int, str]], reading: Reading) -> Items:
    bad, good = 0, 0
    for number, line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            bad += 1
            continue
        good += 1
        yield from _strings(value, f":{number}")
    if bad and not good:
        raise DataError(
            f"{file.path}: none of {bad} lines is JSON; expected a value a line, or a suffix other "
            "than .jsonl"
        )
    if bad:
        reading["lines that are no JSON"] += bad


def _strings(value: Any, place: str) -> Items:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _strings(inner, f"{place}/{number}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(inner, f"{place}/{key}")


_READERS = {
    ".jsonl": lambda file, reading: _values(file, _lines(file, reading), reading),
    ".json": _json,
    ".tsv": _tsv,
    ".csv": _csv,
    ".txt": _txt,
}
