"""Config files to frozen dataclasses: `from:` includes, dotted overrides, explanation, record.

`load` reads a file, merges what its `from:` keys name below it, applies `section.key=value`
overrides, and checks the result against the dataclass of the command that is run.
"""

import dataclasses
import hashlib
import json
import logging
import platform
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipeline.config import schema, strict_yaml
from pipeline.config.strict_yaml import YamlNode
from pipeline.errors import ConfigError
from pipeline.runtime import env

T = TypeVar("T")
logger = logging.getLogger(__name__)
_RECORDED_PACKAGES = (
    "postnorm",
    "torch",
    "deepspeed",
    "numpy",
    "webdataset",
    "sentencepiece",
    "tensorboard",
)

_SHIPPED = Path(__file__).resolve().parents[2] / "postnorm" / "configs"
"""Configs that come with the package: presets, recipes, clusters, the demo. A name of one stands
wherever a path may: `postnorm model roformer_v2-base`, `from: roformer_v2-base`."""
REVISION_FILE = "REVISION"
"""Beside the packages of a copy of the code: the git revision of what was copied."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A checked config and where each written value came from (dotted path -> origin)."""

    config: T
    origins: dict[str, str]


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> Loaded[T]:
    """Read a config file, or the shipped config of that name; `cls.SHIPPED` says where those are.

    Overrides are `dotted.path=value`, the value as YAML (`train.lr=1e-4`, `sources.0.inputs=[a,
    b]`); later ones win. `section.from=FILE`, before all others, takes a section from another file
    or shipped config; keys that the config's own file has in that section stay.

    Raises:
        ConfigError: see `find_config`, `strict_yaml.read_file` and `schema.build`; tells all
            mistakes that can be found together.
    """
    kinds = getattr(cls, "SHIPPED", ())
    mistakes: list[str] = []
    file = find_config(str(path), kinds)
    try:
        written = strict_yaml.read_file(file, mistakes)
        _refuse_other_kind(cls, written, path)
        known, strangers = _split(written, _names(cls))
        root = _expand(known, file, (file.resolve(),), kinds, mistakes)
        _refuse_other_kind(cls, root, path)  # by what `from` brings, too
        for text in overrides:
            if _is_from(text):
                root = _rebased(root, known, text, file, kinds, mistakes)
    except ConfigError as error:
        strict_yaml.refuse([*mistakes, str(error)])
        raise
    # As they were written: what a misspelt section takes from elsewhere is not the mistake.
    root = _overlay(root, strangers) if strangers.value else root
    root = _overridden(root, [text for text in overrides if not _is_from(text)], mistakes)
    root = _completed(cls, root, mistakes)
    config = schema.build(cls, root, mistakes=mistakes)
    return Loaded(config, dict(_leaf_origins(root, "")))


_OF_KINDS = {
    "SuiteConfig": ("a suite of tasks", "postnorm benchmark", "tasks root overrides published"),
    "PretrainConfig": (
        "a config of pre-training",
        "postnorm pretrain",
        "run_dir init_from model data train objective phases stages spikes checkpoint monitor",
    ),
    "MultiTaskConfig": (
        "a mix of tasks",
        "postnorm multitask",
        "run_dir init_from data tasks sampling balance train root corrupt checkpoint monitor",
    ),
    "TaskConfig": (
        "a task",
        "postnorm finetune",
        "task data input head train search name model run_dir",
    ),
    "PrepConfig": (
        "a config of data preparation",
        "postnorm prep run",
        "sources output_dir clean filters dedup decontaminate tokenizer words shards",
    ),
    "ClusterConfig": (
        "a cluster profile",
        "postnorm submit CONFIG --cluster",
        "nodes gpus_per_node partition account time_limit cpus_per_rank container preflight setup",
    ),
    "ModelConfig": (
        "an architecture alone",
        "postnorm model",
        "num_layers hidden_size num_heads ffn_size vocab_size residual norm activation init",
    ),
    "SweepConfig": ("a sweep", "postnorm submit --sweep", "config dir grid runs metric verb jobs"),
    "StudyConfig": ("a study", "postnorm study", "question base arms factors conclusion limits"),
    "TransferConfig": ("a plan of transfer", "postnorm transfer", "mix mix_overrides tasks seeds"),
}
"""By the class of a config: what it is, the command that takes it, and keys that it is known by."""


def _refuse_other_kind(cls: type, root: YamlNode, path: str | Path) -> None:
    """Refuse a file that is a config of something else (ConfigError), which says of what."""
    if not isinstance(root.value, dict) or cls.__name__ not in _OF_KINDS:
        return
    given = root.value.keys() - {"from"}
    own = given & _names(cls)
    fits = {name: len(given & set(keys.split())) for name, (_, _, keys) in _OF_KINDS.items()}
    other = max(fits, key=lambda name: fits[name])
    # A misspelt key is a stranger everywhere, so it never makes another kind the better one.
    is_other = fits[other] > len(own)
    data = root.value["data"].value if "data" in given else None
    if cls.__name__ == "TaskConfig" and not is_other and isinstance(data, dict) and "dir" in data:
        other, is_other = "PretrainConfig", True  # whose sections have the names of a task's
    if other == cls.__name__ or not is_other:
        return
    what, command, _ = _OF_KINDS[other]
    raise ConfigError(
        f"{path} is {what}, not {_OF_KINDS[cls.__name__][0]}: `{command} {path}` takes it"
    )


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _split(root: YamlNode, names: Collection[str]) -> tuple[YamlNode, YamlNode]:
    """Part a mapping into the keys of these names, with `from`, and all others."""
    if not isinstance(root.value, dict):
        return root, YamlNode({}, root.origin)
    known = {key: node for key, node in root.value.items() if key in names or key == "from"}
    others = {key: node for key, node in root.value.items() if key not in known}
    return YamlNode(known, root.origin), YamlNode(others, root.origin)


def _is_from(override: str) -> bool:
    return override.partition("=")[0].strip().split(".")[-1] == "from"


def _rebased(
    root: YamlNode,
    written: YamlNode,
    override: str,
    file: Path,
    kinds: Sequence[str],
    mistakes: list[str],
) -> YamlNode:
    """Take a section from the file that an override names, below the file's own keys of it."""
    path, _, text = override.partition("=")
    keys = path.strip().split(".")[:-1]
    own = written
    for key in keys:
        found = own.value.get(key) if isinstance(own.value, dict) else None
        own = found or YamlNode({}, f"command line {override!r}")
    kinds = (*reversed(keys), *kinds)
    base = find_config(env.expand(str(strict_yaml.parse(text, "").value), "from"), kinds)
    lower = _read_with_includes(base, (), kinds, mistakes)
    if isinstance(own.value, dict):
        own = YamlNode({k: node for k, node in own.value.items() if k != "from"}, own.origin)
    upper = _expand(own, file, (file.resolve(),), kinds, mistakes)
    return _replace(root, keys, _overlay(lower, upper), override)


def build(cls: type[T], values: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> T:
    """Return a config from plain values in place of a file (ConfigError: see `schema.build`)."""
    root = strict_yaml.parse(json.dumps(values), origin, with_lines=False)
    mistakes: list[str] = []
    root = _completed(cls, _overridden(root, overrides, mistakes), mistakes)
    return schema.build(cls, root, mistakes=mistakes)


def warn_of_unusual(config: Any) -> None:
    """Warn of values that are allowed, but more often a slip than meant.

    A class may know more of them, in a method `warnings`.
    """
    more = getattr(config, "warnings", list)
    for text in [*schema.unusual(config), *more()]:
        logger.warning("%s", text)


def explain(loaded: Loaded[Any]) -> str:
    """One block a field: path, value, unit, range, meaning, and where the value came from."""
    lines = []
    for path, field, value in schema.walk(loaded.config):
        shown = "null" if value is None else json.dumps(plain_values(value), ensure_ascii=False)
        unit = f" {field.metadata['unit']}" if field.metadata.get("unit") else ""
        limits = f" [{schema.range_text(field)}]" if schema.range_text(field) else ""
        lines.append(f"{path} = {shown}{unit}")
        lines.append(f"    {field.metadata['meaning']}{limits}")
        lines.append(f"    from {loaded.origins.get(path, 'default')}")
    return "\n".join(lines)


def to_yaml(config: Any) -> str:
    """Return the whole config as YAML that `load` reads back to an equal config."""
    return strict_yaml.dump(plain_values(config))


def digest(config: Any) -> str:
    """sha256 of a config's values, independent of file layout and comments."""
    return hashlib.sha256(json.dumps(plain_values(config), sort_keys=True).encode()).hexdigest()


def provenance() -> dict[str, str]:
    """Git revision of the code, Python and package versions, for records beside results."""
    record = {"git_revision": git_revision(), "python": platform.python_version()}
    for name in _RECORDED_PACKAGES:
        try:
            record[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            record[name] = "not installed"
    return record


def resolved_text(config: Any) -> str:
    """Text of `resolved.yaml`: provenance as comments, then every value; itself a valid config."""
    head = "".join(f"# {name}: {value}\n" for name, value in provenance().items())
    tree = plain_values(config)
    if tree.get("stages"):
        # It follows from the stages, of which the next start may have others.
        del tree["train"]["num_steps"]
    return head + strict_yaml.dump(tree)


def git_revision() -> str:
    """Revision of this code, `-dirty` behind it if files were changed since."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / REVISION_FILE).is_file():
        return (checkout / REVISION_FILE).read_text(encoding="utf-8").strip()
    if not (checkout / ".git").exists():
        return "unknown (not a git checkout)"  # an environment may lie in somebody else's checkout
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (not a git checkout)"
    return done.stdout.strip()


def find_config(text: str, kinds: Sequence[str], beside: Path = Path()) -> Path:
    """Return the path of a file, or of the shipped config of that name and of the first kind.

    `kinds` are folders of `configs/`, such as `model`; "" is that folder itself. Paths start at
    `beside`. A text that looks like a path is returned as one: reading it says what is wrong.

    Raises:
        ConfigError: there is neither such a file nor such a name.
    """
    path = beside / text
    shipped = {
        file.stem: file
        # Later ones overwrite: of equal names that of the first kind is left.
        for kind in reversed(kinds)
        for file in sorted((_SHIPPED / kind).glob("*.yaml"))
    }
    if path.is_file() or "/" in text or path.suffix in (".yaml", ".yml") or not shipped:
        return path
    if text in shipped:
        return shipped[text]
    near = get_close_matches(text, shipped, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    if other := next(iter(sorted(_SHIPPED.glob(f"*/{text}.yaml"))), None):
        meant = f"; configs/{other.parent.name} has that name, of which another kind is taken here"
    raise ConfigError(
        f"{text!r} is neither a file nor the name of a shipped config{meant} (expected a path, or "
        f"one of {', '.join(sorted(shipped))})"
    )


def _completed(cls: type[Any], root: YamlNode, mistakes: list[str]) -> YamlNode:
    """Let a class fill in values that follow from others, once overrides are in."""
    complete = getattr(cls, "completed", None)
    if complete is None or mistakes:
        return root
    found: YamlNode = complete(root)
    return found


def _overridden(root: YamlNode, overrides: Sequence[str], mistakes: list[str]) -> YamlNode:
    for text in overrides:
        try:
            root = _override(root, text)
        except ConfigError as error:
            mistakes.append(str(error))
    return root


def plain_values(value: Any) -> Any:
    """Return a config as plain dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_values(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain_values(item) for item in value]
    return value


def _read_with_includes(
    path: Path, parents: tuple[Path, ...], kinds: Sequence[str], mistakes: list[str]
) -> YamlNode:
    if path.resolve() in parents:
        chain = " -> ".join(str(parent) for parent in (*parents, path.resolve()))
        raise ConfigError(f"config files include each other in a circle: {chain}")
    node = strict_yaml.read_file(path, mistakes)
    return _expand(node, path, (*parents, path.resolve()), kinds, mistakes)


def _expand(
    node: YamlNode, path: Path, parents: tuple[Path, ...], kinds: Sequence[str], mistakes: list[str]
) -> YamlNode:
    """Replace every `from: file` by that file's content, overlaid with the keys beside it.

    Shipped configs have a folder for each section that has such, `model`.
    """
    if isinstance(node.value, list):
        items = [_expand(item, path, parents, kinds[:1], mistakes) for item in node.value]
        return YamlNode(items, node.origin)
    if not isinstance(node.value, dict):
        return node
    own = {
        key: _expand(child, path, parents, (key, *kinds), mistakes)
        for key, child in node.value.items()
        if key != "from"
    }
    if "from" not in node.value:
        return YamlNode(own, node.origin)
    target = node.value["from"]
    if not isinstance(target.value, str):
        raise ConfigError(f"from = {target.plain()!r} ({target.origin}): expected a file name")
    below = find_config(env.expand(target.value, "from"), kinds, path.parent)
    base = _read_with_includes(below, parents, kinds, mistakes)
    return _overlay(base, YamlNode(own, node.origin))


def _overlay(base: YamlNode, top: YamlNode) -> YamlNode:
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    merged = dict(base.value)
    for key, node in top.value.items():
        merged[key] = _overlay(merged[key], node) if key in merged else node
    return YamlNode(merged, top.origin)


def _override(root: YamlNode, text: str) -> YamlNode:
    path, equals, raw = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"override {text!r}: expected section.key=value, such as train.lr=1e-4")
    value = strict_yaml.parse(raw, f"command line {text!r}", with_lines=False)
    if not raw.strip():
        raise ConfigError(f"override {text!r} has no value; write null for none, '' for empty text")
    return _replace(root, path.strip().split("."), value, text)


def _replace(node: YamlNode, keys: list[str], value: YamlNode, text: str) -> YamlNode:
    if not keys:
        return value
    if isinstance(node.value, list):
        if not keys[0].isdecimal() or int(keys[0]) >= len(node.value):
            raise ConfigError(
                f"override {text!r}: {keys[0]!r} is not an index of a list of {len(node.value)}"
            )
        items = list(node.value)
        items[int(keys[0])] = _replace(items[int(keys[0])], keys[1:], value, text)
        return YamlNode(items, node.origin)
    mapping = dict(node.value) if isinstance(node.value, dict) else {}
    child = mapping.get(keys[0], YamlNode({}, value.origin))
    mapping[keys[0]] = _replace(child, keys[1:], value, text)
    return YamlNode(mapping, node.origin)


def _leaf_origins(node: YamlNode, path: str) -> list[tuple[str, str]]:
    found = [(path, node.origin)] if path else []
    children: list[tuple[str, YamlNode]] = []
    if isinstance(node.value, dict):
        children = list(node.value.items())
    elif isinstance(node.value, list):
        children = [(str(i), item) for i, item in enumerate(node.value)]
    for key, child in children:
        found += _leaf_origins(child, f"{path}.{key}" if path else key)
    return found
