"""`constraints.txt` names every package: what it leaves out could change between installations."""

from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_every_requirement_of_the_installed_packages_has_a_pin() -> None:
    installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    needs = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in needs
        if pin.marker is None or pin.marker.evaluate()
    }
    for name in pins.keys() & installed.keys() - {"torch"}:
        for need in map(Requirement, installed[name].requires or []):
            other = canonicalize_name(need.name)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert other in pins, f"{name} needs {need}"
                assert need.specifier.contains(pins[other]), f"{name}: {need}"
