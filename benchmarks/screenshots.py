"""Takes the pictures of docs/monitoring.md: TensorBoard, a datasheet and `compare` in a browser.

    python -m benchmarks.screenshots RUN OTHER_RUN --data DATASET --out docs/screens

TensorBoard shows the folder that RUN lies in. Needs Chromium (see `tests.support.browser`).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from pipeline.errors import ConfigError
from pipeline.inspect.compare import compare, read_runs, write_plot
from tests.support.browser import Browser, find_browser

_COLOURS = 200


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Run TensorBoard on a folder and give its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    with tempfile.NamedTemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0", "--load_fast=false"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 120
            path = Path(output.name)
            while not (address := re.search(r"http://127\.0\.0\.1:\d+/", path.read_text())):
                assert process.poll() is None, path.read_text()
                assert time.monotonic() < deadline, path.read_text()
                time.sleep(0.1)
            yield address[0]
        finally:
            process.terminate()
            process.wait(30)


def open_layout(browser: Browser, address: str, category: str) -> None:
    """Open the tab with the charts of the layout, and wait for a category's."""
    browser.open(f"{address}#custom_scalars")
    browser.wait_for(f"{_category(category)}?.offsetHeight > 0")


def _category(name: str) -> str:
    views = "findAll('tf-category-paginated-view')"
    return f"{views}.find(each => each.category?.name === '{name}')"


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/screens"))
    arguments = parser.parse_args()
    program = find_browser()
    if program is None:
        raise ConfigError("no Chromium is found; expected one in PATH or in POSTNORM_CHROMIUM")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, tensorboard(arguments.run.parent) as address:
        browser = Browser(program, Path(profile))
        try:
            _take(browser, address, arguments)
        finally:
            browser.close()


def _take(browser: Browser, address: str, arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    browser.resize(1600, 900)
    browser.open(address)
    browser.wait_for("findAll('image-card img').length > 1")
    _shoot(browser, out / "at-a-glance.png")
    open_layout(browser, address, "First look")
    _shoot(browser, out / "first-look.png")
    browser.evaluate(f"{_category('Layers')}.scrollIntoView()")
    _shoot(browser, out / "layers.png")
    browser.resize(1000, 800)
    browser.open(f"{address}#images")
    browser.wait_for("findAll('img').some(each => each.naturalWidth > 0)")
    _shoot(browser, out / "entropy-map.png")
    browser.open((arguments.data / "datasheet.html").resolve().as_uri())
    _shoot(browser, out / "datasheet.png")
    runs = read_runs([arguments.run, arguments.other])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "compare.html"
        write_plot(page, runs, compare(runs))
        browser.resize(1250, 800)
        browser.open(page.as_uri())
        _shoot(browser, out / "compare.png")


def _shoot(browser: Browser, path: Path, settle_s: float = 4.0) -> None:
    """Take what is seen once charts have drawn their lines, with few colours."""
    time.sleep(settle_s)
    browser.screenshot(path)
    Image.open(path).convert("RGB").quantize(_COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    main()
