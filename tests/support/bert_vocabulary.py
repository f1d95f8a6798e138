"""A small vocab.txt laid out like Google's: [PAD] first, unused pieces, then the other specials."""

import re
import string
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

UNUSED = [f"[unused{number}]" for number in range(1, 100)]
SPECIALS = ["[PAD]", *UNUSED, "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<S>", "<T>"]
IDS = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}


def rows(texts: Iterable[str], *, words: int = 500, lowercase: bool = True) -> list[str]:
    """Pieces by id: specials, single characters, commonest words, and all of them with ##.

    Characters that are there less than 3 times have no piece, so that text has unknown words;
    digits and punctuation of ASCII always have one.
    """
    text = "\n".join(texts)
    text = text.lower() if lowercase else text
    counts = Counter(re.findall(r"\S", text))
    letters = sorted({*(c for c, n in counts.items() if n > 2), *string.punctuation, *"0123456789"})
    common = [word for word, _ in Counter(re.findall(r"[a-zA-Z]+", text)).most_common(words)]
    plain = list(dict.fromkeys([*letters, *common]))
    return [*SPECIALS, *plain, *(f"##{piece}" for piece in plain)]


def write(path: Path, pieces: list[str]) -> Path:
    """One piece a line, as published."""
    path.write_bytes("".join(f"{piece}\n" for piece in pieces).encode())
    return path
