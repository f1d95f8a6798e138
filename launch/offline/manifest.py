"""What a wheelhouse says of itself: whom it is for, and the sha256 of every file."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import DataError
from pipeline.runtime.files import sha256_file, write_json_atomic

MANIFEST_FILE = "manifest.json"
"""Written last: without it a wheelhouse is not complete."""


@dataclass(frozen=True)
class Target:
    """The machines that a wheelhouse is for: CPython on Linux."""

    python: str
    """Such as 3.12."""
    machine: str
    """As `uname -m` says it: compiled wheels hold its instructions."""

    def markers(self) -> dict[str, str]:
        """What the conditions of requirements are about there, which may not be this machine."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": self.machine,
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "extra": "",
        }


def this_machine() -> Target:
    """The running Python and its machine."""
    return Target(".".join(platform.python_version_tuple()[:2]), platform.machine())


@dataclass(frozen=True)
class Manifest:
    """The contents of a wheelhouse."""

    target: Target
    torch: str | None
    """Version of torch that is among the wheels; None: the machine has a torch of its own."""
    files: dict[str, str]
    """sha256 by file name."""


def write(folder: Path, target: Target, torch: str | None, wheels: list[Path]) -> None:
    """Declares a wheelhouse complete.

    Args:
        folder: the wheelhouse.
        target: the machines it is for.
        torch: version of torch in it, or None.
        wheels: its files.
    """
    files = {path.name: sha256_file(path) for path in sorted(wheels)}
    write_json_atomic(folder / MANIFEST_FILE, asdict(Manifest(target, torch, files)))


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None if there is none.

    Raises:
        DataError: what is there is no manifest.
    """
    path = folder / MANIFEST_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(Target(**value["target"]), value["torch"], dict(value["files"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: no manifest of a wheelhouse ({error!r}); remove {folder} and collect it again"
        ) from error


def damage(folder: Path, manifest: Manifest) -> dict[str, str]:
    """What is wrong with the files of a wheelhouse, by file name; empty if all are as collected."""
    found = {}
    for name, expected in manifest.files.items():
        if not (folder / name).is_file():
            found[name] = "is not there"
        elif (sha256 := sha256_file(folder / name)) != expected:
            found[name] = f"has sha256 {sha256}, expected {expected}"
    return found


def start(folder: Path, target: Target) -> None:
    """Leaves in a folder only what an earlier collection for the same target completed.

    Args:
        folder: the wheelhouse; made if it is not there.
        target: the machines that the next collection is for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = read(folder)
    keep: set[str] = set()
    if before is not None and before.target == target:
        keep = set(before.files) - set(damage(folder, before))
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    for path in folder.glob("*.whl"):
        if path.name not in keep:
            path.unlink()


def read_for(folder: Path, here: Target) -> Manifest:
    """The manifest of a wheelhouse that is whole and made for machines like this one.

    Args:
        folder: the wheelhouse.
        here: the running Python and its machine.

    Raises:
        DataError: there is none, it is for another Python or machine, or files are missing or
            changed.
    """
    again = f"where there is a network, run `make wheelhouse PYTHON={here.python}`"
    manifest = read(folder)
    if manifest is None:
        raise DataError(
            f"{folder / MANIFEST_FILE} is not there, so there is no complete wheelhouse; "
            f"{again} and copy the folder here"
        )
    if manifest.target != here:
        raise DataError(
            f"{folder} holds wheels for Python {manifest.target.python} on "
            f"{manifest.target.machine}, this is Python {here.python} on {here.machine}; {again}"
            + ("" if manifest.target.machine == here.machine else f" on {here.machine}")
        )
    wrong = damage(folder, manifest)
    if wrong:
        lines = "".join(f"\n  {name} {what}" for name, what in wrong.items())
        raise DataError(f"{folder} is not as it was collected; copy these files again:{lines}")
    return manifest
