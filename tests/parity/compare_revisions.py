"""Runs two revisions on this machine and compares what they compute, bit for bit.

Every step's loss, gradient norm and other logged values, the hashes of all batches, held-out
losses and every tensor of the last checkpoint must be equal; times and speeds are not looked at.
Only the same machine computes the same bits: `golden/losses.json` is for other ones.

examples:
  python -m tests.parity.compare_revisions                          working tree against 28d9e7b
  python -m tests.parity.compare_revisions --only demo,bert         two cases of it
  python -m tests.parity.compare_revisions --old HEAD~3 --new HEAD  two other revisions
  python -m tests.parity.compare_revisions --save results           keep what the new side computed
  python -m tests.parity.compare_revisions --old results            compare with that, later

The exit code is 0 if all is equal, 1 if something differs, 2 if a run failed.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Lock

from tests.parity import revision_runs as runs
from tests.parity.revision_cases import CASES, Case
from tests.parity.revision_runs import Outcome, RunError

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "postnorm/parity"


@dataclass
class Side:
    """A revision, a checkout, or the results of one.

    A revision is checked out when its first case is not in the cache.
    """

    name: str
    stack: ExitStack
    tree: Path | None = None
    results: Path | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        folder = Path(self.name)
        self._lock = Lock()
        if (folder / "pipeline").is_dir():
            self.tree = folder.resolve()
        elif folder.is_dir():
            self.results = folder
        else:
            self.commit = runs.commit_of(self.name)

    def outcome(self, case: Case, *, use_cache: bool) -> Outcome:
        """Read a case's outcome, or run it.

        Raises:
            RunError: the run failed, or the results of an earlier comparison do not have it.
        """
        if self.results:
            return _read(self.results / f"{case.name}.json")
        if not self.commit:
            return self._run(case)
        kept = _CACHE / _key(self.commit) / f"{case.name}.json"
        if not (use_cache and kept.exists()):
            write(kept, self._run(case))
        return _read(kept)

    def _run(self, case: Case) -> Outcome:
        with self._lock:
            if self.tree is None:
                self.tree = self.stack.enter_context(runs.checked_out(self.name))
        with tempfile.TemporaryDirectory(prefix=f"postnorm-{case.name}-") as folder:
            return case.outcome(self.tree, Path(folder))


def differences(old: Outcome, new: Outcome) -> Iterator[str]:
    """Yield what differs, one line a kind: the first place of it, and how often."""
    for part in ("start", "batches", "rows", "digests"):
        a, b = getattr(old, part), getattr(new, part)
        if isinstance(a, list):
            a, b = dict(enumerate(a)), dict(enumerate(b))
        if places := [place for place in {**a, **b} if a.get(place) != b.get(place)]:
            first = places[0]
            count = f"{len(places)} of {len({**a, **b})} {part} differ"
            yield f"{count}, first at {first}: {_compared(a.get(first), b.get(first))}"
    steps = [s for s in old.losses if s in new.losses and old.losses[s] != new.losses[s]]
    if steps:
        largest = max(abs(old.losses[step] - new.losses[step]) for step in steps)
        yield f"losses of {len(steps)} steps differ from step {steps[0]} on, by up to {largest:.3g}"


def _compared(old: object, new: object) -> str:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{old} -> {new}"
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names[:4])


def write(path: Path, outcome: Outcome) -> None:
    """Write an outcome as JSON, which keeps every bit of a double."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(asdict(outcome), file)
    Path(file.name).replace(path)


def _read(path: Path) -> Outcome:
    if not path.exists():
        raise RunError(f"{path} does not exist: run this case with --save {path.parent}")
    return Outcome(**json.loads(path.read_text()))


@cache
def _machine() -> str:
    """Name what decides the bits besides the revision and the case."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = next((line for line in cpu.splitlines() if line.startswith("flags")), "")
    packages = [f"{name} {version(name)}" for name in ("torch", "deepspeed", "numpy")]
    limits = [f"{name}={os.environ.get(name)}" for name in ("ATEN_CPU_CAPABILITY",
              "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")]  # fmt: skip
    return repr([platform.machine(), platform.python_version(), flags, packages, limits])


def _key(commit: str) -> str:
    sources = b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("revision_*.py")))
    written = hashlib.sha256(runs.WRITTEN.read_bytes() + sources).hexdigest()
    return hashlib.sha256(f"{commit} {written} {_machine()}".encode()).hexdigest()[:16]


def compare(case: Case, old: Side, new: Side, *, use_cache: bool, save: Path | None) -> int:
    """Run a case on both sides, print one line, more if they differ, and return the exit code."""
    try:
        first = old.outcome(case, use_cache=use_cache)
        second = new.outcome(case, use_cache=use_cache)
    except RunError as error:
        print(f"{case.name:<24}FAILED\n{error}", flush=True)
        return 2
    if save:
        write(save / f"{case.name}.json", second)
    lines = list(differences(first, second))
    verdict = "DIFFERS" if lines else "equal"
    steps = f"{len(first.losses)} steps" if first.losses else "a dataset"
    print(
        f"{case.name:<24}{verdict:<9}{steps}, {first.seconds:.0f} s and {second.seconds:.0f} s"
        + "".join(f"\n    {line}" for line in lines),
        flush=True,
    )
    return 1 if lines else 0


def main() -> int:
    description, _, epilog = (__doc__ or "").partition("examples:")
    parser = argparse.ArgumentParser(
        prog="python -m tests.parity.compare_revisions", description=description,
        epilog="examples:" + epilog + "\ncases: " + ", ".join(CASES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = "a revision, a checkout, or a folder written by --save"
    parser.add_argument("--old", default=runs.BASE, help=f"{what}; {runs.BASE} by default")
    parser.add_argument("--new", default=str(runs.ROOT), help=f"{what}; this tree by default")
    parser.add_argument("--only", default=",".join(CASES), help="names of cases, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; 1 by default")
    parser.add_argument("--save", type=Path, help="write the new side's results to this folder")
    parser.add_argument("--no-cache", action="store_true", help=f"do not read {_CACHE}")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only: unknown cases {', '.join(unknown)}; known: {', '.join(CASES)}")
    # As Ctrl-C does: what was checked out must not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        old, new = Side(arguments.old, stack), Side(arguments.new, stack)
        options = {"use_cache": not arguments.no_cache, "save": arguments.save}
        pool = ThreadPoolExecutor(arguments.jobs)
        try:
            futures = [pool.submit(compare, CASES[name], old, new, **options) for name in names]
            codes = [future.result() for future in futures]
        finally:  # runs end before what they run is removed
            pool.shutdown(cancel_futures=True)
    print(f"{codes.count(0)} equal, {codes.count(1)} differ, {codes.count(2)} failed")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
