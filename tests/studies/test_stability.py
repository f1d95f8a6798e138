"""The stability study trains what is missing once, carries as said, and reports what it found."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.data.format import DatasetIndex
from pipeline.inspect import curves
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import Trace
from pipeline.model.layout import padded
from studies import stability, stability_report
from studies.carry_forms import FORMS, use_form
from studies.stability_report import Finished

_LAYERS = 4
_IDS = torch.arange(2, 16).reshape(2, 7)
_LAYOUT = padded(torch.tensor([7, 7]), 7)


def _logits(score_residual: str, form: str | None, alpha: float) -> list[np.ndarray]:
    """Softmax inputs by layer, centred; all layers see the same x."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=20, num_layers=_LAYERS, hidden_size=8, num_heads=2, ffn_size=8, init="unit",
        score_residual=score_residual, dropout=0.0,  # type: ignore[arg-type]
    )  # fmt: skip
    model = MaskedLanguageModel(config).double()
    model.encoder.set_alpha(alpha)
    if form:
        use_form(model, form, model.encoder.alpha)
        for layer in model.encoder.layers:
            if FORMS[form].gated:
                layer.attention.gate.data.fill_(0.25)
    for layer in model.encoder.layers:
        layer.attention.output.weight.data.zero_()
        layer.feed_forward.output.weight.data.zero_()
    trace = Trace()
    model.encoder(_IDS, _LAYOUT, trace=trace)
    found = [share.detach().log().numpy() for share in trace.probabilities]
    return [scores - scores.mean(-1, keepdims=True) for scores in found]


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_what_they_are_called(form: str) -> None:
    own = _logits("none", None, 0.4)
    sums, warmed = np.cumsum(own, axis=0), float(np.float32(0.4))
    expected = {
        "decay 0.5": lambda n: sum(0.5 ** (n - k) * own[k] for k in range(n + 1)),
        "decay 0.8": lambda n: sum(0.8 ** (n - k) * own[k] for k in range(n + 1)),
        "ema 0.7": lambda n: 0.7**n * own[0] + sum(
            0.3 * 0.7 ** (n - k) * own[k] for k in range(1, n + 1)
        ),
        "rsqrt": lambda n: sums[n] / np.sqrt(n + 1),
        "sum by N": lambda n: sums[n] / _LAYERS,
        "gate": lambda n: sum(0.25 ** (n - k) * own[k] for k in range(n + 1)),
        "alpha": lambda n: sum(warmed ** (n - k) * own[k] for k in range(n + 1)),
        "alpha alone": lambda n: sum(warmed ** (n - k) * own[k] for k in range(n + 1)),
        "detached": lambda n: sums[n],
    }[form]  # fmt: skip
    found = _logits("sum", form, 0.4)
    for number, logits in enumerate(found):
        np.testing.assert_allclose(logits, expected(number), atol=1e-10)


def test_alpha_alone_leaves_the_branches_at_one() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=20, num_layers=3, hidden_size=8, num_heads=2, ffn_size=8, init="unit",
        score_residual="sum", dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = MaskedLanguageModel(config)
    full = model.encoder(_IDS, _LAYOUT)
    alpha = torch.tensor(0.3)
    use_form(model, "alpha alone", alpha)
    assert not torch.equal(model.encoder(_IDS, _LAYOUT), full)
    alpha.fill_(1.0)
    for of_branches in (0.0, 0.5):
        model.encoder.set_alpha(of_branches)
        assert torch.equal(model.encoder(_IDS, _LAYOUT), full)


def test_a_detached_carry_has_no_gradient() -> None:
    def gradient(*forms: str) -> float:
        torch.manual_seed(0)
        config = ModelConfig(
            vocab_size=20, num_layers=2, hidden_size=8, num_heads=2, ffn_size=8, init="unit",
            score_residual="sum", dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        model = MaskedLanguageModel(config)
        for form in forms:
            use_form(model, form, torch.ones(()))
        trace = Trace()
        model.encoder.set_alpha(0.0)
        model.encoder(_IDS, _LAYOUT, trace=trace)
        # With alpha 0 the first layer reaches the second's attention by the carry alone.
        trace.probabilities[1].square().sum().backward()
        return float(model.encoder.layers[0].attention.qkv.weight.grad.abs().sum())

    assert gradient() > 0
    assert gradient("detached") == 0


@pytest.mark.usefixtures("processes")
def test_study_trains_once_reports_and_refuses_other_settings(
    dataset: DatasetIndex, tmp_path: Path
) -> None:
    table = tmp_path / "stability.md"
    command = [
        sys.executable, "-m", "studies.stability", str(tmp_path), "--quick", "--dataset",
        str(dataset.folder), "--table", str(table),
    ]  # fmt: skip

    def run(*more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
        done = subprocess.run(
            [*command, *more], cwd=stability.ROOT, capture_output=True, text=True, check=False
        )
        return done, json.loads(done.stdout) if done.returncode == 0 else {}

    _, found = run("--only", "*alpha*", "--jobs", "2")
    assert found["trials"] == 2
    files = sorted((tmp_path / "trials").iterdir())
    before = [file.read_bytes() for file in files]
    done, again = run("--only", "*alpha*")
    assert "held-out" not in done.stderr  # nothing was trained
    assert again == found
    assert [file.read_bytes() for file in files] == before

    text = table.read_text()
    for trial in before:
        loss = json.loads(trial)["found"]["eval_loss"]
        assert f"{loss:.3f}" in text
        # Eight updates of random weights are near the logarithm of the vocabulary.
        assert loss == pytest.approx(np.log(dataset.vocabulary.size), abs=1)
    [picture] = tmp_path.glob("*.svg")
    assert picture.name in text
    assert ET.parse(picture).getroot().tag.endswith("svg")

    kept = json.loads(before[0])
    kept["trial"]["seed"] = 7
    files[0].write_text(json.dumps(kept))
    done, _ = run("--seeds", "0")
    assert done.returncode != 0
    assert "other settings" in done.stderr
    assert files[0].name in done.stderr


def test_every_arm_has_a_name_of_its_own() -> None:
    arms = list(stability.arms())
    files = {stability.trial_file(Path(), arm, 1) for arm, _ in arms}
    assert len(files) == len(arms)
    trials = [arm.trial(1) for arm, _ in arms]
    assert len({json.dumps(asdict(trial)) for trial in trials}) == len(arms)


def _finished(carry: str, seed: int, loss: float) -> Finished:
    look = {
        "logit_std": [1.0, 2.0, 3.0], "entropy": [0.9, 0.8, 0.7], "cosine": [0.1, 0.2, 0.3, 0.4],
        "gradient_query_key": [1.0, 4.0], "gradient_other": [2.0, 5.0],
    }  # fmt: skip
    found = {
        "eval_loss": loss,
        "unigram_entropy": 6.0,
        "looks": [look, look],
        "curve": [[1, 8], [2, 6]],
    }
    return Finished("24x48", "alpha 50%", carry, seed, found)


def test_table_has_means_pairs_and_marks_what_is_stuck() -> None:
    trials = [
        _finished("none", 1, 5.0), _finished("none", 2, 5.2), _finished("mean", 1, 4.9),
        _finished("mean", 2, 5.3), _finished("sum", 1, 5.95), _finished("gate", 1, 5.5),
    ]  # fmt: skip
    text = stability_report.table(trials, "")
    assert "| alpha 50% | 5.100 +- 0.141 (2) | 5.100 +- 0.283 (2) | *5.950* |" in text
    assert "| alpha 50% | mean | +0.000 | -0.100, +0.100 |" in text
    assert "learned by layer from 0 | alpha 50% | 5.500 |" in text
    assert (
        "| none | 1 .. 3 -> 1 .. 3 | 0.9 .. 0.7 -> 0.9 .. 0.7 | 0.1 .. 0.4 -> 0.1 .. 0.4 "
        "| 1 .. 4 | 2 .. 5 |"
    ) in text


def test_curves_lie_where_their_numbers_are() -> None:
    panel = curves.Panel("a < b", [curves.Line("one", [(0, 9.0), (0, 1.0), (10, 3.0)])], "x")
    root = ET.fromstring(curves.draw([panel, panel], y_name="y", dotted={"limit": 2.0}, top=5.0))
    lines = [node.get("points") for node in root.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 4
    assert len(lines[1].split()) == 2  # what is above the top is left out
    limit, curve = (
        [tuple(map(float, place.split(","))) for place in line.split()] for line in lines[:2]
    )
    assert curve[0][0] == 0
    assert curve[0][1] > curve[1][1]  # SVG counts from the top
    assert limit[0][1] == pytest.approx((curve[0][1] + curve[1][1]) / 2, abs=0.1)
