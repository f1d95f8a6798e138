"""Philox against the published vectors, and the permutations drawn with it."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.data import masking
from pipeline.data.masking import philox_words
from pipeline.data.random import Purpose, permutation, philox
from tests.support.processes import python

# Random123, tests/kat_vectors: philox4x32 with 10 rounds.
KNOWN_ANSWERS = [((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
                 ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
                 ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
                  "d16cfe09 94fdcceb 5001e420 24126ea1")]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_by_its_paper(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == expected  # type: ignore[arg-type]
    compiled = philox_words(*map(np.uint64, counter + key))
    assert " ".join(f"{int(word):08x}" for word in compiled) == expected


@pytest.mark.usefixtures("processes")
def test_kernel_runs_where_no_compiled_code_can_be_kept(tmp_path: Path) -> None:
    shutil.copy(masking.__file__, tmp_path / "kernel.py")
    (tmp_path / "__pycache__").write_text("a file, so that no folder can be made")
    code = "import kernel, numpy as np; print(kernel.philox_words(*map(np.uint64, [0] * 6))[0])"
    environment = {"XDG_CACHE_HOME": "/dev/null/none", "PYTHONPATH": str(Path(__file__).parents[2])}
    assert int(python("-B", "-c", code, cwd=tmp_path, env=environment)) == 0x6627E8D5


def test_philox_of_arrays_is_that_of_each_element_and_uniform() -> None:
    positions, ids = np.arange(7)[None, :], np.array([3, 2**31])[:, None]
    together = philox((positions, 5, ids, 1), (9, 2))
    for row in range(2):
        for column in range(7):
            alone = philox((column, 5, int(ids[row, 0]), 1), (9, 2))
            assert [int(w[row, column]) for w in together] == [int(w) for w in alone]
    words = np.concatenate(philox((np.arange(50_000), 0, 0, 0), (1, 2)))
    counts = np.bincount(words >> 26, minlength=64)
    expected = len(words) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 30 < chi_square < 115  # 63 degrees of freedom: outside with p < 1e-4


def test_permutation_is_one_depends_on_everything_and_stays_for_good() -> None:
    base = {"seed": 1, "purpose": Purpose.BLOCK_ORDER, "epoch": 0, "window": 0, "stream": 0}
    first = permutation(1000, **base)  # type: ignore[arg-type]
    assert sorted(first.tolist()) == list(range(1000))
    np.testing.assert_array_equal(first, permutation(1000, **base))  # type: ignore[arg-type]
    others = [{"seed": 2}, {"epoch": 1}, {"window": 1}, {"stream": 1},
              {"purpose": Purpose.SEQUENCE_ORDER}]  # fmt: skip
    for other in others:
        assert (first != permutation(1000, **{**base, **other})).mean() > 0.9  # type: ignore[arg-type]
    # Written down once: a change here would reorder every run that is under way.
    assert permutation(10, seed=7, purpose=Purpose.BLOCK_ORDER, epoch=3).tolist() == PINNED


PINNED = [2, 0, 7, 6, 8, 1, 3, 9, 4, 5]
