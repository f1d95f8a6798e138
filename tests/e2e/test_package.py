"""The wheel, installed outside the checkout: contents, names, and strangers in the current folder.

Dependencies come from the environment that runs this test; `.ci/check_package` installs all anew.
"""

import os
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import output

ROOT = Path(__file__).parents[2]


def _run(*words: object, cwd: Path, code: int = 0, **environ: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return output(*words, code=code, cwd=cwd, env={**clean, **environ})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # A copy: the build writes beside the sources. git lists what belongs to the project.
    (out / "source").mkdir()
    listed = "git ls-files -z --cached --others --exclude-standard"
    copy = f"{listed} | tar -c --null -T - | tar -C '{out}/source' -x"
    output("bash", "-o", "pipefail", "-c", copy)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run(*build, "--wheel-dir", out, out / "source", cwd=out)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel."""
    venv = tmp_path_factory.mktemp("venv")
    _run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = venv / "lib" / python / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    _run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=venv)
    return venv / "bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with names of ours."""
    for name in ("pipeline", "data_prep"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file was imported')\n")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").write_text("raise SystemExit('the wrong launch')\n")
    return tmp_path


def test_the_wheel_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    shipped = {f"postnorm/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert shipped <= names
    assert {
        "postnorm/py.typed", "pipeline/py.typed", "data_prep/datasheet/page.jinja",
        "data_prep/datasheet/frame.html", "data_prep/datasheet/parts.md",
        "postnorm/configs/filters/web.yaml",
    } <= names  # fmt: skip
    assert not {name for name in names if name.startswith(("tests", "benchmarks"))}
    assert "License-Expression: Apache-2.0" in metadata
    base = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    base = [line for line in base if "extra ==" not in line]
    assert not [line for line in base if "torch" in line or "deepspeed" in line]


def test_what_stands_in_the_current_folder_is_not_imported(installed: Path, folder: Path) -> None:
    # `.ci/check_package` does so with the program `postnorm`.
    start = [installed / "python", "-m", "postnorm"]
    assert _run(*start, "--version", cwd=folder).startswith("postnorm 0.")
    # This starts processes of its own.
    words = ["submit", "--prep", "demo", "--cluster", "cpu", "--dry-run"]
    assert "#SBATCH" in _run(*start, *words, cwd=folder)


def test_a_stranger_named_like_a_package_is_named(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text("import postnorm\npostnorm.load('runs/mine')\n")
    said = _run(installed / "python", "mine.py", cwd=tmp_path, code=1)
    assert f"{tmp_path}/pipeline.py" in said


def test_presets_are_found_by_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(
        "run_dir: r\nmodel: {from: roformer_v2-base, num_layers: 3}\ndata: {dir: d}\n"
    )
    command = [installed / "postnorm", "config"]
    said = _run(*command, "train.yaml", cwd=tmp_path)
    assert "num_layers: 3" in said
    assert "hidden_size: 768" in said
    (tmp_path / "demo").mkdir()  # a folder is not a config
    assert "run_dir: runs/demo/train" in _run(*command, "demo", cwd=tmp_path)
    said = _run(*command, "roformer_v2-bsae", cwd=tmp_path, code=2)
    assert "did you mean 'roformer_v2-base'?" in said


@pytest.mark.parametrize(
    ("module", "extra", "words"),
    [("torch", "train", "encode nosuch"), ("transformers", "hf", "export nosuch out --format hf")],
)
def test_a_missing_extra_is_named(
    installed: Path, tmp_path: Path, module: str, extra: str, words: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{module!r}] = None\n")
    command = [installed / "postnorm", *words.split()]
    said = _run(*command, cwd=tmp_path, code=2, PYTHONPATH=str(tmp_path))
    assert f"`pip install 'postnorm[{extra}]'`" in said
