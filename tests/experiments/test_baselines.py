"""Character n-grams: they learn what letters tell, and nothing where letters tell nothing."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from experiments.baselines import run_baseline
from pipeline.tasks.task import TaskConfig, load_task
from tests.support.tiny_tasks import write_rows

SPLITS = ("train", "dev", "test")


def _task(folder: Path, kind: str, rows: dict[str, list[Any]], **fields: str) -> TaskConfig:
    for split, lines in rows.items():
        write_rows(folder / f"{split}.jsonl", lines)
    shown = ", ".join(f"{name}: {column}" for name, column in fields.items())
    files = ", ".join(f"{split}: [{split}.jsonl]" for split in rows)
    (folder / "t.yaml").write_text(
        f"input: {{stride: 64}}\ntask: {{kind: {kind}}}\ndata: {{{files}, fields: {{{shown}}}}}\n"
    )
    return load_task(str(folder / "t.yaml"))


def _run(folder: Path, kind: str, rows: dict[str, list[Any]], **fields: str) -> dict[str, Any]:
    found = run_baseline(_task(folder, kind, rows, **fields), name="t", out=folder / "out")
    assert found is not None
    assert found == json.loads((folder / "out/result.json").read_text())
    return found


def _predictions(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out/predictions-test.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def _texts(label: str, num: int, draw: random.Random) -> list[str]:
    """Sentences of which one word is of the label's own."""
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    return [" ".join([*draw.choices(words, k=6), label * 3]) for _ in range(num)]


def _rows(num: int, draw: random.Random, labels: str = "xyz") -> list[dict[str, str]]:
    return [{"t": text, "label": label} for label in labels for text in _texts(label, num, draw)]


@pytest.mark.parametrize("labels", ["xyz", "xy"])
def test_classes_that_letters_tell_apart(tmp_path: Path, labels: str) -> None:
    draw = random.Random(1)
    rows = {split: _rows(30, draw, labels) for split in SPLITS}
    found = _run(tmp_path, "classify", rows, text="t")
    assert found["mean"] == found["test"]["accuracy"] == 1.0
    assert (found["majority"], found["chance"]) == (1 / len(labels), 1 / len(labels))
    assert found["rows"] == {split: 30 * len(labels) for split in SPLITS}
    for line in _predictions(tmp_path):
        best = max(range(len(labels)), key=line["scores"].__getitem__)
        assert line["prediction"] == line["gold"] == labels[best]
    assert load_task(str(tmp_path / "out/task.yaml")).data.labels == tuple(labels)
    assert _run(tmp_path, "classify", rows, text="t") == found


def test_shuffled_labels_give_chance(tmp_path: Path) -> None:
    draw = random.Random(2)
    rows = {split: _rows(300, draw, "xy") for split in SPLITS}
    for lines in rows.values():
        golds = [line["label"] for line in lines]
        draw.shuffle(golds)
        for line, gold in zip(lines, golds, strict=True):
            line["label"] = gold
    found = _run(tmp_path, "classify", rows, text="t")
    # 600 rows of a coin: 4 standard errors.
    assert abs(found["mean"] - 0.5) < 4 * (0.25 / 600) ** 0.5


def test_a_pair_is_told_by_what_both_texts_share(tmp_path: Path) -> None:
    draw = random.Random(3)

    def pairs(num: int) -> list[dict[str, str]]:
        """Equal pairs and pairs of two texts; single texts tell nothing."""
        texts = ["".join(draw.choices("abcdefghijklmnop", k=12)) for _ in range(2 * num)]
        same = [{"a": text, "b": text[2:], "label": "1"} for text in texts[:num]]
        other = [{"a": text, "b": draw.choice(texts)[2:], "label": "0"} for text in texts[num:]]
        return [*same, *other]

    found = _run(tmp_path, "pair", {split: pairs(150) for split in SPLITS}, text="a", text_b="b")
    assert found["mean"] > 0.95


def test_labels_numbers_and_choices(tmp_path: Path) -> None:
    draw = random.Random(4)
    folders = [tmp_path / name for name in ("labels", "numbers", "choices")]
    for folder in folders:
        folder.mkdir()
    labels, numbers, choices = folders

    def several() -> dict[str, Any]:
        names = [name for name in "xyz" if draw.random() < 0.5]
        return {"t": " ".join(["some", *(name * 3 for name in names)]), "label": names}

    rows = {split: [several() for _ in range(80)] for split in SPLITS}
    found = _run(labels, "multilabel", rows, text="t")
    assert found["test"]["accuracy"] == 1.0

    def number() -> dict[str, Any]:
        count = draw.randrange(8)
        return {"t": "good " * count + "bad " * (8 - count), "label": count}

    rows = {split: [number() for _ in range(80)] for split in SPLITS}
    assert _run(numbers, "regress", rows, text="t")["mean"] > 0.95

    def choice() -> dict[str, Any]:
        gold = draw.randrange(3)
        numbers = draw.sample(range(99), 3)
        texts = [f"{'right' if i == gold else 'false'} {n}" for i, n in enumerate(numbers)]
        return {"c": [*texts, texts[0]], "label": gold}

    rows = {split: [choice() for _ in range(60)] for split in SPLITS}
    found = _run(choices, "choice", rows, choices="c")
    assert (found["mean"], found["chance"]) == (1.0, pytest.approx(1 / 3))
    assert all(line["scores"][3] is None for line in _predictions(choices)), "a repeat is masked"


def test_entities_are_looked_up_longest_first(tmp_path: Path) -> None:
    train = [
        {"t": "Ann met Ann Lee in Rome", "label": [["P", 0, 3], ["P", 8, 15], ["C", 19, 23]]},
        {"t": "Rome plays", "label": [["T", 0, 4]]},
        {"t": "to Rome", "label": [["C", 3, 7]]},
    ]
    test = [{"t": "Ann Lee saw Rome", "label": [["P", 0, 7], ["T", 12, 16]]}]
    found = _run(tmp_path, "tag", {"train": train, "dev": test, "test": test}, text="t")
    [line] = _predictions(tmp_path)
    assert line["prediction"] == [["P", 0, 7], ["C", 12, 16]], "Rome is a city twice, a team once"
    assert (found["mean"], found["majority"], found["chance"]) == (0.5, 0.0, 0.0)
    assert "scores" not in line


def test_a_class_that_train_never_has(tmp_path: Path) -> None:
    draw = random.Random(5)
    rows = {split: _rows(10, draw, "xy") for split in SPLITS}
    _task(tmp_path, "classify", rows, text="t")
    config = load_task(str(tmp_path / "t.yaml"), ("data.labels=[w, x, y]",))
    assert run_baseline(config, name="t", out=tmp_path / "out")["mean"] == 1.0


def test_a_test_file_without_gold(tmp_path: Path) -> None:
    draw = random.Random(6)
    rows: dict[str, list[Any]] = {split: _rows(10, draw) for split in SPLITS}
    rows["test"] = [{"t": row["t"]} for row in rows["test"]]
    found = _run(tmp_path, "classify", rows, text="t")
    assert found["test"] is None
    assert (found["protocol"]["scored_on"], found["mean"]) == ("dev", found["dev"]["accuracy"])
    assert {line["gold"] for line in _predictions(tmp_path)} == {None}


def test_questions_have_no_baseline(tmp_path: Path) -> None:
    row = {"t": "Rome is old", "q": "what?", "answers": [{"text": "Rome", "answer_start": 0}]}
    config = _task(tmp_path, "qa", {split: [row] for split in SPLITS}, text="t", text_b="q")
    assert run_baseline(config, name="t", out=tmp_path / "out") is None
    assert not (tmp_path / "out").exists()
