"""The wheel, installed outside the checkout: contents, names, and strangers in the current folder.

Dependencies come from the environment that runs this test; `.ci/check_package` installs all anew.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(words: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words, cwd=cwd, env={**clean, **environ}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # A copy: the build writes beside the sources. git lists what belongs to the project.
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    archive = ["tar", "-C", str(ROOT), "-c", "--null", "-T", "-"]
    packed = subprocess.run(archive, input=listed.stdout.encode(), capture_output=True, check=True)
    (out / "source").mkdir()
    subprocess.run(["tar", "-C", str(out / "source"), "-x"], input=packed.stdout, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = _run([*build, "--wheel-dir", str(out), str(out / "source")], out)
    assert done.returncode == 0, done.stderr
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel."""
    venv = tmp_path_factory.mktemp("venv")
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], venv)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = venv / "lib" / python / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    options = ["--quiet", "--no-deps", "--no-index", "--python", str(venv / "bin" / "python")]
    done = _run(
        [sys.executable, "-m", "pip", *options[3:], "install", *options[:3], str(wheel)], venv
    )
    assert done.returncode == 0, done.stderr
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
    start = [str(installed / "python"), "-m", "postnorm"]
    done = _run([*start, "--version"], folder)
    assert done.stdout.startswith("postnorm 0."), done.stdout + done.stderr
    # This starts processes of its own.
    done = _run([*start, "submit", "--prep", "demo", "--cluster", "cpu", "--dry-run"], folder)
    assert "#SBATCH" in done.stdout, done.stdout + done.stderr


def test_a_stranger_named_like_a_package_is_named(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text("import postnorm\npostnorm.load('runs/mine')\n")
    done = _run([str(installed / "python"), "mine.py"], tmp_path)
    assert f"{tmp_path}/pipeline.py" in done.stderr


def test_presets_are_found_by_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(
        "run_dir: r\nmodel: {from: roformer_v2-base, num_layers: 3}\ndata: {dir: d}\n"
    )
    done = _run([str(installed / "postnorm"), "config", "train.yaml"], tmp_path)
    assert "num_layers: 3" in done.stdout, done.stderr
    assert "hidden_size: 768" in done.stdout
    (tmp_path / "demo").mkdir()  # a folder is not a config
    done = _run([str(installed / "postnorm"), "config", "demo"], tmp_path)
    assert "run_dir: runs/demo/train" in done.stdout, done.stderr
    done = _run([str(installed / "postnorm"), "config", "roformer_v2-bsae"], tmp_path)
    assert done.returncode == 2
    assert "did you mean 'roformer_v2-base'?" in done.stdout + done.stderr


@pytest.mark.parametrize(("module", "extra"), [("torch", "train"), ("transformers", "hf")])
def test_a_missing_extra_is_named(installed: Path, tmp_path: Path, module: str, extra: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{module!r}] = None\n")
    verbs = {
        "torch": ["encode", "nosuch"],
        "transformers": ["export", "nosuch", "out", "--format", "hf"],
    }
    done = _run([str(installed / "postnorm"), *verbs[module]], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert f"`pip install 'postnorm[{extra}]'`" in done.stdout + done.stderr
