"""Which checkpoints are kept, and that a removal can be killed."""

import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checkpoints import manifest
from pipeline.checkpoints.commands import carry_out, plan
from pipeline.checkpoints.manifest import Retention, state_file
from pipeline.config.runs import PretrainConfig
from pipeline.config.schema import build
from pipeline.config.strict_yaml import parse
from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime.checkpoints import FOLDER, published, read_manifest
from tests.support.checkpoints import make_checkpoint
from tests.support.processes import python

LOSSES = {10: 3.0, 20: math.nan, 30: None, 40: 2.0, 50: 2.0, 60: 2.5, 70: None}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(1), {70}),
        (Retention(3), {50, 60, 70}),
        (Retention(1, 20), {20, 40, 60, 70}),
        # Of equal losses the later one; neither a NaN nor one without an evaluation competes.
        (Retention(1, None, 1), {50, 70}),
        (Retention(1, None, 3), {40, 50, 60, 70}),
        (Retention(1, None, 9), {10, 40, 50, 60, 70}),
        (Retention(2, 30, 1), {30, 50, 60, 70}),
        (Retention(1, keep_first=True), {70}),
        (Retention(99), set(LOSSES)),
    ],
)
def test_what_any_part_of_the_rule_keeps_is_kept(rule: Retention, kept: set[int]) -> None:
    assert {step for step, why in rule.reasons(LOSSES).items() if why} == kept


def test_reasons_are_told() -> None:
    assert Retention(2, 10, 2).reasons({10: 1.0, 20: 3.0, 30: 2.0}) == {
        10: ["every 10", "best"], 20: ["newest 2", "every 10"], 30: ["newest", "every 10", "best 2"]
    }  # fmt: skip
    with_first = Retention(1, 10, keep_first=True).reasons({0: None, 5: None, 20: None})
    assert with_first == {0: ["first"], 5: [], 20: ["newest", "every 10"]}


def test_while_losses_are_high_the_newest_from_before_them_is_kept(tmp_path: Path) -> None:
    made = {step: make_checkpoint(tmp_path, step) for step in (10, 20, 30, 40, 50)}
    manifests = {step: read_manifest(path) for step, path in made.items()}
    steps: dict[int, float | None] = dict.fromkeys(made)

    def kept(first_high: int, skip_before: int = 0) -> set[int]:
        high = {"high": [[first_high, 9.0], [first_high + 1, 9.0]]}
        given = manifests | {50: replace(manifests[50], losses=high)}
        rule = Retention(1, skip_before=skip_before)
        return {step for step, why in rule.reasons(steps, given).items() if why}

    # The checkpoint of step 30 is followed by batch 30.
    assert kept(30) == {30, 50}
    assert kept(29) == {20, 50}
    assert kept(39, skip_before=10) == {20, 50}
    # None is from ten batches before it: the newest from before it, then.
    assert kept(12, skip_before=10) == {10, 50}
    assert kept(5) == {50}
    assert {s for s, why in Retention(1).reasons(steps, manifests).items() if why} == {50}


def _steps(paths: list[Path]) -> list[int]:
    return [int(path.name[5:]) for path in paths]


def test_what_is_not_verified_makes_nothing_superseded(tmp_path: Path) -> None:
    made = {step: make_checkpoint(tmp_path, step) for step in (10, 20, 30, 40, 50)}
    assert _steps(manifest.superseded(tmp_path / FOLDER, Retention(2), made[50])) == [10, 20, 30]
    # 40 and 50 are damaged: 30 is what a resume takes, and 20 is the second newest.
    assert _steps(manifest.superseded(tmp_path / FOLDER, Retention(2), made[30])) == [10]
    for step in (40, 50):
        (made[step] / state_file(0, 1)).write_bytes(b"")
    found = plan(tmp_path, 1, None, None)
    assert found.good == made[30]
    assert len(found.rejected) == 2
    assert _steps(found.removed) == [10, 20]
    carry_out(tmp_path, found.removed)
    assert _steps(published(tmp_path / FOLDER)) == [50, 40, 30]
    for file in (tmp_path / FOLDER).glob("*/state/*"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="verifies, so nothing is removed"):
        plan(tmp_path, 1, None, None)


@pytest.mark.usefixtures("processes")
def test_killed_removal_leaves_no_checkpoint_that_looks_whole(tmp_path: Path) -> None:
    for step in (10, 20):
        make_checkpoint(tmp_path, step, world_size=2)
    # Killed when the first of its files is gone.
    program = (
        "import os, shutil, signal, sys; from pathlib import Path\n"
        "from pipeline.checkpoints.manifest import remove\n"
        "unlink = os.unlink\n"
        "def dying(*a, **k): unlink(*a, **k); os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.unlink = dying\n"
        "remove([Path(sys.argv[1])])\n"
    )
    folder = tmp_path / FOLDER
    python("-c", program, folder / "step-00000010", code=-signal.SIGKILL)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".removing-step-00000010", "step-00000020"
    ]  # fmt: skip
    assert len(list(folder.glob(".removing-*/**/*.*"))) == 2, "one of three files is gone"
    manifest.verify(folder / "step-00000020")
    carry_out(tmp_path, [])
    assert [path.name for path in folder.iterdir()] == ["step-00000020"]


@pytest.mark.parametrize(("checkpoint", "message"), [
    ("{every_steps: 100, keep_every_steps: 250}",
     r"keep_every_steps=250 must be a multiple of checkpoint\.every_steps=100.*set 300"),
    ("{every_steps: 1500, keep_best: 2}",
     r"keep_best=2 .* step 1500 \(checkpoint\.every_steps\) .*monitor\.eval_every_steps=1000"),
    ("{keep: 0}", "expected >= 1"),
])  # fmt: skip
def test_rules_that_cannot_be_kept_are_refused(checkpoint: str, message: str) -> None:
    text = f"{{run_dir: r, data: {{dir: d}}, checkpoint: {checkpoint}}}"
    with pytest.raises(ConfigError, match=message):
        build(PretrainConfig, parse(text, "test"))
