"""The cost of replaced-token detection against the real module, as `test_cost` for MLM."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.data.loader import MicroBatch, document_bounds
from pipeline.model import cost
from pipeline.objectives.rtd import ReplacedTokenDetection, ReplacedTokenModel
from tests.model.test_cost import RANDOM, counted_flops, group_of, real_parameters

RTD = ObjectiveConfig(kind="rtd", generator_size=0.5, generator_layers=0.4)
ROWS, SEQ_LEN, NUM_MASKED = 3, 24, 10


def _group(name: str) -> str:
    if name.startswith("objective.generator.head_"):
        return "generator head"
    if name.startswith("objective.generator."):
        return "generator"
    return "discriminator head" if name.startswith("objective.") else group_of(name)


def _loss(model: ReplacedTokenModel) -> Tensor:
    """The training loss of random tokens; two documents in each row."""
    documents = (1 + (np.arange(SEQ_LEN) >= SEQ_LEN // 2).astype(np.int32))[None].repeat(ROWS, 0)
    inputs = {
        "masked_index": torch.randperm(ROWS * SEQ_LEN)[:NUM_MASKED].clone(),
        "targets": torch.zeros(NUM_MASKED, dtype=torch.int64),
        "uniform": torch.rand(NUM_MASKED),
    }
    weights = {"loss": float(NUM_MASKED), "discriminator": float(ROWS * SEQ_LEN)}
    batch = MicroBatch(torch.randint(0, 300, (ROWS, SEQ_LEN)), torch.from_numpy(documents),
                       torch.arange(SEQ_LEN).expand(ROWS, -1), None,
                       torch.from_numpy(document_bounds(documents)), inputs, weights, {},
                       ROWS * SEQ_LEN, 0)  # fmt: skip
    sums = ReplacedTokenDetection(RTD)(model, batch)
    return sums["loss"].total + 50 * sums["discriminator"].total


@pytest.mark.parametrize("config", RANDOM[:4])
def test_parameters(config: ModelConfig) -> None:
    counted = {name: number for name, number in cost.parameters(config, RTD).items() if number}
    assert counted == real_parameters(lambda: ReplacedTokenModel(config, RTD), _group)


@pytest.mark.parametrize("config", RANDOM[:2])
def test_flops_equal_those_torch_counts(config: ModelConfig) -> None:
    model = ReplacedTokenModel(config, RTD)
    forward, total = counted_flops(lambda: _loss(model))
    tokens = ROWS * SEQ_LEN
    flops = cost.flops_per_token(config, SEQ_LEN, NUM_MASKED / tokens, objective=RTD)
    drawing = 2 * NUM_MASKED * config.embedding_width * 300
    assert forward - drawing == pytest.approx(flops.forward * tokens, rel=1e-12)
    assert total - drawing == pytest.approx(flops.total * tokens, rel=1e-12)


def test_a_small_generator_is_cheap_and_head_and_body_are_where_they_are_said_to_be() -> None:
    config = ModelConfig(vocab_size=30_522, num_layers=12, hidden_size=768, num_heads=12,
                         ffn_size=3072, mlm_head="bert")  # fmt: skip
    mlm = cost.flops_per_token(config, 512)
    rtd = cost.flops_per_token(config, 512, objective=ObjectiveConfig(kind="rtd"))
    # A quarter of the width and of the heads: a sixteenth of the products of weights.
    layers = 12 * (12 * 192 * 192)
    assert rtd.body - mlm.body == 2 * (layers + 768 * 192)
    assert rtd.attention == 1.25 * mlm.attention
    assert 1.05 < rtd.total / mlm.total < 1.15
