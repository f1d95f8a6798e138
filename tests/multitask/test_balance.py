"""The rules of balancing against closed forms, grids, differences and scipy."""

import numpy as np
import pytest

from pipeline.multitask import balance
from pipeline.multitask.draws import Draws, shares

RANDOM = np.random.default_rng(5)


def gradients(num: int, size: int) -> np.ndarray:
    """Rows of very different lengths."""
    return RANDOM.normal(size=(num, size)) * np.exp(RANDOM.normal(size=(num, 1)))


def test_mgda_is_the_closed_form_as_small_as_a_grid_s_and_lowers_every_loss() -> None:
    for _ in range(100):
        g = gradients(2, 5)
        gram = g @ g.T
        share = np.clip(
            (gram[1, 1] - gram[0, 1]) / (gram[0, 0] + gram[1, 1] - 2 * gram[0, 1]), 0, 1
        )
        assert balance.smallest(gram, np.ones(2, bool)) == pytest.approx([share, 1 - share])
    steps = 100
    corners = [(i, j, steps - i - j) for i in range(steps + 1) for j in range(steps + 1 - i)]
    grid = np.array(corners) / steps
    for _ in range(30):
        g = gradients(3, 4)
        gram = g @ g.T
        found = balance.smallest(gram, np.ones(3, bool))
        assert found.sum() == pytest.approx(1)
        assert (found >= 0).all()
        value, best = found @ gram @ found, np.einsum("pi,ij,pj->p", grid, gram, grid).min()
        assert value <= best + 1e-9
        assert best - value < 1e-2 * np.diag(gram).max()
    for num in range(2, 9):
        g = gradients(num, 5)
        found = balance.smallest(g @ g.T, np.ones(num, bool))
        assert (g @ (found @ g) > -1e-8 * (g**2).sum()).all()


def test_helpers_are_added_as_far_as_the_main_task_hurts_them() -> None:
    for _ in range(50):
        g = gradients(2, 3)
        gram = g @ g.T
        helped = max(0.0, -gram[0, 1] / gram[1, 1])
        assert balance.smallest(gram, np.array([True, False])) == pytest.approx([1, helped])
    for _ in range(50):
        g = gradients(5, 4)
        main = np.array([True, False, True, False, False])
        found = balance.smallest(g @ g.T, main)
        assert found[main].sum() == pytest.approx(1)
        assert (g[~main] @ (found @ g) > -1e-8 * (g**2).sum()).all()


def test_tasks_without_a_gradient_give_no_nan() -> None:
    gram = np.diag([4.0, 0.0, 1.0])
    everyone = np.ones(3, bool)
    for of in (gram, np.zeros((3, 3))):
        found = [balance.smallest(of, everyone), balance.smallest(of, np.arange(3) == 1),
                 balance.pcgrad(of, 1, 1), balance.cagrad(of, 0.5)]  # fmt: skip
        assert np.isfinite(found).all()
    assert balance.smallest(gram, everyone) == pytest.approx([0.2, 0, 0.8])


def test_pcgrad_projects_vectors_in_other_orders_in_other_steps() -> None:
    assert balance.pcgrad(np.diag([1.0, 4.0, 9.0]), 1, 3).tolist() == [1, 1, 1]
    for step in range(50):
        g = gradients(2, 3)
        a, b = g
        expected = a + b
        if a @ b < 0:
            expected = (a - (a @ b) / (b @ b) * b) + (b - (a @ b) / (a @ a) * a)
        found = balance.pcgrad(g @ g.T, 1, step) @ g
        assert found == pytest.approx(expected)
        assert (g @ found > -1e-9 * (g**2).sum()).all()
    g = np.array([[1.0, 0.1], [-1.0, 0.4], [-0.2, -1.0]])
    assert len({tuple(balance.pcgrad(g @ g.T, 1, step).round(9)) for step in range(30)}) > 1
    assert balance.pcgrad(g @ g.T, 1, 7).tolist() == balance.pcgrad(g @ g.T, 1, 7).tolist()


def test_cagrad_finds_scipy_s_minimum() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    for num in range(2, 7):
        g = gradients(num, 6)
        gram, even = g @ g.T, np.full(num, 1 / num)
        radius = 0.5 * np.sqrt(even @ gram @ even)

        def value(w: np.ndarray, gram: np.ndarray = gram, radius: float = radius) -> float:
            return float(w @ gram.mean(1) + radius * np.sqrt(w @ gram @ w))

        bounds = {"bounds": [(0, 1)] * num, "options": {"ftol": 1e-14, "maxiter": 500}}
        one = {"type": "eq", "fun": lambda w: w.sum() - 1}
        least = optimize.minimize(value, even, constraints=one, **bounds).fun
        along = balance.cagrad(gram, 0.5) * 1.25 - even
        assert value(along / along.sum()) == pytest.approx(least, abs=1e-4 * np.diag(gram).max())


def test_gradnorm_and_uncertainty_have_the_slopes_of_their_losses() -> None:
    logits, norms = np.array([0.3, -0.2, 0.0]), np.array([2.0, 0.5, 1.0])
    ratios = np.array([0.9, 0.5, 0.7])

    def loss(at: np.ndarray, targets: np.ndarray) -> float:
        return float(np.abs(3 * balance.softmax(at) * norms - targets).sum())

    weights, slope = balance.gradnorm_slope(logits, norms, ratios, 1.5)
    targets = (weights * norms).mean() * (ratios / ratios.mean()) ** 1.5
    step = 1e-6 * np.eye(3)
    expected = [(loss(logits + d, targets) - loss(logits - d, targets)) / 2e-6 for d in step]
    assert slope == pytest.approx(expected, rel=1e-5)

    def total(s: np.ndarray) -> float:
        return float((ratios / (2 * np.exp(s)) + s / 2).sum())

    expected = [(total(logits + d) - total(logits - d)) / 2e-6 for d in step]
    assert balance.uncertainty_slope(logits, ratios) == pytest.approx(expected, rel=1e-5)


def test_random_weights_follow_seed_and_step_and_shares_sizes_and_caps() -> None:
    every = np.array([balance.random_weights(4, 1, step) for step in range(2000)])
    assert every.sum(1) == pytest.approx(np.full(2000, 4.0))
    # Softmax of normal draws is symmetric: each task has the mean 1; 4 standard errors.
    assert every.mean(0) == pytest.approx(np.ones(4), abs=4 * every.std() / np.sqrt(2000))
    assert (balance.random_weights(4, 2, 5) != every[5]).all()
    assert shares([1, 3], None, 1.0) == pytest.approx([0.25, 0.75])
    assert shares([100, 1000, 5], 100, 1.0) == pytest.approx([100 / 205, 100 / 205, 5 / 205])
    assert shares([1, 16], None, 4.0) == pytest.approx([1 / 3, 2 / 3])


# Draws


def test_draws_have_their_frequencies_and_are_counted_before_a_step() -> None:
    counts = Draws([0.6, 0.3, 0.1], 8, seed=1).before(5000)
    assert counts.sum() == 40_000
    # 4 standard deviations of a binomial count.
    for count, p in zip(counts, [0.6, 0.3, 0.1], strict=True):
        assert abs(count - 40_000 * p) < 4 * np.sqrt(40_000 * p * (1 - p))
    draws = Draws([0.5, 0.25, 0.25], 3, seed=7)
    running = np.zeros(3, int)
    for step in range(4200):
        if step in (0, 1, 4095, 4096, 4097, 4199):
            assert Draws([0.5, 0.25, 0.25], 3, seed=7).before(step).tolist() == running.tolist()
        running += np.bincount(draws.of_step(step), minlength=3)
    assert draws.of_step(3).tolist() != Draws([0.5, 0.25, 0.25], 3, seed=8).of_step(3).tolist()
