"""The packages that the project needs on a Python: the pins of `constraints.txt` that hold there.

pip cannot tell for another Python than its own: `pip download --python-version` chooses files for
that one, but evaluates `; python_version < "3.11"` with the one that runs. It would also insist on
requirements of a machine's own torch (torch 2.11: setuptools below 82). So `constraints.txt` names
every package, the conditions are evaluated here, and pip only fetches and installs what is named.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

# pip is the one package that exists before anything is installed; its version is pinned.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

from launch.offline.wheelhouse import Target
from pipeline.errors import DataError


@dataclass(frozen=True)
class Pins:
    """The packages to install on a target."""

    target: Target
    versions: dict[str, str]
    """Version by name, without torch."""
    torch: Requirement
    """The versions of torch that the project works with."""

    def missing(self, wheels: list[Path]) -> list[str]:
        """List pins that no wheel meets, such as `numpy==2.4.6`."""
        parsed = (parse_wheel_filename(path.name) for path in wheels)
        there = {(name, str(version)) for name, version, *_ in parsed}
        return [f"{pin[0]}=={pin[1]}" for pin in self.versions.items() if pin not in there]

    def check_torch(self, version: str, what: str) -> None:
        """Refuse a torch that is too old or too new; `what` says where it comes from."""
        if not self.torch.specifier.contains(version, prereleases=True):
            raise DataError(f"{what}: the project needs {self.torch}")


def read_pins(folder: Path, target: Target) -> Pins:
    """Read `constraints.txt`, and `pyproject.toml` for what the project supports."""
    content = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = Requirement(f"python{content['requires-python']}").specifier
    if not supported.contains(f"{target.python}.0"):
        raise DataError(f"PYTHON={target.python}: expected {content['requires-python']}")
    training = content["optional-dependencies"]["train"]
    torch = next(need for need in map(Requirement, training) if need.name == "torch")
    lines = (folder / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    values = {
        "python_version": target.python,
        "python_full_version": f"{target.python}.0",
        "platform_machine": target.machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    versions: dict[str, str] = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.name != "torch" and (pin.marker is None or pin.marker.evaluate(values))
    }
    return Pins(target, versions, torch)
