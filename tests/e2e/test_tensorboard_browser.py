"""A real browser opens a real TensorBoard on a finished run and sees charts, images and text."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.screenshots import open_layout, tensorboard
from pipeline.sinks.base import tag_of
from pipeline.sinks.overview import HELD_OUT, LOSS
from tests.support.browser import Browser
from tests.support.ranks import records

_CARD = (
    "findAll('scalar-card')"
    ".find(card => card.querySelector('tb-truncated-path').textContent === 'TAG')"
)
# The colour of a first run's line; axes, grid and labels are grey.
_OF_LINE = "b > r + 15 && Math.max(r, g, b) < 140"


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    """Where screenshots stay: the folder POSTNORM_ARTEFACTS, or the test's own."""
    folder = Path(os.environ.get("POSTNORM_ARTEFACTS", tmp_path / "artefacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def address(straight_run: Path, processes: None) -> Iterator[str]:
    with tensorboard(straight_run.parent) as address:
        yield address


def test_what_is_seen_first(browser: Browser, address: str, artefacts: Path) -> None:
    browser.resize(1600, 1000)
    browser.open(address)  # nothing behind it: whoever starts TensorBoard comes here
    cards = "findAll('card-view').slice(0, 4)"
    browser.wait_for(f"{cards}.length === 4")
    names = "each.querySelector('tb-truncated-path').textContent.replaceAll(/\\s/g, '')"
    shown = ["at_a_glance", "at_a_glance/0_numbers", "at_a_glance/1_loss",
             "at_a_glance/2_held_out_loss"]  # fmt: skip
    browser.wait_for(f"{cards}.map(each => {names})", shown)
    tops = browser.evaluate(f"{cards}.map(each => each.getBoundingClientRect().top)")
    assert max(tops) < 700, "the charts of both losses begin on the first screen"
    pictures = f"{cards}.slice(0, 2).map(each => each.querySelector('img'))"
    browser.wait_for(f"{pictures}.every(each => each?.complete && each.naturalWidth > 0)")
    # As large as they are: their letters cannot be read in another size.
    sizes = f"{pictures}.map(each => [each.naturalWidth, each.width, each.height])"
    browser.wait_for(sizes, [[320, 320, 215]] * 2)
    bottoms = browser.evaluate(f"{pictures}.map(each => each.getBoundingClientRect().bottom)")
    assert max(bottoms) < 1000
    for number, least in enumerate((0.5, 0.1)):  # of a line over the chart, and of a line of text
        for r, g, b in (LOSS, HELD_OUT):
            is_of = f"Math.abs(r - {r}) + Math.abs(g - {g}) + Math.abs(b - {b}) < 40"
            assert browser.columns_with(f"{pictures}[{number}]", is_of) > least
    browser.screenshot(artefacts / "tensorboard-at-a-glance.png")

    open_layout(browser, address, "First look")
    cards = "findAll('tf-custom-scalar-multi-line-chart-card')"
    titles = ["loss, held-out loss, unigram entropy, uniform guess (nats)", "learning rate",
              "tokens a second", "share done", "epochs", "restarts and rewinds"]  # fmt: skip
    browser.wait_for(f"{cards}.slice(0, 6).map(card => card.title)", titles)
    # Within the first screen, and with the tags that each draws, of a run under its own name.
    bottoms = browser.evaluate(f"{cards}.slice(0, 6).map(c => c.getBoundingClientRect().bottom)")
    assert max(bottoms) < 1000
    text = f"{cards}[0].shadowRoot.textContent"
    for tag in ("loss", "held_out_loss", "unigram_entropy", "uniform_guess"):
        browser.wait_for(f"{text}.includes('quality/{tag}')")
    assert "straight/tensorboard" in browser.evaluate(
        "findAll('tf-multi-checkbox')[0].shadowRoot.textContent"
    )
    browser.screenshot(artefacts / "tensorboard-first-look.png")


def test_a_run_is_seen(browser: Browser, address: str, straight_run: Path, artefacts: Path) -> None:
    browser.open(f"{address}?tagFilter=quality%2F.*loss#timeseries")
    for kind in ("eval", "train"):
        tag = tag_of(kind, "loss")
        card = _CARD.replace("TAG", tag)
        # The last value, as the table under the chart has it.
        last = f"{records(straight_run, kind)[-1]['loss']:.4f}".rstrip("0")
        table = f"{card}?.querySelector('scalar-card-data-table')"
        browser.wait_for(f"{table}?.innerText.includes('{last}')")
        chart = f"{card}.querySelector('line-chart .series-view')"
        browser.wait_for(f"{card}.querySelectorAll('line-chart-axis text').length >= 4")
        deadline = time.monotonic() + 30
        while (seen := browser.columns_with(chart, _OF_LINE)) < 0.7:
            assert time.monotonic() < deadline, f"{tag} has a line over {seen:.0%} of its width"
    browser.screenshot(artefacts / "tensorboard-scalars.png")

    browser.open(f"{address}#images")
    browser.wait_for("findAll('tf-image-loader img, img').some(each => each.naturalWidth > 0)")
    shown = ["at_a_glance", "at_a_glance/0_numbers", "layers/attention_entropy"]
    browser.wait_for("findAll('tf-image-loader').map(each => each.tag)", shown)
    browser.screenshot(artefacts / "tensorboard-images.png")

    browser.open(f"{address}#text")
    browser.wait_for("findAll('tf-text-loader tf-markdown-view, tf-markdown-view').length >= 2")
    for part in ("original:", "git_revision"):
        browser.wait_for(f"findAll('pre').some(each => each.textContent.includes('{part}'))")
    texts = browser.evaluate("findAll('pre').map(each => each.textContent)")
    [config] = [text for text in texts if "git_revision" in text]
    assert config.split() == (straight_run / "resolved.yaml").read_text().split()
    assert any("original:" in text and "input:" in text for text in texts)
    browser.screenshot(artefacts / "tensorboard-text.png")
