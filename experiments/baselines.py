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
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.load import to_yaml
from pipeline.finetune.result import (
    RESULT,
    SPLITS,
    combine,
    predictions_file,
    read_result,
    score_run,
    write_predictions,
)
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.tasks.readers import TaskData, read_task
from pipeline.tasks.scores import Floats
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import Example, PredictionRow, Span

logger = logging.getLogger(__name__)

NAME = "ngrams"
# scikit-learn's solver: one that a reviewer trusts. In an extra, `tables`: training needs 45 MB
# less.
_C, _RIDGE = 10.0, 1.0
_MOST_FEATURES = 50_000
_CERTAIN = 30.0  # logit of a class that train has never, or always

Predicted = list[tuple[Any, list[float | None] | None]]
"""Prediction of each row, and its scores where the kind has some."""


def run_baseline(config: TaskConfig, *, name: str, out: Path) -> dict[str, Any] | None:
    """Fit on train, predict dev and test, and write the folder; None for a kind without baseline.

    A folder of the same rows and settings is not made again.

    Raises:
        DataError: see `read_task`.
    """
    if not config.kind.baseline:
        return None
    started_s = time.monotonic()
    data = read_task(config)
    read = [[split, row.id, row.texts, row.gold] for split, of in data.splits.items() for row in of]
    labelled = replace(config, data=replace(config.data, labels=data.labels or "auto"))
    protocol = {
        "model": NAME,
        "data_sha256": hashlib.sha256(json.dumps([data.labels, read]).encode()).hexdigest(),
        "selected_on": "last",
        "metric": config.metric,
        "regularisation": [_C, _RIDGE],
        "features": _MOST_FEATURES,
        "scikit-learn": metadata.version("scikit-learn"),
    }
    if (out / RESULT).is_file():
        stored = read_result(out)
        if protocol.items() <= stored["protocol"].items():
            logger.info("%s is finished", out)
            return stored
        (out / RESULT).unlink()
    predict = _BASELINES[config.kind.baseline](config, data)
    found = {}
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rows = data.splits[split]
        if rows:
            found[split] = [
                PredictionRow(row.id, row.gold, *made)
                for row, made in zip(rows, predict(rows), strict=True)
            ]
            write_predictions(predictions_file(out, split), found[split])
    write_atomic(out / "task.yaml", to_yaml(labelled).encode())
    about = {
        "task": name,
        "rows": {"train": len(data.splits["train"])},
        "counts": data.counts,
        "train_s": time.monotonic() - started_s,
        "protocol": protocol,
    }
    result = combine([score_run(config, data.labels, found)], [0], about)
    write_json_atomic(out / RESULT, result)
    return result


class _Dictionary:
    """Entities of train by their text."""

    def __init__(self, config: TaskConfig, data: TaskData) -> None:
        types: dict[str, Counter[str]] = defaultdict(Counter)
        for row in data.splits["train"]:
            for span in row.gold if isinstance(row.gold, tuple) else ():
                if isinstance(span, Span):
                    types[row.text[span.start : span.end]][span.type] += 1
        self._types = {
            # Of equally common types the first by name, so that the table is the same each time.
            text: min(of, key=lambda kind: (-of[kind], kind))
            for text, of in types.items()
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

        self._loss, self._labels = config.kind.loss, data.labels
        self._is_choice = config.kind.masks_scores
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
        if self._loss == "regression":
            from sklearn.linear_model import Ridge

            self._models = [Ridge(alpha=_RIDGE).fit(features, [row.gold for row in train])]
            return
        if self._is_choice:
            wanted = np.array([[i == row.gold] for row in train for i in range(len(row.choices))])
        else:
            golds = [row.gold if isinstance(row.gold, tuple) else (row.gold,) for row in train]
            wanted = np.array([[label in gold for label in self._labels] for gold in golds])
        # Of two classes one model is enough: the other's is its mirror image.
        self._is_binary = len(self._labels) == 2 and self._loss != "multi_label"
        self._models = [_fit(features, column) for column in wanted.T[int(self._is_binary) :]]

    def _pairs(self, row: Example) -> list[tuple[str, str]]:
        """Return the texts that a score is given to: of the row, or of each of its choices."""
        if self._is_choice:
            context = "\n".join(filter(None, (row.text, row.text_b)))
            return [(context, choice) for choice in row.choices]
        if row.marks:  # the spans of coref
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
        if self._loss == "regression":
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
        if self._loss == "multi_label":
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


_BASELINES: dict[str, Any] = {"dictionary": _Dictionary, "ngrams": _Ngrams}
