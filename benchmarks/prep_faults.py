"""Kills in data preparation while two runs contend; a table, one JSON line, exit code 1 if wrong.

    python -m benchmarks.prep_faults [--kills 30] [--seed 1]
        [--table benchmarks/results/prep_faults.md]

Two users prepare the same dataset in the same folder, with all stages on: each gives the command
again as soon as it ends with another code than 0, as one whose run was refused or killed. As soon
as a stage runs that was not struck yet, and once at the start, a random process of both (the first
one of a run, a worker, or Python's resource tracker) is killed with kill -9 after a random part of
0.1 s. When both are done, every file of the dataset and of work/ must be, byte for byte, that of a
run alone, and nothing may be left of the killed ones; then another round begins, until all kills
are done.
"""

import argparse
import json
import os
import platform
import pydoc_data.topics
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lease import holders
from data_prep.verify import verify
from pipeline.config.load import git_revision
from pipeline.errors import EXIT_FAILED_RETRY
from pipeline.runtime.files import is_alive

_WITH_TIMES = {"report.json", "datasheet.html", "datasheet.md", "resolved.yaml",
               "dataset.done.json"}  # fmt: skip
# Python's keeper of semaphores, a process of its own, is killed as well. The next one complains of
# those that it has never heard of; the run goes on.
_TRACKER = re.compile(r'Traceback .*\n  File ".*resource_tracker.py".*\n.*\nKeyError: .*\n')
_START_WITHIN_S, _INTO_STAGE_S, _ROUND_WITHIN_S = 3.0, 0.1, 600.0


def _write_config(folder: Path) -> Path:
    """Four sources, each a piece of Python's own help, and every stage there is."""
    topics = sorted(pydoc_data.topics.topics.items())
    sources = []
    for number in range(4):
        path = folder / f"{number}.jsonl"
        with path.open("w") as file:
            for topic, text in topics[number::4]:
                for place, part in enumerate(text.split("\n\n")):
                    file.write(json.dumps({"id": f"{topic}/{place}", "text": part}) + "\n")
        sources.append({"name": f"s{number}", "inputs": [str(path)]})
    items = folder / "items.jsonl"
    items.write_text(json.dumps({"text": topics[0][1][:400]}) + "\n")
    config = folder / "prep.yaml"
    config.write_text(
        f"output_dir: unset\nworkers: 2\nsources: {json.dumps(sources)}\n"
        "dedup: {lines: true, near_duplicates: true, bands: 4}\n"
        f"decontaminate: {{sets: [{{name: items, inputs: [{items}]}}]}}\n"
        "tokenizer: {vocab_size: 1000}\n"
        "shards: {block_tokens: 8000, shard_mb: 1, eval_fraction: 0.05}\n"
    )
    return config


class _User:
    """One who gives a command until it ends well."""

    def __init__(self, config: Path, output: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "data_prep", "run", str(config)]
        self._command.append(f"output_dir={output}")
        self._log, self.starts = log, 0
        self.code: int | None = None
        self._start()

    def _start(self) -> None:
        self.starts += 1
        with self._log.open("a") as file:
            self.process = subprocess.Popen(self._command, stdout=file, stderr=subprocess.STDOUT)

    def look(self) -> None:
        """Start again what was refused or killed; keep every other code."""
        if self.code is None and (code := self.process.poll()) is not None:
            if code in (EXIT_FAILED_RETRY, -signal.SIGKILL):
                self._start()
            else:
                self.code = code

    def processes(self) -> list[int]:
        """List the command's process and all below it."""
        found = [self.process.pid] if self.process.poll() is None else []
        for pid in found:
            with suppress(FileNotFoundError):
                for path in Path(f"/proc/{pid}/task").glob("*/children"):
                    found += map(int, path.read_text().split())
        return found


def _running(output: Path) -> set[str]:
    """Name the stages of which a live process works on a task."""
    names = set()
    for path in output.rglob("*.running.json"):
        with suppress(FileNotFoundError, ValueError):
            if is_alive(json.loads(path.read_text())["process"]):
                names.add("index" if path.parent == output else path.parent.name)
    return names


def _differences(straight: Path, output: Path) -> tuple[int, list[str]]:
    """Compare all files but those that say when and where they were made, and the lease."""
    of_both = [
        {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name not in _WITH_TIMES and path.parent.name != "lease"
        }
        for folder in (straight, output)
    ]
    names = sorted(of_both[0].keys() | of_both[1].keys())
    differing = [name for name in names if of_both[0].get(name) != of_both[1].get(name)]
    problems = [f"{name} differs, or stands in one alone" for name in differing]
    return len(names), problems + verify(output)


class Campaign:
    """Rounds of two users, and what was wrong with them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._config = _write_config(folder)
        self.rows: list[dict[str, Any]] = []
        """One a kill."""
        self.problems: list[str] = []
        self.files = self.rounds = self.starts = 0
        alone = _User(self._config, folder / "straight", folder / "straight.log")
        if alone.process.wait():
            raise SystemExit((folder / "straight.log").read_text())

    def round(self, kills: int) -> None:
        """Have both prepare a dataset, with up to `kills` kills, and compare it."""
        self.rounds += 1
        output, log = self._folder / "struck", self._folder / f"round-{self.rounds}.log"
        users = [_User(self._config, output, log) for _ in range(2)]
        struck = set[str]()
        last, most = len(self.rows) + kills, time.monotonic() + _ROUND_WITHIN_S
        if kills:
            time.sleep(self._random.uniform(0, _START_WITHIN_S))
            self._kill(users, output)
        while any(user.code is None for user in users) and time.monotonic() < most:
            for user in users:
                user.look()
            new = _running(output) - struck
            if new and len(self.rows) < last:
                struck |= new
                time.sleep(self._random.uniform(0, _INTO_STAGE_S))
                self._kill(users, output)
            time.sleep(0.002)
        for user in users:
            if user.code is None:
                user.process.kill()
                user.process.wait()
        codes = [user.code for user in users]
        said = _TRACKER.sub("", log.read_text())
        if codes != [0, 0] or "Traceback" in said:
            said = said[said.find("Traceback") :] if "Traceback" in said else said[-2000:]
            self.problems.append(f"round {self.rounds}: codes {codes}: {said[:3000]}")
        self.starts += sum(user.starts for user in users)
        self.files, different = _differences(self._folder / "straight", output)
        self.problems += [f"round {self.rounds}: {text}" for text in different]
        shutil.rmtree(output)

    def _kill(self, users: list[_User], output: Path) -> None:
        alive = [(pid, user.process.pid) for user in users for pid in user.processes()]
        if not alive:
            return
        pid, first = self._random.choice(alive)
        stages, holding = sorted(_running(output)), holders(output / "work" / "lease")
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            os.kill(pid, signal.SIGKILL)
            kind = "first" if pid == first else "tracker" if "tracker" in command else "worker"
            holds = any(f"process {first}," in each for each in holding)
            run = "at work" if holds else "waits, or begins"
            self.rows.append({"stages": stages, "process": kind, "run": run})
            sys.stderr.write(json.dumps(self.rows[-1]) + "\n")


def table(result: dict[str, Any]) -> str:
    """Format the campaign as Markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    lines = [
        "# Kills in data preparation", "",
        f"`python -m benchmarks.prep_faults --kills {result['kills']} --seed {result['seed']}`, "
        f"{versions}; what is done and compared is said in `benchmarks/prep_faults.py`. "
        f"{result['kills']} kills in {result['rounds']} rounds of two runs in one folder, "
        f"{result['starts']} starts in {result['wall_s']:.0f} s; {result['files']} files compared "
        "after each round.", "",
        *([f"- {text}" for text in result["problems"]] or ["No file differed."]), "",
        "| stages at work | process killed | its run | kills |", "|---|---|---|---|",
    ]  # fmt: skip
    counts = Counter(
        (", ".join(row["stages"]) or "none", row["process"], row["run"]) for row in result["faults"]
    )
    lines += [f"| {' | '.join(what)} | {count} |" for what, count in counts.items()]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the campaign and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of processes and moments")
    parser.add_argument("--table", type=Path, help="file for the table; default: standard error")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name), arguments.seed)
        while len(campaign.rows) < arguments.kills and len(campaign.problems) < 10:
            campaign.round(arguments.kills - len(campaign.rows))
    result = {
        "kills": len(campaign.rows), "seed": arguments.seed, "rounds": campaign.rounds,
        "starts": campaign.starts, "files": campaign.files, "problems": campaign.problems,
        "wall_s": round(time.monotonic() - started, 1), "faults": campaign.rows,
        "versions": {"python": platform.python_version(), "numpy": np.__version__,
                     "machine": platform.machine(), "revision": git_revision()},
    }  # fmt: skip
    if arguments.table:
        arguments.table.write_text(table(result), encoding="utf-8")
    else:
        sys.stderr.write(table(result))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
