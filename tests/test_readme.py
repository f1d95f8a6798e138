"""What the README says exists and is accepted."""

import re
from pathlib import Path

import pytest

from data_prep.config import PrepConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.model.cost import parameters

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_map_lists_every_package() -> None:
    listed = set(re.findall(r"^\| `([a-z_/]+)/` \|", README, flags=re.MULTILINE))
    packages = {"data_prep", "launch", "postnorm", "configs", "studies", "benchmarks", "tests"}
    packages |= {f"pipeline/{path.parent.name}" for path in ROOT.glob("pipeline/*/__init__.py")}
    assert listed == packages


def test_parameters_in_the_table_of_models() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    cells = r"\| ([a-z0-9_]+-[a-z]+) \| [^|]* " + r"\| ([\d.,]+) " * 4
    rows = re.findall(cells, text)
    assert len(rows) == 14
    for name, *millions in rows:
        for vocab_size, shown in zip((12_000, 21_128, 30_522, 50_000), millions, strict=True):
            path = ROOT / "configs" / "model" / f"{name}.yaml"
            config = load(ModelConfig, path, [f"vocab_size={vocab_size}"]).config
            assert f"{parameters(config)['total'] / 1e6:,.2f}" == shown, (name, vocab_size)


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
