"""Damaged checkpoints are rejected by name, and the one before them is used."""

import dataclasses
import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoints import manifest as saved
from pipeline.checkpoints.manifest import newest_good, state_file
from pipeline.checkpoints.resume import changes, require_usable
from pipeline.config.load import build, plain_values
from pipeline.config.runs import PretrainConfig
from pipeline.errors import NewerFormatError
from pipeline.runtime import checkpoints, files
from pipeline.runtime.checkpoints import FOLDER, MANIFEST_FILE, published, read_manifest
from pipeline.runtime.tensors import SlicedFile, read_file, write_file
from tests.support.checkpoints import make_checkpoint, write_manifest
from tests.support.damage import flip

FILE = state_file(1, 2)


def _truncated(path: Path, _: Path) -> None:
    (path / FILE).write_bytes((path / FILE).read_bytes()[:-1])


def _of_another_run(path: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", 40, world_size=2, seed=5)
    shutil.copy(other / MANIFEST_FILE, path / MANIFEST_FILE)


def _of_another_step(path: Path, _: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000030"), path)


def _changed_manifest(path: Path, **values: object) -> None:
    body = json.loads((path / MANIFEST_FILE).read_bytes())
    body.pop("manifest_sha256")
    (path / MANIFEST_FILE).write_text(json.dumps(checkpoints.signed({**body, **values})))


def _no_moment(path: Path, _: Path) -> None:
    """Weights alone, with a manifest that fits them."""
    tensors = read_file(path / FILE)
    del tensors["exp_avg_sq/gain"]
    write_file(tensors, path / FILE, SlicedFile(path / FILE).metadata)
    write_manifest(path, 40, 2, None, {"seed": 1})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path, _: (path / FILE).unlink(), "rank-00001-of-00002.safetensors is missing"),
        (_truncated, "rank-00001-of-00002.safetensors has"),
        (lambda path, _: flip(path / FILE), "rank-00001-of-00002.safetensors is damaged, its sha"),
        (_of_another_run, "rank-00000-of-00002.safetensors is damaged, its sha256 differs"),
        (_of_another_step, "manifest.json is for step 30, expected 40"),
        (lambda path, _: (path / MANIFEST_FILE).unlink(), "no readable manifest.json"),
        (lambda path, _: _changed_manifest(path, world_size=3), "of 3 ranks does not list state/"),
        (_no_moment, "rank-00001-of-00002.safetensors lacks exp_avg_sq/gain"),
    ],
)
def test_damage_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, damage: Callable[[Path, Path], None], message: str
) -> None:
    earlier = make_checkpoint(tmp_path / "run", 30, world_size=2, seed=3)
    newest = make_checkpoint(tmp_path / "run", 40, world_size=2, seed=4)
    folder = tmp_path / "run" / FOLDER
    assert newest_good(folder, require_usable) == (newest, [])
    damage(newest, tmp_path)
    good, [rejected] = newest_good(folder, require_usable)
    assert good == earlier
    assert str(newest) in rejected
    assert message in rejected


def _newer_state(path: Path) -> None:
    """State of another format, with a manifest that fits it."""
    metadata = SlicedFile(path / FILE).metadata
    table = {**json.loads(metadata["postnorm_state"]), "format": 3}
    write_file(read_file(path / FILE), path / FILE, {"postnorm_state": json.dumps(table)})
    write_manifest(path, 40, 2, None, {"seed": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: _changed_manifest(path, planes=7), "the fields planes"),
        (lambda path: _changed_manifest(path, contents={"x": 1}), "a state of {'x': 1}"),
        (_newer_state, "has format 3, expected 2"),
    ],
)
def test_a_newer_format_is_not_passed_over(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    make_checkpoint(tmp_path, 30, world_size=2, seed=3)
    change(make_checkpoint(tmp_path, 40, world_size=2, seed=4))
    with pytest.raises(NewerFormatError, match=re.escape(message)) as caught:
        newest_good(tmp_path / FOLDER, require_usable)
    assert caught.value.exit_code == 2
    # Damage is damage, whatever the format.
    newest = tmp_path / FOLDER / "step-00000040"
    flip(newest / MANIFEST_FILE)
    good, [rejected] = newest_good(tmp_path / FOLDER, require_usable)
    assert good == newest.with_name("step-00000030")
    assert str(newest) in rejected


def test_all_that_is_wrong_is_told_and_all_bytes_are_counted(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 40, world_size=3)
    total = sum(file.stat().st_size for file in (path / "state").iterdir())
    (path / state_file(0, 3)).unlink()
    (path / state_file(2, 3)).write_bytes(b"")
    seen: list[int] = []
    found = list(saved.problems(path, seen.append))
    assert [text.split(": ")[1].split(" ")[0] for text in found] == [
        state_file(0, 3), state_file(2, 3)
    ]  # fmt: skip
    assert sum(seen) == total


def test_only_finished_checkpoints_are_published_and_steps_are_numbers(tmp_path: Path) -> None:
    for name in ("step-00000009", "step-100000000", "step-99999999", "step-00000009.bak",
                 ".saving-step-00000010", ".rejected-step-00000011-1", "latest"):  # fmt: skip
        (tmp_path / name).mkdir()
    assert [path.name for path in published(tmp_path)] == ["step-100000000", "step-99999999",
                                                           "step-00000009"]  # fmt: skip


def test_storage_that_fails_in_passing_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (10, 20)]
    read, failures = Path.read_bytes, [errno.ESTALE, errno.ESTALE]

    def flaky(path: Path) -> bytes:
        if path == paths[1] / MANIFEST_FILE and failures:
            raise OSError(failures.pop(), "in passing", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", flaky)
    monkeypatch.setattr(files, "PAUSES_S", (0.0, 0.0))
    assert newest_good(tmp_path / FOLDER) == (paths[1], [])
    # What lasts is told, and the one before is not taken for the newest.
    failures += [errno.ESTALE] * 9
    with pytest.raises(OSError, match="in passing"):
        newest_good(tmp_path / FOLDER)


def test_a_file_that_the_disk_cannot_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (10, 20)]
    digest = files.sha256_file

    def broken(path: Path) -> str:
        if paths[1] in path.parents:
            raise OSError(errno.EIO, "Input/output error")
        return digest(path)

    monkeypatch.setattr(saved, "sha256_file", broken)
    monkeypatch.setattr(files, "PAUSES_S", (0.0,))
    good, [rejected] = newest_good(tmp_path / FOLDER)
    assert good == paths[0]
    assert "cannot be read: " in rejected


@pytest.mark.parametrize(("more", "is_told"), [
    ((), True), (("monitor.eval_mask_prob=0.5",), False), (("monitor.eval_mask_prob=0.3",), True),
    (("data.mask_prob=0.15",), False),
])  # fmt: skip
def test_other_held_out_masks_are_told(
    tmp_path: Path, more: tuple[str, ...], is_told: bool
) -> None:
    base = {
        "run_dir": "r",
        "data": {"dir": "d", "mask_prob": 0.15 if "data." in str(more) else 0.5},
    }
    stages = [{"name": "a", "steps": 400}, {"name": "b", "steps": 600}]
    before = build(PretrainConfig, base, "a test")
    path = make_checkpoint(tmp_path / "run", 40, world_size=1)
    manifest = dataclasses.replace(read_manifest(path), config=plain_values(before))
    after = build(PretrainConfig, base | {"stages": stages}, "a test", more)
    told = [text for text in changes(manifest, after) if text.startswith("held-out masks: ")]
    assert bool(told) is is_told
    assert all("monitor.eval_mask_prob=0.5" in text for text in told)
    assert not [text for text in changes(manifest, before) if "held-out" in text]
