"""The instruments of speed run small on a CPU, and a subject that fails does not end the others."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step
from benchmarks.step_subjects import Setting, model_config, parse, read_batches, run_config
from pipeline.data.format import DatasetIndex
from pipeline.model.cost import flops_per_token
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
OURS, PEER = (
    "ours/realformer_v2-base+dropout=0.0/auto/plain/zero0",
    "hf/roberta-base/autocast/plain",
)
FAILING = "hf/roformer-large/bf16/plain"


@pytest.fixture(scope="module")
def measured(
    dataset: DatasetIndex, tmp_path_factory: pytest.TempPathFactory, processes: None
) -> dict[str, Any]:
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("step") / "step.json"
    said = python("-m", "benchmarks.step", "--data", dataset.folder, "--out", out, "--subjects",
                  OURS, PEER, FAILING, "--tiny", "--seq-len", "32", "--tokens", "128",
                  "--vocab-size", "1000", "--batches", "2", "--rounds", "2", "--seconds", "0.01",
                  "--at-once", "2", env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    found: dict[str, Any] = json.loads(out.read_text())
    assert found == json.loads(said.splitlines()[-1])
    return found


@pytest.mark.slow
def test_steps_of_ours_and_of_a_peer(measured: dict[str, Any]) -> None:
    for name in (OURS, PEER):
        at = measured["subjects"][name]["cases"]["s32 128"]
        assert len(at["tokens_per_s"]) == 2, name
        assert min(at["tokens_per_s"]) > 0
        assert 3 < at["losses"][0] < 9  # ln(1000) = 6.9
        # The same of two batches; the peer's dropout hides what two small updates do.
        assert name == PEER or at["losses"][2] < at["losses"][0]
        assert 0.5 < at["fill"] <= 1
    # The same batches.
    fills = {measured["subjects"][name]["cases"]["s32 128"]["fill"] for name in (OURS, PEER)}
    assert len(fills) == 1


@pytest.mark.slow
def test_flops_count_real_documents(measured: dict[str, Any], dataset: DatasetIndex) -> None:
    """Of both subjects: attention within documents, the head over what is predicted."""
    setting = Setting(str(dataset.folder), 1000, 2, tiny=True)
    batches = read_batches(run_config(parse(OURS), setting, 32, 128), setting)
    rows = [row for batch in batches for row in batch.documents.tolist()]
    lengths = [row.count(number) for row in rows for number in set(row) - {0}]
    document_len = sum(n * n for n in lengths) / sum(lengths)
    masked_share = sum(batch.weights["loss"] for batch in batches) / sum(lengths)
    assert 1 < document_len < 32
    for name in (OURS, PEER):
        at = measured["subjects"][name]["cases"]["s32 128"]
        assert at["document_len"] == pytest.approx(document_len)
        assert at["masked_share"] == pytest.approx(masked_share)
        flops = flops_per_token(model_config(parse(name), setting), 32, masked_share, document_len)
        assert at["mflop_per_token"] == pytest.approx(flops.total / 1e6)


@pytest.mark.usefixtures("processes")
def test_a_process_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    process = step.Process(OURS, Setting("/nowhere", 1000, 2), tmp_path / "log")
    assert process.answer(0.2) == {"error": "no answer within 0 s"}
    assert process.ask(5, do="time")["error"].startswith("ended with exit code -9")
