"""Task files: what they refuse, and every one that is shipped."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import build, load, to_yaml
from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError
from pipeline.tasks.task import SuiteConfig, TaskConfig, load_task

CONFIGS = Path(__file__).parents[2] / "configs"
TASKS = sorted(path.stem for path in (CONFIGS / "tasks").glob("*.yaml"))
SUITES = sorted(path.stem for path in (CONFIGS / "suites").glob("*.yaml"))
PAIR = "task: {kind: pair}\ndata: {train: [a.json], format: jsonl, fields: {text: a, text_b: b}}\n"


def _task(tmp_path: Path, text: str, *overrides: str) -> TaskConfig:
    (tmp_path / "t.yaml").write_text(text)
    return load_task(str(tmp_path / "t.yaml"), overrides)


def test_defaults_of_the_kinds_and_forms_of_labels(tmp_path: Path) -> None:
    config = _task(tmp_path, PAIR)
    assert config.metric == "accuracy"
    assert config.data.root == str(tmp_path), "the folder of the file"
    assert _task(tmp_path, PAIR, "data.root=/else").data.root == "/else"
    assert _task(tmp_path, PAIR, "data.labels=auto").data.labels == "auto"
    assert _task(tmp_path, PAIR, "data.labels=['0', '1']").data.labels == ("0", "1")
    with pytest.raises(ConfigError, match=r"data\.labels = 'yes'.*expected one of auto"):
        _task(tmp_path, PAIR, "data.labels=yes")
    with pytest.raises(ConfigError, match=r"data\.labels\.0 = 0 .*put it in quotes"):
        _task(tmp_path, PAIR, "data.labels=[0, 1]")


@pytest.mark.parametrize(("override", "message"), [
    ("task.kind=pairs", "did you mean 'pair'"),
    ("task.metric=em", "task.metric=em does not fit task.kind=pair; expected one of accuracy"),
    ("data.fields.text_b=null", "task.kind=pair needs data.fields.text_b"),
    ("task.kind=classify", "data.fields.text_b is not read by task.kind=classify; take it out"),
    ("data.fields.choices=c", "data.fields.choices is not read by task.kind=pair"),
    ("data.format=squad", "data.format=squad holds rows for task.kind qa, not for pair"),
    ("data={dev: [d.json], hold_out: 0.1}", "remove one of the two"),
    ("data.fields.textb=x", "did you mean 'text_b'"), ("train.seeds=[1, 1]", "none twice"),
    ("train={batch: 10, accumulate: 3}", "must be a multiple of train.accumulate=3"),
    ("train.lr=0", "out of range"), ("search.lr=[1e-5, -1.0]", "search.lr = -1.0 is out of range"),
    ("search.dropout=[0.1, 1.5]", "out of range"), ("search.epochs=[0.0]", "out of range"),
    ("{train: {accumulate: 2}, search: {batch: [8, 7]}}", "train.batch=7 must be a multiple of"),
    ("{train: {steps: 9}, search: {epochs: [1, 3]}}", "all would be the same run"),
    ("data.labels=[x, y, x]", "name each of them once"),
    ("head.decoder=crf", "head.decoder=crf does not fit task.kind=pair; expected none"),
    ("{task: {kind: spans}, head: {decoder: crf}}", "task.kind=spans; expected pointer"),
    ("{task: {kind: tag}, input: {truncate: head_tail}}", "an entity could lie over the gap"),
    ("{task: {kind: qa}, input: {truncate: head}}", "texts are cut into windows"),
    ("{task: {kind: tag}, train: {class_weights: balanced}}", "train.class_weights=balanced"),
    ("{task: {kind: qa}, input: {stride: 128}}", "input.stride=128 must be below input.max_length"),
])  # fmt: skip
def test_what_is_wrong_is_refused(tmp_path: Path, override: str, message: str) -> None:
    overrides = [override]
    if override.startswith("{"):
        values = yaml.safe_load(override)
        overrides = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    with pytest.raises(ConfigError) as caught:
        _task(tmp_path, PAIR, *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(("kind", "given", "stride"), [
    ("qa", {}, 30), ("qa", {"max_length": 512}, 128), ("qa", {"max_length": 384}, 128),
    ("qa", {"max_length": 64, "max_question": 16}, 22), ("qa", {"max_length": 66}, 1),
    ("qa", {"stride": 60}, 60), ("qa", {"max_length": 512, "stride": 100}, 100),
    ("pair", {}, 128), ("pair", {"max_length": 16}, 128),
])  # fmt: skip
def test_windows_fit_by_themselves(kind: str, given: Any, stride: int, tmp_path: Path) -> None:
    config = build(TaskConfig, {"task": {"kind": kind}, "input": given}, "test")
    assert config.input.stride == stride
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    again = load_task(str(tmp_path / "again.yaml"))
    assert (again.input, again.task) == (config.input, config.task)


def test_adam_s_settings_are_the_trainer_s() -> None:
    train = build(TaskConfig, {"task": {"kind": "pair"}}, "test").train
    assert (
        (train.beta2, train.eps) == (TrainConfig.adam_beta2, TrainConfig.adam_eps) == (0.98, 1e-6)
    )
    for name in ("adam_beta2", "adam_eps"):
        with pytest.raises(ConfigError, match=f"did you mean '{name.removeprefix('adam_')}'"):
            build(TaskConfig, {"task": {"kind": "pair"}, "train": {name: 0.5}}, "test")


@pytest.mark.parametrize("name", TASKS)
def test_shipped_task_loads(name: str, tmp_path: Path) -> None:
    config = load_task(name, ("data.root=/data",))
    data = config.data
    assert data.train
    assert data.dev or data.hold_out
    files = [*data.train, *data.dev, *data.test]
    assert len(set(files)) == len(files)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_task(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize("name", SUITES)
def test_shipped_suite_names_shipped_tasks(name: str) -> None:
    suite = load(SuiteConfig, name).config
    assert set(suite.tasks) <= set(TASKS)
    for task in suite.tasks:
        load_task(task, suite.overrides_of(task, suite.overrides))


def test_suites_hold_their_benchmarks_and_override_one_task() -> None:
    sizes = {name: len(load(SuiteConfig, name).config.tasks) for name in SUITES}
    assert (sizes["clue"], sizes["fewclue"], sizes["glue"]) == (11, 9, 9)
    suite = SuiteConfig(tasks=("a.yaml", "b"), overrides=())
    given = ("train.lr=1", "b.train.lr=2", "data.root=a.b")
    assert suite.overrides_of("a", given) == ("train.lr=1", "data.root=a.b")
    assert suite.overrides_of("b", given) == ("train.lr=1", "data.root=a.b", "train.lr=2")


def test_published_scores_must_be_one_a_task(tmp_path: Path) -> None:
    row = "{model: m, split: dev, protocol: p, source: s, scores: [1.0]}"
    (tmp_path / "s.yaml").write_text(f"tasks: [tnews, afqmc]\npublished:\n  - {row}\n")
    with pytest.raises(ConfigError, match="'m': 1 numbers for 2 tasks"):
        load(SuiteConfig, tmp_path / "s.yaml")
