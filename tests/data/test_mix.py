"""Sources in their shares, evenly, at any point of the run."""

from fractions import Fraction

import numpy as np
import pytest

from pipeline.config.data import MixConfig
from pipeline.data.format import Source
from pipeline.data.run_order import Mix, weights
from pipeline.errors import ConfigError

AMOUNTS = {"one": [7], "two": [3, 1], "far apart": [1, 1_000_000], "five": [5, 40, 3, 900, 52],
           "twenty equal": [1] * 20, "twenty": [2**k for k in range(20)],
           "twenty alike": [1000 + 7 * k % 50 for k in range(20)]}  # fmt: skip


@pytest.mark.parametrize("name", AMOUNTS)
@pytest.mark.parametrize("first", [0, 12_345_678_901])
def test_shares_hold_to_within_two_sequences_everywhere(name: str, first: int) -> None:
    amounts = [Fraction(a) for a in AMOUNTS[name]]
    mix, length = Mix(amounts), 70_000  # beyond what is looked at together
    parts = mix.parts(first, length)
    labels = np.full(length, -1)
    for source, part in enumerate(parts):
        assert (labels[part.places] == -1).all()
        labels[part.places] = source
    for source, (amount, part) in enumerate(zip(amounts, parts, strict=True)):
        before = part.first + np.cumsum(np.append(0, labels == source))
        share = float(amount / sum(amounts))
        # The whole part by fractions: first * share has more digits than a float.
        whole = int(first * amount / sum(amounts))
        rest = float(first * amount / sum(amounts) - whole)
        error = (before - whole) - (rest + np.arange(length + 1) * share)
        assert np.abs(error).max() < 2


@pytest.mark.parametrize("name", AMOUNTS)
def test_counts_parts_and_positions_agree(name: str) -> None:
    mix = Mix([Fraction(a) for a in AMOUNTS[name]])
    parts = mix.parts(0, 500)
    for first in (0, 1, 3, 100, 499):
        for count in (0, 1, 7, 200):
            for source, part in enumerate(mix.parts(first, count)):
                assert part.first == mix.counts(first)[source]
                found = part.first + len(part.places)
                assert found == mix.counts(first + count)[source]
    for source, part in enumerate(parts):
        for number, place in enumerate(part.places.tolist()):
            assert mix.position(source, number) == place


def test_weights_are_the_datasets_or_the_runs() -> None:
    sources = [Source("web", 1.0), Source("wiki", 0.1), Source("book", 2.0)]
    assert weights(sources, []) == [1, Fraction(1, 10), 2]
    mix = [MixConfig(source="wiki", weight=3.5), MixConfig(source="web", weight=0.0)]
    assert weights(sources, mix) == [0, Fraction(7, 2), 2]


@pytest.mark.parametrize(("mix", "message"), [
    ([("wikis", 1.0)], r"data\.mix\.0\.source = 'wikis'.*one of 'web', 'wiki'"),
    ([("web", 1.0), ("web", 2.0)], r"data\.mix\.1\.source = 'web' is given twice"),
    ([("web", 0.0), ("wiki", 0.0)], "leaves no source"),
])  # fmt: skip
def test_a_mix_that_does_not_fit_is_refused(mix: list[tuple[str, float]], message: str) -> None:
    given = [MixConfig(source=source, weight=weight) for source, weight in mix]
    with pytest.raises(ConfigError, match=message):
        weights([Source("web", 1.0), Source("wiki", 1.0)], given)
