"""`python -m tests.distributed.rtd_main FOLDER JOB ...`: replaced-token detection at ZeRO stages.

A job is SAVED:STAGE as in `zero_main`; it leaves in FOLDER/RANKS-STAGE, or FOLDER/SAVED:RANKS-STAGE
after a load, 2 and 4: the state after so many steps, and results-RANK.json: sums and norm by step.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from pipeline.config.objective import ObjectiveConfig
from pipeline.config.train import TrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.objectives.rtd import ReplacedTokenDetection, ReplacedTokenModel
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from tests.distributed import engine_main as case
from tests.distributed.engine_main import as_rank
from tests.support.checkpoints import save_state

NUM_STEPS, SAVED_AFTER = 4, 2
OBJECTIVE = ReplacedTokenDetection(ObjectiveConfig(kind="rtd", generator_size=0.5))


def model(seed: int) -> ReplacedTokenModel:
    """The generator has half the width: its layers differ from the discriminator's."""
    torch.manual_seed(seed)
    return OBJECTIVE.make_model(case.MODEL)


def train_config(stage: int) -> TrainConfig:
    return TrainConfig(num_steps=NUM_STEPS, warmup_steps=1, grad_clip=case.GRAD_CLIP,
                       zero_stage=stage, precision="fp32")  # fmt: skip


def micro_batches(step: int) -> list[MicroBatch]:
    """Two for each step, with draws."""
    return [_with_draws(case.micro_batch(step, number, rows=2)) for number in range(2)]


def _with_draws(batch: MicroBatch) -> MicroBatch:
    generator = torch.Generator().manual_seed(int(batch.input_ids.sum()))
    uniform = torch.rand(len(batch.inputs["targets"]), generator=generator)
    weights = batch.weights | {"discriminator": float(batch.num_tokens)}
    return replace(batch, inputs=batch.inputs | {"uniform": uniform}, weights=weights)


def main(folder: Path, job: str, process: ProcessInfo) -> None:
    saved, stage = job.split(":")
    place = f"{process.world_size}-{stage}"
    here = folder / (f"{saved}:{place}" if saved else place)
    here.mkdir(parents=True, exist_ok=True)
    made = model(seed=2 if saved else 1)
    engine = Engine(made, train_config(int(stage)), process, torch.device("cpu"))
    if saved:
        engine.load_files(folder / saved / str(SAVED_AFTER))
    results = {}
    for step in range(SAVED_AFTER if saved else 0, NUM_STEPS):
        made.set_alpha(0.5 + step / 10)
        mine = micro_batches(step)[process.rank :: process.world_size]
        result = engine.train_step(mine, OBJECTIVE, case.learning_rate(step))
        sums = {name: [each.item() for each in pair] for name, pair in result.sums.items()}
        results[step] = (sums, result.grad_norm)
        if step + 1 in (SAVED_AFTER, NUM_STEPS):
            save_state(engine, here / str(step + 1))
    (here / f"results-{process.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    with as_rank() as this:
        for each in sys.argv[2:]:
            main(Path(sys.argv[1]), each, this)
