"""Speed and rejections of the filter stage, as one JSON line.

    python -m benchmarks.filters [CORPUS.jsonl or .jsonl.gz] [KEY=VALUE ...]

The corpus is normalised first, which is not measured; without one the embedded corpus is taken.
MB are 10^6 UTF-8 bytes of normalised text, seconds are CPU seconds of one process, the better of
two passes. KEY=VALUE overrides configs/prep/web.yaml, such as
filters.repetition.chinese_chars_per_word=1.
"""

import dataclasses
import gzip
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep import embedded
from data_prep.clean.normalise import normalise
from data_prep.config import FiltersConfig, PrepConfig, rule_sets
from data_prep.filters.rules import Dropped, Filters
from pipeline.config.load import load

WEB = Path(__file__).parents[1] / "configs" / "prep" / "web.yaml"


def _texts(path: str | None) -> Iterator[str]:
    if path is None:
        for file, name in embedded.find():
            for _, raw in embedded.documents(file, name):
                yield raw.decode(errors="replace")
        return
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
        for line in lines:
            yield json.loads(line)["text"]


def measure(config: FiltersConfig, texts: list[str]) -> tuple[float, Counter[str]]:
    """CPU seconds, and documents by reason ('' for those that are kept)."""
    filters = Filters(config)
    best = float("inf")
    for _ in range(2):
        reasons: Counter[str] = Counter()
        start = time.process_time()
        for text in texts:
            outcome = filters.apply(text)
            reasons[outcome.reason if isinstance(outcome, Dropped) else ""] += 1
        best = min(best, time.process_time() - start)
    return best, reasons


def main(arguments: list[str]) -> None:
    """Measures the default set of web.yaml, and each of its groups alone."""
    overrides = [argument for argument in arguments if "=" in argument]
    path = next((argument for argument in arguments if "=" not in argument), None)
    [web] = rule_sets(load(PrepConfig, WEB, overrides).config.filters)
    texts = [text for text in map(normalise, _texts(path)) if text]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    groups = {
        field.name: dataclasses.replace(FiltersConfig(), **{field.name: getattr(web, field.name)})
        for field in dataclasses.fields(web)
        if getattr(getattr(web, field.name), "enabled", False)
    }
    result: dict[str, object] = {
        "corpus": path or "embedded", "documents": len(texts), "mb": round(megabytes, 2),
        "python": platform.python_version(), "numpy": np.__version__,
        "machine": platform.machine(),
    }  # fmt: skip
    for name, config in {"web": web, **groups}.items():
        seconds, reasons = measure(config, texts)
        kept = reasons.pop("", 0)
        result[name] = {
            "mb_per_cpu_s": round(megabytes / seconds, 1), "kept": kept,
            "rejected": dict(reasons.most_common()),
        }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
