"""`postnorm predict`: a fine-tuned model answers the rows of any file of its task."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.data.run_order import DataRank
from pipeline.errors import CheckpointError, DataError
from pipeline.finetune.model import TaskModel, from_head_weights
from pipeline.finetune.predict import DTYPES, Predictor, predictions
from pipeline.finetune.result import tables_of, write_predictions
from pipeline.finetune.submission import write_submission
from pipeline.model.architecture import HEAD_FILE, TASK_FILE, WEIGHTS_FILE, read_architecture
from pipeline.runtime import tensors
from pipeline.tasks.readers import encode, read_file
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import HeadSpec, PredictionRow, TaskRows
from pipeline.use.folder import fine_tuned, read_tokenizer, require_fit, require_intact


@dataclass(frozen=True)
class FineTuned:
    """A model with the head of a task, in evaluation mode."""

    model: TaskModel
    config: TaskConfig
    tokenizer: Any


@dataclass(frozen=True)
class PredictSummary:
    """What `predict` wrote."""

    path: Path
    num_rows: int
    counts: dict[str, int]
    """Rows that were dropped or cut and the like, in words."""
    scores: dict[str, float]
    """Where the file has gold for every row; else empty."""


def load_fine_tuned(folder: Path) -> FineTuned:
    """Read a folder of `finetune`, of one seed or of several, or the model in it.

    Raises:
        CheckpointError: it is another folder, or damaged.
    """
    source = fine_tuned(folder)
    config, facts = read_architecture(source)
    if "task" not in facts:
        raise CheckpointError(
            f"{source} has no head of a task; pass the --out of `postnorm finetune`"
        )
    require_intact(source, facts)
    spec = HeadSpec.from_dict(facts["task"])
    model = TaskModel(config, spec)
    found = tensors.read_file(source / WEIGHTS_FILE)
    weights = {name: tensor for name, tensor in found.items() if name.startswith("encoder.")}
    weights |= from_head_weights(tensors.read_file(source / HEAD_FILE))
    require_fit(dict(model.state_dict()), weights, str(source))
    tensors.require_weights(weights, str(source))
    model.load_state_dict(weights)
    return FineTuned(model.eval(), load_task(str(source / TASK_FILE)), read_tokenizer(source))


def predict(
    folder: Path, file: Path, out: Path, form: Literal["jsonl", "clue"] = "jsonl"
) -> PredictSummary:
    """Predict the rows of a file and write them in its order; the file is whole or absent.

    Args:
        folder: as `load_fine_tuned`.
        file: of the task's format, with gold or without.
        out: file to write; of form clue it may be a folder.
        form: a row a line as `finetune` writes them, or what CLUE's and FewCLUE's sites take.

    Raises:
        CheckpointError: the folder has no head of a task.
        DataError: the file does not fit the task; names the line.
    """
    tuned = load_fine_tuned(folder)
    spec, task = tuned.model.task.spec, tuned.config
    read: Counter[str] = Counter()
    examples = read_file(task, file.resolve(), needs_gold=False, counts=read)
    known = set(spec.labels)
    for example in examples:
        for name in task.kind.labels_in(example.gold):
            if name not in known:
                raise DataError(
                    f"{example.where}: label {name!r} is not one of the {len(known)} that the "
                    f"model in {folder} knows; is it the file of another task?"
                )
    rows, counts = encode(task, tuned.tokenizer, examples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tuned.model.to(device, DTYPES[task.train.precision])
    predictor = Predictor(tuned.model.task, tuned.model, device, int(tuned.tokenizer.pad_id))
    data = TaskRows(examples, rows, counts)
    decided, _ = predictor.decode(data, DataRank(0, 1))
    made = predictions(spec, data, decided)
    if form == "clue":
        texts = [example.text for example in examples]
        out = write_submission(out, task, spec.name, made, source=file, texts=texts)
    else:
        write_predictions(out, made)
    return PredictSummary(out, len(made), dict(+read) | counts, _scores(task, spec, made))


def _scores(task: TaskConfig, spec: HeadSpec, made: list[PredictionRow]) -> dict[str, float]:
    if any(row.gold is None for row in made):
        return {}
    every = tables_of(task, spec.labels, made)
    return {name: table.score for name, table in every.items()}


def as_json(answers: PredictSummary) -> str:
    """Return what `predict --json` prints."""
    body = {"out": str(answers.path), "rows": answers.num_rows}
    return json.dumps({**body, "counts": answers.counts, "scores": answers.scores}, indent=1)
