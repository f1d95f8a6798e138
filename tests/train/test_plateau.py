"""The plateau's rule on made-up curves and on those of real runs, and what its advice names."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pipeline.checkpoints.state import LossHistory
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import MonitorConfig, TrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.train.doctor import Doctor, LastStep, _rise
from pipeline.train.metrics import GroupNorms

ENTROPY, GUESS = 6.3, math.log(4096)
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def make_doctor(
    data: str = "nowhere",
    entropy: float | None = ENTROPY,
    guess: float | None = GUESS,
    **changes: Any,
) -> Doctor:
    """Fields of the training section go there, all others to the model."""
    names = {field.name for field in fields(TrainConfig)}
    train = {"num_steps": 2000, "lr": 2e-4, "alpha_warmup_steps": 200, "warmup_steps": 50}
    train |= {name: value for name, value in changes.items() if name in names}
    model = {name: value for name, value in changes.items() if name not in names}
    config = PretrainConfig(run_dir="mine", model=ModelConfig(**model), data=DataConfig(dir=data),
                            train=TrainConfig(**train),
                            monitor=MonitorConfig(log_every_steps=5))  # fmt: skip
    return Doctor(config, config.data.dir, unigram_entropy=entropy, uniform_guess=guess)


def _step(step: int, tokens: float = 4096.0, reach: float = 1.0) -> LastStep:
    gradients = {"embeddings": 0.5, "layer_00": 0.2 * reach, "layer_01": 0.01, "layer_02": 0.2}
    norms = {name: GroupNorms(gradient, 1e-3) for name, gradient in gradients.items()}
    return LastStep(step, step - 1, 1.0, 1e-7, 0.51, norms, tokens)


def _told(doctor: Doctor, losses: Floats, accuracies: Floats | None = None,
          held_out: dict[int, float] | None = None, tokens: float = 4096.0,
          reach: float | Floats = 1.0, begin: int = 0) -> dict[int, str]:  # fmt: skip
    """Give the doctor a log line every five steps, and return what it says by step."""
    told = {}
    reaches = np.broadcast_to(reach, losses.shape).tolist()
    for place, loss in enumerate(losses.tolist()):
        step = begin + 5 * (place + 1)
        accuracy = 0.05 if accuracies is None else float(accuracies[place])
        values = {"loss": loss, "accuracy": accuracy}
        if plateau := doctor.look(values, _step(step, tokens, reaches[place]), LossHistory()):
            told[step] = plateau.advice
        if held_out and step in held_out:
            doctor.evaluated(step, held_out[step])
    return told


def test_it_is_told_once_after_the_warm_ups_and_the_patience() -> None:
    # Alpha's warm-up ends with step 200; the last of 100 further steps is the first that can tell.
    assert list(_told(make_doctor(), np.full(400, ENTROPY * 1.04))) == [300]
    assert not _told(make_doctor(), np.full(400, ENTROPY * 0.94))
    assert not _told(make_doctor(), np.full(400, math.nan))


def _lines(losses: Floats, begin: int = 0) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, as `_told` gives them to the doctor."""
    steps = range(begin + 5, begin + 5 * len(losses) + 1, 5)
    norms = {f"grad_norm_{name}": of.gradient for name, of in _step(0).layers.items()}
    return [{"kind": "train", "step": step, "loss": loss, "accuracy": 0.05, **norms}
            for step, loss in zip(steps, losses.tolist(), strict=True)]  # fmt: skip


def test_restarts_do_not_hide_a_plateau_nor_tell_it_again() -> None:
    losses = np.full(60, ENTROPY * 1.04)
    [(told, _)] = _told(make_doctor(), losses).items()
    for first in (1, 30, 50, 59):  # lines of the attempt before
        doctor = make_doctor()
        doctor.recall(_lines(losses[:first]))
        assert list(_told(doctor, losses[first:], begin=5 * first)) == [told], first
    doctor = make_doctor()
    doctor.recall([*_lines(losses), {"kind": "plateau", "step": told, "loss": ENTROPY}])
    assert not _told(doctor, losses, begin=300)
    # What was learned before counts, and what was before a divergence does not.
    doctor = make_doctor()
    doctor.recall(_lines(np.linspace(9.0, ENTROPY, 60)))
    assert not _told(doctor, losses[:5], begin=300)
    doctor = make_doctor()
    doctor.recall([*_lines(losses[:59]), {"kind": "divergence", "step": 295, "loss": 9.0}])
    assert list(_told(doctor, losses, begin=295)) == [395]
    # A loss that was not finite is no line, and NaN of an accuracy is null.
    doctor = make_doctor()
    doctor.recall([{**line, "loss": None} for line in _lines(losses)])
    straight = list(_told(make_doctor(), np.concatenate((np.full(60, math.nan), losses))))
    assert list(_told(doctor, losses, begin=300)) == straight != []


def test_an_attempt_that_resumes_waits_for_lines_of_its_own() -> None:
    assert list(_told(make_doctor(), np.full(199, ENTROPY), begin=1000)) == [1100]


def test_intervals_without_an_applied_step_are_no_evidence() -> None:
    """One line of ten has a loss, and an evaluation is given again after a resume."""
    doctor, told = make_doctor(), []
    for step in range(1005, 4000, 5):
        loss = ENTROPY if step % 50 == 0 else math.nan
        if doctor.look({"loss": loss, "accuracy": 0.05}, _step(step), LossHistory()):
            told.append(step)
        for _ in range(2):
            doctor.evaluated(step, ENTROPY)
    assert len(told) == 1
    assert told[0] >= 1500


def test_a_slow_run_that_still_learns_is_not_told() -> None:
    # Held-out losses of a real run that an older rule told to start again.
    steps = np.array([50, 100, 150, 200, 250, 300])
    losses = np.array([6.71, 6.48, 6.33, 6.21, 6.14, 6.08])
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.08, 60)
        curve = np.interp(np.arange(5, 305, 5), steps, losses) + noise
        held_out = dict(zip(steps.tolist(), losses.tolist(), strict=True))
        assert not _told(make_doctor(alpha_warmup_steps=0), curve, held_out=held_out)
        assert not _told(make_doctor(alpha_warmup_steps=0), curve)


def test_two_evaluations_that_hardly_differ_are_no_plateau() -> None:
    # Of real runs with 256 tokens a step, told by older rules at steps 210, 355 and 255 for two
    # evaluations of a window that differed by 0.02 to 0.04, and that ended at 5.75 to 5.85.
    steps, told = np.arange(50, 650, 50), 0
    for held_out in (
        (6.48, 6.32, 6.22, 6.19, 6.10, 6.03, 5.96, 5.90, 5.83, 5.79, 5.76, 5.75),
        (6.42, 6.30, 6.20, 6.21, 6.11, 6.04, 6.02, 5.95, 5.91, 5.88, 5.86, 5.85),
        (6.54, 6.40, 6.31, 6.25, 6.27, 6.16, 6.06, 6.00, 5.92, 5.89, 5.83, 5.82),
    ):
        evaluations = dict(zip(steps.tolist(), held_out, strict=True))
        for seed in range(50):
            noise = np.random.default_rng(seed).normal(0, 0.12, 120)
            curve = np.interp(np.arange(5, 605, 5), steps, held_out) + noise
            doctor = make_doctor(num_steps=600, alpha_warmup_steps=0)
            told += bool(_told(doctor, curve, held_out=evaluations))
    # Noise alone makes one in 200 look flat beyond three standard errors at some of its 100 lines.
    assert told <= 3


def test_a_stuck_run_with_small_batches_is_told_in_spite_of_noise() -> None:
    # A real run of 12 layers lay between 6.61 and 6.64, above the entropy by more than 5%.
    told_at: dict[float, list[int]] = {0.05: [], 1.0: []}
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.12, 800)
        held_out = {step: 6.62 + 0.003 * (step % 100 == 0) for step in range(50, 4000, 50)}
        for reach, steps in told_at.items():
            told = _told(make_doctor(), 6.625 + noise, held_out=held_out, reach=reach)
            assert len(told) == 1
            steps += list(told)
    assert np.median(told_at[1.0]) < 2000
    # Gradients that do not reach the first layer need no noise to be averaged away.
    assert max(told_at[0.05]) == 400


def test_a_falling_loss_is_no_comfort_where_lower_layers_are_cut_off() -> None:
    # Held-out losses of a real run of 24 layers whose head alone learned: 6.36 after 1,800 steps.
    steps = np.arange(50, 650, 50)
    losses = np.array([8.07, 7.56, 7.20, 6.96, 6.80, 6.70, 6.64, 6.60, 6.56, 6.54, 6.53, 6.53])
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.12, 120)
        curve = np.interp(np.arange(5, 605, 5), steps, losses) + noise
        doctors = [make_doctor(num_steps=600, alpha_warmup_steps=0) for _ in range(3)]
        assert list(_told(doctors[0], curve, reach=0.0)) == [250]
        assert not _told(doctors[1], curve[:90], reach=0.15)
        # What a deep one that learns would show.
        assert not _told(doctors[2], curve, accuracies=np.linspace(0.02, 0.1, 120), reach=0.0)
    below = np.full(400, ENTROPY * 0.94)
    assert not _told(make_doctor(), below, reach=0.0)


def test_lower_layers_that_come_back_are_no_reason_to_tell() -> None:
    # Means of 50 steps of a real run of 6 layers that learned: 6.56 after 600 updates.
    steps = np.arange(25, 625, 50)
    losses = np.array([9.6, 7.7, 7.2, 7.1, 7.0, 7.0, 6.95, 6.94, 6.81, 6.72, 6.72, 6.73]) - 0.58
    reaches = np.array([0.45, 0.13, 0.04, 0.1, 0.18, 0.57, 0.77, 0.70, 0.93, 0.70, 0.99, 1.1])
    at = np.arange(5, 605, 5)
    reach = np.exp(np.interp(at, steps, np.log(reaches)))
    for seed in range(20):
        curve = np.interp(at, steps, losses) + np.random.default_rng(seed).normal(0, 0.12, 120)
        assert not _told(make_doctor(num_steps=600, alpha_warmup_steps=0), curve, reach=reach)
        # The same without the way back.
        stays = np.minimum.accumulate(reach)
        assert _told(make_doctor(num_steps=600, alpha_warmup_steps=0), curve, reach=stays)


def test_without_norms_of_layers_the_other_signs_decide() -> None:
    for layers in ({}, {"embeddings": GroupNorms(0.5, 1e-3)}):
        doctor = make_doctor()
        told = []
        for step in range(5, 600, 5):
            last = LastStep(step, step - 1, 1.0, 1e-7, 0.51, layers, 4096.0)
            if plateau := doctor.look({"loss": ENTROPY, "accuracy": 0.05}, last, LossHistory()):
                told.append(plateau.advice)
        assert len(told) == 1
        assert "of the last layer's" not in told[0]


def test_what_still_rises_or_falls_is_no_plateau() -> None:
    flat = np.full(400, ENTROPY)
    assert not _told(make_doctor(), flat, accuracies=np.linspace(0.03, 0.30, 400))
    held_out = {step: 7.0 - step * 1e-3 for step in range(210, 2000, 40)}
    assert not _told(make_doctor(), flat, held_out=held_out)
    assert _told(make_doctor(), flat, held_out=dict.fromkeys(held_out, 6.4))


def test_a_trend_and_its_error_are_those_of_scipy() -> None:
    rng = np.random.default_rng(3)
    steps = np.cumsum(rng.integers(1, 9, 50)).astype(np.float64)
    values = 0.01 * steps + rng.normal(0, 0.3, 50)
    expected = stats.linregress(steps, values)
    rise, error = _rise(steps, values, 100)
    assert rise == pytest.approx(100 * expected.slope, rel=1e-9)
    assert error == pytest.approx(100 * expected.stderr, rel=1e-9)


def test_the_text_names_causes_with_numbers(dataset: DatasetIndex, tmp_path: Path) -> None:
    text = _told(make_doctor(data=str(dataset.folder)), np.full(200, 6.4))[300]
    for part in (
        "6.400 from step 205 to 300", "6.300 nats", "train.alpha_warmup_steps=200", "24 layers",
        "train.lr=0.0002, 0.0004 is usual at width 384", "4,096 tokens a step", "norm 0.51",
        "embeddings 0.5, layer_00 0.2, layer_01 0.01, layer_02 0.2", "dropped by stage dedup",
    ):  # fmt: skip
        assert part in text
    elsewhere = _told(make_doctor(data=str(tmp_path)), np.full(200, 7.0), reach=0.05)[300]
    assert "0.05 of the last layer's" in elsewhere
    assert str(tmp_path / "report.json") in elsewhere


def test_the_likeliest_change_comes_first() -> None:
    def first(tokens: float = 4096.0, **settings: object) -> str:
        doctor = make_doctor(**settings)  # type: ignore[arg-type]
        return _told(doctor, np.full(200, 6.4), tokens=tokens)[300].split("\n1. ")[1].split("\n")[0]

    deep = first(num_layers=24, init="unit")
    assert deep.startswith("start: 24 layers with model.init=unit, model.residual=plain")
    assert "model.init=deepnorm and model.residual=deepnorm, or model.init=rsqrt_depth" in deep
    assert "lower it threefold" in first(lr=2e-3)
    assert "raise it threefold" in first(lr=1e-6)
    # Rates of LAMB are others.
    assert "threefold" not in first(lr=2e-3, optimizer="lamb", lamb_bias_correction=True)
    assert first(tokens=256.0).startswith("batch: 256 tokens a step")
    # In the grid of benchmarks/results/doctor.md a small batch was never the only cause.
    assert first(tokens=256.0, num_layers=24, init="unit").startswith("start: 24 layers")
    assert first(tokens=256.0, lr=2e-3).startswith("learning rate: train.lr=0.002")
