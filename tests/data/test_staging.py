"""Shards staged on the node: the same batches, one copy a node, and never half a shard."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.verify import verify
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import Blocks, DatasetIndex, index_bytes, read_index
from pipeline.data.reader import BlockReader, refuse_unlisted
from pipeline.data.run_order import DataRank
from pipeline.data.staging import stage
from pipeline.errors import ConfigError, DataError
from pipeline.runtime import env
from tests.support.damage import flip, needs_mount
from tests.support.ranks import CONFIG, Ranks
from tests.support.steps import eval_loader, train_loader

ROOT = Path(__file__).parents[2]


def _program(index: DatasetIndex, stage_dir: Path, *stop_after: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.staging_main", str(index.folder), str(stage_dir),
            *stop_after]  # fmt: skip


@contextmanager
def _staging(
    index: DatasetIndex, stage_dir: Path, *stop_after: str
) -> Iterator["subprocess.Popen[str]"]:
    """A process that stages; one that stops itself has done so when this enters."""
    with subprocess.Popen(
        _program(index, stage_dir, *stop_after), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            if stop_after:
                _, status = os.waitpid(process.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status)
            yield process
        finally:
            process.kill()


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _tars(stage_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in stage_dir.rglob("*.tar")}


def _originals(index: DatasetIndex) -> dict[str, bytes]:
    return _tars(index.folder / "shards")


def _copied(output: str | None) -> int:
    [number] = re.findall(r"(\d+) of \d+ shards were copied by this process", output or "")
    return int(number)


@pytest.fixture
def copy(dataset: DatasetIndex, tmp_path: Path) -> DatasetIndex:
    shutil.copytree(dataset.folder, tmp_path / "data")
    return read_index(tmp_path / "data")


@pytest.fixture
def many(dataset: DatasetIndex, tmp_path_factory: pytest.TempPathFactory) -> DatasetIndex:
    """The same first shard 24 times under other names."""
    folder, number = tmp_path_factory.mktemp("many"), 24
    (folder / "shards").mkdir()
    shards = [replace(dataset.shards[0], file=f"shards/{i:02d}.tar") for i in range(number)]
    for shard in shards:
        shutil.copyfile(dataset.shard_path(0), folder / shard.file)
    rows = np.flatnonzero(dataset.blocks.shard == 0)
    columns = {name: np.concatenate([column[rows]] * number)
               for name, column in vars(dataset.blocks).items()}  # fmt: skip
    columns["shard"] = np.repeat(np.arange(number, dtype=np.int32), len(rows))
    blocks = Blocks(**columns)
    np.savez(folder / "index.npz", **vars(blocks))
    (folder / "index.json").write_bytes(
        index_bytes(
            vocabulary=dataset.vocabulary, tokenizer_file=dataset.tokenizer_file,
            tokenizer_sha256=dataset.tokenizer_sha256, unigram_entropy_nats=1.0,
            totals=dataset.totals, shards=shards, blocks=blocks,
            sources=(dataset.sources, [0] * len(blocks)),
        )
    )  # fmt: skip
    return read_index(folder)


def test_staged_shards_give_the_same_batches_and_alone(copy: DatasetIndex, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    config = load(PretrainConfig, path, [f"data.dir={copy.folder}"]).config

    def hashes(index: DatasetIndex) -> list[int]:
        train = train_loader(index, config, DataRank(0, 1))
        held_out = eval_loader(index, config, DataRank(0, 1))
        steps = [batch for cursor in range(0, 80, 8) for batch in train.step_batches(cursor)]
        return [batch.hash for batch in [*steps, *(batch for _, batch in held_out.batches())]]

    expected = hashes(copy)
    staged = stage(copy, tmp_path / "node")
    assert staged.shard_path(0).is_relative_to(tmp_path / "node" / copy.fingerprint[:16])
    shutil.rmtree(copy.folder / "shards")
    assert hashes(staged) == expected


@pytest.mark.usefixtures("processes")
def test_processes_share_the_work_and_wait(many: DatasetIndex, tmp_path: Path) -> None:
    shards = len(many.shards)
    with _staging(many, tmp_path, "3") as first, _staging(many, tmp_path) as second:
        # The second copies all but the shard that the first, stopped, has in work.
        _wait_until(lambda: len(_tars(tmp_path)) == shards - 1)
        time.sleep(0.5)
        assert second.poll() is None
        assert len(_tars(tmp_path)) == shards - 1
        first.send_signal(signal.SIGCONT)
        counts = [_copied(process.communicate(timeout=60)[0]) for process in (first, second)]
    assert counts == [1, shards - 1]
    assert _tars(tmp_path) == _originals(many)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("processes")
def test_processes_at_full_speed_copy_each_shard_once(many: DatasetIndex, tmp_path: Path) -> None:
    with _staging(many, tmp_path) as one, _staging(many, tmp_path) as two, \
            _staging(many, tmp_path) as three:  # fmt: skip
        texts = [process.communicate(timeout=60)[0] for process in (one, two, three)]
    late = [text for text in texts if "staged before" in text]
    assert sum(_copied(text) for text in texts if text not in late) == len(many.shards)
    assert _tars(tmp_path) == _originals(many)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("processes")
def test_a_killed_process_s_shard_is_copied(many: DatasetIndex, tmp_path: Path) -> None:
    with _staging(many, tmp_path, "3") as first, _staging(many, tmp_path) as second:
        _wait_until(lambda: len(_tars(tmp_path)) == len(many.shards) - 1)
        first.kill()
        assert _copied(second.communicate(timeout=60)[0]) == len(many.shards)
    assert _tars(tmp_path) == _originals(many)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("processes")
def test_a_killed_process_leaves_nothing_that_counts_as_complete(
    dataset: DatasetIndex, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _staging(dataset, tmp_path, "3") as process:
        process.kill()
        process.wait()
    [part] = tmp_path.rglob("*.part")
    assert part.stat().st_size == 3 << 16
    assert not _tars(tmp_path)
    caplog.set_level(logging.INFO)
    stage(dataset, tmp_path)
    assert _tars(tmp_path) == _originals(dataset)
    assert not part.exists()
    changed = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tar")}
    stage(dataset, tmp_path)
    assert "staged before" in caplog.text
    assert changed == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tar")}


def test_damaged_source_is_refused_and_leaves_no_copy(copy: DatasetIndex, tmp_path: Path) -> None:
    source = copy.shard_path(0)
    flip(source, 3000)
    with pytest.raises(DataError, match=rf"{source} .*sha256 .*[0-9a-f]{{64}}"):
        stage(copy, tmp_path / "node")
    assert not list((tmp_path / "node").rglob("*.*"))
    source.unlink()
    with pytest.raises(DataError, match=f"shard {source} does not exist"):
        stage(copy, tmp_path / "node")


def test_damaged_copy_is_found_block_by_block(dataset: DatasetIndex, tmp_path: Path) -> None:
    path = stage(dataset, tmp_path).shard_path(0)
    flip(path, int(dataset.blocks.member_offset[0, 0]) + 500)
    again = stage(dataset, tmp_path)
    name = f"{dataset.block_key(0)}.tokens.npy"
    with pytest.raises(DataError, match=f"{path}, .*{name} .*delete"):
        BlockReader(again).block(0)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=f"shard {path} has 5000 bytes"):
        BlockReader(again)
    BlockReader(stage(dataset, tmp_path)).check_all(range(len(dataset.blocks)))


def test_too_little_space_is_told_before_copying(copy: DatasetIndex, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file"):
        stage(copy, tmp_path / "file")
    large = 10**13
    os.truncate(copy.shard_path(0), large)  # takes no space
    shards = (replace(copy.shards[0], num_bytes=large), *copy.shards[1:])
    with pytest.raises(ConfigError, match=r"node: 1000\d\.\d{4} GB .* \d+\.\d{4} GB"):
        stage(replace(copy, shards=shards), tmp_path / "node")
    assert not list((tmp_path / "node").rglob("*.*"))


@pytest.mark.usefixtures("processes")
@needs_mount
def test_space_that_runs_out_while_copying(dataset: DatasetIndex, tmp_path: Path) -> None:
    total = sum(shard.num_bytes for shard in dataset.shards)
    (tmp_path / "small").mkdir()
    # There is space at the start. While the program is stopped something else fills the disk.
    script = (
        f"mount -t tmpfs -o size={total + (1 << 18)} none {tmp_path}/small; "
        '"$@" & while ! grep -q "^State:.T" /proc/$!/status; do sleep 0.05; done; '
        f"head -c {total} /dev/zero > {tmp_path}/small/other 2> /dev/null; "
        f"kill -CONT $!; wait $!; echo code $?; find {tmp_path}/small/*/ -type f"
    )
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh",
         *_program(dataset, tmp_path / "small", "3")],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    sizes = f"{total / 1e9:.4f} GB .* {(1 << 18) / 1e9:.4f} GB"
    assert re.search(rf"data\.stage_dir, {tmp_path}/small: {sizes}", done.stdout)
    assert done.stdout.endswith("code 2\n"), done.stdout + done.stderr


def test_unlisted_tar_is_refused(copy: DatasetIndex) -> None:
    refuse_unlisted(copy)
    shutil.copyfile(copy.shard_path(0), copy.folder / "shards" / "more.tar")
    with pytest.raises(DataError, match=r"more\.tar\. Move"):
        refuse_unlisted(copy)
    assert ["more.tar" in problem for problem in verify(copy.folder)] == [True]


def test_variables_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", "/scratch")
    monkeypatch.setenv("EMPTY", "")
    assert env.expand("$NODE_DISK/a${NODE_DISK}b$$", "data.stage_dir") == "/scratch/a/scratchb$"
    for text, name in (("$NO_SUCH/x", "NO_SUCH"), ("/a/$EMPTY", "EMPTY")):
        with pytest.raises(ConfigError, match=f"data.stage_dir=.* {name} "):
            env.expand(text, "data.stage_dir")
    with pytest.raises(ConfigError, match="variable's name"):
        env.expand("/a/$/b", "data.stage_dir")


def test_ranks_of_a_run_stage_together_and_stop_together(
    copy: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ranks: type[Ranks]
) -> None:
    overrides = ("train.num_steps=12", "data.stage_dir=$NODE_DISK/shards")
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "node"))
    ranks = start_ranks(tmp_path / "run", copy, *overrides)
    assert ranks.wait() == [0, 0], ranks.output
    assert len(_tars(tmp_path / "node" / "shards")) == len(copy.shards)
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    copied = [int(n) for n in re.findall(r"(\d+) of \d+ shards were copied", logs)]
    assert sum(copied) == len(copy.shards)
    (copy.folder / "shards" / "more.tar").touch()
    refused = start_ranks(tmp_path / "run", copy, *overrides)
    assert refused.wait() == [2, 2]
    assert "more.tar" in refused.output
