"""What the fused kernels' dropout keeps, from its definition and in plain Python."""

import numpy as np

_WORD = 0xFFFFFFFF


def kept_by_rule(seed: int, rows: int, columns: int, dropout: float, head: int = 0) -> np.ndarray:
    """(rows, columns) bool: Philox4x32-7 for each row, then MurmurHash3's finaliser, keyed."""
    kept = np.zeros((rows, columns), bool)
    steps = np.arange(columns, dtype=np.uint64) * 0x9E3779B9
    for row in range(rows):
        c, key = [row, head, 0, 0], [seed & _WORD, seed >> 32]
        for _ in range(7):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ key[0], b & _WORD, (a >> 32) ^ c[3] ^ key[1], a & _WORD]
            key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
        bits = (c[0] + steps) & _WORD
        bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _WORD
        bits ^= c[1]
        bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _WORD
        kept[row] = (bits >> 8) >= round(dropout * (1 << 24))
    return kept
