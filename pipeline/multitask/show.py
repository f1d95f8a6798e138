"""`postnorm inspect` of a multi-task run: draws of a step, and rows as the model sees them."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from pipeline.data.record import number_of_step, read_batches
from pipeline.data.run_order import Share
from pipeline.multitask.config import MIX_FILE, load_mix
from pipeline.multitask.run import open_work
from pipeline.runtime import dist, env
from pipeline.runtime.run_folder import RunFolder

_TIMEOUT_S = 600.0


def step_lines(
    folder: Path, step: int | None, batch: int | None, *, as_json: bool
) -> Iterator[str]:
    """Yield a line for each row of a step or batch of a run; nothing of the run changes.

    Raises:
        PostnormError: the folder is not that of a started run, or its data is not there any more.
    """
    RunFolder.started(folder)
    mix = load_mix(str(folder / MIX_FILE), (f"run_dir={json.dumps(str(folder))}",))
    records = read_batches(folder)
    number = batch
    if step is not None:
        number = number_of_step(step, mix.config.train.num_steps, records)
    assert number is not None, "one of the two is given"
    work, config = open_work(mix)
    with env.restored():
        # Text is opened by all ranks together: here by one.
        dist.open_group(env.process_info_or_alone(), torch.device("cpu"), _TIMEOUT_S)
        data = work.open(config, Share(0, 1))
        dist.close_group()
    place = config.batches.number(number)
    rows = (
        ids[seen].tolist()
        for micro in next(data.steps_from(place.cursor))
        for ids, seen in zip(micro.input_ids, micro.documents > 0, strict=True)
    )
    if not as_json:
        yield f"batch {number}: draws of {', '.join(data.tasks(place))}"
    for name, epoch, unit, num_rows in data.examples(place):
        where = work.where(name, unit)
        for ids in islice(rows, num_rows):
            tokens = [work.piece(token) for token in ids]
            if as_json:
                found = {"task": name, "epoch": epoch, "example": unit, "where": where}
                yield json.dumps({**found, "tokens": tokens}, ensure_ascii=False)
            else:
                yield f"{name}, epoch {epoch}, {where}: {' '.join(tokens)}"
