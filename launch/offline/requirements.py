"""Which wheels the project needs, all the way down, and which of them a folder lacks.

pip cannot tell for another Python than its own: `pip download --python-version` chooses files for
that one, but evaluates `; python_version < "3.11"` with the one that runs. It would also insist on
what a machine's own torch asks for (torch 2.11: setuptools below 82). So pip only fetches and
installs named versions here, and the requirements are followed by this module.
"""

import email
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# pip is the one package that is there before anything is installed; its version is pinned.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

from launch.offline.manifest import Target
from pipeline.errors import DataError

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

_EXTRAS = ("dev",)
"""Of the project; what `make setup` installs."""


@dataclass(frozen=True)
class Rules:
    """Where requirements begin, and which version each has."""

    target: Target
    project: str
    """Name of the project, whose extras name each other."""
    roots: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]
    """Requirements of the project's extras."""
    pins: dict[str, str]
    """Version by name."""
    torch: str | None
    """Version of torch to hold; None: it is left to the machine, with all that it needs."""


@dataclass
class Needs:
    """What following all requirements gave."""

    found: dict[str, Path] = field(default_factory=dict)
    """Wheels that are there, by the name of the package."""
    missing: dict[str, str] = field(default_factory=dict)
    """Requirements that no wheel meets, such as `numpy==2.4.6`, by the name of the package."""


def rules(project: Path, target: Target, torch: str | None) -> Rules:
    """Reads `pyproject.toml` and `constraints.txt`.

    Args:
        project: the folder they are in.
        target: the machines that are asked about.
        torch: version of torch to hold, or None.

    Raises:
        DataError: the project does not run on the target's Python, or does not know that torch.
    """
    content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    metadata = content["project"]
    supported = Requirement(f"python{metadata['requires-python']}").specifier
    if not supported.contains(f"{target.python}.0"):
        raise DataError(f"PYTHON={target.python}: expected {metadata['requires-python']}")
    roots = _parsed([*metadata["dependencies"], *content["build-system"]["requires"], "pip"])
    lines = (project / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, str] = {
        canonicalize_name(line.name): str(line.specifier).removeprefix("==")
        for line in _parsed(text for text in lines if text and not text.startswith("#"))
        if _holds(line, target)
    }
    del pins["torch"]
    if torch is not None:
        pins["torch"] = torch
        check_torch(roots, torch, f"TORCH={torch}")
    return Rules(
        target,
        canonicalize_name(metadata["name"]),
        roots,
        {name: _parsed(needs) for name, needs in metadata["optional-dependencies"].items()},
        pins,
        torch,
    )


def check_torch(roots: Iterable[Requirement], version: str, what: str) -> None:
    """Holds a version of torch against what the project asks for.

    Args:
        roots: the project's requirements.
        version: of torch.
        what: where it is, for the message.

    Raises:
        DataError: it is too old or too new.
    """
    wanted = next(root for root in roots if root.name == "torch")
    if not wanted.specifier.contains(version, prereleases=True):
        raise DataError(f"{what}: the project needs torch{wanted.specifier}")


def needs(known: Rules, wheels: Iterable[Path]) -> Needs:
    """Follows the requirements of the project, of the wheels they name, and so on.

    Args:
        known: where requirements begin, and the versions.
        wheels: what is there; more than is needed does no harm.

    Raises:
        DataError: two packages want different versions, or a package has none in
            `constraints.txt`.
    """
    there = {parse_wheel_filename(path.name)[:2]: path for path in wheels}
    result = Needs()
    waiting = [("the project", Requirement(f"{known.project}[{','.join(_EXTRAS)}]"))]
    seen = set()
    unpinned: dict[str, SpecifierSet] = {}
    while waiting:
        asker, need = waiting.pop()
        name = canonicalize_name(need.name)
        if (asker, str(need)) in seen or (name == "torch" and known.torch is None):
            continue
        seen.add((asker, str(need)))
        if name == known.project:
            own = [*known.roots, *(n for extra in need.extras for n in known.extras[extra])]
            waiting += [("the project", inner) for inner in own if _holds(inner, known.target)]
            continue
        wanted = _wanted(known, asker, need, unpinned)
        path = next(
            (path for (other, version), path in there.items()
             if other == name and wanted.specifier.contains(version, prereleases=True)),
            None,
        )  # fmt: skip
        if path is None:
            result.missing[name] = str(wanted)
            continue
        result.found[name] = path
        waiting += [
            (need.name, inner)
            for inner in _requirements(path)
            if _holds(inner, known.target, need.extras)
        ]
    return result


def _wanted(
    known: Rules, asker: str, need: Requirement, unpinned: dict[str, SpecifierSet]
) -> Requirement:
    """The version of a package that is asked for; `unpinned` gathers what all said of the rest."""
    pin = known.pins.get(canonicalize_name(need.name))
    if pin is None:
        # torch names versions of its own CUDA packages, which name each other without one.
        if known.torch is not None and _is_of_torch(asker):
            name = canonicalize_name(need.name)
            unpinned[name] = unpinned.get(name, SpecifierSet()) & need.specifier
            return Requirement(f"{name}{unpinned[name]}")
        raise DataError(
            f"{asker} needs {need}, and constraints.txt has no version of {need.name} for Python "
            f"{known.target.python}; add a line {need.name}==VERSION"
        )
    if not need.specifier.contains(pin, prereleases=True):
        raise DataError(
            f"{asker} needs {need}, and constraints.txt says {need.name}=={pin}; "
            "change one of the two versions"
        )
    return Requirement(f"{need.name}=={pin}")


def _is_of_torch(name: str) -> bool:
    return name == "torch" or name.startswith(("nvidia-", "cuda-"))


def _parsed(texts: Iterable[str]) -> tuple[Requirement, ...]:
    return tuple(Requirement(text) for text in texts)


def _holds(need: Requirement, target: Target, extras: Iterable[str] = ()) -> bool:
    """Whether a requirement's condition is true on the target, for any of the wanted extras."""
    marker = need.marker
    return marker is None or any(
        marker.evaluate(target.markers() | {"extra": extra}) for extra in ("", *extras)
    )


def _requirements(wheel: Path) -> tuple[Requirement, ...]:
    """What a wheel says that it needs."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(name))
    return _parsed(str(text) for text in message.get_all("Requires-Dist", []))
