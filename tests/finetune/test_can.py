"""CAN against a case worked out by hand, and against its definition, one stack after the other."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.finetune.can import CanConfig, adjust, can_result, softmax, uncertainty
from pipeline.finetune.result import SeedRun, score_run
from pipeline.tasks.scores import Floats
from pipeline.tasks.task import load_task
from pipeline.tasks.types import PredictionRow

_HALF = np.array([0.5, 0.5])
_PAIR = "task: {kind: pair}\ndata: {train: [a], fields: {text: t, text_b: u}}\n"


def _by_definition(probabilities: Floats, prior: Floats, config: CanConfig) -> Floats:
    """Stack, power, column division, prior, row division; the last row is the answer."""
    top = min(config.top, probabilities.shape[1])
    is_confident = []
    for row in probabilities:
        best = sorted(row, reverse=True)[:top]
        shares = [value / sum(best) for value in best]
        entropy = -sum(share * math.log(share) for share in shares if share > 0)
        is_confident.append(entropy / math.log(top) < config.tau)
    confident = probabilities[is_confident]
    answers = probabilities.copy()
    for number, row in enumerate(probabilities):
        if is_confident[number]:
            continue
        stack = np.vstack([confident, row]) ** config.alpha
        stack = stack / np.diag(stack.mean(0)).diagonal()
        stack = stack @ np.diag(prior)
        stack = stack / stack.sum(1)[:, None]
        answers[number] = stack[-1]
    return answers


def test_a_case_by_hand() -> None:
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.55, 0.45]])
    adjusted, uncertain = adjust(probabilities, _HALF, CanConfig())
    assert uncertain.tolist() == [False, False, True]
    # Columns sum to 2.35 and 0.65: 0.55 / 2.35 = 0.2340, 0.45 / 0.65 = 0.6923, over their sum.
    assert adjusted[2] == pytest.approx([0.25265, 0.74735], abs=1e-5)
    assert np.array_equal(adjusted[:2], probabilities[:2])
    # The prior of the first class is 9/10: 0.23404 * 0.9 = 0.21064 against 0.06923.
    adjusted, _ = adjust(probabilities, np.array([0.9, 0.1]), CanConfig())
    assert adjusted[2] == pytest.approx([0.75263, 0.24737], abs=1e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "config", [CanConfig(), CanConfig(top=5, tau=0.5, alpha=2.5), CanConfig(top=2, alpha=0.5)]
)
@pytest.mark.parametrize("num_classes", [2, 4, 17])
def test_it_is_its_definition(seed: int, config: CanConfig, num_classes: int) -> None:
    rng = np.random.default_rng((seed, num_classes))
    probabilities = softmax(rng.normal(size=(60, num_classes)) * rng.uniform(0.1, 6, (60, 1)))
    prior = rng.dirichlet(np.ones(num_classes))
    adjusted, uncertain = adjust(probabilities, prior, config)
    assert 0 < uncertain.sum() < 60
    np.testing.assert_allclose(adjusted, _by_definition(probabilities, prior, config), rtol=1e-10)


def test_uncertainty_is_of_the_largest_renormalised() -> None:
    probabilities = np.array([[0.5, 0.5, 0, 0], [0.25] * 4, [1, 0, 0, 0], [0.3, 0.3, 0.3, 0.1]])
    assert uncertainty(probabilities, 3) == pytest.approx([math.log(2) / math.log(3), 1, 0, 1])
    assert uncertainty(probabilities, 2) == pytest.approx([1, 1, 0, 1])
    # More than there are classes: all of them.
    assert uncertainty(probabilities, 9) == pytest.approx(uncertainty(probabilities, 4))
    assert uncertainty(np.ones((2, 1)), 3).tolist() == [0, 0]
    assert softmax(np.array([[1e4, 0.0], [-1e4, -1e4]])).tolist() == [[1, 0], [0.5, 0.5]]


def test_without_uncertain_or_confident_rows_nothing_changes() -> None:
    confident, uncertain = np.array([[0.99, 0.01]] * 3), np.array([[0.5, 0.5], [0.45, 0.55]])
    for probabilities in (confident, uncertain):
        adjusted, _ = adjust(probabilities, np.array([0.9, 0.1]), CanConfig())
        assert np.array_equal(adjusted, probabilities)


def test_a_class_without_prior_is_not_chosen() -> None:
    probabilities = np.array([[0.97, 0.02, 0.01], [0.2, 0.2, 0.6], [0.0, 0.0, 1.0]])
    adjusted, uncertain = adjust(probabilities, np.array([0.5, 0.5, 0.0]), CanConfig(tau=0.8))
    assert uncertain.tolist() == [False, True, False]
    assert (adjusted[1, 2], adjusted[1].sum()) == (0, pytest.approx(1))
    # All of its mass lies on the class without prior: it stays.
    adjusted, uncertain = adjust(probabilities, np.array([0.5, 0.5, 0.0]), CanConfig(tau=0.0))
    assert uncertain.all()
    probabilities = np.array([[1.0, 0, 0, 0], [0, 0, 0.5, 0.5]])
    adjusted, uncertain = adjust(probabilities, np.array([1.0, 0, 0, 0]), CanConfig(top=2))
    assert uncertain.tolist() == [False, True]
    assert np.array_equal(adjusted, probabilities)


@pytest.mark.parametrize("values", [{"top": 1}, {"tau": 1.5}, {"tau": math.nan}, {"alpha": 0.0}])
def test_settings_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected 2 or more, a share"):
        CanConfig(**values)  # type: ignore[arg-type]


def _run(
    tmp_path: Path, rows: list[PredictionRow], prior: object = None, kind: str = "pair"
) -> SeedRun:
    path = tmp_path / "task.yaml"
    path.write_text(_PAIR.replace("pair", kind))
    config, labels = load_task(str(path)), ("0", "1")
    scored = score_run(config, labels, {"dev": rows})
    return SeedRun(tmp_path, 1, config, labels, {"prior": prior}, {"dev": rows}, scored)


def _rows(*pairs: tuple[str | None, float], times: int = 1) -> list[PredictionRow]:
    """Rows of a gold and the probability of class 1."""
    return [
        PredictionRow(str(i), gold, str(int(share > 0.5)), [math.log(1 - share), math.log(share)])
        for i, (gold, share) in enumerate(pairs * times)
    ]


def test_the_result_has_scores_before_and_after(tmp_path: Path) -> None:
    # The case by hand: the last row goes from class 0 to class 1, which is right.
    rows = _rows(("0", 0.1), ("0", 0.1), ("1", 0.45))
    body = can_result([_run(tmp_path, rows, {"0": 5, "1": 5})], CanConfig())
    assert body["settings"] == {"top": 3, "tau": 0.9, "alpha": 1.0}
    dev = body["splits"]["dev"]
    assert (dev["uncertain"], dev["changed"]) == (1, 1)
    assert dev["before"]["accuracy"] == pytest.approx(2 / 3)
    assert (dev["after"]["accuracy"], dev["shift_confident"]) == (1.0, 0.5)
    assert dev["shift_gold"] == pytest.approx(1 / 6)
    assert dev["difference"]["mean"] == pytest.approx(1 / 3)


def test_the_difference_has_an_interval_over_rows_and_seeds(tmp_path: Path) -> None:
    # Of 200 rows 10 become right and 4 wrong in one seed, 8 and 4 in the other.
    def of(seed: int, right: int, wrong: int) -> SeedRun:
        rows = [*_rows(("0", 0.1), times=200 - right - wrong), *_rows(("1", 0.45), times=right),
                *_rows(("0", 0.45), times=wrong)]  # fmt: skip
        return replace(_run(tmp_path, rows, {"0": 5, "1": 5}), seed=seed)

    [one, two] = ((10, 4), (8, 4))
    alone = can_result([of(1, *one)], CanConfig())["splits"]["dev"]["difference"]
    assert alone["mean"] == pytest.approx(6 / 200)
    # A row's difference is 1, -1 or 0; the mean of 200 is nearly normal.
    half = 1.96 * math.sqrt((14 / 200 - (6 / 200) ** 2) / 200)
    assert alone["method"] == "rows"
    assert alone["high"] - alone["low"] == pytest.approx(2 * half, rel=0.1)
    both = can_result([of(1, *one), of(2, *two)], CanConfig())["splits"]["dev"]["difference"]
    assert both["mean"] == pytest.approx(5 / 200)
    assert both["method"] == "rows and t"


def test_splits_without_gold_and_rows_all_uncertain(tmp_path: Path) -> None:
    run = _run(tmp_path, _rows(("0", 0.1), ("1", 0.45)), {"0": 1, "1": 1})
    run.predictions["test"] = _rows((None, 0.1), (None, 0.45))
    run.scored.body["test"] = None
    test = can_result([run], CanConfig())["splits"]["test"]
    assert (test["before"], test["after"], test["difference"]) == (None, None, None)
    assert test["shift_gold"] is None
    assert test["changed"] == 1
    rows = _rows(("0", 0.45), ("1", 0.55))
    body = can_result([_run(tmp_path, rows, {"0": 9, "1": 1})], CanConfig())
    dev = body["splits"]["dev"]
    assert (dev["uncertain"], dev["changed"], dev["shift_confident"]) == (2, 0, None)
    assert dev["before"] == dev["after"]
    assert "dev: all rows are uncertain at tau=0.9: CAN changes nothing" in body["warnings"]


def test_the_assumption_is_checked(tmp_path: Path) -> None:
    rows = _rows(("0", 0.1), ("0", 0.1), ("0", 0.2), ("1", 0.9), times=100)
    alike = can_result([_run(tmp_path, rows, {"0": 3, "1": 1})], CanConfig())
    assert [text for text in alike["warnings"] if "apart" in text] == []
    other = can_result([_run(tmp_path, rows, {"0": 1, "1": 3})], CanConfig())
    assert [text.split(" (")[0] for text in other["warnings"] if "apart" in text] == [
        "dev: confident predictions and training rows are distributed 0.50 apart",
        "dev: gold and training rows are distributed 0.50 apart",
    ]


@pytest.mark.parametrize("prior", [
    None, {}, [1, 1], {"0": 0, "1": 0}, {"0": 1, "2": 1}, {"0": 5, "1": -1}, {"0": "4", "1": 0},
    {"0": 4, "1": 1},
])  # fmt: skip
def test_a_prior_that_does_not_fit_is_refused(tmp_path: Path, prior: object) -> None:
    run = _run(tmp_path, _rows(("0", 0.1), ("1", 0.4)), prior)
    run.stored["rows"] = {"train": 4}
    with pytest.raises(DataError, match=r"result\.json: prior is .*expected how many of the rows"):
        can_result([run], CanConfig())


def test_rows_without_scores_or_classes_are_refused(tmp_path: Path) -> None:
    rows = [row._replace(scores=None) for row in _rows(("0", 0.1), ("1", 0.4))]
    with pytest.raises(DataError, match="predictions of dev have no scores"):
        can_result([_run(tmp_path, rows, {"0": 1})], CanConfig())
    rows = [PredictionRow("1", 1.0, 2.0), PredictionRow("2", 2.0, 1.0)]
    with pytest.raises(DataError, match=r"task\.kind=regress has none \(expected classify, pair"):
        can_result([_run(tmp_path, rows, kind="regress")], CanConfig())
