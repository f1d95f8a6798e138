"""Submission files of CLUE and FewCLUE, under the names that the site expects.

The site gives 0 for a file with another name, without an error. Names and lines: CLUE's guide for
submissions, the samples of FewCLUE, and the writers of CLUE-bert4keras.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ConfigError, DataError
from pipeline.runtime.files import write_atomic
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import PredictionRow

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
