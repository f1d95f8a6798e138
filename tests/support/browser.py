"""A headless Chromium driven over a pipe by the DevTools protocol; needs no package.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser",
          "google-chrome", "google-chrome-stable")  # fmt: skip
_FROM_CHROMIUM, _TO_CHROMIUM = 4, 3
"""File descriptors in the browser, as --remote-debugging-pipe has them."""

# Finds elements in shadow roots and in frames as well.
_FIND_ALL = """
function findAll(selector, root = document) {
  const found = [...root.querySelectorAll(selector)];
  for (const each of root.querySelectorAll('*')) {
    if (each.shadowRoot) found.push(...findAll(selector, each.shadowRoot));
    if (each.tagName === 'IFRAME' && each.contentDocument)
      found.push(...findAll(selector, each.contentDocument));
  }
  return found;
}
"""

_COLUMNS = """
createImageBitmap(new Blob([Uint8Array.from(atob('DATA'), c => c.charCodeAt(0))])).then(image => {
  const {width, height} = image;
  const canvas = new OffscreenCanvas(width, height).getContext('2d');
  canvas.drawImage(image, 0, 0);
  const pixels = canvas.getImageData(0, 0, width, height).data;
  const columns = new Set();
  for (let i = 0; i < width * height; i++) {
    const [r, g, b] = pixels.slice(4 * i, 4 * i + 3);
    if (IS_OF) columns.add(i % width);
  }
  return columns.size / width;
})
"""


def find_browser() -> str | None:
    """The program that POSTNORM_CHROMIUM names, or one in PATH or of Playwright's."""
    named = os.environ.get("POSTNORM_CHROMIUM")
    if named:
        return named
    in_path = [path for name in _NAMES if (path := shutil.which(name))]
    cached = sorted((Path.home() / ".cache/ms-playwright").glob("chromium*/*/*"))
    of_playwright = [str(path) for path in cached if path.name in ("chrome", "headless_shell")]
    return next(iter([*in_path, *of_playwright]), None)


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Above the numbers that they get in the browser.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read, to_write)]

        def place() -> None:
            os.dup2(ends[0], _TO_CHROMIUM)
            os.dup2(ends[1], _FROM_CHROMIUM)

        self._process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             f"--user-data-dir={profile}", "--window-size=1400,1600", "about:blank"],
            preexec_fn=place, pass_fds=(_TO_CHROMIUM, _FROM_CHROMIUM),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (to_read, to_write, *ends):
            os.close(end)
        self._rest, self._number, self._session = b"", 0, None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=1, mobile=False)  # fmt: skip

    def open(self, url: str) -> None:
        """Goes to an address; what it loads may not be there yet."""
        self._call("Page.navigate", url="about:blank")  # also where only the part behind # changes
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, or of its promise; it may use `findAll(selector)`.

        That is `querySelectorAll` for the document with all shadow roots and frames in it.
        """
        found = self._evaluated(script)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, expected: Any = None, timeout_s: float = 60) -> None:
        """Waits until an expression is `expected`, or without one neither false nor empty.

        An expression may fail meanwhile: an element is in the page before what is in it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._evaluated(script)
            value = found["result"].get("value") if "exceptionDetails" not in found else None
            if value and expected in (None, value):
                return
            assert time.monotonic() < deadline, (found, self.evaluate("document.body.innerText"))
            time.sleep(0.2)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def columns_with(self, element: str, is_of: str) -> float:
        """Share of an element's columns that show a pixel for which a test of r, g, b holds.

        Both are JavaScript; what the element shows may be drawn by the GPU.
        """
        box = self.evaluate(f"{element}.getBoundingClientRect().toJSON()")
        clip = {name: box[name] for name in ("x", "y", "width", "height")}
        shot = self._call("Page.captureScreenshot", clip=clip | {"scale": 1})["data"]
        return float(self.evaluate(_COLUMNS.replace("DATA", shot).replace("IS_OF", is_of)))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _evaluated(self, script: str) -> dict[str, Any]:
        return self._call("Runtime.evaluate",
                          expression=f"(() => {{ {_FIND_ALL}; return {script.strip()} }})()",
                          returnByValue=True, awaitPromise=True)  # fmt: skip

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                chunk = os.read(self._read, 1 << 20)
                assert chunk, f"the browser ended with {self._process.wait()}"
                self._rest += chunk
            text, _, self._rest = self._rest.partition(b"\0")
            answer: dict[str, Any] = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
