"""Texts of two languages, and copies of them with edits.

English is Python's own help, real prose. Chinese is synthetic: words of one to four characters, a
fixed vocabulary drawn by Zipf's law, so documents share words as real ones do, but no phrases.
"""

import pydoc_data.topics

import numpy as np

from data_prep.dedup.minhash import SignatureSettings, fold


def chinese(rng: np.random.Generator, documents: int) -> list[str]:
    """Documents of 150 to 800 words."""
    characters = [chr(point) for point in rng.permutation(np.arange(0x4E00, 0x9FA0))[:1000]]
    weight = 1 / np.arange(1, 1001)
    lengths = rng.choice([1, 2, 3, 4], 20_000, p=[0.1, 0.6, 0.15, 0.15])
    letters = iter(rng.choice(1000, int(lengths.sum()), p=weight / weight.sum()))
    words = ["".join(characters[next(letters)] for _ in range(length)) for length in lengths]
    rank = 1 / np.arange(1, 20_001)
    texts = []
    for size in rng.integers(150, 800, documents):
        chosen = [words[i] for i in rng.choice(20_000, size, p=rank / rank.sum())]
        texts.append("".join(f"{word}，" if rng.random() < 0.1 else word for word in chosen))
    return texts


def english() -> list[str]:
    """Parts of about 1,000 characters of Python's help."""
    texts = []
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        part = ""
        for paragraph in topic.split("\n\n"):
            part += paragraph + "\n\n"
            if len(part) > 1000:
                texts.append(part)
                part = ""
    return texts


def mixed(rng: np.random.Generator, documents: int) -> list[str]:
    """Chinese with English and code in it: 15% to 60% of the letters are Latin."""
    quoted = iter(english()[:documents])
    texts = []
    for text in chinese(rng, documents):
        other, cuts = next(quoted), sorted(rng.integers(0, len(text), 3).tolist())
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        runs = np.array_split(np.arange(int(rng.integers(200, 900))), 3)
        inserted = [other[run[0] : run[-1] + 1] for run in runs]
        pairs = zip(parts, [*inserted, ""], strict=True)
        texts.append("\n".join(part for pair in pairs for part in pair))
    return texts


def edited(text: str, rng: np.random.Generator, run: int, share: float = 0.1) -> str:
    """A copy with `share` of its characters edited, `run` in a row.

    A third each is replaced, deleted, and preceded by as many characters from elsewhere.
    """
    pieces, position = [], 0
    begin = share / run / (1 - share + share / run)  # so that `share` of the characters is touched
    while position < len(text):
        if rng.random() >= begin:
            pieces.append(text[position])
            position += 1
            continue
        new = "".join(text[i] for i in rng.integers(0, len(text), run))
        pieces.append((new, "", new + text[position : position + run])[rng.integers(3)])
        position += run
    return "".join(pieces)


def exact_shingles(text: str, settings: SignatureSettings) -> set[str]:
    """By the definition, without hashes."""
    letters = "".join(map(chr, fold([text])[0].tolist()))
    found = set()
    for start, letter in enumerate(letters):
        length = settings.ngram_cjk if letter >= "\u2e80" else settings.ngram
        if start + length <= len(letters):
            found.add(letters[start : start + length])
    return found


def exact_jaccard(first: set[str], other: set[str]) -> float:
    return len(first & other) / len(first | other)
