"""The messages that docs/troubleshooting.md explains are those of the code."""

import ast
import re
from functools import cache

import pytest

from tests.support.pages import ROOT

_PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_OURS = _PAGE.partition("## Messages of other programs")[0]
_CELLS = re.findall(r"^\| (`[^|]*`) \|", _OURS, flags=re.MULTILINE)
_MESSAGES = sorted({text for cell in _CELLS for text in re.findall(r"`([^`]+)`", cell)})


@cache
def _strings() -> frozenset[str]:
    """Constant parts of all strings in the code; adjacent literals are one."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8"))
        for package in ("pipeline", "launch", "data_prep", "postnorm")
        for path in (ROOT / package).rglob("*.py")
    )
    return frozenset(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_page_lists_many() -> None:
    assert len(_MESSAGES) > 25


@pytest.mark.parametrize("message", _MESSAGES)
def test_message_is_in_the_code(message: str) -> None:
    for part in filter(str.strip, message.split("...")):
        assert any(part.strip(" .") in text for text in _strings()), part
