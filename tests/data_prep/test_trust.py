"""A chain that notices: two runs at once, damaged intermediate files, documents that go missing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from backports import zstd

from data_prep import corpus
from data_prep.config import PrepConfig
from data_prep.inputs import find
from data_prep.run import run
from data_prep.stage import recorded_sha256, task_name
from pipeline.config.load import load
from pipeline.data.format import DatasetIndex, read_index
from pipeline.errors import EXIT_FAILED_RETRY, DataError
from tests.support.damage import flip
from tests.support.prepare import config_of, read_source, texts_of


@pytest.fixture
def copied(dataset: DatasetIndex, tmp_path: Path) -> Path:
    """A finished dataset with its work folder, to be damaged."""
    shutil.copytree(dataset.folder, tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.usefixtures("processes")
def test_two_runs_in_one_folder_do_not_mix(
    dataset: DatasetIndex, prep_config: Path, corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "data"
    command = [sys.executable, "-m", "data_prep", "run", str(prep_config), f"output_dir={output}",
               f"sources=[{{name: topics, inputs: [{corpus}]}}]"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while not list(output.rglob("*.running.json")):
            assert first.poll() is None
            time.sleep(0.01)
        # On a busy machine it would have ended before another one has imported its modules.
        first.send_signal(signal.SIGSTOP)
        try:
            for more in ([], ["clean.min_chars=1000"]):
                second = subprocess.run([*command, *more], capture_output=True, text=True)
                assert second.returncode == EXIT_FAILED_RETRY
                assert f"process {first.pid}" in second.stderr + second.stdout
        finally:
            first.send_signal(signal.SIGCONT)
    assert first.returncode == 0
    assert read_index(output).fingerprint == dataset.fingerprint


@pytest.mark.parametrize("name", ["ingest/00000.jsonl.zst", "ingest/00000.bytes.npy"])
def test_flipped_bits_stop_it(copied: Path, prep_config: Path, corpus: Path, name: str) -> None:
    flip(copied / "work" / name)
    # Stages that come after it are made, the stage that wrote it is not.
    changed = config_of(prep_config, copied, corpus, "dedup.near_duplicates=true", "dedup.bands=4")
    with pytest.raises(DataError, match=r"remove .*00000\.done\.json"):
        run(changed, replace=True)
    (copied / "work" / "ingest" / "00000.done.json").unlink()
    run(changed, replace=True)


def test_counts_must_add_up(copied: Path, prep_config: Path, corpus: Path) -> None:
    marker = copied / "work" / "dedup" / "all.done.json"
    record = json.loads(marker.read_bytes())
    record["result"]["dedup"]["documents_out"] -= 1
    marker.write_text(json.dumps(record))
    with pytest.raises(DataError, match="add up in stage dedup"):
        run(config_of(prep_config, copied, corpus))


def test_texts_carry_checksums_and_empty_files_are_frames(dataset: DatasetIndex) -> None:
    work = dataset.folder / "work" / "ingest"
    texts = sorted(work.glob("*.zst"))
    assert texts
    for path in texts:
        head = path.read_bytes()[:5]
        assert head[:4] == bytes.fromhex("28b52ffd"), path
        assert head[4] & 4, path  # RFC 8878, section 3.1.1.1.1: Content_Checksum_flag
    assert zstd.decompress((work / "00000.rejected.jsonl.zst").read_bytes()) == b""


def test_links_in_a_folder_are_followed_once_and_loops_are_not(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "deep" / "a.txt").write_text("a")
    (tmp_path / "far" / "b.txt").write_text("b")
    given = tmp_path / "given"
    given.mkdir()
    (given / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "deep" / "up").symlink_to(tmp_path / "far")
    (given / "file.txt").symlink_to(tmp_path / "far" / "b.txt")
    [source] = _source(given).sources
    listing = find(source)
    assert {file.name for file in listing.files} == {"file.txt", "linked/deep/a.txt"}
    assert not listing.unreadable


def test_a_link_says_the_format_of_the_file_behind_it(tmp_path: Path) -> None:
    # As in the cache of Hugging Face's hub.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "9f8c").write_text('{"text": "words"}\n')
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "train.jsonl").symlink_to(tmp_path / "blobs" / "9f8c")
    assert texts_of(read_source(tmp_path / "given")) == ["words"]


def test_what_is_skipped_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert len(corpus.find(_source(tmp_path, "skip")).unreadable) == 1
    assert "gone.txt" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(DataError, match="closed"):
        corpus.find(_source(tmp_path))


def test_three_documents_make_a_dataset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = " ".join(f"{word} of document" for word in sys.stdlib_module_names)
    (tmp_path / "a.txt").write_text("\n\n".join(text[i : i + 3000] for i in (0, 1000, 2000)))
    config = tmp_path / "prep.yaml"
    config.write_text(
        f"output_dir: {tmp_path}/out\nsources: [{{name: s, inputs: [{tmp_path}/a.txt]}}]"
    )
    report = run(load(PrepConfig, config).config)
    assert report["totals"]["eval"]["documents"] == 1
    assert report["totals"]["train"]["documents"] == 2
    assert "50,000" in caplog.text


def _source(folder: Path, on_unreadable: str = "stop") -> PrepConfig:
    text = f"sources=[{{name: s, inputs: [{folder}], on_unreadable: {on_unreadable}}}]"
    return load(PrepConfig, "configs/prep/demo.yaml", [text, f"output_dir={folder}-out"]).config


def test_files_of_later_tasks_are_compared_with_their_record(tmp_path: Path) -> None:
    for number in (5, 1005):
        path = tmp_path / f"{task_name(number, 5)}.jsonl.zst"
        path.parent.mkdir(exist_ok=True)
        files = {str(path.relative_to(tmp_path)): {"bytes": 1, "sha256": f"of {number}"}}
        path.with_name(f"{number:05d}.done.json").write_text(json.dumps({"files": files}))
        assert recorded_sha256(path) == f"of {number}"
    assert recorded_sha256(tmp_path / "00006.jsonl.zst") is None
