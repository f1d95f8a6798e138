"""A campaign of faults against a training run; a table, one JSON line, exit code 1 if any differs.

    python -m benchmarks.faults [--kills 20] [--seed 1] [--data DATASET]
        [--table benchmarks/results/faults.md]

A tiny model is trained over gloo on this machine. DATASET is a folder written by `python -m
data_prep run`; by default Python's own help is prepared for it.

"same world": two ranks, dropout on. A run without faults is compared with runs of which a random
rank is killed with kill -9 at a random moment (in a save, which is known by its `.saving-` folder;
at a step; in the start, and then the whole job as a launcher would end it), and which are started
again with the same command until they end. After every fourth kill a round of SIGTERM to one rank,
SIGUSR1 to all, SIGUSR2 to one rank, or a STOP file: all ranks must end with the code that says so.
Where such a run ends before all kills are done, another one follows. Master weights and moments of
the last checkpoint, every logged loss and `batches.tsv` must be bit-identical; the ranks that were
not killed must end by themselves.

"other worlds": without dropout, whose numbers depend on the rank. Each kill -9 of a random rank is
followed by a start with another number of ranks and ZeRO stage: 2 ranks at stage 1, 1 at 2, 4 at 3,
3 at 1. `batches.tsv` must be identical, losses within 0.02 nats of the run without faults.
"""

import argparse
import json
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from data_prep.config import PrepConfig
from data_prep.run import run as prepare
from pipeline.config.load import load
from pipeline.data.format import DatasetIndex, read_index
from pipeline.errors import EXIT_PREEMPTED, EXIT_STOPPED
from pipeline.runtime.run_folder import RunFolder
from tests.support.ranks import Ranks, losses, newest_state, records

_COMMON = (
    "checkpoint.every_steps=8", "monitor.eval_every_steps=40", "train.global_batch=24",
    "train.collective_timeout_s=240", "train.hang_timeout_s=300",
)  # fmt: skip
# Long enough for a STOP file near the end, which is looked for every 2 s, to be seen.
_STEPS, _OTHER_STEPS = 400, 48
_NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0", f"train.num_steps={_OTHER_STEPS}")
_WORLDS = ((2, 1), (1, 2), (4, 3), (3, 1))
_TOLERANCE_NATS = 0.02
_ENDS_WITHIN_S = 360.0
_MOMENTS = ("save", "save", "step", "step", "start")
_REQUESTS = ("SIGTERM to one rank", "SIGUSR1 to all", "SIGUSR2 to one rank", "STOP file")


def small_dataset(folder: Path) -> DatasetIndex:
    """Python's own help, 700 KB of English, as a dataset of many small blocks."""
    import pydoc_data.topics

    corpus = folder / "topics.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for topic, text in sorted(pydoc_data.topics.topics.items()):
            for number, paragraph in enumerate(text.split("\n\n")):
                file.write(json.dumps({"id": f"{topic}/{number}", "text": paragraph}) + "\n")
    path = folder / "prep.yaml"
    path.write_text(
        f"output_dir: {folder}/data\nworkers: 1\nsources: [{{name: help, inputs: [{corpus}]}}]\n"
        "tokenizer: {vocab_size: 1000}\n"
        "shards: {block_tokens: 8000, shard_mb: 1, eval_fraction: 0.05}\n"
    )
    prepare(load(PrepConfig, path).config)
    return read_index(folder / "data")


class Campaign:
    """Runs of one dataset, and what was wrong with them."""

    def __init__(self, folder: Path, dataset: DatasetIndex, seed: int) -> None:
        """Nothing was run yet."""
        self._folder, self._dataset = folder, dataset
        self._random = random.Random(seed)
        self.rows: list[dict[str, Any]] = []
        """One a fault: what was done, and what came of it."""
        self.problems: list[str] = []
        self.losses_apart = 0.0
        """Largest difference of "other worlds", nats."""

    def same_world(self, kills: int) -> int:
        """Kills ranks of runs of two ranks; returns the number of runs that came to their end."""
        overrides = (*_COMMON, f"train.num_steps={_STEPS}")
        straight = self._straight("straight", *overrides)
        done = runs = 0
        while done < kills:
            runs += 1
            run_dir = self._folder / f"killed-{runs}"
            while not RunFolder(run_dir).done.exists():
                ranks = self._start(run_dir, *overrides)
                if done < kills and self._kill(ranks, done):
                    done += 1
                    if done % 4 == 0 and not RunFolder(run_dir).done.exists():
                        ranks = self._start(run_dir, *overrides)
                        self._request(ranks, _REQUESTS[(done // 4 - 1) % len(_REQUESTS)])
                else:
                    self._end(ranks, [0, 0], "run to its end")
            self._require_same(straight, run_dir)
            shutil.rmtree(run_dir / "checkpoints")
        return runs

    def other_worlds(self) -> None:
        """Kills a run at each of `_WORLDS` but the last."""
        overrides = (*_COMMON, *_NO_DROPOUT)
        straight = self._straight("straight-other", *overrides)
        run_dir = self._folder / "worlds"
        part = _OTHER_STEPS // len(_WORLDS)
        for number, (world_size, stage) in enumerate(_WORLDS):
            ranks = self._start(
                run_dir, *overrides, f"train.zero_stage={stage}", world_size=world_size
            )
            if number == len(_WORLDS) - 1:
                self._end(
                    ranks, [0] * world_size, f"{world_size} ranks at stage {stage} to the end"
                )
                continue
            rank = self._random.randrange(world_size)
            self._wait_for_step(ranks, part * (number + 1) - self._random.randrange(3))
            self._kill_rank(ranks, rank, f"step, world of {world_size} at ZeRO stage {stage}")
        self._require_same_batches(straight, run_dir)
        expected, found = losses(straight), losses(run_dir)
        if expected.keys() != found.keys():
            self.problems.append(f"{run_dir.name}: other steps were logged")
            return
        self.losses_apart = max(abs(found[step] - loss) for step, loss in expected.items())
        if self.losses_apart > _TOLERANCE_NATS:
            self.problems.append(f"{run_dir.name}: losses are {self.losses_apart:.4f} nats apart")

    def _straight(self, name: str, *overrides: str) -> Path:
        ranks = self._start(self._folder / name, *overrides)
        codes = ranks.wait(_ENDS_WITHIN_S * 4)
        if any(codes):
            raise SystemExit(f"the run without faults ended with {codes}:\n{ranks.output}")
        return self._folder / name

    def _start(self, run_dir: Path, *overrides: str, world_size: int = 2) -> Ranks:
        self._before = len(records(run_dir))
        self._saved_before = _newest_step(run_dir)
        return Ranks(run_dir, self._dataset, *overrides, world_size=world_size)

    def _kill(self, ranks: Ranks, number: int) -> bool:
        """Kills a rank; False if the run ended before."""
        moment = _MOMENTS[number % len(_MOMENTS)]
        rank = self._random.randrange(2)
        if moment == "start":
            time.sleep(self._random.uniform(0, 8))
            self._kill_rank(ranks, rank, moment, as_launcher=True)
            return True
        if moment == "step":
            reached = self._wait_for_step(ranks, self._saved_before + self._random.randint(2, 14))
        else:
            reached = self._wait_for_save(ranks, skip=self._random.randrange(2))
        if reached:
            self._kill_rank(ranks, rank, moment)
        return reached

    def _kill_rank(
        self, ranks: Ranks, rank: int, moment: str, *, as_launcher: bool = False
    ) -> None:
        ranks.signal(signal.SIGKILL, rank)
        ranks.processes[rank].wait()
        left = _in_save(ranks.run_dir)
        killed_s = time.monotonic()
        if as_launcher:
            # A rank that is not there yet is waited for until the collective timeout.
            ranks.kill()
            codes, others_s = [p.wait() for p in ranks.processes], 0.0
        else:
            codes = self._wait(ranks, f"kill -9 of rank {rank} at {moment}")
            others_s = time.monotonic() - killed_s
            wrong = [code for i, code in enumerate(codes) if i != rank and code not in (1, -6)]
            if wrong:
                self.problems.append(f"after kill -9 of rank {rank} at {moment}: codes {codes}")
        self._note(f"kill -9 of rank {rank}", moment, ranks, codes, others_s, in_save=left)

    def _request(self, ranks: Ranks, what: str) -> None:
        rank = self._random.randrange(2)
        reached = self._wait_for_step(ranks, self._saved_before + self._random.randint(2, 6))
        asked_s, code = time.monotonic(), EXIT_PREEMPTED
        if what == "STOP file":
            RunFolder(ranks.run_dir).stop.touch()
            code = EXIT_STOPPED
        else:
            name, whom = what.split(" to ")
            ranks.signal(getattr(signal, name), rank if whom == "one rank" else None)
        codes = self._wait(ranks, what)
        if codes != [code, code] and reached:
            self.problems.append(f"{what}: codes {codes}, expected {code}:\n{ranks.output[-2000:]}")
        RunFolder(ranks.run_dir).stop.unlink(missing_ok=True)
        self._note(what, "step", ranks, codes, time.monotonic() - asked_s)

    def _end(self, ranks: Ranks, expected: list[int], what: str) -> None:
        codes = self._wait(ranks, what, 4 * _ENDS_WITHIN_S)
        if codes != expected:
            raise SystemExit(f"{what}: ended with {codes}:\n{ranks.output[-4000:]}")
        self._note(what, "-", ranks, codes, 0.0)

    def _wait(self, ranks: Ranks, what: str, limit_s: float = _ENDS_WITHIN_S) -> list[int]:
        deadline = time.monotonic() + limit_s
        while any(p.poll() is None for p in ranks.processes):
            if time.monotonic() > deadline:
                self.problems.append(f"{what}: ranks did not end within {limit_s:.0f} s")
                ranks.kill()
            time.sleep(0.01)
        return [p.wait() for p in ranks.processes]

    def _note(
        self, what: str, moment: str, ranks: Ranks, codes: list[int], seconds: float,
        *, in_save: bool = False,
    ) -> None:  # fmt: skip
        logged = records(ranks.run_dir)
        step = logged[-1]["step"] if len(logged) > self._before else self._saved_before
        self.rows.append({
            "fault": what, "moment": moment, "left_unfinished_save": in_save, "codes": codes,
            "resumed_from": self._saved_before, "at_step": step,
            "checkpoint": _newest_step(ranks.run_dir), "ended_after_s": round(seconds, 1),
        })  # fmt: skip
        sys.stderr.write(json.dumps(self.rows[-1]) + "\n")
        sys.stderr.flush()

    def _wait_for_step(self, ranks: Ranks, step: int) -> bool:
        """Until this start has logged a step; False if it ended before."""
        while all(p.poll() is None for p in ranks.processes):
            new = records(ranks.run_dir)[self._before :]
            if new and new[-1]["step"] >= step:
                return True
            time.sleep(0.005)
        return False

    def _wait_for_save(self, ranks: Ranks, skip: int) -> bool:
        """Until this start saves, for the next time or the one after; a moment into it."""
        into_s = self._random.uniform(0, 0.008)
        for _ in range(skip + 1):
            while _in_save(ranks.run_dir):
                time.sleep(0.001)
            while not _in_save(ranks.run_dir):
                if any(p.poll() is not None for p in ranks.processes):
                    return False
                time.sleep(0.0005)
        time.sleep(into_s)
        return True

    def _require_same(self, one: Path, other: Path) -> None:
        expected, found = newest_state(one), newest_state(other)
        if expected.keys() != found.keys():
            self.problems.append(f"{other.name}: other tensors in the last checkpoint")
        different = [n for n in expected if n in found and not torch.equal(expected[n], found[n])]
        if different:
            self.problems.append(f"{other.name}: {len(different)} tensors differ: {different[:3]}")
        if losses(one) != losses(other):
            self.problems.append(f"{other.name}: losses differ")
        self._require_same_batches(one, other)

    def _require_same_batches(self, one: Path, other: Path) -> None:
        if (one / "batches.tsv").read_bytes() != (other / "batches.tsv").read_bytes():
            self.problems.append(f"{other.name}: batches.tsv differs")


def _in_save(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".saving-*"))


def _newest_step(run_dir: Path) -> int:
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def table(result: dict[str, Any]) -> str:
    """The campaign as Markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    problems = [f"- {text}" for text in result["problems"]] or ["Nothing differed."]
    lines = [
        "# Faults", "",
        f"`python -m benchmarks.faults --kills {result['kills']} --seed {result['seed']}`, "
        f"{versions}; what is done and compared is said in `benchmarks/faults.py`. "
        f"{result['kills']} kills in {result['runs']} run(s) of {_STEPS} steps, "
        f"{result['in_save']} of them left an unfinished save; {result['starts']} starts in "
        f"{result['wall_s']:.0f} s. Other worlds: largest difference of a loss "
        f"{result['losses_apart_nats']:.5f} nats.", "",
        *problems, "",
        "| fault | moment | unfinished save | resumed from | at step | checkpoint after | codes "
        "| others ended after, s |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {row['fault']} | {row['moment']} | {'yes' if row['left_unfinished_save'] else ''} "
        f"| {row['resumed_from']} | {row['at_step']} | {row['checkpoint']} "
        f"| {', '.join(map(str, row['codes']))} | {row['ended_after_s']} |"
        for row in result["faults"]
    ]
    return "\n".join([*lines, ""])


def run_campaign(folder: Path, dataset: DatasetIndex, kills: int, seed: int) -> dict[str, Any]:
    """Runs all of it; see the module."""
    started = time.monotonic()
    campaign = Campaign(folder, dataset, seed)
    runs = campaign.same_world(kills)
    campaign.other_worlds()
    return {
        "kills": kills, "seed": seed, "runs": runs, "starts": len(campaign.rows) + 2,
        "in_save": sum(row["left_unfinished_save"] for row in campaign.rows),
        "losses_apart_nats": campaign.losses_apart, "tolerance_nats": _TOLERANCE_NATS,
        "wall_s": time.monotonic() - started, "problems": campaign.problems,
        "faults": campaign.rows,
        "versions": {"python": platform.python_version(), "machine": platform.machine(),
                     "torch": torch.__version__, "deepspeed": version("deepspeed")},
    }  # fmt: skip


def main() -> None:
    """Runs the campaign and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of ranks and moments")
    parser.add_argument("--data", type=Path, help="dataset; default: Python's own help")
    parser.add_argument("--table", type=Path, help="file for the table; default: standard error")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = read_index(arguments.data) if arguments.data else small_dataset(folder)
        result = run_campaign(folder, dataset, arguments.kills, arguments.seed)
    if arguments.table:
        arguments.table.write_text(table(result), encoding="utf-8")
    else:
        sys.stderr.write(table(result))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
