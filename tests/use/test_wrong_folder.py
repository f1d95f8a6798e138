"""Whatever opens a run says the same about a folder that is none, and what it takes instead."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoints.commands import at_step, resolve, rows
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, RunFolderError
from pipeline.inspect.run import open_run
from pipeline.inspect.status import run_status
from pipeline.use.evaluate import EvaluateArguments, evaluate_config
from pipeline.use.export import export
from pipeline.use.grow import grow
from pipeline.use.model import load
from pipeline.use.source import initial_weights
from tests.support.run_folder import RunFolder

_RUN = "a started run"
_COPY = "checkpoint.copy_to"
_MODEL = "or a model folder"
COMMANDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "status": (run_status, _RUN),
    "inspect": (open_run, _RUN),
    "checkpoint list": (rows, _COPY),
    "checkpoint verify": (lambda folder: at_step(folder, 1), _COPY),
    "checkpoint diff": (lambda folder: resolve(str(folder)), _COPY),
    "evaluate": (lambda folder: evaluate_config(EvaluateArguments(folder)), _MODEL),
    "export": (lambda folder: export(folder, folder.with_name("out")), _MODEL),
    "load": (load, _MODEL),
    "grow": (
        lambda folder: grow(folder, folder.with_name("out"), width=1, depth=2, noise=0.0, seed=0),
        _MODEL,
    ),
    "init_from": (initial_weights, _MODEL),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_wrong_folder_is_named(command: str, tmp_path: Path) -> None:
    function, takes = COMMANDS[command]
    (tmp_path / "file").write_text("seed: 1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/index.json").write_text("{}")
    RunFolder(tmp_path / "queued").submitted("12")
    expected = {
        "missing": "missing does not exist. Pass ",
        "file": "file is a file, not a run folder. Pass ",
        "empty": "empty is not a run folder (no attempts.jsonl). Pass ",
        "data": "data is a dataset, not a run folder (no attempts.jsonl). Pass ",
        "queued": "queued is a run that was submitted but has not started (no attempts.jsonl). ",
    }
    for name, text in expected.items():
        with pytest.raises(RunFolderError) as caught:
            function(tmp_path / name)
        assert f"{tmp_path}/{text}" in str(caught.value)
        assert name == "queued" or f"{takes}." in str(caught.value)
        assert caught.value.exit_code == EXIT_FAILED_DO_NOT_RETRY


@pytest.mark.parametrize("command", [name for name in COMMANDS if COMMANDS[name][1] != _MODEL])
def test_a_model_folder_is_not_a_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": "postnorm-encoder"}')
    with pytest.raises(RunFolderError, match="is a model folder, not a run folder"):
        COMMANDS[command][0](tmp_path)
