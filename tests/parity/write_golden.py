"""Writes the golden files again, with revision 28d9e7b: what new revisions must read and compute.

  python -m tests.parity.write_golden archive   golden/written_by_28d9e7b.tar.xz
  python -m tests.parity.write_golden losses    golden/losses.json, which needs the archive

The archive holds what that revision makes of its own documentation: a dataset of two sources, and
the folder of a run on two ranks (ZeRO 1) that a person stopped in the middle of its alpha warm-up.
Names in its configs are relative, so that it works wherever it is unpacked.
"""

import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.parity import revision_runs as runs
from tests.parity.revision_cases import CASES

_SOURCES = {"guides": ("docs/checkpoints.md", "docs/data_loading.md", "docs/data_preparation.md",
                       "docs/faults.md", "docs/models.md", "docs/slurm.md", "docs/speed.md"),
            "readme": ("README.md",)}  # fmt: skip
_PREP = """
output_dir: dataset
workers: 1
sources:
  - {name: guides, inputs: [corpus/guides]}
  - {name: readme, inputs: [corpus/readme], weight: 2.0}
tokenizer: {vocab_size: 512}
shards: {block_tokens: 2000, shard_mb: 1, eval_fraction: 0.1}
"""
_RUN = """
run_dir: run
seed: 7
model:
  {num_layers: 2, hidden_size: 16, num_heads: 2, ffn_size: 32, score_residual: sum, init: unit,
   dropout: 0, attention_dropout: 0}
data: {dir: dataset, seq_len: 64, window_blocks: 2}
train:
  {num_steps: 60, global_batch: 8, micro_batch: 2, lr: 3e-3, warmup_steps: 5,
   alpha_warmup_steps: 50, zero_stage: 1}
checkpoint: {every_steps: 60, keep: 1}
monitor: {log_every_steps: 1, eval_every_steps: 30, eval_sequences: 16}
"""
_STOPPED_BY_A_PERSON = 3


def write(folder: Path) -> None:
    """Write `corpus/`, `dataset/`, `run/` and the two configs into a folder."""
    for source, names in _SOURCES.items():
        for name in names:
            path = folder / "corpus" / source / (Path(name).stem + ".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            git = ["git", "-C", str(runs.ROOT), "show", f"{runs.BASE}:{name}"]
            path.write_bytes(subprocess.run(git, capture_output=True, check=True).stdout)
    (folder / "prep.yaml").write_text(_PREP)
    (folder / "run.yaml").write_text(_RUN)
    log = folder / "log"
    with runs.checked_out(runs.BASE) as tree:
        prepare = ["-m", "data_prep", "run", "prep.yaml"]
        runs.run_ranks(tree, prepare, cwd=folder, log=log, num_ranks=1, timeout_s=120)
        train = ["-m", "pipeline", "pretrain", "run.yaml"]
        with runs.start_ranks(tree, train, cwd=folder, log=log, num_ranks=2) as processes:
            metrics = folder / "run/metrics.jsonl"
            while not metrics.exists() or '"step": 12' not in metrics.read_text():
                assert all(process.poll() is None for process in processes), log.read_text()
                time.sleep(0.01)
            (folder / "run/STOP").touch()
            codes = [process.wait(60) for process in processes]
        assert codes == [_STOPPED_BY_A_PERSON] * 2, log.read_text()
    (folder / "run/STOP").unlink()
    log.unlink()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def golden_of(outcome: runs.Outcome) -> dict[str, Any]:
    """Return what `losses.json` keeps of a run: values in the order of steps."""
    return {
        "batches_sha256": hashlib.sha256("\n".join(outcome.batches).encode()).hexdigest(),
        "resumed_from_step": outcome.start["resumed_from_step"],
        "fingerprint": outcome.start["fingerprint"],
        "held_out_losses": list(outcome.logged("eval", "loss").values()),
        "losses": list(outcome.losses.values()),
        "grad_norms": list(outcome.logged("train", "grad_norm").values()),
    }


def _write_archive() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        runs.WRITTEN.parent.mkdir(exist_ok=True)
        # The dataset's tokenizer is in the checkpoint, too; one window of xz stores it once.
        with tarfile.open(runs.WRITTEN, "w:xz", preset=9 | lzma.PRESET_EXTREME) as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name, filter=_plain)


def _write_losses() -> None:
    golden = {}
    with runs.checked_out(runs.BASE) as tree:
        for name, case in CASES.items():
            if name != "prep":
                with tempfile.TemporaryDirectory() as folder:
                    golden[name] = golden_of(case.outcome(tree, Path(folder)))
                print(name, flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(golden[name])}" for name in golden)
    runs.LOSSES.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["archive"]:
            _write_archive()
        case ["losses"]:
            _write_losses()
        case _:
            sys.exit(__doc__)
