"""The DeepSpeed config of a run, and the part of it that a user's JSON file may tune.

DeepSpeed ignores keys that it does not know, so a user's file is checked against an allow-list: it
may set what is in `TUNING`, and nothing else. What the run's own config decides may be left to it
with the value "auto".
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

_REPORTS = "comms_logger.enabled wall_clock_breakdown memory_breakdown dump_state steps_per_print"
_EXPECTED = {bool: "true or false", int: "a whole number from 0", list: "a list", str: "a text"}

_ENGINE = "the engine's sums and checkpoints need their own value"
_METRICS = "rank 0 writes metrics.jsonl and TensorBoard itself; see monitor.*"
_REASONS = {
    "activation_checkpointing": "use train.activation_checkpoint_layers",
    "bf16": "use train.precision",
    "checkpoint": "checkpoints are not DeepSpeed's here: they fit any number of ranks and stage",
    "communication_data_type": _ENGINE,
    "compile": "use train.compile",
    "csv_monitor": _METRICS,
    "data_efficiency": "the run's own loader reads the data; see data.*",
    "data_types": _ENGINE,
    "flops_profiler": "it patches torch's functions; use `postnorm profile`",
    "fp16": "precisions are bf16 and fp32; use train.precision",
    "gradient_accumulation_steps": "it follows from train.global_batch and train.micro_batch",
    "gradient_clipping": "use train.grad_clip",
    "optimizer": "use train.optimizer and the settings of that optimizer",
    "scheduler": "use train.schedule and the settings of that schedule",
    "tensorboard": _METRICS,
    "train_batch_size": "use train.global_batch",
    "train_micro_batch_size_per_gpu": "use train.micro_batch",
    "wandb": _METRICS,
    "zero_optimization.offload_optimizer": "checkpoints read optimizer state on the device",
    "zero_optimization.offload_param": "checkpoints read weights on the device",
    "zero_optimization.stage": "use train.zero_stage",
    # First loss after a load 35.9 in place of 25.2, and no error.
    "zero_optimization.zero_hpz_partition_size": "its second copy of the weights is not renewed "
    "when a checkpoint is loaded, so the run would continue from wrong weights",
}
"""Why some keys that users ask for are refused, and everything below them."""


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`.

    Raises:
        ConfigError: the file `train.deepspeed_config` cannot be read, repeats a key, or has a key
            or a value that may not be set.
    """
    merged: dict[str, Any] = {
        # backward() only adds to this rank's gradients; step() sums them over ranks and updates.
        # DeepSpeed's own count runs over the whole process and is not in its checkpoints: a ramp
        # of batch sizes would update at the wrong micro-batches.
        "managed_gradient_accumulation": False,
        # With 1 the loss is not divided. The micro-batch size only feeds a count of samples that
        # nothing reads, but it must be given; with 1 it counts micro-batches.
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": config.grad_clip,
        # Stage 3 keeps DeepSpeed's own linear layer: its bf16 losses are 2e-4 off those of stage 1.
        "zero_optimization": {"stage": config.zero_stage},
        "bf16": {"enabled": config.precision == "bf16"},
        # A bf16 sum over micro-batches would be rounded after each of them.
        "data_types": {"grad_accum_dtype": "fp32"},
        # By default that sum would be rounded to bf16 and added over the ranks in bf16.
        # Against a reference in fp32 the first step of two ranks was 1.3e-2 of the way off, now
        # 8e-7; it doubles the bytes of one reduction a step.
        "communication_data_type": "fp32",
        # The throughput timer waits for the GPU before and after micro-batches.
        "timers": {"throughput": {"enabled": False}},
        # Never; it takes the step modulo this, so that 0 would be an error.
        "steps_per_print": 1 << 62,
    }
    if config.deepspeed_config is not None:
        tuned = _tuned(_read(Path(config.deepspeed_config)), config)
        if any(tuned.get(key) for key in _REPORTS.split()):
            # DeepSpeed reports at this level, which the engine silences otherwise.
            tuned.setdefault("log_level", "info")
        for key, value in tuned.items():
            *parents, name = key.split(".")
            block = merged
            for parent in parents:
                block = block.setdefault(parent, {})
            block[name] = value
    return merged


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


def _tuned(tree: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Return the values to pass on, by dotted key."""
    tuned, problems = {}, []
    for key, value in _leaves(tree, ""):
        if value == "auto":
            continue
        expected = TUNING.get(key)
        if expected is None:
            problems.append(_refusal(key, value))
            continue
        # JSON writes large whole numbers as 5e8, too.
        is_whole = expected is int and isinstance(value, float) and value.is_integer()
        tuned[key] = int(value) if is_whole else value
        if type(tuned[key]) is not expected or (expected is int and tuned[key] < 0):
            problems.append(f"{key} = {json.dumps(value)}: expected {_EXPECTED[expected]}")
    if tuned.get("zero_optimization.overlap_comm") and config.zero_stage == 1:
        problems.append("zero_optimization.overlap_comm = true: train.zero_stage=1 has no overlap")
    if problems:
        path = config.deepspeed_config
        raise ConfigError(f"train.deepspeed_config={path}: {'; '.join(problems)}")
    return tuned


def _leaves(tree: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values that are not objects."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _refusal(key: str, value: Any) -> str:
    shown = f"{key} = {json.dumps(value)}"
    if any(known.startswith(f"{key}.") for known in TUNING):
        return f"{shown}: expected an object"
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    reason = next((_REASONS[each] for each in above if each in _REASONS), None)
    if reason:
        return f'{shown} may not be set here: {reason}; remove it, or write "auto"'
    names = {known.rpartition(".")[2]: known for known in TUNING}
    near = difflib.get_close_matches(key, TUNING, n=1, cutoff=0.7) or [
        names[name] for name in difflib.get_close_matches(parts[-1], names, n=1, cutoff=0.7)
    ]
    advice = f"did you mean {near[0]!r}?" if near else "remove it"
    return f"{shown} may not be set: only keys that do not change results are passed on; {advice}"
