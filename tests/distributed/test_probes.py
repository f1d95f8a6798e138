"""Probes in real runs: they change no bit, and their accuracy is that of vectors taken later."""

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier
from sklearn.preprocessing import StandardScaler

from pipeline.data.format import DatasetIndex
from pipeline.inspect.status import progress_lines, run_status
from pipeline.use.model import load
from tests.distributed.conftest import Train, tensorboard
from tests.support.grids import first_in_ci
from tests.support.ranks import Ranks, assert_same_bits, losses, records

# 61 rows of up to 60 tokens: the last pass of two ranks has one row, so that one rank has none.
NUM_TRAIN, NUM_DEV = 43, 18
WORDS = {
    "code": ["function", "class", "module", "import", "object", "attribute", "statement"],
    "text": ["string", "character", "encoding", "format", "bytes", "line", "literal", "unicode"],
    "other": ["the", "of", "a", "number", "value", "list", "index", "name"],
}
TASK = """\
task: {kind: classify}
data: {train: [train.jsonl], dev: [dev.jsonl], format: jsonl, fields: {text: text}}
input: {max_length: 60}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose words tell their class in part."""
    folder = tmp_path_factory.mktemp("task")
    draw = random.Random(5)
    for name, count in (("train", NUM_TRAIN), ("dev", NUM_DEV)):
        lines = []
        for number in range(count):
            label = "other" if number % 5 > 2 else draw.choice(["code", "text"])
            every = WORDS[label] * 2 + [word for words in WORDS.values() for word in words]
            text = " ".join(draw.choices(every, k=3 + number * 13 % 50))
            lines.append(json.dumps({"text": text, "label": label}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "mine.yaml").write_text(TASK)
    return folder / "mine.yaml"


def _same(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    assert_same_bits(one, other)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex, task: Path,
           start_ranks: type[Ranks]) -> Path:  # fmt: skip
    """The straight run with a probe."""
    run_dir = tmp_path_factory.mktemp("probed") / "run"
    start_ranks(run_dir, dataset, f"monitor.probes=[{task}]").ended()
    return run_dir


def test_a_probed_run_has_the_bits_of_one_without(straight_run: Path, probed: Path) -> None:
    _same(straight_run, probed)
    assert records(straight_run, "eval")[-1]["loss"] == records(probed, "eval")[-1]["loss"]
    assert [record["step"] for record in records(probed, "probe")] == [0, 20, 40]
    assert records(straight_run, "probe") == []


def test_accuracy_is_that_of_vectors_taken_from_the_finished_run(probed: Path, task: Path) -> None:
    model = load(probed)
    x, y = {}, {}
    for split in ("train", "dev"):
        each = [json.loads(line) for line in (task.parent / f"{split}.jsonl").open()]
        x[split] = model.encode([row["text"] for row in each], "mean", max_length=60)
        y[split] = np.array([row["label"] for row in each])
    scaler = StandardScaler().fit(x["train"].astype(np.float64))
    train, dev = (scaler.transform(x[split].astype(np.float64)) for split in ("train", "dev"))
    # One of the eleven penalties; which one is tested elsewhere.
    penalties = [NUM_TRAIN * 10.0 ** (power / 2) for power in range(-8, 3)]
    possible = [RidgeClassifier(alpha=alpha).fit(train, y["train"]) for alpha in penalties]
    found = records(probed, "probe")[-1]
    assert found["accuracy_mine"] in [pytest.approx(each.score(dev, y["dev"])) for each in possible]
    assert found["majority_mine"] == max(np.unique(y["dev"], return_counts=True)[1]) / NUM_DEV
    assert found["accuracy_mine"] > found["majority_mine"]


def test_probes_are_shown(probed: Path) -> None:
    events = tensorboard(probed)
    shown = {event.step: event.value for event in events.Scalars("probes/mine")}
    lines = records(probed, "probe")
    assert shown == pytest.approx({line["step"]: line["accuracy_mine"] for line in lines})
    assert "speed/probe_s" in events.Tags()["scalars"]
    status = run_status(probed)
    assert status.probes["mine"].accuracy == lines[-1]["accuracy_mine"]
    assert (status.probes["mine"].majority, status.probes["mine"].step) == (
        lines[-1]["majority_mine"], 40,
    )  # fmt: skip
    assert "accuracy" in str(list(progress_lines(status)))


def test_a_probed_run_resumes(straight_run: Path, task: Path, tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "run"
    override = f"monitor.probes=[{task}]"
    ranks = train.start("run", override, "monitor.eval_every_steps=4")
    ranks.wait_for_step(21)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.output
    train("run", override, "monitor.eval_every_steps=5")
    _same(straight_run, run_dir)
    assert {line["attempt"] for line in records(run_dir, "probe")} == {1, 2}


@pytest.mark.parametrize(("world_size", "stage"), first_in_ci([(2, 3), (1, 0)]))
def test_one_rank_and_divided_weights_change_no_bit(
    task: Path, tmp_path: Path, train: Train, probed: Path, world_size: int, stage: int
) -> None:
    runs = [tmp_path / "plain", tmp_path / "probed"]
    for run_dir, probes in zip(runs, ("", str(task)), strict=True):
        train(run_dir.name, "train.num_steps=12", "monitor.eval_every_steps=6",
              f"train.zero_stage={stage}", f"monitor.probes=[{probes}]",
              world_size=world_size)  # fmt: skip
    _same(*runs)
    found = records(runs[1], "probe")
    assert [line["step"] for line in found] == [0, 6, 12]
    # The weights of step 0 depend on neither; sums differ in their last bits only.
    assert found[0]["accuracy_mine"] == records(probed, "probe")[0]["accuracy_mine"]


def test_a_row_that_does_not_fit_ends_the_run(task: Path, tmp_path: Path, train: Train) -> None:
    (tmp_path / "mine.yaml").write_text(TASK)
    (tmp_path / "train.jsonl").write_bytes((task.parent / "train.jsonl").read_bytes())
    dev = (task.parent / "dev.jsonl").read_text().splitlines()
    dev[6] = '{"text": "a", "label": "unheard"}'
    (tmp_path / "dev.jsonl").write_text("\n".join(dev))
    override = f"monitor.probes=[{tmp_path / 'mine.yaml'}]"
    ranks = train("run", override, code=2)
    assert "dev.jsonl:7: label 'unheard' is not one of the 3 of data.train" in ranks.output
    assert not records(tmp_path / "run", "eval")
