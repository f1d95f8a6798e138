"""Speed, memory and recall of the near-duplicate stages, as one JSON line.

    python benchmarks/minhash.py corpus.jsonl.gz [--datatrove-python VENV/bin/python] [--lengths]

The corpus is JSON lines with `text`, plain or .gz; a document is Chinese if a third of its bytes
are Han characters. Speeds are MB of UTF-8 text per CPU-second of one process, the best of three.

Recall is that of copies with 10% of the characters edited, a third each replaced, deleted and
preceded by others, in runs ("words": five Latin or two Han characters) or one by one
("characters"), of up to 400 documents of at least `min_chars` letters; the unrelated pairs are all
pairs of a Chinese with an English document and of two of these documents of one language, whose
highest estimates are given as quantiles (some of these are related in truth: look at them).

datatrove runs with one word a Han character or a Latin word (its "zho" splits at blanks), five
words a shingle, once with its own 14 bands of 8 and once with as many bands and rows as we have.
"""

import argparse
import gzip
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from backports import zstd

from data_prep.config import DedupConfig
from data_prep.minhash import Signatures, SignatureSettings, fold, signatures
from data_prep.near import BucketJob, SignatureJob, run_buckets, run_signatures, settings_of
from data_prep.stage import Task

_HAN = re.compile("[\u3400-\u9fff]")
_CORPUS_MB = 280_000
_LENGTHS = ((3, 3), (4, 4), (5, 5), (6, 6), (8, 8), (10, 10), (13, 13), (8, 4), (8, 5))
_BUCKET_DOCUMENTS = 1_000_000
_DATATROVE = """
import json, re, sys, tempfile, time
from importlib.metadata import version
from datatrove.data import Document
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.word_tokenizers import WordTokenizer
class Words(WordTokenizer):
    words = re.compile("[\\u3400-\\u9fff]|[^\\\\W\\u3400-\\u9fff]+")
    def word_tokenize(self, text): return self.words.findall(text)
    def sent_tokenize(self, text): return [text]
    def span_tokenize(self, text): return []
job = json.load(sys.stdin)
found = {"datatrove": version("datatrove")}
for language, texts in job["texts"].items():
    for bands, rows in ((14, 8), (job["bands"], job["rows"])):
        with tempfile.TemporaryDirectory() as folder:
            config = MinhashConfig(n_grams=5, num_buckets=bands, hashes_per_bucket=rows)
            step = MinhashDedupSignature(folder, config, language=Words())
            documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
            start = time.process_time()
            for _ in step.run(documents) or (): pass
            seconds = time.process_time() - start
        size = sum(len(text.encode()) for text in texts) / 1e6
        found[f"{language} {bands}x{rows} mb_per_cpu_s"] = round(size / seconds, 2)
print(json.dumps(found))
"""


def _load(path: Path, max_mb: float) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {"chinese": [], "english": []}
    size = 0
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            text = json.loads(line)["text"]
            num_bytes = len(text.encode())
            chinese = 9 * len(_HAN.findall(text)) > num_bytes
            texts["chinese" if chinese else "english"].append(text)
            size += num_bytes
            if size > max_mb * 1e6:
                break
    return texts


def _megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def _sign(texts: list[str], settings: SignatureSettings) -> Signatures:
    parts, batch, size = [], [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > 1 << 18:
            parts.append(signatures(batch, settings))
            batch, size = [], 0
    if batch:
        parts.append(signatures(batch, settings))
    return Signatures(
        np.concatenate([part.bands for part in parts]),
        np.concatenate([part.sketch for part in parts]),
    )


def _cpu_seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def _whole_step(texts: list[str], settings: SignatureSettings) -> float:
    """CPU seconds from `.jsonl.zst` to the files of a piece."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "piece.jsonl.zst"
        with zstd.open(path, "wb") as file:
            for number, text in enumerate(texts):
                record = {"id": str(number), "source": "s", "text": text}
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        task = Task("piece", Path(name), "", SignatureJob(path, settings))
        return _cpu_seconds(lambda: run_signatures(task))


def _buckets() -> dict[str, float]:
    """One bucket task over a million documents, a fifth of which share their hash with another."""
    rng = np.random.default_rng(0)
    column = rng.integers(1, 2**63, _BUCKET_DOCUMENTS, dtype=np.uint64)
    fifth = _BUCKET_DOCUMENTS // 5
    column[-fifth:] = column[rng.integers(0, _BUCKET_DOCUMENTS - fifth, fifth)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "piece.signatures.npy", column[:, None])
        np.save(folder / "piece.keep.npy", np.ones(_BUCKET_DOCUMENTS, dtype=bool))
        task = Task("000-000", folder, "", BucketJob(folder, folder, ("piece",), 0, 0, 1))
        seconds = _cpu_seconds(lambda: run_buckets(task))
        tracemalloc.start()
        run_buckets(task)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return {
        "peak_mb_per_million_documents": round(peak / 1e6, 1),
        "cpu_s_per_million_documents_and_band": round(seconds, 3),
    }


def _edited(text: str, rng: np.random.Generator, *, words: bool) -> str:
    pieces, position = [], 0
    while position < len(text):
        run = (2 if _HAN.match(text[position]) else 5) if words else 1
        if rng.random() >= 0.1 / run / (0.9 + 0.1 / run):
            pieces.append(text[position])
            position += 1
            continue
        new = "".join(text[i] for i in rng.integers(0, len(text), run))
        pieces.append((new, "", new + text[position : position + run])[rng.integers(3)])
        position += run
    return "".join(pieces)


def _sample(texts: dict[str, list[str]], min_chars: int) -> dict[str, Any]:
    """Documents and copies, at most 6,000 characters each."""
    rng = np.random.default_rng(1)
    sample: dict[str, Any] = {}
    for language, all_texts in texts.items():
        cut = [text[:6000] for text in all_texts]
        long = [text for text in cut if fold([text])[1][0] >= min_chars]
        chosen = [long[i] for i in rng.permutation(len(long))[:400]]
        copies = {
            style: [_edited(text, rng, words=style == "words") for text in chosen]
            for style in ("words", "characters")
        }
        sample[language] = {"originals": chosen, **copies}
    return sample


def _recall(sample: dict[str, Any], config: DedupConfig) -> dict[str, Any]:
    """Share of copies that meet their original in a band and reach the threshold."""
    settings = settings_of(config)
    found: dict[str, Any] = {}
    signed = {language: _sign(s["originals"], settings) for language, s in sample.items()}
    for language, texts in sample.items():
        own = signed[language]
        for style in ("words", "characters"):
            copies = _sign(texts[style], settings)
            meet = ((own.bands == copies.bands) & (own.bands != 0)).any(axis=1)
            similar = _estimates(own.sketch, copies.sketch)
            found[f"{language} {style}"] = {
                "recall": round(float((meet & (similar >= config.threshold)).mean()), 3),
                "recall_of_bands": round(float(meet.mean()), 3),
                "jaccard_quantiles_1_5_50": np.quantile(similar, [0.01, 0.05, 0.5])
                .round(3).tolist(),
            }  # fmt: skip
    pairs = {"chinese and english": ("chinese", "english"), **{k: (k, k) for k in sample}}
    for name, (left, right) in pairs.items():
        a, b = signed[left].sketch, signed[right].sketch
        rows = [_estimates(b[:i] if left == right else b, a[i]) for i in range(len(a))]
        similar = np.concatenate(rows)
        found[f"unrelated, {name}"] = {
            "pairs": len(similar),
            "merged": int((similar >= config.threshold).sum()),
            "jaccard_quantiles_99_99.9_100": np.quantile(similar, [0.99, 0.999, 1])
            .round(3).tolist(),
        }  # fmt: skip
    return found


def _estimates(rows: Any, other: Any) -> Any:
    return np.maximum(0, ((rows == other).mean(axis=1) - 1 / 256) / (1 - 1 / 256))


def _datatrove(python: str | None, texts: dict[str, list[str]], config: DedupConfig) -> Any:
    if python is None:
        return "not measured: no --datatrove-python"
    few: dict[str, list[str]] = {}
    for language, all_texts in texts.items():
        few[language] = all_texts[: 1 + len(all_texts) * 2 // max(2, int(_megabytes(all_texts)))]
    job = json.dumps({"texts": few, "bands": config.bands, "rows": config.rows})
    done = subprocess.run([python, "-c", _DATATROVE], input=job, text=True, capture_output=True)
    if done.returncode:
        return f"not measured: {done.stderr.strip().splitlines()[-1]}"
    return {
        **json.loads(done.stdout.splitlines()[-1]),
        "mb": round(sum(map(_megabytes, few.values())), 1),
    }


def _speeds(texts: dict[str, list[str]], settings: SignatureSettings) -> dict[str, Any]:
    found = {}
    for language, part in texts.items():
        size = _megabytes(part)
        found[language] = {
            "documents": len(part),
            "mb": round(size, 1),
            "signatures_mb_per_cpu_s": round(
                size / _cpu_seconds(lambda p=part: _sign(p, settings)), 1
            ),  # type: ignore[misc]
            "whole_step_mb_per_cpu_s": round(size / _whole_step(part, settings), 1),
        }
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--mb", type=float, default=60, help="of text that are read")
    parser.add_argument("--datatrove-python", help="python of a venv with datatrove and xxhash<4")
    parser.add_argument("--lengths", action="store_true", help="recall of other shingle lengths")
    arguments = parser.parse_args()
    config = DedupConfig()
    settings = settings_of(config)
    texts = {k: v for k, v in _load(arguments.corpus, arguments.mb).items() if v}
    signatures(["warm up " * 50], settings)  # makes the table of characters
    speeds, buckets = _speeds(texts, settings), _buckets()
    total_mb = sum(speed["mb"] for speed in speeds.values())
    documents = sum(speed["documents"] for speed in speeds.values()) * _CORPUS_MB / total_mb
    seconds = sum(speed["mb"] / speed["whole_step_mb_per_cpu_s"] for speed in speeds.values())
    per_band = buckets["cpu_s_per_million_documents_and_band"]
    sample = _sample(texts, config.min_chars)
    lengths = _LENGTHS if arguments.lengths else ()
    result = {
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "settings": config.__dict__,
        "signatures": speeds,
        "datatrove": _datatrove(arguments.datatrove_python, texts, config),
        "buckets": buckets,
        "for_280_gb": {
            "million_documents": round(documents / 1e6, 1),
            "signatures_cpu_h": round(seconds / total_mb * _CORPUS_MB / 3600, 2),
            "buckets_cpu_h": round(documents / 1e6 * per_band * config.bands / 3600, 2),
            "files_gb": round(documents * (8 * config.bands + config.bands * config.rows) / 1e9, 1),
        },
        "recall": _recall(sample, config),
        "by_length": {
            f"{n}, {cjk} cjk": _recall(sample, replace(config, ngram=n, ngram_cjk=cjk))
            for n, cjk in lengths
        },
    }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
