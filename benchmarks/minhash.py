"""Speed and recall of the near-duplicate stages, as one JSON line.

    python -m benchmarks.minhash corpus.jsonl.gz [--datatrove-python VENV/bin/python] [--others]

The corpus is JSON lines with `text`, plain or .gz; a document is Chinese if a third of its bytes
are Han characters, and besides mixed if a fifth of its letters are no CJK. Speeds are MB of UTF-8
text per CPU-second of one process, the best of three.

Recall is that of copies with 10% of the characters edited, a third each replaced, deleted and
preceded by others, in runs ("words": five Latin or two Han characters) or one by one
("characters"), of up to 400 documents of at least `min_chars` letters; the unrelated pairs are all
pairs of a Chinese with an English document and of two of these documents of one language, whose
highest estimates are given as quantiles (some of these are related in truth: look at them).

"By length" has documents of 3 kB to 5 MB, joined from those of the corpus, from the sources of the
Python installation ("code"), and from forms whose printed third is the same in all of them. It
gives the share of copies that are found in a band and estimated above the threshold (a tenth of the
words changed; a chapter added, a sixth of the text; other front matter, a tenth), the pairs of
unrelated documents above the threshold, their highest estimate, and the same with short shingles
alone, with the time of long ones over that.

"At 100 million documents" is calculated. A copy is found for sure in a bucket that no unrelated
document is in, since pairs are made with a bucket's first and previous member only. How many
unrelated ones a bucket of N documents has is called its load. Over the bands of a document it is on
average N * mean(s^rows), s being its measured similarities to documents of the corpus, without
those of 0.2 and more, which may be related. Its bands differ by how common their minima are: the
load is spread over them as the product of the minima's frequencies. With load x, the copy's
original is the bucket's first member with probability (1 - exp(-x)) / x. The corpus is of few
kinds, so its documents are more similar than those of the web.

datatrove runs with one word a Han character or a Latin word (its "zho" splits at blanks), five
words a shingle, once with its own 14 bands of 8 and once with as many bands and rows as we have.
"""

import argparse
import gzip
import itertools
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from backports import zstd

from benchmarks.timing import cpu_seconds
from data_prep.config import DedupConfig
from data_prep.dedup import minhash
from data_prep.dedup.minhash import Signatures, SignatureSettings, fold, signatures, similarity
from data_prep.dedup.near import SignatureJob, run_signatures, settings_of
from data_prep.stage import StageTask

_SAMPLED_CHARS = 6000
_HAN = re.compile("[\u3400-\u9fff]")
_CORPUS_MB = 280_000
_MANY_DOCUMENTS = 100_000_000
_UNRELATED = 0.2
_LENGTHS = (3_000, 30_000, 100_000, 300_000, 1_000_000, 5_000_000)
"""Bytes of UTF-8."""
_MOST_OF_A_LENGTH, _MOST_BYTES = 60, 10_000_000
_OTHERS = (
    (8, 4, 64, 4, 0.4), (8, 3, 64, 4, 0.33), (7, 3, 128, 5, 0.33), (6, 3, 64, 4, 0.33),
    (6, 3, 128, 4, 0.33), (6, 3, 128, 5, 0.33), (6, 3, 128, 6, 0.33), (6, 3, 192, 5, 0.33),
    (6, 2, 128, 5, 0.33), (5, 3, 128, 4, 0.33), (5, 3, 160, 5, 0.33), (5, 3, 256, 5, 0.33),
    (5, 3, 400, 6, 0.33),
)  # fmt: skip
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
    texts: dict[str, list[str]] = {"chinese": [], "english": [], "mixed": []}
    size = 0
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            text = json.loads(line)["text"]
            num_bytes = len(text.encode())
            chinese = 9 * len(_HAN.findall(text)) > num_bytes
            texts["chinese" if chinese else "english"].append(text)
            if chinese and _latin_share(text) > 0.2:
                texts["mixed"].append(text)
            size += num_bytes
            if size > max_mb * 1e6:
                break
    return texts


def _latin_share(text: str) -> float:
    letters = fold([text[:_SAMPLED_CHARS]])[0]
    return float((letters < minhash._FIRST_CJK).mean()) if len(letters) else 0.0


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


def _whole_step(texts: list[str], settings: SignatureSettings) -> float:
    """CPU seconds from `.jsonl.zst` to the files of a piece."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "piece.jsonl.zst"
        with zstd.open(path, "wb") as file:
            for number, text in enumerate(texts):
                record = {"id": str(number), "source": "s", "text": text}
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        np.save(Path(name) / "sizes.npy", np.zeros(len(texts)))
        job = SignatureJob(path, Path(name) / "sizes.npy", settings)
        task = StageTask("piece", Path(name), "", job)
        return cpu_seconds(lambda: run_signatures(task))


def _edited(text: str, rng: np.random.Generator, *, words: bool) -> str:
    """A copy in which a tenth of the characters is edited, wherever a run may begin."""
    pieces, position = [], 0
    often = _begins(2 if words else 1)
    while True:
        stop = position + int(rng.geometric(often)) - 1
        pieces.append(text[position:stop])
        if stop >= len(text):
            return "".join(pieces)
        run = (2 if _HAN.match(text[stop]) else 5) if words else 1
        if rng.random() * often >= _begins(run):
            pieces.append(text[stop])
            position = stop + 1
            continue
        new = "".join(text[i] for i in rng.integers(0, len(text), run))
        pieces.append((new, "", new + text[stop : stop + run])[rng.integers(3)])
        position = stop + run


def _begins(run: int) -> float:
    """How often an edit of so many characters begins at a character."""
    return 0.1 / run / (0.9 + 0.1 / run)


def _sample(texts: dict[str, list[str]], min_chars: int) -> dict[str, Any]:
    """Documents and copies, at most `_SAMPLED_CHARS` characters each."""
    rng = np.random.default_rng(1)
    sample: dict[str, Any] = {}
    for language, all_texts in texts.items():
        cut = [text[:_SAMPLED_CHARS] for text in all_texts]
        long = [text for text in cut if fold([text])[1][0] >= min_chars]
        chosen = [long[i] for i in rng.permutation(len(long))[:400]]
        copies = {
            style: [_edited(text, rng, words=style == "words") for text in chosen]
            for style in ("words", "characters")
        }
        sample[language] = {"originals": chosen, **copies}
    return sample


class _Minima:
    """Minima of the whole corpus, and the loads that they make."""

    def __init__(self, texts: list[str], settings: SignatureSettings) -> None:
        self.settings = settings
        self._bins = minhash.bins_of_bands(settings.bands, settings.rows)
        all_minima = self.of([text for text in texts if fold([text])[1][0] >= settings.min_chars])
        self._documents = len(all_minima)
        self._minima = all_minima
        self._counts = [np.unique(column, return_counts=True) for column in all_minima.T]

    def of(self, texts: list[str]) -> Any:
        """(D, K) uint64."""
        parts = []
        for start in range(0, len(texts), 20):
            letters, sizes = fold(texts[start : start + 20])
            found = np.full((len(sizes), minhash.NUM_BINS), minhash._EMPTY, dtype="<u8")
            lengths = self.settings.ngram, self.settings.ngram_cjk
            minhash._take_minima(letters, np.cumsum(sizes), lengths, found)
            minhash._densify(found)
            parts.append(found)
        return np.concatenate(parts)

    def meet(self, first: Any, other: Any) -> Any:
        """(D, bands) whether documents agree in a band."""
        return (first == other)[:, self._bins].all(axis=2)

    def reached(self, minima: Any) -> Any:
        """(D, bands) probability that a document is its bucket's first member."""
        load = _MANY_DOCUMENTS * self._loads(minima)
        return np.where(load < 1e-6, 1.0, -np.expm1(-load) / np.maximum(load, 1e-9))

    def _loads(self, minima: Any) -> Any:
        share = np.empty(minima.shape)
        for column, (values, counts) in enumerate(self._counts):
            mine = minima[:, column]
            place = np.minimum(np.searchsorted(values, mine), len(values) - 1)
            others = np.where(values[place] == mine, counts[place] - 1, 0)
            share[:, column] = np.maximum(others, 0.3) / self._documents
        product = share[:, self._bins].prod(axis=2)
        moments = np.array([self._moment(row) for row in minima])
        return product * np.maximum(1, moments / product.mean(axis=1))[:, None]

    def _moment(self, row: Any) -> float:
        """Mean of s^rows over the corpus, without bias."""
        equal = (self._minima == row).sum(axis=1)
        equal = np.where(equal < _UNRELATED * 256, equal, 0).astype(float)
        powers = [np.maximum(equal - i, 0) / (256 - i) for i in range(self.settings.rows)]
        return float(np.prod(powers, axis=0).mean())


def _recall(
    texts: dict[str, list[str]], sample: dict[str, Any], config: DedupConfig
) -> dict[str, Any]:
    """Share of copies that meet their original in a band and reach the threshold."""
    settings = settings_of(config)
    corpus = _Minima(texts["chinese"] + texts["english"], settings)
    found: dict[str, Any] = {}
    sketches = {}
    for language, part in sample.items():
        own = corpus.of(part["originals"])
        reached = corpus.reached(own)
        sketches[language] = _sketch(own)
        for style in ("words", "characters"):
            copies = corpus.of(part[style])
            meet = corpus.meet(own, copies)
            similar = _estimates(sketches[language], _sketch(copies))
            enough = similar >= config.threshold
            many = 1 - np.where(meet, 1 - reached, 1.0).prod(axis=1)
            found[f"{language} {style}"] = {
                "recall": round(float((meet.any(axis=1) & enough).mean()), 3),
                "at_100_million": round(float((many * enough).mean()), 3),
                "jaccard_quantiles_1_5_50": np.quantile(similar, [0.01, 0.05, 0.5])
                .round(3).tolist(),
            }  # fmt: skip
        pairs = 2 * (1 - reached).sum(axis=1)
        found[f"{language} pairs by chance at 100 million"] = round(float(pairs.mean()), 1)
    languages = {"chinese and english": ("chinese", "english")}
    for name, (left, right) in {**languages, **{k: (k, k) for k in ("chinese", "english")}}.items():
        a, b = sketches[left], sketches[right]
        rows = [_estimates(b[:i] if left == right else b, a[i]) for i in range(len(a))]
        similar = np.concatenate(rows)
        found[f"unrelated, {name}"] = {
            "pairs": len(similar),
            "merged": int((similar >= config.threshold).sum()),
            "jaccard_quantiles_99_99.9_100": np.quantile(similar, [0.99, 0.999, 1])
            .round(3).tolist(),
        }  # fmt: skip
    return found


def _sketch(minima: Any) -> Any:
    """Sketches of short documents."""
    return np.pad(minima.astype(np.uint8), ((0, 0), (0, 1)), constant_values=minhash.SHORT)


def _estimates(rows: Any, other: Any) -> Any:
    return similarity(minhash.agreements(rows, other))


def _joined(texts: list[str], num_bytes: int) -> list[str]:
    """Documents of a length, each of other texts."""
    found, part, size = [], [], 0
    for text in texts:
        part.append(text)
        size += len(text.encode())
        if size >= num_bytes:
            whole = "\n".join(part)
            found.append(whole[: len(whole) * num_bytes // size])
            part, size = [], 0
        if len(found) == max(3, min(_MOST_OF_A_LENGTH, _MOST_BYTES // num_bytes)):
            break
    return found


def _code() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Tables of characters are much alike, and packages are there twice.
    others = {"test", "tests", "idle_test", "encodings", "site-packages", "lib2to3", "ensurepip"}
    paths = [path for path in sorted(folder.rglob("*.py")) if not others & set(path.parts)]
    texts = [path.read_text("utf-8", "replace") for path in paths]
    return [texts[i] for i in np.random.default_rng(2).permutation(len(texts))]


def _forms(texts: list[str]) -> list[str]:
    """Parts of which the first third is printed on all forms."""
    every = [part for text in texts for part in text.split("\n\n") if len(part) > 100]
    printed = [part for part in every if len(part) < 400][:40]
    own = "\n".join(part for part in every if part not in printed)
    forms, start = [], 0
    for number in itertools.count():
        form = printed[number % 40]
        if start + 2 * len(form) > len(own):
            return forms
        forms.append(form + own[start : start + 2 * len(form)])
        start += 2 * len(form)
    raise AssertionError("unreachable")


def _copies(text: str, other: str, rng: np.random.Generator) -> dict[str, str]:
    middle, sixth, tenth = len(text) // 2, len(text) // 6, len(text) // 10
    return {
        "words": _edited(text, rng, words=True),
        "chapter": text[:middle] + other[:sixth] + text[middle:],
        "front matter": other[-tenth:] + text[tenth:],
    }


@contextmanager
def _short_shingles_alone() -> Iterator[None]:
    before = minhash.LONG_FROM, minhash.SHORT_BELOW
    minhash.LONG_FROM = minhash.SHORT_BELOW = 2**62
    yield
    minhash.LONG_FROM, minhash.SHORT_BELOW = before


def _by_length(texts: dict[str, list[str]], config: DedupConfig) -> dict[str, Any]:
    kinds = {
        "english": texts["english"], "chinese": texts["chinese"], "code": _code(),
        "forms": _forms(texts["english"]),
    }  # fmt: skip
    rng, found = np.random.default_rng(3), dict[str, Any]()
    for (kind, parts), length in itertools.product(kinds.items(), _LENGTHS):
        documents = _joined(parts, length)
        if len(documents) < 2:
            found[f"{kind} {length}"] = f"not measured: text for {len(documents)} documents"
            continue
        changed = [
            _copies(text, documents[number - 1], rng) for number, text in enumerate(documents)
        ]
        row: dict[str, Any] = {"documents": len(documents)}
        own = _sign(documents, settings_of(config))
        for way in changed[0]:
            signed = _sign([copies[way] for copies in changed], settings_of(config))
            meet = (own.bands == signed.bands).any(axis=1)
            similar = _estimates(own.sketch, signed.sketch)
            row[way] = float((meet & (similar >= config.threshold)).mean())
        row |= _unrelated(own, config)
        seconds = cpu_seconds(lambda part=documents: _sign(part, settings_of(config)))  # type: ignore[misc]
        with _short_shingles_alone():
            short = _sign(documents, settings_of(config))
            row["short alone"] = _unrelated(short, config)
            before = cpu_seconds(lambda part=documents: _sign(part, settings_of(config)))  # type: ignore[misc]
        row["time ratio"] = round(seconds / before, 2)
        found[f"{kind} {length}"] = row
    return found


def _unrelated(signed: Signatures, config: DedupConfig) -> dict[str, Any]:
    first, other = np.triu_indices(len(signed.sketch), 1)
    similar = _estimates(signed.sketch[first], signed.sketch[other])
    return {
        "unrelated pairs": len(first),
        "false pairs": int((similar >= config.threshold).sum()),
        "highest": round(float(similar.max()), 3),
        "mean": round(float(similar.mean()), 3),
    }


def _datatrove(python: str | None, texts: dict[str, list[str]], config: DedupConfig) -> Any:
    if python is None:
        return "not measured: no --datatrove-python"
    few: dict[str, list[str]] = {}
    for language in ("chinese", "english"):
        all_texts = texts[language]
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
    for language in ("chinese", "english"):
        part = texts[language]
        size = _megabytes(part)
        found[language] = {
            "documents": len(part),
            "mb": round(size, 1),
            "signatures_mb_per_cpu_s": round(
                size / cpu_seconds(lambda p=part: _sign(p, settings)), 1
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
    parser.add_argument("--others", action="store_true", help="recall of other settings")
    arguments = parser.parse_args()
    config = DedupConfig()
    settings = settings_of(config)
    texts = _load(arguments.corpus, arguments.mb)
    signatures(["warm up " * 50], settings)  # makes the table of characters
    speeds = _speeds(texts, settings)
    total_mb = sum(speed["mb"] for speed in speeds.values())
    documents = sum(speed["documents"] for speed in speeds.values()) * _CORPUS_MB / total_mb
    seconds = sum(speed["mb"] / speed["whole_step_mb_per_cpu_s"] for speed in speeds.values())
    sample = _sample(texts, config.min_chars)
    others = _OTHERS if arguments.others else ()
    result = {
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "settings": config.__dict__,
        "signatures": speeds,
        "datatrove": _datatrove(arguments.datatrove_python, texts, config),
        "for_280_gb": {
            "million_documents": round(documents / 1e6, 1),
            "signatures_cpu_h": round(seconds / total_mb * _CORPUS_MB / 3600, 2),
            "files_gb": round(documents * (8 * config.bands + minhash.NUM_BINS) / 1e9, 1),
        },
        "recall": _recall(texts, sample, config),
        "by_length": _by_length(texts, config),
        "others": {
            f"{n}, {cjk} cjk, {bands} x {rows}, {threshold}": _recall(
                texts, sample, replace(config, ngram=n, ngram_cjk=cjk, bands=bands, rows=rows,
                                       threshold=threshold),
            )
            for n, cjk, bands, rows, threshold in others
        },
    }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
