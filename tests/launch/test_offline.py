"""Wheelhouses: what is refused and what is missing, without a network; wheels are made here."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from launch.offline import manifest
from launch.offline.collect import collect
from launch.offline.install import install
from launch.offline.manifest import Target, damage, read_for, start, this_machine
from launch.offline.pip import pip_wheel
from launch.offline.requirements import needs, rules
from pipeline.errors import DataError

ROOT = Path(__file__).parents[2]
OLD, NEW = Target("3.10", "x86_64"), Target("3.12", "x86_64")
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "tiny"
version = "1"
requires-python = ">=3.10,<3.13"
dependencies = ["torch>=2.11", "Speed_Up>=2"]
[project.optional-dependencies]
hf = ["models[fast]"]
dev = ["tiny[hf]", "backport; python_version < '3.11'"]
[tool.setuptools]
py-modules = []
"""
CONSTRAINTS = """\
# comment
torch==2.13.0
pip==26.3
setuptools==84.2.1
speed-up==2.1; python_version < "3.11"
speed-up==2.2; python_version >= "3.11"
models==1.0
quick==3.0
backport==1.0
"""
ALL = {
    "pip-26.3": [],
    "setuptools-84.2.1": ["left; extra == 'core'"],
    "speed_up-2.1": ["torch", "nvidia-thing; sys_platform == 'win32'"],
    "speed_up-2.2": ["torch"],
    "models-1.0": ["quick>=3; extra == 'fast'", "slow; extra == 'all'"],
    "quick-3.0": ["Models"],
    "backport-1.0": [],
}


def make_wheel(folder: Path, stem: str, needed: list[str]) -> Path:
    """A wheel with an empty module, and what it says it needs."""
    name, version = stem.split("-")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needed)
    path = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "constraints.txt").write_text(CONSTRAINTS)
    return folder


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for stem, needed in ALL.items():
        make_wheel(folder, stem, needed)
    return folder


def test_what_is_needed_is_that_of_the_target_not_of_this_python(
    project: Path, house: Path
) -> None:
    both = {"pip", "setuptools", "models", "quick"}
    for target, speed_up, only in ((OLD, "2.1", {"backport"}), (NEW, "2.2", set())):
        state = needs(rules(project, target, None), house.glob("*.whl"))
        assert state.missing == {}
        assert set(state.found) == both | only | {"speed-up"}
        assert state.found["speed-up"].name == f"speed_up-{speed_up}-py3-none-any.whl"


def test_missing_wheels_are_named_with_their_version(project: Path, house: Path) -> None:
    (house / "quick-3.0-py3-none-any.whl").unlink()
    make_wheel(house, "quick-2.0", [])
    known = rules(project, NEW, None)
    assert needs(known, house.glob("*.whl")).missing == {"quick": "quick==3.0"}


def test_torch_is_followed_only_where_it_is_to_be_held(project: Path, house: Path) -> None:
    known = rules(project, NEW, "2.13.0+cpu")
    assert needs(known, house.glob("*.whl")).missing == {"torch": "torch==2.13.0+cpu"}
    # Its own packages have no pins; what they say of each other counts together.
    make_wheel(house, "torch-2.13.0+cpu", ["nvidia-blas==13.*; os_name == 'posix'", "nvidia-dnn"])
    make_wheel(house, "nvidia_dnn-9.0", ["nvidia-blas"])
    make_wheel(house, "nvidia_blas-14.0", [])
    assert needs(known, house.glob("*.whl")).missing == {"nvidia-blas": "nvidia-blas==13.*"}
    blas = make_wheel(house, "nvidia_blas-13.1", [])
    state = needs(known, house.glob("*.whl"))
    assert (state.missing, state.found["nvidia-blas"]) == ({}, blas)
    with pytest.raises(DataError, match=r"TORCH=2\.10\.0: the project needs torch>=2\.11"):
        rules(project, NEW, "2.10.0")


@pytest.mark.parametrize(
    ("stem", "needed", "message"),
    [
        ("quick-3.0", "new>=1", r"quick needs new>=1, and constraints.txt has no version of new"),
        ("quick-3.0", "models<1", r"quick needs models<1, and constraints.txt says models==1.0"),
    ],
)
def test_versions_that_do_not_fit(
    project: Path, house: Path, stem: str, needed: str, message: str
) -> None:
    make_wheel(house, stem, [needed])
    with pytest.raises(DataError, match=message):
        needs(rules(project, NEW, None), house.glob("*.whl"))


def test_a_python_that_the_project_does_not_know(project: Path) -> None:
    with pytest.raises(DataError, match=r"PYTHON=3\.13: expected >=3\.10,<3\.13"):
        rules(project, Target("3.13", "x86_64"), None)


def test_a_wheelhouse_is_refused_for_what_is_wrong_with_it(house: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json is not there.*PYTHON=3.12` and copy"):
        read_for(house, NEW)
    manifest.write(house, NEW, None, list(house.glob("*.whl")))
    assert read_for(house, NEW).files.keys() == {f"{stem}-py3-none-any.whl" for stem in ALL}
    with pytest.raises(DataError, match=r"this is Python 3.10 on .*`make wheelhouse PYTHON=3.10`$"):
        read_for(house, OLD)
    with pytest.raises(DataError, match=r"PYTHON=3.12` on aarch64$"):
        read_for(house, replace(NEW, machine="aarch64"))
    (house / "quick-3.0-py3-none-any.whl").unlink()
    with (house / "models-1.0-py3-none-any.whl").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"(?s)models-1.0\S+ has sha256 .*quick-3.0\S+ is not ther"):
        read_for(house, NEW)
    (house / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="no manifest of a wheelhouse"):
        read_for(house, NEW)


def test_a_collection_keeps_what_is_whole_and_drops_the_rest(project: Path, house: Path) -> None:
    known = rules(project, NEW, None)
    collect(known, project, house)
    first = (house / "manifest.json").read_bytes()
    # What 3.12 does not need is gone; nothing had to be fetched.
    assert {p.name.split("-")[0] for p in house.glob("*.whl")} == {
        "pip", "setuptools", "speed_up", "models", "quick"
    }  # fmt: skip
    make_wheel(house, "stranger-1.0", [])
    start(house, NEW)
    assert not (house / "manifest.json").exists()
    assert not (house / "stranger-1.0-py3-none-any.whl").exists()
    collect(known, project, house)
    assert (house / "manifest.json").read_bytes() == first
    assert damage(house, read_for(house, NEW)) == {}
    start(house, OLD)
    assert list(house.glob("*.whl")) == []


def test_more_than_one_pip_is_an_error(house: Path) -> None:
    assert pip_wheel(house).name == "pip-26.3-py3-none-any.whl"
    make_wheel(house, "pip-26.4", [])
    with pytest.raises(DataError, match="holds 2 wheels of pip"):
        pip_wheel(house)


def test_installing_names_what_the_wheelhouse_lacks(
    project: Path, house: Path, tmp_path: Path
) -> None:
    (house / "models-1.0-py3-none-any.whl").unlink()
    manifest.write(house, this_machine(), None, list(house.glob("*.whl")))
    known = rules(project, this_machine(), None)
    with pytest.raises(DataError, match=r"lacks models==1.0: it was collected for another state"):
        install(known, read_for(house, this_machine()), project, house, tmp_path / "venv")
    assert not (tmp_path / "venv").exists()


def test_every_requirement_of_the_installed_packages_has_a_pin(tmp_path: Path) -> None:
    """What is installed here stands for the wheels: nothing may be unpinned or contradict."""
    from importlib.metadata import distributions

    for found in distributions():
        name = found.metadata["Name"].replace("-", "_").lower()
        if name != "postnorm":
            needed = [need for need in found.requires or [] if found.metadata["Name"] != "torch"]
            make_wheel(tmp_path, f"{name}-{found.version}", needed)
    known = rules(ROOT, this_machine(), None)
    missing = needs(known, tmp_path.glob("*.whl")).missing
    # A venv's pip is the one that came with its Python.
    assert set(missing) <= {"pip"}
