"""Programs forked from a process that has done their imports, in place of new ones.

A rank spends about 2.7 CPU-seconds on imports, most tests' ranks far less on training. `start`
asks a server of this pytest process, which forks; the fork takes the asked environment, folder
and output and runs the module as `python -m` does. What is killed is the fork itself. A script that
knows transformers alone (`run_script`) is forked by a second server, where this project cannot be
imported.

A fork shares one seed of Python's hashes with the others, so an order that depends on hashes would
be the same on all of them. Tests of whole runs (`straight_run`, SLURM, the demo, alone) start real
programs, which differ in it.

`python -m tests.support.warm FD KIND` is a server; FD is its end of a socket pair.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

ROOT = Path(__file__).parents[2]
_RANKS, _TRANSFORMERS = "ranks", "transformers"  # kinds of servers
_IMPORTED = {
    _RANKS: (
        "pipeline.use.pretrain", "pipeline.train.pretraining", "pipeline.sinks.tensorboard",
        "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.cpp_extension",
        "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops",
        "scipy.linalg", "numba",  # what DeepSpeed and the loader import when they are first used
        "data_prep.commands", "launch.commands", "experiments.commands",  # what the door imports
    ),
    _TRANSFORMERS: ("transformers.pipelines", "transformers.models.bert.modeling_bert"),
}  # fmt: skip
ABSENT = ("pipeline", "data_prep", "launch", "postnorm", "deepspeed", "webdataset", "sentencepiece",
          "google_crc32c")  # fmt: skip
"""Packages of this project, and those that only it needs: a script cannot import them."""
_READ_BY_IMPORTS = re.compile(
    "OMP_|GOMP|ATEN_|ONEDNN|TORCH_LOGS|TRITON_INTERPRET|NUMBA_|LD_|TRANSFORMERS_"
    "|PYTHON(?!PATH|DONTWRITE|UNBUFFERED)"
)
"""Variables that Python, torch and their like read as they start: a fork has those of its server.
Others, such as KMP_INIT_AT_FORK and TRITON_CACHE_DIR, are set by imports in any test."""
_MESSAGE_BYTES = 1 << 20


class Fork:
    """A forked program, with the methods of `subprocess.Popen` that tests call."""

    def __init__(self, command: list[str], status: int) -> None:
        self.args = command
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._line())
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _line(self) -> str:
        line = self._status.readline().decode()
        assert line.endswith("\n"), "the server of forks has ended"
        return line


Process = subprocess.Popen[bytes] | Fork


class _Server:
    """A process that forks, from the side of pytest."""

    def __init__(self, kind: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The server belongs to no test. torch reads the number of threads when it is imported.
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.variables.pop("PYTEST_CURRENT_TEST", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), kind],
            cwd=ROOT, env=self.variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self.forks: list[Fork] = []

    def start(
        self, words: list[str], variables: dict[str, str], folder: str, files: tuple[int, int, int]
    ) -> Fork:
        """`words` follow `python`; `files` are stdin, stdout and stderr."""
        sys.audit("subprocess.Popen", sys.executable, words, folder, None)  # as a new program is
        request = {"words": words, "variables": variables, "folder": folder}
        status, theirs = os.pipe()
        socket.send_fds(self._socket, [json.dumps(request).encode()], [*files, theirs])
        os.close(theirs)
        self.forks.append(Fork(words, status))
        return self.forks[-1]

    def end(self) -> None:
        self._socket.close()
        self.process.wait()


_servers: dict[str, _Server] = {}


def can_fork(command: list[str], variables: dict[str, str]) -> bool:
    """Whether a command is a module, and its environment is that of the imports."""
    return command[:2] == [sys.executable, "-m"] and _fits(_RANKS, variables)


def _fits(kind: str, variables: Mapping[str, str]) -> bool:
    server = _started(kind)
    changed = {name for name in {*variables, *server.variables}
               if variables.get(name) != server.variables.get(name)}  # fmt: skip
    return not any(map(_READ_BY_IMPORTS.match, changed))


def start(
    command: list[str], variables: dict[str, str], output: int, cwd: Path | None = None
) -> Fork:
    """Fork a rank that runs `python -m MODULE WORDS`, with both outputs into a file descriptor."""
    folder = str(cwd or Path.cwd())
    with open(os.devnull) as nothing:
        files = (nothing.fileno(), output, output)
        return _started(_RANKS).start(command[1:], variables, folder, files)


def run(*words: object, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m WORDS` in a fork of one thread, as `subprocess.run` with texts captured."""
    return _captured(_RANKS, ["-m", *map(str, words)], os.environ, cwd, stdin)


def run_script(
    script: str, *words: object, cwd: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `python -c SCRIPT WORDS` as `run` does; it can import none of `ABSENT`."""
    return _captured(_TRANSFORMERS, ["-c", script, *map(str, words)], variables, cwd)


def _captured(
    kind: str, words: list[str], variables: Mapping[str, str], cwd: Path, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    variables = {**variables, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        if _fits(kind, variables):
            files = (given.fileno(), out.fileno(), err.fileno())
            code = _started(kind).start(words, variables, str(cwd), files).wait()
        else:
            code = subprocess.run(
                [sys.executable, *words], cwd=cwd, env=variables, stdin=given, stdout=out,
                stderr=err, check=False,
            ).returncode  # fmt: skip
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(words, code, *texts)


def running() -> list[int]:
    """Process numbers of the forks that still run."""
    for server in _servers.values():
        server.forks = [fork for fork in server.forks if fork.poll() is None]
    return [fork.pid for server in _servers.values() for fork in server.forks]


def close() -> None:
    """End the servers."""
    while _servers:
        _servers.popitem()[1].end()


def _started(kind: str) -> _Server:
    if kind not in _servers or _servers[kind].process.poll() is not None:
        _servers[kind] = _Server(kind)
    return _servers[kind]


def _serve(connection: socket.socket) -> dict[str, object]:
    """Fork at each request; returns the request in the fork alone."""
    status_of: dict[int, int] = {}
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([connection, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        _report(status_of)
        if connection not in ready:
            continue
        message, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
        if not message:  # pytest has closed its end, or has ended
            for pid in status_of:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        *standard, status = files
        pid = os.fork()
        if pid:
            os.write(status, f"{pid}\n".encode())
            for number in standard:
                os.close(number)
            status_of[pid] = status
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(standard):
            os.dup2(file, number)
        for number in (wake, woken, *files, *status_of.values()):
            os.close(number)
        connection.close()
        request: dict[str, object] = json.loads(message)
        return request


def _report(status_of: dict[int, int]) -> None:
    while status_of:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        status = status_of.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
        os.close(status)


def _read_again() -> None:
    """Let the loaded modules of Hugging Face have what the variables say now."""
    constants = importlib.reload(sys.modules["huggingface_hub.constants"])
    cache = os.environ.get("HF_MODULES_CACHE", os.path.join(constants.HF_HOME, "modules"))
    for name in ("utils.hub", "utils", "dynamic_module_utils"):
        vars(sys.modules[f"transformers.{name}"])["HF_MODULES_CACHE"] = cache


def _run_script(script: str) -> None:
    """Run it as the main module; returns only by an exception."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(script, "<string>", "exec"), vars(main))
    # What Python does at an exit, but freeing all modules, which copies most of the shared memory.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _main() -> NoReturn:
    before, kind = dict(os.environ), sys.argv[2]
    if kind == _TRANSFORMERS:
        sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
    for name in _IMPORTED[kind]:
        importlib.import_module(name)
    if kind == _RANKS:  # numba takes 0.4 s before the first of its functions
        sys.modules["pipeline.data.random"].permutation(2, seed=0, purpose=0, epoch=0)
    set_by_imports = {name: value for name, value in os.environ.items() if name not in before}
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    words, variables = request["words"], request["variables"]
    assert isinstance(words, list)
    assert isinstance(variables, dict)
    os.environ.clear()
    os.environ.update(set_by_imports | variables)
    os.chdir(str(request["folder"]))
    how, what, *rest = words
    sys.modules["numpy"].random.seed()
    if how == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest]
        _read_again()
        _run_script(what)
    else:
        sys.path[0], sys.argv = os.getcwd(), [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _main()
