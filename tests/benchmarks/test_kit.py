"""The kit for a GPU machine: what goes into it, and that it installs without index and network.

Wheels are made here, but for the test of the real kit, which needs a package index.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from pip._vendor.packaging.utils import canonicalize_name

from benchmarks import kit
from benchmarks.kit import MACHINE, Machine
from tests.support.processes import python

pytestmark = pytest.mark.usefixtures("processes")

ROOT = Path(__file__).parents[2]
INSTRUMENTS = ("kit", "machine", "gpu_checks", "attention", "step", "step_worker", "gpu_report",
               "training_report")  # fmt: skip
# Nothing listens there: whoever asks a network fails.
NO_NETWORK = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0",
              "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "http_proxy": "http://127.0.0.1:9",
              "https_proxy": "http://127.0.0.1:9", "PIP_CONFIG_FILE": os.devnull}  # fmt: skip


def wheel(folder: Path, name: str, version: str, *needs: str, tag: str = "py3-none-any") -> Path:
    """A wheel with one module of its name."""
    path = folder / f"{name}-{version}-{tag}.whl"
    about = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def test_every_import_of_every_instrument_resolves() -> None:
    """Modules of ours exist; others are of packages that the machine has or the kit carries."""
    covered = set(Machine.read(MACHINE).packages)
    covered |= {canonicalize_name(need.name) for need in kit._project_requirements()} | {"pip"}
    # Of the extras `tables`, `s3` and `onnx`, imported where n-grams are counted, where an address
    # is not a path, and where a graph is exported: no instrument does.
    covered |= {"scikit-learn", "scipy", "fsspec", "onnxruntime"}
    providers = metadata.packages_distributions()
    waiting = [ROOT / f"benchmarks/{name}.py" for name in INSTRUMENTS]
    waiting.append(ROOT / "pipeline/__main__.py")
    seen: set[Path] = set()
    unknown = []
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imports(path):
            top = name.split(".")[0]
            own = ROOT / Path(*name.split("."))
            if (ROOT / top).is_dir():
                waiting += [file for file in (own.with_suffix(".py"), own / "__init__.py")
                            if file.is_file()]  # fmt: skip
                if not own.with_suffix(".py").is_file() and not own.is_dir():
                    unknown.append(f"{path}: {name}")
            elif top not in sys.stdlib_module_names:
                names = {canonicalize_name(each) for each in providers.get(top, [top])}
                if not names & covered:
                    unknown.append(f"{path}: {name}")
    assert unknown == []
    assert len(seen) > 60


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(str(node.module))
            for alias in node.names:
                inner = ROOT / Path(*str(node.module).split(".")) / f"{alias.name}.py"
                names |= {f"{node.module}.{alias.name}"} if inner.is_file() else set()
    return names


@pytest.fixture(scope="module")
def python_3_12(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment of Python 3.12 with nothing but pip."""
    found = [*Path.home().glob(".pyenv/versions/3.12*/bin/python"),
             *filter(None, [shutil.which("python3.12")])]  # fmt: skip
    venv = tmp_path_factory.mktemp("python3.12")
    for program in map(str, found):
        made = subprocess.run([program, "-m", "venv", venv], capture_output=True, check=False)
        if made.returncode == 0:
            return venv
    pytest.skip("needs a Python 3.12 that makes environments: python3.12, or pyenv install 3.12")


def pretend(site: Path, has: Machine) -> None:
    """Metadata of what a machine has, and nothing more."""
    pins = {canonicalize_name(name): version for name, version in _pins()}
    for name, version in has.packages.items():
        shown = version or pins.get(name, "999")
        folder = site / f"{name.replace('-', '_')}-{shown}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {shown}\n")


def _pins() -> list[tuple[str, str]]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition(";")[0].split("==") for line in lines if "==" in line]
    return [(pair[0].strip(), pair[1].strip()) for pair in pairs if len(pair) == 2]


def site_packages(venv: Path) -> Path:
    return venv / "lib/python3.12/site-packages"


def install(python: str | Path, folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.kit install` without index and network."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), "-m", "benchmarks.kit", "install", str(folder), str(target)],
        cwd=ROOT, env=variables | NO_NETWORK, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def small_kit(folder: Path, needs: dict[str, str], *wheels: Path) -> Path:
    (folder / "wheels").mkdir(parents=True)
    for path in wheels:
        shutil.copy(path, folder / "wheels")
    about = {"python": "3.12", "machine": os.uname().machine, "needs": needs,
             "wheels": {path.name: kit._sha256(path) for path in wheels}}  # fmt: skip
    (folder / "kit.json").write_text(json.dumps(about))
    return folder


def test_a_kit_installs_into_a_clean_python(python_3_12: Path, tmp_path: Path) -> None:
    python, target = python_3_12 / "bin/python", tmp_path / "target"
    folder = small_kit(tmp_path / "kit", {"carried>=1": "postnorm", "had>=2": "carried"},
                       wheel(tmp_path, "carried", "1", "had>=2"))  # fmt: skip
    done = install(python, folder, target)
    assert (done.returncode, done.stdout) == (1, "missing: had>=2, which carried needs\n")
    stub = site_packages(python_3_12) / "had-1.9.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: had\nVersion: 1.9\n")
    done = install(python, folder, target)
    assert done.stdout == "wrong version: had>=2, which carried needs; 1.9 is there\n"
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: had\nVersion: 2.0\n")
    done = install(python, folder, target)
    assert (done.stdout, done.returncode) == ("every requirement is met\n", 0)
    code = "import carried; print(carried.VERSION)"
    said = subprocess.check_output([python, "-c", code], text=True,
                                   env={**os.environ, "PYTHONPATH": str(target)})  # fmt: skip
    assert said == "1\n"
    shutil.rmtree(stub)


def test_damaged_kit_or_python_is_refused(python_3_12: Path, tmp_path: Path) -> None:
    folder = small_kit(tmp_path / "kit", {"carried": "postnorm"}, wheel(tmp_path, "carried", "1"))
    if sys.version_info[:2] != (3, 12):
        done = install(sys.executable, folder, tmp_path / "target")
        assert "is for Python 3.12 on" in done.stdout
        assert "benchmarks/gpu/machine.txt" in done.stdout
    [path] = (folder / "wheels").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    done = install(python_3_12 / "bin/python", folder, tmp_path / "target")
    assert done.returncode == 1
    assert path.name in done.stdout


@pytest.mark.slow
def test_the_real_kit(python_3_12: Path, tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest",
         str(tmp_path / "probe"), "hjson"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode:
        pytest.skip(f"needs a package index, which pip does not reach: {asked.stderr[-300:]}")
    folder, target = tmp_path / "kit", tmp_path / "target"
    python("-m", "benchmarks.kit", "make", folder, "--no-data")
    names = [path.name for path in (folder / "wheels").iterdir()]
    assert any(name.startswith("deepspeed-") and name.endswith("-py3-none-any.whl")
               for name in names)  # fmt: skip
    assert not [name for name in names if "cp311" in name or name.startswith("torch")]
    assert sum(path.stat().st_size for path in folder.rglob("*.whl")) < 24 * 2**20
    pretend(site_packages(python_3_12), Machine.read(MACHINE))
    done = install(python_3_12 / "bin/python", folder, target)
    assert (done.stdout, done.returncode) == ("every requirement is met\n", 0)
    # Those that need nothing else than each other.
    code = "import sentencepiece, opencc, rjieba, google_crc32c, pydantic, hjson, braceexpand"
    subprocess.run([python_3_12 / "bin/python", "-c", code], check=True,
                   env={**os.environ, "PYTHONPATH": str(target)})  # fmt: skip
