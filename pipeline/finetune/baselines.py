"""Bags of character n-grams as a baseline: what a task gives away without an encoder.

- classify, pair, coref, multilabel, regress, choice and cloze: tf-idf of 1 to 3 characters (the
  50,000 commonest, sublinear) of each text; of two texts also their product and cosine. A logistic
  regression a class (ridge regression for numbers) of `_C` reads them; nothing is chosen on dev.
  Of choices one model says how well a choice fits; a mark of coref is the second text.
- tag and spans: the strings of train's entities, each with its commonest type, are looked up in
  the text, the longest first, from left to right.
- qa: none.

The folder has the form of a finished fine-tuning, so that whatever reads one reads these.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.load import resolved_text
from pipeline.finetune import scores
from pipeline.finetune.readers import Example, TaskData, read_task
from pipeline.finetune.scores import Floats, Span
from pipeline.finetune.task import TaskConfig
from pipeline.runtime.files import sha256_file, write_atomic, write_json_atomic

NAME = "ngrams"
_C, _RIDGE = 10.0, 1.0
_MOST_FEATURES = 50_000
_CERTAIN = 30.0  # logit of a class that train has never, or always

Predicted = list[tuple[Any, list[float | None] | None]]
"""Of each row: the prediction, and its scores where the kind has some."""


def run_baseline(config: TaskConfig, *, name: str, out: Path) -> dict[str, Any] | None:
    """Fit on train, predict dev and test, and write the folder; None for a kind without baseline.

    Raises:
        DataError: see `read_task`.
    """
    if config.task.kind == "qa":
        return None
    data = read_task(config)
    predict = _Dictionary(data) if config.kind.gold == "spans" else _Ngrams(config, data)
    found: dict[str, dict[str, float] | None] = {"dev": None, "test": None}
    out.mkdir(parents=True, exist_ok=True)
    for split in found:
        rows = data.splits[split]
        if rows:
            found[split] = _write_predictions(config, data, split, predict(rows), out)
    scored_on = "test" if found["test"] else "dev"
    gold = [row for row in data.splits[scored_on] if row.gold is not None]
    labels, golds = data.labels, [plain(row.gold) for row in gold]
    kind, scorer, metric = config.task.kind, config.task.scorer, config.metric
    chance = scores.chance(
        kind, golds, labels=labels, num_choices=[sum(row.distinct) for row in gold]
    )
    score = (found[scored_on] or {})[metric]
    labelled = replace(config.data, labels=labels) if labels else config.data
    write_atomic(out / "task.yaml", resolved_text(replace(config, data=labelled)).encode())
    result = {
        "task": name,
        "kind": kind,
        "metric": metric,
        **found,
        "majority": scores.majority(kind, golds, labels=labels, scorer=scorer)[metric],
        "chance": chance[metric],
        "seeds": [0],
        "scores": [score],
        "mean": score,
        "sd": 0.0,
        "rows": {split: len(rows) for split, rows in data.splits.items()},
        "counts": data.counts,
        "warnings": [],
        "protocol": {
            "model": NAME,
            "data_sha256": data_sha256(config),
            "selected_on": "last",
            "scored_on": scored_on,
            "scikit-learn": metadata.version("scikit-learn"),
        },
    }
    write_json_atomic(out / "result.json", result)
    return result


def plain(gold: Any) -> Any:
    """Return a gold as `predictions-*.jsonl` has it."""
    return (
        [list(item) if isinstance(item, Span) else item for item in gold]
        if isinstance(gold, tuple)
        else gold
    )


def data_sha256(config: TaskConfig) -> str:
    """Hash the files of a task, in order."""
    root = Path(config.data.root or ".")
    names = [file for files, _ in config.data.splits.values() for file in files]
    return hashlib.sha256("".join(sha256_file(root / name) for name in names).encode()).hexdigest()


def _write_predictions(
    config: TaskConfig, data: TaskData, split: str, predicted: Predicted, out: Path
) -> dict[str, float] | None:
    """Write a split's predictions; return its scores, None where the file has no gold."""
    rows = data.splits[split]
    lines, golds, right = [], [], []
    for row, (prediction, values) in zip(rows, predicted, strict=True):
        line = {"id": row.id, "gold": plain(row.gold), "prediction": prediction}
        if values is not None:
            line["scores"] = values
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        if row.gold is not None:
            golds.append(plain(row.gold))
            right.append(prediction)
    write_atomic(out / f"predictions-{split}.jsonl", "".join(lines).encode())
    if not golds:
        return None
    tables = scores.tables(config.task.kind, golds, right, labels=data.labels)
    return {name: table.score for name, table in tables.items()}


class _Dictionary:
    """Entities of train by their text."""

    def __init__(self, data: TaskData) -> None:
        types: dict[str, Counter[str]] = defaultdict(Counter)
        for row in data.splits["train"]:
            for span in row.gold if isinstance(row.gold, tuple) else ():
                if isinstance(span, Span):
                    types[row.text[span.start : span.end]][span.type] += 1
        self._types = {
            text: min(of, key=lambda kind: (-of[kind], kind)) for text, of in types.items()
        }
        self._lengths = sorted({len(text) for text in types}, reverse=True)

    def __call__(self, rows: Sequence[Example]) -> Predicted:
        return [(self._look_up(row.text), None) for row in rows]

    def _look_up(self, text: str) -> list[list[Any]]:
        spans, start = [], 0
        while start < len(text):
            fitting = (n for n in self._lengths if text[start : start + n] in self._types)
            length = next((n for n in fitting if start + n <= len(text)), 0)
            if length:
                spans.append([self._types[text[start : start + length]], start, start + length])
            start += length or 1
        return spans


class _Ngrams:
    """Linear models of n-grams."""

    def __init__(self, config: TaskConfig, data: TaskData) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self._kind, self._labels = config.task.kind, data.labels
        train = data.splits["train"]
        pairs = [pair for row in train for pair in self._pairs(row)]
        self._has_second = any(second for _, second in pairs)
        self._vectorizer = TfidfVectorizer(
            analyzer="char",
            ngram_range=(1, 3),
            sublinear_tf=True,
            max_features=_MOST_FEATURES,
            dtype=np.float32,
        )
        self._vectorizer.fit(text for pair in pairs for text in dict.fromkeys(pair) if text)
        features = self._features(pairs)
        if self._kind == "regress":
            from sklearn.linear_model import Ridge

            self._models = [Ridge(alpha=_RIDGE).fit(features, [row.gold for row in train])]
            return
        if self._is_choice:
            wanted = np.array([[i == row.gold] for row in train for i in range(len(row.choices))])
        else:
            golds = [row.gold if isinstance(row.gold, tuple) else (row.gold,) for row in train]
            wanted = np.array([[label in gold for label in self._labels] for gold in golds])
        # Of two classes one model is enough: the other's is its mirror image.
        self._is_binary = len(self._labels) == 2 and self._kind != "multilabel"
        self._models = [_fit(features, column) for column in wanted.T[int(self._is_binary) :]]

    @property
    def _is_choice(self) -> bool:
        return self._kind in ("choice", "cloze")

    def _pairs(self, row: Example) -> list[tuple[str, str]]:
        """Return the texts that a score is given to: of the row, or of each of its choices."""
        if self._is_choice:
            context = "\n".join(filter(None, (row.text, row.text_b)))
            return [(context, choice) for choice in row.choices]
        if self._kind == "coref":
            return [(row.text, " ".join(row.text[start:end] for _, start, end in row.marks))]
        return [(row.text, row.text_b)]

    def _features(self, pairs: list[tuple[str, str]]) -> Any:
        from scipy import sparse

        first = self._vectorizer.transform([text for text, _ in pairs])
        if not self._has_second:
            return first
        second = self._vectorizer.transform([text for _, text in pairs])
        both = first.multiply(second)
        # What is the same for all choices of a row says nothing about them.
        parts = [second, both, sparse.csr_matrix(both.sum(axis=1))]
        return sparse.hstack(parts if self._is_choice else [first, *parts], format="csr")

    def __call__(self, rows: Sequence[Example]) -> Predicted:
        features = self._features([pair for row in rows for pair in self._pairs(row)])
        if self._kind == "regress":
            return [(float(value), None) for value in self._models[0].predict(features)]
        values = np.stack([_logits(model, features) for model in self._models], axis=1)
        if self._is_choice:
            ends = np.cumsum([len(row.choices) for row in rows])[:-1]
            parts = np.split(values[:, 0], ends)
            return [_choose(row, part) for row, part in zip(rows, parts, strict=True)]
        if self._is_binary:
            values = np.concatenate([-values, values], axis=1)
        return [(self._named(line), line.tolist()) for line in values]

    def _named(self, line: Floats) -> str | list[str]:
        if self._kind == "multilabel":
            return [label for label, value in zip(self._labels, line, strict=True) if value > 0]
        return self._labels[int(np.argmax(line))]


def _choose(row: Example, values: Floats) -> tuple[int, list[float | None]]:
    masked = np.where(row.distinct, values, -np.inf)
    shown = [
        value if there else None for value, there in zip(values.tolist(), row.distinct, strict=True)
    ]
    return int(np.argmax(masked)), shown


def _fit(features: Any, is_right: Any) -> Any:
    """Fit one class against the rest; return a constant where train has it never, or always."""
    if is_right.all() or not is_right.any():
        return _CERTAIN if is_right.all() else -_CERTAIN
    from sklearn.linear_model import LogisticRegression

    # Ten times as fast as the primal form, to the same solution.
    model = LogisticRegression(C=_C, solver="liblinear", dual=True, random_state=0)
    return model.fit(features, is_right)


def _logits(model: Any, features: Any) -> Floats:
    if isinstance(model, float):
        return np.full(features.shape[0], model)
    return np.asarray(model.decision_function(features), dtype=np.float64)
