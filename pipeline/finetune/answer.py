"""`postnorm predict`: a fine-tuned model answers the rows of any file of its task.

Also as submission files of CLUE and FewCLUE, under the names that the sites expect.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.data.run_order import DataRank
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.finetune.model import TaskModel, from_head_weights
from pipeline.finetune.predict import DTYPES, Predictor, predictions
from pipeline.finetune.result import tables_of, write_predictions
from pipeline.model.architecture import HEAD_FILE, TASK_FILE, WEIGHTS_FILE, read_architecture
from pipeline.runtime import tensors
from pipeline.runtime.files import write_atomic
from pipeline.tasks.readers import encode, read_file
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import HeadSpec, PredictionRow, TaskRows
from pipeline.use.folder import fine_tuned, read_tokenizer, require_fit, require_intact

# The sites of CLUE and FewCLUE give 0 for a file with another name, without an error. Names and
# lines: CLUE's guide for submissions, the samples of FewCLUE, the writers of CLUE-bert4keras.
_CLUE = {
    **{name: name for name in ("afqmc", "iflytek", "cmnli", "csl", "cmrc2018", "cluener")},
    **{name: f"{name}1{{}}" for name in ("tnews", "cluewsc", "chid", "c3")},
    "ocnli": "ocnli_50k",
}
"""File names by shipped task; {} is 0 for test1.0.json, else 1."""
_FEWCLUE = {
    **{f"fewclue-{name}": name for name in ("bustm", "eprstmt", "csldcp")},
    **{
        f"fewclue-{name}": f"{name}f"
        for name in ("chid", "cluewsc", "csl", "iflytek", "ocnli", "tnews")
    },
}
_ONE_OBJECT = {"cmrc2018", "chid"}
"""Tasks whose file is one object, of answers by id; those of the others have a row a line."""
_TEXT_IDS = {*_CLUE, "fewclue-tnews"} - {"cluener"}


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


# Submissions


def official_name(task: str, source: str | Path) -> str:
    """Return the name of the file that the site expects, for predictions of a file of a task.

    Raises:
        ConfigError: it is not a task of CLUE or FewCLUE.
    """
    known = _CLUE | _FEWCLUE
    if task not in known:
        raise ConfigError(
            f"task {task!r} has no submission file; expected one of {', '.join(known)}"
        )
    return f"{known[task].format(0 if '1.0' in Path(source).name else 1)}_predict.json"


def submission_text(
    config: TaskConfig, task: str, rows: Sequence[PredictionRow], texts: Sequence[str] = ()
) -> str:
    """Return the content of a submission file; `texts` of the rows are needed for spans alone.

    Raises:
        ConfigError: it is not a task of CLUE or FewCLUE, or has no such file for its kind.
        DataError: an id is not a number where the site has numbers, or stands twice where the file
            is one object by id.
    """
    official_name(task, "")
    if task in _ONE_OBJECT:
        whole = {row.id: row.prediction for row in rows}
        if len(whole) < len(rows):
            raise DataError(
                f"{len(rows) - len(whole)} of {len(rows)} rows have an id that stands before; "
                f"expected one for each row, as the file of {task} is one object by id"
            )
        return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"
    ids: list[str | int] = [row.id for row in rows]
    if task not in _TEXT_IDS:
        ids = [_number(task, row.id) for row in rows]
    lines = []
    for id_, row, text in zip(ids, rows, texts or [""] * len(rows), strict=True):
        body = config.kind.submission(text, row.prediction)
        if body is None:
            raise ConfigError(
                f"task {task!r}: task.kind={config.task.kind} has no form in CLUE or FewCLUE"
            )
        lines.append(json.dumps({"id": id_, **body}, ensure_ascii=False) + "\n")
    return "".join(lines)


def _number(task: str, id_: str) -> int:
    if not id_.isdecimal():
        raise DataError(f"id {id_!r} is not a number, as {task} has them; check data.fields.id")
    return int(id_)


def write_submission(
    out: Path,
    config: TaskConfig,
    task: str,
    rows: Sequence[PredictionRow],
    *,
    source: str | Path,
    texts: Sequence[str] = (),
) -> Path:
    """Write the submission file for predictions of the file `source` and return its path.

    `out` is that file, or a folder (one that exists, or a name without a suffix) that gets it. The
    multi-split board of FewCLUE takes _0 to _4 and _all behind `predict`, with or without the f.

    Raises:
        ConfigError: `out` is a file of a name that the site does not take.
        ConfigError, DataError: see `submission_text`.
    """
    name = official_name(task, source)
    path = out / name if out.is_dir() or not out.suffix else out
    stem = name.removesuffix(".json")
    if task in _FEWCLUE:
        plain = task.removeprefix("fewclue-")
        stem = rf"{stem}|({stem}|{plain}_predict)_([0-4]|all)"
    if not re.fullmatch(rf"({stem})\.json", path.name):
        raise ConfigError(
            f"{path}: the site takes predictions for {Path(source).name} of {task} as {name} and "
            f"scores another name 0; write to {path.with_name(name)}, or give its folder"
        )
    content = submission_text(config, task, rows, texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.encode())
    return path
