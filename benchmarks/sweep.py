"""Runs of `postnorm pretrain` that differ in some settings; what has ended is not run again."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def run_sweep(
    out: Path, config: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]], jobs: int
) -> None:
    """Run what is missing of `runs`, overrides by name, into OUT/runs/NAME."""
    out.mkdir(parents=True, exist_ok=True)
    base, text = out / "base.yaml", yaml.safe_dump(dict(config), sort_keys=False)
    if base.is_file() and base.read_text() != text:
        raise SystemExit(f"{base} is of other settings, and so are its runs; take another folder")
    base.write_text(text)
    body = {
        "verb": "pretrain",
        "config": "base.yaml",
        "dir": str(out / "runs"),
        "runs": [{"folder": name} | dict(overrides) for name, overrides in runs.items()],
    }
    (out / "sweep.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    sweep = "submit", "--sweep", str(out / "sweep.yaml"), "--local", "--jobs", str(jobs)
    postnorm(*sweep, check=False)


def postnorm(*words: str, check: bool = True) -> int:
    """Run a verb with this Python; its output goes to standard error."""
    command = [sys.executable, "-m", "postnorm", *words]
    return subprocess.run(command, check=check, stdout=sys.stderr).returncode
