"""An export goes to the hub: against a local server that speaks as much of its API."""

import base64
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.use.hf import push
from tests.support.processes import python

pytestmark = pytest.mark.usefixtures("processes")


class _Hub(ThreadingHTTPServer):
    """Knows one token, keeps what is committed, and stores no large files apart."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.commits: list[tuple[str, str, dict[str, bytes]]] = []


class _Answers(BaseHTTPRequestHandler):
    server: _Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self.headers.get("Authorization") != "Bearer good":
            return self._say(401, {"error": "Invalid username or password."})
        if parts[1:3] == ["repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            self.server.repositories[name] = {
                "visibility": asked["visibility"],
                "branches": ["main"],
            }
            return self._say(200, {"url": f"https://huggingface.co/{name}", "id": name})
        if parts[1] == "validate-yaml":  # of the card
            return self._say(200, {"errors": [], "warnings": []})
        name, verb, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
        repository = self.server.repositories.get(name)
        if repository is None:
            return self._say(404, {"error": "Repository not found"})
        if verb == "branch":
            repository["branches"].append(revision)
            return self._say(200, {})
        if revision not in repository["branches"]:
            return self._say(404, {"error": f"Invalid rev id: {revision}"})
        if verb == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for file in json.loads(body)["files"]]  # fmt: skip
            return self._say(200, {"files": files})
        assert verb == "commit"
        lines = [json.loads(line) for line in body.splitlines()]
        added = {line["value"]["path"]: base64.b64decode(line["value"]["content"])
                 for line in lines if line["key"] == "file"}  # fmt: skip
        self.server.commits.append((name, revision, added))
        return self._say(
            200, {"commitUrl": f"https://huggingface.co/{name}/commit/1", "commitOid": "1"}
        )

    def do_GET(self) -> None:
        self._say(404, {"error": "not found"})

    def _say(self, code: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[_Hub]:
    server = _Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _export(hub: _Hub, token: str, *words: object, code: int = 0) -> str:
    port = hub.server_address[1]
    variables = {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    return python("-m", "pipeline", "export", *words, code=code, env={**os.environ, **variables})


@pytest.mark.long
def test_a_folder_is_pushed_whole(hub: _Hub, straight_run: Path, tmp_path: Path) -> None:
    words = (f"{straight_run}@30", tmp_path / "mine", "--format", "hf")
    told = _export(hub, "good", *words, "--push", "lab/mine@step-30")
    assert "https://huggingface.co/lab/mine/commit/1" in told
    assert hub.repositories["lab/mine"] == {
        "visibility": "private",
        "branches": ["main", "step-30"],
    }
    [(name, revision, files)] = hub.commits
    assert (name, revision) == ("lab/mine", "step-30")
    written = {str(path.relative_to(tmp_path / "mine")): path.read_bytes()
               for path in (tmp_path / "mine").rglob("*") if path.is_file()}  # fmt: skip
    assert files == written
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    # A refusal leaves the folder, and names what to do.
    words = (straight_run, tmp_path / "kept", *words[2:], "--push", "lab/mine")
    told = _export(hub, "bad", *words, code=2)
    assert "not pushed to lab/mine" in told
    assert "hf auth whoami" in told
    assert (tmp_path / "kept/model.safetensors").is_file()
    assert len(hub.commits) == 1


@pytest.mark.parametrize("name", ["mine", "a/b/c", "@x", "lab/"])
def test_what_is_not_a_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected ORG/NAME"):
        push(tmp_path, name)
