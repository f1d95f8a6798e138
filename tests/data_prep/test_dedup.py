"""Equal documents, ids and lines: what is dropped is what plain dictionaries say, in any parts."""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_prep.config import PrepConfig
from data_prep.dedup.lines import NOTHING_NEW
from data_prep.pieces import id_hash, read_lines
from data_prep.stage import SEEN_LINE, Done, StageCounts
from pipeline.config.load import load
from tests.support.prepare import run_before

FILES = 7
LINE_MIN_CHARS = 12
DOCUMENT_MIN_CHARS = 8
WORDS = "the quick brown fox jumps over a lazy dog while wizards make toxic brew"


def _documents() -> list[dict[str, str]]:
    """Copies, repeated ids, lines that many documents have, and some that are not to be kept."""
    rng = np.random.default_rng(0)

    def line(words: int) -> str:
        return " ".join(rng.choice(WORDS.split(), words))

    menus = [line(int(n)) for n in rng.integers(1, 9, 30)]
    texts: list[str] = []
    for _ in range(600):
        kind = rng.random()
        if kind < 0.2 and texts:
            texts.append(texts[int(rng.integers(len(texts)))])
        elif kind < 0.3:
            texts.append("\n".join(rng.choice(menus, int(rng.integers(1, 5)))))
        elif kind < 0.35:
            texts.append(line(1))
        else:
            lines = [line(int(n)) for n in rng.integers(1, 14, int(rng.integers(2, 9)))]
            lines += rng.choice(menus, int(rng.integers(0, 4))).tolist()
            lines += [""] * int(rng.integers(0, 3))
            texts.append("\n".join(rng.permutation(lines)))
    ids = [f"id {i}" for i in range(len(texts))]
    for i in rng.choice(np.arange(1, len(ids)), 25, replace=False):
        ids[i] = ids[int(rng.integers(i))]
    return [{"id": key, "text": text} for key, text in zip(ids, texts, strict=True)]


def _write(folder: Path, documents: list[dict[str, str]]) -> Path:
    """Write as many folders as there are to be pieces, with a part of the documents each."""
    for number, part in enumerate(np.array_split(np.arange(len(documents)), FILES)):
        (folder / str(number)).mkdir(parents=True)
        lines = [json.dumps(documents[i]) for i in part]
        (folder / str(number) / "part.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a source, each a piece."""
    return _write(tmp_path_factory.mktemp("source"), _documents())


def _config(output: Path, source: Path, *overrides: str) -> PrepConfig:
    path = output.with_name(f"{output.name}.yaml")
    names = ", ".join(f"{{name: s{i}, inputs: [{source}/{i}]}}" for i in range(FILES))
    path.write_text(
        f"output_dir: {output}\nworkers: 1\nsources: [{names}]\n"
        f"clean: {{min_chars: {DOCUMENT_MIN_CHARS}}}\n"
        f"dedup: {{line_min_chars: {LINE_MIN_CHARS}}}\n"
        "tokenizer: {vocab_size: 320, model_type: bpe}\n"
        "shards: {block_tokens: 1000, shard_mb: 1, eval_fraction: 0.1}\n"
    )
    return load(PrepConfig, path, list(overrides)).config


Prepared = tuple[Path, dict[str, list[Done]]]


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Work folder and records of all stages before the tokenizer; tests must not change it."""
    data = tmp_path_factory.mktemp("plain") / "data"
    return data / "work", run_before(_config(data, source), "tokenizer")


@pytest.fixture(scope="module")
def with_lines(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The same with dedup.lines."""
    data = tmp_path_factory.mktemp("lines") / "data"
    return data / "work", run_before(_config(data, source, "dedup.lines=true"), "tokenizer")


def _ingested(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("[0-9][0-9][0-9][0-9][0-9].jsonl.zst")):
        for document in read_lines(path):
            yield document["id"], document["text"]


def _files(work: Path, stages: tuple[str, ...]) -> dict[str, bytes]:
    return {f"{stage}/{path.name}": path.read_bytes()
            for stage in stages for path in sorted((work / stage).iterdir())
            if not path.name.endswith(".json")}  # fmt: skip


def test_the_first_of_equal_documents_is_kept(plain: Prepared) -> None:
    work, records = plain
    first: dict[str, str] = {}
    expected, dropped = [], []
    for key, text in _ingested(work / "ingest"):
        expected.append(text not in first)
        if text in first:
            dropped.append({"id": key, "kept": first[text]})
        first.setdefault(text, key)
    keep = np.concatenate([np.load(path) for path in sorted((work / "dedup").glob("*.keep.npy"))])
    assert keep.tolist() == expected
    assert len(dropped) > 100
    lists = sorted((work / "dedup").glob("*.duplicates.jsonl"))
    assert [json.loads(line) for path in lists for line in path.read_text().splitlines()] == dropped
    counts = records["dedup"][0].result["dedup"]
    sizes = np.array([len(text.encode()) for _, text in _ingested(work / "ingest")])
    assert (counts["documents_in"], counts["bytes_out"]) == (len(sizes), sizes[keep].sum())
    assert counts["rejected"] == {"exact duplicate": [len(dropped), int(sizes[~keep].sum())]}


def test_ids_given_twice(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Ids begin with the source's name: one source of all files, and a document that is rejected.
    documents = _documents()
    documents[100] = {"id": documents[0]["id"], "text": "short"}
    for folder in _write(tmp_path / "in", documents).iterdir():
        (folder / "padding.txt").write_text("word " * 200_000)  # so that each is a piece
    given = f"sources=[{{name: s, inputs: [{tmp_path}/in]}}]"
    config = _config(tmp_path / "data", source, given, "piece_mb=1")
    with caplog.at_level(logging.WARNING):
        records = run_before(config, "tokenizer")
    assert len(records["ingest"]) >= FILES
    ids = [document["id"] for document in documents]
    again = [i for i, key in enumerate(ids) if key in ids[:i]]
    result = records["dedup"][0].result
    assert result["repeated_ids"] == len(again)
    assert result["examples"] == [f"s/{ids[i]}" for i in again[:3]]
    assert f"{len(again)} documents" in caplog.text


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("parts", ["workers=2", "workers=1"])
def test_parts_and_workers_change_nothing(
    source: Path, with_lines: Prepared, tmp_path: Path, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = ("lines", "dedup")
    if parts == "workers=1":  # processes of a pool would not see it
        monkeypatch.setattr("data_prep.dedup.exact.PART_DOCUMENTS", 60)
        monkeypatch.setattr("data_prep.dedup.lines.PART_LINES", 90)
    records = run_before(
        _config(tmp_path / "parts", source, "dedup.lines=true", parts), "tokenizer"
    )
    if parts == "workers=1":
        assert len(records["exact"]) == 11
        assert len(records["line_parts"]) > 10
    whole = _files(with_lines[0], stages)
    assert whole == _files(tmp_path / "parts/work", stages)
    assert len(whole) == FILES * 8


def _without_seen_lines(text: str, seen: set[str]) -> tuple[str, list[str]]:
    """What is left of a text, and the lines that went."""
    left: list[str] = []
    gone = []
    for line in text.split("\n"):
        if len(line) >= LINE_MIN_CHARS and line in seen:
            gone.append(line)
            continue
        if len(line) >= LINE_MIN_CHARS:
            seen.add(line)
        left.append(line)
    joined = "\n".join(left)
    while gone and "\n\n\n" in joined:
        joined = joined.replace("\n\n\n", "\n\n")
    return joined.strip("\n") if gone else text, gone


def test_lines_that_were_seen_before_are_dropped(with_lines: Prepared) -> None:
    work, records = with_lines
    seen: set[str] = set()
    expected, rejected, lost = [], [], 0
    for key, text in _ingested(work / "ingest"):
        left, gone = _without_seen_lines(text, seen)
        lost += len(gone)
        if gone and not any(len(line) >= LINE_MIN_CHARS for line in left.split("\n")):
            rejected.append((key, NOTHING_NEW, text))
        elif len(left) < DOCUMENT_MIN_CHARS:
            rejected.append((key, f"shorter than {DOCUMENT_MIN_CHARS} characters", text))
        else:
            expected.append((key, left))
    assert list(_ingested(work / "lines")) == expected
    aside = [record for path in sorted((work / "lines").glob("*.rejected.jsonl.zst"))
             for record in read_lines(path)]  # fmt: skip
    assert [(r["id"], r["reason"], r["raw"]) for r in aside] == rejected
    counts = StageCounts.total(done.result["lines"] for done in records["lines"])
    assert counts.rejected[SEEN_LINE][0] == lost > 300
    assert counts.rejected[NOTHING_NEW][0] == sum(r[1] == NOTHING_NEW for r in rejected) > 50
    assert counts.documents_in - counts.documents_out == len(rejected)
    assert counts.bytes_out == sum(len(text.encode()) for _, text in expected)
    assert counts.bytes_in - counts.bytes_out == sum(size for _, size in counts.rejected.values())


def test_rewritten_pieces_are_as_ingestion_writes_them(with_lines: Prepared) -> None:
    ingest, lines = with_lines[0] / "ingest", with_lines[0] / "lines"
    assert {path.name for path in ingest.iterdir()} == {path.name for path in lines.iterdir()}
    for number in range(FILES):
        name = f"{number:05d}"
        documents = list(read_lines(lines / f"{name}.jsonl.zst"))
        assert documents
        encoded = [document["text"].encode() for document in documents]
        assert np.load(lines / f"{name}.bytes.npy").tolist() == [len(text) for text in encoded]
        hashes = [hashlib.blake2b(text, digest_size=16).digest() for text in encoded]
        assert np.load(lines / f"{name}.hashes.npy").tobytes() == b"".join(hashes)
        ids = [document["id"] for document in documents]
        assert list(read_lines(lines / f"{name}.ids.jsonl.zst")) == ids
        ingested = [document["id"] for document in read_lines(ingest / f"{name}.jsonl.zst")]
        assert list(read_lines(ingest / f"{name}.ids.jsonl.zst")) == ingested
        id_hashes = np.load(lines / f"{name}.id_hashes.npy")
        assert (id_hashes == np.load(ingest / f"{name}.id_hashes.npy")).all()
        assert {id_hash(key) for key in ids} <= set(id_hashes.tolist())


def test_lists_name_the_first_of_every_piece(
    source: Path, plain: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plain[0], tmp_path / "few/work", ignore=shutil.ignore_patterns("dedup"))
    monkeypatch.setattr("data_prep.pieces.LISTED", 3 * FILES + 1)
    run_before(_config(tmp_path / "few", source), "tokenizer")
    for number in range(FILES):
        path = Path("dedup") / f"{number:05d}.duplicates.jsonl"
        named = (plain[0] / path).read_text().splitlines()
        assert (tmp_path / "few/work" / path).read_text().splitlines() == named[:3]
