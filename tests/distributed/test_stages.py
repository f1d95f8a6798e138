"""Runs in stages: killed, forked and lengthened, they are one run in one piece, bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.checkpoints import name_of, published, read_manifest
from tests.distributed.conftest import with_small_disk
from tests.support.damage import needs_mount
from tests.support.grids import first_in_ci
from tests.support.ranks import Ranks, assert_same_bits, records
from tests.support.variants import Variants

_BASE = ("train.warmup_steps=2", "train.alpha_warmup_steps=3", "checkpoint.every_steps=4",
         "checkpoint.keep=1", "monitor.eval_every_steps=100", "model.dropout=0.1",
         "data.mask_prob=0.3")  # fmt: skip
_STABLE: dict[str, Any] = {"name": "stable", "steps": 6}
_LONG: dict[str, Any] = {
    "name": "long", "steps": 5, "data": {"seq_len": 128},
    "model": {"rotary_base": 160000, "dropout": 0.0, "attention_dropout": 0.0},
    "train": {"global_batch": 4, "weight_decay": 0.1, "grad_clip": 0.05}}  # fmt: skip


class Runs:
    """Runs in a folder, on one rank unless it is said."""

    def __init__(self, folder: Path, variants: Variants, start: type[Ranks]) -> None:
        self.folder, self._variants, self._start = folder, variants, start
        self.decay: dict[str, Any] = {
            "name": "decay", "steps": 5,
            "model": {"rotary_base": 160000, "dropout": 0.0, "attention_dropout": 0.0},
            "data": {"dir": str(variants["changed"].folder), "mask_prob": 0.15},
            "train": {"decay": "1-sqrt"}}  # fmt: skip

    @property
    def stages(self) -> list[dict[str, Any]]:
        return [_STABLE, _LONG, self.decay]

    def start(self, name: str, stages: list[dict[str, Any]], *overrides: str,
              total: int | None = None, **options: Any) -> Ranks:  # fmt: skip
        total = total or sum(stage["steps"] for stage in stages)
        options = {"world_size": 1, **options}
        given = (*_BASE, f"train.num_steps={total}", f"stages={json.dumps(stages)}", *overrides)
        return self._start(self.folder / name, self._variants["base"], *given, **options)

    def __call__(self, name: str, *overrides: Any, code: int = 0, **options: Any) -> Path:
        return self.start(name, *overrides, **options).ended(code).run_dir


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, variants: Variants, start_ranks: type[Ranks]
) -> Runs:
    return Runs(tmp_path_factory.mktemp("staged"), variants, start_ranks)


@pytest.fixture(scope="module")
def whole(shared: Runs) -> Path:
    """Three stages in one piece; tests must not change it."""
    return shared("whole", shared.stages)


@pytest.fixture
def runs(tmp_path: Path, variants: Variants, start_ranks: type[Ranks]) -> Runs:
    return Runs(tmp_path, variants, start_ranks)


def _lines(run: Path) -> list[str]:
    return (run / "batches.tsv").read_text().splitlines()


def test_each_stage_has_its_own_batches_rates_and_model(whole: Path) -> None:
    by_step = {record["step"]: record for record in records(whole)}
    assert [by_step[step]["stage"] for step in (6, 7, 11, 12)] == [0, 1, 1, 2]
    assert [by_step[step]["seq_len"] for step in (6, 7, 12)] == [64, 128, 64]
    rates = [by_step[step]["lr"] for step in range(1, 17)]
    assert rates[:12] == [1.5e-3, *[3e-3] * 11]
    assert rates[12:] == pytest.approx([3e-3 * (1 - (k / 4) ** 0.5) for k in (1, 2, 3, 4)])
    lines = [line.split("\t") for line in _lines(whole)]
    assert lines[0][-1] == "stage"
    assert [line[-1] for line in lines[1:]] == ["0"] * 6 + ["1"] * 5 + ["2"] * 5
    # Every border has a checkpoint, which is kept, and says what its weights were trained with.
    kept = {int(path.name[-8:]): read_manifest(path) for path in published(whole / "checkpoints")}
    assert sorted(kept) == [6, 11, 16]
    models = {step: manifest.identity["model"] for step, manifest in kept.items()}
    assert [models[s]["rotary_base"] for s in (6, 11, 16)] == [10_000, 160_000, 160_000]
    assert len(kept[16].fingerprints) == 2
    assert kept[16].fingerprint not in kept[16].fingerprints
    # All texts are evaluated at all borders, with one share of masks.
    held_out = records(whole, "eval")
    assert [record["step"] for record in held_out] == [0, 6, 11, 16]
    assert {"loss", "loss_of_long", "loss_of_decay"} <= held_out[0].keys()
    log = (whole / "logs/rank-00000.log").read_text()
    assert "stage 1 (long) begins after step 6: data.seq_len 64 -> 128" in log


def test_kills_around_borders_leave_one_run(runs: Runs, whole: Path) -> None:
    for step in (5, 7, 12):
        ranks = runs.start("run", runs.stages, "checkpoint.background=false")
        ranks.wait_for_step(step)
        ranks.kill()
    run = runs("run", runs.stages)
    assert _lines(run) == _lines(whole)
    assert_same_bits(run, whole)


@pytest.mark.parametrize(
    ("zero_stage", "world_size"), first_in_ci([(0, 2), (2, 4), (3, 1), (2, 1)], 1)
)
def test_other_ranks_and_zero_stages_go_on_over_borders(
    runs: Runs, whole: Path, zero_stage: int, world_size: int
) -> None:
    # From the second stage on there is no dropout, whose numbers depend on the rank.
    run = Path(shutil.copytree(whole, runs.folder / "run"))
    for step in (11, 16):
        shutil.rmtree(run / "checkpoints" / name_of(step))
    options = (f"train.zero_stage={zero_stage}", "train.micro_batch=1")
    long = {**_LONG, "train": {**_LONG["train"], "micro_batch": 1}}
    runs("run", [_STABLE, long, runs.decay], *options, world_size=world_size)
    assert _lines(run) == _lines(whole)
    # A gradient is clipped to a twentieth of its norm, and weights decay ten times as fast, in the
    # second stage: an engine that kept the first one's values would be elsewhere by far.
    found, wanted = (
        [record["loss"] for record in records(folder) if record["step"] > 6]
        for folder in (run, whole)
    )
    assert found[-10:] == pytest.approx(wanted[-10:], abs=2e-4)


def test_a_stage_ends_with_a_checkpoint_though_its_last_batches_are_skipped(runs: Runs) -> None:
    """The one before them, of the same step, is not the stage's end, and goes."""
    run = runs("run", [_STABLE, _LONG], "train.skip_batches=[{first: 4, last: 5}]")
    ends = [read_manifest(path) for path in published(run / "checkpoints")]
    assert (4, 6 * 8) in [(end.step, end.cursor) for end in ends]


def test_what_has_no_line_yet_is_logged_and_evaluated_at_the_border(runs: Runs) -> None:
    run = runs("run", [_STABLE, _LONG], "train.skip_batches=[{first: 5, last: 5}]",
               "checkpoint.every_steps=100", "monitor.log_every_steps=4")  # fmt: skip
    lines = records(run)
    assert [(line["step"], line["stage"], line["seq_len"]) for line in lines] == [
        (4, 0, 64), (5, 0, 64), (8, 1, 128), (11, 1, 128)
    ]  # fmt: skip
    assert [record["step"] for record in records(run, "eval")] == [0, 5, 11]
    ends = {read_manifest(path).step: path for path in published(run / "checkpoints")}
    manifest = read_manifest(ends[5])
    assert (manifest.cursor, manifest.held_out_step) == (6 * 8, 5)


def test_a_fork_is_the_stage_of_one_run(runs: Runs, whole: Path) -> None:
    decay, more = [runs.decay], "train.max_skipped_in_a_row=9"
    fork = runs("fork", decay, f"continue_from={whole}@11", more)
    assert_same_bits(fork, whole)
    assert _lines(fork) == [_lines(whole)[0], *_lines(whole)[12:]]
    record = json.loads((fork / "attempts.jsonl").read_text())
    assert record["continued_from"]["step"] == 11
    assert len(record["continued_from"]["fingerprints"]) == 2
    # What no stage may change, such as adam_beta2, may be another one here, and is said.
    assert record["changes"] == ["train.max_skipped_in_a_row: checkpoint 10, now 9"]
    # Its record says the whole way, and the other run may be gone by then.
    resumed = runs("fork", decay, f"continue_from={whole}@11", more)
    assert _lines(resumed) == _lines(fork)
    other = runs.start("fork", decay, f"continue_from={whole}@6").ended(2)
    assert "began with continue_from=" in other.output


def test_stages_are_added_to_a_finished_run_and_changed_before_they_begin(
    runs: Runs, whole: Path
) -> None:
    run = runs("run", [_STABLE])
    runs("run", [_STABLE, {**_LONG, "name": "another"}])
    shutil.rmtree(run / "checkpoints" / name_of(11))
    runs("run", runs.stages)
    assert _lines(run) == _lines(whole)
    assert_same_bits(run, whole)
    changes = [json.loads(line).get("changes") for line in (run / "attempts.jsonl").open()]
    assert any("stages" in text for text in changes[-1])
    assert sorted(path.name for path in (run / "starts").iterdir()) == [
        f"{number:04d}.yaml" for number in (1, 2, 3)
    ]
    begun = {**_LONG, "data": {"seq_len": 256}}
    refused = runs.start("run", [_STABLE, begun, runs.decay]).ended(2)
    assert "stages_before" in refused.output
    assert "256" in refused.output


def test_the_data_of_a_coming_stage_is_looked_at_before_the_run_starts(
    runs: Runs, variants: Variants
) -> None:
    for folder, expected in (("/nowhere", "/nowhere"), (str(variants["tokenizer"].folder),
                                                      "another tokenizer")):  # fmt: skip
        decay = {**runs.decay, "data": {"dir": folder}}
        refused = runs.start("run", [_STABLE, decay]).ended(2)
        assert "stage 1 (decay)" in refused.output
        assert expected in refused.output
        assert not (runs.folder / "run/checkpoints").exists()


def test_data_of_stages_that_are_over_may_be_gone(runs: Runs, variants: Variants) -> None:
    """Of all of them, or of one in the middle: the last stage goes on, and is forked."""
    names = {"changed": "a", "base": "b"}
    a, b = (
        Path(shutil.copytree(variants[of].folder, runs.folder / to)) for of, to in names.items()
    )
    one = {**_STABLE, "data": {"dir": str(a)}}
    two = {**_LONG, "data": {**_LONG["data"], "dir": str(b)}}
    run = runs("run", [one, two, runs.decay])
    shutil.rmtree(run / "checkpoints" / name_of(16))
    resumed = []
    for number, gone in enumerate(([b], [a, b])):
        away = [folder.rename(runs.folder / f"gone-{folder.name}") for folder in gone]
        again = Path(shutil.copytree(run, runs.folder / f"again-{number}"))
        resumed.append(runs(again.name, [one, two, runs.decay]))
        assert _lines(resumed[-1]) == _lines(run)
        assert_same_bits(
            runs(f"fork-{number}", [runs.decay], f"continue_from={run}@11"), resumed[-1]
        )
        for folder, path in zip(gone, away, strict=True):
            path.rename(folder)


def test_alpha_and_rate_do_not_jump_at_a_resume(runs: Runs, whole: Path) -> None:
    run = Path(shutil.copytree(whole, runs.folder / "run"))
    # Longer, a decay that has ended would stand higher up again.
    longer, strict = {**runs.decay, "steps": 50}, "train.rate_may_rise=false"
    lifted = runs.start("run", [_STABLE, _LONG, longer], strict).ended(2)
    assert "would rise from 0 to 0.00204" in lifted.output
    assert "train.rate_may_rise=true" in lifted.output
    shutil.rmtree(run / "checkpoints" / name_of(16))
    refused = runs.start("run", runs.stages, "train.alpha_warmup_steps=15").ended(2)
    assert "takes alpha from 1 back to 0.73" in refused.output


def test_data_that_changed_is_found_at_the_border(runs: Runs, variants: Variants) -> None:
    moved = Path(shutil.copytree(variants["changed"].folder, runs.folder / "data"))
    long = {**_STABLE, "steps": 500}
    stages = [long, {**runs.decay, "data": {"dir": str(moved)}}]
    ranks = runs.start("run", stages, "checkpoint.every_steps=100")
    ranks.wait_for_step(5)
    moved.rename(runs.folder / "gone")
    ranks.ended(2)
    assert str(moved) in ranks.output
    # The stage before is whole, and nothing of the next was trained.
    [newest, *_] = published(ranks.run_dir / "checkpoints")
    assert newest.name == name_of(500)
    assert len(_lines(ranks.run_dir)) == 501
    (runs.folder / "gone").rename(moved)
    runs("run", stages)
    assert len(_lines(ranks.run_dir)) == 506


@pytest.mark.slow
@needs_mount
def test_a_disk_that_is_full_at_a_border_costs_nothing(
    runs: Runs, whole: Path, variants: Variants
) -> None:
    small = runs.folder / "small"
    again = f"mount -o remount,size=64m {small}"
    code = (
        "import subprocess; from pathlib import Path;"
        "from tests.distributed.test_stages import Ranks, _lines, assert_same_bits;"
        f"given = {[*_BASE, 'train.num_steps=16', f'stages={json.dumps(runs.stages)}']!r};"
        "from pipeline.data.format import read_index;"
        f"start = lambda: Ranks(Path({str(small / 'run')!r}),"
        f" read_index({str(variants['base'].folder)!r}), *given, world_size=1);"
        "first = start(); print(first.wait(), first.output);"
        f"subprocess.run({again!r}.split(), check=True); start().ended();"
        f"assert_same_bits(Path({str(small / 'run')!r}), Path({str(whole)!r}));"
        f"assert _lines(Path({str(small / 'run')!r})) == _lines(Path({str(whole)!r}));"
        "print('same')"
    )
    output = with_small_disk(small, code)
    assert "[2]" in output, output
    assert "no space for checkpoint step-00000006" in output
    assert "\nsame\n" in output, output
