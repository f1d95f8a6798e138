"""Speed of decontamination, and what it finds for which lengths of n-grams, as one JSON line.

    python -m benchmarks.decontaminate CORPUS.jsonl[.gz] PREP.yaml [NGRAM,NGRAM_CJK,MIN,MIN_CJK ...]

PREP.yaml has a section `decontaminate` with sets; other lengths than its own are tried one after
another. For each: n-grams of the sets; MB of UTF-8 text per CPU-second of one process, the best of
three; documents of the corpus that share text, by set, and how many have only short items; and of
1,000 items of at least 30 letters and digits, each planted in the middle of a document that shares
nothing, the share found as it is, and with a twentieth of its characters replaced.
"""

import dataclasses
import gzip
import json
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean.normalise import normalise
from data_prep.config import DecontaminateConfig, PrepConfig
from data_prep.decontaminate import eval_items
from data_prep.decontaminate.search import Finder, load_tables
from data_prep.decontaminate.stages import eval_set_task, run_eval_sets
from data_prep.pieces import batches
from pipeline.config.load import load

_PLANTED = 1000
_PLANTED_LETTERS = 30
_LETTERS = ("ngram", "ngram_cjk", "min_chars", "min_chars_cjk")


def _planted(config: DecontaminateConfig, clean: Any, clear: list[str]) -> list[tuple[str, str]]:
    """Pairs of documents: an item inside, and the same with a twentieth of it replaced."""
    rng = np.random.default_rng(0)
    items = [
        text
        for files in eval_items.find(config).values()
        for file in files
        for _, text in eval_items.read(file, eval_items.Reading())
        if sum(map(str.isalnum, text)) >= _PLANTED_LETTERS
    ]
    found = []
    for number in rng.choice(len(items), _PLANTED, replace=False).tolist():
        item = normalise(items[number], clean)
        document = clear[int(rng.integers(len(clear)))]
        half = len(document) // 2
        edited = np.array(list(item))
        places = np.flatnonzero(rng.random(len(edited)) < 0.05)
        edited[places] = rng.permutation(list(document))[: len(places)]
        found.append(
            (document[:half] + item + document[half:],
             document[:half] + "".join(edited) + document[half:])
        )  # fmt: skip
    return found


def _measure(config: DecontaminateConfig, clean: Any, texts: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        task = eval_set_task(eval_items.find(config), config, clean, Path(folder))
        start = time.process_time()
        result, _ = run_eval_sets(task)
        eval_s = time.process_time() - start
        finder = Finder(load_tables(task.folder), config)
        groups = [[d["text"] for d in batch] for batch in batches({"text": t} for t in texts)]
        finder.find(groups[0])  # makes the table of letters
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            found = [stretches for group in groups for stretches in finder.find(group)]
            best = min(best, time.process_time() - start)
        num_ngrams = len(np.load(task.path(".ngrams.npy"), mmap_mode="r"))
        items = np.load(task.path(".items.npy"))
        whole = np.load(task.path(".whole.npy"))[:, 0]
        owner = np.concatenate([items, whole])
        ends = np.cumsum([counts["items"] for counts in result["sets"].values()])
        names, by_set, only_short = list(result["sets"]), dict.fromkeys(result["sets"], 0), 0
        for stretches in filter(None, found):
            rows = np.array([row for stretch in stretches for row in stretch.rows])
            for number in np.unique(np.searchsorted(ends, owner[rows], side="right")).tolist():
                by_set[names[number]] += 1
            only_short += bool((rows >= num_ngrams).all())
        clear = [t for t, f in zip(texts, found, strict=True) if not f and 500 < len(t) < 5000]
        pairs = _planted(config, clean, clear)
        shares = [
            sum(bool(f) for pair in pairs for f in finder.find([pair[i]])) / len(pairs)
            for i in (0, 1)
        ]
        return {
            **{name: getattr(config, name) for name in _LETTERS},
            "ngrams": num_ngrams, "whole": len(whole), "eval_sets_cpu_s": round(eval_s, 1),
            "mb_per_cpu_s": round(sum(len(t.encode()) for t in texts) / 1e6 / best, 1),
            "documents": sum(map(bool, found)), "only_short": only_short, "by_set": by_set,
            "planted_found": shares[0], "planted_edited_found": shares[1],
        }  # fmt: skip


def main(corpus: str, config_path: str, *lengths: str) -> None:
    """Measures all lengths."""
    config = load(PrepConfig, Path(config_path), []).config
    with gzip.open(corpus, "rt") if corpus.endswith(".gz") else open(corpus) as lines:
        texts = [normalise(json.loads(line)["text"], config.clean) for line in lines]
    tried = [dict(zip(_LETTERS, map(int, text.split(",")), strict=True)) for text in lengths]
    results = [
        _measure(dataclasses.replace(config.decontaminate, **changes), config.clean, texts)
        for changes in tried or [{}]
    ]
    record = {
        "benchmark": "decontaminate", "documents": len(texts), "results": results,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
        "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
