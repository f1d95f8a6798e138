"""Sinks: what they are given, how they are found, and that none of them stops a run."""

import json
import logging
import re
import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import ConfigError
from pipeline.sinks import base
from pipeline.sinks.base import GROUP, SinkContext, Sinks, find_sinks, tag_of
from tests.distributed.conftest import tensorboard
from tests.support.ranks import CONFIG, records

SECTIONS = ("at_a_glance", "data", "health", "layers", "quality", "speed")


@pytest.fixture
def start(tmp_path: Path) -> SinkContext:
    (tmp_path / "config.yaml").write_text(CONFIG)
    overrides = [f"run_dir={tmp_path}/runs/mine", "data.dir=nowhere"]
    config = load(PretrainConfig, tmp_path / "config.yaml", overrides).config
    return SinkContext(tmp_path / "runs" / "mine", 1, None, config)


@pytest.mark.parametrize(("kind", "name", "tag"), [
    ("train", "loss", "quality/loss"), ("train", "replaced_accuracy", "quality/replaced_accuracy"),
    ("eval", "loss", "quality/held_out_loss"), ("eval", "loss_wiki", "quality/held_out_loss_wiki"),
    ("eval", "unigram_entropy", "quality/unigram_entropy"),
    ("eval", "uniform_guess", "quality/uniform_guess"), ("train", "restarts", "health/restarts"),
    ("train", "share_done", "data/share_done"),
    ("eval", "num_masked", "data/held_out_num_masked"),
    ("eval", "loss_web_documents", "quality/held_out_loss_web_documents"),
    ("eval", "attention_entropy_layer_03", "layers/attention_entropy_layer_03"),
    ("train", "grad_norm", "health/grad_norm"),
    ("train", "grad_norm_layer_03", "layers/grad_norm_layer_03"),
    ("train", "rewinds", "health/rewinds"), ("train", "tokens", "data/tokens"),
    ("train", "tokens_per_s", "speed/tokens_per_s"), ("train", "epoch_wiki", "data/epoch_wiki"),
    ("save", "save_s", "speed/save_s"), ("straggler", "factor", "health/straggler_factor"),
    ("plateau", "loss", "health/plateau_loss"),
])  # fmt: skip
def test_each_number_has_a_section(kind: str, name: str, tag: str) -> None:
    assert tag_of(kind, name) == tag


def test_a_run_has_six_sections_and_every_chart_has_a_line(straight_run: Path) -> None:
    events = tensorboard(straight_run)
    tags = events.Tags()["scalars"]
    assert {tag.partition("/")[0] for tag in tags} == set(SECTIONS)
    expected: defaultdict[str, set[str]] = defaultdict(set)
    for record in records(straight_run):
        for name in record.keys() - {"step", "kind", "attempt", "unix_s"}:
            expected[tag_of("train", name)].add(name)
    assert all(len(names) == 1 for names in expected.values()), "two numbers have one tag"

    [config] = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(config.tensor_proto.string_val[0])
    charts = {
        (category.title, chart.title): [
            tag for tag in sorted(tags) if any(re.match(each, tag) for each in chart.multiline.tag)
        ]
        for category in layout.category
        for chart in category.chart
    }
    first = [found for (title, _), found in charts.items() if title == "First look"]
    assert first == [["quality/held_out_loss", "quality/loss", "quality/uniform_guess",
                      "quality/unigram_entropy"], ["health/lr"], ["speed/tokens_per_s"],
                     ["data/share_done"], ["data/epoch"], ["health/restarts", "health/rewinds"],
                     [], ["health/alpha"], ["health/grad_norm"]]  # fmt: skip
    # A run without stages has no number of one, and one source no loss of its own.
    assert [key for key, found in charts.items() if not found] == [
        ("First look", "stage"),
        ("Sources", "held-out loss (nats)"),
    ]


def test_the_name_and_the_settings_of_a_run_are_shown(start: SinkContext) -> None:
    Sinks(start, find_sinks(["tensorboard"])).close()
    events = tensorboard(start.run_dir)
    [text] = events.Tensors("run/text_summary")
    assert b"**runs/mine**, attempt 1" in text.tensor_proto.string_val[0]
    [config] = events.Tensors("config/text_summary")
    assert b"score_residual: sum" in config.tensor_proto.string_val[0]
    settings = events.summary_metadata["_hparams_/session_start_info"]
    assert b"train.alpha_warmup_steps" in settings.plugin_data.content


OTHER = """
class Lines:
    def __init__(self, start):
        self.path = start.run_dir / "other.txt"
    def write(self, step, values):
        with self.path.open("a") as file:
            print(step, values, file=file)
    def write_text(self, step, name, markdown):
        pass
    def write_image(self, step, name, pixels):
        if pixels.size == 0:
            raise OSError("the service is away")
    def close(self):
        with self.path.open("a") as file:
            print("closed", file=file)
class Unreachable:
    def __init__(self, start):
        raise ConnectionError("no route to host")
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with sinks, as pip installs it."""
    folder = tmp_path / "site"
    (folder / "other-1.0.dist-info").mkdir(parents=True)
    (folder / "sinks_of_another.py").write_text(OTHER)
    (folder / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    (folder / "other-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{GROUP}]\nlines = sinks_of_another:Lines\nunreachable = sinks_of_another:Unreachable\n"
        "half = sinks_of_another_that_is_not_there:Half\n"
    )
    monkeypatch.syspath_prepend(folder)


@pytest.mark.usefixtures("other_package")
def test_a_failing_sink_stops_nothing(start: SinkContext, caplog: pytest.LogCaptureFixture) -> None:
    start.run_dir.mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        sinks = Sinks(start, find_sinks(["lines", "unreachable"]))
        sinks.write(1, "train", {"loss": 2.5, "lr": float("nan")})
        sinks.write_image(1, "picture", np.zeros((0, 0, 3), np.uint8))
        sinks.write_image(1, "picture", np.zeros((0, 0, 3), np.uint8))
        sinks.write(2, "eval", {"loss": 2.0})
        sinks.close()
    assert (start.run_dir / "other.txt").read_text().splitlines() == [
        "1 {'quality/loss': 2.5, 'health/lr': nan}", "2 {'quality/held_out_loss': 2.0}", "closed",
    ]  # fmt: skip
    messages = sorted(record.message for record in caplog.records)
    facts = ("lines.*OSError: the service is away", "lines lost 2 of 5.*metrics.jsonl",
             "unreachable.*ConnectionError: no route", "unreachable lost 5 of 5")  # fmt: skip
    for message, fact in zip(messages, facts, strict=True):
        assert re.search(fact, message)
    lines = [json.loads(line) for line in (start.run_dir / "metrics.jsonl").open()]
    assert [(line["kind"], line["loss"]) for line in lines] == [("train", 2.5), ("eval", 2.0)]
    assert lines[0]["lr"] is None


def test_a_sink_that_hangs_stops_nothing(
    start: SinkContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(base, "_MOST_WAITING", 3)
    goes_on = threading.Event()

    def hanging(_: SinkContext) -> base.Sink:
        goes_on.wait()
        raise OSError

    sinks = Sinks(start, {"hanging": hanging})
    for step in range(6):
        sinks.write(step, "train", {"loss": 1.0})
    sinks.close()
    goes_on.set()
    assert "hanging" in caplog.text
    assert "lost 7 of 7" in caplog.text
    assert len(records(start.run_dir)) == 6


@pytest.mark.usefixtures("other_package")
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*'tensorboard'"):
        find_sinks(["tensorbord"])
    with pytest.raises(ConfigError, match=r"half.*install"):
        find_sinks(["half"])
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"pipeline.sinks.{name}", raising=False)
        with pytest.raises(ConfigError, match=rf"pip install 'postnorm\[{name}\]'"):
            find_sinks(["tensorboard", name])
