"""What CI says of how long folders of tests took: .ci/check_tests.py."""

import json
import runpy
from pathlib import Path

import pytest

from tests.architecture.modules import ROOT

main = runpy.run_path(str(ROOT / ".ci/check_tests.py"))["main"]
BUDGET: dict[str, int] = json.loads((ROOT / "tests/budget.json").read_text())["test-all"]
USUAL = {folder: seconds / 2.5 for folder, seconds in BUDGET.items()}


def _check(seconds: dict[str, float], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = folder / "summary.json"
    summary.write_text(
        json.dumps({"left_out": {}, "failed": [], "skipped": {}, "seconds": seconds})
    )
    monkeypatch.setattr("sys.argv", ["check_tests.py", "test-all", str(summary)])
    main()


@pytest.mark.parametrize("slow", [0.5, 1.0, 2.0, 4.0])
def test_a_slow_machine_fails_nothing(
    slow: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check({folder: slow * s for folder, s in USUAL.items()}, tmp_path, monkeypatch)


@pytest.mark.parametrize("slow", [1.0, 2.0])
@pytest.mark.parametrize("grown", ["tests/distributed", "tests/docs"])
def test_a_folder_that_grew_alone_fails(
    grown: str, slow: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {folder: slow * s for folder, s in USUAL.items()} | {grown: 2.6 * slow * USUAL[grown]}
    with pytest.raises(SystemExit, match=rf"^{grown} took \d+ s of \d+ s") as raised:
        _check(seconds, tmp_path, monkeypatch)
    assert str(raised.value).count("took") == 1


def test_a_folder_without_a_budget_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="tests/new has no budget"):
        _check({"tests/new": 1.0}, tmp_path, monkeypatch)
