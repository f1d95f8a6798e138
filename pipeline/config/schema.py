"""Turns a tree of YAML nodes into frozen dataclasses, checking every name, type and range.

A field is declared with `param`, which carries its meaning, unit and range, so that error messages
and `config --explain` never disagree with what is checked.
"""

import dataclasses
import difflib
import operator
import reprlib
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, Union

from pipeline.config.strict_yaml import YamlNode, parse, refuse
from pipeline.errors import ConfigError
from pipeline.runtime import env

T = TypeVar("T")
REQUIRED = dataclasses.MISSING
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


OTHER_NAMES = {
    "lr": "learning_rate peak_lr max_lr lr_peak base_lr",
    "global_batch": "batch_size train_batch_size global_batch_size total_batch_size batch "
    "gradient_accumulation_steps grad_accum accumulation_steps",
    "micro_batch": "per_device_train_batch_size per_device_batch_size device_batch_size "
    "micro_batch_size train_micro_batch_size_per_gpu batch_size_per_gpu mbs",
    "batch": "batch_size train_batch_size per_device_train_batch_size",
    "accumulate": "gradient_accumulation_steps grad_accum accumulation_steps",
    "epochs": "num_epochs num_train_epochs max_epochs n_epochs epoch",
    "num_steps": "max_steps steps total_steps train_steps max_iters iterations num_train_steps "
    "max_train_steps epochs num_epochs num_train_epochs max_epochs n_epochs epoch",
    "steps": "max_steps num_steps total_steps train_steps max_train_steps num_train_steps",
    "warmup": "warmup_ratio warmup_steps num_warmup_steps warmup_proportion",
    "warmup_steps": "warmup num_warmup_steps warmup_ratio warmup_iters warmup_proportion",
    "schedule": "lr_scheduler_type lr_scheduler scheduler lr_schedule lr_decay_style",
    "grad_clip": "max_grad_norm gradient_clipping gradient_clip_val clip_grad clip_grad_norm clip",
    "clip": "max_grad_norm gradient_clipping gradient_clip_val grad_clip",
    "weight_decay": "wd l2 decay",
    "adam_beta1": "beta1 beta_1 betas adam_betas",
    "adam_beta2": "beta2 beta_2 betas adam_betas",
    "adam_eps": "adam_epsilon epsilon eps",
    "beta2": "adam_beta2 beta_2 betas adam_betas",
    "eps": "adam_epsilon adam_eps epsilon",
    "norm_eps": "layer_norm_eps layernorm_eps rms_norm_eps eps epsilon",
    "precision": "bf16 fp16 fp32 dtype torch_dtype mixed_precision amp",
    "activation_checkpoint_layers": "gradient_checkpointing activation_checkpointing",
    "zero_stage": "zero zero_optimization stage",
    "seq_len": "max_seq_length max_seq_len max_length sequence_length seq_length block_size "
    "context_length max_len",
    "max_length": "max_seq_length max_seq_len seq_len sequence_length max_len",
    "mask_prob": "mlm_probability mask_probability masked_lm_prob mask_ratio mask_rate mlm_prob",
    "workers": "num_workers dataloader_num_workers",
    "dir": "data_dir data_path dataset dataset_path train_data train_file path",
    "num_layers": "num_hidden_layers n_layer n_layers layers depth num_layer",
    "hidden_size": "hidden_dim d_model n_embd dim width embed_dim",
    "num_heads": "num_attention_heads n_head n_heads heads attention_heads",
    "ffn_size": "intermediate_size ffn_dim d_ff mlp_dim ffn_hidden_size inner_dim",
    "max_positions": "max_position_embeddings n_positions",
    "dropout": "hidden_dropout_prob dropout_rate dropout_prob hidden_dropout",
    "attention_dropout": "attention_probs_dropout_prob attn_dropout attention_dropout_prob",
    "activation": "hidden_act act hidden_activation",
    "run_dir": "output_dir out_dir save_dir checkpoint_dir log_dir work_dir output out",
    "output_dir": "out_dir save_dir output out run_dir",
    "every_steps": "save_steps save_every save_interval checkpoint_every ckpt_interval",
    "keep": "save_total_limit keep_last max_checkpoints",
    "eval_every_steps": "eval_steps eval_interval eval_every evaluation_steps",
    "log_every_steps": "logging_steps log_every log_interval log_steps",
    "sinks": "report_to loggers logger",
    "init_from": "model_name_or_path pretrained checkpoint_path load_from init_checkpoint",
    "seed": "random_seed rng_seed",
    "optimizer": "optim optimizer_type optimizer_name",
}
"""Our names of fields, and those that other trainers have for them."""


class Retired(NamedTuple):
    """A setting that is no longer one."""

    value: Any
    """The value that it is fixed at."""
    instead: str = ""
    """What to write for another value, if anything."""


_KINDS = "filters.mask.kinds lists the kinds that are masked"
RETIRED = {
    "MonitorConfig": {"straggler_factor": Retired(1.25)},
    "BalanceConfig": {"asymmetry": Retired(1.5), "caution": Retired(0.5)},
    "HardwareConfig": {
        "bus_efficiency": Retired(
            0.8,
            "hardware.intra_node_gb_per_s and hardware.inter_node_gb_per_s are what was measured",
        ),
        "node_mtbf_hours": Retired(6000.0),
    },
    "PreflightConfig": {"min_free_inodes": Retired(10_000)},
    "ClusterConfig": {
        "module_purge": Retired(False, "`module purge` and `module load NAME` are lines of setup")
    },
    "LanguageConfig": {"min_confidence": Retired(0.5)},
    "RepetitionConfig": {"max_duplicate_code_chars": Retired(0.8)},
    "C4Config": {"lorem_ipsum": Retired(True)},
    "ShapeConfig": {"max_chars": Retired(None, "quality.max_words has a limit in words")},
    "MaskConfig": {
        name: Retired(True, _KINDS)
        for name in ("email", "phone", "chinese_id", "bank_card", "ipv4")
    },
}
"""Settings that no run needed, by the class that had them. Records of old runs still name them:
with the value that they are fixed at they are read as before, with another one they are refused."""


def param(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    usual: tuple[float, float] | None = None,
) -> Any:
    """Declare one config field.

    The default `REQUIRED` means that a value must be written. `meaning` is a line for `--explain`;
    `ge`, `gt`, `le` and `lt` are limits. A value outside of `usual` is warned of: it is allowed,
    but more often a slip than meant.
    """
    bounds = {">=": ge, ">": gt, "<=": le, "<": lt}
    metadata = {
        "meaning": meaning,
        "unit": unit,
        "bounds": {sign: bound for sign, bound in bounds.items() if bound is not None},
        "usual": usual,
    }
    return dataclasses.field(default=default, metadata=metadata)


def path_param(default: Any, meaning: str) -> Any:
    """Declare a field of one path or several, in which `~` and variables are filled in.

    They are filled in where the config is read, and recorded so: compute nodes may have others.
    """
    metadata = {"meaning": meaning, "is_path": True}
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type[T], meaning: str) -> Any:
    """Declare a nested section that starts from its own defaults."""
    return dataclasses.field(default_factory=cls, metadata={"meaning": meaning})


def range_text(field: "dataclasses.Field[Any]") -> str:
    """Return the allowed range of a field in words, such as `>= 1, < 2`; empty without one."""
    bounds = field.metadata.get("bounds", {})
    return ", ".join(f"{sign} {bound}" for sign, bound in bounds.items())


def build(cls: type[T], node: YamlNode, path: str = "", mistakes: Iterable[str] = ()) -> T:
    """Build `cls` from a mapping node.

    `mistakes` are those that were found before.

    Raises:
        ConfigError: unknown keys, missing required keys, wrong types and values out of range, all
            of them; names the path, the value, what was expected and the nearest valid key.
    """
    every = list(mistakes)
    built = _build(cls, node, path, every)
    refuse(every)
    return typing.cast(T, built)


def _build(cls: type[Any], node: YamlNode, path: str, mistakes: list[str]) -> Any:
    """Build `cls`; where anything is wrong, add it to the mistakes and return None."""
    where, num_before = path or "the config", len(mistakes)
    if not isinstance(node.value, dict):
        got = reprlib.repr(node.plain())
        mistakes.append(f"{where} must be a mapping, got {got} ({node.origin}); write name: value")
        return None
    fields = {field.name: field for field in dataclasses.fields(cls)}
    near = set()
    for key, child in node.value.items():
        if retired := RETIRED.get(cls.__name__, {}).get(key):
            if child.plain() != retired.value:
                mistakes.append(_retired_text(retired, f"{path}.{key}" if path else key, child))
        elif key not in fields:
            meant = _near(cls, key)
            near |= set(meant)
            mistakes.append(_unknown_key_text(cls, path, key, child, meant))
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        dotted = f"{path}.{name}" if path else name
        if name in node.value:
            with _noting(mistakes):
                values[name] = _coerce(hints[name], node.value[name], dotted, mistakes)
                if field.metadata.get("is_path"):
                    values[name] = _filled_in(values[name], dotted)
                _check_range(field, values[name], node.value[name], dotted)
        elif name in near:
            continue  # not asked for where an unknown key probably means it: one mistake, one text
        elif dataclasses.is_dataclass(hints[name]):
            # An absent section is built too, so that its own required fields are asked for.
            section = typing.cast(type, hints[name])
            values[name] = _build(section, YamlNode({}, node.origin), dotted, mistakes)
        elif field.default is REQUIRED and field.default_factory is REQUIRED:
            mistakes.append(
                f"{dotted} is required ({field.metadata['meaning']}); add it to {node.origin}"
            )
    # Only if its parts are right: checks between fields would fail over those that are missing.
    if len(mistakes) == num_before:
        with _noting(mistakes):
            return cls(**values)
    return None


@contextmanager
def _noting(mistakes: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        mistakes.append(str(error))


def walk(config: Any, path: str = "") -> "Iterator[tuple[str, dataclasses.Field[Any], Any]]":
    """Yield (dotted path, field, value) of every leaf of a built config, in order."""
    for field in dataclasses.fields(config):
        dotted = f"{path}.{field.name}" if path else field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, dotted)
        else:
            yield dotted, field, value


def unusual(config: Any) -> list[str]:
    """Return warnings on values of a built config that are allowed, but often a slip."""
    texts = []
    for path, field, value in walk(config):
        usual = field.metadata.get("usual")
        if usual and value is not None and not usual[0] <= value <= usual[1]:
            texts.append(
                f"{path} = {value:g} is unusual ({field.metadata['meaning']}): mostly it is "
                f"{usual[0]:g} to {usual[1]:g}. It is taken as it is"
            )
    return texts


def _near(cls: type, key: str) -> dict[str, str]:
    """Find what an unknown key may mean: a section's key, our name of another's, the nearest.

    Returns:
        The meaning of each, by its dotted name.
    """
    own = {field.name: field.metadata["meaning"] for field in dataclasses.fields(cls)}
    found = _in_sections(cls, key)
    for ours, theirs in OTHER_NAMES.items():
        if not found and key.lower().replace("-", "_") in theirs.split():
            found = {ours: own[ours]} if ours in own else _in_sections(cls, ours)
    close = difflib.get_close_matches(key, own, n=1, cutoff=0.5)
    return found or {name: own[name] for name in close}


def _in_sections(cls: type, key: str) -> dict[str, str]:
    return {
        f"{name}.{key}": field.metadata["meaning"]
        for name, hints in typing.get_type_hints(cls).items()
        for hint in (hints, *typing.get_args(hints))
        if dataclasses.is_dataclass(hint)
        for field in dataclasses.fields(hint)
        if field.name == key
    }


def _unknown_key_text(cls: type, path: str, key: str, child: YamlNode, near: dict[str, str]) -> str:
    names = [field.name for field in dataclasses.fields(cls)]
    dotted = f"{path}.{key}" if path else key
    meant = next((f"did you mean {name!r}? ({text}) " for name, text in near.items()), "")
    return (
        f"unknown key {dotted!r} = {reprlib.repr(child.plain())} ({child.origin}); {meant}"
        f"keys of {path or 'the top level'}: {', '.join(names)}"
    )


def _retired_text(retired: Retired, path: str, child: YamlNode) -> str:
    value = "null" if retired.value is None else str(retired.value).lower()
    return (
        f"{path} = {child.plain()!r} ({child.origin}): it is no longer a setting and fixed at "
        f"{value}; leave it out" + (f": {retired.instead}" if retired.instead else "")
    )


def as_recorded(value: Any) -> Any:
    """Return a config as plain values under which hashes of earlier versions stay equal.

    As `dataclasses.asdict`, and with the settings that were retired since. A class whose values
    were once others says which in `recorded`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "recorded"):
            return value.recorded()
        retired = RETIRED.get(type(value).__name__, {})
        own = {
            field.name: as_recorded(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        return own | {name: each.value for name, each in retired.items()}
    if isinstance(value, (list, tuple)):
        return [as_recorded(item) for item in value]
    if isinstance(value, dict):
        return {key: as_recorded(item) for key, item in value.items()}
    return value


def _filled_in(value: Any, path: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_filled_in(item, path) for item in value)
    if not isinstance(value, str):
        return value
    if "$$" in value:
        # The record of a run is read like a config, where the one that is left would be refused.
        raise ConfigError(
            f"{path}={value!r}: $$ is not taken in a path that is recorded; rename the folder, or "
            "make a link to it without a dollar sign"
        )
    return env.expand(value, path)


def _check_range(field: "dataclasses.Field[Any]", value: Any, node: YamlNode, path: str) -> None:
    for item in value if isinstance(value, tuple) else ():
        _check_range(field, item, node, path)
    if value is None or not isinstance(value, (int, float)):
        return
    for sign, bound in field.metadata.get("bounds", {}).items():
        if not _COMPARE[sign](value, bound):
            unit = f" {field.metadata['unit']}" if field.metadata.get("unit") else ""
            raise ConfigError(
                f"{path} = {value}{unit} is out of range: expected {range_text(field)} "
                f"({node.origin}); it means: {field.metadata['meaning']}"
            )


def _unquoted(text: str) -> Any:
    try:
        return parse(text, "").value
    except ConfigError:
        return None


def _coerce(hint: Any, node: YamlNode, path: str, mistakes: list[str]) -> Any:
    """Check one value against its type hint; nothing is converted (an int is not a bool).

    Mistakes inside of it are added to those there are; one of its own is raised.
    """
    origin, args, value = typing.get_origin(hint), typing.get_args(hint), node.value
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), node, path, mistakes)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [arg for arg in args if arg is not type(None)]
        # Of a word or a list (`auto` or [a, b]), the value says which is meant.
        lists = [arg for arg in inner if typing.get_origin(arg) is tuple]
        hint = lists[0] if lists and isinstance(value, list) else inner[0]
        return _coerce(hint, node, path, mistakes)
    if origin is Literal:
        if type(value) is str and value in args:
            return value
        choices = ", ".join(str(arg) for arg in args)
        near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{path} = {node.plain()!r} ({node.origin}): expected one of {choices}{advice}"
        )
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(
                f"{path} = {node.plain()!r} ({node.origin}): expected a list, such as [a, b]"
            )
        items = []
        for number, item in enumerate(value):
            with _noting(mistakes):
                items.append(_coerce(args[0], item, f"{path}.{number}", mistakes))
        return tuple(items)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path} = {node.plain()!r} ({node.origin}): expected a mapping, such as {{a: 1}}"
            )
        every = {}
        for key, item in value.items():
            with _noting(mistakes):
                every[key] = _coerce(args[1], item, f"{path}.{key}", mistakes)
        return every
    if hint is Any:
        return node.plain()
    if hint is float and type(value) is int:
        return float(value)
    # Not isinstance: to Python true is a whole number.
    if type(value) is hint:
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if type(value) is str and type(_unquoted(value)) in (hint, int if hint is float else hint):
        raise ConfigError(
            f"{path} = {value!r} ({node.origin}): expected {names[hint]}, and quotes make it text; "
            f"write {value.strip()} without them"
        )
    advice = "; put it in quotes to make it text" if hint is str else ""
    if hint is int and type(value) is float and value.is_integer():
        advice = f"; write {int(value):_}"
    raise ConfigError(f"{path} = {node.plain()!r} ({node.origin}): expected {names[hint]}{advice}")
