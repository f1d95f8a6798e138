"""Blocks staged on the node: the same batches, one copy a node, and never half a block."""

import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.verify import verify
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.reader import BlockReader, refuse_unlisted
from pipeline.data.run_order import DataRank
from pipeline.data.staging import stage
from pipeline.errors import ConfigError, DataError
from pipeline.runtime import env
from tests.support.damage import flip, needs_mount
from tests.support.processes import ROOT, wait_until
from tests.support.ranks import CONFIG, Ranks
from tests.support.steps import eval_loader, train_loader


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


def _copies(stage_dir: Path) -> dict[str, bytes]:
    """Blocks that are kept, by their hash."""
    files = [path for path in stage_dir.rglob("*") if len(path.name) == 64]
    return {path.name: path.read_bytes() for path in files}


def _originals(index: DatasetIndex) -> dict[str, bytes]:
    blocks, tars = (
        index.blocks,
        [index.shard_path(n).read_bytes() for n in range(len(index.shards))],
    )
    places = zip(blocks.sha256, blocks.shard, blocks.offset, blocks.length, strict=True)
    return {
        sha256.tobytes().hex(): tars[shard][start : start + length]
        for sha256, shard, start, length in places
    }


def _copied(output: str | None) -> int:
    [number] = re.findall(r"(\d+) of \d+ blocks were copied by this process", output or "")
    return int(number)


@pytest.fixture
def copy(dataset: DatasetIndex, tmp_path: Path) -> DatasetIndex:
    shutil.copytree(dataset.folder, tmp_path / "data")
    return read_index(tmp_path / "data")


def test_staged_blocks_give_the_same_batches_and_alone(copy: DatasetIndex, tmp_path: Path) -> None:
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
    assert _copies(tmp_path / "node" / copy.fingerprint[:16]) == _originals(copy)
    for shard in range(len(copy.shards)):  # nothing is read there any more
        size = copy.shard_path(shard).stat().st_size
        copy.shard_path(shard).write_bytes(bytes(size))
    assert hashes(staged) == expected


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_share_and_wait(dataset: DatasetIndex, tmp_path: Path, is_killed: bool) -> None:
    number = len(dataset.blocks)
    with _staging(dataset, tmp_path, "1") as first, _staging(dataset, tmp_path) as second:
        # The second copies all but the block that the first, stopped, has in work.
        wait_until(lambda: len(_copies(tmp_path)) == number - 1)
        time.sleep(0.5)
        assert second.poll() is None
        assert len(_copies(tmp_path)) == number - 1
        if is_killed:
            first.kill()
            assert _copied(second.communicate(timeout=60)[0]) == number - 1
        else:
            first.send_signal(signal.SIGCONT)
            counts = [_copied(process.communicate(timeout=60)[0]) for process in (first, second)]
            assert counts == [2, number - 2]
    assert _copies(tmp_path) == _originals(dataset)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("processes")
def test_a_killed_process_leaves_nothing_that_counts_as_complete(
    dataset: DatasetIndex, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _staging(dataset, tmp_path, "1") as process:
        process.kill()
        process.wait()
    assert len(_copies(tmp_path)) == 1
    caplog.set_level(logging.INFO)
    stage(dataset, tmp_path)
    assert _copies(tmp_path) == _originals(dataset)
    changed = {path: path.stat().st_ctime_ns for path in tmp_path.rglob("*/*/??*")}
    stage(dataset, tmp_path)
    assert _copied(caplog.text.splitlines()[-1]) == 0
    assert changed == {path: path.stat().st_ctime_ns for path in tmp_path.rglob("*/*/??*")}


def test_what_killed_ranks_left_removes_no_copy(dataset: DatasetIndex, tmp_path: Path) -> None:
    # As if each of many had been killed while it wrote: counted, and never renamed.
    folder = tmp_path / dataset.fingerprint[:16]
    (folder / "ab").mkdir(parents=True)
    size = int(dataset.blocks.length.sum())
    for number in range(3):
        (folder / "ab" / f"{'ab' * 31}{number:02}.part").write_bytes(bytes(size))
    (folder / "state").write_bytes(struct.pack("<4q", 3 * size, 0, 0, 0))
    staged = stage(dataset, tmp_path)
    assert _copies(tmp_path) == _originals(dataset)
    assert staged.cache.counts().kept_bytes == size
    assert not list(tmp_path.rglob("*.part"))
    # While others copy, a rank that is killed is counted until the next start.
    (folder / "state").write_bytes(struct.pack("<4q", 9 * size, 0, 0, 0))
    next(path for path in folder.rglob("*") if len(path.name) == 64).unlink()
    BlockReader(staged).block(0)
    BlockReader(staged).check_all(range(len(dataset.blocks)))
    assert _copies(tmp_path) == _originals(dataset)


def test_damaged_source_is_refused_and_leaves_no_copy(copy: DatasetIndex, tmp_path: Path) -> None:
    source = copy.shard_path(0)
    flip(source, int(copy.blocks.member_offset[0, 0]) + 500)
    name = f"{copy.block_key(0)}.tokens.npy"
    with pytest.raises(DataError, match=rf"{source}, .*{name} .*sha256 .*[0-9a-f]{{64}}"):
        stage(copy, tmp_path / "node")
    assert not _copies(tmp_path / "node")


def test_damaged_copy_is_copied_again(
    dataset: DatasetIndex, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged = stage(dataset, tmp_path)
    [path] = tmp_path.rglob(dataset.blocks.sha256[0].tobytes().hex())
    original = path.read_bytes()
    for damage in (lambda: flip(path, 500), lambda: path.write_bytes(original[:500]), path.unlink):
        damage()
        assert (BlockReader(staged).block(0).tokens == BlockReader(dataset).block(0).tokens).all()
        assert path.read_bytes() == original
    assert caplog.text.count("is damaged and fetched again") == 2


def test_too_little_space_is_told_before_copying(copy: DatasetIndex, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file"):
        stage(copy, tmp_path / "file")
    blocks = replace(copy.blocks, length=np.full_like(copy.blocks.length, 10**12))
    missing = len(blocks) * 1000
    with pytest.raises(ConfigError, match=rf"node: {missing}\.\d{{4}} GB .* \d+\.\d{{4}} GB"):
        stage(replace(copy, blocks=blocks), tmp_path / "node")
    assert not _copies(tmp_path / "node")


@pytest.mark.usefixtures("processes")
@needs_mount
def test_space_that_runs_out_while_copying(dataset: DatasetIndex, tmp_path: Path) -> None:
    total = int(dataset.blocks.length.sum())
    (tmp_path / "small").mkdir()
    # There is space at the start. While the program is stopped something else fills the disk.
    script = (
        f"mount -t tmpfs -o size={total + (1 << 18)} none {tmp_path}/small; "
        '"$@" & while ! grep -q "^State:.T" /proc/$!/status; do sleep 0.05; done; '
        f"head -c {total} /dev/zero > {tmp_path}/small/other 2> /dev/null; "
        f"kill -CONT $!; wait $!; echo code $?; find {tmp_path}/small/*/ -name '*.part'"
    )
    done = subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh",
                           *_program(dataset, tmp_path / "small", "1")],
                          capture_output=True, text=True, cwd=ROOT, timeout=60)  # fmt: skip
    sizes = r"\d+\.\d{4} GB are still needed, 0\.\d{4} GB are free"
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


def test_ranks_of_a_run_stage_together_and_stop_together(
    copy: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ranks: type[Ranks]
) -> None:
    overrides = ("train.num_steps=12", "data.stage_dir=$NODE_DISK/shards")
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "node"))
    ranks = start_ranks(tmp_path / "run", copy, *overrides)
    assert ranks.wait() == [0, 0], ranks.output
    assert _copies(tmp_path / "node" / "shards") == _originals(copy)
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    copied = [int(n) for n in re.findall(r"(\d+) of \d+ blocks were copied", logs)]
    assert sum(copied) == len(copy.blocks)
    (copy.folder / "shards" / "more.tar").touch()
    refused = start_ranks(tmp_path / "run", copy, *overrides)
    assert refused.wait() == [2, 2]
    assert "more.tar" in refused.output
