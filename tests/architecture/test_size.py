"""How large rooms may be, and how many: what a newcomer has to find his way through.

No limit on the length of a file but the one that no idea needs. Short files are what is limited:
a module that one other imports, and that is a page at most, belongs into that other.
"""

import ast
import re
from collections.abc import Callable

import pytest

from pipeline.tasks.kinds.table import KINDS
from tests.architecture.modules import MODULES, importers

_CRUMB_LINES, _FUNCTION_LINES, _FILE_LINES = 60, 80, 700
_MLM = re.compile(r"\b(masked_index|LossSums|MaskedLanguageModel)\b")


def _crumbs() -> list[str]:
    found = []
    for name, module in MODULES.items():
        # Kinds, a file each: heads are found by name, optimizers stand in a table.
        if name.startswith(("pipeline.finetune.heads.", "pipeline.train.optimizers.")):
            continue
        users = importers(name)
        if module.num_lines < _CRUMB_LINES and len(users) == 1:
            found.append(f"{name} ({module.num_lines} lines) serves {users.pop()} alone")
    return found


def _long_functions() -> list[str]:
    return [f"{name}.{node.name}: {_length(node)} lines, expected {_FUNCTION_LINES} at most"
            for name, module in MODULES.items() for node in ast.walk(module.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and _length(node) > _FUNCTION_LINES]  # fmt: skip


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _long_files() -> list[str]:
    return [f"{name}: {module.num_lines} lines, expected {_FILE_LINES} at most"
            for name, module in MODULES.items() if module.num_lines > _FILE_LINES]  # fmt: skip


def _fmt_skip() -> list[str]:
    return [
        f"{name}, line {number}"
        for name, module in MODULES.items()
        for number, line in enumerate(module.text.splitlines(), start=1) if "# fmt: skip" in line
    ]  # fmt: skip


def _modules_that_know_mlm() -> list[str]:
    ours = {name: module for name, module in MODULES.items() if name.startswith("pipeline.")}
    return [name for name, module in ours.items() if _MLM.search(module.text)]


def _shared_class_names() -> list[str]:
    homes: dict[str, set[str]] = {}
    for name, module in MODULES.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(name)
    return [f"class {name} is defined in {', '.join(sorted(modules))}"
            for name, modules in sorted(homes.items()) if len(modules) > 1]  # fmt: skip


def _conditions_on_kinds_of_tasks() -> list[str]:
    """Comparisons with the name of a kind of task outside of `pipeline.tasks.kinds`."""
    return [
        f"{name}, line {node.lineno}: {ast.unparse(node)}"
        for name, module in MODULES.items()
        if not name.startswith("pipeline.tasks.kinds.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare) and "kind" in ast.unparse(node)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in KINDS
    ]


# What is counted, and the most that there may be of it.
COUNTED: dict[str, tuple[Callable[[], list[str]], int]] = {
    "modules": (lambda: list(MODULES), 277),
    "lines": (lambda: [n for n, m in MODULES.items() for _ in range(m.num_lines)], 74_160),
    "crumbs": (_crumbs, 0),
    "long functions": (_long_functions, 0),
    "long files": (_long_files, 0),
    "fmt: skip": (_fmt_skip, 36),
    "modules that know MLM": (_modules_that_know_mlm, 11),
    "conditions on kinds of tasks": (_conditions_on_kinds_of_tasks, 2),
    "class names of several modules": (_shared_class_names, 0),
}


@pytest.mark.parametrize("what", COUNTED)
def test_there_are_not_too_many(what: str) -> None:
    count, limit = COUNTED[what]
    found = count()
    print(f"{what}: {len(found)}")
    listed = "" if what in ("modules", "lines") else "\n".join(["", *found])
    if len(found) > limit:
        pytest.fail(f"{what}: {len(found)}, expected {limit} at most{listed}", pytrace=False)
