"""Describes a model and its cost as a table, without torch: `pipeline model`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config import schema, strict_yaml
from pipeline.config.load import find_config, load
from pipeline.config.model import ModelConfig
from pipeline.config.objective import MLM, ObjectiveConfig
from pipeline.config.runs import PretrainConfig, load_run
from pipeline.config.train import KernelsConfig, TrainConfig
from pipeline.errors import ConfigError
from pipeline.kernels.choose import REFERENCE, Choice, expected_on_gpu
from pipeline.model import cost

VOCABULARIES = (12_000, 21_128, 30_522, 50_000)
"""Sizes of RoFormerV2, of BERT for Chinese and for English, and of RoFormer."""
PEAK_FLOPS = 989e12
"""Dense bf16 FLOP/s of an H100 or H200 SXM, by their data sheets (half of those with sparsity)."""
UTILISATION = 0.5
"""Share of the peak in the planning figure: an assumption, not a measurement."""

_LABEL_WIDTH, _COLUMN_WIDTH = 28, 15


@dataclass(frozen=True)
class TrainingSetup:
    """A model and the settings of its training that decide the cost."""

    config: ModelConfig
    seq_len: int = 512
    micro_batch: int = 8
    num_ranks: int = 1
    masked_share: float = 0.15
    document_len: int | None = None
    """Tokens that a token sees if attention skips other documents; None: the whole row."""
    checkpoint_layers: int | None = None
    """Layers of a group of which only the inputs are kept for backward; None keeps everything."""
    fused: Choice = REFERENCE
    objective: ObjectiveConfig = MLM
    train: TrainConfig = cost.DEFAULT_TRAIN

    def __post_init__(self) -> None:
        sizes = {
            "seq-len": self.seq_len,
            "micro-batch": self.micro_batch,
            "ranks": self.num_ranks,
            "document-len": self.document_len,
        }
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value}: expected a whole number from 1")


def read_plan(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    seq_len: int | None = None,
    micro_batch: int | None = None,
    num_ranks: int = 1,
    document_len: int | None = None,
) -> TrainingSetup:
    """Read a model's file, or the config of a run, which also has lengths and batches.

    It is a run's file if one of its top-level keys belongs to `PretrainConfig`. Overrides are
    `num_layers=3` for a model's file, `model.num_layers=3` for a run; lengths and batches replace
    the run's.

    Raises:
        ConfigError: `load` fails, or a number is below 1.
    """
    path = find_config(str(path), ("model", "train", ""))
    if _is_run(path, ()):
        run = load_run(path, overrides).config
        plan = TrainingSetup(
            run.model,
            run.data.seq_len,
            run.train.micro_batch,
            masked_share=run.data.mask_prob,
            checkpoint_layers=run.train.activation_checkpoint_layers,
            objective=run.objective,
            train=run.train,
        )
        kernels = run.kernels
    else:
        plan, kernels = TrainingSetup(load(ModelConfig, path, overrides).config), KernelsConfig()
    return replace(
        plan,
        fused=expected_on_gpu(kernels, plan.config, "bf16"),
        seq_len=plan.seq_len if seq_len is None else seq_len,
        micro_batch=plan.micro_batch if micro_batch is None else micro_batch,
        num_ranks=num_ranks,
        document_len=document_len,
    )


def describe(plan: TrainingSetup) -> str:
    """Format the table: one column, or one for each of `VOCABULARIES` if the config names none."""
    given = plan.config.vocab_size
    sizes = VOCABULARIES if given is None else (given,)
    configs = [replace(plan.config, vocab_size=size) for size in sizes]
    lines = [
        *_switches(plan.config),
        "",
        _row("vocabulary", [f"{size:,}" for size in sizes]),
        *_parameters(plan, configs),
        *_flops(plan, configs),
        *_memory(plan, configs),
        "",
        f"planning figure: {UTILISATION:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s (H100 or H200, "
        "dense bf16); not a measurement",
    ]
    speeds = [
        plan.num_ranks * UTILISATION * PEAK_FLOPS / _flops_of(plan, config).total
        for config in configs
    ]
    lines.append(_row(f"  tokens/s, {_count(plan.num_ranks, 'rank')}", _grouped(speeds, 0)))
    return "\n".join(lines)


def _is_run(path: Path, parents: tuple[Path, ...]) -> bool:
    """Look into the files that `from:` names if the keys beside it do not decide."""
    tree = strict_yaml.read_file(path).plain()
    if not isinstance(tree, dict) or path.resolve() in parents:
        return False
    if tree.keys() & {field.name for field in dataclasses.fields(PretrainConfig)}:
        return True
    below = tree.get("from")
    if tree.keys() - {"from"} or not isinstance(below, str):
        return False
    return _is_run(find_config(below, ("train", ""), path.parent), (*parents, path.resolve()))


def _switches(config: ModelConfig) -> list[str]:
    changed = [
        f"  {name} = {_text(value)} (default {_text(field.default)})"
        for name, field, value in schema.walk(config)
        if value != field.default
    ]
    return ["differs from the defaults:", *(changed or ["  nothing"])]


def _parameters(plan: TrainingSetup, configs: list[ModelConfig]) -> list[str]:
    counted = [cost.parameters(config, plan.objective) for config in configs]
    lines = ["", "parameters", *_rows(counted, 1.0, 0)]
    if len(configs) == 1:
        others = {
            size: cost.parameters(replace(configs[0], vocab_size=size), plan.objective)["total"]
            for size in VOCABULARIES
        }
        lines += ["", "parameters at other vocabularies"]
        lines += [_row(f"  {size:,}", [f"{total:,}"]) for size, total in others.items()]
    return lines


def _flops(plan: TrainingSetup, configs: list[ModelConfig]) -> list[str]:
    flops_of_each = [_flops_of(plan, config) for config in configs]
    num_keys = min(plan.document_len or plan.seq_len, plan.seq_len)
    title = (
        f"MFLOP per token, every token sees {_count(num_keys, 'key')}, "
        f"{plan.masked_share:.0%} masked"
    )
    parts = {
        "body, linear layers": [flops.body for flops in flops_of_each],
        "attention, scores and values": [flops.attention for flops in flops_of_each],
        "head": [flops.head for flops in flops_of_each],
        "forward": [flops.forward for flops in flops_of_each],
        "backward": [flops.backward for flops in flops_of_each],
        "forward and backward": [flops.total for flops in flops_of_each],
    }
    rows = [
        _row(f"  {name}", _grouped([value / 1e6 for value in values], 1))
        for name, values in parts.items()
    ]
    return ["", title, *rows]


def _memory(plan: TrainingSetup, configs: list[ModelConfig]) -> list[str]:
    passed = cost.TrainingPass(
        plan.config,
        plan.micro_batch,
        plan.seq_len,
        masked_share=plan.masked_share,
        checkpoint_layers=plan.checkpoint_layers,
        fused=plan.fused,
        objective=plan.objective,
    )
    kept = cost.activation_bytes([replace(passed, config=config) for config in configs])
    states = [
        cost.state_bytes(config, plan.num_ranks, plan.objective, plan.train) for config in configs
    ]
    state = [
        "",
        f"MiB of state on each of {_count(plan.num_ranks, 'rank')}, bf16, {plan.train.optimizer}, "
        f"ZeRO {plan.train.zero_stage}" + " (counted as 1)" * (plan.train.zero_stage > 1),
        *_rows(states, 2.0**20, 1),
    ]
    if kept is None:
        return ["", "activations: not known without torch: pip install 'postnorm[train]'", *state]
    both = [
        {"activations and state": activations["total"] + state["total"]}
        for activations, state in zip(kept, states, strict=True)
    ]
    batch = f"micro-batch of {plan.micro_batch:,} x {plan.seq_len:,} tokens"
    if plan.checkpoint_layers is not None:
        batch += f", {_count(plan.checkpoint_layers, 'layer')} of them at a time"
    if parts := cost.fused_parts(plan.config, plan.fused):
        batch += f"; fused, as on a GPU: {', '.join(parts)}"
    return [
        "",
        f"MiB of activations kept for backward, bf16, {batch}",
        *_rows(kept, 2.0**20, 1),
        *state,
        *_rows(both, 2.0**20, 1),
    ]


def _flops_of(plan: TrainingSetup, config: ModelConfig) -> cost.Flops:
    return cost.flops_per_token(
        config, plan.seq_len, plan.masked_share, plan.document_len, plan.objective
    )


def _rows(columns: list[dict[str, int]], unit: float, decimals: int) -> list[str]:
    """Format a row for each group that some column has."""
    return [
        _row(f"  {name}", _grouped([column[name] / unit for column in columns], decimals))
        for name in columns[0]
        if any(column[name] for column in columns)
    ]


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in cells)


def _grouped(values: list[float], decimals: int) -> list[str]:
    return [f"{value:,.{decimals}f}" for value in values]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _text(value: object) -> str:
    named = {None: "null", True: "true", False: "false"}
    return named[value] if value is None or isinstance(value, bool) else str(value)
