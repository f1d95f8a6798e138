"""Committed pages are what the command writes from the runs in their JSON, number for number."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.commands import VERBS
from pipeline.errors import ConfigError
from pipeline.runtime import cli

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
NAMES = sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != "post_ln")
_MEASURED = ("runs", "cells", "measured", "batches", "seeds", "versions")


def _report(folder: Path, name: str, *words: str) -> int:
    parser = cli.parser_of("postnorm", "", {"many": VERBS})
    line = ["study", name, "--report", "--out", str(folder / "none"), "--results", str(folder)]
    arguments = cli.parse(parser, [*line, *words])
    return int(arguments.run(arguments) or 0)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_committed_page_is_written_again_from_its_json(name: str, tmp_path: Path) -> None:
    shutil.copyfile(RESULTS / f"{name}.json", tmp_path / f"{name}.json")
    assert _report(tmp_path, name) == 0
    assert (tmp_path / f"{name}.md").read_text() == (RESULTS / f"{name}.md").read_text()
    body, committed = (json.loads((folder / f"{name}.json").read_text())
                       for folder in (tmp_path, RESULTS))  # fmt: skip
    assert {key: body.get(key) for key in _MEASURED} == {
        key: committed.get(key) for key in _MEASURED
    }
    # By "-" and not by the bare name: page "speed" does not own the figures of page "speedrun".
    figures = [*RESULTS.glob(f"{name}.svg"), *RESULTS.glob(f"{name}-*.svg")]
    assert {path.name for path in tmp_path.glob("*.svg")} == {path.name for path in figures}
    if name != "speed":
        _require_decisions_once(body)


def _require_decisions_once(body: dict[str, Any]) -> None:
    """Holm's correction, counted from the JSON alone: equal comparisons are one."""
    p = {(each["metric"], json.dumps(each["runs"])): each["interval"]["p"]
         for each in body["effects"] if each["interval"]}  # fmt: skip
    p |= {
        (each["metric"], json.dumps(each["runs"])): each["interval"]["p"]
        for each in body.get("budgets", [])
        if each["interval"]
    }
    p |= {("slope", number): each["p"] for number, each in enumerate(body["slopes"])}
    p = {key: value for key, value in p.items() if value is not None}
    assert f"of {len(p)} decisions" in body["how_sure"]
    ordered, limit = sorted(p, key=lambda key: p[key]), len(p)
    refused = next((i for i, key in enumerate(ordered) if p[key] * (limit - i) >= 0.05), limit)
    standing = set(ordered[:refused])
    assert f"and {len(standing)} after Holm's correction for all {limit}." in body["how_sure"]
    for each in body["effects"]:
        is_decided = each["verdict"] not in ("not decided", "same in all seeds")
        expected = (each["metric"], json.dumps(each["runs"])) in standing if is_decided else None
        assert each["stands"] is expected


def test_what_the_runs_were_cannot_be_changed_without_them(tmp_path: Path) -> None:
    shutil.copyfile(RESULTS / "packing.json", tmp_path / "packing.json")
    with pytest.raises(ConfigError, match=r"packing\.json.*--seeds"):
        _report(tmp_path, "packing", "--seeds", "1")
