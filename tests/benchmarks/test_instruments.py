"""The instruments of speed run small on a CPU, and a subject that fails does not end the others."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attention, attention_subjects, gpu_checks, step
from benchmarks.attention_subjects import Attention, Case
from benchmarks.step_subjects import Setting, model_config, parse, read_batches, run_config
from pipeline.data.format import DatasetIndex
from pipeline.model.cost import activation_bytes, flops_per_token, state_bytes
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
         "--subjects", OURS, PEER, FAILING, "--tiny", "--seq-len", "32",
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
        at = measured["subjects"][name]["cases"]["s32 128"]
        assert len(at["tokens_per_s"]) == 2, name
        assert min(at["tokens_per_s"]) > 0
        assert 3 < at["losses"][0] < 9  # ln(1000) = 6.9
        assert at["losses"][2] < at["losses"][0]  # the same of two batches
        assert 0.5 < at["fill"] <= 1
    # The same batches.
    fills = {measured["subjects"][name]["cases"]["s32 128"]["fill"] for name in (OURS, PEER)}
    assert len(fills) == 1


def test_a_failing_subject_is_named_with_its_error(measured: dict[str, Any]) -> None:
    assert "roformer-large.yaml" in measured["subjects"][FAILING]["error"]


def test_flops_count_real_documents(measured: dict[str, Any], dataset: DatasetIndex) -> None:
    """Of both subjects: attention within documents, the head over what is predicted."""
    setting = Setting(str(dataset.folder), 1000, 2, tiny=True)
    config = run_config(parse(OURS), setting, 32, 128)
    batches = read_batches(config, setting)
    rows = [row for batch in batches for row in batch.documents.tolist()]
    lengths = [row.count(number) for row in rows for number in set(row) - {0}]
    document_len = sum(n * n for n in lengths) / sum(lengths)
    masked_share = sum(batch.weights["loss"] for batch in batches) / sum(lengths)
    assert 1 < document_len < 32
    for name in (OURS, PEER):
        at = measured["subjects"][name]["cases"]["s32 128"]
        assert at["document_len"] == pytest.approx(document_len)
        assert at["masked_share"] == pytest.approx(masked_share)
        model = model_config(parse(name), setting)
        flops = flops_per_token(model, 32, masked_share, document_len)
        assert at["mflop_per_token"] == pytest.approx(flops.total / 1e6)


def test_the_plan_of_memory_is_that_of_the_model_command(measured: dict[str, Any]) -> None:
    config = model_config(parse(OURS), Setting("unused", 1000, 2, tiny=True))
    kept = activation_bytes(config, 128, 32)["total"] + state_bytes(config, 1)["total"]
    assert measured["subjects"][OURS]["cases"]["s32 128"]["plan_gib"] == kept / 2**30
    assert "plan_gib" not in measured["subjects"][PEER]["cases"]["s32 128"]


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
    cases = [(128, 1024), (512, 1024)]
    plan = step.Plan(cases, 2, 1.0, 10.0, 1, time.monotonic() + 1000)
    comparison = step.Comparison([OURS], Setting("unused", 1000, 2), plan, tmp_path / "step.json")
    process = comparison._processes[OURS] = Answering(memory)  # type: ignore[assignment]
    return comparison, process


def test_micro_batches_are_halved_where_memory_runs_out(tmp_path: Path) -> None:
    comparison, process = _comparison(tmp_path, 300)
    assert not comparison._warm_up(OURS, may_halve=False)
    assert comparison._warm_up(OURS, may_halve=True)
    found = comparison.found["subjects"][OURS]["cases"]
    names = "s128 1024", "s512 1024"
    assert [found[name]["tokens"] for name in names] == [256, 256]
    assert comparison._round(0)
    assert found["s512 1024"]["tokens_per_s"] == [512.0]
    process.memory = 150  # others came
    assert comparison._round(1)
    assert [found[name]["tokens"] for name in names] == [128, 128]
    assert comparison._round(2)
    assert found["s512 1024"]["tokens_per_s"] == [256.0]


def test_a_subject_for_which_there_is_no_memory_is_named(tmp_path: Path) -> None:
    comparison, process = _comparison(tmp_path, 100)
    process.end = lambda: None  # type: ignore[attr-defined]
    assert comparison._warm_up(OURS, may_halve=True)
    assert comparison.found["subjects"][OURS]["error"] == "s128 1024: out of memory"
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


def softmax_attention(case: Case, dropout: float) -> Attention:
    """Attention of a GPU's kernels by plain PyTorch, with torch's own dropout."""
    allowed, (num_rows, _) = case.layout().allowed, case.documents.shape

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.float().unflatten(0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
        scores = case.scale * q @ k.transpose(-1, -2)
        shares = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out = torch.nn.functional.dropout(shares, dropout) @ v
        return out.transpose(1, 2).flatten(0, 1).to(torch.bfloat16), None

    return Attention(run)


def check_dropout(make: Callable[[Case, float], Attention]) -> dict[str, float]:
    size = gpu_checks.Size(torch.device("cpu"), tiny=True)
    size.dropout_length = 48  # more than a head's 32 dimensions: two passes read the mask
    return gpu_checks._dropout(size, "plain, flash over documents", make, 1e-2)


def test_dropout_is_compared_with_float64_over_the_same_mask() -> None:
    found = check_dropout(softmax_attention)
    assert set(found) == {"s48 full", "s48 full kept", "s48 packed", "s48 packed kept"}
    assert 0 < found["s48 full"] < 5e-3


def test_wrong_dropout_is_found() -> None:
    def unscaled(case: Case, dropout: float) -> Attention:
        made = softmax_attention(case, dropout)
        return Attention(lambda *qkv: ((1 - dropout) * made.run(*qkv)[0], None))

    with pytest.raises(AssertionError, match=r"s48 full, dropout 0\.1: \{'out'"):
        check_dropout(unscaled)
    with pytest.raises(AssertionError, match="of the probabilities were kept"):
        check_dropout(lambda case, dropout: softmax_attention(case, 2 * dropout))
    with pytest.raises(AssertionError, match="another seed dropped the same"):
        check_dropout(lambda case, _: softmax_attention(case, 0.0))

    def other_mask_backward(case: Case, dropout: float) -> Attention:
        made = softmax_attention(case, dropout)

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
            out, _ = made.run(q, k, v)
            again, _ = made.run(q, k, v)  # drops others
            return again + (out - again).detach(), None

        return Attention(run)

    with pytest.raises(AssertionError, match="'dv'"):
        check_dropout(other_mask_backward)
