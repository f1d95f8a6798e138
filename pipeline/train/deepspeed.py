"""The DeepSpeed config of a run: what the engine decides, and what a user's JSON file tunes."""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError
from pipeline.train.deepspeed_keys import REFUSED, REPORTS, TUNING, own_values


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """What `deepspeed.initialize` is given.

    Raises:
        ConfigError: the file that `train.deepspeed_config` names cannot be read, repeats a key, has
            an unknown one, one that would break what this program promises, or a value that
            contradicts the run's config.
    """
    found = _base(config)
    if config.deepspeed_config is not None:
        path = Path(config.deepspeed_config)
        tuned = _tuning(_read(path), config, world_size)
        if any(tuned.get(key) for key in REPORTS):
            # It speaks at that level, and the engine keeps it quiet otherwise.
            tuned.setdefault("log_level", "info")
        for key, value in tuned.items():
            *parents, name = key.split(".")
            block = found
            for parent in parents:
                block = block.setdefault(parent, {})
            block[name] = value
    return found


def _base(config: TrainConfig) -> dict[str, Any]:
    return {
        # backward() only adds to this rank's gradients; step() sums them over ranks and updates.
        "managed_gradient_accumulation": False,
        # Then no divisor of the loss. The micro-batch size only feeds a count of samples that
        # nothing reads, but it must be given: with 1 that is a count of micro-batches.
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": config.grad_clip,
        "zero_optimization": {"stage": config.zero_stage},
        # It knows AdamW. Our LAMB is told what the partitions hold.
        "zero_allow_untested_optimizer": config.optimizer == "lamb",
        "bf16": {"enabled": config.precision == "bf16"},
        # A bf16 sum over micro-batches would round after each of them.
        "data_types": {"grad_accum_dtype": "fp32"},
        # By default that sum would be rounded to bf16, and added over the ranks in bf16.
        "communication_data_type": "fp32",
        # Its throughput timer waits for the GPU before and after micro-batches.
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 1 << 62,
    }


def _read(path: Path) -> dict[str, Any]:
    """A JSON object whose keys are all different."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(
                f"train.deepspeed_config={path}: duplicate key {twice[0]!r}; remove one of the two"
            )
        return dict(pairs)

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise ConfigError(
            f"train.deepspeed_config={path} cannot be read: {error.strerror}; correct the path, or "
            "leave it out"
        ) from None
    except ValueError as error:
        raise ConfigError(f"train.deepspeed_config={path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"train.deepspeed_config={path}: expected an object {{...}}, got {json.dumps(found)}"
        )
    return found


def _tuning(found: dict[str, Any], config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Values to hand on, by dotted key.

    Raises:
        ConfigError: names every key that cannot stand.
    """
    own = own_values(config, world_size)
    tuned, problems = {}, []
    for key, value in _leaves(found, {*own, *TUNING}, ""):
        problem = None
        if key in own:
            problem = _conflict(key, value, *own[key])
        elif key in TUNING:
            if value != "auto":
                tuned[key], problem = _as_type(key, value)
        else:
            problem = _why_not(key, value, {*own, *TUNING})
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError(
            f"train.deepspeed_config={config.deepspeed_config}: " + "; ".join(problems)
        )
    return tuned


def _leaves(tree: dict[str, Any], known: set[str], above: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; objects only where no known key stands below."""
    for name, value in tree.items():
        key = f"{above}{name}"
        has_children = any(each.startswith(f"{key}.") for each in known)
        if has_children and isinstance(value, dict):
            yield from _leaves(value, known, f"{key}.")
        else:
            yield key, value


def _conflict(key: str, value: Any, own: Any, owner: str) -> str | None:
    if value == "auto" or _same(value, own):
        return None
    # Some owners say their value themselves.
    here = owner if "=" in owner or not owner.startswith("train.") else f"{owner}={_text(own)}"
    advice = "remove the key" if own is None else f'write {json.dumps(own)} or "auto"'
    if owner.startswith("train."):
        advice += f", or change {owner.partition('=')[0]}"
    return f"{key} = {json.dumps(value)} there contradicts {here}: {advice}"


def _same(value: Any, own: Any) -> bool:
    if isinstance(own, str) and isinstance(value, str):
        return value.lower() == own.lower()
    if isinstance(value, bool) != isinstance(own, bool):
        return False
    return bool(value == own)


def _as_type(key: str, value: Any) -> tuple[Any, str | None]:
    """The value as DeepSpeed takes it, or what is wrong with it; 5e8 is a whole number."""
    expected = TUNING[key]
    if expected is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not expected or (isinstance(value, int) and value < 0):
        names = {bool: "true or false", int: "a whole number from 0", list: "a list", str: "a text"}
        return None, f"{key} = {json.dumps(value)}: expected {names[expected]}"
    return value, None


def _why_not(key: str, value: Any, known: set[str]) -> str:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        if above in REFUSED:
            return f"{key} = {json.dumps(value)} is not supported: {REFUSED[above]}; remove it"
    if any(each.startswith(f"{key}.") for each in known):
        return f"{key} = {json.dumps(value)}: expected an object"
    candidates = sorted({*known, *REFUSED})
    names = {each.rpartition(".")[2]: each for each in candidates}
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.7) or [
        names[name] for name in difflib.get_close_matches(parts[-1], names, n=1, cutoff=0.7)
    ]
    advice = f"; did you mean {near[0]!r}?" if near else "; remove it"
    return f"unknown key {key!r}, which DeepSpeed 0.19.8 would ignore{advice}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
