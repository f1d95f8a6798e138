"""The plan of a run: its time, memory, jobs and disk, before it starts. Pure; needs no SLURM.

Time and state come from the closed forms of `pipeline.model.cost`, bytes of
activations from a layer that runs in another process (`cost.activation_bytes`, some 5 s); speeds of
the cluster come from `hardware` of its profile, and the text names each assumption.

A multi-task run is planned without its data, so every row counts as long as its task allows, and an
example as one row, also where it has more (choices, candidates, windows). `postnorm benchmark` and
`finetune` read the data and count tokens (`pipeline.finetune.cost`).

A rank of n sends, and receives, in each step

    2 (n - 1) / n * bytes   of what is all-reduced (a reduce-scatter, then an all-gather),
      (n - 1) / n * bytes   of what is only reduce-scattered or only all-gathered,

over the slowest of the links that the job uses: inside a node, or between nodes. The time of an
exchange is these bytes over the link's bus bandwidth, the unit of nccl-tests (NVIDIA/nccl-tests,
doc/PERFORMANCE.md) and of what preflight measures. Latency is not counted, and no pass hides it.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launch.cluster import ClusterConfig
from pipeline.checkpoints.manifest import split_step
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig, RunConfig, TaskRunConfig, load_run
from pipeline.data.format import INDEX_FILE
from pipeline.data.objects import find_index
from pipeline.errors import ConfigError
from pipeline.kernels.choose import REFERENCE, Choice, expected_on_gpu
from pipeline.model import cost
from pipeline.model.architecture import is_model_folder, read_architecture
from pipeline.multitask.config import MLM, TaskMix, require_split
from pipeline.multitask.draws import shares
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import counted, table

NODE_MTBF_HOURS = 6000.0
"""Mean time between failures of a node of 8 GPUs: what Llama 3's 16,384 GPUs had, 419 interruptions
in 54 days (arXiv 2407.21783, section 3.3.4)."""
# Bytes of a parameter: fp32 master weights and two fp32 averages.
_CHECKPOINT_BYTES = 12
# Usable share of a GPU's memory; CUDA, NCCL's buffers and fragmentation take the rest.
_MEMORY_SHARE = 0.9
_FREE_SHARE = 1.05
# ZeRO stages without a closed form here: they take less than stage 1.
_DIVIDE_MORE = (2, 3)
_GRADIENT_BYTES = 4
BUS_EFFICIENCY = 0.8
"""Share of a data sheet's bandwidth that an all-reduce reaches: 8 A100 have 230 of 300 GB/s."""
# Stage 3 keeps weights whose next use is nearer than this (stage3_max_reuse_distance).
_KEPT_ELEMENTS = 1e9
_STAGE_1 = "; the state is that of ZeRO stage 1, yours takes less"


@dataclass(frozen=True)
class RunPlan:
    """The resources of a run. Sizes in bytes, times in seconds; None: not known."""

    parameters: int
    ranks: int
    steps: int
    slots: float
    flops: float
    step_s: float | None
    """Mean over the run, without evaluations and saves; with the exchange of ranks, if its speed is
    known."""
    exchange_s: float | None
    """Part of `step_s` in which ranks exchange gradients and weights; None: not known."""
    sent_bytes: float
    """Bytes that each rank sends in a step, and receives; the mean over the run."""
    bus: str
    """Bus bandwidth that `exchange_s` is computed with, and its origin, in words."""
    train_s: float | None
    jobs: int | None
    """Jobs of the time limit, one after the other."""
    sequences_per_rank: int
    """Sequences of a batch for each rank, in the last stretch of batches."""
    micro_batch: int
    accumulation: int
    largest_micro_batch: int | None
    """The largest that fits, of those that divide a rank's share."""
    state_bytes: int
    activation_bytes: int | None
    """Bytes of the micro-batch's activations; None: not counted."""
    fused: tuple[str, ...]
    """Parts whose activations are taken as those of fused kernels."""
    gpu_bytes: float | None
    checkpoint_bytes: int
    save_s: float
    every_s: float | None
    """Time between checkpoints, as configured."""
    best_every_s: float
    best_every_steps: int | None
    lost_share: float | None
    """Share of the time that saves and work undone by failures take, as configured."""
    checkpoints_bytes: int
    """Size of all that are kept, and of the one being written."""
    shards_bytes: int | None
    free_bytes: int | None
    """Free space on the file system of run_dir."""
    problems: tuple[str, ...]
    """Why the run cannot start as configured; each says what to change."""


def plan(
    config: PretrainConfig, cluster: ClusterConfig, *, counts_activations: bool = True
) -> RunPlan:
    """Compute the plan of a run, which needs `model.vocab_size` or a prepared dataset.

    `counts_activations` is what takes seconds; without, no micro-batch is said to fit or not to.
    """
    ranks, hardware = cluster.num_ranks, cluster.hardware
    config.batches.require_split(ranks)
    index = find_index(config.data.dir)
    vocab_size = config.model.vocab_size or (index.vocab_size if index else None)
    if vocab_size is None:
        raise ConfigError(
            f"model.vocab_size is null and data.dir={config.data.dir} has no {INDEX_FILE} to take "
            "it from; prepare the data first, or add model.vocab_size=N to the command"
        )
    model = replace(config.model, vocab_size=vocab_size)
    steps = config.train.num_steps
    flops_per_s = hardware.flops_per_rank * hardware.utilisation
    parameters = cost.parameters(model, config.objective)["total"]
    slots, flops, sent = _work(config, model, parameters, ranks)
    bus = bus_of(cluster)
    exchange_s = sent / bus.bytes_per_s if bus else None
    train_s = flops / (flops_per_s * ranks) + (exchange_s or 0.0) if flops_per_s else None
    step_s = train_s / steps if train_s is not None else None
    usable_s = cluster.time_limit_s - cluster.stop_before_end_s - hardware.start_s
    last = config.batches.stretches[-1]
    share = last.size // ranks
    # Stage 0 divides nothing.
    divided_by = ranks if config.train.zero_stage else 1
    state = cost.state_bytes(model, divided_by, config.objective)["total"]
    checkpoint = _CHECKPOINT_BYTES * parameters
    save_s = checkpoint / (hardware.write_gb_per_s * 1e9)
    failure_s = NODE_MTBF_HOURS * 3600 / cluster.nodes
    best_s = best_interval_s(save_s, failure_s)
    every_s = config.checkpoint.every_steps * step_s if step_s is not None else None
    gpu_bytes = hardware.memory_bytes
    fused = _fused(config, cluster)
    activations, largest = None, None
    if counts_activations:
        room = None if gpu_bytes is None else _MEMORY_SHARE * gpu_bytes - state
        activations, largest = _activations(config, model, fused, share, room)
    result = RunPlan(
        parameters=parameters,
        ranks=ranks,
        steps=steps,
        slots=slots,
        flops=flops,
        step_s=step_s,
        exchange_s=exchange_s / steps if exchange_s is not None else None,
        sent_bytes=sent / steps,
        bus=bus.origin if bus else "",
        train_s=train_s,
        jobs=math.ceil(train_s / usable_s) if train_s is not None and usable_s > 0 else None,
        sequences_per_rank=share,
        micro_batch=last.micro_batch,
        accumulation=share // last.micro_batch,
        largest_micro_batch=largest,
        state_bytes=state,
        activation_bytes=activations,
        fused=cost.fused_parts(config.model, fused),
        gpu_bytes=gpu_bytes,
        checkpoint_bytes=checkpoint,
        save_s=save_s,
        every_s=every_s,
        best_every_s=best_s,
        best_every_steps=max(1, round(best_s / step_s)) if step_s else None,
        lost_share=save_s / every_s + every_s / (2 * failure_s) if every_s else None,
        checkpoints_bytes=checkpoint * (config.checkpoint.keep + 1),
        shards_bytes=sum(shard.num_bytes for shard in index.shards) if index else None,
        free_bytes=_free_bytes(config.folder.path),
        problems=(),
    )
    return replace(result, problems=tuple(_problems(result, config, cluster, usable_s)))


def best_interval_s(save_s: float, failure_s: float) -> float:
    """Compute the time between checkpoints that loses least to saves and to repeated work.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", equation 37, https://doi.org/10.1016/j.future.2004.11.016; Young 1974 has its first
    term. `failure_s` is the mean time between failures of the whole job.
    """
    if save_s >= 2 * failure_s:
        return failure_s
    ratio = math.sqrt(save_s / (2 * failure_s))
    return math.sqrt(2 * save_s * failure_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s


def plan_text(result: RunPlan, config: PretrainConfig, cluster: ClusterConfig) -> Iterator[str]:
    """Yield the plan as lines for people."""
    hardware = cluster.hardware
    yield (
        f"run          {config.run_dir}: {result.parameters / 1e6:,.1f} M parameters, "
        f"{counted(result.ranks, 'rank')} on {counted(cluster.nodes, 'node')}"
    )
    yield f"work         {result.flops:.3g} FLOP: {result.slots:,.0f} slots in " + (
        f"{result.steps:,} steps"
    )
    if result.train_s is None or result.step_s is None:
        yield "time         not known: name hardware.gpu or hardware.tflops in the profile"
    else:
        yield (
            f"time         {_time(result.train_s)}, {1 / result.step_s:,.2f} steps/s, at "
            f"{hardware.utilisation:.0%} of {hardware.flops_per_rank / 1e12:,.0f} TFLOP/s a rank "
            "(hardware.utilisation is assumed)"
        )
        if result.ranks > 1:
            yield _exchange_line(result, result.step_s)
        how = "one requeued after the other" if cluster.requeue else "a chain, without requeueing"
        yield f"jobs         {result.jobs} of {cluster.time_limit}, {how}"
    largest = result.largest_micro_batch
    yield (
        f"batches      {result.sequences_per_rank} sequences a rank: {result.accumulation} x "
        f"{result.micro_batch} in a forward pass"
        + (f"; {largest} would fit" if largest and largest != result.micro_batch else "")
    )
    yield _memory_line(result) + (
        (f", with fused kernels for {' and '.join(result.fused)}" if result.fused else "")
        + (_STAGE_1 if config.train.zero_stage in _DIVIDE_MORE else "")
    )
    every = f" ({_time(result.every_s)})" if result.every_s is not None else ""
    yield (
        f"checkpoints  {result.checkpoint_bytes / 1e9:,.2f} GB, {result.save_s:,.1f} s each at "
        f"{hardware.write_gb_per_s:g} GB/s; every {config.checkpoint.every_steps:,} steps{every}"
    )
    best = f", {result.best_every_steps:,} steps" if result.best_every_steps else ""
    lost = f"; as configured {result.lost_share:.2%} are lost" if result.lost_share else ""
    yield (
        f"             Young and Daly: every {_time(result.best_every_s)}{best}, if a node fails "
        f"every {NODE_MTBF_HOURS:,.0f} h{lost}"
    )
    shards = (
        f", shards {result.shards_bytes / 1e9:,.1f} GB" if result.shards_bytes is not None else ""
    )
    free = f"; {result.free_bytes / 1e9:,.1f} GB are free" if result.free_bytes is not None else ""
    yield f"disk         checkpoints {result.checkpoints_bytes / 1e9:,.1f} GB{shards}{free}"
    for problem in result.problems:
        yield f"problem      {problem}"


def _memory_line(result: RunPlan) -> str:
    of = f" of {result.gpu_bytes / 2**30:,.0f}" if result.gpu_bytes else ""
    needed = (result.state_bytes + (result.activation_bytes or 0)) / 2**30
    return (
        f"memory       {needed:,.1f}{of} GiB a rank: state {result.state_bytes / 2**30:,.1f}, "
        + _activations_text(result.activation_bytes)
    )


def _activations_text(num_bytes: int | None) -> str:
    return _NO_ACTIVATIONS if num_bytes is None else f"activations {num_bytes / 2**30:,.1f}"


def _exchange_line(result: RunPlan, step_s: float) -> str:
    if result.exchange_s is None:
        return _NO_EXCHANGE
    return (
        f"exchange     {result.exchange_s * 1e3:,.1f} of {step_s * 1e3:,.1f} ms a step "
        f"({result.exchange_s / step_s:.1%}), if no pass hides it: {result.sent_bytes / 1e9:,.2f} "
        f"GB out of each rank at {result.bus}"
    )


def plan_json(result: "RunPlan | MixPlan") -> str:
    """Return the plan as JSON for programs."""
    return json.dumps(asdict(result))


@dataclass(frozen=True)
class TaskPlan:
    """What a run is expected to do for one of its tasks."""

    name: str
    share: float
    """Share of the draws."""
    examples: float
    """Number of examples of all draws; sequences for text."""
    length: int
    """Length of the longest row, in tokens."""
    flops: float
    """If every example is one row of that length."""


@dataclass(frozen=True)
class MixPlan:
    """The resources of a multi-task run. Sizes in bytes, times in seconds; None: not known."""

    parameters: int
    """Without the heads of tasks, which are small."""
    ranks: int
    steps: int
    tasks: tuple[TaskPlan, ...]
    flops: float
    train_s: float | None
    """Upper bound of the training time; includes communication if its speed is known."""
    exchange_s: float | None
    """Part of a step in which ranks exchange gradients and weights; None: not known."""
    state_bytes: int
    gradients_bytes: int
    """What the rule of balance keeps beside the state: gradients of tasks, fp32."""
    activation_bytes: int | None
    """Bytes of the activations of the largest forward pass; None: not counted."""
    checkpoint_bytes: int


_NO_EXCHANGE = (
    "exchange     not known, and not in the time: name hardware.gpu, or "
    "hardware.intra_node_gb_per_s and hardware.inter_node_gb_per_s in the profile"
)
_NO_ACTIVATIONS = "activations not known without torch: pip install 'postnorm[train]'"
_KEEP_ALL = ("pcgrad", "cagrad", "mgda", "main_and_helpers")
"""Rules that keep the gradient of each task of a step."""


def plan_mix(mix: TaskMix, cluster: ClusterConfig) -> MixPlan:
    """Compute the plan of a multi-task run, which needs the model of `init_from`, and no data.

    Raises:
        ConfigError: there is no such model, or draws do not split, or depend on the data.
    """
    config, ranks, hardware = mix.config, cluster.num_ranks, cluster.hardware
    require_split(mix, ranks)
    model = _architecture(config.init_from)
    data = config.data or DataConfig(dir=config.run_dir)
    # In the trainer's terms; each task has a length of its own, so here is any that fits.
    run = TaskRunConfig(
        run_dir=config.run_dir,
        model=model,
        data=replace(data, seq_len=8),
        train=config.train.single,
        kernels=config.kernels,
    )
    fused = _fused(run, cluster)
    tasks, passes = [], []
    for name, share in _shares(mix).items():
        member, length = mix.members[name], data.seq_len
        if name != MLM:
            length = mix.tasks[name].input.max_length
        examples = share * config.train.num_steps * config.train.tasks_per_step
        examples *= mix.batch_of(name)
        masked = data.mask_prob if name == MLM else 0.0
        each = cost.flops_per_token(model, length, masked)
        tasks.append(TaskPlan(name, share, examples, length, examples * length * each.total))
        rows = mix.batch_of(name) // (ranks * member.parts)
        # With an MLM head for tasks, too: theirs are not known here, and smaller.
        of_one = _one_row(run, model, length, fused)
        passes.append(replace(of_one, rows=rows, masked_share=data.mask_prob))
    counted = cost.activation_bytes(passes)
    flops = sum(task.flops for task in tasks)
    speed = hardware.flops_per_rank
    parameters = cost.parameters(model)["total"]
    train_s = exchange_s = None
    if speed:
        train_s = flops / (speed * hardware.utilisation * ranks)
        exchange_s = _exchange_of_mix(mix, cluster, run, parameters)
        train_s += (exchange_s or 0.0) * config.train.num_steps
    kept = 0
    if config.balance.needs_gradients:
        of_step = min(len(tasks), config.train.tasks_per_step)
        kept = 1 + (of_step if config.balance.method in _KEEP_ALL else 0)
    return MixPlan(
        parameters=parameters,
        ranks=ranks,
        steps=config.train.num_steps,
        tasks=tuple(tasks),
        flops=flops,
        train_s=train_s,
        exchange_s=exchange_s,
        state_bytes=cost.state_bytes(model, ranks if config.train.zero_stage else 1)["total"],
        gradients_bytes=kept * 4 * parameters,
        activation_bytes=None if counted is None else max(kept["total"] for kept in counted),
        checkpoint_bytes=_CHECKPOINT_BYTES * parameters,
    )


def _exchange_of_mix(
    mix: TaskMix, cluster: ClusterConfig, run: RunConfig, parameters: int
) -> float | None:
    """Compute the seconds of a step's exchange; None: the speed of a link is not known.

    Args:
        mix: its rule of balance may average the gradient of each task by itself.
        cluster: with the speeds of its links.
        run: the mix in the trainer's terms.
        parameters: of the model.
    """
    bus = bus_of(cluster)
    if bus is None:
        return None
    balance, draws, of = mix.config.balance, mix.config.train.tasks_per_step, _shares(mix)
    times = 1.0
    if balance.averages_each:
        distinct = sum(1 - (1 - share) ** draws for share in of.values())
        times += (distinct - 1) / (balance.every if balance.norms == "late" else 1)
    passes = draws * sum(share * mix.members[name].parts for name, share in of.items())
    return times * sent_bytes(run, parameters, passes, cluster.num_ranks) / bus.bytes_per_s


def _architecture(init_from: str) -> ModelConfig:
    """Read the architecture of a model or of a run that was started."""
    folder, _ = split_step(init_from.removeprefix("random:"))
    if is_model_folder(folder):
        return read_architecture(folder)[0]
    resolved = RunFolder(folder).resolved
    if resolved.is_file():
        return load_run(resolved).config.model
    raise ConfigError(
        f"init_from={init_from} is neither a model folder nor a run that was started, so the "
        "architecture is not known without its tensors; convert it first (`postnorm convert`), or "
        "name one that has it: init_from=FOLDER"
    )


def _shares(mix: TaskMix) -> dict[str, float]:
    sampling = mix.config.sampling
    if sampling.by == "size":
        raise ConfigError(
            "sampling.by=size draws tasks by their numbers of examples, which a plan does not "
            "read; plan with sampling.by=shares and shares of about these sizes"
        )
    given = [1.0 if each.share is None else each.share for each in mix.members.values()]
    found = shares(given, sampling.cap, sampling.temperature).tolist()
    return dict(zip(mix.members, found, strict=True))


def mix_text(result: MixPlan, mix: TaskMix, cluster: ClusterConfig) -> Iterator[str]:
    """Yield the plan of a multi-task run as lines for people."""
    hardware = cluster.hardware
    yield (
        f"run          {mix.config.run_dir}: {result.parameters / 1e6:,.1f} M parameters and the "
        f"heads of {counted(len(mix.tasks), 'task')}, {counted(result.ranks, 'rank')} on "
        f"{counted(cluster.nodes, 'node')}"
    )
    head = ("task", "draws", "examples", "longest row", "FLOP at most")
    rows = [
        (each.name, f"{each.share:.2%}", f"{each.examples:,.0f}", f"{each.length}",
         f"{each.flops:.2e}")
        for each in result.tasks
    ]  # fmt: skip
    yield from table([head, *rows], right=(1, 2, 3, 4))
    yield (
        f"work         at most {result.flops:.3g} FLOP in {result.steps:,} steps: lengths are not "
        "known without the data, and every example counts as one row of the longest"
    )
    if result.train_s is None:
        yield "time         not known: name hardware.gpu or hardware.tflops in the profile"
    else:
        yield (
            f"time         at most {_time(result.train_s)}, at {hardware.utilisation:.0%} of "
            f"{hardware.flops_per_rank / 1e12:,.0f} TFLOP/s a rank (hardware.utilisation is "
            "assumed; short rows reach less)"
        )
        exchange = _NO_EXCHANGE
        if result.exchange_s is not None:
            step_s = result.train_s / result.steps
            exchange = (
                f"exchange     {result.exchange_s * 1e3:,.1f} of at most {step_s * 1e3:,.1f} ms a "
                f"step, with balance.method={mix.config.balance.method}"
            )
        yield exchange
    activations = result.activation_bytes
    sizes = result.state_bytes, result.gradients_bytes, activations or 0
    yield (
        f"memory       {sum(sizes) / 2**30:,.1f} GiB a rank: state {sizes[0] / 2**30:,.1f}, "
        f"gradients of tasks {sizes[1] / 2**30:,.1f}, "
        + _activations_text(activations)
        + (" at most" if activations is not None else "")
    )
    yield f"checkpoints  {result.checkpoint_bytes / 1e9:,.2f} GB each"


def _problems(
    result: RunPlan, config: PretrainConfig, cluster: ClusterConfig, usable_s: float
) -> Iterator[str]:
    if usable_s <= 0:
        yield (
            f"time_limit={cluster.time_limit} leaves nothing after "
            f"hardware.start_s={cluster.hardware.start_s:g} to start and "
            f"stop_before_end_s={cluster.stop_before_end_s} to save: raise time_limit"
        )
    if result.save_s > cluster.stop_before_end_s / 2:
        yield (
            f"a save takes {result.save_s:,.0f} s, more than half of stop_before_end_s="
            f"{cluster.stop_before_end_s}: raise it to {math.ceil(2 * result.save_s)}"
        )
    if result.jobs is not None and result.jobs > cluster.max_restarts + 1:
        yield (
            f"{result.jobs} jobs are more than max_restarts={cluster.max_restarts} allows: raise "
            "it, or time_limit, or nodes"
        )
    if (
        result.gpu_bytes is not None
        and result.activation_bytes is not None
        and config.train.zero_stage not in _DIVIDE_MORE
    ):
        room = _MEMORY_SHARE * result.gpu_bytes
        needed = result.state_bytes + result.activation_bytes
        if needed > room:
            remedy = (
                f"set train.micro_batch={result.largest_micro_batch}"
                if result.largest_micro_batch
                else "no micro-batch fits: set train.activation_checkpoint_layers=1, or take a "
                "smaller model"
            )
            yield (
                f"{needed / 2**30:,.1f} GiB a rank are more than {_MEMORY_SHARE:.0%} of the GPU's "
                f"{result.gpu_bytes / 2**30:,.0f}: {remedy}"
            )
    if result.free_bytes is not None and result.checkpoints_bytes * _FREE_SHARE > result.free_bytes:
        yield (
            f"{config.checkpoint.keep + 1} checkpoints take {result.checkpoints_bytes / 1e9:,.1f} "
            f"GB, {result.free_bytes / 1e9:,.1f} are free below {config.run_dir}: lower "
            "checkpoint.keep, or choose another run_dir"
        )
    budget = config.train.budget_hours
    if budget is not None and result.train_s is not None and result.train_s > budget * 3600:
        yield (
            f"train.budget_hours={budget:g} ends the run after "
            f"{budget * 3600 / result.train_s:.0%} of its {_time(result.train_s)}: raise it, lower "
            "train.num_steps, or use more nodes"
        )


def _work(
    config: PretrainConfig, model: ModelConfig, parameters: int, ranks: int
) -> tuple[float, float, float]:
    """Count the run's slots, its FLOPs, and the bytes that each rank sends.

    FLOPs are counted as if every token attended to its whole row.
    """
    places, num_steps = config.batches.stretches, config.train.num_steps
    ends = [*(place.number for place in places[1:]), num_steps]
    slots = flops = sent = 0.0
    for place, end in zip(places, ends, strict=True):
        steps = max(0, min(end, num_steps) - place.number)
        of_step = place.size * place.seq_len
        of_token = cost.flops_per_token(
            model, place.seq_len, config.data.mask_prob, objective=config.objective
        )
        passes = place.size // ranks // place.micro_batch
        slots += float(steps * of_step)
        flops += steps * (of_step * of_token.total)
        sent += steps * sent_bytes(config, parameters, passes, ranks)
    return slots, flops, sent


@dataclass(frozen=True)
class Bus:
    """The bus bandwidth of the slowest link that a job uses; infinite for a single rank."""

    bytes_per_s: float
    origin: str
    """Which link it is and where the number is from, in words."""


def bus_of(cluster: ClusterConfig) -> Bus | None:
    """Take measured bandwidths of a profile, else a share of the data sheet's; None: not known."""
    hardware, device = cluster.hardware, cost.limits(cluster.hardware.gpu)
    # It is between two nodes that preflight measures, or inside the only one.
    expected = cluster.preflight.bandwidth_gb_per_s or None
    links = []
    if cluster.num_ranks_per_node > 1:
        sheet = device.link if device else None
        in_node = expected if cluster.nodes == 1 else None
        links.append(("inside a node", hardware.intra_node_gb_per_s, in_node, sheet))
    if cluster.nodes > 1:
        cards = device.network * cluster.num_ranks_per_node if device and device.network else None
        links.append(("between nodes", hardware.inter_node_gb_per_s, expected, cards))
    buses = []
    for where, measured, of_preflight, sheet in links:
        if known := measured or of_preflight:
            speed = known * 1e9
            origin = "of the profile's hardware" if measured else "of the profile's preflight"
        elif sheet:
            speed = sheet * BUS_EFFICIENCY
            origin = f"{BUS_EFFICIENCY:.0%} of the data sheet's"
        else:
            return None
        buses.append(Bus(speed, f"{speed / 1e9:,.0f} GB/s {where}, {origin}"))
    return min(buses, key=lambda bus: bus.bytes_per_s, default=Bus(math.inf, ""))


def exchanged_bytes(config: RunConfig, parameters: int, passes: float) -> dict[str, float]:
    """Count the bytes of whole tensors in a step of so many backward passes, by collective.

    They are those of `pipeline/train/engine.py` with DeepSpeed 0.19.8, which
    `tests/distributed/test_moved.py` counts: gradients are added in fp32 whatever the precision.
    """
    stage = config.train.zero_stage
    gradients = float(_GRADIENT_BYTES * parameters)
    weights = float((2 if config.train.precision == "bf16" else 4) * parameters)
    if stage == 0:
        return {"all-reduce": gradients}
    if stage < 3:
        # DeepSpeed all-reduces, although a rank keeps only its part; stage 2 for every micro-batch.
        return {"all-reduce": gradients * (passes if stage == 2 else 1), "all-gather": weights}
    # Weights are gathered for every micro-batch, and those of a model that is too large to be kept
    # for its backward pass twice.
    times = passes * (2 if 2 * parameters > _KEPT_ELEMENTS else 1)
    return {"reduce-scatter": gradients * passes, "all-gather": weights * times}


def sent_bytes(config: RunConfig, parameters: int, passes: float, ranks: int) -> float:
    """Count the bytes that each rank sends, and receives, in a step."""
    whole = exchanged_bytes(config, parameters, passes)
    return sum(
        (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * num_bytes
        for kind, num_bytes in whole.items()
    )


def _fused(config: RunConfig, cluster: ClusterConfig) -> Choice:
    """Predict the kernels that the run will choose, if its GPUs support fused ones."""
    if not cluster.gpus_per_node:
        return REFERENCE
    return expected_on_gpu(config.kernels, config.model, config.train.precision)


def _one_row(
    config: RunConfig, model: ModelConfig, seq_len: int, fused: Choice
) -> cost.TrainingPass:
    return cost.TrainingPass(
        model,
        1,
        seq_len,
        config.train.precision,
        checkpoint_layers=config.train.activation_checkpoint_layers,
        fused=fused,
    )


def _activations(
    config: PretrainConfig, model: ModelConfig, fused: Choice, share: int, room: float | None
) -> tuple[int | None, int | None]:
    """Count the bytes of a micro-batch, and find the largest of a rank's share that fits a room.

    Both are None where torch is not installed, the second where the room is not known, too.
    """
    last = config.batches.stretches[-1]
    given = replace(
        _one_row(config, model, last.seq_len, fused),
        masked_share=config.data.mask_prob,
        objective=config.objective,
    )
    sizes = [] if room is None else [size for size in range(1, share + 1) if share % size == 0]
    counted = cost.activation_bytes(
        [replace(given, rows=size) for size in (last.micro_batch, *sizes)]
    )
    if counted is None:
        return None, None
    configured, *others = (kept["total"] for kept in counted)
    fits = [size for size, kept in zip(sizes, others, strict=True) if kept <= (room or 0.0)]
    return configured, max(fits, default=None)


def _free_bytes(run_dir: Path) -> int | None:
    """Measure the free space of the nearest parent folder that exists."""
    for folder in (run_dir, *run_dir.absolute().parents):
        if folder.is_dir():
            return shutil.disk_usage(folder).free
    return None


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
