"""The prose of a technical text: what is left without code fences, tables and drawn lines.

Left out are
- code between two fences of ``` or ~~~ (CommonMark 0.31, section 4.5), with the fences; a fence
  without an end hides nothing, so that it cannot hide the rest of a text;
- rows of tables: lines that begin with |, and lines with | around a row such as `--- | :---:`;
- reference definitions, `[name]: target`;
- lines without a letter: rules, brackets, grids, rulers and rows of numbers. Chinese characters and
  kana are letters.

Rules that read prose count its lines and words, but take their shares of the whole text: a line
"Output:" before each of ten listings is not a repetition of half a document. What is left out may
repeat itself, but not nearly all of it (`repetition.max_duplicate_code_chars`).

Normalisation takes the spaces off the beginning of lines, so indented code is prose here.
"""

import re
from itertools import groupby

_FENCE = re.compile(r"(?:(?:[-*+>]|\d+[.)]) )*(```+|~~~+)")
_DELIMITERS = re.compile(r"[\s:|-]*-[\s:|-]*\|[\s:|-]*|[\s:|-]*\|[\s:|-]*-[\s:|-]*")
_LETTER = re.compile(r"[^\W\d_]")
_REFERENCE = re.compile(r"\[[^\]\n]+\]: ")


def prose(text: str) -> tuple[str, list[str]]:
    """Divide a normalised text into its prose, and its lines of code and tables with a letter.

    Returns:
        The lines that are prose, joined (the same object if all of them are); and the other lines.
    """
    lines = text.split("\n")
    stays = [not line or _is_prose(line) for line in lines]
    if "```" in text or "~~~" in text:
        _leave_out_fences(lines, stays)
    if "|" in text:
        _leave_out_tables(lines, stays)
    if all(stays):
        return text, []
    rest = [line for line, stay in zip(lines, stays, strict=True) if not stay]
    kept = "\n".join(line for line, stay in zip(lines, stays, strict=True) if stay)
    return kept, list(filter(_LETTER.search, rest))


def _is_prose(line: str) -> bool:
    return not line.startswith("|") and bool(_LETTER.search(line)) and not _REFERENCE.match(line)


def _leave_out_fences(lines: list[str], stays: list[bool]) -> None:
    fences = [(i, match[1]) for i, line in enumerate(lines) if (match := _FENCE.match(line))]
    opened: tuple[int, str] | None = None
    for i, fence in fences:
        if opened is None:
            opened = (i, fence)
        elif fence.startswith(opened[1]) and not lines[i].strip(" >").strip(fence[0]):
            stays[opened[0] : i + 1] = [False] * (i + 1 - opened[0])
            opened = None


def _leave_out_tables(lines: list[str], stays: list[bool]) -> None:
    """Leave out the runs of lines with | that have a row of dashes among them."""
    for has_bar, run in groupby(range(len(lines)), key=lambda i: "|" in lines[i]):
        rows = list(run)
        if has_bar and any(_DELIMITERS.fullmatch(lines[i]) for i in rows):
            for i in rows:
                stays[i] = False
