"""Tokens whose embeddings are near each other: what MacBERT-like masking puts in place of [MASK].

MacBERT (Cui et al. 2020, section 3.2) took similar words from word2vec, by the toolkit Synonyms;
here they come from a model's own embeddings, token by token.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.data.format import read_index
from pipeline.errors import ConfigError
from pipeline.use.folder import load_trained

_MARKS = ("##", " ")
"""Beginnings of pieces that continue a word (WordPiece), or begin one (all others)."""
_ROWS = 1024
"""Tokens that are compared with all others at once."""


def write_table(source: Path, dataset: str, out: Path, top: int) -> int:
    """Write the nearest tokens of each token that text can have; return how many those are.

    Args:
        source: run folder, or model folder.
        dataset: folder of the dataset whose vocabulary the model has.
        out: file to write, for `data.similar`.
        top: tokens a token.

    Raises:
        ConfigError: the model is of another vocabulary, or `top` is not 1 or more.
        PostnormError: the model or the dataset cannot be read.
    """
    trained, vocabulary = load_trained(source), read_index(dataset).vocabulary
    size = trained.model.config.vocab_size or 0
    if size < vocabulary.size or top < 1:
        raise ConfigError(
            f"{source} has {size} tokens, {dataset} {vocabulary.size}, and --top is {top}: "
            "expected the model of that vocabulary, and 1 or more"
        )
    tokenizer = trained.require_tokenizer()
    table = nearest(
        trained.model.encoder.token_embedding.weight.detach().numpy(),
        [str(tokenizer.piece(token)) for token in range(vocabulary.size)],
        vocabulary.in_text,
        top,
    )
    with out.open("wb") as file:
        np.save(file, table)
    return len(vocabulary.in_text)


def nearest(
    vectors: npt.NDArray[np.float32], pieces: Sequence[str], ids: npt.NDArray[np.int64], top: int
) -> npt.NDArray[np.int32]:
    """Return the `top` nearest of `ids` for each of them, (pieces, top); -1 in all other rows.

    Tokens that begin a word are compared with such tokens only, and those within words likewise.

    Args:
        vectors: (V, E) embeddings, of which the mean is taken away.
        pieces: text of each token, with the mark of its place in a word.
        ids: (n,) tokens that are compared.
        top: at most so many; rows of smaller groups end with -1.
    """
    table = np.full((len(pieces), top), -1, np.int32)
    centred = vectors[ids] - vectors[ids].mean(0)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    marked = np.array([pieces[token].startswith(_MARKS) for token in ids])
    for group in (np.flatnonzero(marked), np.flatnonzero(~marked)):
        count = min(top, len(group) - 1)
        if count < 1:
            continue
        for at in range(0, len(group), _ROWS):
            rows = group[at : at + _ROWS]
            cosines = centred[rows] @ centred[group].T
            cosines[np.arange(len(rows)), at + np.arange(len(rows))] = -np.inf  # itself
            best = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
            table[ids[rows], :count] = ids[group[best]]
    return table
