"""The pages become a site without warnings, and their figure shows the study's numbers."""

import json
from pathlib import Path

from benchmarks.figure import DATA, FIGURE, figure, run_of
from experiments.study import plan, read_study
from tests.support.browser import Browser
from tests.support.pages import PAGES
from tests.support.processes import python

_LARGEST_BYTES = 60_000
# Tables that show less than all of themselves in the page's column.
_CUT = """
[...document.querySelectorAll('table.docutils')]
  .filter(table => table.scrollWidth > table.clientWidth + 1)
  .map(table => table.innerText.slice(0, 60))
"""


def test_site_has_every_page_and_shows_whole_tables(browser: Browser, tmp_path: Path) -> None:
    """A warning is an error by mkdocs.yml: of links, of pages without a place, of docstrings."""
    python("-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site")
    for page in PAGES:
        if page.parent.name == "docs":
            assert (tmp_path / "site" / f"{page.stem}.html").is_file()
    assert "read_index" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    browser.resize(1280, 1000)
    for name in ("slurm", "faults", "training"):
        browser.open(f"file://{tmp_path}/site/{name}.html")
        browser.wait_for("document.querySelectorAll('table.docutils').length")
        assert browser.evaluate(_CUT) == [], name


def test_figure_is_of_its_data_and_of_all_seeds_of_the_study() -> None:
    drawn = figure(json.loads(DATA.read_text()))
    assert drawn == FIGURE.read_text(encoding="utf-8"), "run `python -m benchmarks.figure`"
    assert len(drawn) < _LARGEST_BYTES
    data = json.loads(DATA.read_text())
    runs = json.loads(DATA.with_name("starts.json").read_text())["runs"]
    planned = plan(*read_study("starts"), "small", out=Path("out")).runs
    for label, seeds in data["held_out_loss"].items():
        assert len(seeds) >= 3, label
        for seed, loss in seeds.items():
            assert runs[run_of(label, seed)]["values"]["held_out_loss"] == loss, (label, seed)
            rate = planned[run_of(label, seed)].config.train.lr
            assert rate == float(label.rpartition("lr ")[2]), (label, seed)
    ends = {curve[-1][0] for seeds in data["curves"].values() for curve in seeds.values()}
    assert ends == {600}
    # What README says of it: one start at the unigram entropy, all others below.
    stuck, *others = data["held_out_loss"].values()
    assert all(abs(loss - data["unigram_entropy"]) < 0.05 for loss in stuck.values())
    assert all(max(seeds.values()) < data["unigram_entropy"] - 0.25 for seeds in others)
