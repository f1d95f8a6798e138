"""How much of the labels of pairs is told by lengths and ends alone.

    python -m tests.support.pair_leaks           # of random words: short documents and articles
    python -m tests.support.pair_leaks DATASET   # of text

prints one JSON line for each kind of pairs: the share of the more frequent label among the held-out
pairs, and of how many of them a classifier tells the label that has learned from as many others.
"""

import json
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pipeline.config.objective import PairKind
from pipeline.data.format import SEP_ID, Vocabulary, read_index
from pipeline.data.order import Locations
from pipeline.data.packing import PackedSequences, pack
from pipeline.data.pairs import PairRule, Text, lay_out_pairs, sentence_marks, sentence_starts
from pipeline.data.random import Purpose
from pipeline.data.reader import Block, BlockReader
from pipeline.tokenizer.load import load_tokenizer

_WORDS, _PARTS = [f" w{n}" for n in range(200)], [f"p{n}" for n in range(100)]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", '"', " W", *_WORDS, *_PARTS]
"""The first word of a sentence is " W", as if by a capital; a part of a word has no space."""
SENTENCES = {"short": (2, 8), "articles": (20, 200)}
"""Fewest and most sentences of a document; each has 5 to 30 tokens."""
_BLOCK_TOKENS = 1_000_000


def prose(corpus: str, seed: int) -> Block:
    """A block of random words."""
    rng = np.random.default_rng(seed)
    fewest, most = SENTENCES[corpus]
    in_document = rng.integers(fewest, most + 1, 2 * _BLOCK_TOKENS // (17 * (fewest + most)))
    lengths = rng.integers(5, 31, in_document.sum())
    stops = np.cumsum(lengths)
    starts = stops - lengths
    tokens = rng.integers(PIECES.index(" w0"), len(PIECES), stops[-1])
    tokens[stops - 1] = PIECES.index(".") + (rng.random(len(stops)) < 0.1)
    # Some sentences end with a quote behind their mark, and the last of some documents with none.
    quoted = stops[rng.random(len(stops)) < 0.05]
    tokens[quoted - 2], tokens[quoted - 1] = PIECES.index("."), PIECES.index('"')
    tokens[starts] = PIECES.index(" W")
    ends = stops[np.cumsum(in_document) - 1]
    tokens[ends[rng.random(len(ends)) < 0.1] - 1] = PIECES.index(" w0")
    begins_word = np.array([piece.startswith(" ") for piece in PIECES])[tokens]
    return Block(tokens.astype(np.uint16), ends, np.packbits(begins_word), b"")


def _looks(pieces: Sequence[str]) -> np.ndarray:
    """(V,) what a token is: a mark (1 or 2), 3 begins like a sentence, 4 begins a word, 0 else."""
    marks = sentence_marks(pieces)
    other = [3 if p.istitle() and p[0] == " " else 4 if p[:1] == " " else 0 for p in pieces]
    return np.where(marks, marks, other)


def shown(
    block: Block, pieces: Sequence[str], seq_len: int, kind: PairKind, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """What (p, 25) lengths and ends the pairs of a block have, and their labels, (p,)."""
    rule = PairRule(kind, seed, Purpose.PAIRS, sentence_marks(pieces))
    packing = pack(block.doc_ends, seq_len, 3)
    rows = np.arange(packing.num_sequences)
    locations = Locations(0 * rows, 0 * rows, rows, rows, rows < 0)
    slots = PackedSequences.empty(len(rows), seq_len, pairs=True)
    text = Text.of(block, sentence_starts(block, rule.marks))
    lay_out_pairs(slots, rows, text, packing, locations, Vocabulary(len(pieces)), rule)
    tokens, labels = slots.tokens.reshape(-1), slots.pairs.labels.reshape(-1)
    first, seps = np.flatnonzero(labels >= 0), np.flatnonzero(tokens == SEP_ID)
    middle, last = (seps[np.searchsorted(seps, first) + place] for place in (0, 1))
    one, other = middle - first - 1, last - middle - 1
    lengths = [one, other, one + other, one + other == seq_len - 3, one / (one + other)]
    looks = _looks(pieces)[tokens]
    ends = [looks[at] == look for at in (first + 1, middle - 1, middle + 1, last - 1)
            for look in range(5)]  # fmt: skip
    return np.stack([*lengths, *ends], axis=1).astype(float), labels[first]


def told(parts: Iterable[tuple[np.ndarray, np.ndarray]], num_pairs: int) -> dict[str, float]:
    """Which shares of the second half of some pairs classifiers of the first half tell."""
    inputs, labels = zip(*parts, strict=True)
    order = np.random.default_rng(0).permutation(sum(map(len, labels)))[:num_pairs]
    assert len(order) == num_pairs
    x, y = np.concatenate(inputs)[order], np.concatenate(labels)[order]
    half = num_pairs // 2
    classifiers = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
        "boosting": GradientBoostingClassifier(n_estimators=40, subsample=0.3, random_state=0),
        "forest": RandomForestClassifier(40, min_samples_leaf=20, random_state=0),
    }
    shares = {"more_frequent": max(y[half:].mean(), 1 - y[half:].mean())}
    for name, classifier in classifiers.items():
        shares[name] = (classifier.fit(x[:half], y[:half]).predict(x[half:]) == y[half:]).mean()
    return {name: round(float(share), 3) for name, share in shares.items()}


def main(dataset: str | None) -> None:
    """Prints what lengths and ends tell of 40,000 pairs of 128 slots."""
    texts = {name: [prose(name, seed) for seed in range(6)] for name in SENTENCES}
    pieces: Sequence[str] = PIECES
    if dataset:
        index = read_index(dataset)
        tokenizer = load_tokenizer(index.folder / index.tokenizer_file)
        pieces = [tokenizer.piece(token) for token in range(index.vocab_size)]
        reader = BlockReader(index)
        texts = {dataset: [reader.block(row) for row in index.split_blocks("train")[:8].tolist()]}
    kinds: tuple[PairKind, ...] = ("nsp", "sop")
    for text, blocks in texts.items():
        for kind in kinds:
            parts = [shown(block, pieces, 128, kind, seed) for seed, block in enumerate(blocks)]
            print(json.dumps({"text": text, "kind": kind, **told(parts, 40_000)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2] or [None])
