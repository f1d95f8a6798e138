"""The faults of a campaign that strike two ranks on this machine; JSON on standard output.

    python -m benchmarks.faults_local FOLDER DATASET [--faults 70] [--seed 1]

`python -m benchmarks.faults` calls it where disks can be mounted, and says what it is for.

A run goes through faults until it comes to its end, then the next one starts, with another ZeRO
stage. All faults have struck once before one strikes again; step, rank and place are random. At its
end a run is compared with one that nothing struck, which is told to leave out the batches that the
faults cost (`train.skip_batches`): weights, moments, losses and `batches.tsv` must be the same, bit
for bit, and the ledger must name a fault for each batch left out.

The last faults change the world: without dropout, whose numbers depend on the rank, each kill is
followed by a start with another number of ranks and ZeRO stage. `batches.tsv` must be the same, and
losses within 0.02 nats.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.ledger import read_ledger
from pipeline.data.record import read_batches
from pipeline.errors import EXIT_PREEMPTED, EXIT_STOPPED
from pipeline.runtime.run_folder import RunFolder
from tests.support.ranks import Ranks, losses, newest_state, records

_STEPS, _OTHER_STEPS = 220, 48
_EVERY_STEPS = 8
_COMMON = (
    f"checkpoint.every_steps={_EVERY_STEPS}", "monitor.eval_every_steps=40",
    "train.global_batch=24", "train.collective_timeout_s=240", "train.hang_timeout_s=300",
    # A wrong bit has no effect on a step if it is seen before the next one.
    "monitor.compare_replicas_every_steps=1",
)  # fmt: skip
_STAGES = (1, 0, 2, 3)
_NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0", f"train.num_steps={_OTHER_STEPS}")
_WORLDS = ((2, 1), (1, 2), (4, 3), (3, 1))
_TOLERANCE_NATS = 0.02
_ENDS_WITHIN_S = 360.0
_DISK_MIB = 64
_INSIDE = ("-m", "benchmarks.faults_main")
_TORN = {
    "metrics.jsonl": '{"kind": "train", "step": 1',
    "batches.tsv": "123\t29",
    "attempts.jsonl": '{"attempt": 99, "hos',
}
"""What a start finds at the end of a file whose writer was cut off."""


class Unexpected(Exception):
    """What a fault did that it must not do."""


class Run:
    """A training run of two ranks on a disk of its own, and the faults that strike it."""

    def __init__(self, folder: Path, data: Path, stage: int, choice: random.Random) -> None:
        """Nothing was started yet.

        Args:
            folder: new; the run's own.
            data: folder of a dataset that may be damaged and mended.
            stage: of ZeRO.
            choice: decides on ranks, steps and places.
        """
        self.folder, self.stage, self._random = folder, stage, choice
        self._dataset = read_index(data)
        self._overrides = (*_COMMON, f"train.num_steps={_STEPS}", f"train.zero_stage={stage}")
        self._said = 0
        folder.mkdir()
        self.has_disk = _mount("-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "none", str(folder))

    @property
    def has_ended(self) -> bool:
        """Whether it came to its end."""
        return RunFolder(self.folder).done.exists()

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint; 0 without one."""
        return max((int(path.name[5:]) for path in self._checkpoints()), default=0)

    def finish(self) -> None:
        """Let it run to its end."""
        self._expect(self._wait(self._start(), 4 * _ENDS_WITHIN_S), [0, 0])

    def remove(self) -> None:
        """Free its disk."""
        shutil.rmtree(self.folder / "checkpoints")
        if self.has_disk:
            subprocess.run(["umount", self.folder], check=True)

    # Faults. Each returns the exit codes of the ranks that it struck, or None if the run came to
    # its end before.

    def kill(self, moment: str) -> list[int] | None:
        """Kill a rank with kill -9 at a step, in a save or in the start."""
        rank, ranks = self._random.randrange(2), self._start()
        if moment == "start":
            time.sleep(self._random.uniform(0, 8))
            ranks.signal(signal.SIGKILL, rank)
            # A rank that is not there yet is waited for until the collective timeout; a launcher
            # ends the others.
            ranks.kill()
            return [process.wait() for process in ranks.processes]
        came = self._wait_for_step(ranks) if moment == "step" else self._wait_for_save(ranks)
        if not came:
            return self._over(ranks)
        ranks.signal(signal.SIGKILL, rank)
        codes = self._wait(ranks)
        others = [code for i, code in enumerate(codes) if i != rank]
        # In the last save the other one may have ended.
        at_end = 0 in others and _last_step(self.folder) == _STEPS
        if not at_end and not set(others) <= {1, -signal.SIGABRT}:
            raise Unexpected(f"codes {codes} after kill -9 of rank {rank}")
        return codes

    def ask(self, how: str) -> list[int] | None:
        """Ask it to save and stop, by a signal to one rank or to all, or by a file."""
        ranks = self._start()
        if not self._wait_for_step(ranks):
            return self._over(ranks)
        return self._stop(ranks, how)

    def freeze(self) -> list[int] | None:
        """Stop a rank with SIGSTOP: the other one must end by itself."""
        ranks, rank = self._start("train.hang_timeout_s=20"), self._random.randrange(2)
        if not self._wait_for_step(ranks):
            return self._over(ranks)
        ranks.signal(signal.SIGSTOP, rank)
        code = ranks.processes[1 - rank].wait(120)
        ranks.signal(signal.SIGCONT, rank)
        codes = self._wait(ranks)
        if code not in (1, -signal.SIGABRT) or 0 in codes:
            raise Unexpected(f"codes {codes} after SIGSTOP to rank {rank}")
        return codes

    def start_twice(self) -> list[int] | None:
        """Start it a second time while it lives: that one must be refused and change nothing."""
        ranks = self._start()
        if not self._wait_for_step(ranks):
            return self._over(ranks)
        # It stands still while the other one waits for its lock, so that it does not end.
        ranks.signal(signal.SIGSTOP)
        try:
            second = Ranks(self.folder, self._dataset, *self._overrides)
            while not self._ends(second):
                time.sleep(0.01)
            # As a launcher does: the other rank waits for the one that was refused.
            second.kill()
        finally:
            ranks.signal(signal.SIGCONT)
        codes = [process.wait() for process in second.processes]
        self._expect(codes[:1], [1], "is in use by another running process")
        if not self._wait_for_step(ranks):
            return self._over(ranks)
        self._stop(ranks)
        return codes

    def hold_lock(self) -> list[int] | None:
        """Let another process hold its lock for a while, as one on a lost node does."""
        self.folder.joinpath("lock").touch()
        holder = subprocess.Popen(["flock", self.folder / "lock", "sleep", "12"])
        try:
            return self.ask("SIGUSR1 to all")
        finally:
            holder.terminate()
            holder.wait()

    def tear(self, name: str) -> list[int] | None:
        """Kill a rank, and leave half a line at the end of one of its files."""
        codes = self.kill("step")
        path = self.folder / name
        if self.has_ended:
            return None
        if codes is not None and path.exists():
            with path.open("a") as file:
                file.write(_TORN[name])
        return codes

    def damage_checkpoint(self, how: str) -> list[int] | None:
        """Damage the newest of two checkpoints: it must be passed over."""
        if self.ask("SIGUSR1 to all") is None or self.has_ended:
            return None
        path = self._checkpoints()[-1]
        if how == "latest torn":
            (self.folder / "checkpoints/latest").write_text("step-0")
        elif how == "manifest gone":
            (path / "manifest.json").unlink()
        else:
            file = self._random.choice(sorted((path / "state").iterdir()))
            content = bytearray(file.read_bytes())
            place = self._random.randrange(len(content))
            content[place] ^= 1 << self._random.randrange(8)
            file.write_bytes(content if how == "bit flipped" else content[:place])
        said = "" if how == "latest torn" else "checkpoint rejected"
        return self._go_on(said)

    def fill_disk(self) -> list[int] | None:
        """Fill its disk while it trains, and free it when it has ended."""
        ranks = self._start()
        if not self._wait_for_step(ranks):
            return self._over(ranks)
        filler = self.folder / "filler"
        _fill(filler)
        codes = self._wait(ranks)
        filler.unlink()
        if codes == [0, 0]:
            return self._over(ranks)
        self._expect(codes, [2, 2], "space")
        return codes

    def forbid_writing(self) -> list[int] | None:
        """Mount its disk so that nobody may write, for a start."""
        _mount("-o", "remount,ro", str(self.folder))
        codes = self._wait(self._start())
        _mount("-o", "remount,rw", str(self.folder))
        self._expect(codes, [2, 2], "cannot be written")
        return codes

    def damage_data(self, how: str) -> list[int] | None:
        """Damage or remove a shard for a start: it must be refused and named."""
        path = self._dataset.folder / self._random.choice(self._dataset.shards).file
        content = path.read_bytes()
        changed = bytearray(content)
        changed[int(self._dataset.blocks.member_offset[0, 0]) + 500] ^= 1
        path.unlink()
        if how == "bit flipped":
            path.write_bytes(changed)
        codes = self._wait(self._start())
        path.write_bytes(content)
        self._expect(codes, [2, 2], str(path))
        return codes

    def strike_inside(self, kind: str) -> list[int] | None:
        """Let `benchmarks.faults_main` strike, and wait until a later checkpoint is there."""
        mark = self.folder.with_suffix(".mark")
        # At stage 0 the first rank's copy of the moments is the one that is saved.
        of_first = kind == "NaN in a moment" and self.stage == 0
        rank = 0 if of_first else self._random.randrange(2)
        step = max(self.saved_step, _EVERY_STEPS) + self._random.randint(2, 12)
        jump_s = self._random.choice((-86_400, -3_600, 3_600, 86_400))
        fault = {"kind": kind, "rank": rank, "step": step, "mark": str(mark), "jump_s": jump_s}
        before, started = _told(self.folder), self.saved_step
        mark.unlink(missing_ok=True)
        ranks = self._start(fault=fault)
        while not mark.exists() or self.saved_step <= max(step, started):
            if self._ends(ranks):
                break
            time.sleep(0.02)
        was_struck = mark.exists()
        codes = self._over(ranks) or [0, 0] if self._ends(ranks) else self._stop(ranks)
        told = {name: count - before[name] for name, count in _told(self.folder).items()}
        expected = _EXPECTED[kind]
        if was_struck and (sum(told[name] for name in expected) < 1 if expected else any(
            told.values()
        )):  # fmt: skip
            raise Unexpected(f"rank {rank}, step {step}: the ledger has {told} more")
        return codes if was_struck else None

    # What they are made of.

    def _start(self, *overrides: str, fault: dict[str, Any] | None = None) -> Ranks:
        self._before = len(records(self.folder))
        self._saved_before = self.saved_step
        output = self.folder.with_suffix(".out")
        self._said = output.stat().st_size if output.exists() else 0
        given = (*self._overrides, *overrides)
        if fault is None:
            return Ranks(self.folder, self._dataset, *given)
        os.environ["FAULT"] = json.dumps(fault)
        return Ranks(self.folder, self._dataset, *given, module=_INSIDE)

    def _stop(self, ranks: Ranks, how: str = "SIGUSR1 to all") -> list[int]:
        code = EXIT_PREEMPTED
        if how == "STOP file":
            RunFolder(self.folder).stop.touch()
            code = EXIT_STOPPED
        else:
            name, whom = how.split(" to ")
            rank = self._random.randrange(2) if whom == "one rank" else None
            ranks.signal(getattr(signal, name), rank)
        codes = self._wait(ranks)
        RunFolder(self.folder).stop.unlink(missing_ok=True)
        if not self.has_ended:
            self._expect(codes, [code, code])
        return codes

    def _go_on(self, said: str) -> list[int]:
        """Start, wait for what it must say and for steps, and stop it again."""
        ranks = self._start()
        came = self._wait_for_step(ranks)
        if said not in self._new_output():
            raise Unexpected(f"{said!r} was not said:\n{self._new_output()[-3000:]}")
        return self._stop(ranks) if came else self._over(ranks) or [0, 0]

    def _over(self, ranks: Ranks) -> None:
        """Require that ranks which have ended came to the run's end."""
        self._expect(self._wait(ranks), [0, 0])

    def _expect(self, codes: list[int], expected: list[int], said: str = "") -> None:
        output = self._new_output()
        if codes != expected or said not in output:
            raise Unexpected(f"codes {codes}, expected {expected} and {said!r}:\n{output[-3000:]}")

    def _new_output(self) -> str:
        path = self.folder.with_suffix(".out")
        return path.read_bytes()[self._said :].decode(errors="replace")

    def _wait(self, ranks: Ranks, limit_s: float = _ENDS_WITHIN_S) -> list[int]:
        deadline = time.monotonic() + limit_s
        while any(p.poll() is None for p in ranks.processes):
            if time.monotonic() > deadline:
                ranks.kill()
                raise Unexpected(f"ranks did not end within {limit_s:.0f} s")
            time.sleep(0.01)
        return [p.wait() for p in ranks.processes]

    def _wait_for_step(self, ranks: Ranks) -> bool:
        """Wait for a random step soon after the newest checkpoint; False if it ended before."""
        new = len(records(self.folder)[self._before :])
        last = max(self._saved_before, records(self.folder)[-1]["step"] if new else 0)
        step = last + self._random.randint(2, 14)
        if step > _STEPS - 4:
            # It would be at its end before anything strikes.
            self._wait(ranks)
        while not self._ends(ranks):
            lines = records(self.folder)[self._before :]
            if lines and lines[-1]["step"] >= step:
                return True
            time.sleep(0.005)
        return False

    def _wait_for_save(self, ranks: Ranks) -> bool:
        """Wait for a save, the next or the one after, and a moment into it."""
        for _ in range(self._random.randint(1, 2)):
            while self._saves():
                time.sleep(0.001)
            while not self._saves():
                if self._ends(ranks):
                    return False
                time.sleep(0.0005)
        time.sleep(self._random.uniform(0, 0.008))
        return True

    def _saves(self) -> bool:
        return any((self.folder / "checkpoints").glob(".saving-*"))

    def _ends(self, ranks: Ranks) -> bool:
        return any(process.poll() is not None for process in ranks.processes)

    def _checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*"))


_Strike = Callable[[Run], list[int] | None]
_KINDS: dict[str, _Strike] = {
    **{f"kill -9, {m}": lambda run, m=m: run.kill(m) for m in ("step", "save", "start")},
    **{
        how: lambda run, how=how: run.ask(how)
        for how in ("SIGTERM to one rank", "SIGUSR1 to all", "SIGUSR2 to one rank", "STOP file")
    },
    "a rank is frozen": Run.freeze,
    "second start": Run.start_twice,
    "lock held by another process": Run.hold_lock,
    **{f"torn line, {n}": lambda run, n=n: run.tear(n) for n in _TORN},
    **{
        f"checkpoint, {how}": lambda run, how=how: run.damage_checkpoint(how)
        for how in ("bit flipped", "cut off", "manifest gone", "latest torn")
    },
    "disk full": Run.fill_disk,
    "read-only folder": Run.forbid_writing,
    **{f"shard, {h}": lambda run, h=h: run.damage_data(h) for h in ("bit flipped", "gone")},
    **{
        kind: lambda run, kind=kind: run.strike_inside(kind)
        for kind in ("NaN loss", "NaN gradient", "NaN in a moment", "bit flip", "clock jump")
    },
}  # fmt: skip
_EXPECTED = {
    "NaN loss": ("non_finite",), "NaN gradient": ("non_finite",), "bit flip": ("diverged",),
    # Copies of all state are compared at stage 0.
    "NaN in a moment": ("rewinds", "diverged"), "clock jump": (),
}  # fmt: skip
"""Kinds of the ledger's records of which one must be there for a fault; none: nothing."""
_NEED_DISK = ("disk full", "read-only folder")
_NEED_TWO_CHECKPOINTS = (
    "checkpoint, bit flipped",
    "checkpoint, cut off",
    "checkpoint, manifest gone",
)


class Campaign:
    """Runs of one dataset, and what was wrong with them."""

    def __init__(self, folder: Path, dataset: DatasetIndex, seed: int) -> None:
        """Nothing was run yet."""
        self._folder = folder
        self._data = folder / "data-that-suffers"
        shutil.copytree(dataset.folder, self._data, ignore=shutil.ignore_patterns("work"))
        self._random = random.Random(seed)
        self._deck: list[str] = []
        self.rows: list[dict[str, Any]] = []
        """One a fault: what was done, and what came of it."""
        self.problems: list[str] = []
        self.runs: list[dict[str, Any]] = []
        """Each run's ZeRO stage and the batches that faults cost it."""
        self.kinds = sorted(_KINDS)
        """Kinds of fault that can strike here."""
        self.losses_apart = 0.0
        """Largest difference after changes of the world, nats."""

    def strike(self, faults: int) -> None:
        """Let so many faults strike runs, and compare each run with one that nothing struck."""
        struck = 0
        while struck < faults:
            number = len(self.runs)
            stage = _STAGES[number % len(_STAGES)]
            run = Run(self._folder / f"struck-{number + 1}", self._data, stage, self._random)
            if not run.has_disk:
                self.kinds = [kind for kind in self.kinds if kind not in _NEED_DISK]
            while struck < faults and not run.has_ended:
                struck += self._strike_once(run)
            if not run.has_ended:
                run.finish()
            self._compare(run)
            run.remove()

    def _strike_once(self, run: Run) -> bool:
        kind = self._draw(run)
        started, resumed_from = time.monotonic(), run.saved_step
        row: dict[str, Any] = {"fault": kind, "stage": run.stage, "survived": True}
        try:
            codes = _KINDS[kind](run)
        except Unexpected as error:
            self.problems.append(f"{kind}: {error}")
            row["survived"], codes = False, []
        if codes is None:
            self._deck.append(kind)
            return False
        self._note(row, codes, resumed_from, _last_step(run.folder), run.saved_step, started)
        return True

    def _draw(self, run: Run) -> str:
        """Return the next kind of the deck that can strike this run now."""
        later = []
        while True:
            if not self._deck:
                self._deck = self._random.sample(self.kinds, len(self.kinds))
            kind = self._deck.pop()
            copies_needed = kind == "bit flip" and run.stage == 3
            two_needed = kind in _NEED_TWO_CHECKPOINTS and run.saved_step < 2 * _EVERY_STEPS
            if copies_needed or two_needed:
                later.append(kind)
                continue
            self._deck = later + self._deck
            return kind

    def _note(
        self, row: dict[str, Any], codes: list[int], resumed_from: int, at_step: int,
        checkpoint: int, started: float,
    ) -> None:  # fmt: skip
        self.rows.append(row | {
            "codes": codes, "resumed_from": resumed_from, "at_step": at_step,
            "checkpoint": checkpoint, "took_s": round(time.monotonic() - started, 1),
        })  # fmt: skip
        sys.stderr.write(f"{len(self.rows)} {json.dumps(self.rows[-1])}\n")
        sys.stderr.flush()

    def _compare(self, run: Run) -> None:
        batches = read_batches(run.folder)
        left_out = [each.batch for each in batches if each.step is None]
        ledger = read_ledger(run.folder)
        told = set(ledger.non_finite)
        for rewind in ledger.rewinds:
            told |= set(range(rewind.first_batch, rewind.last_batch + 1))
        name = run.folder.name
        if not set(left_out) <= told:
            self.problems.append(f"{name}: the ledger does not tell of all of {left_out}")
        if [each.step for each in batches if each.step] != list(range(1, _STEPS + 1)):
            self.problems.append(f"{name}: batches.tsv does not have each step once")
        ranges = ", ".join(f"{{first: {batch}, last: {batch}}}" for batch in left_out)
        straight = self._straight(
            f"straight-{name}", *_COMMON, f"train.num_steps={_STEPS}",
            f"train.zero_stage={run.stage}", f"train.skip_batches=[{ranges}]",
        )  # fmt: skip
        self._require_same(straight, run.folder)
        self.runs.append({"stage": run.stage, "left_out": left_out, "repeated": len(
            ledger.diverged
        )})  # fmt: skip
        shutil.rmtree(straight / "checkpoints")

    def other_worlds(self) -> None:
        """Kill a run at each of `_WORLDS` but the last."""
        overrides = (*_COMMON, *_NO_DROPOUT)
        straight = self._straight("straight-other", *overrides)
        run_dir, dataset = self._folder / "worlds", read_index(self._data)
        part = _OTHER_STEPS // len(_WORLDS)
        for number, (world_size, stage) in enumerate(_WORLDS):
            started, resumed_from = time.monotonic(), _newest_step(run_dir)
            ranks = Ranks(
                run_dir, dataset, *overrides, f"train.zero_stage={stage}", world_size=world_size
            )
            if number == len(_WORLDS) - 1:
                if any(codes := ranks.wait(_ENDS_WITHIN_S)):
                    self.problems.append(f"{run_dir.name}: ended with {codes}\n{ranks.output}")
                    return
                continue
            ranks.wait_for_step(part * (number + 1) - self._random.randrange(3), _ENDS_WITHIN_S)
            ranks.signal(signal.SIGKILL, self._random.randrange(world_size))
            after, then = _WORLDS[number + 1]
            kind = f"kill -9 of a world of {world_size}, then {after} at stage {then}"
            codes = ranks.wait(_ENDS_WITHIN_S)
            row = {"fault": kind, "stage": stage, "survived": True}
            self._note(
                row, codes, resumed_from, _last_step(run_dir), _newest_step(run_dir), started
            )
        self._require_same_batches(straight, run_dir)
        expected, found = losses(straight), losses(run_dir)
        if expected.keys() != found.keys():
            self.problems.append(f"{run_dir.name}: other steps were logged")
            return
        self.losses_apart = max(abs(found[step] - loss) for step, loss in expected.items())
        if self.losses_apart > _TOLERANCE_NATS:
            self.problems.append(f"{run_dir.name}: losses are {self.losses_apart:.4f} nats apart")

    def _straight(self, name: str, *overrides: str) -> Path:
        ranks = Ranks(self._folder / name, read_index(self._data), *overrides)
        if any(codes := ranks.wait(_ENDS_WITHIN_S * 4)):
            raise SystemExit(f"the run without faults ended with {codes}:\n{ranks.output}")
        return self._folder / name

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


def _mount(*options: str) -> bool:
    return subprocess.run(["mount", *options], capture_output=True).returncode == 0


def _fill(path: Path) -> None:
    block = bytes(1 << 16)
    try:
        with path.open("wb", buffering=0) as file:
            while file.write(block) == len(block):
                pass
    except OSError:
        return


def _told(run_dir: Path) -> dict[str, int]:
    """Count the ledger's records by kind."""
    ledger = read_ledger(run_dir)
    return {
        "non_finite": len(ledger.non_finite), "rewinds": len(ledger.rewinds),
        "diverged": len(ledger.diverged),
    }  # fmt: skip


def _last_step(run_dir: Path) -> int:
    lines = records(run_dir)
    return int(lines[-1]["step"]) if lines else 0


def _newest_step(run_dir: Path) -> int:
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def main() -> None:
    """Run it, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for runs")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--faults", type=int, default=70)
    parser.add_argument("--seed", type=int, default=1, help="of kinds, ranks and moments")
    arguments = parser.parse_args()
    campaign = Campaign(arguments.folder, read_index(arguments.dataset), arguments.seed)
    changes = min(len(_WORLDS) - 1, arguments.faults)
    campaign.strike(arguments.faults - changes)
    if changes:
        campaign.other_worlds()
    result = {
        "rows": campaign.rows, "problems": campaign.problems, "runs": campaign.runs,
        "steps": _STEPS, "losses_apart_nats": campaign.losses_apart,
        "left_out": sorted(set(_KINDS) - set(campaign.kinds)),
    }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
