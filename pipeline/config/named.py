"""Configs that come with the package, found by name: presets, recipes, clusters, the demo.

A name stands wherever a path may: `postnorm model roformer_v2-base`, `from: roformer_v2-base`.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from pipeline.errors import ConfigError

_SHIPPED = Path(__file__).resolve().parents[2] / "postnorm" / "configs"


def find(text: str, kinds: Sequence[str], beside: Path = Path()) -> Path:
    """Return the path of a file, or of the shipped config of that name and of the first kind.

    `kinds` are folders of `configs/`, such as `model`; "" is that folder itself. Paths start at
    `beside`. A text that looks like a path is returned as one: reading it says what is wrong.

    Raises:
        ConfigError: there is neither such a file nor such a name.
    """
    path = beside / text
    shipped = {file.stem: file for kind in reversed(kinds) for file in _files(kind)}
    if path.is_file() or "/" in text or path.suffix in (".yaml", ".yml") or not shipped:
        return path
    if text in shipped:
        return shipped[text]
    near = get_close_matches(text, shipped, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{text!r} is neither a file nor the name of a shipped config{meant} (expected a path, or "
        f"one of {', '.join(sorted(shipped))})"
    )


def _files(kind: str) -> list[Path]:
    return sorted((_SHIPPED / kind).glob("*.yaml"))
