"""Folders as `finetune` leaves them, with made-up predictions and no model."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.finetune.result import Scored, combine, predictions_file, score_run, write_predictions
from pipeline.runtime.files import write_json_atomic
from pipeline.tasks.task import load_task
from pipeline.tasks.types import PredictionRow

LABELS = ("news", "sport", "tech")
TASK = """\
task: {kind: classify}
data: {train: [a], dev: [b], test: [c], fields: {text: t}, labels: [news, sport, tech]}
"""
PRIOR = {"news": 30, "sport": 20, "tech": 10}


def class_rows(seed: int, num_rows: int, skill: float = 3.0) -> list[PredictionRow]:
    """Rows whose golds do not depend on the seed, and whose scores favour the gold."""
    golds, noise = random.Random(f"gold {num_rows}"), random.Random(seed)
    rows = []
    for number in range(num_rows):
        gold = golds.choice(LABELS)
        scores = [noise.gauss(skill * (label == gold), 1.0) for label in LABELS]
        best = LABELS[max(range(3), key=lambda i: scores[i])]
        rows.append(PredictionRow(str(number), gold, best, scores))
    return rows


ABOUT = {"task": "made-up", "rows": {"train": 60}, "counts": {"train": {"rows": 60}},
         "prior": PRIOR, "protocol": {"model": "runs/mine", "selected_on": "dev"}}  # fmt: skip


def write_run(folder: Path, seed: int, splits: dict[str, list[PredictionRow]], task: str = TASK,
              about: dict[str, Any] = ABOUT) -> Scored:  # fmt: skip
    """Write a finished folder of one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(task, encoding="utf-8")
    for split, rows in splits.items():
        write_predictions(predictions_file(folder, split), rows)
    config = load_task(str(folder / "task.yaml"))
    labels = () if config.data.labels == "auto" else config.data.labels
    scored = score_run(config, labels, splits)
    write_json_atomic(folder / "result.json", combine([scored], [seed], about))
    return scored


def write_seeds(folder: Path, seeds: Sequence[int]) -> None:
    """Write runs of several seeds, without a result of all."""
    for seed in seeds:
        splits = {"dev": class_rows(seed, 40), "test": class_rows(seed + 100, 60)}
        write_run(folder / f"seed-{seed}", seed, splits)
