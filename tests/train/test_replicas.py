"""Digests of bits against plain Python, and who is said to differ."""

import numpy as np
import pytest
import torch

from pipeline.train.replicas import _aligned, _digests, _storages, differences, digest

NAMES = ["embedding", "norm", "head"]
HOSTS = ["a", "a", "b", "b"]


def _words(size: int) -> torch.Tensor:
    drawn = np.random.default_rng(size).integers(-(2**63), 2**63, size, dtype=np.int64)
    return torch.from_numpy(drawn)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 10_000])
def test_digest_is_that_of_plain_python(size: int) -> None:
    words = _words(size)
    row, column = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    expected, whole = 0, size // 4096 * 4096
    for place, word in enumerate(words.tolist()):
        if place < whole:
            i, j = divmod(place, 4096)
            expected += word * ((2 * i + 1) * row + 2 * j * column)
        else:
            expected += word * (2 * (place - whole) + 1) * column
    assert digest(words).item() % 2**64 == expected % 2**64


def test_any_flipped_bit_and_swapped_words_change_a_digest() -> None:
    words = _words(10_000)
    before = digest(words).item()
    for place in (0, 1, 4095, 4096, 8191, 8192, 9999):
        for bit in range(64):
            changed = words.clone()
            changed[place] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
            assert digest(changed).item() != before
    for one, other in ((0, 1), (0, 4096), (1, 4097), (5, 9000), (9000, 9001)):
        changed = words.clone()
        changed[[one, other]] = words[[other, one]]
        assert digest(changed).item() != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0, 1, 7, 4099])
def test_every_byte_of_views_and_their_memory_counts(dtype: torch.dtype, size: int) -> None:
    flat = torch.randn(size + 3, generator=torch.Generator().manual_seed(size)).to(dtype)
    views = [flat[:3], flat[3:]]
    named, whole = _digests(map(_aligned, views)), _digests(_storages(views))
    for place in range(0, size + 3, 501):
        flat.view(torch.int16)[place] ^= 1
        assert _digests(_storages(views)) != whole
        assert _digests(map(_aligned, views)) != named
        flat.view(torch.int16)[place] ^= 1
    assert (_digests(map(_aligned, views)), _digests(_storages(views))) == (named, whole)


def test_most_ranks_are_right() -> None:
    right, wrong = (1, 2, 3), (1, 7, 8)
    assert differences(NAMES, [right] * 4, HOSTS) == []
    assert differences(NAMES, [right, right, wrong, right], HOSTS) == [
        "rank 2 on b has another norm and 1 more of 3 tensors than 3 ranks"
    ]
    found = differences(NAMES, [right, wrong, (1, 2, 9), right], HOSTS)
    names = [text.split(" has")[0] for text in found]
    assert names == [f"rank {n} on {HOSTS[n]}" for n in range(4)]
    assert all("no majority" in text for text in found)
    assert "rank 2 on b has another head than" in found[2]
