"""`python -m tests.distributed.zero_main FOLDER JOB ...`: training at several ZeRO stages.

A job is PRECISION:SAVED:STAGE, such as `fp32:1-2:3` (load what 1 rank saved at stage 2, go on at
stage 3), or `fp32::3`, from the start. It leaves, as `save_state` writes them:
    NAME/loaded, NAME/5 and NAME/10: the state when it was loaded, after 5 steps and after 10
where NAME is PRECISION/RANKS-STAGE from the start, and PRECISION/SAVED:RANKS-STAGE after a load;
NAME/results-RANK.json: loss and gradient norm by step; and, where a rank has whole parameters,
NAME/used-RANK.pt: those that forward passes would use next.
Jobs at stage 3 come last: DeepSpeed replaces a process' linear layers there, and adds biases after
rounding to bf16 from then on.
"""

import json
import sys
from pathlib import Path

import torch

from pipeline.config.train import TrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from tests.distributed import engine_main as case
from tests.distributed.engine_main import as_rank
from tests.support.checkpoints import save_state

NUM_STEPS = 10
SAVED_AFTER = 5
POISONED_STEP = 7
GRAD_CLIP = 3.5
PRECISIONS = ("fp32", "bf16")


def train_config(precision: str, stage: int) -> TrainConfig:
    return TrainConfig(
        num_steps=NUM_STEPS, warmup_steps=1, grad_clip=GRAD_CLIP, zero_stage=stage,
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip


def learning_rate(step: int) -> float:
    return 1e-4 * (1 + step)


def micro_batches(step: int) -> list[MicroBatch]:
    """Four for each step, for any number of ranks that divides four."""
    return [case.micro_batch(step % len(case.LENGTHS), 100 * step + n, rows=2) for n in range(4)]


def main(folder: Path, job: str, process: ProcessInfo) -> None:
    precision, saved, stage = job.split(":")
    place = f"{process.world_size}-{stage}"
    folder = folder / precision / (f"{saved}:{place}" if saved else place)
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    objective = MaskedLanguageModeling()
    config = train_config(precision, int(stage))
    engine = Engine(case.model(seed=2 if saved else 1), config, process, device)
    if saved:
        engine.load_files(folder.parent / saved / str(SAVED_AFTER))
        save_state(engine, folder / "loaded")
    results = {}
    for step in range(SAVED_AFTER if saved else 0, NUM_STEPS):
        mine = micro_batches(step)[process.rank :: process.world_size]
        if step == POISONED_STEP:
            last = process.rank == process.world_size - 1
            poisoned = case.Poisoned({1, 2, 3, 4}) if last else objective
            skipped = engine.train_step(mine, poisoned, 1.0)
            assert not skipped.applied
            assert skipped.grad_norm == float("inf")
        result = engine.train_step(mine, objective, learning_rate(step))
        assert result.applied
        results[step] = (result.sums["loss"].total.item(), result.grad_norm)
        if step + 1 in (SAVED_AFTER, NUM_STEPS):
            save_state(engine, folder / str(step + 1))
    (folder / f"results-{process.rank}.json").write_text(json.dumps(results))
    if stage != "3":
        used = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
        torch.save(used, folder / f"used-{process.rank}.pt")


if __name__ == "__main__":
    with as_rank() as this:
        for each in sys.argv[2:]:
            main(Path(sys.argv[1]), each, this)
