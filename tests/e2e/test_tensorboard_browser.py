"""A real browser opens a real TensorBoard on a finished run and sees charts, images and text."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, find_browser
from tests.support.ranks import records

_BROWSER = find_browser()
_CARD = (
    "findAll('scalar-card')"
    ".find(card => card.querySelector('tb-truncated-path').textContent === 'TAG')"
)
# The colour of a first run's line; axes, grid and labels are grey.
_OF_LINE = "b > r + 15 && Math.max(r, g, b) < 140"


@pytest.fixture
def browser(tmp_path: Path, processes: None) -> Iterator[Browser]:
    if _BROWSER is None:
        pytest.skip("no Chromium in PATH, in Playwright's cache or named by POSTNORM_CHROMIUM")
    browser = Browser(_BROWSER, tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    """Where screenshots stay: the folder POSTNORM_ARTEFACTS, or the test's own."""
    folder = Path(os.environ.get("POSTNORM_ARTEFACTS", tmp_path / "artefacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def tensorboard(straight_run: Path, tmp_path: Path) -> Iterator[str]:
    """Its address."""
    output = tmp_path / "tensorboard.out"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", straight_run / "tensorboard"]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0", "--load_fast=false"],
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (address := re.search(r"http://127\.0\.0\.1:\d+/", output.read_text())):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        yield address[0]
    finally:
        process.terminate()
        process.wait(30)


def test_a_finished_run_is_seen(
    browser: Browser, tensorboard: str, straight_run: Path, artefacts: Path
) -> None:
    browser.open(f"{tensorboard}?tagFilter=(train|eval)%2Floss#timeseries")
    for kind in ("eval", "train"):
        card = _CARD.replace("TAG", f"{kind}/loss")
        # The last value, as the table under the chart has it.
        last = f"{records(straight_run, kind)[-1]['loss']:.4f}".rstrip("0")
        table = f"{card}?.querySelector('scalar-card-data-table')"
        browser.wait_for(f"{table}?.innerText.includes('{last}')")
        chart = f"{card}.querySelector('line-chart .series-view')"
        ticks = browser.evaluate(f"{card}.querySelectorAll('line-chart-axis text').length")
        assert ticks >= 4
        deadline = time.monotonic() + 30
        while (seen := browser.columns_with(chart, _OF_LINE)) < 0.7:
            assert time.monotonic() < deadline, (
                f"{kind}/loss has a line over {seen:.0%} of its width"
            )
    browser.screenshot(artefacts / "tensorboard-scalars.png")

    browser.open(f"{tensorboard}#images")
    browser.wait_for("findAll('tf-image-loader img, img').some(each => each.naturalWidth > 0)")
    shown = browser.evaluate("findAll('tf-image-loader').map(each => each.tag)")
    assert shown == ["attention_entropy"]
    [size] = browser.evaluate("findAll('img').map(each => [each.naturalWidth, each.naturalHeight])")
    assert size == [32, 32]  # two heads by two layers
    browser.screenshot(artefacts / "tensorboard-images.png")

    browser.open(f"{tensorboard}#text")
    browser.wait_for("findAll('tf-text-loader tf-markdown-view, tf-markdown-view').length >= 2")
    browser.wait_for("findAll('pre').some(each => each.textContent.includes('original:'))")
    texts = browser.evaluate("findAll('pre').map(each => each.textContent)")
    [config] = [text for text in texts if "git_revision" in text]
    resolved = (straight_run / "resolved.yaml").read_text()
    assert config.split() == resolved.split()
    assert any("original:" in text and "input:" in text for text in texts)
    browser.screenshot(artefacts / "tensorboard-text.png")
