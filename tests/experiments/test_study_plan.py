"""Studies as files: what is refused, which runs there are, that their arms see the same batches."""

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import budgets, commands, read, study_run
from experiments import grid as sweep
from experiments.study import (
    HOME,
    PRESETS,
    ClassesConfig,
    StudyCell,
    StudyConfig,
    StudyPlan,
    plan,
    read_study,
    run_plan,
)
from experiments.study_run import subset
from pipeline.config.load import build
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, DataError
from pipeline.tasks.config import FieldsConfig, TaskDataConfig
from pipeline.tasks.readers import read_task
from pipeline.tasks.task import KindConfig, TaskConfig
from tests.support.tiny_tasks import write_rows

NAMES = sorted(path.stem for path in HOME.glob("*.yaml"))
OF_RUNS = [name for name in NAMES if name != "speed"]
_HOURS = {"alpha": 3.5, "depths_long": 3.3, "many_classes": 3.9, "positions": 1.5, "rates": 3.5,
          "realformer": 2.9, "speedrun": 20.6, "structure": 1.9}  # fmt: skip
"""Of two shared cores, that a small preset may take; others take 1.3."""

BASE: dict[str, Any] = {
    "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "ffn_size": 64, "vocab_size": 99},
    "data": {"seq_len": 32},
    "train": {"num_steps": 10, "warmup_steps": 2, "global_batch": 4, "micro_batch": 4},
}
ARMS: dict[str, Any] = {"plain": {}, "sum": {"set": {"model.score_residual": "sum"}}}


def study_of(*, seeds: Sequence[int] = (1, 2), **values: Any) -> StudyConfig:
    """A study of two arms and a part of all arms, or what is given in their place."""
    body = {"question": "which?", "base": BASE, "arms": ARMS,
            "parts": {"one": {"asks": "which?", "arms": list(values.get("arms", ARMS))}},
            "presets": {name: {"seeds": [*seeds]} for name in PRESETS}}  # fmt: skip
    return build(StudyConfig, {**body, **values}, "a test")


def plan_of(study: StudyConfig, *overrides: str, **more: Any) -> StudyPlan:
    """Its small preset."""
    return plan("mine", study, "small", out=Path("out"), overrides=overrides, **more)


@cache
def _made(name: str, preset: str) -> StudyPlan:
    return plan(*read_study(name), preset, out=Path("out"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", OF_RUNS)
def test_committed_studies_resolve_and_pair_their_batches(name: str, preset: str) -> None:
    made = _made(name, preset)
    assert len(made.seeds) >= 2
    for run in made.runs.values():
        # A run that goes back leaves batches out, and others would not.
        assert not run.config.spikes.rewind
        if run.start is not None:
            assert run.config.seed != made.runs[run.start].config.seed
    folders = [*made.runs, *(read.task_name(*each) for each in made.fine_tunings)]
    assert all(sweep._SAFE_NAME.fullmatch(folder) for folder in folders)
    assert len(set(folders)) == len(folders)
    for cell, of_seeds in made.of_cells.items():
        part = made.parts[cell.part]
        first = made.of_cells[dataclasses.replace(cell, arm=part.arms[0])]
        for seed, name_of_run in of_seeds.items():
            same = made.runs[name_of_run].batches == made.runs[first[seed]].batches
            assert same or part.other_batches


@pytest.mark.parametrize("name", OF_RUNS)
def test_small_presets_fit(name: str) -> None:
    made = _made(name, "small")
    seconds = sum((run_plan(r.config, "small").train_s or 0) + 6 for r in made.runs.values())
    seconds += sum(
        budgets._task_seconds(made, made.runs[r], task) for r, task, _ in made.fine_tunings
    )
    assert seconds / 3600 < _HOURS.get(name, 1.3)
    [line] = budgets.cost_lines(made, listed=False)
    assert f"{len(made.runs)} pre-training runs" in line


def test_a_part_may_have_seeds_of_its_own() -> None:
    of_sweep = {"asks": "?", "arms": ["plain"], "seeds": [7, 8]}
    study = study_of(parts={"sweep": of_sweep, "claim": {"asks": "?", "arms": list(ARMS)}})

    def seeds(**more: Any) -> dict[str, list[int]]:
        found = plan_of(study, **more).of_cells
        return {f"{cell.part}/{cell.arm}": list(of_seeds) for cell, of_seeds in found.items()}

    own, usual = {"sweep/plain": [7, 8]}, {"claim/plain": [1, 2], "claim/sum": [1, 2]}
    assert seeds() == own | usual
    assert seeds(parts=["sweep"]) == own
    assert seeds(most_seeds=1) == {name: of[:1] for name, of in (own | usual).items()}
    assert len(plan_of(study).runs) == 2 + 4


def test_a_part_may_have_levels_of_its_own() -> None:
    rates = {"low": {"train.lr": 1e-4}, "usual": {"train.lr": 1e-3}, "high": {"train.lr": 1e-2}}
    one = {"asks": "?", "arms": ["plain"], "grid": ["rate"]}
    parts = {"all": one, "some": {**one, "levels": {"rate": ["high", "low"]}}}
    presets = {"small": {"seeds": [1], "levels": {"rate": ["usual"]}}, "gpu": {"seeds": [1]}}
    made = plan_of(study_of(factors={"rate": rates}, parts=parts, presets=presets))
    assert made.levels("all") == [("usual",)]
    assert made.levels("some") == [("high",), ("low",)]
    for levels, wrong in (({"rate": ["none"]}, "'none' is not of factor rate"),
                          ({"size": ["one"]}, "'size' is not of factors: rate")):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"parts\.some\.levels.*{wrong}"):
            study_of(factors={"rate": rates}, parts={"some": {**one, "levels": levels}})


def test_equal_configs_are_one_run_whichever_part_asks() -> None:
    study = study_of(
        factors={"layers": {"1": {"model.num_layers": 1}, "2": {"model.num_layers": 2}}},
        parts={
            "depth": {"asks": "?", "arms": ["plain", "sum"], "grid": ["layers"]},
            "alone": {"asks": "?", "arms": ["plain", "sum"]},
        },
    )
    made = plan_of(study)
    assert len(made.runs) == 2 * 2 * 2
    assert (
        made.of_cells[StudyCell("alone", "sum", ())]
        == made.of_cells[StudyCell("depth", "sum", ("1",))]
    )
    # One part alone finds its runs in the same folders.
    alone = plan_of(study, parts=["alone"])
    assert set(alone.runs) < set(made.runs)
    assert len(alone.runs) == 4


def test_an_arm_with_other_settings_in_another_part_is_named_by_the_part() -> None:
    parts = {
        "low": {"asks": "?", "arms": ["plain"]},
        "high": {"asks": "?", "arms": ["plain"], "set": {"train.lr": 0.1}},
    }
    names = set(plan_of(study_of(parts=parts)).runs)
    # Neither the place of the data nor new settings of a later revision change them.
    assert names == {f"plain{part}/seed-{seed}" for part in ("", "-high") for seed in (1, 2)}
    arms = {f"a{c}b": {"set": {"train.lr": lr}} for c, lr in ((" ", 0.1), ("/", 0.2), (":", 0.3))}
    with pytest.raises(ConfigError, match="a:b has the folder of another run, a_b-alone/seed-1"):
        plan_of(study_of(arms=arms, parts={"alone": {"asks": "?", "arms": list(arms)}}))


def test_shares_are_of_the_value_below_and_overrides_lie_under_arms() -> None:
    study = study_of(
        arms={
            "plain": {},
            "half": {"set": {"train.num_steps": "*0.5", "train.lr": "*2"}},
            "alpha": {"set": {"train.alpha_warmup_steps": "0.25 of train.num_steps"}},
            "fixed": {"set": {"model.num_layers": 3}},
        },
    )
    made = plan_of(study, "train.num_steps=200", "model.num_layers=2", "train.lr=1e-3")

    def config(arm: str) -> Any:
        return made.runs[made.of_cells[StudyCell("one", arm, ())][1]].config

    assert (config("half").train.num_steps, config("half").train.lr) == (100, 2e-3)
    assert config("alpha").train.alpha_warmup_steps == 50
    assert (config("plain").model.num_layers, config("fixed").model.num_layers) == (2, 3)


def test_levels_win_over_arms_and_shares_are_computed_last() -> None:
    """An arm has its best rate for parts without a sweep, and a sweep's levels replace it."""
    study = study_of(
        arms={
            "plain": {"set": {"train.lr": 1e-3}},
            "alpha": {"set": {"train.alpha_warmup_steps": "0.25 of train.num_steps"}},
        },
        factors={
            "rate": {"lr 2e-3": {"train.lr": 2e-3}},
            "length": {"x2": {"train.num_steps": "*2"}},
        },
        parts={
            "alone": {"asks": "?", "arms": ["plain"]},
            "swept": {"asks": "?", "arms": ["plain", "alpha"], "grid": ["rate", "length"]},
        },
    )
    made = plan_of(study, "train.num_steps=200")

    def train(part: str, arm: str, *levels: str) -> Any:
        return made.runs[made.of_cells[StudyCell(part, arm, levels)][1]].config.train

    assert train("alone", "plain").lr == 1e-3
    assert train("swept", "plain", "lr 2e-3", "x2").lr == 2e-3
    # Of the 400 steps that the level makes, though the level lies above the arm.
    assert train("swept", "alpha", "lr 2e-3", "x2").alpha_warmup_steps == 100


@pytest.mark.parametrize(("level", "warm_up"), [
    ({"train.warmup_steps": "*0.5"}, 20), ({"train.num_steps": "*0.5"}, 20),
    ({"train.num_steps": "*0.5", "train.warmup_steps": "*0.5"}, 20),
    ({"train.warmup_steps": "*0.25", "train.lr": "*2"}, 10), ({}, 40),
    ({"train.alpha_warmup_steps": "*0.5"}, 40),
])  # fmt: skip
def test_a_share_is_multiplied_once(level: dict[str, Any], warm_up: int) -> None:
    arms = {"plain": {"set": {"train.warmup_steps": "0.2 of train.num_steps"}}}
    part = {"asks": "?", "arms": ["plain"], "grid": ["level"]}
    study = study_of(arms=arms, factors={"level": {"it": level}}, parts={"one": part})
    for run in plan_of(study, "train.num_steps=200").runs.values():
        assert run.config.train.warmup_steps == warm_up
        assert run.config.train.alpha_warmup_steps == 0  # a share of nothing is nothing


def test_equal_flops_are_of_one_kind_of_batch_and_of_the_text_that_there_is(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"plain": {}, "deep": {"flops_of": "plain", "set": {"model.num_layers": 3}}}
    phases = {**BASE, "phases": [{"tokens": 256, "seq_len": 16}]}
    with pytest.raises(ConfigError, match=r"one, deep: flops_of sets train\.num_steps, and phases"):
        plan_of(study_of(arms=arms, base=phases))

    base = {**BASE, "model": {**BASE["model"], "vocab_size": None}, "train": {"num_steps": 5000}}
    study = study_of(arms=arms, base=base, seeds=[1])
    assumed = plan_of(study).runs["deep/seed-1"].config.train.num_steps
    trained = []

    def make_text(made: StudyPlan, out: Path) -> None:
        out.mkdir()
        (out / "data").symlink_to(dataset.folder)

    monkeypatch.setattr(study_run, "prepare", make_text)
    monkeypatch.setattr(study_run, "run_missing", lambda made, *_: trained.append(made) or 0)
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(dataclasses.asdict(study)))
    assert commands.study.function(
        study=str(path), out=tmp_path / "out", results=None, part=[], seeds=None, overrides=[],
        preset="small", jobs=1, local=True, cluster=None, dry_run=False, report=False,
    ) == 0  # fmt: skip
    [made] = trained
    steps = made.runs["deep/seed-1"].config.train.num_steps
    again = plan("mine", study, "small", out=tmp_path / "out").runs["deep/seed-1"]
    assert steps == again.config.train.num_steps != assumed


def test_an_arm_wins_over_its_part_and_the_command_line_over_the_preset_in_shares_too() -> None:
    share = {"train.warmup_steps": "0.5 of train.num_steps"}
    arms = {"usual": {}, "none": {"set": {"train.warmup_steps": 0}},
            "tenth": {"set": {"train.warmup_steps": "0.1 of train.num_steps"}},
            "alike": {"set": {"train.warmup_steps": "0.1 of train.num_steps",
                              "model.num_layers": 4}, "flops_of": "usual"}}  # fmt: skip
    levels = {"half": {"train.num_steps": "*0.5"}}

    def steps(study: StudyConfig, *overrides: str) -> dict[str, tuple[int, int]]:
        made = plan_of(study, *overrides)
        return {run.cell.arm: (run.config.train.num_steps, run.config.train.warmup_steps)
                for run in made.runs.values() if run.seed == 1}  # fmt: skip

    part = {"asks": "?", "arms": list(arms), "set": share}
    found = steps(study_of(arms=arms, parts={"one": part}), "train.num_steps=100")
    assert [found[arm] for arm in ("usual", "none", "tenth")] == [(100, 50), (100, 0), (100, 10)]
    total, warm = found["alike"]
    assert 20 < total < 60
    assert warm == round(0.1 * total)

    presets = {name: {"seeds": [1, 2], "set": share} for name in PRESETS}
    part = {"asks": "?", "arms": ["usual"], "grid": ["length"]}
    study = study_of(arms=arms, factors={"length": levels}, parts={"one": part}, presets=presets)
    assert steps(study, "train.num_steps=100") == {"usual": (50, 25)}
    assert steps(study, "train.num_steps=100", "train.warmup_steps=3") == {"usual": (50, 3)}
    with pytest.raises(ConfigError, match="seed is not set here"):
        plan_of(study, "seed=4")


def test_runs_of_a_study_never_go_back_unless_it_says_so() -> None:
    assert "spikes" not in BASE
    assert not any(run.config.spikes.rewind for run in plan_of(study_of()).runs.values())
    own = study_of(base={**BASE, "spikes": {"rewind": True}, "data": None})
    assert all(run.config.spikes.rewind for run in plan_of(own).runs.values())


def test_equal_flops_count_the_start_too() -> None:
    made = _made("growth", "small")
    flops = {name: run_plan(run.config).flops for name, run in made.runs.items()}
    for part in ("width", "depth"):
        scratch, grown = made.parts[part].arms
        run = made.runs[made.of_cells[StudyCell(part, grown, ())][2]]
        other = made.of_cells[StudyCell(part, scratch, ())][2]
        total = flops[run.name] + flops[str(run.start)]
        one_step = flops[other] / made.runs[other].config.train.num_steps
        assert abs(flops[other] - total) <= one_step


@pytest.mark.parametrize(("values", "message"), [
    ({"parts": {"a": {"asks": "?", "arms": ["plan"]}}}, r"parts\.a\.arms: 'plan'"),
    ({"parts": {"a": {"asks": "?", "arms": ["plain"], "metrics": ["los"]}}}, "held_out_loss"),
    ({"parts": {"a": {"asks": "?", "arms": ["plain"], "tasks": ["x"]}}}, "'x'.*tasks"),
    ({"parts": {"a": {"asks": "?", "arms": ["plain"], "grid": ["x"]}}}, "factors"),
    ({"parts": {"a": {"asks": "?", "arms": ["plain"], "probes": ["x"]}}}, "probes"),
    ({"presets": {"small": {"seeds": [1]}}}, "presets.*gpu"),
    ({"arms": {**ARMS, "b": {"grow": {"width": 2}}}}, "nothing to grow"),
    ({"arms": {**ARMS, "b": {"start": "nobody"}}}, "'nobody'.*arms"),
    ({"arms": {**ARMS, "b": {"start": "sum"}, "c": {"start": "b"}}}, r"arms\.c\.start=b"),
    ({"arms": {**ARMS, "b": {"sett": {}}}}, r"'arms\.b\.sett'"),
    ({"arms": {"plain": {}, "sum": {"mean": 2}}}, "'held_out_loss' is not of reads"),
    ({"arms": {**ARMS, "b": {"flops_of": "c"}, "c": {"flops_of": "b"}}}, r"arms\.b\.flops_of=c"),
    ({"arms": {**ARMS, "b": {"flops_of": "b"}}}, r"arms\.b\.flops_of=b"),
    ({"arms": {**ARMS, "b": {"flops_of": "sum", "start": "plain"}}}, "begins at random"),
    ({"arms": {**ARMS, "b": {"mean": 2}, "c": {"start": "b"}}}, r"arms\.c\.start=b.* a mean"),
    ({"tasks": {name: {"file": "fewclue-tnews"} for name in "ab"},
      "parts": {"a": {"asks": "?", "arms": ["plain"], "tasks": ["b"], "metrics": ["mean_score"]}}},
     "'mean_score' is not of metrics"),
    ({"parts": {"a": {"asks": "?", "arms": []}}}, r"parts\.a\.arms=\[\]"),
    ({"parts": {"a": {"asks": "?", "arms": ["plain", "plain"]}}}, "each once"),
    ({"parts": {"a": {"asks": "?", "arms": ["plain"], "metrics": []}}}, r"parts\.a\.metrics"),
    ({"parts": {"a/b": {"asks": "?", "arms": ["plain"]}}}, "'a/b' is to be the name of a file"),
    ({"factors": {"x": {}}, "parts": {"a": {"asks": "?", "arms": ["plain"], "grid": ["x"]}}},
     r"factors\.x has no level"),
    ({"factors": {"x": {"1": {}}},
      "parts": {"a": {"asks": "?", "arms": ["plain"], "grid": ["x", "x"]}}}, r"grid=.*each once"),
    ({"reads": {"near": {}}, "parts": {"a": {"asks": "?", "arms": ["plain"], "regress": True,
                                             "metrics": ["loss@near"]}}}, "near is not a number"),
    ({"parts": {}}, "parts is empty"),
    ({"presets": {name: {"seeds": []} for name in PRESETS}}, r"presets\.small\.seeds is empty"),
])  # fmt: skip
def test_mistakes_in_a_study_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_of(**values)


@pytest.mark.parametrize(("arm", "message"), [
    ({"model.layers": 2}, r"model\.layers"), ({"train.compile": "*2"}, r"train\.compile = '\*2'"),
    ({"train.lr": "2 of train.rate"}, r"train\.rate"),
    ({"model.num_layers": 0}, r"model\.num_layers"),
    ({"data.mask_prob": 0.4}, r"parts\.one: other and plain .*batches"),
    ({"train.global_batch": 8}, "other batches"), ({"seed": 3}, "seed is not set here"),
    ({"model": {"num_layers": 2}}, r"would reset what it leaves out; write model\.FIELD"),
])  # fmt: skip
def test_mistakes_in_an_arm_are_named(arm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(study_of(arms={"plain": {}, "other": {"set": arm}}))


def test_a_mean_needs_the_checkpoints_that_it_is_made_of() -> None:
    parts = {"one": {"asks": "?", "arms": ["plain", "mean"], "metrics": ["loss@text"]}}
    study = study_of(arms={"plain": {}, "mean": {"mean": 4}}, parts=parts, reads={"text": {}})
    assert len(plan_of(study, "checkpoint.keep=4").runs) == 2
    with pytest.raises(ConfigError, match=r"arms\.mean\.mean=4.*keep 3"):
        plan_of(study, "checkpoint.keep=3")


def test_unknown_names_of_the_command_line_are_named() -> None:
    with pytest.raises(ConfigError, match="realfromer"):
        read_study("realfromer")
    with pytest.raises(ConfigError, match=r"--part: 'two'.*small: one"):
        plan_of(study_of(), parts=["two"])
    with pytest.raises(ConfigError, match=r"'train\.rate'"):
        plan_of(study_of(), "train.rate=1")


def _task(folder: Path, rows_of: dict[str, int]) -> TaskConfig:
    for split in ("train", "dev", "test"):
        rows = [
            {"text": f"{split} {name} {n}", "label": name}
            for name, count in rows_of.items()
            for n in range(count)
        ]
        write_rows(folder / f"{split}.jsonl", rows)
    return TaskConfig(
        name="mine",
        task=KindConfig(kind="classify"),
        data=TaskDataConfig(
            root=str(folder), train=("train.jsonl",), dev=("dev.jsonl",), test=("test.jsonl",),
            fields=FieldsConfig(text="text"),
        ),
    )  # fmt: skip


def test_a_subset_has_its_classes_and_as_many_rows_of_each(tmp_path: Path) -> None:
    task = _task(tmp_path, {f"c{n}": 4 + n for n in range(8)})
    sizes = ClassesConfig(number=3, rows_a_class=5)
    seen = set()
    for seed in range(6):
        found = subset(task, sizes, (seed, 0), tmp_path / f"rows-{seed}")
        data = read_task(found)
        golds = [str(row.gold) for row in data.splits["train"]]
        chosen, counts = np.unique(golds, return_counts=True)
        assert counts.tolist() == [5, 5, 5]
        assert tuple(chosen) == found.data.labels == data.labels
        assert "c0" not in chosen, "it has too few rows"
        for split in ("dev", "test"):
            rows = data.splits[split]
            assert {row.gold for row in rows} == set(chosen)
            assert len(rows) == sum(4 + int(name[1:]) for name in chosen)
        again = subset(task, sizes, (seed, 0), tmp_path / "again")
        assert read_task(again).splits["train"][0].text == data.splits["train"][0].text
        seen.add(found.data.labels)
    assert len(seen) > 1, "every seed draws classes of its own"
    draws = {subset(task, sizes, (1, n), tmp_path / f"draw-{n}").data.labels for n in range(6)}
    assert len(draws) > 1, "and so does every draw"
    in_all = subset(task, ClassesConfig(number=4, rows=10), (1, 0), tmp_path / "in-all")
    assert len(read_task(in_all).splits["train"]) == 8
    with pytest.raises(DataError, match=r"2 classes .* 10 rows .* 3"):
        subset(task, ClassesConfig(number=3, rows_a_class=10), (1, 0), tmp_path / "few")
