"""What the README says exists and is accepted."""

import re
from pathlib import Path

import pytest

from data_prep.config import PrepConfig
from experiments.grid import SweepConfig
from experiments.study import StudyConfig
from experiments.transfer import TransferConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.model.cost import parameters
from pipeline.multitask.config import load_mix
from pipeline.tasks.task import TaskConfig
from tests.support.pages import PAGES, Block, blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_FOLDERS = [
    "benchmarks",
    "configs",
    "data_prep",
    "examples",
    "launch",
    "postnorm",
    "experiments",
    "tests",
]


def test_the_map_lists_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [table] = re.findall(r"## Map of the code\n\n(.*?)\n\n", text, flags=re.DOTALL)
    first_cells = "".join(re.findall(r"^\|(.*?)\|", table, flags=re.MULTILINE))
    packages = {f"pipeline/{path.parent.name}" for path in ROOT.glob("pipeline/*/__init__.py")}
    assert set(re.findall(r"`([a-z_/]+)/`", first_cells)) == packages.union(_FOLDERS)


def test_the_page_is_short_and_its_links_and_paths_exist() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 240] == []
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", README)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []
    pages = [README, *(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md"))]
    named = r"\b(?:configs|pipeline|launch|data_prep|tests|experiments)/[\w/.-]+\.(?:yaml|py)"
    paths = {path for page in pages for path in re.findall(named, page)}
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_parameters_in_the_table_of_models() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    cells = r"\| ([a-z0-9_]+-[a-z]+) \| [^|]* " + r"\| ([\d.,]+) " * 4
    rows = re.findall(cells, text)
    assert len(rows) == 17
    for name, *millions in rows:
        for vocab_size, shown in zip((12_000, 21_128, 30_522, 50_000), millions, strict=True):
            path = ROOT / "configs" / "model" / f"{name}.yaml"
            config = load(ModelConfig, path, [f"vocab_size={vocab_size}"]).config
            assert f"{parameters(config)['total'] / 1e6:,.2f}" == shown, (name, vocab_size)


@pytest.mark.parametrize(
    "block",
    [b for page in PAGES for b in blocks(page) if b.kind == "yaml" and "apiVersion:" not in b.text],
    ids=lambda block: block.name,
)
def test_yaml_examples_load(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(block.text)
    kinds = {
        "output_dir:": PrepConfig,
        "verb:": SweepConfig,
        "task:": TaskConfig,
        "mix:": TransferConfig,
        "question:": StudyConfig,
    }
    if re.search("^tasks:", block.text, re.M):
        load_mix(str(path))
        return
    kind = next((kinds[key] for key in kinds if re.search(f"^{key}", block.text, re.M)), None)
    if kind is not None:
        load(kind, path)
    else:
        # There is no run to go on from: what such a file says is read as a run's own.
        given = ["run_dir=runs/mine", "data.dir=data/mine", "continue_from=null"]
        load(PretrainConfig, path, given)
