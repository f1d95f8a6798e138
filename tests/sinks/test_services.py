"""W&B and MLflow as they are installed, in the modes that need no network; else skipped."""

import importlib.util
import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from pipeline.sinks.base import tag_of
from tests.support.ranks import Ranks, records


@pytest.fixture(scope="module")
def run_dir(
    dataset: DatasetIndex, tmp_path_factory: pytest.TempPathFactory, start_ranks: type[Ranks]
) -> Path:
    """A run in two attempts that writes to those services that are installed."""
    run_dir = tmp_path_factory.mktemp("services") / "run"
    there = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name)]
    sinks = f"monitor.sinks=[{', '.join(['tensorboard', *there])}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        for length in ("train.num_steps=12", "train.num_steps=20"):
            ranks = start_ranks(run_dir, dataset, sinks, length, "monitor.eval_every_steps=10")
            ranks.ended(timeout_s=240)
    assert "resumed from" in ranks.output
    assert "fails" not in ranks.output
    assert "lost" not in ranks.output
    return run_dir


def points_of(run_dir: Path) -> dict[str, dict[int, float]]:
    """By tag and step, as metrics.jsonl has them."""
    points: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for kind in ("train", "eval", "save", "straggler"):
        for record in records(run_dir, kind):
            for name in record.keys() - {"step", "kind", "attempt", "unix_s"}:
                points[tag_of(kind, name)][record["step"]] = record[name]
    return points


def _installed(name: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not is_there, reason=f"pip install 'postnorm[{name}]'")


_BLOCK, _HEADER = 1 << 15, 7


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format behind W&B's own header of 7 bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the end of a block that no header fits into
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@_installed("wandb")
def test_weights_and_biases_has_all_numbers_of_both_attempts(run_dir: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    run_id = (run_dir / "sinks" / "wandb").read_text().strip()
    files = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == 2 * [f"run-{run_id}.wandb"]  # of rank 0 alone
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for path in files:
        for data in _log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                assert record.run.display_name == f"{run_dir.parent.name}/run"
                assert record.run.project == "postnorm"
            row = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                for item in record.history.item
            }
            for tag, value in row.items():
                if isinstance(value, (int, float)):
                    found[tag][row["step"]] = value
    expected = points_of(run_dir)
    assert expected.keys() <= found.keys()
    for tag, points in expected.items():
        assert found[tag] == pytest.approx(points), tag


@_installed("mlflow")
def test_mlflow_has_all_numbers_of_both_attempts(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((run_dir / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("postnorm").experiment_id])
    assert run.info.run_id == (run_dir / "sinks" / "mlflow").read_text().strip()
    assert run.info.run_name == f"{run_dir.parent.name}/run"
    assert run.info.status == "FINISHED"
    assert run.data.params["train.alpha_warmup_steps"] == "10"
    for tag, points in points_of(run_dir).items():
        history = client.get_metric_history(run.info.run_id, tag)
        assert {each.step: each.value for each in history} == pytest.approx(points), tag
    files = {each.path for each in client.list_artifacts(run.info.run_id, "layers")}
    assert files == {"layers/attention_entropy"}
    text = client.download_artifacts(run.info.run_id, "config/00000000.md", str(tmp_path))
    assert re.search(r"num_steps: (12|20)", Path(text).read_text())
