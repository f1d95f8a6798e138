"""Subsets of a task's classes: the number of classes apart from rows a class and imbalance.

A subset is a function of the task's rows, its sizes and a seed; each seed draws classes of its own,
so that a mean over seeds is one over draws as well.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.study import ClassesConfig
from pipeline.errors import DataError
from pipeline.runtime.files import write_atomic
from pipeline.tasks.config import FieldsConfig
from pipeline.tasks.readers import read_task
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import Example

_FILE = "{}.jsonl"


def subset(config: TaskConfig, sizes: ClassesConfig, seed: int, folder: Path) -> TaskConfig:
    """Write the rows of some classes into a folder; return the task that reads them.

    Train has equally many rows of each class, dev and test all they have of these classes.

    Raises:
        DataError: too few classes have enough rows.
    """
    data = read_task(config)
    train = _by_class(data.splits["train"])
    wanted = sizes.rows_a_class or max(1, (sizes.rows or 0) // sizes.number)
    enough = sorted(name for name, rows in train.items() if len(rows) >= wanted)
    if len(enough) < sizes.number:
        raise DataError(
            f"{config.name}: {len(enough)} classes have {wanted} rows of train, expected "
            f"{sizes.number}; lower classes.number or its rows"
        )
    random = np.random.default_rng((seed, sizes.number))
    chosen = [enough[i] for i in sorted(random.permutation(len(enough))[: sizes.number].tolist())]
    drawn = {
        name: [train[name][i] for i in random.permutation(len(train[name]))[:wanted].tolist()]
        for name in chosen
    }
    rows = {"train": [row for name in chosen for row in drawn[name]]}
    for split in ("dev", "test"):
        of = _by_class(data.splits[split])
        rows[split] = [row for name in chosen for row in of.get(name, [])]
    folder.mkdir(parents=True, exist_ok=True)
    for split, every in rows.items():
        lines = [
            json.dumps({"id": str(n), "text": row.text, "label": row.gold}, ensure_ascii=False)
            for n, row in enumerate(every)
        ]
        write_atomic(folder / _FILE.format(split), ("\n".join(lines) + "\n").encode())
    return replace(
        config,
        data=replace(
            config.data,
            root=str(folder.resolve()),
            format="jsonl",
            columns=(),
            drop_labels=(),
            labels=tuple(chosen),
            fields=FieldsConfig(text="text"),
            train=(_FILE.format("train"),),
            dev=(_FILE.format("dev"),),
            test=(_FILE.format("test"),),
        ),
    )


def _by_class(rows: Sequence[Example]) -> dict[str, list[Example]]:
    found = defaultdict(list)
    for row in rows:
        if isinstance(row.gold, str):
            found[row.gold].append(row)
    return dict(found)
