"""The bytes that a plan counts for each ZeRO stage, against those that the engine moves."""

import json
from pathlib import Path

import pytest

from launch.exchange import exchanged_bytes
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from tests.distributed import engine_main
from tests.distributed.conftest import LeftBy

RECIPE = Path(__file__).parents[2] / "configs/demo.yaml"
# Stages 2 and 3 exchange gradients for every micro-batch; stages 0 and 1 once a step.
CASES = [(0, 2, "adamw"), (1, 2, "adamw"), (2, 1, "adamw"), (2, 3, "adamw"), (0, 2, "muon"),
         (1, 2, "muon"), (2, 3, "muon"), (3, 1, "adamw"), (3, 3, "adamw")]  # fmt: skip


def test_a_plan_counts_the_bytes_that_move(left_by: LeftBy) -> None:
    found = json.loads((left_by("moved_main", json.dumps(CASES)) / "moved.json").read_text())
    # Of each layer: four of width^2, two of width and feed-forward.
    hidden = engine_main.MODEL.num_layers * (4 * 32 * 32 + 2 * 32 * 64)
    for (stage, accumulation, optimizer), (size, moved) in zip(CASES, found, strict=True):
        config = load(PretrainConfig, RECIPE, [f"train.zero_stage={stage}"]).config
        muons = hidden if optimizer == "muon" else 0
        expected = exchanged_bytes(config, size, accumulation, ranks=2, muons=muons)
        # Beside them are a few numbers a step: norms, weights of losses, and order checks.
        few = 0.02 * size * 4
        left = {kind: count for kind, count in moved.items() if count > few}
        assert left == pytest.approx(expected, abs=few), (stage, accumulation, optimizer)
