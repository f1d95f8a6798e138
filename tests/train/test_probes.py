"""Linear probes: the regression against sklearn, the passes of ranks, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from pipeline.config.train import MonitorConfig
from pipeline.errors import ConfigError
from pipeline.tasks.task import TaskConfig, probe_tasks
from pipeline.train.probes import fit_ridge, passes_of

NUM_CLASSES = 3


def _table(num_rows: int, num_features: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Features of very different means and scales, the last one constant; classes, not all even."""
    random = np.random.default_rng(0)
    features = random.normal(size=(num_rows, num_features))
    scores = features[:, :NUM_CLASSES] + noise * random.normal(size=(num_rows, NUM_CLASSES))
    features = 10.0 + features * 10.0 ** random.uniform(-3, 3, num_features)
    features[:, -1] = 7.0
    return features, (scores + np.array([0.0, 0.5, 1.0])).argmax(1)


def _products(features: np.ndarray, classes: np.ndarray) -> torch.Tensor:
    table = np.concatenate((np.ones((len(features), 1)), features, np.eye(NUM_CLASSES)[classes]), 1)
    half = len(table) // 3  # as two ranks would
    parts = [torch.from_numpy(part.T @ part) for part in (table[:half], table[half:])]
    return torch.stack(parts).sum(0)


def _reference(features: np.ndarray, classes: np.ndarray) -> tuple[float, np.ndarray]:
    """The penalty with the least generalised cross-validation, from the rows, and its scores."""
    scale = features.std(0)
    scale[-1] = 1.0
    rows, golds = (features - features.mean(0)) / scale, np.eye(NUM_CLASSES)[classes]
    found = []
    for penalty in np.logspace(-4, 1, 11):
        scores = Ridge(alpha=len(rows) * penalty, solver="svd").fit(rows, golds).predict(rows)
        gram = rows.T @ rows + len(rows) * penalty * np.eye(rows.shape[1])
        freedom = 1 + np.trace(rows @ np.linalg.solve(gram, rows.T))
        error = ((golds - scores) ** 2).sum() / (1 - freedom / len(rows)) ** 2
        found.append((error, penalty, scores))
    _, penalty, scores = min(found, key=lambda each: each[0])
    return penalty, scores


@pytest.mark.parametrize(
    ("num_rows", "num_features", "noise"), [(400, 20, 0.1), (60, 40, 3.0), (30, 80, 1.0)]
)
def test_fit_is_the_ridge_regression_chosen(num_rows: int, num_features: int, noise: float) -> None:
    features, classes = _table(num_rows, num_features, noise)
    weights = fit_ridge(_products(features, classes), NUM_CLASSES).numpy()
    assert weights.shape == (1 + num_features, NUM_CLASSES)
    _, expected = _reference(features, classes)
    np.testing.assert_allclose(weights[0] + features @ weights[1:], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fit_of_a_model_that_broke_is_nan_and_not_an_error(value: float) -> None:
    features, classes = _table(40, 5, 0.1)
    products = _products(features, classes)
    products[3, 2] = value
    assert fit_ridge(products, NUM_CLASSES).isnan().all()


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_passes_hold_every_row_once_and_fit_into_each_rank(world_size: int) -> None:
    lengths = [3 + number * 37 % 61 for number in range(101)]
    passes = passes_of(lengths, 128, world_size)
    assert sorted(number for each in passes for number in each) == list(range(101))
    for each in passes:
        for rank in range(world_size):
            own = [lengths[number] for number in each[rank::world_size]]
            assert len(own) * max(own, default=0) <= 128
    longest = [lengths[each[0]] for each in passes]
    assert longest == sorted(longest, reverse=True)
    assert passes_of([500], 128, world_size) == [[0]], "a row alone may be longer"


LINE = json.dumps({"text": "a", "label": "x"}) + "\n"
TASK = """\
task: {kind: classify}
data: {train: [train.jsonl], dev: [dev.jsonl], format: jsonl, fields: {text: text}}
"""


def _tasks(folder: Path, *names: str, root: Path | None = None) -> dict[str, TaskConfig]:
    monitor = MonitorConfig(probes=names, probe_root=None if root is None else str(root))
    return probe_tasks(monitor, str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task whose files lie beside it."""
    for name, text in (("mine.yaml", TASK), ("train.jsonl", LINE), ("dev.jsonl", LINE)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_tasks_are_found_from_the_working_folder_and_by_name(folder: Path) -> None:
    assert list(_tasks(folder)) == []
    assert _tasks(folder, "mine.yaml")["mine"].data.root == str(folder)
    data = folder / "data with: colon" / "clue/tnews"
    data.mkdir(parents=True)
    for name in ("train.json", "dev.json"):
        (data / name).write_text(LINE)
    assert _tasks(folder, "tnews", root=data.parents[1])["tnews"].data.root == str(data.parents[1])
    (folder / "mine.yaml").write_text(TASK.replace("dev: [dev.jsonl]", "hold_out: 0.5"))
    assert _tasks(folder, "mine.yaml")["mine"].data.hold_out == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TASK.replace("classify", "tag"), "mine.yaml has task.kind=tag"),
        (TASK.replace("dev: [dev.jsonl], ", ""), "data.dev or data.hold_out"),
        (TASK.replace("dev.jsonl", "gone.jsonl"), "gone.jsonl"),
        (TASK.replace("kind:", "kinds:"), "mine.yaml"),
    ],
)
def test_what_cannot_be_probed_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        _tasks(folder, "mine.yaml")


def test_missing_task_file_and_equal_names_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        _tasks(folder, "gone.yaml")
    with pytest.raises(ConfigError, match="second task named mine"):
        _tasks(folder, "mine.yaml", str(folder / "mine.yaml"))
