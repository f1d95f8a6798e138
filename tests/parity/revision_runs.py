"""Runs of a given revision, started and read only by what stays stable for users.

A run is started by its config file, overrides and the variables of its process group, and read by
the files in its folder. Nothing is imported from the packages: each process imports those of the
revision that it runs.
"""

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.processes import free_port
from tests.support.warm import Process

ROOT = Path(__file__).parents[2]
WRITTEN = Path(__file__).parent / "golden/written_by_28d9e7b.tar.xz"
"""Holds `dataset/` and `run/`, as revision 28d9e7b wrote them, and the configs they came from."""
LOSSES = WRITTEN.parent / "losses.json"
"""Losses of every case, as revision 28d9e7b computed them."""
BASE = "28d9e7b"

# Times and speeds differ from run to run; whatever else a step logs must not.
_COMPARED = re.compile(
    r"loss|accuracy|lr|alpha|grad_norm(_.*)?|update_ratio(_.*)?|attention_entropy(_.*)?"
    r"|num_masked|tokens|fill|epoch|batch|seq_len|unmasked_documents|skipped_steps"
)
# What a launcher or a job sets, and what changes how many threads compute.
_NOT_INHERITED = re.compile(r"(SLURM|SBATCH|SRUN|POSTNORM|TORCHELASTIC|PYTHON)_?.*|.*RANK|.*_SIZE")


class RunError(Exception):
    """A run did not end as it must; the message has the end of its output."""


@dataclass
class Outcome:
    """What a case left behind, as exact as JSON keeps it, which is every bit of a double."""

    # By kind and step, such as `train 7`, the logged values by name; lines of batches.tsv;
    # fingerprint of the dataset, and the step that the last attempt resumed from; sha256 by the
    # name of a tensor of the newest checkpoint, or of a file of a dataset.
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    batches: list[str] = field(default_factory=list)
    start: dict[str, object] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def losses(self) -> dict[int, float]:
        return self.logged("train", "loss")

    def logged(self, kind: str, name: str) -> dict[int, float]:
        """Return a logged value by step, of `train` or `eval`."""
        rows = ((key.split(), row) for key, row in self.rows.items())
        return {int(step): row[name] for (of, step), row in rows if of == kind}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check a revision out into a temporary folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="postnorm-revision-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def commit_of(revision: str) -> str:
    return _git("rev-parse", "--verify", f"{revision}^{{commit}}")


def unpack_written(folder: Path) -> None:
    with tarfile.open(WRITTEN) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)


def run_ranks(
    tree: Path, arguments: list[str], *, cwd: Path, log: Path, num_ranks: int, timeout_s: float
) -> None:
    """Run `python ARGUMENTS` of a revision on every rank, one thread each, or raise RunError."""
    with start_ranks(tree, arguments, cwd=cwd, log=log, num_ranks=num_ranks) as processes:
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes):
            failed = any(process.returncode for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.returncode for process in processes]
    if any(codes):
        tail = log.read_text()[-3000:]
        raise RunError(f"exit codes {codes} (None: was still running) of {arguments}:\n{tail}")


@contextmanager
def start_ranks(
    tree: Path, arguments: list[str], *, cwd: Path, log: Path, num_ranks: int
) -> Iterator[list[Process]]:
    """Start `python ARGUMENTS` of a revision on every rank; end them when the block ends.

    Ranks of this tree are forks with their imports done: see `tests.support.warm`.
    """
    inherited = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.fullmatch(k)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    group = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    path = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    processes: list[Process] = []
    command = [sys.executable, *arguments]
    try:
        with log.open("ab") as output:
            for rank in range(num_ranks):
                variables = {**inherited, **threads, **group, **path}
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if tree == ROOT and warm.can_fork(command, variables):
                    processes.append(warm.start(command, variables, output.fileno(), cwd))
                    continue
                processes.append(subprocess.Popen(command, cwd=cwd, env=variables, stdout=output,
                                                  stderr=subprocess.STDOUT))  # fmt: skip
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()


def outcome_of_run(run_dir: Path) -> Outcome:
    """Read what a run logged, and the tensors of its newest checkpoint."""
    outcome = Outcome(batches=(run_dir / "batches.tsv").read_text().splitlines()[1:])
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in ("train", "eval"):
            row = {k: v for k, v in record.items() if _COMPARED.fullmatch(k)}
            outcome.rows[f"{record['kind']} {record['step']}"] = row
    attempt = json.loads((run_dir / "attempts.jsonl").read_text().splitlines()[-1])
    outcome.start = {name: attempt[name] for name in ("fingerprint", "resumed_from_step")}
    newest = (run_dir / "checkpoints/latest").read_text().strip()
    for path in sorted((run_dir / "checkpoints" / newest / "state").glob("*.safetensors")):
        for name, digest in _tensor_digests(path):
            outcome.digests[f"{path.name} {name}"] = digest
    return outcome


def outcome_of_dataset(folder: Path) -> Outcome:
    paths = [folder / "tokenizer.model", *sorted((folder / "shards").glob("*.tar"))]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    fingerprint = json.loads((folder / "index.json").read_text())["fingerprint"]
    return Outcome(start={"fingerprint": fingerprint}, digests=digests)


def _tensor_digests(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each tensor's name and the sha256 of its type, shape and bytes.

    The file's own hash would not do: its header may hold notes that say nothing of the weights.
    """
    data = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + header_bytes])
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            about = f"{entry['dtype']} {entry['shape']} ".encode()
            body = data[8 + header_bytes + first : 8 + header_bytes + last]
            yield name, hashlib.sha256(about + body).hexdigest()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()
