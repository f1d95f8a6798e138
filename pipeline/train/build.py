"""Puts a run together from its config, its data and its work, and starts the loop."""

import fcntl
import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from pipeline.checkpoints.resume import CheckpointStore, changes
from pipeline.checkpoints.save import Saver
from pipeline.checkpoints.state import TrainState
from pipeline.config.data import DataConfig, EvalDataConfig, TrainDataConfig
from pipeline.config.load import provenance, resolved_text
from pipeline.config.model import ModelConfig
from pipeline.config.origin import IS_OTHER
from pipeline.config.runs import RunConfig
from pipeline.config.schedule import alpha, is_over
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import PackedSplit
from pipeline.data.format import DatasetIndex
from pipeline.data.ledger import Rewind, read_ledger
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.reader import refuse_unlisted
from pipeline.data.record import read_batches
from pipeline.data.run_order import DataRank
from pipeline.data.staging import stage
from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED, BusyError, DataError
from pipeline.kernels.choose import Choice, choose
from pipeline.model.compiled import CompiledLayer, require_compiler
from pipeline.model.cost import carried_bytes
from pipeline.model.encoder import EncoderModel
from pipeline.objectives.base import Objective, TextObjective
from pipeline.runtime import dist, env, files, log, watchdog
from pipeline.runtime.checkpoints import MANIFEST_FILE, read_manifest
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.notify import FAILED, FINISHED, STARTED, STOPPED, WENT_BACK, Notifier
from pipeline.runtime.rank import Rank, leaving
from pipeline.runtime.run_folder import FORMAT_VERSION, RunFolder
from pipeline.runtime.summary import counted
from pipeline.sinks.base import SinkContext, Sinks, find_sinks
from pipeline.train.batch_log import BatchLog
from pipeline.train.deepspeed import deepspeed_config
from pipeline.train.engine import Engine, close_process_group, init_process_group
from pipeline.train.faults import FaultHandler, SkippedBatches, trained_in_spite
from pipeline.train.loop import Attempt, train
from pipeline.train.replicas import Replicas
from pipeline.train.requests import Requests
from pipeline.train.run import RunContext, Workload
from pipeline.train.run_logger import RunLogger

logger = logging.getLogger(__name__)

# The old rank 0 of a node that was cut off may live on for most of a minute: then exit code 1, a
# retry.
_LOCK_PATIENCE_S = 15.0


def train_run(config: RunConfig, rank: Rank, work: Workload) -> int:
    """Run or resume a run on this rank, whatever its work is.

    Args:
        config: of the run, with the size of the vocabulary.
        rank: this process; its signals are looked at between steps.
        work: what is trained.

    Returns:
        An exit code of `pipeline.errors`.
    """
    folder, run_dir, process = config.folder, config.folder.path, rank.process
    folder.create()
    log.to_run(run_dir, process.rank)
    rank.if_lost = (
        f"Collectives wait for train.collective_timeout_s={config.train.collective_timeout_s:g}; "
        f"its log in {folder.logs} and {folder.hangs} say more. The run "
        "continues from its newest checkpoint when it is started again"
    )
    requests = Requests(rank.stop, run_dir, is_first=process.is_first)
    hang_timeout_s = config.train.hang_timeout_s
    by_hand = env.launched_run_dir() is None
    with (
        _exclusive(run_dir, process),
        watchdog.watching(run_dir, lambda: rank.process, hang_timeout_s),
    ):
        device = init_process_group(process, config.train.collective_timeout_s)
        _name_start(rank, run_dir)
        # Also where `run_as_rank` leaves the code in another folder, as that of several seeds.
        command = config.notify.command if process.is_first else ""
        notifier = Notifier(command, run_dir, rank.process.job)
        code = leaving(
            lambda: _telling(
                lambda: _noting_refusal(
                    lambda: _run(config, rank.process, work, device, requests, notifier),
                    folder,
                    rank.process,
                ),
                notifier,
                by_hand=by_hand,
            ),
            lambda code: rank.leave(run_dir, code),
        )
        # Of any rank: `finish` is collective, so all enter it or none.
        is_asked_to_stop = code == EXIT_FINISHED and any(dist.gather(rank.stop.requested))
        if code == EXIT_FINISHED and not is_asked_to_stop:
            # Model and hooks hold each other; the collector sees small objects, not the memory
            # behind.
            gc.collect()
            work.finish()
        close_process_group()
    return code


def _noting_refusal(work: Callable[[], int], folder: RunFolder, process: ProcessInfo) -> int:
    """Do some work; where it fails before its attempt is on record, put the reason on record."""
    try:
        return work()
    except Exception as error:
        attempts = files.read_json_lines(folder.attempts)
        if process.is_first and (not attempts or attempts[-1].get("job") != process.job):
            why = {"unix_s": time.time(), "job": process.job, "error": str(error)}
            with suppress(OSError):  # it would hide the error itself
                files.append_json(folder.refused, why)
        raise


def _telling(work: Callable[[], int], notifier: Notifier, *, by_hand: bool) -> int:
    """Do some work; tell how it ends, unless what launched it does."""
    try:
        code = work()
    except Exception as error:
        if by_hand:
            notifier.send(FAILED, str(error))
        notifier.finish()
        raise
    if by_hand:
        is_done = code == EXIT_FINISHED
        notifier.send(FINISHED if is_done else STOPPED, "done" if is_done else "asked to, saved")
    notifier.finish()
    return code


def _name_start(rank: Rank, run_dir: Path) -> None:
    """Give a start by hand a job of its own, so that the next one does not replace its exit codes.

    `launch` has given its starts one. Collective.
    """

    def make_job() -> str:
        run = RunFolder(run_dir)
        job = f"{rank.process.job}-{_next_attempt(run)}"
        # A start that ended before its attempt was on record had the same number.
        shutil.rmtree(run.exits(job), ignore_errors=True)
        return job

    # Torchrun's variables cannot name it: its run id is `none` by default, and the same for each
    # start where people choose it.
    if env.launched_run_dir() is None:
        rank.process = replace(rank.process, job=dist.on_first(make_job, "naming the start"))


def make_model(config: RunConfig, objective: Objective, device: torch.device) -> EncoderModel:
    """Make the model of a run on the CPU, with the kernels that will compute it on `device`.

    `config.model.vocab_size` is set.

    Raises:
        ConfigError: what the config asks for cannot run on the device.
    """
    # On the CPU: every rank draws the same weights, whatever its device.
    torch.manual_seed(config.seed)
    model = objective.make_model(config.model)
    if config.train.compile:
        require_compiler(device)
    for encoder in model.encoders:
        if config.train.activation_checkpoint_layers is not None:
            encoder.checkpoint_activations(config.train.activation_checkpoint_layers)
        # By encoder: a narrower one may have a width that a kernel does not take.
        chosen = choose(config.kernels, encoder.config, config.train.precision, device)
        if chosen.attention:
            encoder.fuse_attention()
        if chosen.residual_norm:
            encoder.fuse_residual_norms()
        if config.train.compile:
            encoder.run_layers_by(CompiledLayer())
        warn_of_scores(config, encoder.config, chosen, _memory_bytes(device))
    if chosen.loss:
        model.fuse_loss()
    return model


def warn_of_scores(
    config: RunConfig, model: ModelConfig, kernels: Choice, memory_bytes: int
) -> None:
    """Warn if scores that layers keep for one another do not fit, in a stage to come neither."""
    place = max(config.batches.stretches, key=lambda one: one.micro_batch * one.seq_len**2)
    shape = place.micro_batch, place.seq_len
    of_layer = carried_bytes(model, *shape, kernels, config.train.precision)
    group, layers = config.train.activation_checkpoint_layers, model.num_layers
    # With groups of layers: those between them, and those of one at a time.
    kept = layers if group is None else -(-layers // group) + min(group, layers)
    if of_layer * kept <= memory_bytes:
        return
    timeline = config.timeline
    where = f"{timeline.stages[place.stage].title}, " if timeline.has_stages else ""
    logger.warning(
        "%sfrom step %s on: %d x %s slots need %.1f GiB for the scores that layers hand on "
        "(model.score_residual=%s), and %.1f GiB are here. Lower micro_batch or seq_len there, or "
        "set train.activation_checkpoint_layers; a run with model.score_residual=none has no such "
        "scores, but a stage cannot switch them off. `postnorm plan` counts the rest",
        where,
        f"{place.number + 1:,}",
        place.micro_batch,
        f"{place.seq_len:,}",
        of_layer * kept / 2**30,
        model.score_residual,
        memory_bytes / 2**30,
    )


def _memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def open_data(
    train: TrainDataConfig,
    held_out: EvalDataConfig,
    run_dir: str,
    index: DatasetIndex,
    objective: TextObjective,
    share: DataRank,
) -> tuple[TrainLoader, EvalLoader]:
    """Open and check the dataset. Collective.

    Raises:
        PostnormError: on all ranks, if one finds damage.
    """
    index = where_shards_are_read(train.data, index, share)
    counts = dist.on_first(
        lambda: sequences_at(index, train.batches.seq_lens, run_dir, train.objective),
        "counting sequences",
    )
    watchdog.heartbeat("opening the data")
    with dist.raise_on_all_ranks():
        loaders = (
            TrainLoader(index, train, objective.train_inputs(train, index), share, counts),
            EvalLoader(index, held_out, objective.eval_inputs(held_out, index), share, counts),
        )
        verify_at_start(train.data, [loaders[0].steps.split, loaders[1].split], share)
    return loaders


def verify_at_start(data: DataConfig, splits: Sequence[PackedSplit], share: DataRank) -> None:
    """Hash all blocks of small datasets (DataError: one is damaged)."""
    for split in splits:
        total_bytes = sum(shard.num_bytes for shard in split.reader.index.shards)
        # Larger sets are hashed block by block, when they are read: 280 GB at each start would cost
        # more than the failures that it finds.
        if total_bytes <= data.verify_at_start_gib * 2**30:
            # Each rank a part: together they hash every block once.
            split.reader.check_all(split.rows[share.rank :: share.world_size].tolist())


def where_shards_are_read(data: DataConfig, index: DatasetIndex, share: DataRank) -> DatasetIndex:
    """Copy the shards to this node if the config asks for it. Collective.

    Returns:
        The index with the place where they are read.
    """
    staging = data.stage_dir is not None and index.store is None
    with dist.raise_on_all_ranks(range(share.world_size if staging else 0), "staging shards"):
        if share.rank == 0:
            refuse_unlisted(index)
        if staging:
            assert data.stage_dir is not None
            folder = env.expand(data.stage_dir, "data.stage_dir")
            index = stage(index, folder, lambda: dist.heartbeat_all("staging shards"))
    return index


def _run(
    config: RunConfig,
    process: ProcessInfo,
    work: Workload,
    device: torch.device,
    requests: Requests,
    notifier: Notifier,
) -> int:
    # Before model and data: a run with a STOP file does not start.
    requests.refuse_if_stopped()
    run_dir = config.folder.path
    model = make_model(config, work.objective, device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    store = CheckpointStore(config, work.indexes, process)
    # Before the data is opened, which may take minutes: it may be another run's.
    resumed_from = store.newest()
    if requests.ends_before_training():
        return EXIT_PREEMPTED
    saver = Saver(config, work.indexes, process, num_parameters)
    data = work.open(DataRank(process.rank, process.world_size))
    if requests.ends_before_training():
        return EXIT_PREEMPTED
    if resumed_from is None:
        # Before the engine is made, which copies the weights into its masters.
        work.start(model)
    logger.info(
        "%s: %s parameters, %s on %s, %s",
        run_dir,
        f"{num_parameters:,}",
        counted(process.world_size, "rank"),
        device.type,
        data.description,
    )
    if device.type == "cpu" and config.train.precision == "bf16" and not env.multiplies_bf16():
        logger.warning(
            "this processor does not multiply bf16, which takes 5 to 40 times as long as fp32: set "
            "train.precision=fp32"
        )
    if config.train.hang_timeout_s >= config.train.collective_timeout_s:
        logger.warning(
            "train.hang_timeout_s=%g is not below train.collective_timeout_s=%g: a run that hangs "
            "ends without the stacks in RUN/hangs",
            config.train.hang_timeout_s,
            config.train.collective_timeout_s,
        )
    watchdog.heartbeat("making the engine")
    engine = Engine(model, config.train, process, device, work.lr_scale)
    run = RunContext(
        config=config,
        process=process,
        work=work,
        model=model,
        engine=engine,
        data=data,
        evaluation=work.evaluation(model, engine),
        store=store,
        saver=saver,
        requests=requests,
        notifier=notifier,
    )
    start = f"from {resumed_from.name}" if resumed_from else "from step 0"
    notifier.send(STARTED, f"{start}, {counted(process.world_size, 'rank')}")
    code = _attempt(run, resumed_from, rewound=False)
    while code is None:
        if process.is_first:
            newest = read_ledger(run_dir).newest_return
            notifier.send(WENT_BACK, f"to step {newest.to_step}: {newest.reason}")
        code = _attempt(run, store.newest(), rewound=True)
    return code


def _attempt(run: RunContext, resumed_from: Path | None, *, rewound: bool) -> int | None:
    """Train from a checkpoint or from step 0; see `train` for what it returns and raises."""
    config, process = run.config, run.process
    watchdog.heartbeat("loading the state")
    state = run.store.load(run.engine, resumed_from) if resumed_from else TrainState()
    logger.info("%s", f"resumed from {resumed_from}" if resumed_from else "from step 0")
    if resumed_from is None and process.is_first:
        # The work of an attempt without a checkpoint is lost; its config may have been another one.
        run.folder.batches.unlink(missing_ok=True)
        run.folder.ledger.unlink(missing_ok=True)
    rewinds = dist.on_first(lambda: _rewinds(run.folder, state), "reading the ledger")
    state.rewinds = len(rewinds)
    batch_log = BatchLog(
        run.folder.path,
        state.cursor,
        process.is_first,
        staged=config.timeline.has_stages,
        begins=resumed_from == config.origin,
    )
    if process.is_first and config.train.skip_batches:
        _warn_of_trained(config, state)
    sinks = None
    if process.is_first:
        if not is_over(state.step, config.train, state.elapsed_s):
            run.folder.done.unlink(missing_ok=True)  # the run was made longer
        number = _record_attempt(run, state, resumed_from, rewound=rewound)
        resolved = resolved_text(config).encode()
        files.write_atomic(run.folder.resolved, resolved)
        if not rewound:
            run.folder.resolved_of(number).parent.mkdir(exist_ok=True)
            files.write_atomic(run.folder.resolved_of(number), resolved)
        _write_deepspeed_config(run)
        resumed_step = state.step if resumed_from else None
        start = SinkContext(run.folder.path, number, resumed_step, config)
        sinks = Sinks(start, find_sinks(config.monitor.sinks))
    watch = RunLogger(run, sinks)
    attempt = Attempt(
        run=run,
        batch_log=batch_log,
        watch=watch,
        left_out=SkippedBatches(config, rewinds),
        rescue=FaultHandler(config, run.data, batch_log, run.saver, watch),
        replicas=Replicas(run.engine, process, config.monitor.compare_replicas_every_steps),
    )
    try:
        with watch.bar(state):
            code = train(attempt, state)
    finally:
        if sinks:
            sinks.close()
    if sinks and code == EXIT_FINISHED:
        _finish(run, state)
    return code


def _rewinds(folder: RunFolder, state: TrainState) -> list[Rewind]:
    """Read how often the run went back so far; for rank 0.

    Raises:
        DataError: the ledger is damaged, or is not that of the state.
    """
    rewinds = read_ledger(folder.path).rewinds
    if len(rewinds) < state.rewinds:
        raise DataError(
            f"{folder.ledger} has {len(rewinds)} rewinds, the checkpoint of step {state.step} was "
            f"saved after {state.rewinds}: which batches are left out is not known; restore the "
            "file from a copy"
        )
    return rewinds


def _warn_of_trained(config: RunConfig, state: TrainState) -> None:
    """Warn of batches that cannot be left out any more, on rank 0."""
    following = config.batches.at(state.cursor).number
    trained = trained_in_spite(config, read_batches(config.folder.path), following)
    if trained:
        text = (
            "train.skip_batches: %d batches, such as %d, were trained on before; to leave them out "
            "resume from a checkpoint before them, or start a new run"
        )
        logger.warning(text, len(trained), trained[0])


def _finish(run: RunContext, state: TrainState) -> None:
    """Mark the run as done, on rank 0."""
    files.write_json_atomic(run.folder.done, {"step": state.step, "unix_s": time.time()})
    logger.info("finished at step %d", state.step)
    reached = alpha(state.step, run.config.train.alpha_warmup_steps)
    if reached < 1:
        text = (
            "the time budget ended the run at alpha %.3f: the model is usable only at that alpha; "
            "continue with a larger train.budget_hours, or start again with a shorter "
            "train.alpha_warmup_steps"
        )
        logger.warning(text, reached)


def _write_deepspeed_config(run: RunContext) -> None:
    config, path = run.config.train, run.folder.deepspeed
    if config.zero_stage == 0:
        path.unlink(missing_ok=True)
    else:
        files.write_json_atomic(path, deepspeed_config(config))


def _record_attempt(
    run: RunContext, state: TrainState, resumed_from: Path | None, *, rewound: bool
) -> int:
    """Add a line to attempts.jsonl and return this attempt's number, 1 for the first.

    With it go the settings that differ from those of the checkpoint, which are logged, too.
    """
    process, attempt = run.process, _next_attempt(run.folder)
    record = {
        "attempt": attempt,
        "format_version": FORMAT_VERSION,
        "resumed_from_step": state.step if resumed_from else None,
        "rewound": rewound,
        **_origin_and_changes(run, resumed_from),
        "unix_s": time.time(),
        "world_size": process.world_size,
        "fingerprint": run.work.indexes[0].fingerprint,
        "fingerprints": [index.fingerprint for index in run.work.indexes],
        "host": process.host,
        "job": process.job,
        "cwd": os.getcwd(),
        **provenance(),
    }
    files.append_json(run.folder.attempts, record)
    return attempt


def _origin_and_changes(run: RunContext, resumed_from: Path | None) -> dict[str, Any]:
    """Return the checkpoint of another run that this one begins from, or what has changed."""
    if resumed_from is None:
        return {}
    manifest, config = read_manifest(resumed_from), run.config
    if resumed_from == config.origin:
        logger.info(
            "this run continues another one: weights, optimizer's state, alpha, seed, the counts of"
            " steps and tokens, and the order of its data are those of %s; no loss is repeated",
            resumed_from,
        )
        found = changes(manifest, config)
        # A text begins with the setting's name.
        found = [text for text in found if text.split(":")[0].split(" ")[0] not in IS_OTHER]
        for text in found:
            logger.info("other than in that run: %s", text)
        manifest_file = resumed_from / MANIFEST_FILE
        return {
            "continued_from": {
                "checkpoint": str(resumed_from),
                "step": manifest.step,
                "cursor": manifest.cursor,
                "manifest_sha256": files.sha256_file(manifest_file),
                "fingerprints": [*manifest.fingerprints, manifest.fingerprint],
            }
        } | ({"changes": found} if found else {})
    found = changes(manifest, config)
    earlier = files.read_json_lines(run.folder.attempts)[-1:]
    known = earlier[0].get("fingerprints", []) if earlier else []
    stages = config.timeline.stages
    for of, index, before in zip(stages, run.work.indexes, known, strict=False):
        if index.fingerprint != before:
            found.append(f"{of.title}: data {before} before, now {index.fingerprint}")
    for text in found:
        logger.info("changed since that checkpoint: %s", text)
    if any(text.startswith("init_from:") for text in found):
        logger.warning(
            "init_from=%s counts for a new run alone, and this one goes on from its checkpoint; for"
            " other weights choose another run_dir",
            config.init_from,
        )
    return {"changes": found} if found else {}


def _next_attempt(folder: RunFolder) -> int:
    records = files.read_json_lines(folder.attempts)
    return 1 + int(records[-1].get("attempt", len(records))) if records else 1


@contextmanager
def _exclusive(run_dir: Path, process: ProcessInfo) -> Iterator[None]:
    """Hold the run folder's lock on rank 0; the system frees it however the process ends."""
    if not process.is_first:
        yield
        return
    with RunFolder(run_dir).lock.open("w") as file:
        _lock(file, run_dir)
        yield


def _lock(file: IO[str], run_dir: Path) -> None:
    """Take the lock after a while at most: a node that was cut off may still run its process."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            raise BusyError(
                f"{run_dir} is in use by another running process; wait for it or stop it, "
                "or choose another run_dir"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): do not start it twice", run_dir, error)
        return
