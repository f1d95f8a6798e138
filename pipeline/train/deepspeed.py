"""The DeepSpeed config of a run, and the part of it that a user's JSON file may tune.

DeepSpeed ignores keys that it does not know, so a user's file is checked against an allow-list: it
may set what is in `TUNING`, may repeat what the run has decided (`decided`), and nothing else.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError

_BLOCKS: dict[str, dict[type, str]] = {
    "": {
        bool: "wall_clock_breakdown memory_breakdown dump_state",
        int: "steps_per_print",
        str: "log_level",
    },
    "comms_logger.": {bool: "enabled verbose prof_all debug", list: "prof_ops"},
    "zero_optimization.": {
        bool: "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce "
        "allgather_partitions overlap_comm stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential memory_efficient_linear log_trace_cache_warnings "
        "enable_sanity_checks",
        int: "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold",
    },
}
TUNING: dict[str, type] = {
    f"{block}{name}": type_
    for block, types in _BLOCKS.items()
    for type_, names in types.items()
    for name in names.split()
}
"""Keys that change neither samples nor, beyond rounding, results; with the type of their values."""

_REPORTS = (
    "comms_logger.enabled",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "steps_per_print",
)
_EXPECTED = {bool: "true or false", int: "a whole number from 0", list: "a list", str: "a text"}

_ON_DEVICE = "checkpoints read weights and optimizer state by parameter, on the device"
_OUR_METRICS = "rank 0 writes metrics.jsonl and TensorBoard itself; see monitor.*"
_REASONS = {
    "activation_checkpointing": "use train.activation_checkpoint_layers",
    "bf16": "only bf16.enabled is known; master weights and optimizer state are fp32",
    "checkpoint": "checkpoints are not DeepSpeed's here: they fit any number of ranks and stage",
    "compile": "use train.compile",
    "csv_monitor": _OUR_METRICS,
    "data_efficiency": "the run's own loader reads the data; see data.*",
    "flops_profiler": "it patches torch's functions; use `python -m pipeline profile`",
    "fp16": "precisions are bf16 and fp32; only fp16.enabled is known",
    "optimizer": "use train.optimizer and the settings of that optimizer",
    "scheduler": "use train.schedule and the settings of that schedule",
    "tensorboard": _OUR_METRICS,
    "wandb": _OUR_METRICS,
    "zero_optimization.offload_optimizer": _ON_DEVICE,
    "zero_optimization.offload_param": _ON_DEVICE,
    "zero_optimization.zero_hpz_partition_size": "its second copy of the weights is not renewed "
    "when a checkpoint is loaded, so the run would continue from wrong weights",
}
"""Why some keys that users ask for are refused, and everything below them."""


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`.

    Raises:
        ConfigError: the file `train.deepspeed_config` cannot be read, repeats a key, has a key that
            may not be set, or a value that contradicts the run's config.
    """
    merged: dict[str, Any] = {
        # backward() only adds to this rank's gradients; step() sums them over ranks and updates.
        "managed_gradient_accumulation": False,
        # With 1 the loss is not divided. The micro-batch size only feeds a count of samples that
        # nothing reads, but it must be given; with 1 it counts micro-batches.
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": config.grad_clip,
        "zero_optimization": {"stage": config.zero_stage},
        # DeepSpeed knows AdamW. Our LAMB is told what each partition holds.
        "zero_allow_untested_optimizer": config.optimizer == "lamb",
        "bf16": {"enabled": config.precision == "bf16"},
        # A bf16 sum over micro-batches would be rounded after each of them.
        "data_types": {"grad_accum_dtype": "fp32"},
        # By default that sum would be rounded to bf16 and added over the ranks in bf16.
        "communication_data_type": "fp32",
        # The throughput timer waits for the GPU before and after micro-batches.
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 1 << 62,
    }
    if config.deepspeed_config is not None:
        tuned = _tuned(_read(Path(config.deepspeed_config)), config, world_size)
        if any(tuned.get(key) for key in _REPORTS):
            # DeepSpeed reports at this level, which the engine silences otherwise.
            tuned.setdefault("log_level", "info")
        for key, value in tuned.items():
            *parents, name = key.split(".")
            block = merged
            for parent in parents:
                block = block.setdefault(parent, {})
            block[name] = value
    return merged


def decided(config: TrainConfig, world_size: int) -> dict[str, tuple[Any, str]]:
    """Return the keys that the run has decided, each with its value and the setting behind it."""
    precision = f"train.precision={config.precision}"
    schedule = f"train.schedule={config.schedule}"
    batches = f"train.global_batch={config.global_batch} / (train.micro_batch={config.micro_batch}"
    accumulation = config.global_batch // (config.micro_batch * world_size)
    adamw = config.optimizer == "adamw"
    schedules = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
    values: dict[str, tuple[Any, str]] = {
        "train_batch_size": (config.global_batch, "train.global_batch"),
        "train_micro_batch_size_per_gpu": (config.micro_batch, "train.micro_batch"),
        "gradient_accumulation_steps": (accumulation, f"{batches} x {world_size} ranks)"),
        "gradient_clipping": (config.grad_clip, "train.grad_clip"),
        "zero_optimization.stage": (config.zero_stage, "train.zero_stage"),
        "zero_allow_untested_optimizer": (not adamw, "train.optimizer"),
        "bf16.enabled": (config.precision == "bf16", precision),
        "fp16.enabled": (False, precision),
        "torch_autocast.enabled": (False, precision),
        "optimizer.type": ("AdamW" if adamw else "Lamb", "train.optimizer"),
        "optimizer.params.lr": (config.lr, "train.lr"),
        "optimizer.params.betas": (
            [config.adam_beta1, config.adam_beta2],
            "train.adam_beta1, train.adam_beta2",
        ),
        "optimizer.params.eps": (config.adam_eps, "train.adam_eps"),
        "optimizer.params.weight_decay": (config.weight_decay, "train.weight_decay"),
        "optimizer.params.bias_correction": (
            adamw or config.lamb_bias_correction,
            "train.optimizer=adamw" if adamw else "train.lamb_bias_correction",
        ),
        "scheduler.type": (schedules.get(config.schedule), schedule),
        "scheduler.params.total_num_steps": (config.num_steps, "train.num_steps"),
        "scheduler.params.warmup_num_steps": (config.warmup_steps, "train.warmup_steps"),
        "scheduler.params.warmup_type": ("linear", schedule),
    }
    if adamw:
        for name in ("torch_adam", "adam_w_mode"):
            values[f"optimizer.params.{name}"] = (True, "train.optimizer=adamw")
    if config.schedule == "linear":
        values["scheduler.params.warmup_min_lr"] = (0, schedule)
        values["scheduler.params.warmup_max_lr"] = (config.lr, "train.lr")
    elif config.schedule == "cosine":
        values["scheduler.params.cos_min_ratio"] = (config.min_lr_ratio, "train.min_lr_ratio")
    if config.zero_stage == 1:
        # DeepSpeed refuses it at stage 1 if the number of micro-batches may change.
        values["zero_optimization.overlap_comm"] = (False, "train.zero_stage=1")
    engine = {
        "managed_gradient_accumulation": False,
        "zero_optimization.compute_grad_norm": True,
        "zero_optimization.offload_param.device": "none",
        "zero_optimization.offload_optimizer.device": "none",
        "data_types.grad_accum_dtype": "fp32",
        "communication_data_type": "fp32",
        "gradient_allreduce_op": "mean",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "disable_allgather": False,
        "timers.throughput.enabled": False,
    }
    return values | {key: (value, "the engine") for key, value in engine.items()}


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object whose keys are all different."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(
                f"train.deepspeed_config={path}: duplicate key {twice[0]!r}; remove one of the two"
            )
        return dict(pairs)

    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise ConfigError(
            f"train.deepspeed_config={path} cannot be read: {error.strerror}; correct the path, or "
            "leave it out"
        ) from None
    except ValueError as error:
        raise ConfigError(f"train.deepspeed_config={path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"train.deepspeed_config={path}: expected an object {{...}}, got {json.dumps(tree)}"
        )
    return tree


def _tuned(tree: dict[str, Any], config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Return the values to pass on, by dotted key."""
    own = decided(config, world_size)
    known = {*own, *TUNING}
    tuned, problems = {}, []
    for key, value in _leaves(tree, known, ""):
        if key not in known:
            problems.append(_refusal(key, value, known))
        elif value == "auto":
            continue
        elif key in own:
            if not _same(value, own[key][0]):
                problems.append(_conflict(key, value, *own[key]))
        else:
            # JSON writes large whole numbers as 5e8, too.
            is_whole = TUNING[key] is int and isinstance(value, float) and value.is_integer()
            tuned[key] = int(value) if is_whole else value
            if type(tuned[key]) is not TUNING[key] or (TUNING[key] is int and tuned[key] < 0):
                problems.append(f"{key} = {json.dumps(value)}: expected {_EXPECTED[TUNING[key]]}")
    if problems:
        raise ConfigError(
            f"train.deepspeed_config={config.deepspeed_config}: " + "; ".join(problems)
        )
    return tuned


def _leaves(tree: dict[str, Any], known: set[str], above: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; objects are opened only where a known key stands below."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and any(each.startswith(f"{key}.") for each in known):
            yield from _leaves(value, known, f"{key}.")
        else:
            yield key, value


def _same(value: Any, own: Any) -> bool:
    if isinstance(own, str) and isinstance(value, str):
        return value.lower() == own.lower()
    return bool(isinstance(value, bool) == isinstance(own, bool) and value == own)


def _conflict(key: str, value: Any, own: Any, owner: str) -> str:
    shown = own if isinstance(own, str) else json.dumps(own)
    # Some owners already show their value.
    here = owner if "=" in owner or not owner.startswith("train.") else f"{owner}={shown}"
    advice = "remove the key" if own is None else f'write {json.dumps(own)} or "auto"'
    if owner.startswith("train."):
        advice += f", or change {owner.partition('=')[0]}"
    return f"{key} = {json.dumps(value)} contradicts {here}: {advice}"


def _refusal(key: str, value: Any, known: set[str]) -> str:
    shown = f"{key} = {json.dumps(value)}"
    if any(each.startswith(f"{key}.") for each in known):
        return f"{shown}: expected an object"
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    reason = next((_REASONS[each] for each in above if each in _REASONS), None)
    if reason:
        return f"{shown} is not supported: {reason}; remove it"
    names = {each.rpartition(".")[2]: each for each in sorted(known)}
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7) or [
        names[name] for name in difflib.get_close_matches(parts[-1], names, n=1, cutoff=0.7)
    ]
    advice = f"did you mean {near[0]!r}?" if near else "remove it"
    return f"{shown} may not be set: only keys that do not change results are passed on; {advice}"
