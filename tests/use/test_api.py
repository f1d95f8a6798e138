"""The package `postnorm` as others import it: light, complete, and clear where torch is missing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import postnorm

LIGHT = """
import json, sys
before = set(sys.modules)
import postnorm
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps([loaded, postnorm.__version__, dir(postnorm)]))
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import postnorm
for use in (lambda: postnorm.load, lambda: postnorm.TrainDataset,
            lambda: postnorm.pretrain(sys.argv[1], ["run_dir=" + sys.argv[1] + ".run"])):
    try:
        use()
    except postnorm.PostnormError as error:
        print(error)
"""


def _python(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("processes")
@pytest.mark.smoke
def test_importing_it_imports_nothing_that_takes_time() -> None:
    loaded, version, names = json.loads(_python(LIGHT))
    assert not {"torch", "numpy", "yaml", "pipeline", "data_prep", "launch"} & set(loaded)
    assert version == postnorm.__version__
    assert names == sorted(postnorm.__all__)


@pytest.mark.usefixtures("processes")
def test_a_missing_torch_is_an_error_that_names_the_extra(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("run_dir: unset\ndata: {dir: unset}\n")
    lines = _python(WITHOUT_TORCH, str(config)).splitlines()
    assert len(lines) == 3
    assert all("torch" in line and "pip install 'postnorm[train]'" in line for line in lines)


def test_type_checkers_and_python_see_the_same_names() -> None:
    tree = ast.parse(Path(postnorm.__file__).read_text())
    [block] = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        (alias.name, node.module) for node in ast.walk(block) if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    assert typed == set(postnorm._HOMES.items())
    assert {name for name, _ in typed} | {"__version__"} == set(postnorm.__all__)
    for name in postnorm.__all__:
        assert name == "__version__" or getattr(postnorm, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        postnorm.lod  # noqa: B018
