"""Random kills of runs in three stages; a JSON line, and 1 if one is not the run nothing struck.

    python -m benchmarks.stage_faults [--kills 24] [--seed 1] [--worlds 1 2 4]

Each world has a run of its own, on two datasets with one tokenizer: a stable stage, one with longer
sequences, another rotary base, batch, clipping and weight decay, and a decay on the other data. A
random rank is killed with kill -9, at a random step or near a border, again and again. At its end
weights, moments and losses must be those of a run that nothing struck, and `batches.tsv` the same
file. Then the last stage is run once more as a run of its own (`continue_from`): it must be the
same, too.
"""

import argparse
import json
import platform
import random
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import small_dataset
from data_prep.config import PrepConfig
from data_prep.run import run as prepare
from pipeline.config.load import load
from pipeline.data.format import DatasetIndex, read_index
from pipeline.runtime.run_folder import RunFolder
from tests.support.ranks import Ranks, losses, newest_state, records

_STEPS = (24, 18, 18)
_BORDERS = (_STEPS[0], _STEPS[0] + _STEPS[1])
_COMMON = (
    # Steps of 0.1 s and more: a kill comes where it is meant to.
    f"train.num_steps={sum(_STEPS)}", "train.global_batch=96", "model.num_layers=4",
    "model.hidden_size=64", "model.ffn_size=256", "checkpoint.every_steps=5",
    "checkpoint.keep=2", "monitor.eval_every_steps=30", "data.mask_prob=0.3",
)  # fmt: skip
_ENDS_WITHIN_S = 900.0


def other_dataset(folder: Path, first: DatasetIndex) -> DatasetIndex:
    """Modules of Python's standard library, with the first dataset's tokenizer."""
    corpus, path = folder / "modules.jsonl", folder / "other.yaml"
    with corpus.open("w", encoding="utf-8") as file:
        for number, source in enumerate(sorted(Path(json.__file__).parents[1].glob("*.py"))[:60]):
            text = source.read_text(encoding="utf-8", errors="replace")
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")
    path.write_text(
        f"output_dir: {folder}/other\nworkers: 1\nsources: [{{name: code, inputs: [{corpus}]}}]\n"
        f"tokenizer: {{file: {first.folder / first.tokenizer_file}}}\n"
        "shards: {block_tokens: 8000, shard_mb: 1, eval_fraction: 0.05}\n"
    )
    prepare(load(PrepConfig, path).config)
    return read_index(folder / "other")


def stages(other: DatasetIndex) -> list[dict[str, Any]]:
    """The three stages."""
    base = {"rotary_base": 160000}
    return [
        {"name": "stable", "steps": _STEPS[0]},
        {"name": "long", "steps": _STEPS[1], "data": {"seq_len": 128}, "model": base,
         "train": {"global_batch": 48, "micro_batch": 2, "weight_decay": 0.1, "grad_clip": 0.5}},
        {"name": "decay", "steps": _STEPS[2], "model": base, "train": {"decay": "1-sqrt"},
         "data": {"dir": str(other.folder), "mask_prob": 0.15}},
    ]  # fmt: skip


def strike(run: Path, start: Any, kills: int, choice: random.Random) -> list[dict[str, Any]]:
    """Kill a run again and again, then let it end."""
    rows = []
    for at in _moments(kills, choice):
        ranks = start(run.name)
        reached = _wait(ranks, at)
        if reached is None:
            break
        rank = choice.randrange(len(ranks.processes))
        ranks.signal(signal.SIGKILL, rank)
        time.sleep(0.2)
        ranks.kill()
        rows.append({"at_step": reached, "rank": rank, "world": len(ranks.processes)})
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    start(run.name).ended(timeout_s=_ENDS_WITHIN_S)
    return rows


def _moments(kills: int, choice: random.Random) -> list[int]:
    """Return the steps to kill at, rising: every other one is near a border."""
    near = [choice.choice(_BORDERS) + choice.randrange(-1, 2) for _ in range(kills // 2)]
    anywhere = [choice.randrange(1, sum(_STEPS) - 2) for _ in range(kills - len(near))]
    return sorted(near + anywhere)


def _wait(ranks: Ranks, step: int) -> int | None:
    """Wait for that step, or the first of this start; None where the run ends before."""
    known, deadline = len(records(ranks.run_dir)), time.monotonic() + _ENDS_WITHIN_S
    while time.monotonic() < deadline:
        new = [record["step"] for record in records(ranks.run_dir)[known:]]
        if RunFolder(ranks.run_dir).done.exists() or (new and new[-1] == sum(_STEPS)):
            return None
        if new and (new[-1] >= step or new[0] > step):
            return int(new[-1])
        if any(process.poll() not in (None, 0) for process in ranks.processes):
            raise SystemExit(f"a rank ended by itself:\n{ranks.output}")
        time.sleep(0.01)
    raise SystemExit(f"no step {step} within {_ENDS_WITHIN_S} s:\n{ranks.output}")


def differences(one: Path, other: Path, *, from_step: int = 0) -> list[str]:
    """What differs between two runs, in words; a fork has the steps behind `from_step` alone."""
    expected, found = newest_state(one), newest_state(other)
    problems = [f"{len(expected.keys() ^ found.keys())} other tensors"] * (
        expected.keys() != found.keys()
    )
    problems += [name for name in expected if not torch.equal(expected[name], found[name])]
    known, seen = losses(one), losses(other)
    problems += ["losses"] * (seen != {step: known[step] for step in known if step > from_step})
    lines = (other / "batches.tsv").read_text().splitlines()[1:]
    whole = (one / "batches.tsv").read_text().splitlines()[1:]
    # A batch a step: none of these runs skips one.
    return problems + ["batches.tsv"] * (lines != whole[from_step:])


def campaign(folder: Path, worlds: list[int], kills: int, seed: int) -> dict[str, Any]:
    """Strike a run of each world."""
    first = small_dataset(folder)
    other, choice = other_dataset(folder, first), random.Random(seed)
    every, rows, problems = stages(other), list[dict[str, Any]](), dict[str, list[str]]()
    for world in worlds:

        def start(name: str, *more: str, of: Any = every, world: int = world) -> Ranks:
            given = (*_COMMON, f"stages={json.dumps(of)}", *more)
            return Ranks(folder / name, first, *given, world_size=world)

        straight, struck = folder / f"straight-{world}", folder / f"struck-{world}"
        start(straight.name).ended(timeout_s=_ENDS_WITHIN_S)
        rows += strike(struck, start, kills // len(worlds), choice)
        problems[struck.name] = differences(straight, struck)
        fork = start(f"fork-{world}", f"continue_from={straight}@{_BORDERS[1]}", of=every[2:])
        folder_of_fork, border = fork.ended().run_dir, _BORDERS[1]
        problems[f"fork-{world}"] = differences(straight, folder_of_fork, from_step=border)
    return {"kills": len(rows), "rows": rows, "differences": problems}


def main(words: list[str] | None = None) -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=24, help="over all worlds (24)")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and moments (1)")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="ranks (1 2 4)")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        found = campaign(Path(folder), arguments.worlds, arguments.kills, arguments.seed)
    found |= {
        "seed": arguments.seed,
        "took_s": round(time.monotonic() - started),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "numpy")},
        "python": platform.python_version(),
    }
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 1 if any(found["differences"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
