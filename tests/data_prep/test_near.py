"""Near duplicates: planted copies are found, unrelated documents stay, whatever runs where.

`tests/support/near_texts.py` says what the texts and the edits are: real English, synthetic Chinese
and both mixed, a tenth of the characters edited in runs ("words") or one by one ("characters").
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from data_prep.config import DedupConfig, PrepConfig
from data_prep.dedup.minhash import (
    LONG_FROM,
    SHORT_BELOW,
    agreements,
    bins_of_bands,
    fold,
    signatures,
    similarity,
)
from data_prep.dedup.near import REASON, bucket_pairs, settings_of
from pipeline.config.load import load
from pipeline.errors import ConfigError
from tests.support.grids import first_in_ci
from tests.support.near_texts import chinese, edited, english, exact_jaccard, exact_shingles, mixed
from tests.support.prepare import run_before

DEFAULT = DedupConfig()
# For small corpora: English copies with edits of single characters have a Jaccard similarity of
# 0.42 in shingles of five characters, which enough unrelated documents of a large corpus share.
SENSITIVE = replace(DEFAULT, ngram=5, rows=4, threshold=0.3)
# Tests of anything else than recall need no more.
SMALL = replace(DEFAULT, bands=40, rows=4)
RUN = {"english": 5, "chinese": 2, "mixed": 2}
COPIES = 200
NIGHTLY = partial(pytest.param, marks=pytest.mark.slow)


def _estimate(first: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
    """Jaccard similarity from two sketches."""
    return float(similarity(agreements(first, other)))


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Originals; topics that quote each other are left out by exact similarity."""
    unrelated: list[str] = []
    shingles: list[set[str]] = []
    for text in english():
        own = exact_shingles(text, settings_of(SENSITIVE))
        if all(exact_jaccard(own, other) < 0.25 for other in shingles):
            unrelated.append(text)
            shingles.append(own)
    return {"english": unrelated, "chinese": chinese(np.random.default_rng(1), 400),
            "mixed": mixed(np.random.default_rng(5), COPIES)}  # fmt: skip


def _config(output: Path, source: Path, dedup: DedupConfig, *overrides: str) -> PrepConfig:
    values = {**dedup.__dict__, "near_duplicates": True}
    text = ", ".join(f"{key}: {str(value).lower()}" for key, value in values.items())
    path = output.with_name(f"{output.name}.yaml")
    path.write_text(
        f"output_dir: {output}\nworkers: 1\nsources: [{{name: s, inputs: [{source}]}}]\n"
        "tokenizer: {vocab_size: 2000, character_coverage: 0.98}\n"
        f"shards: {{block_tokens: 8000, shard_mb: 1, eval_fraction: 0.05}}\ndedup: {{{text}}}\n"
    )
    return load(PrepConfig, path, list(overrides)).config


def _write(folder: Path, documents: list[tuple[str, str]], files: int) -> Path:
    """Files of more than a megabyte are pieces of their own with piece_mb=1."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(documents)), files)):
        lines = [json.dumps(dict(zip(("id", "text"), documents[i], strict=True))) for i in part]
        (folder / f"{number:03d}.jsonl").write_text("\n".join(lines))
    return folder


def _dropped(output: Path) -> dict[str, tuple[str, float]]:
    """id -> kept id and estimated similarity."""
    lines = map(json.loads, _result(output)[0].splitlines())
    return {line["id"]: (line["kept"], line["jaccard"]) for line in lines}


@pytest.mark.parametrize(("language", "style", "config"), [
    ("english", "words", DEFAULT), ("chinese", "characters", DEFAULT),
    NIGHTLY("chinese", "words", DEFAULT), NIGHTLY("mixed", "words", DEFAULT),
    NIGHTLY("mixed", "characters", DEFAULT), NIGHTLY("english", "characters", SENSITIVE),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_copies_are_found_and_unrelated_documents_stay(
    texts: dict[str, list[str]], tmp_path: Path, language: str, style: str, config: DedupConfig
) -> None:
    # Of 800 copies each, 99.7% or more were found; seeds are fixed. Of all pairs of originals,
    # 79,800 Chinese, 37,000 English and 19,900 mixed ones, none may be merged. English with edits
    # of single characters needs other settings: by default 70% are found.
    rng = np.random.default_rng(2)
    originals = texts[language]
    assert len(originals) >= COPIES
    run_length = RUN[language] if style == "words" else 1
    copies = [edited(text, rng, run_length) for text in originals[:COPIES]]
    documents = [(f"original-{i}", text) for i, text in enumerate(originals)]
    documents += [(f"copy-{i}", text) for i, text in enumerate(copies)]
    records = run_before(
        _config(tmp_path / "data", _write(tmp_path / "in", documents, 3), config), "tokenizer"
    )
    dropped = _dropped(tmp_path / "data")
    right = {f"s/copy-{i}": f"s/original-{i}" for i in range(COPIES)}
    assert {key: kept for key, (kept, _) in dropped.items()}.items() <= right.items()
    assert len(dropped) / COPIES >= 0.95
    near = records["near"][0].result["near"]
    assert near["rejected"][REASON] == [len(dropped), near["bytes_in"] - near["bytes_out"]]
    assert near["documents_in"] == len(documents)


def _independent(shingles: int, bins: int = 256) -> float:
    """How many independent values an estimate from `bins` values is worth.

    `full` bins get a shingle, each counts once and once more for every empty bin that takes its
    minimum, a binomial number; the mean of values with weights w is worth sum(w)^2 / sum(w^2).
    """
    full = bins * (1 - (1 - 1 / bins) ** shingles)
    taken = (bins - full) / full
    return float(bins**2 / (full * ((1 + taken) ** 2 + taken)))


@pytest.mark.long
@pytest.mark.parametrize(("language", "length"), [
    ("english", 250), ("chinese", 1500), ("english", 40_000), NIGHTLY("chinese", 250),
    NIGHTLY("english", 1500), NIGHTLY("chinese", 40_000),
])  # fmt: skip
def test_estimate_is_exact_enough(texts: dict[str, list[str]], language: str, length: int) -> None:
    """Within 4 standard errors; also with fewer shingles than bins, and beyond a window."""
    rng = np.random.default_rng(3)
    settings = settings_of(DEFAULT)
    whole = " ".join(texts[language])
    errors = []
    for share in np.linspace(0, 0.3, 40):
        first = ""
        while fold([first])[1][0] < 0.6 * length:
            start = int(rng.integers(0, len(whole) - length))
            first = whole[start : start + length]
        other = edited(first, rng, 3, float(share))
        pair = [exact_shingles(text, settings) for text in (first, other)]
        exact = exact_jaccard(*pair)
        signed = signatures(["x" * 999, first, other], settings)
        assert signed.bands.all()
        # Every false agreement of two sketches of a byte adds to the variance, at most 1/256.
        variance = exact * (1 - exact) / _independent(len(set.union(*pair))) + 1 / 256 / 256
        errors.append((_estimate(*signed.sketch[1:]) - exact) / np.sqrt(variance))
    assert np.abs(errors).max() < 4
    assert abs(np.mean(errors)) < 4 / np.sqrt(len(errors))


def test_signature_depends_on_the_text_alone(texts: dict[str, list[str]]) -> None:
    settings = settings_of(DEFAULT)
    mixed = [*texts["english"][:20], "", "short", *texts["chinese"][:20]]
    together = signatures(mixed, settings)
    for row, text in enumerate(mixed):
        alone = signatures([text], settings)
        assert (alone.bands[0] == together.bands[row]).all()
        assert (alone.sketch[0] == together.sketch[row]).all()
        assert bool(alone.bands.any()) == (len(text) > 100)
    spaced = signatures([f"  {mixed[0].upper()} !?"], settings)
    assert (spaced.bands[0] == together.bands[0]).all()


def test_bands_share_few_bins_and_pairs_join_with_the_first_and_the_one_before() -> None:
    bins = bins_of_bands(600, 5)
    assert (np.bincount(bins[:256].ravel(), minlength=256) == 5).all()
    assert all(len(set(row)) == 5 for row in bins.tolist())
    shared = [len(set(a) & set(b)) for a, b in combinations(bins.tolist(), 2)]
    assert max(shared) <= 3
    assert np.mean(shared) < 0.11
    hashes = np.array([5, 7, 5, 9, 7, 5, 5], dtype=np.uint64)
    pairs = bucket_pairs(hashes, np.array([10, 11, 12, 13, 14, 15, 16], dtype=np.uint32)).tolist()
    expected = [(10, 12), (10, 15), (10, 16), (11, 14), (12, 15), (15, 16)]
    assert [(pair % 2**32, pair // 2**32) for pair in pairs] == sorted(
        expected, key=lambda p: p[::-1]
    )


def test_documents_of_few_shingles(texts: dict[str, list[str]]) -> None:
    """Where hardly any bin is full: found equal, and unlike others."""
    few = ["a" * 300, "A " * 150, "ab" * 150, "甲" * 300, "甲乙丙" * 100, "甲" * 400]
    signed = signatures([*few, texts["english"][0]], settings_of(DEFAULT))
    assert signed.bands.all()
    equal = [[_estimate(a, b) == 1 for a in signed.sketch] for b in signed.sketch]
    assert np.argwhere(np.triu(equal, 1)).tolist() == [[0, 1], [3, 5]]


def _book(rng: np.random.Generator, letters: int, language: str) -> str:
    """Words of one vocabulary by Zipf's law: unrelated ones share most short shingles."""
    if language == "chinese":
        return "".join(chinese(rng, 1 + letters // 900))[:letters]
    words = sorted(set(" ".join(english()).split()))
    rank = 1 / np.arange(1, len(words) + 1)
    drawn = rng.choice(len(words), letters // 4, p=rank / rank.sum())
    return " ".join(words[number] for number in drawn)[: letters * 5 // 4]


@pytest.mark.long
@pytest.mark.parametrize("language", first_in_ci(["chinese", "english"]))
def test_length_does_not_make_documents_alike(language: str) -> None:
    rng = np.random.default_rng(6)
    sizes = (20_000, LONG_FROM + 20_000, SHORT_BELOW + 20_000, 600_000)
    books = [_book(rng, size, language) for size in sizes for _ in range(3)]
    copies = [edited(book, rng, RUN[language]) for book in books]
    other = _book(rng, 500_000, language)
    # A chapter more, and other front matter: the length passes from one kind of shingles to both.
    for book in books:
        third = len(book) // 3
        copies += [book[:third] + other[:third] + book[third:], other[-third:] + book[third:]]
    signed = signatures(books, settings_of(DEFAULT)), signatures(copies, settings_of(DEFAULT))
    assert [{int(row[-1]) for row in one.sketch} for one in signed] == [{1, 2, 3}, {1, 2, 3}]
    own, of_copies = (one.sketch[:, None] for one in signed)
    unrelated = similarity(agreements(own, signed[0].sketch[None]))[np.triu_indices(len(books), 1)]
    print(f"{language}: unrelated at most {unrelated.max():.3f}")
    assert unrelated.max() < DEFAULT.threshold - 0.08
    of = [*range(len(books)), *(number for number in range(len(books)) for _ in range(2))]
    assert similarity(agreements(signed[0].sketch[of], of_copies[:, 0])).min() > DEFAULT.threshold
    assert (signed[0].bands[of] == signed[1].bands).any(axis=1).all()


@pytest.mark.long
def test_documents_of_all_kinds_meet_in_order(tmp_path: Path) -> None:
    """Each is compared with what it has in common with another; a source has its own threshold."""
    rng = np.random.default_rng(8)
    text = _book(rng, 2 * SHORT_BELOW, "english")
    cuts = {"long": 1.0, "both": 0.65, "both again": 0.4, "short": 0.2}
    documents = [(name, text[: int(len(text) * share)]) for name, share in cuts.items()]
    documents += [("unrelated", _book(rng, 2 * SHORT_BELOW, "english"))]
    kinds = signatures([text for _, text in documents], settings_of(DEFAULT)).sketch[:, -1]
    assert kinds.tolist() == [2, 3, 3, 1, 2]
    source = _write(tmp_path / "in", documents, 1)
    run_before(_config(tmp_path / "data", source, DEFAULT), "tokenizer")
    # "short" is like "both again" alone, which is dropped for the long one.
    found = {name: kept for name, (kept, _) in _dropped(tmp_path / "data").items()}
    assert found == {"s/both": "s/long", "s/both again": "s/long"}
    config = _config(tmp_path / "own", source, DEFAULT, "sources.0.near_threshold=0.95")
    run_before(config, "tokenizer")
    assert _dropped(tmp_path / "own") == {}


def _chain(texts: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Originals, each with seven generations of copies, mixed; and exact duplicates."""
    rng = np.random.default_rng(4)
    documents = []
    for i, text in enumerate(texts["english"][:80] + texts["chinese"][:80]):
        for generation in range(8):
            documents.append((f"{i}/{generation}", text))
            text = edited(text, rng, 4, 0.1)
    documents = [documents[i] for i in rng.permutation(len(documents))]
    return [*documents, *((f"again {name}", text) for name, text in documents[:50])]


def _reference(documents: list[tuple[str, str]], config: DedupConfig) -> tuple[dict[int, int], int]:
    """Dropped document -> kept one, by the rule; and how many were compared beyond the pairs."""
    signed = signatures([text for _, text in documents], settings_of(config))
    first = {text: i for i, (_, text) in reversed(list(enumerate(documents)))}
    earlier: dict[int, set[int]] = defaultdict(set)
    for band in range(config.bands):
        buckets: dict[int, list[int]] = defaultdict(list)
        for i, (_, text) in enumerate(documents):
            if signed.bands[i, band] and first[text] == i:
                buckets[int(signed.bands[i, band])].append(i)
        for members in buckets.values():
            for place in range(1, len(members)):
                earlier[members[place]] |= {members[0], members[place - 1]}
    kept_for: dict[int, int] = {}
    beyond = 0
    for i in range(len(documents)):
        for candidate in sorted(earlier[i]):
            kept = kept_for.get(candidate, candidate)
            beyond += kept not in earlier[i]
            if _estimate(signed.sketch[kept], signed.sketch[i]) >= config.threshold:
                kept_for[i] = kept
                break
    return kept_for, beyond


def _result(output: Path) -> tuple[str, list[bool]]:
    near = output / "work/near"
    lines = "".join(path.read_text() for path in sorted(near.glob("*.near.jsonl")))
    masks = [np.load(path) for path in sorted(near.glob("*.keep.npy"))]
    return lines, np.concatenate(masks).tolist()


@pytest.fixture(scope="module")
def straight(
    texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Input folder, and what was made of it in one go."""
    folder = tmp_path_factory.mktemp("near")
    source = _write(folder / "in", _chain(texts), 4)
    run_before(_config(folder / "data", source, SMALL, "piece_mb=1"), "tokenizer")
    return source, folder / "data"


@pytest.mark.long
def test_the_rule_says_what_drops(texts: dict[str, list[str]], straight: tuple[Path, Path]) -> None:
    documents = _chain(texts)
    expected, beyond = _reference(documents, SMALL)
    assert len(expected) > 600
    assert beyond > 100
    order = {f"s/{name}": i for i, (name, _) in enumerate(documents)}
    dropped = _dropped(straight[1])
    assert {order[name]: order[kept] for name, (kept, _) in dropped.items()} == expected
    keep = _result(straight[1])[1]
    for name, (kept, jaccard) in dropped.items():
        assert keep[order[kept]]
        assert not keep[order[name]]
        assert name.split("/")[1] == kept.split("/")[1]
        pair = [
            exact_shingles(documents[order[key]][1], settings_of(SMALL)) for key in (name, kept)
        ]
        assert abs(exact_jaccard(*pair) - jaccard) < 4 * np.sqrt(0.25 / 200)
    assert sum(keep) == len(documents) - 50 - len(dropped)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("overrides", [["workers=2", "piece_mb=1"], ["piece_mb=100"]])
def test_workers_pieces_and_parts_change_nothing(
    straight: tuple[Path, Path], tmp_path: Path, overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    small = {"PART_DOCUMENTS": 700, "GROUP_DOCUMENTS": 430, "_RUN_PAIRS": 1000, "_CHUNK_PAIRS": 10,
             "_BLOCK_PAIRS": 5, "_OPEN_FILES": 1, "_CACHED_ROWS": 3}  # fmt: skip
    if "workers=2" not in overrides:  # processes of a pool would not see it
        monkeypatch.setattr("data_prep.dedup.exact.PART_DOCUMENTS", 100)
        monkeypatch.setattr("data_prep.pieces._BATCH_DOCUMENTS", 7)
        for name, value in small.items():
            monkeypatch.setattr(f"data_prep.dedup.near.{name}", value)
    records = run_before(_config(tmp_path / "data", straight[0], SMALL, *overrides), "tokenizer")
    if "workers=2" not in overrides:
        assert [len(records[name]) for name in ("exact", "buckets", "candidates")] == [14, 80, 4]
    assert _result(tmp_path / "data") == _result(straight[1])


@pytest.mark.usefixtures("processes")
def test_killed_run_gives_the_same_bytes(straight: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "data"
    _config(output, straight[0], SMALL)
    command = [sys.executable, "-m", "data_prep", "run", f"{output}.yaml", "piece_mb=1",
               "workers=2"]  # fmt: skip
    killed_in = []
    for stage, files in (("signatures", 1), ("buckets", 5), ("candidates", 1), ("near", 1)):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while process.poll() is None:
            if len(list((output / "work" / stage).glob("*"))) >= files:
                os.killpg(process.pid, signal.SIGKILL)
                killed_in.append(stage)
                break
            time.sleep(0.002)
        process.wait()
    assert killed_in == ["signatures", "buckets", "candidates", "near"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert _result(output) == _result(straight[1])
    report = json.loads((output / "report.json").read_text())
    assert report["stages"]["shards"]["documents_in"] == sum(_result(output)[1])


@pytest.mark.long
def test_another_threshold_repeats_one_stage(straight: tuple[Path, Path], tmp_path: Path) -> None:
    config = _config(tmp_path / "data", straight[0], SMALL, "piece_mb=1")
    shutil.copytree(straight[1], tmp_path / "data")
    work = tmp_path / "data/work"
    before = {path: path.stat().st_mtime_ns for path in work.glob("*/*")}
    records = run_before(replace(config, dedup=replace(config.dedup, threshold=0.8)), "tokenizer")
    after = {path: path.stat().st_mtime_ns for path in work.glob("*/*")}
    assert {path.parent.name for path in after if after[path] != before[path]} == {"near"}
    assert 0 < records["near"][0].result["near"]["rejected"][REASON][0] < len(_dropped(straight[1]))


def test_off_by_default_and_shingles_must_fit(straight: tuple[Path, Path], tmp_path: Path) -> None:
    off = replace(_config(tmp_path / "data", straight[0], DEFAULT), dedup=DEFAULT)
    assert "near" not in run_before(off, "tokenizer")
    with pytest.raises(ConfigError, match=r"dedup\.min_chars = 4"):
        DedupConfig(min_chars=4)
