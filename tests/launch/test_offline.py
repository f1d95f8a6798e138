"""Wheelhouses: what is refused and what is missing, without a network; wheels are made here."""

import zipfile
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch.offline.__main__ import collect, install
from launch.offline.requirements import read_pins
from launch.offline.wheelhouse import Target, begin, complete, open_for, pip_wheel, this_machine
from pipeline.errors import DataError

ROOT = Path(__file__).parents[2]
OLD, NEW = Target("3.11", "x86_64"), Target("3.12", "x86_64")
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "tiny"
version = "1"
requires-python = ">=3.11,<3.13"
dependencies = ["Speed_Up>=2"]
optional-dependencies.train = ["torch>=2.11"]
[tool.setuptools]
py-modules = []
"""
CONSTRAINTS = """\
# comment
torch==2.13.0
pip==26.3
setuptools==84.2.1
speed-up==2.1; python_version < "3.12"
speed-up==2.2; python_version >= "3.12"
Models==1.0
backport==1.0; python_version < "3.12"
"""
OF_NEW = ("pip-26.3", "setuptools-84.2.1", "speed_up-2.2", "models-1.0")


def make_wheel(folder: Path, stem: str) -> Path:
    """A wheel with an empty module."""
    name, version = stem.split("-")
    path = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Name: {name}\nVersion: {version}\n")
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
    """Everything for Python 3.12."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for stem in OF_NEW:
        make_wheel(folder, stem)
    return folder


def _wheels(folder: Path) -> list[Path]:
    return list(folder.glob("*.whl"))


def test_pins_are_those_of_the_target_not_of_this_python(project: Path, house: Path) -> None:
    assert read_pins(project, NEW).missing(_wheels(house)) == []
    assert read_pins(project, OLD).missing(_wheels(house)) == ["speed-up==2.1", "backport==1.0"]


def test_missing_wheels_are_named_with_their_version(project: Path, house: Path) -> None:
    (house / "models-1.0-py3-none-any.whl").unlink()
    make_wheel(house, "models-0.9")
    assert read_pins(project, NEW).missing(_wheels(house)) == ["models==1.0"]


def test_what_the_project_does_not_support_is_refused(project: Path) -> None:
    with pytest.raises(DataError, match=r"PYTHON=3\.13: expected >=3\.11,<3\.13"):
        read_pins(project, Target("3.13", "x86_64"))
    pins = read_pins(project, NEW)
    pins.check_torch("2.13.0+cpu", "TORCH=2.13.0+cpu")
    with pytest.raises(DataError, match=r"TORCH=2\.10\.0: the project needs torch>=2\.11"):
        pins.check_torch("2.10.0", "TORCH=2.10.0")


def test_a_wheelhouse_is_refused_for_what_is_wrong_with_it(house: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json does not exist.*PYTHON=3.12` and copy"):
        open_for(house, NEW)
    complete(house, NEW, None)
    assert open_for(house, NEW).files.keys() == {f"{stem}-py3-none-any.whl" for stem in OF_NEW}
    with pytest.raises(DataError, match=r"this is Python 3.11 on .*`make wheelhouse PYTHON=3.11`$"):
        open_for(house, OLD)
    with pytest.raises(DataError, match=r"PYTHON=3.12` on aarch64$"):
        open_for(house, replace(NEW, machine="aarch64"))
    (house / "speed_up-2.2-py3-none-any.whl").unlink()
    with (house / "models-1.0-py3-none-any.whl").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"(?s)models-1.0\S+ has sha256 .*speed_up\S+ does not exi"):
        open_for(house, NEW)
    (house / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="is not the manifest of a wheelhouse"):
        open_for(house, NEW)


def test_a_collection_keeps_what_is_whole_and_drops_the_rest(project: Path, house: Path) -> None:
    pins = read_pins(project, NEW)
    # Nothing has to be fetched.
    first = collect(pins, None, project, house)
    make_wheel(house, "stranger-1.0")
    begin(house, NEW)
    assert not (house / "manifest.json").exists()
    assert not (house / "stranger-1.0-py3-none-any.whl").exists()
    assert collect(pins, None, project, house) == first == open_for(house, NEW)
    (house / "models-1.0-py3-none-any.whl").write_bytes(b"damaged")
    begin(house, NEW)
    assert pins.missing(_wheels(house)) == ["models==1.0"]
    complete(house, NEW, None)
    begin(house, OLD)
    assert _wheels(house) == []


def test_more_than_one_pip_is_an_error(house: Path) -> None:
    assert pip_wheel(house).name == "pip-26.3-py3-none-any.whl"
    make_wheel(house, "pip-26.4")
    with pytest.raises(DataError, match="holds 2 wheels of pip"):
        pip_wheel(house)


def test_installing_names_what_the_wheelhouse_lacks(
    project: Path, house: Path, tmp_path: Path
) -> None:
    (house / "models-1.0-py3-none-any.whl").unlink()
    complete(house, this_machine(), None)
    pins = read_pins(project, this_machine())
    with pytest.raises(
        DataError, match=r"lacks .*models==1.0.*: it was collected for another state"
    ):
        install(pins, open_for(house, this_machine()), project, house, tmp_path / "venv")
    assert not (tmp_path / "venv").exists()


def test_every_requirement_of_the_installed_packages_has_a_pin() -> None:
    """Packages are installed without pip's resolver: nothing may be unpinned or contradict."""
    installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    pins = read_pins(ROOT, this_machine()).versions
    for name in pins.keys() & installed.keys():
        for need in map(Requirement, installed[name].requires or []):
            other = canonicalize_name(need.name)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert other in pins or other == "torch", f"{name} needs {need}"
                assert other == "torch" or need.specifier.contains(pins[other]), f"{name}: {need}"
