"""Traditional Chinese to Simplified, by OpenCC's dictionaries of phrases and characters.

Most text is converted by OpenCC's `t2s`, which leaves text that is Simplified already as it is. Of
a text that is Traditional (at least a twentieth of its Han characters change) it is `tw2s`, which
also knows Taiwan's 著 for 着; on Simplified text that would turn 原著 into 原着.
"""

import functools

import numpy as np
import opencc

_TRADITIONAL_SHARE = 0.05
_MOST_ROUNDS = 10  # of real texts none needed more than three


def to_simplified(text: str) -> str:
    """Converts a text; what is converted stays as it is when it is converted again."""
    if text.isascii():
        return text
    # Phrases that only appear by a conversion are converted by the next.
    for _ in range(_MOST_ROUNDS):
        if (converted := _once(text)) == text:
            break
        text = converted
    return text


def _once(text: str) -> str:
    converted: str = _converter("t2s").convert(text)
    if converted == text or not _is_traditional(text, converted):
        return converted
    taiwanese: str = _converter("tw2s").convert(text)
    return taiwanese


@functools.cache
def _converter(name: str) -> opencc.OpenCC:
    return opencc.OpenCC(name)


def _is_traditional(text: str, converted: str) -> bool:
    if len(converted) != len(text):
        return False
    before, after = (np.frombuffer(t.encode("utf-32-le"), dtype="<u4") for t in (text, converted))
    han = np.count_nonzero((before >= 0x3400) & (before < 0xA000))
    return int(np.count_nonzero(before != after)) >= max(1.0, _TRADITIONAL_SHARE * han)
