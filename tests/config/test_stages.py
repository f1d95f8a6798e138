"""Stages of a run: what they may change, where they begin, their learning rate, and forks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load, resolved_text
from pipeline.config.runs import PretrainConfig, load_run
from pipeline.errors import ConfigError, PostnormError
from pipeline.runtime.checkpoints import FOLDER, MANIFEST_FILE, Manifest, name_of, signed

_RUN = """
run_dir: FOLDER/run
model: {hidden_size: 32, num_heads: 2, num_layers: 2}
data: {dir: data/mix, seq_len: 64, mask_prob: 0.3}
train: {global_batch: 8, micro_batch: 2, lr: 1e-3, warmup_steps: 4, min_lr_ratio: 0.1}
"""
_STABLE = {"name": "stable", "steps": 20}
_LONG = {"name": "long", "tokens": 4 * 256 * 10 - 1, "data": {"seq_len": 256},
         "model": {"rotary_base": 160000}, "train": {"global_batch": 4}}  # fmt: skip
_DECAY = {"name": "decay", "steps": 11, "data": {"dir": "data/good", "mask_prob": 0.15},
          "train": {"decay": "1-sqrt"}}  # fmt: skip


def _load(folder: Path, *stages: dict[str, Any], more: tuple[str, ...] = ()) -> PretrainConfig:
    path = folder / "run.yaml"
    path.write_text(_RUN.replace("FOLDER", str(folder)))
    words = [f"stages={json.dumps(stages)}"] if stages else []
    return load_run(path, [*words, *more]).config


def test_a_stage_holds_what_differs_from_the_run(tmp_path: Path) -> None:
    timeline = _load(tmp_path, _STABLE, _LONG, _DECAY).timeline
    stable, long, decay = timeline.stages
    assert [stage.first_batch for stage in timeline.stages] == [0, 20, 30]
    assert [stage.cursor for stage in timeline.stages] == [0, 160, 200]
    assert (long.data.seq_len, long.data.mask_prob, long.model.rotary_base) == (256, 0.3, 160000)
    # Not from the stage before it, which is said where it is most likely a slip.
    assert (decay.data.seq_len, decay.data.mask_prob, decay.model.rotary_base) == (64, 0.15, 1e4)
    [warning] = timeline.warnings()
    assert "rotary_base=10000" in warning
    assert stable.data.dir == long.data.dir == "data/mix"
    assert [timeline.continues(number) for number in (1, 2)] == [True, False]
    assert [timeline.segments_before(number) for number in (0, 1, 2)] == [0, 1, 2]
    assert timeline.borders == [160, 200]
    config = _load(tmp_path, _STABLE, {**_LONG, "train": {"global_batch": 4, "micro_batch": 1}})
    sizes = [config.eval_data_of(stage).micro_batch for stage in config.timeline.stages]
    assert sizes == [2, 1], "what fits in training fits in an evaluation"


def test_the_learning_rate_is_continuous_and_ends_where_it_says(tmp_path: Path) -> None:
    half = {**_LONG, "train": {"decay": "linear", "min_lr": 5e-4, "global_batch": 4}}
    timeline = _load(tmp_path, _STABLE, half, _DECAY).timeline
    rates = [timeline.learning_rate(k, timeline.batches.number(k).stage) for k in range(41)]
    # An own formula, stage by stage.
    assert rates[:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert rates[4:20] == [1e-3] * 16
    assert rates[20:30] == pytest.approx([1e-3 - 5e-4 * k / 9 for k in range(10)])
    expected = [1e-4 + 4e-4 * (1 - math.sqrt(k / 10)) for k in range(11)]
    assert rates[30:] == pytest.approx(expected)
    # Skipped batches let a border come some updates early; the stage then begins at its start.
    assert timeline.learning_rate(18, 1) == rates[20]


def test_steps_and_schedule_follow_from_the_stages(tmp_path: Path) -> None:
    config = _load(tmp_path, _STABLE, _LONG, _DECAY)
    assert (config.train.num_steps, config.train.schedule) == (41, "stages")
    record = tmp_path / "resolved.yaml"
    record.write_text(resolved_text(config))
    again = load_run(record).config
    assert again == config
    # The record of a run is lengthened by a stage as its YAML is.
    longer = load_run(record, ["stages.2.steps=30"]).config
    assert longer.train.num_steps == 60
    # The schedule of a whole run spans stages that say nothing of the rate.
    spanned = _load(tmp_path, _STABLE, _LONG, more=("train.schedule=linear",)).timeline
    assert spanned.learning_rate(29, 1) == pytest.approx(1e-4 + 9e-4 / 26)


@pytest.mark.parametrize(
    ("stage", "more", "facts"),
    [
        ({"data": {"window_blocks": 3}}, (), ("stages.1.data.window_blocks", "mask_prob")),
        ({"model": {"hidden_size": 64}}, (), ("stages.1.model.hidden_size", "rotary_base")),
        ({"model": {"score_residual": "none"}}, (), ("score_residual", "plan")),
        ({"train": {"optimizer": "lamb"}}, (), ("stages.1.train.optimizer", "grad_clip")),
        ({"data": {"mask_prob": 1.5}}, (), ("stages.1.data.mask_prob", "< 1")),
        ({"data": {"sequence": 5}}, (), ("stages.1.data.sequence", "seq_len")),
        ({"train": {"decay": "fast"}}, (), ("'fast'", "1-sqrt")),
        ({"train": {"min_lr": 1e-5}}, (), ("min_lr", "decay")),
        ({"train": {"decay": "linear", "min_lr": 2e-3}}, (), ("0.002", "no decay")),
        ({"steps": None}, (), ("steps=null", "tokens=null")),
        ({"name": "stable"}, (), ("'stable'", "two")),
        ({"name": "a b"}, (), ("'a b'", "letters")),
        ({"train": {"global_batch": 3}}, (), ("stages.1", "a multiple of", "micro_batch=2")),
        ({"train": {"lr": 1e-4}}, ("train.schedule=cosine",), ("cosine", "train.schedule")),
        ({}, ("train.num_steps=7",), ("7", "30", "num_steps")),
        ({}, ("train.warmup_steps=21",), ("warmup_steps=21", "20 steps of stage stable", "jump")),
        ({}, ("phases=[{tokens: 1e6}]",), ("phases", "stages.0 ends after 20")),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, stage: dict[str, Any], more: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    given = {"name": "next", "steps": 10, **stage}
    with pytest.raises(ConfigError) as refused:
        _load(tmp_path, _STABLE, {name: it for name, it in given.items() if it is not None},
              more=more)  # fmt: skip
    assert [fact for fact in facts if fact not in str(refused.value)] == []


def test_a_base_of_positions_that_are_learned_is_warned_of(tmp_path: Path) -> None:
    longer = {"name": "next", "steps": 10, "model": {"rotary_base": 160000}}
    for positions, count in (("rotary", 0), ("learned", 1)):
        config = _load(tmp_path, _STABLE, longer, more=(f"model.positions={positions}",))
        found = [text for text in config.warnings() if "rotary_base=160000 has no effect" in text]
        assert len(found) == count


def test_phases_are_the_beginning_of_the_first_stage(tmp_path: Path) -> None:
    phases = "phases=[{tokens: 2560, seq_len: 32, global_batch: 16, ramp_from: 8}]"
    plan = _load(tmp_path, _STABLE, _LONG, more=(phases,)).batches
    places = [(place.number, place.size, place.seq_len, place.stage) for place in plan.stretches]
    assert places == [(0, 8, 32, 0), (10, 8, 64, 0), (20, 4, 256, 1)]
    assert plan.number(20).cursor == 160


def test_a_first_stage_has_no_fewer_slots_than_its_phases(tmp_path: Path) -> None:
    phases = "phases=[{tokens: 2560, seq_len: 32, global_batch: 16, ramp_from: 8}]"
    for tokens, batches in ((2561, 11), (2560 + 16 * 64, 12)):
        plan = _load(tmp_path, {"name": "stable", "tokens": tokens}, _LONG, more=(phases,)).batches
        assert [place.number for place in plan.stretches if place.stage == 1] == [batches], tokens
    for tokens in (2560, 2500, 1):
        with pytest.raises(ConfigError, match=r"phases have 10 batches, and stages\.0 ends after"):
            _load(tmp_path, {"name": "stable", "tokens": tokens}, _LONG, more=(phases,))


def test_identity_is_of_what_has_begun(tmp_path: Path) -> None:
    config = _load(tmp_path, _STABLE, _LONG, _DECAY)
    alone = _load(tmp_path, more=("train.num_steps=41",))
    # At a border the next stage has not begun.
    assert config.identity_at(160) == alone.identity_at(160) == alone.identity_at(0)
    other = _load(tmp_path, _STABLE, {**_LONG, "data": {"seq_len": 128}}, _DECAY)
    assert other.identity_at(160) == config.identity_at(160)
    assert other.identity_at(161) != config.identity_at(161)
    assert config.identity_at(161)["model"]["rotary_base"] == 160000
    # Where the first stage ended cannot be changed when it is over.
    later = {**_LONG, "tokens": 4 * 256 * 30}
    shorter = _load(tmp_path, {**_STABLE, "steps": 10}, later, _DECAY)
    assert shorter.identity_at(200) != config.identity_at(200)


def save(folder: Path, config: PretrainConfig, step: int) -> Path:
    """What `continue_from` reads of a run: a manifest, and the run's record."""
    cursor = config.batches.number(step).cursor
    manifest = {"step": step, "cursor": cursor, "skipped": 0, "alpha": 1.0, "fingerprint": "f",
                "identity": config.identity_at(cursor), "config_sha256": "", "world_size": 1,
                "created_unix_s": 0.0, "provenance": {}, "files": {}}  # fmt: skip
    path = folder / FOLDER / name_of(step)
    path.mkdir(parents=True)
    assert manifest.keys() <= Manifest.__dataclass_fields__.keys()
    (path / MANIFEST_FILE).write_text(json.dumps(signed(manifest)))
    (folder / "resolved.yaml").write_text(resolved_text(config))
    return path


def test_a_fork_is_one_run_with_the_stages_of_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = _load(tmp_path, _STABLE, _LONG)
    path = save(tmp_path / "run", source, 25)
    fork = tmp_path / "fork.yaml"
    fork.write_text(
        f"run_dir: {tmp_path}/fork\ncontinue_from: {tmp_path}/run@25\n"
        f"monitor: {{log_every_steps: 3}}\nstages: [{json.dumps(_DECAY)}]\n"
    )
    config = load_run(fork).config
    assert [(stage.name, stage.steps) for stage in config.timeline.stages] == [
        ("stable", 20), ("long", 5), ("decay", 11)]  # fmt: skip
    assert config.origin == path
    assert (config.monitor.log_every_steps, config.model.hidden_size) == (3, 32)
    assert config.train.num_steps == 36
    whole = _load(tmp_path, _STABLE, {**_LONG, "tokens": 4 * 256 * 5}, _DECAY)
    assert config.identity_at(300) == whole.identity_at(300)
    rates = [each.timeline.learning_rate(25, 2) for each in (config, whole)]
    assert rates[0] == rates[1] == 1e-3
    # Of a sweep over forks, a point changes the stages that come.
    mixed = load_run(fork, ["stages.0.data.mask_prob=0.05", f"run_dir={tmp_path}/other"]).config
    assert [stage.data.mask_prob for stage in mixed.timeline.stages] == [0.3, 0.3, 0.05]
    # Its own record is read as it stands, without the other run.
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork/resolved.yaml").write_text(resolved_text(config))
    path.rename(tmp_path / "gone")
    assert load(PretrainConfig, tmp_path / "fork/resolved.yaml").config == config
    assert load_run(fork).config == config
    # A longer one is not made so, which is told.
    assert load_run(fork, ["train.num_steps=5000"]).config == config
    assert "train.num_steps=5000 has no effect" in caplog.text


def test_a_fork_of_a_run_without_stages_takes_its_rate(tmp_path: Path) -> None:
    alone = _load(tmp_path, more=("train.num_steps=41", "train.schedule=cosine"))
    save(tmp_path / "run", alone, 30)
    fork = tmp_path / "fork.yaml"
    fork.write_text(f"from: run.yaml\nrun_dir: {tmp_path}/fork\ncontinue_from: {tmp_path}/run\n"
                    "train: {num_steps: 41, schedule: cosine}\n"
                    f"stages: [{json.dumps(_DECAY)}]\n")  # fmt: skip
    config = load_run(fork).config
    assert [stage.name for stage in config.timeline.stages] == ["run", "decay"]
    last = alone.timeline.learning_rate(29, 0)
    assert config.timeline.learning_rate(30, 1) == last < 1e-3


def test_a_fork_of_a_decay_that_has_ended_wants_a_rate(tmp_path: Path) -> None:
    ended = {**_DECAY, "train": {"decay": "linear", "min_lr": 0.0}}
    source = _load(tmp_path, _STABLE, ended)
    save(tmp_path / "run", source, 31)
    fork = tmp_path / "fork.yaml"
    fork.write_text(f"run_dir: {tmp_path}/fork\ncontinue_from: {tmp_path}/run\n"
                    "stages: [{name: more, steps: 5}]\n")  # fmt: skip
    with pytest.raises(ConfigError, match=r"continue_from=.*rate is 0 there.*train\.lr"):
        load_run(fork)
    assert load_run(fork, ["stages.0.train.lr=1e-4"]).config.timeline.stages[2].first_lr == 1e-4


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        ("", ("stages", "decay")),
        ("init_from: models/x\nSTAGES", ("init_from", "optimizer")),
        ("train: {schedule: wsd}\nSTAGES", ("train.schedule=wsd", "of the stages", "leave it out")),
        ("train: {num_steps: 50}\nSTAGES", ("train.num_steps=50", "leave it out")),
        ("data: {seq_len: 128}\nSTAGES", ("data.seq_len=128", "64", "new stage")),
        ("train: {warmup_steps: 9}\nSTAGES", ("train.warmup_steps=9", "has 4", "is over")),
        ("continue_from: RUN@7\nSTAGES", ("step 7", "30")),
        ("continue_from: nowhere\nSTAGES", ("nowhere",)),
    ],
)
def test_forks_that_cannot_be_are_refused(
    tmp_path: Path, lines: str, facts: tuple[str, ...]
) -> None:
    save(tmp_path / "run", _load(tmp_path, more=("train.num_steps=41",)), 30)
    text = lines.replace("STAGES", f"stages: [{json.dumps(_DECAY)}]").replace(
        "RUN", str(tmp_path / "run"))  # fmt: skip
    if "continue_from" not in text:
        text += f"\ncontinue_from: {tmp_path}/run"
    (tmp_path / "fork.yaml").write_text(f"run_dir: {tmp_path}/fork\n{text}\n")
    with pytest.raises(PostnormError) as refused:
        load_run(tmp_path / "fork.yaml")
    assert [fact for fact in facts if fact not in str(refused.value)] == []


def test_a_rate_of_zero_is_no_start_of_a_stage(tmp_path: Path) -> None:
    ended = {"name": "decay", "steps": 10, "train": {"decay": "linear", "min_lr": 0.0}}
    with pytest.raises(ConfigError, match=r"stages\.2.*train\.lr"):
        _load(tmp_path, _STABLE, ended, {"name": "more", "steps": 5})


def test_a_fork_where_a_decay_ended_early_has_the_rate_of_the_next_stage(tmp_path: Path) -> None:
    """Batches that were left out keep the last update of the stage from its last rate."""
    decay = {**_DECAY, "train": {"decay": "linear", "min_lr": 1e-4}}
    more = {"name": "more", "steps": 5}
    whole = _load(tmp_path, _STABLE, decay, more)
    path = save(tmp_path / "run", _load(tmp_path, _STABLE, decay), 31)
    body = json.loads((path / MANIFEST_FILE).read_text())
    left = {name: value for name, value in body.items() if name != "signature"}
    (path / MANIFEST_FILE).write_text(json.dumps(signed({**left, "step": 26, "skipped": 5})))
    path.rename(path.with_name(name_of(26)))
    fork = tmp_path / "fork.yaml"
    fork.write_text(f"run_dir: {tmp_path}/fork\ncontinue_from: {tmp_path}/run\n"
                    f"stages: [{json.dumps(more)}]\n")  # fmt: skip
    rates = [config.timeline.stages[2].first_lr for config in (whole, load_run(fork).config)]
    assert rates == [pytest.approx(1e-4)] * 2


def test_paths_of_stages_are_filled_in_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORPUS", "/login")
    config = _load(tmp_path, _STABLE, {**_DECAY, "data": {"dir": "$CORPUS/good"}})
    (tmp_path / "resolved.yaml").write_text(resolved_text(config))
    monkeypatch.setenv("CORPUS", "/node")
    again = load_run(tmp_path / "resolved.yaml").config
    assert [stage.data.dir for stage in again.timeline.stages] == ["data/mix", "/login/good"]
