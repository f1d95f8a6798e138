"""What is known of a task's loss before training, against a head whose weights are all 0."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.data.run_order import DataRank
from pipeline.finetune.model import TaskModel
from pipeline.finetune.predict import Predictor
from pipeline.finetune.prepare import prepare
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.multitask.data import known_losses
from pipeline.tasks.task import load_task
from tests.support.tiny_tasks import write_task

KINDS = [("classify", {}), ("pair", {}), ("choice", {}), ("rank", {}), ("tag", {}),
         ("tag", {"decoder": "crf"}),
         ("spans", {}), ("qa", {}), ("multilabel", {}), ("regress", {}), ("cloze", {}),
         ("coref", {})]  # fmt: skip


@pytest.mark.parametrize(("kind", "head"), KINDS, ids=str)
def test_no_scores(kind: str, head: dict[str, Any], tmp_path: Path, tiny_model: Path) -> None:
    config = load_task(str(write_task(tmp_path, kind, head={"dropout": 0.0, **head})))
    prepared = prepare(config, kind, str(tiny_model), None)
    model = TaskModel(prepared.trained.model.config, prepared.spec)
    for parameter in model.task.parameters():
        torch.nn.init.zeros_(parameter)
    predictor = Predictor(model.task, model, torch.device("cpu"), 0)
    _, total = predictor.decode(prepared.rows["train"], DataRank(0, 1))
    measured = total / prepared.num_units
    found = known_losses(prepared, 3.0)
    assert found.initial == pytest.approx(3 * measured, rel=1e-5)
    if kind in ("classify", "pair", "coref", "regress"):
        assert found.prior is not None
        assert found.prior <= found.initial * (1 + 1e-9)


@pytest.mark.parametrize("head", [{}, {"decoder": "pointer"}], ids=str)
def test_a_stage_leaves_the_dropout_of_a_task_s_head(
    head: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    kind = "spans" if head else "classify"
    config = load_task(str(write_task(tmp_path, kind, head={"dropout": 0.3, **head})))
    prepared = prepare(config, kind, str(tiny_model), None)
    model = TaskModel(prepared.trained.model.config, prepared.spec)
    model.go_on_with(replace(model.config, dropout=0.2, attention_dropout=0.1))
    found = {name: each.p for name, each in model.named_modules()
             if isinstance(each, torch.nn.Dropout)}  # fmt: skip
    assert {p for name, p in found.items() if name.startswith("encoder.")} == {0.2}
    assert {p for name, p in found.items() if name.startswith("task.")} == {0.3}
    masked = MaskedLanguageModel(ModelConfig(vocab_size=9, hidden_size=8, num_heads=2))
    masked.go_on_with(replace(masked.config, dropout=0.2))
    assert masked.head_dropout.p == 0.2
