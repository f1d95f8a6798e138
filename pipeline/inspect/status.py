"""`postnorm status RUN`: how a run is doing, from the files of its folder alone."""

import json
import math
import shutil
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.checkpoints.manifest import newest_readable
from pipeline.config.runs import load_run
from pipeline.config.schedule import budget_left_s
from pipeline.config.stages import Timeline
from pipeline.config.train import TrainConfig
from pipeline.data.ledger import read_ledger
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, EXIT_PREEMPTED, EXIT_STOPPED
from pipeline.runtime.checkpoints import Manifest
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import Line, date, duration, number, progress_bar
from pipeline.sinks.glance import Glance, LossTrack, MetricLines, glance

RUNNING, FINISHED, STOPPED, FAILED, KILLED = "running", "finished", "stopped", "failed", "killed"
UNKNOWN = "unknown"
_SLOW_DATA = 0.05
_RECENT_LINES = 10
_SILENT_INTERVALS = 10
# Evaluations and saves of a small run take longer than ten of its log intervals.
_LEAST_SILENCE_S = 60.0
_LEAST_FREE = 0.02
_OF_START = ("attempt", "unix_s", "resumed_from_step", "world_size", "host", "job")
"""Fields of a start that attempts.jsonl has."""


@dataclass(frozen=True)
class StartRecord:
    """One start of the run, and how it ended."""

    attempt: int
    unix_s: float
    resumed_from_step: int | None
    world_size: int
    host: str
    job: str
    state: str
    """`running`, `finished`, `stopped`, `failed`, `killed` or `unknown`."""
    end: str
    """The state in words, with the ranks that differ."""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest published checkpoint. It is not verified here."""

    step: int
    age_s: float


@dataclass(frozen=True)
class ProbeAccuracy:
    """The newest accuracy of a linear probe; None: its vectors were not finite."""

    accuracy: float | None
    majority: float
    step: int


@dataclass(frozen=True)
class TaskResult:
    """How a finished fine-tuning scored."""

    metric: str
    score: float
    scored_on: str
    """dev or test"""
    majority: float


@dataclass(frozen=True)
class RunStatus:
    """How a run is doing; None: not known, or not yet."""

    state: str
    step: int
    num_steps: int
    stage: str | None
    """Which stage, how far it is, and what comes; None: the run has none."""
    loss: float | None
    held_out_loss: float | None
    held_out_step: int | None
    glance: Glance
    """First and best losses and what to hold them against, rate, share done, epochs, restarts."""
    tokens: int | None
    """Trained on, repeated steps counted once."""
    tokens_per_s: float | None
    """Speed in the last log line, without evaluations and saves."""
    eta_s: float | None
    """Seconds left at the pace of the last log lines, evaluations and saves included; less
    where the run's time budget ends earlier."""
    idle_s: float | None
    checkpoint: NewestCheckpoint | None
    starts: list[StartRecord]
    warnings: list[str]
    probes: dict[str, ProbeAccuracy]
    """Probe accuracies by name of the task."""
    dev: dict[str, float]
    """Newest score on dev of each task of a multi-task run."""
    result: TaskResult | None
    """Result of a fine-tuning; None: it is not finished, or the run is of another kind."""


def run_status(folder: Path, now_s: float | None = None) -> RunStatus:
    """Read a run folder; nothing in it is changed.

    `now_s` is the Unix time that ages are counted from.

    Raises:
        RunFolderError: the folder is not that of a started run.
    """
    now_s = time.time() if now_s is None else now_s
    run = RunFolder.started(folder)
    attempts = read_json_lines(run.attempts)
    config = load_run(run.resolved).config
    lines = MetricLines(run).valid(attempts)
    seen = glance(config, lines, attempts)
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "eval"]
    # Of one start and one stage, whose steps take as long.
    recent = [
        line
        for line in train
        if all(line.get(name) == train[-1].get(name) for name in ("attempt", "stage"))
    ][-20:]
    step_s = _pace(recent)
    newest = newest_readable(run.checkpoints)
    manifest = newest[1] if newest else None
    silence_s = _LEAST_SILENCE_S
    if step_s:
        interval_s = step_s * config.monitor.log_every_steps
        silence_s = max(silence_s, _SILENT_INTERVALS * interval_s)
    last_sign_s = max([attempts[-1]["unix_s"], *(line.get("unix_s", 0.0) for line in lines[-1:])])
    idle_s = now_s - last_sign_s
    is_here = attempts[-1]["host"] == socket.gethostname()
    # The lock is believed on the run's own host only.
    is_alive = run.is_locked() or (not is_here and idle_s < silence_s)
    starts = _starts(run, attempts, is_alive=is_alive)
    # A rank that hangs for so long is ended; until then another host cannot tell.
    if starts[-1].state == KILLED and not is_here and idle_s < config.train.hang_timeout_s:
        silent = f"no sign of life for {idle_s:,.0f} s, as {socket.gethostname()} sees it"
        starts[-1] = replace(starts[-1], state=UNKNOWN, end=silent)
    state = FINISHED if run.done.exists() else starts[-1].state
    warnings = _refusals(run, attempts) + _warnings(lines, manifest, run)
    if state == RUNNING and idle_s > silence_s:
        silence = f"{idle_s:,.0f} s, more than {_SILENT_INTERVALS} log intervals"
        warnings.insert(0, f"no progress for {silence}: look at {run.logs}")
    return RunStatus(
        state=state,
        step=seen.step,
        num_steps=config.train.num_steps,
        stage=_stage(config.timeline, train, seen.step),
        loss=train[-1]["loss"] if train else None,
        held_out_loss=held_out[-1]["loss"] if held_out else None,
        held_out_step=held_out[-1]["step"] if held_out else None,
        glance=seen,
        # A fork's lines do not have its source's.
        tokens=None if attempts[0].get("continued_from") else _tokens(train),
        tokens_per_s=train[-1]["tokens_per_s"] if train else None,
        eta_s=_eta_s(config.train, seen.step, step_s, train),
        idle_s=idle_s,
        checkpoint=NewestCheckpoint(manifest.step, now_s - manifest.created_unix_s)
        if manifest
        else None,
        starts=starts,
        warnings=warnings,
        probes=_probes(lines),
        dev=_by_task(held_out, "dev_"),
        result=_result(run),
    )


def _stage(timeline: Timeline, train: list[dict[str, Any]], step: int) -> str | None:
    if not timeline.has_stages:
        return None
    # The stage of the last batch; without one that of the first to come.
    number = int(train[-1].get("stage", 0)) if train else timeline.step(step).number
    stage, total = timeline.stages[number], len(timeline.stages)
    begun = max(0, step - stage.first_batch)
    text = f"{stage.name}, {number + 1} of {total}, step {begun:,} of {stage.steps:,}"
    coming = timeline.stages[number + 1 : number + 2]
    return text + "".join(f"; {each.name} follows step {each.first_batch:,}" for each in coming)


def _probes(lines: list[dict[str, Any]]) -> dict[str, ProbeAccuracy]:
    newest = [line for line in lines if line["kind"] == "probe"][-1:]
    return {
        name: ProbeAccuracy(value, newest[0][f"majority_{name}"], newest[0]["step"])
        for name, value in _by_task(newest, "accuracy_").items()
    }


def _by_task(newest: list[dict[str, Any]], prefix: str) -> dict[str, Any]:
    """Return the values of the newest line, if there is one, whose keys begin so, by task."""
    pairs = (pair for line in newest[-1:] for pair in line.items())
    return {key.removeprefix(prefix): value for key, value in pairs if key.startswith(prefix)}


def _result(run: RunFolder) -> TaskResult | None:
    try:
        body = json.loads(run.result.read_bytes())
        scored_on = body["protocol"]["scored_on"]
        return TaskResult(body["metric"], body["mean"], scored_on, body["majority"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tokens(train: list[dict[str, Any]]) -> int | None:
    try:
        return round(sum(float(line["tokens"]) for line in train))
    except KeyError:
        return None  # an older version did not log them


def _pace(lines: list[dict[str, Any]]) -> float | None:
    """Compute the seconds a step between log lines of one start, evaluations and saves included."""
    timed = [(line["step"], line["unix_s"]) for line in lines if "unix_s" in line]
    if len(timed) < 2 or timed[-1][0] == timed[0][0]:
        return None
    return float((timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]))


def _eta_s(
    config: TrainConfig, step: int, step_s: float | None, train: list[dict[str, Any]]
) -> float | None:
    left_s = math.inf if step_s is None else step_s * (config.num_steps - step)
    if train and "elapsed_s" in train[-1]:  # an older version had no time budget
        left_s = min(left_s, max(0.0, budget_left_s(config, train[-1]["elapsed_s"])))
    return None if left_s == math.inf else left_s


def _starts(run: RunFolder, attempts: list[dict[str, Any]], *, is_alive: bool) -> list[StartRecord]:
    """Describe how each start ended, by the exit codes that its ranks left under its job."""
    went_back = [*(line.get("rewound", False) for line in attempts[1:]), False]
    starts = []
    for place, (line, rewound) in enumerate(zip(attempts, went_back, strict=True)):
        # Starts by hand had one job, whose files the next start replaced, in an older version.
        earlier, later = (
            [other["unix_s"] for other in others if other["job"] == line["job"]]
            for others in (attempts[:place], attempts[place + 1 :])
        )
        from_s, to_s = line["unix_s"] if earlier else 0.0, min(later, default=math.inf)
        codes = _exit_codes(run.exits(line["job"]), from_s, to_s)
        state, end = _end_of(codes, line["world_size"])
        if later and len(codes) < line["world_size"]:
            state, end = UNKNOWN, "not known: a later start replaced its exit codes"
        if place == len(attempts) - 1 and is_alive and len(codes) < line["world_size"]:
            state, end = RUNNING, RUNNING
        if rewound:
            state, end = STOPPED, "went back to a checkpoint"
        starts.append(StartRecord(**{name: line[name] for name in _OF_START}, state=state, end=end))
    return starts


def _exit_codes(folder: Path, from_s: float, to_s: float) -> list[int]:
    files = [path for path in folder.glob("rank-*") if from_s <= path.stat().st_mtime < to_s]
    return [int(text) for path in files if (text := path.read_text().strip())]


def _end_of(codes: list[int], world_size: int) -> tuple[str, str]:
    if not codes:
        return KILLED, "killed: no rank left an exit code"
    missing = world_size - len(codes)
    also = f"; {missing} of {world_size} ranks left no exit code: killed" if missing else ""
    if EXIT_FAILED_DO_NOT_RETRY in codes:
        return FAILED, f"failed, trying again changes nothing{also}"
    if missing == 0 and set(codes) == {EXIT_FINISHED}:
        return FINISHED, "finished"
    if EXIT_STOPPED in codes:
        return STOPPED, f"stopped by the STOP file{also}"
    if missing == 0 and set(codes) == {EXIT_PREEMPTED}:
        return STOPPED, "stopped on request, saved"
    return FAILED, f"failed, trying again may help{also}"


def _refusals(run: RunFolder, attempts: list[dict[str, Any]]) -> list[str]:
    """Report the newest start, if it ended before it trained."""
    refused = read_json_lines(run.refused)
    if not refused or refused[-1]["unix_s"] < attempts[-1]["unix_s"]:
        return []
    last = refused[-1]
    return [f"the last start, {date(last['unix_s'])}, job {last['job']}, failed: {last['error']}"]


def _warnings(lines: list[dict[str, Any]], manifest: Manifest | None, run: RunFolder) -> list[str]:
    train = [line for line in lines if line["kind"] == "train"][-_RECENT_LINES:]
    skips = [line for line in lines if line["kind"] == "skip"]
    found = []
    # The first line of a start has what filling takes.
    steady = [line for old, line in pairwise(train) if old["attempt"] == line["attempt"]]
    wait = statistics.fmean(line["data_wait"] for line in steady) if steady else 0.0
    if wait > _SLOW_DATA:
        found.append(
            f"{wait:.0%} of the time goes by waiting for data: set data.workers higher, or copy "
            "the shards to the nodes with data.stage_dir"
        )
    if skips:
        found.append(
            f"{skips[-1]['total']:.0f} steps were skipped, their gradient was not finite, the last "
            f"after step {skips[-1]['step']}: `postnorm inspect {run.path} --skip` shows "
            "the batches"
        )
    found += _divergence_warnings(lines, train) or _plateau_warnings(lines, train)
    found += _rank_warnings(lines, run)
    ledger = read_ledger(run.path)
    if ledger.diverged:
        newest = ledger.diverged[-1]
        found.append(
            f"the run went back {len(ledger.diverged)} times because ranks differed, the last from "
            f"step {newest.from_step} to {newest.to_step}: {newest.reason}; look for a faulty "
            "device there"
        )
    rewinds = ledger.rewinds
    if rewinds:
        found.append(
            f"the run went back {len(rewinds)} times, the last because {rewinds[-1].reason}: to "
            f"step {rewinds[-1].to_step} without batches {rewinds[-1].first_batch} to "
            f"{rewinds[-1].last_batch}"
        )
    if any(line["loss"] is None for line in train):
        found.append("a loss is NaN in the last log lines: see skipped steps; lower train.lr")
    if run.stop.exists():
        found.append(f"{run.stop} exists: the run does not start before it is removed")
    space = shutil.disk_usage(run.path)
    needed = manifest.num_bytes if manifest else 0
    if space.free < 2 * needed or space.free < _LEAST_FREE * space.total:
        found.append(
            f"the disk is nearly full: {space.free / 1e9:.1f} GB free of {space.total / 1e9:.1f}, "
            f"a checkpoint takes {needed / 1e9:.1f}: free space, or lower checkpoint.keep"
        )
    return found


def _divergence_warnings(lines: list[dict[str, Any]], train: list[dict[str, Any]]) -> list[str]:
    """Report the newest divergence, unless the loss came back down since."""
    told = [line for line in lines if line["kind"] == "divergence"]
    losses = [line["loss"] for line in train if line["loss"] is not None]
    if not told or not losses or losses[-1] < told[-1]["limit"]:
        return []
    newest = told[-1]
    guess = newest["uniform_guess"]
    beside = "" if guess is None else f", a uniform guess has {guess:.3f}"
    return [
        f"diverged: the loss is {losses[-1]:.3f}, high since batch {newest['since_batch']:.0f}; "
        f"the best was {newest['best']:.3f}{beside}: its log and TensorBoard's texts list the "
        "likely causes"
    ]


def _plateau_warnings(lines: list[dict[str, Any]], train: list[dict[str, Any]]) -> list[str]:
    """Report the newest plateau, unless the run has learned since."""
    told = [line for line in lines if line["kind"] == "plateau"]
    losses = [line["loss"] for line in train if line["loss"] is not None]
    if not told or not losses:
        return []
    if statistics.fmean(losses) < told[-1]["limit"]:
        return []
    newest = told[-1]
    return [
        f"plateau: the loss stayed at {newest['loss']:.3f} from step {newest['since']:.0f} to "
        f"{newest['step']}, the unigram entropy is {newest['unigram_entropy']:.3f}: the run learns "
        "no more than how frequent tokens are; its log and TensorBoard's texts list what to change"
    ]


def _rank_warnings(lines: list[dict[str, Any]], run: RunFolder) -> list[str]:
    """Name the rank that was slow last, and the one that hung last."""
    found = []
    slow = [line for line in lines if line["kind"] == "straggler"]
    if slow:
        found.append(
            f"rank {slow[-1]['rank']:.0f} needed {slow[-1]['factor']:.2f} times as long as the "
            f"other ranks at step {slow[-1]['step']}: the log says on which host"
        )
    hangs = sorted(run.hangs.glob("*.txt"), key=lambda path: path.stat().st_mtime)
    if hangs:
        with hangs[-1].open(encoding="utf-8") as file:
            found.append(f"{file.readline().strip()}: {len(hangs)} files in {hangs[-1].parent}")
    return found


def progress_lines(status: RunStatus) -> Iterator[Line]:
    """Describe how far the run is, and how good the model."""
    seen = status.glance
    yield progress_bar(status.step, status.num_steps, "step")
    if seen.share_done > status.step / status.num_steps:
        yield "done", f"{seen.share_done:.1%}, by the time budget"
    if status.stage is not None:
        yield "stage", status.stage
    yield from _loss_lines(seen)
    if status.result is not None:
        found = status.result
        scored = f"{found.metric} {found.score:.4f} on {found.scored_on}"
        yield "result", f"{scored}   majority {found.majority:.4f}"
    for name, score in status.dev.items():
        yield "dev", f"{number(score, '.4f')}  {name}   at step {status.held_out_step:,}"
    for name, probe in status.probes.items():
        accuracy = number(probe.accuracy, ".3f")
        at = f"majority {probe.majority:.3f}   at step {probe.step:,}"
        yield f"probe {name}", f"accuracy {accuracy}   {at}"
    yield "rate", number(seen.lr, ".3g")
    speed = number(status.tokens_per_s, ",.0f")
    yield "tokens", f"{number(status.tokens, ',')} seen, {speed}/s   epochs {seen.epochs_text}"
    if status.state != FINISHED:
        is_known = status.state != RUNNING and status.eta_s is not None
        training = " of training left" if is_known else ""
        life = f"   last sign of life {duration(status.idle_s)} ago"
        yield "ETA", f"{duration(status.eta_s)}{training}{life}"
    if seen.restarts or seen.rewinds:
        yield "restarts", _returns_text(seen)
    saved = status.checkpoint
    old = f"step {saved.step:,}, {duration(saved.age_s)} old" if saved else "none yet"
    yield "checkpoint", old


def _loss_lines(seen: Glance) -> Iterator[Line]:
    """Describe both losses, and what a model has that knows little."""
    for name, track in (("loss", seen.loss), ("held-out", seen.held_out)):
        yield name, _track_text(track) if track else "none yet"
    if seen.uniform_guess is not None or seen.unigram_entropy is not None:
        entropy, guess = number(seen.unigram_entropy, ".4f"), number(seen.uniform_guess, ".4f")
        yield "to beat", f"unigram entropy {entropy}   uniform guess {guess}"


def _track_text(track: LossTrack) -> str:
    ends = [("first", track.first, track.first_step), ("best", track.best, track.best_step)]
    newest = f"{number(track.newest, '.4f')} at step {track.step:,}"
    return "   ".join(
        [newest, *(f"{name} {number(loss, '.4f')} at {step:,}" for name, loss, step in ends)]
    )


def _returns_text(seen: Glance) -> str:
    parts = []
    for before, steps, where in (("", seen.restarts, "from"), ("rewinds ", seen.rewinds, "to")):
        last = f", the last {where} step {steps[-1]:,}" if steps else ""
        parts.append(f"{before}{len(steps)}{last}")
    return "; ".join(parts)


def begin_text(start: StartRecord) -> str:
    """Describe where a start began."""
    step = start.resumed_from_step
    return "from step 0" if step is None else f"from step {step:,}"
