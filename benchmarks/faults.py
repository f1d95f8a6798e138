"""A campaign of random faults against training; a table, one JSON line, 1 if one was not survived.

    python -m benchmarks.faults [--faults 100] [--slurm 30] [--seed 1] [--data DATASET]
        [--table benchmarks/results/faults.md]

Of a number of faults some strike one job on a real SLURM (`apt-get install slurm-wlm iproute2`; its
daemons run on six "nodes" of this machine), the others runs of two ranks that are started without
it. A tiny model is trained over gloo, dropout on. DATASET is a folder written by `python -m
data_prep run`; by default Python's own help is prepared for it.

`benchmarks/faults_local.py` and `benchmarks/faults_slurm.py` say what strikes and what must hold:
no sample is lost or repeated without the ledger's word, no wrong value stays unseen, and the last
checkpoint is, bit for bit, the one of a run that nothing struck. A fault that costs a batch (a loss
that is NaN) is compared with a run that was told to leave this batch out.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults_slurm import run_slurm
from data_prep.config import PrepConfig
from data_prep.run import run as prepare
from pipeline.config.load import git_revision, load
from pipeline.data.format import DatasetIndex, read_index
from tests.support.slurm import why_not

_NAMESPACE = ("unshare", "--map-root-user", "--mount")
"""In which disks are mounted that nobody else sees, and that end with it."""


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


def run_local(folder: Path, dataset: DatasetIndex, faults: int, seed: int) -> dict[str, Any]:
    """Strike runs without SLURM; return what `benchmarks.faults_local` prints."""
    can_mount = subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode == 0
    done = subprocess.run(
        [*(_NAMESPACE if can_mount else ()), sys.executable, "-m", "benchmarks.faults_local",
         str(folder), str(dataset.folder), "--faults", str(faults), "--seed", str(seed)],
        stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    # DeepSpeed logs to standard output, too.
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(result: dict[str, Any]) -> str:
    """The campaign as Markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    survived = sum(row["survived"] for half in _halves(result) for row in half["rows"])
    lines = [
        "# Faults", "",
        f"`python -m benchmarks.faults --faults {result['faults']} --slurm {result['on_slurm']} "
        f"--seed {result['seed']}`, {versions}; {result['wall_s'] / 60:.0f} minutes on two cores. "
        "What strikes and what is compared is said in `benchmarks/faults.py`.", "",
        f"**{survived} of {result['faults']} faults survived.** "
        + ("" if result["problems"] else "No sample was lost or repeated, no wrong value stayed "
           "unseen, and no bit of a last checkpoint differs from the run without faults, but where "
           "ranks and ZeRO stages were changed."), "",
        *(f"- {text}" for text in result["problems"]),
    ]  # fmt: skip
    if result["local"]:
        lines += _local_part(result["local"])
    if result["slurm"]:
        lines += _slurm_part(result["slurm"])
    return "\n".join([*lines, ""])


def _local_part(local: dict[str, Any]) -> list[str]:
    struck = Counter(row["fault"] for row in local["rows"])
    lines = [
        "## Without SLURM", "",
        f"Runs of {local['steps']} steps on two ranks; each is compared with one that nothing "
        "struck. Where a fault cost a batch, that one was told to leave the batch out "
        "(`train.skip_batches`), and the ledger of the struck run names the reason: a loss, a "
        "gradient or a state that was not finite. All other faults leave every bit as it would "
        "have been.", "",
        "| run | ZeRO stage | batches left out | steps repeated for a wrong bit |",
        "|---|---|---|---|",
        *(
            f"| {number} | {run['stage']} | {', '.join(map(str, run['left_out'])) or '-'} "
            f"| {run['repeated']} |"
            for number, run in enumerate(local["runs"], 1)
        ), "",
        "With other numbers of ranks and ZeRO stages, without dropout, the order of sums differs, "
        f"so bits do: `batches.tsv` is the same, losses are {local['losses_apart_nats']:.5f} nats "
        "apart at most (allowed: 0.02).", "",
    ]  # fmt: skip
    if local["left_out"]:
        lines += [f"Not tried here, since disks cannot be mounted: {local['left_out']}.", ""]
    lines += [
        "| fault | times | survived |", "|---|---|---|",
        *(
            f"| {kind} | {times} | "
            f"{sum(row['survived'] for row in local['rows'] if row['fault'] == kind)} |"
            for kind, times in sorted(struck.items())
        ), "",
        "In their order:", "",
        "| fault | stage | resumed from | at step | checkpoint after | codes | took, s |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['fault']} | {row['stage']} | {row['resumed_from']} | {row['at_step']} "
            f"| {row['checkpoint']} | {', '.join(map(str, row['codes']))} | {row['took_s']} |"
            for row in local["rows"]
        ), "",
    ]  # fmt: skip
    return lines


def _slurm_part(slurm: dict[str, Any]) -> list[str]:
    return [
        "## On SLURM", "",
        f"One run of {slurm['steps']} steps on two of six nodes, all on one machine, a checkpoint "
        f"every {slurm['checkpoint_every_steps']}; SLURM {slurm['slurm']} started it again "
        f"{slurm['restarts']} times in {slurm['job_s']} s. All {slurm['same'].get('tensors')} "
        "tensors of its last checkpoint are compared. Seconds are from a fault to the next step; "
        "those of SLURM are the part in which no script of the job ran. A requeued job waits 6 s "
        "here; by default SLURM lets it wait 121 s.", "",
        "| fault | moment | after step | to the next step, s | SLURM, s | steps twice | restarts |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['fault']} | {row['moment']} | " + " | ".join(
                str(row.get(name, "-"))
                for name in ("step", "lost_s", "slurm_s", "again", "restarts")
            ) + " |"
            for row in slurm["rows"]
        ),
    ]  # fmt: skip


def _halves(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [half for half in (result["local"], result["slurm"]) if half]


def main() -> None:
    """Run the campaign and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="of both halves")
    parser.add_argument("--slurm", type=int, help="how many of them on SLURM; default: 3 of 10")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, ranks and moments")
    parser.add_argument("--data", type=Path, help="dataset; default: Python's own help")
    parser.add_argument("--table", type=Path, help="file for the table; default: standard error")
    arguments = parser.parse_args()
    on_slurm = arguments.faults * 3 // 10 if arguments.slurm is None else arguments.slurm
    if on_slurm > arguments.faults:
        parser.error(f"--slurm {on_slurm}: expected at most --faults {arguments.faults}")
    if on_slurm and why_not():
        sys.exit(f"{why_not()}; or pass --slurm 0")
    started = time.monotonic()
    local: dict[str, Any] = {}
    slurm: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        dataset = read_index(arguments.data) if arguments.data else small_dataset(folder)
        if arguments.faults > on_slurm:
            local = run_local(folder, dataset, arguments.faults - on_slurm, arguments.seed)
        if on_slurm:
            (folder / "s").mkdir()
            slurm = run_slurm(folder / "s", dataset, on_slurm, arguments.seed)
    result = {
        "benchmark": "faults", "faults": arguments.faults, "on_slurm": on_slurm,
        "seed": arguments.seed, "wall_s": round(time.monotonic() - started),
        "local": local, "slurm": slurm,
        "versions": {"python": platform.python_version(), "machine": platform.machine(),
                     "torch": torch.__version__, "deepspeed": version("deepspeed"),
                     "revision": git_revision()},
    }  # fmt: skip
    result["problems"] = [text for half in _halves(result) for text in half["problems"]]
    if arguments.table:
        arguments.table.write_text(table(result), encoding="utf-8")
    else:
        sys.stderr.write(table(result))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
