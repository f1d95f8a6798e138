"""A kit for a GPU machine without a network: the packages it lacks, and a prepared dataset.

    python -m benchmarks.kit make gpu-kit [--machine benchmarks/gpu/machine.txt] [--no-data]
    python -m benchmarks.kit install gpu-kit TARGET

`make` needs a package index. It follows the requirements of pyproject.toml, leaves out what the
machine has, and fetches the rest as wheels for the machine's Python, in the versions of
constraints.txt. `install` runs on the machine itself, with its bare Python and without an index:
it installs into TARGET, a folder for PYTHONPATH, and names every requirement that is still not
met; then the exit code is 1. Where nothing is missing it installs nothing.
"""

import argparse
import email
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

# pip is on both machines; a package of its own for this may not be.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MACHINE = ROOT / "benchmarks/gpu/machine.txt"
LIMIT_MIB = 40.0
_DATA = "benchmarks/gpu/data.yaml"
_ABOUT = "kit.json"
_EXTRAS = ("train", "hf")
"""Of the project: what the benchmarks need beside its own requirements."""
_SOURCE_ONLY = ("deepspeed",)
"""Published without wheels; one is built here."""
_GLIBC = 39
"""Newest glibc whose wheels are taken: that of the machine's system, Ubuntu 24.04."""


@dataclass(frozen=True)
class Machine:
    """The packages of a machine."""

    python: str
    """Such as 3.12."""
    packages: dict[str, str | None]
    """Version by canonical name; None: any."""

    @classmethod
    def read(cls, path: Path) -> "Machine":
        """Reads a file of NAME==VERSION lines."""
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        packages: dict[str, str | None] = {}
        for line in filter(None, lines):
            name, _, version = line.partition("==")
            packages[canonicalize_name(name.strip())] = version.strip() or None
        python = packages.pop("python", None)
        if python is None:
            raise SystemExit(f"{path}: no line python==VERSION, such as python==3.12")
        return cls(python, packages)

    def meets(self, need: Requirement) -> bool:
        """Whether the machine has what a requirement asks for."""
        name = canonicalize_name(need.name)
        if name not in self.packages:
            return False
        version = self.packages[name]
        return version is None or need.specifier.contains(version, prereleases=True)

    def concerns(self, need: Requirement, extras: Iterable[str] = ()) -> bool:
        """Whether a requirement's condition holds there."""
        here = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        marker = need.marker
        return marker is None or any(marker.evaluate(here | {"extra": e}) for e in ("", *extras))


class Wheels:
    """The wheels of a kit: what was followed so far, and the folder they are in."""

    def __init__(self, machine: Machine, pins: Iterable[Requirement], folder: Path) -> None:
        self._machine, self._folder = machine, folder
        self._pins = {canonicalize_name(pin.name): pin for pin in pins if machine.concerns(pin)}
        self.needs: dict[str, str] = {}
        """Who asks, by requirement, of all that the kit and the machine have to meet together."""
        self.files: dict[str, Path] = {}

    def follow(self, asker: str, needs: Iterable[Requirement], extras: Iterable[str] = ()) -> None:
        """Fetches what the machine lacks of some requirements, and of those of what was fetched."""
        for need in needs:
            if not self._machine.concerns(need, extras):
                continue
            name = canonicalize_name(need.name)
            self.needs.setdefault(f"{need.name}{need.specifier}", asker)
            if name in self.files:
                version = _version(self.files[name])
                if not need.specifier.contains(version, prereleases=True):
                    raise SystemExit(f"{asker} needs {need}, and {name} {version} was fetched: "
                                     "change its version in constraints.txt")  # fmt: skip
            elif not self._machine.meets(need):
                if name == "torch":
                    raise SystemExit(f"{asker} needs {need}; the machine has torch "
                                     f"{self._machine.packages.get(name)}")  # fmt: skip
                self.files[name] = wheel = self._fetch(need)
                self.follow(name, _requirements(wheel), need.extras)

    def _fetch(self, need: Requirement) -> Path:
        pin = self._pins.get(canonicalize_name(need.name))
        wanted = need.name + str(pin.specifier if pin else need.specifier)
        before = set(self._folder.glob("*.whl"))
        into = ["--no-deps", "--no-cache-dir"]
        if need.name in _SOURCE_ONLY:
            # No CUDA code in the wheel; the same bytes every time.
            variables = {"DS_BUILD_OPS": "0", "SOURCE_DATE_EPOCH": "1600000000",
                         "PYTHONHASHSEED": "0"}  # fmt: skip
            _pip("wheel", *into, "--wheel-dir", str(self._folder), wanted, **variables)
        else:
            machine = platform.machine()
            tags = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC, 4, -1)]
            tags += [f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")]
            _pip("download", *into, "--only-binary=:all:", "--dest", str(self._folder),
                 "--implementation", "cp", "--python-version", self._machine.python,
                 *(f"--platform={tag}" for tag in tags), wanted)  # fmt: skip
        [wheel] = set(self._folder.glob("*.whl")) - before
        if need.name in _SOURCE_ONLY and not wheel.name.endswith("-none-any.whl"):
            raise SystemExit(f"{wheel.name} runs on machines like this one only; expected a wheel "
                             "without compiled code")  # fmt: skip
        return wheel


def make(kit: Path, machine_file: Path, *, with_data: bool) -> None:
    """Makes a kit anew."""
    machine = Machine.read(machine_file)
    shutil.rmtree(kit, ignore_errors=True)
    (kit / "wheels").mkdir(parents=True)
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    wheels = Wheels(machine, pins, kit / "wheels")
    wheels.follow("postnorm", _project_requirements())
    if with_data:
        _prepare_data(kit / "data")
    about = {
        "python": machine.python,
        "machine": platform.machine(),
        "needs": wheels.needs,
        "wheels": {path.name: _sha256(path) for path in sorted(wheels.files.values())},
    }
    (kit / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    sizes = {p: p.stat().st_size / 2**20 for p in kit.rglob("*") if p.is_file()}
    for path, mib in sorted(sizes.items(), key=lambda item: -item[1])[:12]:
        sys.stdout.write(f"{mib:8.2f} MiB  {path.relative_to(kit)}\n")
    total = sum(sizes.values())
    sys.stdout.write(
        f"{total:8.1f} MiB  {kit}: {len(wheels.files)} wheels for Python {machine.python}\n"
    )
    if total > LIMIT_MIB:
        raise SystemExit(
            f"{kit} has {total:.1f} MiB, expected {LIMIT_MIB:.0f} at most; see the largest files "
            f"above: {machine_file} says what is carried, {_DATA} how much text"
        )


def install(kit: Path, target: Path) -> list[str]:
    """Installs what this Python lacks of a kit's requirements; returns what is still missing."""
    about = json.loads((kit / _ABOUT).read_text())
    if not unmet(about["needs"], target):
        return []
    here = ".".join(platform.python_version_tuple()[:2]), platform.machine()
    if here != (about["python"], about["machine"]):
        raise SystemExit(f"{kit} is for Python {about['python']} on {about['machine']}, this is "
                         f"{here[0]} on {here[1]}: change python== in benchmarks/gpu/machine.txt "
                         "and run `make gpu-kit` again")  # fmt: skip
    for name, sha256 in about["wheels"].items():
        path = kit / "wheels" / name
        if not path.is_file() or _sha256(path) != sha256:
            raise SystemExit(f"{path} is missing or damaged; copy the kit again")
    if about["wheels"]:
        files = [str(kit / "wheels" / name) for name in about["wheels"]]
        _pip("install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir",
             "--upgrade", "--target", str(target), *files, PIP_CONFIG_FILE=os.devnull,
             PIP_ROOT_USER_ACTION="ignore")  # fmt: skip
    return unmet(about["needs"], target)


def unmet(needs: dict[str, str], target: Path) -> list[str]:
    """Requirements that neither the target folder nor the running Python meets."""
    versions: dict[str, str] = {}
    for found in metadata.distributions(path=[str(target), *sys.path]):
        if name := found.metadata["Name"]:  # None of what an interrupted removal left
            versions.setdefault(canonicalize_name(name), found.version)
    lines = []
    for text, asker in sorted(needs.items()):
        need = Requirement(text)
        version = versions.get(canonicalize_name(need.name))
        if version is None:
            lines.append(f"missing: {text}, which {asker} needs")
        elif not need.specifier.contains(version, prereleases=True):
            lines.append(f"wrong version: {text}, which {asker} needs; {version} is there")
    return lines


def _prepare_data(folder: Path) -> None:
    library = sysconfig.get_paths()["stdlib"]
    # Not site-packages, which some installations keep inside.
    inputs = [f"{library}/*.py", f"{library}/[!s]*/**/*.py"]
    source = {"name": "python", "format": "txt", "txt_documents": "file", "inputs": inputs}
    command = [sys.executable, "-m", "data_prep", "run", _DATA,
               f"output_dir={folder.resolve()}", f"sources={json.dumps([source])}"]  # fmt: skip
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit("no dataset could be prepared: see above")
    shutil.rmtree(folder / "work", ignore_errors=True)


def _project_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    for extra in _EXTRAS:
        texts += project["optional-dependencies"][extra]
    needed = [Requirement(text) for text in texts]
    return [need for need in needed if need.name != project["name"]]


def _requirements(wheel: Path) -> list[Requirement]:
    texts = _metadata(wheel).get_all("Requires-Dist", [])
    return [Requirement(str(text)) for text in texts]


def _version(wheel: Path) -> str:
    return str(_metadata(wheel)["Version"])


def _metadata(wheel: Path) -> Any:
    with ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _pip(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    if done.returncode:
        said = "\n  ".join(done.stdout.strip().splitlines()[-12:])
        raise SystemExit(f"pip {arguments[0]} {arguments[-1]} failed:\n  {said}")


def main() -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="needs a package index")
    making.add_argument("kit", type=Path)
    making.add_argument("--machine", type=Path, default=MACHINE, help="what the machine has")
    making.add_argument("--no-data", action="store_true", help="wheels alone")
    installing = commands.add_parser("install", help="needs nothing but the kit")
    installing.add_argument("kit", type=Path)
    installing.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.kit, arguments.machine, with_data=not arguments.no_data)
        return
    lines = install(arguments.kit, arguments.target)
    sys.stdout.write("".join(f"{line}\n" for line in lines) or "every requirement is met\n")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
