"""The only door to DeepSpeed: process group, ZeRO stage 1, optimizer step, its checkpoint files.

What DeepSpeed does by itself and is not used: its `latest` file (written before all ranks have
saved), its schedulers (they are not ours), bf16 at stage 0 (it takes a hidden optimizer step), its
counting of micro-batches (one number for a whole run, and a count that checkpoints do not hold).
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.train import TrainConfig
from pipeline.data.batch import MicroBatch
from pipeline.errors import CheckpointError
from pipeline.objectives.mlm import LossSums
from pipeline.runtime import dist, env
from pipeline.runtime.env import ProcessInfo
from pipeline.train.lamb import Lamb, TensorSlice
from pipeline.train.optimizer import make_optimizer, matrix_slices

_TAG = "state"
_TIMEOUT = timedelta(minutes=30)

Objective = Callable[[nn.Module, MicroBatch], LossSums]


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    sums: LossSums
    """This rank's part of the batch, on the device."""
    applied: bool
    """False if the gradient was not finite on some rank: then no rank changed its weights."""
    grad_norm: float
    """Global gradient norm before clipping; infinite or NaN if not applied."""


def init_process_group(process: ProcessInfo) -> torch.device:
    """Joins the process group and returns this rank's device: its GPU, or the CPU over gloo."""
    has_gpu = torch.cuda.is_available()
    deepspeed = _import_deepspeed()
    if has_gpu:
        torch.cuda.set_device(process.local_rank)
    deepspeed.init_distributed(
        dist_backend="nccl" if has_gpu else "gloo",
        auto_mpi_discovery=False,
        timeout=_TIMEOUT,
        verbose=False,
    )
    return torch.device("cuda", process.local_rank) if has_gpu else torch.device("cpu")


def close_process_group() -> None:
    """Leaves together: a rank that tears gloo down early can abort its peers."""
    dist.barrier()
    torch.distributed.destroy_process_group()


class Engine:
    """A model under ZeRO-1 with fp32 master weights, fp32 accumulation and its optimizer."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, process: ProcessInfo, device: torch.device
    ) -> None:
        """Wraps a model; every rank must pass the same weights (rank 0's are sent to all)."""
        self.device = device
        self.world_size = process.world_size
        self._optimizer = make_optimizer(model, config)
        deepspeed = _import_deepspeed()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self._engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=self._optimizer,
                config=deepspeed_config(config),
                dist_init_required=False,
            )
        logging.getLogger("DeepSpeed").info("initialize printed: %s", printed.getvalue())
        if isinstance(self._optimizer, Lamb):
            slices = tensor_slices(model, self._optimizer)
            self._optimizer.bind(*matrix_slices(model, slices), dist.sum_over_ranks)

    @property
    def model(self) -> nn.Module:
        """The model whose forward pass training and evaluation use."""
        return self._engine  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates this rank's partitions; for its hooks around a step."""
        return self._optimizer

    def partitions(self) -> list[tuple[Tensor, dict[str, tuple[int, int]]]]:
        """This rank's flat fp32 master weights, each with (start, stop) of the parameters in it.

        They are parameters of `optimizer`; empty if DeepSpeed divides the weights otherwise.
        """
        places = getattr(self._engine.optimizer, "_param_slice_mappings", [])
        flat = [group["params"] for group in self._optimizer.param_groups]
        if len(flat) != len(places) or any(len(parameters) != 1 for parameters in flat):
            return []
        return [
            (partition, {name: (part.start, part.start + part.numel)
                         for name, part in of_group.items()})
            for (partition,), of_group in zip(flat, places, strict=True)
        ]  # fmt: skip

    def train_step(self, batches: list[MicroBatch], objective: Objective, lr: float) -> StepResult:
        """Forward, backward and one update over this rank's micro-batches of one step. Collective.

        The loss is the sum over all masked tokens of the global batch, over their number: the split
        into ranks and micro-batches does not change it. How many they are, and their sizes and
        lengths, may differ from step to step.

        Args:
            batches: at least one.
            objective: called on each of them, on the device.
            lr: learning rate of this update.
        """
        assert batches, "a step needs at least one micro-batch on every rank"
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._engine.train()
        count = sum(len(batch.targets) for batch in batches)
        weight = dist.sum_over_ranks(torch.tensor(float(count), device=self.device))
        # DeepSpeed averages over ranks; this undoes it.
        scale = self.world_size / weight.clamp(min=1.0)
        parts = []
        for batch in batches:
            sums = objective(self._engine, batch.to(self.device))
            self._engine.backward(sums.loss * scale)
            parts.append(LossSums(sums.loss.detach(), sums.correct, sums.weight))
        self._engine.step()
        # DeepSpeed has compared the norm with infinity on the host by now: no further sync.
        norm = self._engine.get_global_grad_norm()
        return StepResult(_sum(parts), bool(self._engine.was_step_applied()), float(norm))

    def save_files(self, folder: Path) -> None:
        """Writes weights and optimizer state of all ranks below `folder`. Collective.

        Raises:
            OSError: the disk failed; RuntimeError: torch's writer saw the disk fail.
        """
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load_files(self, folder: Path) -> None:
        """Reads what `save_files` wrote on as many ranks. Collective.

        Raises:
            CheckpointError: DeepSpeed did not find or accept the files.
        """
        loaded, _ = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if loaded is None:
            raise CheckpointError(f"DeepSpeed could not load {folder / _TAG}; see the rank's log")


def tensor_slices(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[TensorSlice]:
    """Which pieces of which parameters the tensors of a rank's optimizer hold, without padding.

    DeepSpeed 0.19.8 links each parameter to its piece of the flat partition of a group, in plain
    ZeRO as in BF16_Optimizer, if the rank has one.
    """
    slices = []
    for name, parameter in model.named_parameters():
        link = parameter._hp_mapping  # type: ignore[attr-defined]
        if link is not None:
            [flat] = optimizer.param_groups[link.param_group_index]["params"]
            place = link.hp_fragment_address
            offset = link.lp_fragment_address.start
            slices.append(TensorSlice(name, offset, flat, place.start, place.numel))
    return slices


def expected_files(folder: Path, world_size: int) -> list[str]:
    """Names, below a checkpoint, that a complete save of `world_size` ranks must have.

    Raises:
        CheckpointError: one is missing; says which kind.
    """
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    optimizer = [name for name in found if name.endswith("_optim_states.pt")]
    model = [name for name in found if name.endswith("_model_states.pt")]
    if len(optimizer) != world_size or len(model) != 1:
        raise CheckpointError(
            f"{folder} has {len(optimizer)} optimizer files and {len(model)} model files, expected "
            f"{world_size} and 1: DeepSpeed did not save the state of every rank"
        )
    return sorted(found)


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reads a checkpoint's weights without a process group.

    Args:
        folder: a published checkpoint.

    Returns:
        fp32 master weights put together from all ranks, and the weights that forward passes used
        (bf16 or fp32), both by parameter name.

    Raises:
        CheckpointError: a parameter's parts do not add up to its size.
    """
    _import_deepspeed()
    # Our own files, whose sha256 was checked: DeepSpeed stores more than tensors in them.
    [model_file] = (folder / _TAG).glob("*_model_states.pt")
    used = torch.load(model_file, map_location="cpu", weights_only=False)["module"]
    if all(weight.dtype == torch.float32 for weight in used.values()):
        return used, used
    optimizer_files = sorted((folder / _TAG).glob("*_optim_states.pt"), key=_rank_of)
    pieces: dict[str, list[Tensor]] = {name: [] for name in used}
    for file in optimizer_files:
        part = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
        groups = zip(
            part["single_partition_of_fp32_groups"], part["param_slice_mappings"], strict=True
        )
        # DeepSpeed's zero_to_fp32 does not read this optimizer's files (0.19.8): each rank has a
        # flat partition, and a table of which slice of it belongs to which parameter.
        for flat, slices in groups:
            for name, place in slices.items():
                pieces[name].append(flat[place.start : place.start + place.numel])
    masters = {}
    for name, weight in used.items():
        whole = torch.cat(pieces[name]) if pieces[name] else torch.empty(0)
        if whole.numel() != weight.numel():
            raise CheckpointError(
                f"{folder} has {whole.numel()} master weights of {name}, expected {weight.numel()}"
            )
        masters[name] = whole.view(weight.shape)
    return masters, used


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """The DeepSpeed config of a run; it is written by us alone, since unknown keys are ignored."""
    return {
        # backward() only adds to this rank's gradients; step() sums them over ranks and updates.
        "managed_gradient_accumulation": False,
        # Then no divisor of the loss. The micro-batch size only feeds a count of samples that
        # nothing reads, but it must be given: with 1 that is a count of micro-batches.
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": config.grad_clip,
        "zero_optimization": {"stage": 1},
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


def _rank_of(file: Path) -> int:
    """Rank in a name such as `bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt`."""
    return int(file.name.partition("_pp_rank_")[2].partition("_")[0])


def _sum(parts: list[LossSums]) -> LossSums:
    return LossSums(
        loss=torch.stack([part.loss for part in parts]).sum(),
        correct=torch.stack([part.correct for part in parts]).sum(),
        weight=torch.stack([part.weight for part in parts]).sum(),
    )


def _import_deepspeed() -> Any:
    """Imports DeepSpeed, quiet and without compiling its shared-memory collectives for 30 s."""
    if not torch.cuda.is_available():
        env.set_default("DS_ACCELERATOR", "cpu")
    # DeepSpeed 0.19.8 uses names that torch 2.13 wants replaced; nothing for our users to do.
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", module="torch")
    import deepspeed
    import deepspeed.ops

    compatible = deepspeed.ops.__compatible_ops__
    if "deepspeed_shm_comm" in compatible:
        compatible["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed
