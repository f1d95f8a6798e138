"""What the README says exists and is accepted."""

import re
from pathlib import Path

import pytest

from data_prep.config import PrepConfig
from pipeline.config.load import load
from pipeline.config.run import PretrainConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_map_lists_every_package() -> None:
    listed = set(re.findall(r"^\| `([a-z_/]+)/` \|", README, flags=re.MULTILINE))
    packages = {"data_prep", "launch", "configs", "tests"}
    packages |= {f"pipeline/{path.parent.name}" for path in ROOT.glob("pipeline/*/__init__.py")}
    assert listed == packages


def test_paths_exist() -> None:
    paths = set(re.findall(r"\b(?:configs|pipeline|tests)/[\w/.-]+\.(?:yaml|py)", README))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("number", [0, 1])
def test_yaml_examples_load(number: int, tmp_path: Path) -> None:
    text = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)[number]
    path = tmp_path / "example.yaml"
    path.write_text(text.replace("from: configs", f"from: {ROOT}/configs"))
    load((PrepConfig, PretrainConfig)[number], path)
