"""The plateau's rule, and what its text names."""

from pathlib import Path

import pytest

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import MonitorConfig, TrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.train.health import GroupNorms, LastStep, PlateauDoctor

ENTROPY = 6.0


def _doctor(data: str, num_steps: int = 2000, **model: str) -> PlateauDoctor:
    config = PretrainConfig(
        run_dir="unused",
        model=ModelConfig(**model),  # type: ignore[arg-type]
        data=DataConfig(dir=data),
        train=TrainConfig(num_steps=num_steps, lr=7e-4, warmup_steps=50, alpha_warmup_steps=200),
        monitor=MonitorConfig(log_every_steps=10),
    )
    return PlateauDoctor(config, ENTROPY)


def _step(step: int) -> LastStep:
    norms = {"embeddings": GroupNorms(0.5, 1e-3), "layer_00": GroupNorms(1e-5, 1e-6)}
    return LastStep(step, 1.0, 6.5e-4, 0.51, norms, 4096.0)


def _told(doctor: PlateauDoctor, losses: dict[int, float]) -> dict[int, str]:
    found = {step: doctor.look(loss, _step(step)) for step, loss in losses.items()}
    return {step: text for step, text in found.items() if text}


def test_it_is_told_once_after_the_warm_ups_and_the_patience(tmp_path: Path) -> None:
    doctor = _doctor(str(tmp_path))
    assert doctor.patience_steps == 200
    told = _told(doctor, dict.fromkeys(range(10, 1000, 10), ENTROPY * 1.04))
    # The first line behind alpha's 200 steps is 210; 200 steps later the rule holds.
    assert list(told) == [410]


def test_two_percent_of_a_long_run(tmp_path: Path) -> None:
    doctor = _doctor(str(tmp_path), num_steps=100_000)
    assert list(_told(doctor, dict.fromkeys(range(10, 5000, 10), ENTROPY))) == [210 + 2000]


@pytest.mark.parametrize("loss", [ENTROPY * 0.94, ENTROPY * 1.06, float("nan")])
def test_another_loss_starts_the_count_again(tmp_path: Path, loss: float) -> None:
    losses = dict.fromkeys(range(10, 1000, 10), ENTROPY)
    losses[400] = loss
    assert list(_told(_doctor(str(tmp_path)), losses)) == [610]
    assert not _told(_doctor(str(tmp_path)), dict.fromkeys(range(10, 1000, 10), loss))


def test_the_text_names_causes_with_numbers(dataset: DatasetIndex, tmp_path: Path) -> None:
    losses = dict.fromkeys(range(10, 420, 10), 6.1)
    text = _told(_doctor(str(dataset.folder)), losses)[410]
    for part in (
        "unigram entropy (6.000 nats) from step 210 to 410; it is 6.100",
        "6.50e-04 now, peak train.lr=0.0007, warm-up 50 steps",
        "alpha: 1.000, from 0 to 1 in 200 steps (train.alpha_warmup_steps=200); "
        "model.init=rsqrt_depth with model.residual=plain needs no warm-up",
        "batch: 4,096 tokens a step",
        "gradient norm 0.51, by layer: embeddings 0.5, layer_00 1e-05",
        "of the documents were dropped by stage dedup; near duplicates were not searched for",
    ):
        assert part in text
    elsewhere = _told(_doctor(str(tmp_path)), losses)[410]
    assert f"unknown, {tmp_path / 'report.json'} is missing" in elsewhere


def test_the_initialisation_is_named_where_it_may_be_the_cause(tmp_path: Path) -> None:
    losses = dict.fromkeys(range(10, 420, 10), 6.1)
    text = _told(_doctor(str(tmp_path), init="unit", score_residual="sum"), losses)[410]
    assert "model.init=unit with 6 layers and model.score_residual=sum" in text
    assert "set model.init=deepnorm and model.residual=deepnorm, or model.init=rsqrt_depth" in text
    assert "lengthen train.alpha_warmup_steps" in text
    for init, residual, advice in (
        ("rsqrt_depth", "plain", "needs no warm-up"), ("deepnorm", "deepnorm", "needs no warm-up"),
        ("unit", "rezero", "needs no warm-up"), ("unit", "deepnorm", "lengthen"),
        ("bert", "plain", "lengthen"),
    ):  # fmt: skip
        text = _told(_doctor(str(tmp_path), init=init, residual=residual), losses)[410]
        assert "initialisation:" not in text
        assert advice in text
