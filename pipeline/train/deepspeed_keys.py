"""Every key of a DeepSpeed 0.19.8 config, and whose it is; DeepSpeed itself ignores unknown ones.

Held against DeepSpeed's own lists by `tests/train/test_deepspeed_config.py`. A user's file may set
what tunes (`TUNING`), may repeat what the run's config says (`own_values`), and nothing else.
"""

from typing import Any

from pipeline.config.train import TrainConfig

_ZERO = "zero_optimization"

TUNING: dict[str, type] = {
    f"{_ZERO}.contiguous_gradients": bool,
    f"{_ZERO}.reduce_scatter": bool,
    f"{_ZERO}.reduce_bucket_size": int,
    f"{_ZERO}.use_multi_rank_bucket_allreduce": bool,
    f"{_ZERO}.allgather_partitions": bool,
    f"{_ZERO}.allgather_bucket_size": int,
    f"{_ZERO}.overlap_comm": bool,
    f"{_ZERO}.sub_group_size": int,
    f"{_ZERO}.stage3_prefetch_bucket_size": int,
    f"{_ZERO}.stage3_param_persistence_threshold": int,
    f"{_ZERO}.stage3_model_persistence_threshold": int,
    f"{_ZERO}.stage3_max_live_parameters": int,
    f"{_ZERO}.stage3_max_reuse_distance": int,
    f"{_ZERO}.stage3_module_granularity_threshold": int,
    f"{_ZERO}.stage3_use_all_reduce_for_fetch_params": bool,
    f"{_ZERO}.stage3_allgather_sequential": bool,
    f"{_ZERO}.memory_efficient_linear": bool,
    f"{_ZERO}.log_trace_cache_warnings": bool,
    f"{_ZERO}.enable_sanity_checks": bool,
    "comms_logger.enabled": bool,
    "comms_logger.verbose": bool,
    "comms_logger.prof_all": bool,
    "comms_logger.prof_ops": list,
    "comms_logger.debug": bool,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "steps_per_print": int,
    "log_level": str,
}
"""What changes neither samples nor, beyond rounding, results; and the type of its values."""

REPORTS = (
    "comms_logger.enabled", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "steps_per_print",
)  # fmt: skip
"""Of these, what DeepSpeed says through its logger."""

_OUR_CHECKPOINTS = (
    "checkpoints are not DeepSpeed's here: they fit any number of ranks and any stage"
)
_ON_DEVICE = "checkpoints read weights and optimizer state by parameter, on the device"
_LAYOUT = "it changes how partitions are laid out, which checkpoints read by parameter"
_ROUNDS = "it rounds what is summed or gathered; master weights and sums are fp32 here"
_OUR_METRICS = "rank 0 writes metrics.jsonl and TensorBoard itself; see monitor.*"
_OUR_DATA = "data is read by the run's own loader; see data.*"
_REMOVED = "DeepSpeed 0.19.8 has removed it"
_OTHER_MODELS = "it is for models or ways of training that this program does not have"
_MEAN_IN_FP32 = "gradients are summed and divided in fp32 here, so that nothing is to be scaled"

REFUSED: dict[str, str] = {
    f"{_ZERO}.elastic_checkpoint": _OUR_CHECKPOINTS,
    f"{_ZERO}.load_from_fp32_weights": _OUR_CHECKPOINTS,
    f"{_ZERO}.pipeline_loading_checkpoint": _OUR_CHECKPOINTS,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _OUR_CHECKPOINTS,
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": _OUR_CHECKPOINTS,
    f"{_ZERO}.offload_param": _ON_DEVICE,
    f"{_ZERO}.offload_optimizer": _ON_DEVICE,
    f"{_ZERO}.cpu_offload": _ON_DEVICE,
    f"{_ZERO}.cpu_offload_param": _ON_DEVICE,
    f"{_ZERO}.cpu_offload_use_pin_memory": _ON_DEVICE,
    f"{_ZERO}.zenflow": _ON_DEVICE,
    f"{_ZERO}.legacy_stage1": _LAYOUT,
    f"{_ZERO}.round_robin_gradients": _LAYOUT,
    f"{_ZERO}.parameter_alignment": _LAYOUT,
    f"{_ZERO}.zero_hpz_partition_size": "its second copy of the weights is not renewed when a "
    "checkpoint is loaded, and the run would go on from wrong weights",
    f"{_ZERO}.zero_quantized_weights": _ROUNDS,
    f"{_ZERO}.zero_quantized_nontrainable_weights": _ROUNDS,
    f"{_ZERO}.zero_quantized_gradients": _ROUNDS,
    f"{_ZERO}.ignore_unused_parameters": "a pooler has no gradient in pre-training",
    f"{_ZERO}.override_module_apply": _OTHER_MODELS,
    f"{_ZERO}.save_muon_momentum_buffer_in_memory": _OTHER_MODELS,
    f"{_ZERO}.leaf_module": _OTHER_MODELS,
    "activation_checkpointing": "the model does that; see train.activation_checkpoint_layers",
    "aio": _ON_DEVICE,
    "amp": _REMOVED,
    "autotuning": "it starts runs of its own",
    "bf16": "master weights and optimizer state are fp32 here; only bf16.enabled is known",
    "bfloat16": "it is the old name of bf16",
    "checkpoint": _OUR_CHECKPOINTS,
    "comet": _OUR_METRICS,
    "compile": "train.compile compiles the model's layers",
    "compression_training": _REMOVED,
    "csv_monitor": _OUR_METRICS,
    "curriculum_learning": _REMOVED,
    "data_efficiency": _OUR_DATA,
    "data_types": "weights are kept in train.precision and fp32; only grad_accum_dtype is known",
    "dataloader_drop_last": _OUR_DATA,
    "datastates_ckpt": _OUR_CHECKPOINTS,
    "disable_python_gc": "steps are not Python objects that pile up; leave Python as it is",
    "eigenvalue": _REMOVED,
    "elasticity": _REMOVED,
    "expert_parallel": _OTHER_MODELS,
    "flops_profiler": "it patches torch's functions; see mfu in the metrics and "
    "`python -m pipeline model`",
    "fp16": "precisions are bf16 and fp32; only fp16.enabled is known",
    "graph_harvesting": _REMOVED,
    "hybrid_engine": _OTHER_MODELS,
    "nebula": _REMOVED,
    "optimizer": "the optimizer is the run's; see train.optimizer and what belongs to it",
    "pipeline": _OTHER_MODELS,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "scheduler": "schedules are the run's; see train.schedule and what belongs to it",
    "seq_parallel_communication_data_type": _OTHER_MODELS,
    "sparse_attention": _REMOVED,
    "sparse_gradients": _REMOVED,
    "tensor_parallel": _OTHER_MODELS,
    "tensorboard": _OUR_METRICS,
    "timers": "it waits for the GPU; only timers.throughput.enabled is known",
    "torch_autocast": "the weights are cast instead; only torch_autocast.enabled is known",
    "use_data_before_expert_parallelism": _OTHER_MODELS,
    "vocabulary_size": "it only warns; see model.vocab_size",
    "wandb": _OUR_METRICS,
    "weight_quantization": _OTHER_MODELS,
    "zero_force_ds_cpu_optimizer": _ON_DEVICE,
}
"""What stands below these, unless it is named otherwise, and why it cannot be set."""


def own_values(config: TrainConfig, world_size: int) -> dict[str, tuple[Any, str]]:
    """What the run's config, or the engine, has decided: by key, the value and who says so."""
    engine = "the engine"
    found = {
        "train_batch_size": (config.global_batch, "train.global_batch"),
        "train_micro_batch_size_per_gpu": (config.micro_batch, "train.micro_batch"),
        "gradient_accumulation_steps": (
            config.global_batch // (config.micro_batch * world_size),
            f"train.global_batch={config.global_batch} / (train.micro_batch={config.micro_batch} x "
            f"{world_size} ranks)",
        ),
        "managed_gradient_accumulation": (False, engine),
        "gradient_clipping": (config.grad_clip, "train.grad_clip"),
        f"{_ZERO}.stage": (config.zero_stage, "train.zero_stage"),
        f"{_ZERO}.compute_grad_norm": (True, engine),
        f"{_ZERO}.offload_param.device": ("none", engine),
        f"{_ZERO}.offload_optimizer.device": ("none", engine),
        "zero_allow_untested_optimizer": (config.optimizer == "lamb", "train.optimizer"),
        "bf16.enabled": (config.precision == "bf16", f"train.precision={config.precision}"),
        "fp16.enabled": (False, f"train.precision={config.precision}"),
        "torch_autocast.enabled": (False, f"train.precision={config.precision}"),
        "data_types.grad_accum_dtype": ("fp32", engine),
        "communication_data_type": ("fp32", engine),
        "gradient_allreduce_op": ("mean", engine),
        "prescale_gradients": (False, _MEAN_IN_FP32),
        "gradient_predivide_factor": (1.0, _MEAN_IN_FP32),
        "disable_allgather": (False, engine),
        "timers.throughput.enabled": (False, engine),
    }
    if config.zero_stage == 1:
        # DeepSpeed refuses it where steps may have any number of micro-batches.
        found[f"{_ZERO}.overlap_comm"] = (False, f"train.zero_stage={config.zero_stage}")
    return found | _optimizer(config) | _scheduler(config)


def _optimizer(config: TrainConfig) -> dict[str, tuple[Any, str]]:
    """The optimizer's block; AdamW by DeepSpeed's name and arguments."""
    adamw = config.optimizer == "adamw"
    betas = [config.adam_beta1, config.adam_beta2]
    values = {
        "lr": (config.lr, "train.lr"),
        "betas": (betas, "train.adam_beta1, train.adam_beta2"),
        "eps": (config.adam_eps, "train.adam_eps"),
        "weight_decay": (config.weight_decay, "train.weight_decay"),
        "bias_correction": (
            adamw or config.lamb_bias_correction,
            "train.optimizer=adamw" if adamw else "train.lamb_bias_correction",
        ),
    }
    if adamw:
        values |= dict.fromkeys(("torch_adam", "adam_w_mode"), (True, "train.optimizer=adamw"))
    return {
        "optimizer.type": ("AdamW" if adamw else "Lamb", "train.optimizer"),
        **{f"optimizer.params.{name}": value for name, value in values.items()},
    }


def _scheduler(config: TrainConfig) -> dict[str, tuple[Any, str]]:
    """The scheduler's block, for the two schedules that DeepSpeed has, too."""
    names = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
    schedule = f"train.schedule={config.schedule}"
    values = {
        "total_num_steps": (config.num_steps, "train.num_steps"),
        "warmup_num_steps": (config.warmup_steps, "train.warmup_steps"),
        "warmup_type": ("linear", schedule),
    }
    if config.schedule == "linear":
        values |= {
            "warmup_min_lr": (0, schedule),
            "warmup_max_lr": (config.lr, "train.lr"),
        }
    elif config.schedule == "cosine":
        values |= {"cos_min_ratio": (config.min_lr_ratio, "train.min_lr_ratio")}
    return {
        "scheduler.type": (names.get(config.schedule), schedule),
        **{f"scheduler.params.{name}": value for name, value in values.items()},
    }
