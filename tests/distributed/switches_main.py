"""`python -m tests.distributed.switches_main FOLDER CASE ...`: switches that may change nothing.

Leaves in FOLDER/CASE, by the name of each case, what `save_state` writes after the last step, and
results-RANK.json: loss and gradient norm of each step. FOLDER/graphs-RANK.json has the number of
graphs that the compiled case had made after each step. Stage 3 comes last, see `zero_main`.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.config.train import TrainConfig
from pipeline.model.compiled import CompiledLayer
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from tests.distributed import engine_main
from tests.distributed.engine_main import as_rank
from tests.support.checkpoints import save_state

# Sequences of a micro-batch and their length.
SHAPES = ((2, 16), (3, 16), (4, 40))
# Each length takes seconds to compile.
COMPILED_SHAPES = ((2, 16), (3, 16), (4, 16))
# What a user's file may tune: buckets of a few parameters.
TUNING = {"zero_optimization": {
              "stage": "auto", "overlap_comm": True, "contiguous_gradients": True,
              "reduce_bucket_size": 2000, "allgather_bucket_size": 3000, "reduce_scatter": True,
              "stage3_prefetch_bucket_size": 1e3, "stage3_param_persistence_threshold": 64,
              "stage3_max_live_parameters": 9000, "sub_group_size": 5000,
          },
          "train_micro_batch_size_per_gpu": "auto",
          "gradient_clipping": "auto"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    stage: int
    precision: str
    switch: str = "plain"
    """`plain`, `checkpointed` (groups of two of three layers), `tuned` or `compiled`."""
    dropout: float = 0.1

    @property
    def name(self) -> str:
        return f"{self.switch}-{self.precision}-stage-{self.stage}-dropout-{self.dropout}"

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return SHAPES if self.dropout else COMPILED_SHAPES

    @property
    def without(self) -> "Case":
        return replace(self, switch="plain")


# Each stage and both precisions once, then the rest.
SWITCHED = [
    *(Case(stage, kind, "checkpointed") for stage, kind in enumerate(["fp32", *["bf16"] * 3])),
    *(Case(stage, "bf16", "tuned") for stage in (1, 2, 3)),
    *(Case(stage, kind, "checkpointed") for stage, kind in enumerate(["bf16", *["fp32"] * 3])),
]
COMPILED = Case(2, "fp32", "compiled", dropout=0.0)  # it draws other random numbers
CASES = sorted(
    {case for switched in (*SWITCHED, COMPILED) for case in (switched, switched.without)},
    key=lambda case: (case.stage, case.name),
)


def main(folder: Path, case: Case, process: ProcessInfo) -> None:
    tuning = folder / f"tuning-{process.rank}.json"
    overlap = {"overlap_comm": case.stage > 1}  # DeepSpeed has none at stage 1
    zero = TUNING["zero_optimization"] | overlap  # type: ignore[operator]
    tuning.write_text(json.dumps(TUNING | {"zero_optimization": zero}))
    config = TrainConfig(
        num_steps=len(SHAPES), warmup_steps=1, grad_clip=3.0, zero_stage=case.stage,
        precision=case.precision,  # type: ignore[arg-type]
        deepspeed_config=str(tuning) if case.switch == "tuned" else None,
    )  # fmt: skip
    torch.manual_seed(1)
    shape = replace(
        engine_main.MODEL, num_layers=3, dropout=case.dropout, attention_dropout=case.dropout
    )
    model = MaskedLanguageModel(shape)
    if case.switch in ("checkpointed", "compiled"):
        model.encoder.checkpoint_activations(2)
    if case.switch == "compiled":
        model.encoder.run_layers_by(CompiledLayer())
    device = torch.device("cpu")
    engine, objective = Engine(model, config, process, device), MaskedLanguageModeling()
    alpha = model.encoder.alpha
    results, graphs = [], []
    for step, (rows, length) in enumerate(case.shapes):
        numbers = range(process.rank, 4, process.world_size)
        batches = [engine_main.micro_batch(step, number, rows, length) for number in numbers]
        torch.manual_seed(100 * step + process.rank)
        model.encoder.set_alpha(0.5 + step / 10)
        result = engine.train_step(batches, objective, 1e-3 * (1 + step))
        # What DeepSpeed, torch.compile and checkpointed layers read is this tensor, still in fp32.
        assert model.encoder.alpha is alpha
        assert (alpha.dtype, alpha.item()) == (torch.float32, pytest.approx(0.5 + step / 10))
        results.append([result.sums["loss"].total.item(), result.grad_norm])
        graphs.append(counters["stats"]["unique_graphs"])
    save_state(engine, folder / case.name)
    (folder / case.name / f"results-{process.rank}.json").write_text(json.dumps(results))
    if case.switch == "compiled":
        (folder / f"graphs-{process.rank}.json").write_text(json.dumps(graphs))


if __name__ == "__main__":
    with as_rank() as this:
        for case in (case for case in CASES if case.name in sys.argv[2:]):
            main(Path(sys.argv[1]), case, this)
