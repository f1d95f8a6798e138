"""A run folder without training: what the launcher and a trainer leave in it."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from pipeline.config.load import load, resolved_text
from pipeline.config.runs import PretrainConfig
from pipeline.runtime.checkpoints import FOLDER, MANIFEST_FILE, Manifest, name_of, signed

ROOT = Path(__file__).parents[2]


class RunFolder:
    """Grows as a run does."""

    def __init__(self, folder: Path, num_steps: int = 1000) -> None:
        self.folder = folder
        (folder / "launch").mkdir(parents=True)
        (folder / "logs").mkdir()
        overrides = [f"run_dir={folder}", f"train.num_steps={num_steps}"]
        config = load(PretrainConfig, str(ROOT / "configs" / "demo.yaml"), overrides).config
        (folder / "resolved.yaml").write_text(resolved_text(config))
        self._attempts = 0

    def submitted(self, job: str, unix_s: float | None = None, kind: str = "pretrain") -> None:
        number = len(list((self.folder / "launch").glob("[0-9]*"))) + 1
        record = {"number": number, "job": job, "kind": kind, "run_dir": str(self.folder),
                  "work_dir": str(ROOT), "config": "configs/demo.yaml", "overrides": [],
                  "cluster": None, "code": "code/0", "revision": "0",
                  "submitted_unix_s": unix_s or time.time(), "nodes": 2, "ranks": 2,
                  "command": "sbatch"}  # fmt: skip
        path = self.folder / "launch" / f"{number:04d}" / "submission.json"
        path.parent.mkdir()
        path.write_text(json.dumps(record))

    def started(self, job: str, unix_s: float, from_step: int | None = None) -> None:
        """A start of the trainer; `job` with its restart, such as `412.0`."""
        self._attempts += 1
        line = {"attempt": self._attempts, "unix_s": unix_s, "resumed_from_step": from_step,
                "world_size": 2, "host": "elsewhere", "job": job}  # fmt: skip
        self._append("attempts.jsonl", line)

    def trained(self, step: int, unix_s: float, loss: float = 6.5) -> None:
        line = {"kind": "train", "step": step, "attempt": self._attempts, "unix_s": unix_s,
                "loss": loss, "tokens": 4096.0, "tokens_per_s": 1000.0,
                "data_wait": 0.0}  # fmt: skip
        self._append("metrics.jsonl", line)

    def saved(self, step: int, unix_s: float) -> None:
        """A checkpoint, with no files but its manifest."""
        manifest = Manifest(step=step, cursor=8 * step, skipped=0, alpha=1.0, fingerprint="f",
                            identity={}, config_sha256="c", world_size=2, created_unix_s=unix_s,
                            provenance={}, files={})  # fmt: skip
        folder = self.folder / FOLDER / name_of(step)
        folder.mkdir(parents=True)
        (folder / MANIFEST_FILE).write_text(json.dumps(signed(asdict(manifest))))
        (folder.parent / "latest").write_text(f"{name_of(step)}\n")

    def exited(self, job: str, *codes: int) -> None:
        folder = self.folder / "exit" / job
        folder.mkdir(parents=True)
        for rank, code in enumerate(codes):
            (folder / f"rank-{rank:05d}").write_text(f"{code}\n")

    def decided(self, job: str, restart: int, decision: str, reason: str, unix_s: float) -> None:
        line = {"unix_s": unix_s, "job": job, "restart": restart, "nodes": ["node1"],
                "before": None, "after": None, "decision": decision, "reason": reason}  # fmt: skip
        self._append("launch/history.jsonl", line)

    def _append(self, name: str, line: dict[str, object]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")
