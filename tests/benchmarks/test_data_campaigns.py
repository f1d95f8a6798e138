"""The campaigns against data preparation and the loader: what they find, and that they can fail."""

from pathlib import Path

import pytest

from benchmarks import prep_faults, reproductions

pytestmark = pytest.mark.slow


def test_findings_are_reproduced_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = reproductions.Scene(tmp_path)
    results = reproductions.reproduce(scene, ["data 4", "loader 4"])
    assert {row["finding"]: row["ok"] for row in results} == {"data 4": True, "loader 4": True}
    assert len({name for name, _, _ in reproductions.FINDINGS}) == 14
    # As if damage went unseen.
    monkeypatch.setattr(reproductions, "_flip", lambda path, place=None: None)
    (tmp_path / "changed").rename(tmp_path / "before")
    [row] = reproductions.reproduce(scene, ["loader 4"])
    assert not row["ok"]
    assert "FAILED loader 4" in capsys.readouterr().out


@pytest.mark.usefixtures("processes")
def test_two_runs_that_contend_make_the_dataset_of_one(tmp_path: Path) -> None:
    campaign = prep_faults.Campaign(tmp_path, seed=3)
    campaign.round(2)
    assert campaign.problems == []
    assert len(campaign.rows) == 2
    assert campaign.files > 100
    path = tmp_path / "straight" / "work" / "ingest" / "00001.bytes.npy"
    path.write_bytes(path.read_bytes()[:-1])
    campaign.round(0)
    assert campaign.problems == [
        "round 2: work/ingest/00001.bytes.npy differs, or stands in one alone"
    ]
