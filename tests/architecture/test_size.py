"""How large rooms may be, and how many: what a newcomer has to find his way through.

No limit on the length of a file but the one that no idea needs. Short files are what is limited:
a module that one other imports, and that is a page at most, belongs into that other.
"""

import ast
import re
from collections.abc import Callable

import pytest

from tests.architecture.modules import MODULES, Module, importers

# The most that there may be of each; what counts is below, by the same name.
LIMITS = {
    "modules": 242,
    "lines": 60_400,
    "crumbs": 1,
    "long functions": 0,
    "long files": 0,
    "fmt: skip": 40,
    "modules that know MLM": 11,
    "class names of several modules": 0,
}
_CRUMB_LINES, _FUNCTION_LINES, _FILE_LINES = 60, 80, 700
_MLM = re.compile(r"\b(masked_index|LossSums|MaskedLanguageModel)\b")


def _modules() -> list[str]:
    return list(MODULES)


def _lines() -> list[str]:
    return [name for name, module in MODULES.items() for _ in range(module.num_lines)]


def _crumbs() -> list[str]:
    found = []
    for name, module in MODULES.items():
        users = importers(name)
        if module.num_lines < _CRUMB_LINES and len(users) == 1:
            found.append(f"{name} ({module.num_lines} lines) serves {users.pop()} alone")
    return found


def _long_functions() -> list[str]:
    return [
        f"{name}.{node.name}: {_length(node)} lines, expected {_FUNCTION_LINES} at most"
        for name, module in MODULES.items() for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and _length(node) > _FUNCTION_LINES
    ]  # fmt: skip


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _long_files() -> list[str]:
    return [
        f"{name}: {module.num_lines} lines, expected {_FILE_LINES} at most"
        for name, module in MODULES.items() if module.num_lines > _FILE_LINES
    ]  # fmt: skip


def _fmt_skip() -> list[str]:
    return [
        f"{name}, line {number}"
        for name, module in MODULES.items()
        for number, line in enumerate(module.text.splitlines(), start=1) if "# fmt: skip" in line
    ]  # fmt: skip


def _knows_mlm(module: Module) -> bool:
    return module.name.startswith("pipeline.") and bool(_MLM.search(module.text))


def _modules_that_know_mlm() -> list[str]:
    return [name for name, module in MODULES.items() if _knows_mlm(module)]


def _shared_class_names() -> list[str]:
    homes: dict[str, set[str]] = {}
    for name, module in MODULES.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(name)
    return [
        f"class {name} is defined in {', '.join(sorted(modules))}"
        for name, modules in sorted(homes.items()) if len(modules) > 1
    ]  # fmt: skip


COUNTED: dict[str, Callable[[], list[str]]] = {
    "modules": _modules,
    "lines": _lines,
    "crumbs": _crumbs,
    "long functions": _long_functions,
    "long files": _long_files,
    "fmt: skip": _fmt_skip,
    "modules that know MLM": _modules_that_know_mlm,
    "class names of several modules": _shared_class_names,
}


@pytest.mark.parametrize("what", LIMITS)
def test_there_are_not_too_many(what: str) -> None:
    found = COUNTED[what]()
    print(f"{what}: {len(found)}")
    listed = "" if what in ("modules", "lines") else "\n".join(["", *found])
    if len(found) > LIMITS[what]:
        said = f"{what}: {len(found)}, expected {LIMITS[what]} at most{listed}"
        pytest.fail(said, pytrace=False)
