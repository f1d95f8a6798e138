"""`run_gpu.sh` and `train_gpu.sh`: what they start, what goes on when a part fails, and all of it
once, as small as it gets, on a CPU."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_checks import FLOOR
from benchmarks.training_report import planned_gb, report
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.model.cost import TrainingPass, state_bytes
from pipeline.model.describe import read_plan
from pipeline.objectives.activations import activation_bytes
from tests.support.processes import write_program
from tests.support.triton import NEEDS_TRITON

ROOT = Path(__file__).parents[2]
PARTS = ("checks", "attention", "steps", "few", "profile")


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit without wheels, for an environment that has everything."""
    folder = tmp_path / "kit"
    folder.mkdir()
    version = ".".join(platform.python_version_tuple()[:2])
    about = {"python": version, "machine": platform.machine(), "wheels": {},
             "needs": {"numpy>=2.1": "postnorm"}}  # fmt: skip
    (folder / "kit.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """In place of Python: writes its arguments down, and fails where they hold BREAK's words."""
    return write_program(
        tmp_path / "python", '#!/bin/bash\necho "$*" >>"$CALLS"\necho said\n'
        'for word in $BREAK; do [[ "$*" != *"$word"* ]] || { echo "it broke"; exit 3; }; done\n',
    )  # fmt: skip


def start(script: str, *arguments: Any, **variables: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks" / script), *map(str, arguments)], cwd="/", text=True,
        env={**os.environ, "PYTHON": sys.executable}
        | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def calls(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "calls").read_text().splitlines()
    return [line.removeprefix("-m ").split()[0] for line in lines]


def seconds(text: str, beside: str) -> int:
    """The number in front of some words or behind them."""
    found = re.search(rf"{beside}(\d+)|(\d+){beside}", text)
    assert found is not None, text
    return int(found[1] or found[2])


def test_the_parts_run_in_order_and_share_the_time(kit: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = start("run_gpu.sh", kit, out, DRY_RUN=1, PYTHON="py", BUDGET_S=240, DATA="/data")
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if "py -m" in line]
    assert [line.split()[1].strip(",") for line in lines] == ["kit", *PARTS, "page"]
    checks, attention, steps, few, profile = (line.partition("py -m ")[2] for line in lines[1:-1])
    assert checks == f"benchmarks.gpu_checks --out {out}/checks.json"
    # 7 + 3 + 12 + 4 + 3 shares of 240 s, of which nothing is used here.
    assert seconds(lines[1], " s at most") == pytest.approx(58 + 15, abs=4)
    assert attention.startswith(f"benchmarks.attention --data /data --out {out}/attention.json")
    assert f"--out {out}/steps.json" in steps
    assert steps.endswith("--subjects goals --at-once 5")
    assert f"--out {out}/few.json" in few
    assert few.endswith("--subjects few --seq-len 512 --tokens 16384 4096")
    for line, expected in ((attention, 33), (steps, 152), (few, 137)):
        assert seconds(line, "--budget-s ") == pytest.approx(expected, abs=8)
    assert "data.dir=/data" in profile
    assert f"--trace {out}/trace.json.gz" in profile


def test_the_plan_on_the_page_is_that_of_the_script() -> None:
    script = (ROOT / "benchmarks/run_gpu.sh").read_text()
    line = next(line for line in script.splitlines() if "SHARES=(" in line)
    shares = {part: int(share) for part, share in re.findall(r"\[(\w+)\]=(\d+)", line)}
    page = (ROOT / "docs/speed.md").read_text()
    planned = {part: int(s) for part, s in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.M)}
    whole = sum(shares.values())
    assert planned == {part: round(500 * share / whole) for part, share in shares.items()}
    assert "BUDGET_S=${BUDGET_S:-500}" in script


def test_a_part_that_fails_says_so_and_others_go_on(kit: Path, tmp_path: Path, stub: Path) -> None:
    done = start("run_gpu.sh", kit, tmp_path / "out", PYTHON=stub, CALLS=tmp_path / "calls",
                 BREAK="gpu_checks few.json")  # fmt: skip
    assert done.returncode == 1
    assert calls(tmp_path) == ["benchmarks.kit", "benchmarks.gpu_checks", "benchmarks.attention",
                               "benchmarks.step", "benchmarks.step", "pipeline",
                               "benchmarks.gpu_report"]  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed[0].startswith("FAILED: checks, exit code 3")
    assert failed[-2:] == [f"FAILED: {part}: see {tmp_path}/out/run.log"
                           for part in ("checks", "few")]  # fmt: skip
    assert "it broke" in (tmp_path / "out/run.log").read_text()


def test_training_starts_runs_whose_configs_are_valid(kit: Path, tmp_path: Path) -> None:
    """Small ones, too: what a dry run prints is what would run."""
    for tiny in ("", "1"):
        done = start("train_gpu.sh", kit, tmp_path / "out", "train.lr=1e-4", DRY_RUN=1,
                     PYTHON="py", DATA="/data", TINY=tiny)  # fmt: skip
        assert done.returncode == 0, done.stdout
        printed = [line for line in done.stdout.splitlines() if " pretrain " in line]
        configs = {}
        for line in printed:
            config, *overrides = line.partition(" pretrain ")[2].split()
            loaded = load(PretrainConfig, ROOT / config, overrides).config
            configs[Path(loaded.run_dir).name] = loaded
        assert len(printed) == 3
        assert set(configs) == {"gpu", "cpu", "run"}
        assert {config.data.dir for config in configs.values()} == {"/data"}
        assert configs["gpu"].train.num_steps == configs["cpu"].train.num_steps
        assert (configs["gpu"].train.precision, configs["cpu"].train.precision) == ("bf16", "fp32")
        assert configs["run"].train.lr == 1e-4
        assert configs["run"].train.schedule == ("linear" if tiny else "time_budget")
    assert "benchmarks.training_report" in done.stdout


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.usefixtures("processes")
def test_everything_once_on_a_cpu(kit: Path, tmp_path: Path, dataset: DatasetIndex) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    done = start("run_gpu.sh", kit, out, TINY=1, DATA=dataset.folder,
                 BUDGET_S=1500, OMP_NUM_THREADS=1)  # fmt: skip
    assert done.returncode == 0, done.stdout
    results = {part: json.loads((out / f"{part}.json").read_text()) for part in PARTS}
    assert results["checks"]["passed"], results["checks"]
    assert 0 < results["checks"]["worst_fused_error"] < FLOOR
    for part, size in (("steps", "s32 128"), ("few", "s32 32")):
        subjects = results[part]["subjects"]
        assert len(subjects) == 2
        for name, of in subjects.items():
            assert of["cases"][size]["tokens_per_s"], name
    assert results["profile"]["steps"] == 2
    assert (out / "trace.json.gz").stat().st_size > 1000
    page = (out / "gpu.md").read_text()
    for title in ("Correctness", "Attention", "Training steps of few", "Where the time"):
        assert f"\n## {title}" in page
    # The files that come back from a machine for which their number is limited.
    assert len(list(out.iterdir())) <= 8


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_training_once_on_a_cpu(kit: Path, tmp_path: Path, dataset: DatasetIndex) -> None:
    out = tmp_path / "out"
    done = start("train_gpu.sh", kit, out, TINY=1, DATA=dataset.folder, BUDGET_S=1500,
                 OMP_NUM_THREADS=1)  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = json.loads((out / "training.json").read_text())
    assert (found["steps"], found["first_steps"]) == (20, 3)
    # bf16 beside fp32 of the same weights and batches.
    assert 0 < found["first_steps_difference"] < 0.02
    assert found["planned_gb"] > 0
    assert "## A real training run" in (out / "gpu.md").read_text()


@pytest.mark.usefixtures("processes")
def test_planned_memory_is_that_of_the_model_command() -> None:
    config = ROOT / "benchmarks/gpu/train.yaml"
    plan = read_plan(config)
    passed = TrainingPass(plan.config, plan.micro_batch, plan.seq_len, fused=plan.fused)
    kept = activation_bytes(passed)["total"]
    state = state_bytes(plan.config, 1)["total"]
    assert planned_gb(config) == pytest.approx((kept + state) / 1e9, rel=1e-4)


def test_losses_of_both_devices_are_compared(tmp_path: Path) -> None:
    for name, losses in (("gpu", [10.0, 9.0, 8.2]), ("cpu", [10.0, 9.1, 8.0])):
        (tmp_path / name).mkdir()
        lines = [{"kind": "eval", "loss": 99.0}]
        lines += [{"kind": "train", "loss": loss} for loss in losses]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    found = report(tmp_path)
    assert found["first_steps"] == 3
    assert found["first_steps_difference"] == pytest.approx(0.2 / 8.0)
    assert found["first_losses"]["gpu"] == [10.0, 9.0, 8.2]
    assert "tokens_per_s" not in found
