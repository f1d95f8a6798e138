"""The instruments of speed run small on a CPU, and a subject that fails does not end the others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, attention_subjects, step
from benchmarks.attention_subjects import Attention, Case
from benchmarks.step_subjects import Setting, parse
from pipeline.data.format import DatasetIndex
from pipeline.profile.timeline import CATEGORIES
from tests.support.triton import NEEDS_TRITON, Interpreter

ROOT = Path(__file__).parents[2]
OURS, PEER = "ours/realformer_v2-base/auto/plain/zero0", "hf/roberta-base/autocast/plain"
FAILING = "hf/roformer-large/bf16/plain"


@pytest.fixture(scope="module")
def measured(
    dataset: DatasetIndex, tmp_path_factory: pytest.TempPathFactory, processes: None
) -> dict[str, Any]:
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("step") / "step.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--data", str(dataset.folder), "--out", str(out),
         "--subjects", OURS, PEER, FAILING, "--profile", OURS, "--tiny", "--seq-len", "32",
         "--tokens", "128", "--vocab-size", "1000", "--batches", "2", "--rounds", "2",
         "--seconds", "0.01", "--at-once", "2"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    return found


def test_steps_of_ours_and_of_a_peer(measured: dict[str, Any]) -> None:
    for name in (OURS, PEER):
        at = measured["subjects"][name]["lengths"]["32"]
        assert len(at["tokens_per_s"]) == 2, name
        assert min(at["tokens_per_s"]) > 0
        assert 3 < at["losses"][0] < 9  # ln(1000) = 6.9
        assert at["losses"][2] < at["losses"][0]  # the same of two batches
        assert 0.5 < at["fill"] <= 1
    # The same batches.
    fills = {measured["subjects"][name]["lengths"]["32"]["fill"] for name in (OURS, PEER)}
    assert len(fills) == 1


def test_a_failing_subject_is_named_with_its_error(measured: dict[str, Any]) -> None:
    assert "roformer-large.yaml" in measured["subjects"][FAILING]["error"]


def test_the_profile_of_a_subject_adds_up(measured: dict[str, Any]) -> None:
    profile = measured["profiles"][f"{OURS} 32"]
    assert list(profile["categories_ms"]) == list(CATEGORIES)
    assert sum(profile["categories_ms"].values()) == pytest.approx(profile["step_ms"])
    assert min(profile["categories_ms"][part] for part in CATEGORIES[:5]) > 0


class Answering:
    """In place of a subject's process: memory for so many slots, of which others may take some."""

    def __init__(self, memory: int) -> None:
        self.memory, self.asked = memory, []

    def ask(self, limit_s: float, *, do: str, seq_len: int, tokens: int, steps: int) -> Any:
        assert limit_s > 0
        self.asked.append((do, seq_len, tokens))
        if tokens > self.memory:
            return {"error": "out of memory", "out_of_memory": True}
        return {"step_s": 0.5, "mflop_per_token": 1.0, "s": 0.5 * steps, "tokens": tokens * steps,
                "loss": 1.0}  # fmt: skip


def _comparison(tmp_path: Path, memory: int) -> tuple[step.Comparison, Answering]:
    plan = step.Plan([128, 512], 1024, 2, 1.0, 10.0, 1, [], time.monotonic() + 1000)
    comparison = step.Comparison([OURS], Setting("unused", 1000, 2), plan, tmp_path / "step.json")
    process = comparison._processes[OURS] = Answering(memory)  # type: ignore[assignment]
    return comparison, process


def test_micro_batches_are_halved_where_memory_runs_out(tmp_path: Path) -> None:
    comparison, process = _comparison(tmp_path, 300)
    assert not comparison._warm_up(OURS, may_halve=False)
    assert comparison._warm_up(OURS, may_halve=True)
    found = comparison.found["subjects"][OURS]["lengths"]
    assert [found[length]["tokens"] for length in ("128", "512")] == [256, 256]
    assert comparison._round(0)
    assert found["512"]["tokens_per_s"] == [512.0]
    process.memory = 150  # others came
    assert comparison._round(1)
    assert [found[length]["tokens"] for length in ("128", "512")] == [128, 128]
    assert comparison._round(2)
    assert found["512"]["tokens_per_s"] == [256.0]


def test_a_subject_for_which_there_is_no_memory_is_named(tmp_path: Path) -> None:
    comparison, process = _comparison(tmp_path, 100)
    process.end = lambda: None  # type: ignore[attr-defined]
    assert comparison._warm_up(OURS, may_halve=True)
    assert comparison.found["subjects"][OURS]["error"] == "length 128: out of memory"
    assert [tokens for _, _, tokens in process.asked] == [1024, 512, 256, 128]


def test_rounds_end_with_the_budget(tmp_path: Path) -> None:
    comparison, _ = _comparison(tmp_path, 1024)
    comparison._warm_up(OURS, may_halve=True)
    comparison.plan.started -= 1000
    comparison.plan.deadline = time.monotonic() + 1  # a turn takes 4 steps of half a second
    assert comparison._round(0)  # the first is always taken
    assert not comparison._round(1)
    assert not comparison.plan.may_prepare()


@pytest.mark.usefixtures("processes")
def test_a_process_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    process = step.Process(OURS, Setting("/nowhere", 1000, 2), tmp_path / "log")
    assert process.answer(0.2) == {"error": "no answer within 0 s"}
    assert process.ask(5, do="time")["error"].startswith("ended with exit code -9")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ours/roformer_v2-base/fused/compile/zero1", "'fused' is none of auto, reference"),
        ("hf/roberta-base/autocast", "expected ours/"),
        ("theirs/roberta-base/autocast/plain", "expected ours/"),
    ],
)
def test_names_of_subjects(name: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        parse(name)


def test_wrong_attention_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_subjects.SUBJECTS["eager sum"]

    def wrong(case: Case) -> Attention:
        made = right(case)
        return Attention(lambda q, k, v, carry: made.run(q * 1.1, k, v, carry), made.carry)

    monkeypatch.setitem(attention_subjects.SUBJECTS, "eager mean", wrong)
    device = torch.device("cpu")
    found = attention.check(["eager sum", "eager mean", "plain, cuDNN"], device, (1, 32))
    assert attention.is_right(found["eager sum"], "packed") is None
    assert "wrong: error" in str(attention.is_right(found["eager mean"], "packed"))
    assert "backend" in str(attention.is_right(found["plain, cuDNN"], "full"))


def test_documents_of_packed_rows() -> None:
    documents = attention.packed_documents(3, 40, None, torch.device("cpu"))
    ends, longest = Case("", 1, 32, documents).ends()
    lengths = [len(list(group)) for row in documents.tolist() for group in _runs(row)]
    assert ends.diff().tolist() == lengths
    assert longest == max(lengths)
    assert Case("", 1, 32, documents).pairs() == sum(n * n for n in lengths)
    assert len(lengths) > 6


def _runs(row: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for value in row:
        if not runs or runs[-1][-1] != value:
            runs.append([])
        runs[-1].append(value)
    return runs


@NEEDS_TRITON
def test_interpreted_instruments(interpreter: Interpreter) -> None:
    interpreter("tests/benchmarks/interpreted_instruments.py")


def test_the_plan_of_a_gpu_run(tmp_path: Path) -> None:
    for script in ("run_gpu.sh", "train_gpu.sh"):
        subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / script)], check=True)
    variables = {
        **os.environ, "DRY_RUN": "1", "DATA": "/data", "OUT": str(tmp_path), "PYTHON": "py",
        "BUDGET_S": "500", "SUBJECTS": f"{OURS} {PEER}",
    }  # fmt: skip
    out = {
        script: subprocess.run(
            ["bash", str(ROOT / "benchmarks" / script)], env=variables, text=True, check=True,
            capture_output=True,
        ).stdout
        for script in ("run_gpu.sh", "train_gpu.sh")
    }  # fmt: skip
    plan = [line.partition(": ")[2] for line in out["run_gpu.sh"].splitlines()]
    modules = [line.partition("-m ")[2].split()[0] for line in plan if "-m " in line]
    assert modules == [
        "benchmarks.machine", "benchmarks.gpu_checks", "benchmarks.attention", "benchmarks.step",
        "benchmarks.gpu_report",
    ]  # fmt: skip
    assert f"--subjects {OURS} {PEER} --budget-s 4" in out["run_gpu.sh"]
    assert "--data /data" in plan[3]
    assert "pipeline pretrain benchmarks/train_gpu.yaml" in out["train_gpu.sh"]
