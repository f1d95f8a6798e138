"""The plan of a run: its time, memory, jobs and disk, before it starts. Pure; needs no SLURM.

Time and state come from the closed forms of `pipeline.model.cost`, what micro-batches need from
`launch.memory`; speeds of the cluster come from `hardware` of its profile, and the text names each
assumption. What another run did before (`continue_from`) is not planned.

A multi-task run is planned without its data, so every row counts as long as its task allows, and an
example as one row, also where it has more; `postnorm benchmark` and `finetune` count tokens.
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launch.cluster import ClusterConfig
from launch.exchange import bus_of, sent_bytes
from launch.memory import BatchMemory, CarriedScores, carried_text, fused_of, measure, one_row
from pipeline.checkpoints.manifest import newest_readable
from pipeline.config.data import BatchSpec, DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig, RunConfig, TaskRunConfig, load_run
from pipeline.data.format import INDEX_FILE
from pipeline.data.objects import find_index
from pipeline.errors import ConfigError
from pipeline.model import cost
from pipeline.model.architecture import is_model_folder, read_architecture
from pipeline.multitask.config import MLM, TaskMix, require_split
from pipeline.multitask.draws import shares
from pipeline.runtime.checkpoints import published, split_step
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import counted, table

NODE_MTBF_HOURS = 6000.0
"""Mean time between failures of a node of 8 GPUs: what Llama 3's 16,384 GPUs had, 419 interruptions
in 54 days (arXiv 2407.21783, section 3.3.4)."""
# Usable share of a GPU's memory; CUDA, NCCL's buffers and fragmentation take the rest.
_MEMORY_SHARE = 0.9
_FREE_SHARE = 1.05
_DIVIDE_MORE = (2, 3)  # ZeRO stages without a closed form here: they take less than stage 1
_STAGE_1 = "; the state is that of ZeRO stage 1, yours takes less"


@dataclass(frozen=True)
class StretchPlan:
    """The resources of a run's equal batches. Sizes in bytes, times in seconds; None: not known."""

    stage: str
    """Title of their stage; empty in a run without stages."""
    first_step: int
    """Number of the first step, from 1."""
    steps: int
    global_batch: int
    micro_batch: int
    seq_len: int
    slots: float
    flops: float
    update_share: float
    """FLOPs of Muon's products over all of a step, on the rank that has most of them."""
    train_s: float | None
    sent_bytes: float
    """Bytes that each rank sends, and receives, in all its steps."""
    activation_bytes: int | None
    """As in `RunPlan`."""
    largest_micro_batch: int | None
    """As in `RunPlan`."""
    setting: str
    """What sets the micro-batch."""


@dataclass(frozen=True)
class RunPlan:
    """The resources of a run. Sizes in bytes, times in seconds; None: not known.

    Of several stretches of batches, that is shown which takes most memory, or the last one if
    memory is not known.
    """

    parameters: int
    ranks: int
    steps: int
    slots: float
    flops: float
    step_s: float | None
    """Mean of the run, without evaluations and saves; with the exchange, if its speed is known."""
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
    """Sequences of a batch for each rank."""
    micro_batch: int
    accumulation: int
    largest_micro_batch: int | None
    """The largest that fits, of those that divide a rank's share."""
    state_bytes: int
    activation_bytes: int | None
    """Bytes that a micro-batch takes beside the state, mainly activations; None: not counted."""
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
    """Size of all datasets."""
    free_bytes: int
    """Free space on the file system of run_dir."""
    problems: tuple[str, ...]
    """Why the run cannot start as configured; each says what to change."""
    stretches: tuple[StretchPlan, ...] = ()
    """Its stretches of equal batches, in order."""
    carried: CarriedScores | None = None
    """What carried scores cost at the longest sequences; None: there are none, or not counted."""


def plan(
    config: PretrainConfig, cluster: ClusterConfig, *, counts_activations: bool = True
) -> RunPlan:
    """Compute the plan of a run, which needs `model.vocab_size` or a prepared dataset.

    `counts_activations` is what takes seconds; without, no micro-batch is said to fit or not to.
    """
    ranks, hardware = cluster.num_ranks, cluster.hardware
    config.batches.require_split(ranks)
    indexes = [find_index(folder) for folder in config.data_dirs]
    there = [index for index in indexes if index]
    vocab_size = config.model.vocab_size or (there[0].vocab_size if there else None)
    if vocab_size is None:
        raise ConfigError(
            f"model.vocab_size is null and data.dir={config.data.dir} has no {INDEX_FILE} to take "
            "it from; prepare the data first, or add model.vocab_size=N to the command"
        )
    model = replace(config.model, vocab_size=vocab_size)
    parameters = cost.parameters(model, config.objective)["total"]
    state = cost.state_bytes(model, ranks, config.objective, config.train)["total"]
    gpu_bytes = hardware.memory_bytes
    places, need = _places(config), None
    if counts_activations:
        room = None if gpu_bytes is None else _MEMORY_SHARE * gpu_bytes - state
        need = measure(config, places, cluster, vocab_size, room)
    bus = bus_of(cluster)
    stretches = _stretches(config, cluster, places, need.batches if need else (), model)
    steps = sum(one.steps for one in stretches)
    sent = sum(one.sent_bytes for one in stretches)
    exchange_s = sent / bus.bytes_per_s / steps if bus else None
    times = [one.train_s for one in stretches if one.train_s is not None]
    train_s = sum(times) if times else None
    step_s = train_s / steps if train_s is not None else None
    usable_s = cluster.time_limit_s - cluster.stop_before_end_s - hardware.start_s
    worst = _worst(stretches)
    share = worst.global_batch // ranks
    checkpoint = cost.saved_bytes(model, config.train, config.objective)
    save_s = checkpoint / (hardware.write_gb_per_s * 1e9)
    failure_s = NODE_MTBF_HOURS * 3600 / cluster.nodes
    best_s = best_interval_s(save_s, failure_s)
    every_s = config.checkpoint.every_steps * step_s if step_s is not None else None
    result = RunPlan(
        parameters=parameters,
        ranks=ranks,
        steps=steps,
        slots=sum(one.slots for one in stretches),
        flops=sum(one.flops for one in stretches),
        step_s=step_s,
        exchange_s=exchange_s,
        sent_bytes=sent / steps,
        bus=bus.origin if bus else "",
        train_s=train_s,
        jobs=math.ceil(train_s / usable_s) if train_s is not None and usable_s > 0 else None,
        sequences_per_rank=share,
        micro_batch=worst.micro_batch,
        accumulation=share // worst.micro_batch,
        largest_micro_batch=worst.largest_micro_batch,
        state_bytes=state,
        activation_bytes=worst.activation_bytes,
        fused=cost.fused_parts(config.model, fused_of(config, cluster)),
        gpu_bytes=gpu_bytes,
        checkpoint_bytes=checkpoint,
        save_s=save_s,
        every_s=every_s,
        best_every_s=best_s,
        best_every_steps=max(1, round(best_s / step_s)) if step_s else None,
        lost_share=save_s / every_s + every_s / (2 * failure_s) if every_s else None,
        checkpoints_bytes=checkpoint * _num_checkpoints(config),
        shards_bytes=sum(shard.num_bytes for index in there for shard in index.shards)
        if len(there) == len(indexes)
        else None,
        free_bytes=_free_bytes(config.folder.path),
        problems=(),
        stretches=stretches,
        carried=need.carried if need else None,
    )
    return replace(result, problems=tuple(_problems(result, config, cluster, usable_s)))


def _worst(stretches: Sequence[StretchPlan]) -> StretchPlan:
    """Return that which takes most memory; the last, if memory is not known."""
    return max(reversed(stretches), key=lambda one: one.activation_bytes or 0)


def _num_checkpoints(config: PretrainConfig) -> int:
    """Count those that are kept, those at the ends of stages too, and the one being written."""
    kept, own = config.checkpoint, [stage for stage in config.timeline.stages if not stage.of]
    ever = config.train.num_steps // kept.keep_every_steps if kept.keep_every_steps else 0
    return kept.keep + len(own) + ever + kept.keep_best + kept.keep_first


def _places(config: PretrainConfig) -> list[BatchSpec]:
    """Return the first batch of each stretch of equal batches that this run computes."""
    stages, num_steps = config.timeline.stages, config.train.num_steps
    return [
        place
        for place in config.batches.stretches
        if place.number < num_steps and not stages[place.stage].of
    ]


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
    origin = config.origin
    yield (
        f"work         {result.flops:.3g} FLOP: {result.slots:,.0f} slots in {result.steps:,} steps"
        + (f", after {origin}" if origin else "")
    )
    if len(result.stretches) > 1:
        yield from _stretches_table(result.stretches)
    if result.train_s is None or result.step_s is None:
        yield _NO_TIME
    else:
        yield (
            f"time         {_time(result.train_s)}, {1 / result.step_s:,.2f} steps/s, at "
            f"{hardware.speed}"
        )
        if result.ranks > 1:
            yield _exchange_line(result, result.step_s)
        how = "one requeued after the other" if cluster.requeue else "in chains of max_restarts + 1"
        yield f"jobs         {result.jobs} of {cluster.time_limit}, {how}"
    largest = result.largest_micro_batch
    worst = _worst(result.stretches)
    where = f"{worst.stage}: " if worst.stage else ""
    yield (
        f"batches      {where}{result.sequences_per_rank} sequences a rank: "
        f"{result.accumulation} x {result.micro_batch} in a forward pass"
        + (f"; {largest} would fit" if largest and largest != result.micro_batch else "")
    )
    dear = max(result.stretches, key=lambda one: one.update_share)
    if dear.update_share:
        yield (
            f"update       {config.train.optimizer}: {dear.update_share:.1%} of the FLOP of a step "
            f"of {dear.global_batch * dear.seq_len:,} slots, on the busiest of {result.ranks} ranks"
        )
    yield _memory_line(result) + (
        (f", with fused kernels for {' and '.join(result.fused)}" if result.fused else "")
        + (_STAGE_1 if config.train.zero_stage in _DIVIDE_MORE else "")
    )
    if result.carried:
        yield from carried_text(result.carried, config)
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
    data = result.shards_bytes
    shards = "" if data is None else f", shards {data / 1e9:,.1f} GB"
    free = f"{result.free_bytes / 1e9:,.1f} GB are free"
    yield f"disk         checkpoints {result.checkpoints_bytes / 1e9:,.1f} GB{shards}; {free}"
    for problem in result.problems:
        yield f"problem      {problem}"


def _stretches_table(stretches: Sequence[StretchPlan]) -> Iterator[str]:
    """Yield a line a stretch; what is not known of all of them has no column."""
    columns = {
        "stage": [one.stage for one in stretches],
        "from step": [f"{one.first_step:,}" for one in stretches],
        "steps": [f"{one.steps:,}" for one in stretches],
        "batch": [f"{one.global_batch:,}" for one in stretches],
        "micro": [f"{one.micro_batch:,}" for one in stretches],
        "seq_len": [f"{one.seq_len:,}" for one in stretches],
        "slots": [f"{one.slots:.3g}" for one in stretches],
        "FLOP": [f"{one.flops:.3g}" for one in stretches],
        "time": ["" if one.train_s is None else _time(one.train_s) for one in stretches],
        "GiB beside the state": [
            "" if one.activation_bytes is None else f"{one.activation_bytes / 2**30:,.1f}"
            for one in stretches
        ],
    }
    known = {name: cells for name, cells in columns.items() if any(cells)}
    numbers = [place for place, name in enumerate(known) if name != "stage"]
    yield from table([tuple(known), *zip(*known.values(), strict=True)], right=numbers)


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


_NO_TIME = (
    "time         not known: name hardware.gpu or hardware.tflops in the profile of --cluster, or "
    "train some steps on such a machine: the plan of a run_dir that has log lines takes their speed"
)
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
    fused = fused_of(run, cluster)
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
        of_one = one_row(run, model, length, fused)
        passes.append(replace(of_one, rows=rows, masked_share=data.mask_prob))
    counted = cost.activation_bytes(passes)
    flops, speed = sum(task.flops for task in tasks), hardware.flops_per_rank
    parameters, update = cost.parameters(model)["total"], cost.update_flops(model, run.train, ranks)
    train_s = exchange_s = None
    if speed:
        of_rank = flops / ranks + config.train.num_steps * update.busiest
        train_s = of_rank / (speed * hardware.utilisation)
        exchange_s = _exchange_of_mix(mix, cluster, run, parameters, update)
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
        flops=flops + config.train.num_steps * update.total,
        train_s=train_s,
        exchange_s=exchange_s,
        state_bytes=cost.state_bytes(model, ranks, train=run.train)["total"],
        gradients_bytes=kept * 4 * parameters,
        activation_bytes=None if counted is None else max(kept["total"] for kept in counted),
        checkpoint_bytes=cost.saved_bytes(model, run.train),
    )


def _exchange_of_mix(
    mix: TaskMix, cluster: ClusterConfig, run: RunConfig, size: int, update: cost.UpdateFlops
) -> float | None:
    """Compute the seconds of a step's exchange; None: the speed of a link is not known.

    Args:
        mix: its rule of balance may average the gradient of each task by itself.
        cluster: with the speeds of its links.
        run: the mix in the trainer's terms.
        size: of the model, in parameters.
        update: Muon's part.
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
    sent = sent_bytes(run, size, passes, cluster.num_ranks, update.num_elements)
    return times * sent / bus.bytes_per_s


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
        yield _NO_TIME
    else:
        yield (
            f"time         at most {_time(result.train_s)}, at {hardware.speed}; short rows reach "
            "less"
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
    newest = newest_readable(config.folder.checkpoints)
    left = min(1.0, (config.train.num_steps - newest[1].step) / result.steps) if newest else 1.0
    jobs = math.ceil((result.jobs or 0) * left)
    if cluster.requeue and jobs > cluster.max_restarts + 1:
        yield (
            f"{jobs} jobs are more than max_restarts={cluster.max_restarts} allows: raise it, or "
            "time_limit, or nodes"
        )
    if config.train.zero_stage not in _DIVIDE_MORE:
        yield from _memory_problems(result)
    # A run that goes on has some of its checkpoints already.
    held = newest[1].num_bytes * len(published(config.folder.checkpoints)) if newest else 0
    if (result.checkpoints_bytes - held) * _FREE_SHARE > result.free_bytes:
        yield (
            f"{_num_checkpoints(config)} checkpoints take {result.checkpoints_bytes / 1e9:,.1f} "
            f"GB, {(result.free_bytes + held) / 1e9:,.1f} are free or theirs below "
            f"{config.run_dir}: lower checkpoint.keep, or choose another run_dir"
        )
    budget = config.train.budget_hours
    if budget is not None and result.train_s is not None and result.train_s > budget * 3600:
        yield (
            f"train.budget_hours={budget:g} ends the run after "
            f"{budget * 3600 / result.train_s:.0%} of its {_time(result.train_s)}: raise it, lower "
            "train.num_steps, or use more nodes"
        )


def _memory_problems(result: RunPlan) -> Iterator[str]:
    """Yield the worst of each stage that does not fit."""
    if result.gpu_bytes is None:
        return
    room = _MEMORY_SHARE * result.gpu_bytes
    worst: dict[str, StretchPlan] = {}
    for one in result.stretches:
        if (one.activation_bytes or 0) + result.state_bytes <= room:
            continue
        known = worst.setdefault(one.stage, one)
        if (one.activation_bytes or 0) > (known.activation_bytes or 0):
            worst[one.stage] = one
    for stage, one in worst.items():
        needed = result.state_bytes + (one.activation_bytes or 0)
        remedy = f"set {one.setting}={one.largest_micro_batch}"
        if not one.largest_micro_batch:
            group = result.carried.group if result.carried else 1
            remedy = (
                f"no micro-batch fits: set train.activation_checkpoint_layers={group}, "
                + ("shorten seq_len, begin without scores, " if result.carried else "")
                + "or take a smaller model"
            )
        yield (
            f"{f'{stage}: ' if stage else ''}{needed / 2**30:,.1f} GiB a rank are more than "
            f"{_MEMORY_SHARE:.0%} of the GPU's {result.gpu_bytes / 2**30:,.0f}: {remedy}"
        )


def _stretches(
    config: PretrainConfig,
    cluster: ClusterConfig,
    places: Sequence[BatchSpec],
    memory: Sequence[BatchMemory],
    model: ModelConfig,
) -> tuple[StretchPlan, ...]:
    """Plan stretches of equal batches, of which `memory` is empty if it was not counted.

    FLOPs are counted as if every token attended to its whole row.
    """
    ranks, parameters = cluster.num_ranks, cost.parameters(model, config.objective)["total"]
    speed = cluster.hardware.flops_per_rank * cluster.hardware.utilisation
    update = cost.update_flops(model, config.train, ranks, config.objective)
    bus, timeline, found = bus_of(cluster), config.timeline, list[StretchPlan]()
    ends = [*(place.number for place in places[1:]), config.train.num_steps]
    for number, (place, end) in enumerate(zip(places, ends, strict=True)):
        steps, stage = end - place.number, timeline.stages[place.stage]
        slots = float(steps * place.size * place.seq_len)
        share = stage.data.mask_prob
        each = cost.flops_per_token(model, place.seq_len, share, objective=config.objective)
        passes = place.size // ranks // place.micro_batch
        sent = steps * sent_bytes(config, parameters, passes, ranks, update.num_elements)
        of_rank = slots / steps * each.total / ranks + update.busiest
        exchange_s = sent / bus.bytes_per_s if bus else 0.0
        known = memory[number] if memory else None
        found.append(
            StretchPlan(
                stage=stage.title if timeline.has_stages else "",
                first_step=place.number + 1,
                steps=steps,
                global_batch=place.size,
                micro_batch=place.micro_batch,
                seq_len=place.seq_len,
                slots=slots,
                flops=slots * each.total + steps * update.total,
                update_share=update.busiest / of_rank,
                train_s=steps * of_rank / speed + exchange_s if speed else None,
                sent_bytes=sent,
                activation_bytes=known.activation_bytes if known else None,
                largest_micro_batch=known.largest_micro_batch if known else None,
                setting=_setting(config, place),
            )
        )
    return tuple(found)


def _setting(config: PretrainConfig, place: BatchSpec) -> str:
    """Name what sets the micro-batch of a stretch."""
    of_stage = [one for one in config.batches.stretches if one.stage == place.stage]
    if place != of_stage[-1]:
        return f"micro_batch of the phase of step {place.number + 1:,}"
    return f"stages.{place.stage}.train.micro_batch" if config.stages else "train.micro_batch"


def _free_bytes(run_dir: Path) -> int:
    """Measure the free space of the nearest parent folder that exists."""
    folders = (run_dir, *run_dir.absolute().parents)
    return shutil.disk_usage(next(folder for folder in folders if folder.is_dir())).free


def _time(seconds: float) -> str:
    units = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))
    unit, size = next((one for one in units if seconds >= one[1]), ("s", 1.0))
    return f"{seconds / size:,.1f} {unit}"
