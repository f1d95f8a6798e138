"""The product's modules as parsed text, and what each of them imports."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "data_prep", "launch", "experiments")


@dataclass(frozen=True)
class Module:
    """A file of Python; packages' `__init__.py`, which are empty, are not among them."""

    name: str
    """Such as `pipeline.train.loop`."""
    path: Path
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())


def _read() -> dict[str, Module]:
    modules = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                text = path.read_text(encoding="utf-8")
                modules[name] = Module(name, path, text, ast.parse(text))
    return modules


MODULES = _read()


@cache
def imports(name: str) -> frozenset[str]:
    """Modules that a module imports anywhere in its text; ours by their full name."""
    return imports_of(MODULES[name].tree)


def imports_of(tree: ast.Module) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} uses a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {each for each in full if each in MODULES} or {str(node.module)}
    return frozenset(names)


def importers(name: str) -> set[str]:
    """The product's other modules that import a module."""
    return {each for each in MODULES if each != name and name in imports(each)}


def below(module: str, prefixes: set[str]) -> bool:
    """Whether a module is one of these or in one of them."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)
