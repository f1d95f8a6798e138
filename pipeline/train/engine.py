"""The only door to DeepSpeed: process group, ZeRO stages, optimizer step, who holds what.

What DeepSpeed does by itself and is not used: its checkpoints (they fit one number of ranks), its
schedulers (they are not ours), stage 0 (in bf16 it takes a hidden optimizer step; `replicated` is
in its place), its counting of micro-batches (one number for a whole run, and a count that its
checkpoints do not hold).
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.checkpoints.state import MASTER, MOMENTS, SavedState, TensorShard
from pipeline.config.train import TrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.objectives.base import Objective, Sums, add_up, detached
from pipeline.runtime import dist, env, watchdog
from pipeline.runtime.env import ProcessInfo
from pipeline.train.deepspeed import deepspeed_config
from pipeline.train.optimizers.slices import TensorSlice, matrix_slices, share_of_rank, squared_norm
from pipeline.train.optimizers.table import make_optimizer
from pipeline.train.timing import UPDATE, LocalComputeTimer, mark
from pipeline.train.zero0_engine import Replicated


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    sums: Sums
    """This rank's part of the batch, on the device."""
    applied: bool
    """False if the gradient was not finite on some rank: then no rank changed its weights."""
    grad_norm: float
    """Global gradient norm before clipping; infinite or NaN if not applied."""
    notes: tuple[float, ...]
    """What the ranks noted, added up."""


Measures = Literal["nothing", "losses", "norms", "products"]


class LossBalancer(Protocol):
    """Decides in one step how much each loss counts, beside the objective's own factor.

    A micro-batch has targets of one loss alone then. `names` are the losses that the step has.
    """

    @property
    def measures(self) -> Measures:
        """What it has to know of the step; all but nothing is for ZeRO stage 0."""

    def is_shared(self, parameter: str) -> bool:
        """Return whether a parameter is one that norms and products are measured of."""

    def before(self, names: Sequence[str]) -> Sequence[float]:
        """Weigh the losses before the passes; what `each` or `combine` return comes on top."""

    def passed(self, name: str) -> None:
        """Take note of a backward pass of a loss."""

    def each(self, name: str, loss: Tensor, norm: Tensor) -> Tensor:
        """Weigh one gradient: a 0-dimensional tensor of its loss and its norm, over all ranks.

        Of losses alone, `norm` is 1. Without a host synchronisation.
        """

    def common(self) -> Tensor | float:
        """Return the factor of the sum of what `each` weighed."""

    def combine(self, names: Sequence[str], products: npt.NDArray[np.float64]) -> Sequence[float]:
        """Return coefficients of the gradients, from all their products."""

    def done(self, names: Sequence[str], losses: Sequence[float]) -> None:
        """Learn from a step that was applied."""

    @property
    def values(self) -> Mapping[str, float]:
        """Numbers of the step for its log line."""


def init_process_group(
    process: ProcessInfo, timeout_s: float = TrainConfig.collective_timeout_s
) -> torch.device:
    """Join the process group and returns this rank's device: its GPU, or the CPU over gloo.

    A collective that other ranks do not join fails after `timeout_s` in every group, those that
    DeepSpeed makes included. gloo raises RuntimeError in the rank that waits.

    Args:
        process: this rank.
        timeout_s: also of the wait for all ranks to start.
    """
    watchdog.heartbeat("importing DeepSpeed")
    deepspeed = _import_deepspeed()
    watchdog.heartbeat("waiting for all ranks to start")
    _give_groups_a_timeout(timedelta(seconds=timeout_s))
    device = dist.own_device(process)
    # Under NCCL the host seldom waits in the collective itself: torch's own watchdog thread aborts
    # the process (SIGABRT) once the kernel is that old, because TORCH_NCCL_ASYNC_ERROR_HANDLING is
    # on, and writes its flight recorder (c10d/ProcessGroupNCCL.hpp).
    deepspeed.init_distributed(
        dist_backend=dist.backend_of(device),
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
        verbose=False,
    )
    dist.open_objects(timeout_s)
    return device


def close_process_group(*, together: bool = True) -> None:
    """Leave the group of `init_process_group`, as `dist.close_group` that of `open_group`."""
    # Not where the run failed: no other rank may be there to wait for.
    if together:
        dist.barrier()
    # torch's own way leaves DeepSpeed its old groups, on which the next run of the process fails.
    _import_deepspeed().comm.destroy_process_group()


def _give_groups_a_timeout(timeout: timedelta) -> None:
    """Make it the default of new groups: DeepSpeed gives its own none, which means 30 minutes."""
    # The next run of this process gets its own timeout, not this one's wrapped again.
    original = getattr(torch.distributed.new_group, "__wrapped__", torch.distributed.new_group)

    @wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2:  # the timeout is the second
            kwargs = {"timeout": timeout, **kwargs}
        return original(*args, **kwargs)

    torch.distributed.new_group = new_group


class Engine:
    """A model under ZeRO with fp32 master weights, fp32 accumulation and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        process: ProcessInfo,
        device: torch.device,
        lr_scale: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        """Wrap a model; every rank must pass the same weights (rank 0's are sent to all).

        `lr_scale` gives the learning rate of a parameter, by its name, as a share of the run's.
        """
        self.device = device
        self.world_size = process.world_size
        self.own_time = LocalComputeTimer(device)
        """Time of this rank's passes, up to the first collective."""
        self._rank = process.rank
        # Stage 3 empties the parameters.
        self._shapes = {
            name: tuple(parameter.shape) for name, parameter in model.named_parameters()
        }
        self._optimizer = make_optimizer(model, config, lr_scale)
        # Both engines round the model before they copy it into the master weights.
        unrounded = _unrounded(model, device) if config.precision == "bf16" else {}
        self._engine: Any
        if config.zero_stage == 0:
            self._engine = Replicated(model, self._optimizer, config, self.world_size, device)
        else:
            self._engine = _deepspeed_engine(model, self._optimizer, config)
        if unrounded:
            for each in self._slices():
                values = unrounded[each.name].flatten()
                each.of(each.partition.detach()).copy_(values[each.start : each.start + each.numel])
        matrices, pieces = matrix_slices(model, self._shapes, self._slices())
        self._optimizer.bind(matrices, pieces, is_divided=config.zero_stage > 0)

    @property
    def model(self) -> nn.Module:
        """The model whose forward pass training and evaluation use."""
        return self._engine  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates this rank's partitions; for its hooks around a step."""
        return self._optimizer

    def go_on_with(self, config: TrainConfig) -> None:
        """Take over the weight decay and the clipping of another stage of the run."""
        for group in self._optimizer.param_groups:
            if group["decays"]:
                group["weight_decay"] = config.weight_decay
        if self._engine.zero_optimization_stage() == 0:
            self._engine.grad_clip = config.grad_clip
        else:
            # What its update reads; its config alone says it to nobody after the start.
            self._engine.optimizer.clip_grad = config.grad_clip
            self._engine._config.gradient_clipping = config.grad_clip

    def partitions(self) -> list[tuple[Tensor, dict[str, tuple[int, int]]]]:
        """Return this rank's flat fp32 master weights, each with (start, stop) of its parameters.

        They are parameters of `optimizer`; empty at stage 3. No element is another rank's, too.
        """
        if self._engine.zero_optimization_stage() == 3:
            return []
        found: dict[Tensor, dict[str, tuple[int, int]]] = {}
        for each in self._own_slices():
            places = found.setdefault(each.partition, {})
            places[each.name] = each.offset, each.offset + each.numel
        return list(found.items())

    def train_step(
        self,
        batches: list[MicroBatch],
        objective: Objective,
        lr: float,
        notes: Sequence[float] = (),
        weighing: LossBalancer | None = None,
    ) -> StepResult:
        """Forward, backward and one update over this rank's micro-batches of one step. Collective.

        Each of the objective's losses is a sum over the global batch divided by its weight there:
        the split into ranks and micro-batches does not change it. How many micro-batches there are,
        and their sizes and lengths, may differ from step to step.

        Args:
            batches: at least one.
            objective: called on each of them, on the device.
            lr: learning rate of this update.
            notes: numbers that are added over the ranks on the way, as many on every rank.
            weighing: of this step; None: each loss counts as the objective's factor says.
        """
        assert batches, "a step needs at least one micro-batch on every rank"
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self._engine.train()
        names = list(objective.losses)
        watchdog.heartbeat("first collective of the step")
        scales, summed = self._scales(batches, objective, notes)
        noted = _Fetched(summed[len(names) :])
        watchdog.heartbeat("forward and backward")
        stage = self._engine.zero_optimization_stage()
        if stage == 3 and weighing is not None:
            # It overwrites what has a gradient; a task that is not drawn keeps its last one.
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        if stage < 3:  # which gathers weights in the forward pass
            self.own_time.begin()
        if weighing is None:
            sums = self._passes(batches, objective, scales)
            self.own_time.end()
        else:
            found = self._weighted_passes(batches, objective, scales, weighing)
            sums = add_up(list(found.values()))
            totals = torch.stack([found[name][name].total for name in found])
            of_losses = _Fetched(
                torch.cat([dist.sum_over_ranks(totals), summed[: len(names)].to(totals.dtype)])
            )
        watchdog.heartbeat("gradient collectives and update")
        mark(UPDATE)
        self._engine.step()
        # DeepSpeed has compared the norm with infinity on the host by now: no further sync.
        norm = self._engine.get_global_grad_norm()
        applied = bool(self._engine.was_step_applied())
        if weighing is not None and applied:
            values = of_losses.values()
            divisors = dict(zip(names, values[len(found) :], strict=True))
            losses = [
                objective.losses[name] * total / divisors[name] if divisors[name] else float("nan")
                for name, total in zip(found, values, strict=False)
            ]
            weighing.done(list(found), losses)
        return StepResult(sums, applied, float(norm), noted.values())

    def _scales(
        self, batches: list[MicroBatch], objective: Objective, notes: Sequence[float] = ()
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return factors of the losses' sums, and the weights and notes, added over the ranks."""
        weights = [
            sum(batch.weights.get(name, 0.0) for batch in batches) for name in objective.losses
        ]
        summed = dist.sum_over_ranks(_uploaded([*weights, *notes], self.device))
        # DeepSpeed averages over ranks; the world size undoes it.
        scales = {
            # Without a target on any rank the total is 0, and 0 / 0 would be a step without a
            # finite gradient. Weights of classes may well add up to less than 1.
            name: factor * self.world_size / torch.where(weight > 0, weight, 1.0)
            # Not strict: behind the weights stand the notes.
            for (name, factor), weight in zip(objective.losses.items(), summed, strict=False)
        }
        return scales, summed

    def unsound_gradients(self, batches: list[MicroBatch], objective: Objective) -> list[str]:
        """Compute a step's passes again; name the parameters whose gradient is not finite here.

        Those nearest to the loss come first, where it began. Nothing is kept. Collective.
        """
        # Only of a step that failed: a look at all gradients of each step would cost a pass.
        module, scales = self._engine.module, self._scales(batches, objective)[0]
        named = dict(module.named_parameters())
        finite = torch.ones(len(named), dtype=torch.bool, device=self.device)
        for batch in batches:
            watchdog.heartbeat("computing gradients again")
            sums = objective(module, batch.to(self.device))
            loss = torch.stack([sums[name].total * scale for name, scale in scales.items()]).sum()
            # Without hooks of the engine, which would add them to the next step's.
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    finite[number] &= gradient.isfinite().all()
        return [name for name, ok in zip(named, finite.tolist(), strict=True) if not ok][::-1]

    def _passes(
        self,
        batches: list[MicroBatch],
        objective: Objective,
        scales: Mapping[str, Tensor],
        passed: Callable[[], None] = lambda: None,
    ) -> Sums:
        """Run forward and backward passes of losses times their scales; return their sums."""
        parts = []
        for batch in batches:
            sums = objective(self._engine, batch.to(self.device))
            if self._engine.zero_optimization_stage() == 2:
                # It adds gradients over the ranks in the backward pass.
                self.own_time.end()
            terms = [sums[name].total * scale for name, scale in scales.items()]
            loss = torch.stack(terms).sum() if len(terms) > 1 else terms[0]
            # An infinite loss may have finite gradients: made NaN, they skip the step.
            self._engine.backward(loss * (1 + 0 * loss.detach()))
            passed()
            parts.append(detached(sums))
        return add_up(parts)

    def _weighted_passes(
        self,
        batches: list[MicroBatch],
        objective: Objective,
        scales: Mapping[str, Tensor],
        weighing: LossBalancer,
    ) -> dict[str, Sums]:
        """Run the passes of one loss after another; return the sums of each."""
        by_loss: dict[str, list[MicroBatch]] = {}
        for batch in batches:
            [name] = batch.weights
            by_loss.setdefault(name, []).append(batch)
        names, found = list(by_loss), {}
        measures = weighing.measures
        gradients = None
        if measures != "nothing":
            gradients = self._engine.task_gradients(weighing.is_shared)
        for name, weight in zip(names, weighing.before(names), strict=True):
            scale = {name: scales[name] * weight}
            note = partial(weighing.passed, name)
            found[name] = self._passes(by_loss[name], objective, scale, note)
            if gradients is None:
                continue
            if measures != "losses":
                self.own_time.end()
                gradients.average()
            if measures == "products":
                gradients.keep()
                continue
            loss, norm = found[name][name].total, torch.ones((), device=self.device)
            if measures == "losses":
                loss = dist.sum_over_ranks(loss.clone()) * scales[name] / self.world_size
            else:
                norm = gradients.norm()
            gradients.add(weighing.each(name, loss, norm))
        self.own_time.end()
        if gradients is not None and measures == "products":
            gram = gradients.products().cpu().numpy()
            gradients.combine(weighing.combine(names, gram), 1 / len(names))
        if gradients is not None:
            gradients.finish(weighing.common())
        return found

    def state_parts(self) -> tuple[list[TensorShard], dict[str, int]]:
        """Return views of this rank's master weights and optimizer state, and counters.

        Collective.
        """
        of = self._optimizer.state_of
        updates = [int(of(slice_.partition)["step"]) for slice_ in self._slices()]
        assert len(set(updates)) <= 1, "parameters have seen different numbers of updates"
        counters = {
            # A rank may hold no parameter at all if there are more ranks than elements.
            "updates": max(dist.gather(max(updates, default=0))),
            "global_steps": self._engine.global_steps,
            "skipped_steps": self._engine.skipped_steps,
        }
        parts = [
            TensorShard(each.name, each.shape, each.start, self._tensors(each))
            for each in self._own_slices()
        ]
        return parts, counters

    def replicas(self) -> list[tuple[str, Tensor]]:
        """List by name what every rank holds a whole copy of, as views; nothing at stage 3."""
        stage = self._engine.zero_optimization_stage()
        if stage == 3:
            return []
        found = [(name, each.detach()) for name, each in self._engine.module.named_parameters()]
        if stage == 0:
            found += [
                (f"{kind}/{each.name}", tensor)
                for each in self._slices()
                for kind, tensor in self._tensors(each).items()
            ]
        return found

    def load_files(self, folder: Path) -> None:
        """Read `state_parts` as any number of ranks wrote them, at any ZeRO stage. Collective.

        Raises:
            CheckpointError: files are missing, damaged, or of another model.
        """
        saved = SavedState(folder)
        saved.require_shapes(self._shapes)
        for each in self._slices():
            self._optimizer.state_of(each.partition)["step"].fill_(saved.counters["updates"])
            for kind, tensor in self._tensors(each).items():
                tensor.copy_(saved.read(kind, each.name, each.start, each.start + each.numel))
        self._engine.global_steps = saved.counters["global_steps"]
        self._engine.skipped_steps = saved.counters["skipped_steps"]
        self._spread_masters()

    def _slices(self) -> list[TensorSlice]:
        if self._engine.zero_optimization_stage() == 0:
            return self._engine.slices(self._shapes)  # type: ignore[no-any-return]
        return tensor_slices(self._engine, self._shapes)

    def _own_slices(self) -> list[TensorSlice]:
        """Return the slices that this rank answers for: each element belongs to one rank."""
        if self._engine.zero_optimization_stage() == 0:
            return share_of_rank(self._slices(), self._rank, self.world_size)
        return self._slices()

    def _tensors(self, each: TensorSlice) -> dict[str, Tensor]:
        """Return the master weights of a slice and the optimizer's averages of it, as views."""
        state = self._optimizer.state_of(each.partition)
        whole = {MASTER: each.partition.detach()}
        whole |= {kind: state[kind] for kind in MOMENTS if kind in state}
        return {kind: each.of(flat) for kind, flat in whole.items()}

    def _spread_masters(self) -> None:
        """Give all ranks the weights of forward passes anew: the master weights, rounded."""
        stage, optimizer = self._engine.zero_optimization_stage(), self._engine.optimizer
        if stage == 0:
            self._engine.round_masters()
            return
        if stage < 3:
            optimizer.update_lp_params()
            return
        # Small parameters are whole on every rank after an update; they need not be.
        # Without the epilogue of DeepSpeed's own loading, which breaks the prefetch of a fresh
        # engine.
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp16_groups)):
            # Private: the end of its update, which rounds masters into the weights of a group.
            optimizer._reassign_or_swap_out_partitioned_parameters(group)


def tensor_slices(engine: Any, shapes: dict[str, tuple[int, ...]]) -> list[TensorSlice]:
    """Find which stretches of which parameters this rank's part of the optimizer holds, and where.

    A partition of DeepSpeed's is a flat fp32 tensor that holds several parameters' stretches one
    after another, and padding. No rank has two stretches of a parameter.

    Args:
        engine: what `deepspeed.initialize` returned, at ZeRO stage 1, 2 or 3.
        shapes: of the whole parameters, by name.
    """
    optimizer = engine.optimizer
    found = []
    for name, parameter in engine.module.named_parameters():
        # Private: DeepSpeed has no other way to say where a parameter lies in a partition.
        if engine.zero_optimization_stage() == 3:
            group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = padded * torch.distributed.get_rank()
            numel = min(padded, parameter.ds_numel - start)
            partition = optimizer.fp32_partitioned_groups_flat[group]
        elif (mapping := parameter._hp_mapping) is not None:
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            offset = mapping.hp_fragment_address.start
            [partition] = optimizer.param_groups[mapping.param_group_index]["params"]
        else:
            continue
        if numel > 0:
            found.append(TensorSlice(name, shapes[name], start, numel, partition, offset))
    return found


def _unrounded(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return rank 0's fp32 weights by name, on the host. Collective."""
    return {
        name: dist.tensor_from_first(parameter.detach().to(device, copy=True)).cpu()
        for name, parameter in model.named_parameters()
    }


def _deepspeed_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> Any:
    deepspeed = _import_deepspeed()
    # Ours are told what each partition holds; DeepSpeed warns of those that it does not know.
    if type(optimizer) not in deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS:
        deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))
    # stdout is for the step lines, and DeepSpeed prints what it has built.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config(config),
            dist_init_required=False,
        )
    logging.getLogger("DeepSpeed").info("initialize printed: %s", printed.getvalue())
    if config.zero_stage == 1 and config.precision == "bf16":
        _sum_norms_in_blocks(engine.optimizer)
    return engine


def _sum_norms_in_blocks(optimizer: Any) -> None:
    """Replace the norms of whole gradients in fp32 of DeepSpeed 0.19.8's BF16_Optimizer.

    Its other optimizers, of the other stages and of fp32, take them in float64.
    """
    original = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return original(for_clipping=True)
        gradients, of_experts = original()
        # The norm of the norms is the norm of all.
        return [squared_norm(each.flatten()).sqrt() for each in gradients], of_experts

    optimizer.get_grads_for_norm = get_grads_for_norm


def _uploaded(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers to the device, and do not wait for it."""
    # `torch.tensor(numbers, device=...)` copies from pageable memory: the host would wait until the
    # device has done all that is queued, and then queue the step on an idle one.
    host = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class _Fetched:
    """A few numbers on their way from the device; asked for after a later sync, they are there."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._host = tensor

    def values(self) -> tuple[float, ...]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return tuple(self._host.tolist())


def _import_deepspeed() -> Any:
    """Import DeepSpeed, quiet and without compiling its shared-memory collectives for 30 s."""
    if not torch.cuda.is_available():
        env.set_default("DS_ACCELERATOR", "cpu")
    # DeepSpeed 0.19.8 uses names that torch 2.13 wants replaced; nothing for our users to do.
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", module="torch")
    # Its autotuner, which nobody uses here, imports mlflow where that is installed, for 1.5 s.
    is_hidden = sys.modules.setdefault("mlflow", None) is None  # type: ignore[arg-type]
    import deepspeed
    import deepspeed.ops

    if is_hidden:
        del sys.modules["mlflow"]
    compatible = deepspeed.ops.__compatible_ops__
    if "deepspeed_shm_comm" in compatible:
        # It compiles for a minute at the first start; a kill in that minute leaves a lock that
        # later starts wait for.
        compatible["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed
