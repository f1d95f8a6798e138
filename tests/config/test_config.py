"""Strict YAML, overrides, includes, ranges, explanation."""

import dataclasses
import hashlib
import json
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import FiltersConfig, MaskConfig, PrepConfig
from experiments.grid import SweepConfig
from experiments.study import StudyConfig
from experiments.transfer import TransferConfig
from launch.cluster import ClusterConfig
from pipeline.config import strict_yaml
from pipeline.config.load import _OF_KINDS, build, explain, load, resolved_text, warn_of_unusual
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.schema import OTHER_NAMES, RETIRED, as_recorded, unusual
from pipeline.errors import ConfigError
from pipeline.multitask.config import BalanceConfig, MultiTaskConfig, is_mix, load_mix
from pipeline.tasks.task import SuiteConfig, TaskConfig
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
MINIMAL = "run_dir: r\ndata: {dir: d}\n"


def _write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(("text", "value"), [
    ("1e-4", 1e-4), ("1.5", 1.5), (".5", 0.5), ("1_000", 1000), ("NO", "NO"), ("yes", "yes"),
    ("true", True), ("null", None), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
    ("0x10", "0x10"), ("'12'", "12"), (".inf", ".inf"),
])  # fmt: skip
def test_scalars_are_read_as_yaml_1_2(text: str, value: object) -> None:
    node = strict_yaml.parse(f"key: {text}", "test")
    assert node.plain() == {"key": value}
    assert type(node.plain()["key"]) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=1e-4", r"unknown key 'lr'.*did you mean 'train\.lr'"),
        ("train.lr=fast", r"train\.lr = 'fast'.*expected a number"),
        ("train.lr='1e-4'", r"train\.lr = '1e-4'.*quotes make it text; write 1e-4 without them"),
        ("train.num_steps='5'", r"a whole number, and quotes make it text; write 5 without them"),
        ("train.compile='true'", r"true or false, and quotes make it text; write true without"),
        ("data=[a, {b: 1}]", r"data must be a mapping, got \['a', {'b': 1}\] \(.*\); write name: "),
        ("train.lr=true", r"train\.lr = True.*expected a number"),
        ("model.num_heads=7", r"model\.hidden_size=384 must be a multiple of model\.num_heads=7"),
        (
            "model={residual: deepnorm, norm_placement: pre}",
            r"x would grow by 1\.86 in each of 12 sub-layers; set model\.residual=plain",
        ),
        ("train.warmup_steps=1000", r"train\.warmup_steps=1000 must be below"),
        ("train.zero_stage=4", r"train\.zero_stage"),
        ("train.alpha_warmup_steps=1000", r"never saw alpha = 1"),
        ("train.micro_batch=3", r"train\.global_batch=512 must be a multiple"),
        ("data.replace_mask_prob=0.95", r"must be at most 1"),
        ("run_dir=3", r"put it in quotes"),
        ("train.lr=", r"has no value"),
        ("train.lr=[1", r"not valid YAML"),
    ],
)
def test_bad_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(PretrainConfig, _write(tmp_path, MINIMAL), [override])


def test_override_reaches_into_lists(tmp_path: Path) -> None:
    path = _write(tmp_path, "output_dir: o\nsources: [{name: a, inputs: [x]}]\n")
    config = load(PrepConfig, path, ["sources.0.inputs=[y, z]"]).config
    assert config.sources[0].inputs == ("y", "z")
    with pytest.raises(ConfigError, match="not an index of a list of 1"):
        load(PrepConfig, path, ["sources.1.name=b"])


def test_include_is_overlaid_and_origins_are_kept(tmp_path: Path) -> None:
    _write(tmp_path, "num_layers: 3\nhidden_size: 64\nnum_heads: 2\n", "model.yaml")
    path = _write(tmp_path, MINIMAL + "model: {from: model.yaml, num_layers: 5}\n")
    loaded = load(PretrainConfig, path, ["train.lr=1e-3"])
    assert (loaded.config.model.num_layers, loaded.config.model.hidden_size) == (5, 64)
    text = explain(loaded)
    assert "model.hidden_size = 64\n" in text
    assert f"from {tmp_path}/model.yaml:2" in text
    assert "train.lr = 0.001\n" in text
    assert "from command line 'train.lr=1e-3'" in text
    assert "train.warmup_steps = 100 steps\n" in text


def test_circular_include_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "from: b.yaml\n", "a.yaml")
    _write(tmp_path, "from: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match="in a circle"):
        load(PretrainConfig, tmp_path / "a.yaml")


def test_resolved_text_reads_back_to_the_same_config(tmp_path: Path) -> None:
    overrides = ["train.lr=3e-5", "model.norm_eps=1e-12", "run_dir='10'"]
    config = load(PretrainConfig, _write(tmp_path, MINIMAL), overrides).config
    text = resolved_text(config)
    assert text.startswith("# git_revision: ")
    assert load(PretrainConfig, _write(tmp_path, text, "resolved.yaml")).config == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=str)
def test_every_shipped_config_loads(path: Path, tmp_path: Path) -> None:
    kind = path.relative_to(ROOT / "configs").parts[0]
    if kind == "model":
        path = _write(tmp_path, MINIMAL + f"model: {{from: {path}}}\n")
    if kind == "multitask" and is_mix(str(path)):
        load_mix(str(path))
        return
    roots = {"prep": PrepConfig, "filters": FiltersConfig, "cluster": ClusterConfig,
             "tasks": TaskConfig, "suites": SuiteConfig, "multitask": TransferConfig,
             "studies": StudyConfig, "sweeps": SweepConfig}  # fmt: skip
    if path.stem == "mmbert-decay":
        return  # goes on from a run: tests/config/test_recipes.py
    assert unusual(load(roots.get(kind, PretrainConfig), path).config) == []


@pytest.mark.usefixtures("processes")
def test_config_command_explains_and_refuses(tmp_path: Path) -> None:
    path = str(_write(tmp_path, MINIMAL))
    explained = python("-m", "pipeline", "config", path, "--explain", "train.lr=1e-4")
    assert "train.lr = 0.0001" in explained
    said = python("-m", "pipeline", "config", path, "train.lrr=1", code=2)
    assert "did you mean 'lr'" in said
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == ["c.yaml"]


def _sections(cls: type) -> Iterator[type]:
    yield cls
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                yield from _sections(typing.cast(type, part))


@pytest.mark.parametrize("root", [PretrainConfig, PrepConfig, ClusterConfig, TaskConfig])
def test_defaults_have_the_type_that_a_resolved_file_gives_them(root: type) -> None:
    """An int where a file gives a float is the same value with another hash: work is redone."""
    wrong = [
        f"{cls.__name__}.{field.name}"
        for cls in set(_sections(root))
        for field in dataclasses.fields(cls)
        if float in ((hint := typing.get_type_hints(cls)[field.name]), *typing.get_args(hint))
        and type(field.default) is int
    ]
    assert wrong == []


def test_home_and_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOSUCH", raising=False)
    path = _write(tmp_path, MINIMAL)
    words = ["run_dir=~/run", "data.dir=$SCRATCH/data", "checkpoint.copy_to=${SCRATCH}2",
             "monitor.probes=[tnews, ~/task.yaml]", "data.stage_dir=$NOSUCH/each/node"]  # fmt: skip
    config = load(PretrainConfig, path, words).config
    assert (config.run_dir, config.data.dir) == ("/home/me/run", "/scratch/me/data")
    assert config.checkpoint.copy_to == "/scratch/me2"
    assert config.monitor.probes == ("tnews", "/home/me/task.yaml")
    # Compute nodes have variables of their own, and this folder is each node's.
    assert config.data.stage_dir == "$NOSUCH/each/node"
    (tmp_path / "more").mkdir()
    monkeypatch.setenv("SCRATCH", str(tmp_path / "more"))
    _write(tmp_path / "more", "lr: 0.01\n", "train.yaml")
    included = _write(tmp_path, MINIMAL + "train: {from: $SCRATCH/train.yaml}\n", "i.yaml")
    assert load(PretrainConfig, included).config.train.lr == 0.01
    # The record is read again, on any machine.
    assert load(PretrainConfig, _write(tmp_path, resolved_text(config), "r.yaml")).config == config
    for text, message in (
        ("run_dir=$NOSUCH/run", "environment variable NOSUCH is not set"),
        ("run_dir=~nosuchuser/run", "run_dir='~nosuchuser/run': a home folder of that name"),
        ("data.dir=a$$b", r"data.dir='a\$\$b': \$\$ is not taken"),
        ("data.dir=a$", "must stand before a variable's name"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(PretrainConfig, path, [text])


@pytest.mark.parametrize(("root", "word", "meant"), [
    (PretrainConfig, "train.learning_rate", "lr"),
    (PretrainConfig, "learning_rate", "train.lr"),
    (PretrainConfig, "train.batch_size", "global_batch"),
    (PretrainConfig, "train.per_device_train_batch_size", "micro_batch"),
    (PretrainConfig, "epochs", "train.num_steps"),
    (PretrainConfig, "train.Max-Steps", "num_steps"),
    (PretrainConfig, "max_seq_length", "data.seq_len"),
    (PretrainConfig, "model.num_attention_heads", "num_heads"),
    (PretrainConfig, "output_dir", "run_dir"), (TaskConfig, "train.learning_rate", "lr"),
    (TaskConfig, "batch_size", "train.batch"), (TaskConfig, "train.num_train_epochs", "epochs"),
    (TaskConfig, "train.warmup_ratio", "warmup"),
])  # fmt: skip
def test_names_of_other_trainers_get_ours(root: type, word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean '{re.escape(meant)}'\? \(\w") as caught:
        build(root, {}, "here", [f"{word}=1"])
    assert word in str(caught.value)


def test_every_name_that_is_suggested_exists() -> None:
    roots: list[Any] = [PretrainConfig, TaskConfig, PrepConfig]
    sections = [hint for root in roots for hint in typing.get_type_hints(root).values()]
    classes = (*roots, *filter(dataclasses.is_dataclass, sections))
    known = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert set(OTHER_NAMES) - known == set()


_WITH_RETIRED = {
    "MonitorConfig": (PretrainConfig, "monitor"), "PreflightConfig": (ClusterConfig, "preflight"),
    "BalanceConfig": (MultiTaskConfig, "balance"), "HardwareConfig": (ClusterConfig, "hardware"),
    "ClusterConfig": (ClusterConfig, ""), "LanguageConfig": (PrepConfig, "filters.language"),
    "RepetitionConfig": (PrepConfig, "filters.repetition"), "C4Config": (PrepConfig, "filters.c4"),
    "ShapeConfig": (PrepConfig, "filters.shape"), "MaskConfig": (PrepConfig, "filters.mask"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in RETIRED.items() for key in keys]
)
def test_a_retired_setting_is_read_at_its_value_and_refused_at_another(name: str, key: str) -> None:
    root, section = _WITH_RETIRED[name]
    retired, dotted = RETIRED[name][key], f"{section}.{key}".strip(".")
    value = "null" if retired.value is None else str(retired.value).lower()
    other = "false" if retired.value is True else "true" if retired.value is False else "7"
    with pytest.raises(ConfigError) as without:
        build(root, {"surely": "not known"}, "here")
    for given, refused in ((value, False), (other, True)):
        with pytest.raises(ConfigError) as caught:
            build(root, {"surely": "not known"}, "here", [f"{dotted}={given}"])
        more = str(caught.value).count("\n") - str(without.value).count("\n")
        assert bool(more) == refused
        assert (f"{dotted} = " in str(caught.value)) == refused
        assert (f"fixed at {value}" in str(caught.value)) == refused
    # Nobody has a field of that name again: its old value would then mean something else.
    assert key not in {field.name for field in dataclasses.fields(_class_at(root, section))}


def _class_at(cls: type, section: str) -> type:
    for part in filter(None, section.split(".")):
        hint = typing.get_type_hints(cls)[part]
        cls = (typing.get_args(hint) or (hint,))[0]
    return cls


def test_hashes_of_configs_do_not_know_that_settings_were_retired() -> None:
    # Of revision 1bc9fe7, where all of them were fields.
    prep = load(PrepConfig, ROOT / "configs/prep/web.yaml").config
    balance = BalanceConfig(method="main_and_helpers", main=("a",))
    hashes = [
        hashlib.sha256(json.dumps(as_recorded(each), sort_keys=True).encode()).hexdigest()[:16]
        for each in (prep, balance)
    ]
    assert hashes == ["4f6de7120a560076", "2e019f98906e85dd"]
    no_ip = build(MaskConfig, {"kinds": ["phone", "email", "bank_card", "chinese_id"]}, "here")
    assert as_recorded(no_ip) == {"enabled": False, "email": True, "phone": True,
                                  "chinese_id": True, "bank_card": True, "ipv4": False}  # fmt: skip


def test_unusual_values_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _write(tmp_path, MINIMAL)
    warn_of_unusual(load(PretrainConfig, path, ["train.lr=300", "train.weight_decay=0"]).config)
    [text] = caplog.messages
    assert text.startswith("train.lr = 300 is unusual (peak learning rate): mostly it is 1e-07 to ")
    caplog.clear()
    warn_of_unusual(load(PretrainConfig, path).config)
    assert not caplog.messages


def test_a_list_in_place_of_a_config_is_shown_as_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['train', {'lr': 0\.0001}\]"):
        load(PretrainConfig, _write(tmp_path, "- train\n- {lr: 1e-4}\n"))


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    _write(tmp_path, "num_layers: 0\nhidden_size: big\n", "model.yaml")
    path = _write(
        tmp_path,
        "run_dirr: r\n"
        "model: {from: model.yaml}\n"
        "data: {seq_len: 1e3}\n"
        "seed: 010\n"
        "train: {lr: 0, schedule: linaer, warmup_steps: 10,\n"
        "  warmup_steps: 20, num_stepz: 5}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load(PretrainConfig, path, ["monitor.nosuch=1", "train.lr", "checkpoint.keep=many"])
    first, *mistakes = str(caught.value).split("\n- ")
    assert first == f"the config has {len(mistakes)} mistakes:"
    expected = [
        (f"{path}:4: 010 starts with a zero", "Write 10"),
        (f"{path}:6: duplicate key 'warmup_steps'", f"first written at {path}:5"),
        ("override 'train.lr'", "expected section.key=value"),
        (f"unknown key 'run_dirr' = 'r' ({path}:1)", "did you mean 'run_dir'?"),
        ("model.num_layers = 0 is out of range: expected >= 1, <= ", f"({tmp_path}/model.yaml:1)"),
        (f"model.hidden_size = 'big' ({tmp_path}/model.yaml:2): expected a whole number", ""),
        (f"data.seq_len = 1000.0 ({path}:3): expected a whole number", "write 1_000"),
        ("data.dir is required", f"add it to {path}:3"),
        (f"unknown key 'train.num_stepz' = 5 ({path}:6)", "did you mean 'num_steps'?"),
        (f"train.lr = 0.0 is out of range: expected > 0 ({path}:5)", ""),
        (f"train.schedule = 'linaer' ({path}:5)", "did you mean 'linear'?"),
        ("checkpoint.keep = 'many' (command line 'checkpoint.keep=many')", "a whole number"),
        ("unknown key 'monitor.nosuch'", "(command line 'monitor.nosuch=1')"),
    ]
    assert len(mistakes) == len(expected), mistakes
    for start, advice in expected:
        assert any(text.startswith(start) and advice in text for text in mistakes), start


def test_sections_that_contradict_themselves_are_told_together(tmp_path: Path) -> None:
    overrides = ["train.warmup_steps=5000", "model.num_heads=7"]
    with pytest.raises(ConfigError, match=r"2 mistakes:\n- model\.hidden_size=384"):
        load(PretrainConfig, _write(tmp_path, MINIMAL), overrides)


def test_a_section_is_taken_from_another_file_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "num_layers: 3\nhidden_size: 64\nnum_heads: 2\nresidual: deepnorm\n", "a.yaml")
    _write(tmp_path, "num_layers: 5\nhidden_size: 32\nnum_heads: 4\n", "b.yaml")
    _write(tmp_path, "model: {from: a.yaml}\n" + MINIMAL, "recipe.yaml")
    own = _write(tmp_path, "from: recipe.yaml\nmodel: {dropout: 0.3}\n")
    monkeypatch.chdir(tmp_path)  # where a path on the command line starts
    for overrides in (["model.from=b.yaml", "model.num_heads=8"],
                      ["model.num_heads=8", "model.from=b.yaml"]):  # fmt: skip
        loaded = load(PretrainConfig, own, overrides)
        model = loaded.config.model
        # All of b, with what the config's own file says: nothing of a, which the recipe takes.
        assert (model.num_layers, model.hidden_size, model.dropout) == (5, 32, 0.3)
        assert (model.num_heads, model.residual) == (8, "plain")
        assert load(PretrainConfig, own).config.model.residual == "deepnorm"
    assert loaded.origins["model.hidden_size"] == "b.yaml:2"
    assert load(PretrainConfig, own, ["model.from=bert-small"]).config.model.hidden_size == 512
    with pytest.raises(ConfigError, match=r"'bert-smal' is neither.*did you mean 'bert-small'"):
        load(PretrainConfig, own, ["model.from=bert-smal"])
    with pytest.raises(ConfigError, match=r"config file nowhere\.yaml does not exist"):
        load(PretrainConfig, own, ["model.from=nowhere.yaml"])


KINDS = {"pretrain": PretrainConfig, "multitask": MultiTaskConfig, "finetune": TaskConfig,
         "prep run": PrepConfig, "submit CONFIG --cluster": ClusterConfig, "study": StudyConfig,
         "benchmark": SuiteConfig, "submit --sweep": SweepConfig, "transfer": TransferConfig,
         "model": ModelConfig}  # fmt: skip
TEXTS = {
    "pretrain": "run_dir: r\ndata: {dir: d}\nmodel: {from: bert-small}\ntrain: {num_steps: 9}\n",
    "prep run": "output_dir: o\nsources: [{name: a, inputs: [x]}]\ntokenizer: {vocab_size: 300}\n",
    "finetune": "task: {kind: class}\ndata: {train: [a.tsv]}\nhead: {}\nmodel: m\n",
    "multitask": "init_from: i\ndata: {dir: d}\ntasks: {a: {}}\nbalance: {}\ntrain: {}\n",
    "submit CONFIG --cluster": "nodes: 2\npartition: [p]\ntime_limit: '1:00'\n",
    "submit --sweep": "config: c.yaml\ndir: d\ngrid: {train.lr: [1e-3]}\n",
    "study": "question: q\nbase: b\narms: {}\nfactors: {}\n",
    "model": "num_layers: 2\nhidden_size: 8\nnum_heads: 2\n",
}  # fmt: skip


@pytest.mark.parametrize("verb", TEXTS)
def test_a_config_of_another_kind_is_named(verb: str, tmp_path: Path) -> None:
    path = _write(tmp_path, TEXTS[verb])
    for other, kind in KINDS.items():
        if other == verb:
            continue
        with pytest.raises(ConfigError) as caught:
            load(kind, path)
        said = str(caught.value)
        # A mix and a suite are both lists of tasks, and say so by what else they lack.
        if {verb, other} <= {"multitask", "benchmark", "transfer"}:
            continue
        assert f"`postnorm {verb} {path}` takes it" in said, (verb, other, said)
        assert said.count("unknown key") == 0


@pytest.mark.parametrize(
    ("folder", "verb"),
    [("studies", "study"), ("suites", "benchmark"), ("tasks", "finetune"), ("model", "model"),
     ("prep", "prep run"), ("cluster", "submit CONFIG --cluster"), ("multitask", "")],
)  # fmt: skip
def test_no_shipped_config_of_another_kind_is_one_of_pre_training(folder: str, verb: str) -> None:
    files = sorted((ROOT / "configs" / folder).glob("*.yaml"))
    assert files
    for file in files:
        of_file = verb or ("transfer" if "\nmix: " in file.read_text() else "multitask")
        with pytest.raises(
            ConfigError, match=rf"not a config of pre-training: `postnorm {of_file} "
        ):
            load(PretrainConfig, file)


def test_what_kinds_are_known_by_are_their_fields() -> None:
    assert {kind.__name__ for kind in KINDS.values()} == set(_OF_KINDS)
    for kind in KINDS.values():
        names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        assert set(_OF_KINDS[kind.__name__][2].split()) <= names


def test_a_misspelt_section_is_the_only_mistake(tmp_path: Path) -> None:
    text = "run_dir: r\ndtaa: {dir: d}\nmodle: {from: roformer_v2-base}\n"
    with pytest.raises(ConfigError) as caught:
        load(PretrainConfig, _write(tmp_path, text))
    first, *mistakes = str(caught.value).split("\n- ")
    assert first == "the config has 2 mistakes:"
    for mistake, (line, name, meant) in zip(
        sorted(mistakes), [(2, "dtaa", "data"), (3, "modle", "model")], strict=True
    ):
        assert f"unknown key {name!r}" in mistake
        assert f"c.yaml:{line}); did you mean {meant!r}?" in mistake
