"""The only reader and writer of YAML: strict, and every value remembers where it was written.

PyYAML follows YAML 1.1: it reads `1e-4` as text, `NO` as false, `010` as 8 and keeps the last of
two equal keys. Here PyYAML only parses; scalars are resolved by the rules of YAML 1.2's core schema
(https://yaml.org/spec/1.2.2/#103-core-schema), without octal, hexadecimal, infinity and NaN.
"""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class YamlNode:
    """A YAML value and its origin, such as `configs/demo.yaml:12` or `command line`."""

    value: "dict[str, YamlNode] | list[YamlNode] | Scalar"
    origin: str

    def plain(self) -> Any:
        """Return the value as dicts, lists and scalars, without origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def refuse(mistakes: Sequence[str]) -> None:
    """Raise one error that tells all mistakes of a config, if there are any."""
    if len(mistakes) == 1:
        raise ConfigError(mistakes[0])
    if mistakes:
        raise ConfigError("\n- ".join([f"the config has {len(mistakes)} mistakes:", *mistakes]))


def read_file(path: Path, mistakes: list[str] | None = None) -> YamlNode:
    """Read one YAML file; `mistakes` are as in `parse`.

    Raises:
        ConfigError: the file is missing, not UTF-8, not YAML, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    return parse(text, str(path), mistakes=mistakes)


def parse(
    text: str, source: str, *, with_lines: bool = True, mistakes: list[str] | None = None
) -> YamlNode:
    """Parse YAML text; an empty document is an empty mapping.

    `source` starts every origin and error message; `with_lines` appends `:line` to origins.
    Repeated keys and unclear numbers are added to `mistakes`, whose owner must refuse them; without
    it they are refused here.
    """
    try:
        # Nodes, not values: PyYAML's values have lost positions, styles, and the first of two equal
        # keys.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if root is None:
        return YamlNode({}, source)
    noted = [] if mistakes is None else mistakes
    node = _Converter(source, with_lines, noted).node(root)
    if mistakes is None:
        refuse(noted)
    return node


def dump(tree: dict[str, Any]) -> str:
    """Write plain values as YAML that `parse` reads back unchanged, keys in the given order."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)


def of_plain(value: Any, origin: str, known: YamlNode | None = None) -> YamlNode:
    """Return plain values as nodes of one origin; what is the same in `known` keeps its own."""
    if known is not None and known.plain() == value:
        return known
    inner = known.value if known is not None else None
    if isinstance(value, dict):
        of = inner if isinstance(inner, dict) else {}
        items = {key: of_plain(item, origin, of.get(key)) for key, item in value.items()}
        return YamlNode(items, origin)
    if isinstance(value, (list, tuple)):
        return YamlNode([of_plain(item, origin) for item in value], origin)
    return YamlNode(value, origin)


@dataclass(frozen=True)
class _Converter:
    """Makes nodes of PyYAML's; after a mistake it goes on with what was probably meant."""

    source: str
    with_lines: bool
    mistakes: list[str]

    def node(self, node: yaml.Node) -> YamlNode:
        origin = self._origin(node)
        if isinstance(node, yaml.MappingNode):
            return YamlNode(self._mapping(node), origin)
        if isinstance(node, yaml.SequenceNode):
            return YamlNode([self.node(item) for item in node.value], origin)
        assert isinstance(node, yaml.ScalarNode)
        # A quoted or block scalar (style set) is text whatever it looks like.
        return YamlNode(node.value if node.style else self._resolve(node.value, origin), origin)

    def _origin(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.with_lines else self.source

    def _mapping(self, node: yaml.MappingNode) -> dict[str, YamlNode]:
        mapping: dict[str, YamlNode] = {}
        for key_node, value_node in node.value:
            line, key = self._origin(key_node), key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self.mistakes.append(f"{line}: a key must be a plain word, got a list or a mapping")
                continue
            if key in mapping:
                self.mistakes.append(
                    f"{line}: duplicate key {key!r}, first written at {mapping[key].origin}; "
                    "remove one of the two"
                )
            mapping[key] = self.node(value_node)
        return mapping

    def _resolve(self, text: str, origin: str) -> Scalar:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if _LEADING_ZERO.fullmatch(text):
            self.mistakes.append(
                f"{origin}: {text} starts with a zero: octal or decimal? Write "
                f"{text.lstrip('+-0_') or '0'} for the number or '{text}' in quotes for the text"
            )
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isinf(number):
                self.mistakes.append(f"{origin}: {text} is too large for a 64-bit float")
                return sys.float_info.max
            return number
        return text
