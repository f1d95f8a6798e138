"""Ranks forked from a process that has imported torch and DeepSpeed, in place of new programs.

A rank spends about 2.7 CPU-seconds on imports, most tests' ranks far less on training. `start`
asks the server of this pytest process, which forks; the fork takes the asked environment, folder
and output and runs the module as `python -m` does. What is killed is the fork itself.

A fork shares one seed of Python's hashes with the others, so an order that depends on hashes would
be the same on all of them. Tests of whole runs (`straight_run`, SLURM, the demo, alone) start real
programs, which differ in it.

`python -m tests.support.warm FD` is the server; FD is its end of a socket pair.
"""

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
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
_IMPORTED = (
    "pipeline.use.pretrain", "pipeline.train.pretraining", "pipeline.sinks.tensorboard",
    "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.cpp_extension",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops",
    "scipy.linalg", "numba",  # what DeepSpeed and the loader import when they are first used
    "data_prep.commands", "launch.commands", "studies.commands",  # what the door imports
)  # fmt: skip
_READ_BY_IMPORTS = re.compile(
    "OMP_|GOMP|ATEN_|ONEDNN|TORCH_LOGS|TRITON_INTERPRET|NUMBA_|LD_"
    "|PYTHON(?!PATH|DONTWRITE|UNBUFFERED)"
)
"""Variables that Python, torch and their like read as they start: a fork has those of its server.
Others, such as KMP_INIT_AT_FORK and TRITON_CACHE_DIR, are set by imports in any test."""
_MESSAGE_BYTES = 1 << 20


class Fork:
    """A forked rank, with the methods of `subprocess.Popen` that tests call."""

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
    """The process that forks, from the side of pytest."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The server belongs to no test. torch reads the number of threads when it is imported.
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.variables.pop("PYTEST_CURRENT_TEST", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=ROOT, env=self.variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self.forks: list[Fork] = []

    def start(
        self, words: list[str], variables: dict[str, str], folder: str, files: tuple[int, int, int]
    ) -> Fork:
        """`files` are stdin, stdout and stderr."""
        request = {"words": words, "variables": variables, "folder": folder}
        status, theirs = os.pipe()
        socket.send_fds(self._socket, [json.dumps(request).encode()], [*files, theirs])
        os.close(theirs)
        self.forks.append(Fork(words, status))
        return self.forks[-1]

    def end(self) -> None:
        self._socket.close()
        self.process.wait()


_server: _Server | None = None


def can_fork(command: list[str], variables: dict[str, str]) -> bool:
    """Whether a command is a module, and its environment is that of the imports."""
    server = _started()
    changed = {
        name for name in {*variables, *server.variables}
        if variables.get(name) != server.variables.get(name)
    }  # fmt: skip
    is_other = any(map(_READ_BY_IMPORTS.match, changed))
    return command[:2] == [sys.executable, "-m"] and not is_other


def start(
    command: list[str], variables: dict[str, str], output: int, cwd: Path | None = None
) -> Fork:
    """Fork a rank that runs `python -m MODULE WORDS`, with both outputs into a file descriptor."""
    folder = str(cwd or Path.cwd())
    with open(os.devnull) as nothing:
        files = (nothing.fileno(), output, output)
        return _started().start(command[2:], variables, folder, files)


def run(*words: object, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m WORDS` in a fork of one thread, as `subprocess.run` with texts captured."""
    command = [str(word) for word in words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        if can_fork([sys.executable, "-m"], variables):
            files = (given.fileno(), out.fileno(), err.fileno())
            code = _started().start(command, variables, str(cwd), files).wait()
        else:
            code = subprocess.run(
                [sys.executable, "-m", *command], cwd=cwd, env=variables, stdin=given, stdout=out,
                stderr=err, check=False,
            ).returncode  # fmt: skip
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(command, code, *texts)


def running() -> list[int]:
    """Process numbers of the forks that still run."""
    if _server is None:
        return []
    _server.forks = [fork for fork in _server.forks if fork.poll() is None]
    return [fork.pid for fork in _server.forks]


def close() -> None:
    """End the server."""
    global _server
    if _server is not None:
        _server.end()
        _server = None


def _started() -> _Server:
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = _Server()
    return _server


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


def _main() -> NoReturn:
    before = dict(os.environ)
    for name in _IMPORTED:
        importlib.import_module(name)
    # numba takes 0.4 s before the first of its functions.
    sys.modules["pipeline.data.random"].permutation(2, seed=0, purpose=0, epoch=0)
    set_by_imports = {name: value for name, value in os.environ.items() if name not in before}
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    words, variables = request["words"], request["variables"]
    assert isinstance(words, list)
    assert isinstance(variables, dict)
    os.environ.clear()
    os.environ.update(set_by_imports | variables)
    sys.path[0] = str(request["folder"])
    os.chdir(sys.path[0])
    sys.modules["numpy"].random.seed()
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _main()
