"""Where words start: spaces and punctuation as the tokenizer knows them, jieba's words in Chinese.

Whole-word masking needs them; they are computed once, here, on the normalised text that the tokens
spell, and stored as one bit a token. The only door to rjieba (jieba's algorithm and dictionary in
Rust: a prefix dictionary, the most likely path, and an HMM for words that are not in it).
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import rjieba

from pipeline.data.tokenizer import Spelling

# CJK unified ideographs, extension A, compatibility ideographs, and the supplementary planes.
HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))


def word_starts(tokenizer: Spelling, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
    """Whether each token of a whole document starts a word; (n,) bool.

    A token that starts with a Chinese character starts a word where one of jieba's words starts;
    all other tokens are as `Tokenizer.word_starts` has them. A token that starts inside a word and
    reaches into the next belongs to the first.

    Args:
        tokenizer: that made the ids, or what it says of how they spell the document.
        ids: (n,) tokens of one document, from its begin.
    """
    starts = tokenizer.word_starts(ids)
    text, offsets = tokenizer.surface(ids)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    han = np.zeros(len(codes) + 1, dtype=bool)
    for first, last in HAN:
        han[:-1] |= (codes >= first) & (codes <= last)
    if not han.any():
        return starts
    begins = np.zeros(len(codes) + 1, dtype=bool)
    lengths: npt.NDArray[Any] = np.array([len(word) for word in rjieba.cut(text)])
    begins[np.cumsum(lengths)[:-1]] = True
    begins[0] = True
    chinese = han[offsets] & ~tokenizer.continues(ids)
    starts[chinese] = begins[offsets[chinese]]
    return starts
