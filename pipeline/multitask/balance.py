"""How much each task counts in a step of multi-task training: rules of numbers, without torch.

`balancer.py` has the rules that are computed on the device, from a step's own losses and norms: the
geometric and the generalised mean, and gradient normalisation.

A step has n tasks with losses L_i, each the mean over its own rows, and gradients g_i. The update
is the sum of c_i g_i. A task that was drawn m_i times of M has the share m_i / M of a mean over
draws; rules of losses weight that mean, rules of gradients count each task of a step once.

Sources: Su, kexue.fm/archives/8870, 8896 and 8907 (losses, gradient normalisation, Pareto, main
task and helpers); Kendall et al. 2018 (uncertainty); Liu et al. 2019 (DWA); Lin et al. 2022
(random weights); Chen et al. 2018 (GradNorm); Yu et al. 2020 (PCGrad); Liu et al. 2021 (CAGrad);
Désidéri 2012 and Sener and Koltun 2018 (MGDA).
"""

import math

import numpy as np
import numpy.typing as npt

from pipeline.data.random import Purpose, philox

Floats = npt.NDArray[np.float64]
_TWO_32 = 2.0**32


def softmax(values: npt.ArrayLike) -> Floats:
    """(n,) positive weights with sum 1."""
    shifted = np.asarray(values, np.float64)
    exponents = np.exp(shifted - shifted.max())
    return np.asarray(exponents / exponents.sum())


# Rules of losses that weight before the step's own losses are known


def dwa(rates: Floats, temperature: float) -> Floats:
    """n softmax(r_i / T), where r_i is a task's last mean loss over the one before it."""
    return len(rates) * softmax(rates / temperature)


def random_weights(num: int, seed: int, step: int) -> Floats:
    """n softmax of normal draws, a pure function of seed and step."""
    high, low, _, _ = philox((np.arange(num), step, 0, 0), (seed, Purpose.TASK_WEIGHTS))
    # Box and Muller; the first is above 0.
    first, second = (high + 1.0) / _TWO_32, low / _TWO_32
    return num * softmax(np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second))


def uncertainty(log_variances: Floats) -> Floats:
    """1 / (2 e^s_i): the weights of sum L_i / (2 e^s_i) + s_i / 2."""
    return 0.5 * np.exp(-log_variances)


def uncertainty_slope(log_variances: Floats, losses: Floats) -> Floats:
    """Derivatives of sum L_i / (2 e^s_i) + s_i / 2 by s_i."""
    return 0.5 - losses * uncertainty(log_variances)


def gradnorm_slope(
    logits: Floats, norms: Floats, ratios: Floats, asymmetry: float = 1.5
) -> tuple[Floats, Floats]:
    """GradNorm: weights w = n softmax(logits), and the slope of their own loss by the logits.

    That is sum |w_i |g_i| - mean * r_i^asymmetry|, in which the mean of w_i |g_i| is a constant
    and r_i is a task's loss over its first one, divided by the mean of these.

    Args:
        logits: (n,).
        norms: (n,) of the gradients of the last shared layer, without weights.
        ratios: (n,) losses over first losses.
        asymmetry: 0 makes all weighted norms equal; larger ones help the slower tasks. For NYUv2
            the paper takes 1.5.
    """
    shares = softmax(logits)
    weights = len(logits) * shares
    sizes = weights * norms
    targets = sizes.mean() * (ratios / ratios.mean()) ** asymmetry
    by_weight = np.sign(sizes - targets) * norms
    by_logit = weights * (by_weight - shares @ by_weight)
    return weights, by_logit


# Rules of gradients; `gram` is (n, n), the products g_i . g_j, positive semi-definite


def nonnegative(matrix: Floats, vector: Floats) -> Floats:
    """Minimise x' Q x / 2 - b' x over x >= 0: Lawson and Hanson's active sets (1974, chapter 23).

    Args:
        matrix: (n, n) Q, symmetric and positive semi-definite.
        vector: (n,) b.
    """
    num = len(vector)
    x, free = np.zeros(num), np.zeros(num, bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(vector).max(initial=0.0)))
    for _ in range(3 * num):
        slope = vector - matrix @ x
        # What is free is at its best already; only a bound variable may become free.
        slope[free] = -np.inf
        if free.all() or slope.max() <= tolerance:
            break
        free[int(np.argmax(slope))] = True
        while True:
            solved = np.zeros(num)
            part = np.ix_(free, free)
            solved[free] = np.linalg.lstsq(matrix[part], vector[free], rcond=1e-12)[0]
            if (solved[free] > 0).all():
                x = solved
                break
            falling = free & (solved <= 0)
            # As far as the nearest bound; what reaches it is 0 from now on.
            step = np.min(x[falling] / (x[falling] - solved[falling]))
            x = x + step * (solved - x)
            free &= x > tolerance
            x[~free] = 0.0
            if not free.any():
                break
    return x


def smallest(gram: Floats, is_main: npt.NDArray[np.bool_]) -> Floats:
    """Minimise |sum c_i g_i| with c >= 0, and with sum 1 over the main tasks.

    If all tasks are main ones this is MGDA, and 0 if some convex combination vanishes (a Pareto
    stationary point). The other tasks are helpers: they are added as far as the sum of the main
    ones would raise their losses. With one main task and one helper the helper has
    max(0, -g_0 . g_1 / |g_1|^2).
    """
    scale = float(np.diag(gram).max(initial=0.0))
    main = is_main.astype(np.float64)
    if scale <= 0:
        return np.asarray(main / main.sum())
    # A task without a gradient is left out: with it, doing nothing would be the smallest update.
    has = np.diag(gram) > 0
    if not (has & is_main).any():
        return np.where(has, 0.0, main / main.sum())
    here = np.ix_(has, has)
    found = np.zeros(len(gram))
    # Minimising y' G y + (sum of main y - 1)^2 over y >= 0 gives a multiple of the answer.
    found[has] = nonnegative(gram[here] / scale + np.outer(main, main)[here], main[has])
    return np.asarray(found / (main @ found))


def pcgrad(gram: Floats, seed: int, step: int) -> Floats:
    """Take from each gradient what conflicts with another's, in random order, and add them up.

    Returns:
        (n,) coefficients of the gradients; all 1 without conflicts.
    """
    num = len(gram)
    # The purpose of `random_weights`, too: a run has one rule, so no draw is used twice.
    keys, _, _, _ = philox((np.arange(num * num), step, 0, 0), (seed, Purpose.TASK_WEIGHTS))
    total = np.zeros(num)
    for task, row in enumerate(keys.reshape(num, num)):
        mine = np.zeros(num)
        mine[task] = 1.0
        for other in np.argsort(row, kind="stable"):
            conflict = float(mine @ gram[:, other])
            if other != task and conflict < 0:
                mine[other] -= conflict / gram[other, other]
        total += mine
    return total


def cagrad(gram: Floats, caution: float = 0.5, iterations: int = 500) -> Floats:
    """Stay within `caution` of the mean gradient, and lower the loss that falls least.

    Minimises g_w . g_0 + caution |g_0| |g_w| over the simplex of w by mirror descent; g_0 is the
    mean, g_w the sum of w_i g_i. The update g_0 + caution |g_0| / |g_w| g_w is divided by
    1 + caution^2.

    Returns:
        (n,) coefficients of the gradients.
    """
    num = len(gram)
    scale = float(np.diag(gram).max(initial=0.0))
    even = np.full(num, 1.0 / num)
    if scale <= 0:
        return even
    matrix = gram / scale
    radius = caution * math.sqrt(max(0.0, float(even @ matrix @ even)))

    def value(w: Floats) -> float:
        return float(w @ matrix @ even) + radius * math.sqrt(max(0.0, float(w @ matrix @ w)))

    best, pace = even, 1.0
    for _ in range(iterations):
        # The mixture may vanish, where the slope of its length is not defined.
        length = math.sqrt(max(1e-30, float(best @ matrix @ best)))
        slope = matrix @ even + radius * (matrix @ best) / length
        tried = softmax(np.log(np.maximum(best, 1e-300)) - pace * slope)
        # Longer steps while they help; mirror descent with a fixed one crawls near a corner.
        if value(tried) < value(best):
            best, pace = tried, 1.5 * pace
        else:
            pace /= 2
        if pace < 1e-9:
            break
    length = math.sqrt(max(0.0, float(best @ matrix @ best)))
    along = radius / length if length > 1e-12 else 0.0
    return (even + along * best) / (1 + caution**2)


def cosines(gram: Floats) -> Floats:
    """(n, n) cosines between the gradients; NaN for a task without one."""
    norms = np.sqrt(np.diag(gram))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(gram / np.outer(norms, norms))
