"""The whole preparation: resumed after kills, reproducible, read by stock tools, bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data_prep import embedded
from data_prep.run import run
from data_prep.shards import plan
from pipeline.data.format import MEMBERS, DatasetIndex, read_index
from pipeline.data.reader import BlockReader
from pipeline.errors import DataError
from pipeline.runtime.files import temporary_beside
from pipeline.tokenizer.sentencepiece import Tokenizer
from tests.support.prepare import config_of


def _shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shards/*.tar"))}


def test_stock_webdataset_and_tar_read_the_shards(dataset: DatasetIndex) -> None:
    tokens = 0
    for shard in dataset.shards:
        path = dataset.folder / shard.file
        listed = subprocess.run(["tar", "tf", path], capture_output=True, text=True, check=True)
        assert listed.stdout.split() == [f"{key}.{name}" for key in shard.keys for name in MEMBERS]
        samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
        assert [sample["__key__"] for sample in samples] == list(shard.keys)
        for sample in samples:
            assert sample["tokens.npy"].dtype == np.uint16
            assert sample["docs.npy"][-1] == len(sample["tokens.npy"])
            tokens += len(sample["tokens.npy"])
    assert tokens == sum(split["tokens"] for split in dataset.totals.values())


def test_documents_come_back_as_text(dataset: DatasetIndex, corpus: Path) -> None:
    texts = {}
    for line in corpus.read_text().splitlines():
        record = json.loads(line)
        texts[f"topics/{record['id']}"] = unicodedata.normalize("NFKC", record["text"])
    tokenizer = Tokenizer(dataset.folder / dataset.tokenizer_file)
    reader = BlockReader(dataset)
    seen = []
    for row in range(len(dataset.blocks)):
        block = reader.block(row)
        parts = np.split(block.tokens, block.doc_ends[:-1])
        for document_id, ids in zip(block.document_ids, parts, strict=True):
            seen.append(document_id)
            expected = " ".join(texts[document_id].split())
            assert " ".join(tokenizer.decode(ids.tolist()).split()) == expected
    assert len(seen) == len(set(seen))
    report = json.loads((dataset.folder / "report.json").read_text())
    rejected = sum(
        count for stage in report["stages"].values() for count, _ in stage["rejected"].values()
    )
    assert len(seen) + rejected == len(texts)


def test_splits_are_disjoint_and_the_entropy_is_that_of_training(dataset: DatasetIndex) -> None:
    reader = BlockReader(dataset)
    train, held_out = (
        {i for row in dataset.split_blocks(split) for i in reader.block(int(row)).document_ids}
        for split in ("train", "eval")
    )
    assert not train & held_out
    # 5% of about 600 documents: standard deviation 0.9%.
    assert 0.02 < len(held_out) / len(held_out | train) < 0.09
    tokens = np.concatenate([reader.block(int(r)).tokens for r in dataset.split_blocks("train")])
    share = np.unique(tokens, return_counts=True)[1] / len(tokens)
    assert dataset.unigram_entropy_nats == pytest.approx(-(share * np.log(share)).sum())


def test_a_second_run_makes_the_same_and_only_what_is_missing(
    dataset: DatasetIndex, prep_config: Path, corpus: Path, tmp_path: Path
) -> None:
    run(config_of(prep_config, tmp_path / "again", corpus, "workers=2"))
    assert read_index(tmp_path / "again").fingerprint == dataset.fingerprint
    assert _shard_bytes(tmp_path / "again") == _shard_bytes(dataset.folder)
    shutil.copytree(dataset.folder, tmp_path / "data")
    shards = sorted((tmp_path / "data" / "shards").glob("*.tar"))
    before = {path: path.stat().st_mtime_ns for path in shards}
    shards[0].unlink()
    run(config_of(prep_config, tmp_path / "data", corpus))
    after = {path: path.stat().st_mtime_ns for path in shards}
    assert after[shards[0]] > before[shards[0]]
    tokenizer = tmp_path / "data" / "work" / "tokenizer" / "tokenizer.model"
    assert tokenizer.stat().st_mtime_ns < after[shards[0]]


@pytest.mark.usefixtures("processes")
def test_killed_run_continues_to_the_same_dataset(
    dataset: DatasetIndex, prep_config: Path, corpus: Path, tmp_path: Path
) -> None:
    source = f"sources=[{{name: topics, inputs: [{corpus}]}}]"
    output = tmp_path / "data"
    command = [sys.executable, "-m", "data_prep", "run", str(prep_config), f"output_dir={output}",
               source]  # fmt: skip
    draw = random.Random(0)
    for attempt in range(100):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        # Killed while a task runs, each time that one more is done, until it gets through.
        while process.poll() is None and not _running(output, behind=attempt):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0
    assert attempt > 3, "the run was never killed"
    assert read_index(output).fingerprint == dataset.fingerprint
    assert _shard_bytes(output) == _shard_bytes(dataset.folder)


def _running(output: Path, behind: int) -> bool:
    """Whether a task runs now, and at least `behind` are done."""
    done = len(list(output.rglob("*.done.json")))
    return done >= behind and bool(list(output.rglob("*.running.json")))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("content", "overrides", "message"), [
    (b"", [], "the corpus is empty"), (b"\xff\xff\n", [], "100.0% of its rows or bytes"),
    (b"few words here\n", [], r"tokenizer.vocab_size=1000 does not fit"),
    (b"x" * 2_500_000, ["clean.max_document_mb=2"], "clean.max_document_mb = 2 MB"),
], ids=["empty", "all invalid", "vocabulary", "too long"])  # fmt: skip
def test_bad_corpus_fails_and_leaves_an_earlier_dataset_alone(
    dataset: DatasetIndex, prep_config: Path, tmp_path: Path, content: bytes, overrides: list[str],
    message: str,
) -> None:  # fmt: skip
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    with pytest.raises(DataError, match=message):
        run(config_of(prep_config, tmp_path / "new", bad, *overrides))
    assert not (tmp_path / "new" / "index.json").exists()
    (tmp_path / "old").mkdir()
    for name in ("index.json", "report.json", "resolved.yaml"):
        shutil.copy(dataset.folder / name, tmp_path / "old")
    with pytest.raises(DataError, match="other inputs"):
        run(config_of(prep_config, tmp_path / "old", bad, *overrides))
    before = (dataset.folder / "index.json").read_bytes()
    assert (tmp_path / "old" / "index.json").read_bytes() == before


def test_what_killed_starts_left_is_ours(prep_config: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    temporary_beside(tmp_path / "data/resolved.yaml").touch()
    assert run(config_of(prep_config, tmp_path / "data", corpus))["key"]


@pytest.mark.parametrize(("output", "said"), [
    ("mine", r"not the folder of a dataset: it holds index\.json, notes\.txt"), ("file", "a file"),
    ("texts/data", r"inside the input '.*texts'"), ("texts", "it holds a.jsonl"),
    ("globbed/2/data", r"inside the input '.*globbed/2'"),
])  # fmt: skip
def test_output_that_would_spoil_something_is_refused(
    prep_config: Path, tmp_path: Path, output: str, said: str
) -> None:
    for name in ("mine/notes.txt", "mine/index.json", "texts/a.jsonl", "globbed/2/a.jsonl", "file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    inputs = tmp_path / ("globbed/*" if output.startswith("globbed") else "texts")
    with pytest.raises(DataError, match=said):
        run(config_of(prep_config, tmp_path / output, inputs))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_shard_plan_keeps_order_and_size() -> None:
    groups = plan([100_000_000] * 10, shard_mb=150)
    assert [i for group in groups for i in group] == list(range(10))
    assert {len(group) for group in groups[:-1]} <= {2, 3}
    assert plan([5], shard_mb=100) == [[0]]


@pytest.mark.slow
def test_embedded_corpus_has_ten_megabytes_of_prose() -> None:
    total, kinds, of = 0, set(), 20
    for path, name in embedded.find()[::of]:
        for place, text in embedded.documents(path, name):
            total += len(text)
            kinds.add(path.suffix or path.name)
            assert place.startswith(("stdlib/", "packages/"))
    assert of * total >= 10_000_000
    assert {".py", "METADATA"} <= kinds


def test_embedded_corpus_imports_nothing(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""' + "Words about this module. " * 5 + '"""\nraise SystemExit("imported")\n'
        "class A:\n    def f(self):\n        '''" + "What f does, and why. " * 5 + "'''\n"
    )
    found = dict(embedded.documents(path, "packages/module.py"))
    assert list(found) == ["packages/module.py:module", "packages/module.py:A@3.f@4"]
