"""The comparison of losses: all compute the same."""

import pytest

from benchmarks.vocabulary_loss import ON_CPU, Spec, compare, measure


def test_all_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.kernels.loss.LOGITS_BYTES", 0)  # put back afterwards
    spec = Spec(
        rows=60, width=16, vocabulary=300, dtype="float32", budget_mib=0.02, repeats=1, device="cpu"
    )
    found = compare(spec, measure)
    assert set(found) == set(ON_CPU)
    assert found["plain"]["ms_ratio"] == 1.0
    assert found["reference"]["loss"] == pytest.approx(found["plain"]["loss"], abs=2e-3)
