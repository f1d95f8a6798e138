"""The graph for ONNX Runtime: the same states for rows of any size, and what differs is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.use.folder import TrainedModel
from pipeline.use.model import load
from pipeline.use.onnx import compare_graph, write_graph
from tests.parity.test_hugging_face import randomised
from tests.support import warm
from tests.use.test_hf import KINDS

pytestmark = pytest.mark.usefixtures("processes")


def _trained(**changes: Any) -> TrainedModel:
    sizes = ModelConfig(vocab_size=60, num_layers=2, hidden_size=32, num_heads=2, ffn_size=48)
    torch.manual_seed(0)
    model = randomised(MaskedLanguageModel(replace(sizes, **changes)))
    return TrainedModel(model, None, {})


@pytest.mark.parametrize("kind", [*KINDS, "rotary_value", "one segment"])
def test_graphs_compute_the_same(kind: str, tmp_path: Path) -> None:
    more = {"rotary_value": {"rotary_value": True}, "one segment": {"type_vocab_size": 1}}
    trained = _trained(**{**KINDS, **more}[kind])
    path = tmp_path / "onnx/model.onnx"
    write_graph(trained, path)
    assert compare_graph(trained, path).max_abs_diff < 1e-4
    onnx.checker.check_model(onnx.load(path))
    # Of another model it is not.
    with torch.no_grad():
        trained.model.encoder.token_embedding.weight[10, 3] += 5
    with pytest.raises(CheckpointError, match="exported logits differ from the trainer's by"):
        compare_graph(trained, path)


@pytest.mark.long
def test_command(straight_run: Path, tmp_path: Path) -> None:
    done = warm.run("pipeline", "export", straight_run, tmp_path / "out", "--format", "onnx")
    assert done.returncode == 0, done.stderr
    assert "onnx/model.onnx: opset 17" in done.stdout.replace("\n", " ")
    model = load(straight_run)
    texts = ["The assert statement.", "A list of strings is returned by the function, and more."]
    output = model(texts)
    session = onnxruntime.InferenceSession(str(tmp_path / "out/onnx/model.onnx"))
    assert [each.name for each in session.get_inputs()][:2] == ["input_ids", "attention_mask"]
    ids = output.input_ids.numpy()
    fed = {"input_ids": ids, "attention_mask": output.mask.long().numpy()}
    [states] = session.run(None, {**fed, "token_type_ids": np.zeros_like(ids)})
    difference = np.abs(states - output.hidden.numpy())[output.mask.numpy()]
    assert difference.max() < 1e-4
    # transformers loads the rest of the folder as ever.
    assert load(tmp_path / "out").encode(texts).shape == (2, model.config.hidden_size)
