"""The only reader and writer of YAML: strict, and every value remembers where it was written.

PyYAML follows YAML 1.1: it reads `1e-4` as text, `NO` as false, `010` as 8 and keeps the last of
two equal keys. Here PyYAML only parses; scalars are resolved by the rules of YAML 1.2's core schema
(https://yaml.org/spec/1.2.2/#103-core-schema), without octal, hexadecimal, infinity and NaN.
"""

import re
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
class Node:
    """A YAML value and its origin, such as `configs/demo.yaml:12` or `command line`."""

    value: "dict[str, Node] | list[Node] | Scalar"
    origin: str

    def plain(self) -> Any:
        """Return the value as dicts, lists and scalars, without origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def read_file(path: Path) -> Node:
    """Read one YAML file.

    Raises:
        ConfigError: the file is missing, not UTF-8, not YAML, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, source: str, *, with_lines: bool = True) -> Node:
    """Parse YAML text; an empty document is an empty mapping.

    `source` starts every origin and error message; `with_lines` appends `:line` to origins.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if root is None:
        return Node({}, source)
    return _convert(root, source, with_lines)


def dump(tree: dict[str, Any]) -> str:
    """Write plain values as YAML that `parse` reads back unchanged, keys in the given order."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _convert(node: yaml.Node, source: str, with_lines: bool) -> Node:
    origin = f"{source}:{node.start_mark.line + 1}" if with_lines else source
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = f"{source}:{key_node.start_mark.line + 1}" if with_lines else source
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{line}: a key must be a plain word, got a list or a mapping")
            key = key_node.value
            if key in mapping:
                raise ConfigError(
                    f"{line}: duplicate key {key!r}, first written at {mapping[key].origin}; "
                    "remove one of the two"
                )
            mapping[key] = _convert(value_node, source, with_lines)
        return Node(mapping, origin)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(item, source, with_lines) for item in node.value], origin)
    assert isinstance(node, yaml.ScalarNode)
    # A quoted or block scalar (style set) is text whatever it looks like.
    return Node(node.value if node.style else _resolve(node.value, origin), origin)


def _resolve(text: str, origin: str) -> Scalar:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _LEADING_ZERO.fullmatch(text):
        raise ConfigError(
            f"{origin}: {text} starts with a zero: octal or decimal? Write "
            f"{text.lstrip('+-0_') or '0'} for the number or '{text}' in quotes for the text"
        )
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ConfigError(f"{origin}: {text} is too large for a 64-bit float")
        return number
    return text
