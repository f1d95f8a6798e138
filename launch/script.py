"""The job script of a run as pure text: config in, sbatch script out.

The script asks `launch supervise` (`launch.supervise`) what to do and does it, until that ends the
job; bash keeps signals, srun and what must work where Python cannot be started. It relies on these
facts (measured on SLURM 22.05): the batch script hears SIGUSR1 only in a background `wait` loop,
and dies of it before it has a trap; ranks that are still starting do not hear it, so it is
repeated; SLURM truncates logs on requeue unless told to append; a node failure or preemption
requeues the job by itself, so the script starts the same way each time.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import script_parts
from launch.cluster import ClusterConfig
from launch.records import EXCLUDED_FILE, FOLDER, MULTITASK, PRETRAIN, PROGRAM, UNJUDGED_FILE
from pipeline.errors import EXIT_PREEMPTED
from pipeline.runtime.env import RUN_DIR_VARIABLE

RUN = f"${RUN_DIR_VARIABLE}/"
"""The folder of a run that only the element of an array knows."""
_SECONDS_TO_REQUEUE = 30
"""Time before the limit that the script keeps for itself."""
_SIGNAL_EARLY_S = 300
"""SLURM sends the signal up to a minute earlier than asked, and before 23.02 the clock is late."""
_BANDWIDTH_S = 180
"""Time after which a measurement that hangs gives up."""
_AT_S = 120
"""Time in which another node must start the launcher to say that it reaches the storage."""
_SRUN_S = 60
"""Time that srun may take to start a step and to end it."""


@dataclass(frozen=True)
class Job:
    """The command that a script runs, and the folders that it needs."""

    kind: str
    """PRETRAIN, EVALUATE or PROGRAM."""
    name: str
    """Name in the queue."""
    run_dir: str
    words: tuple[str, ...]
    """Module and arguments of a rank."""
    work_dir: str
    """Absolute path; relative paths start there."""
    start: tuple[str, ...]
    """Words between the interpreter and a module's name: `-m`, or a file that runs modules of a
    copy of the code."""
    log_dir: str
    """Folder of the job's log, which must exist."""
    mounts: tuple[str, ...]
    """Absolute paths of the folders that a container needs."""
    profile: str | None = None
    """File of the cluster profile, for preflight; the defaults if None."""
    runs: tuple[str, ...] = ()
    """Folders of the runs of a sweep, each an element of a job array, for which `run_dir` is the
    folder of the sweep. A word that begins with `RUN` lies in the element's own."""
    at_once: int = 1
    """Largest number of elements that run at the same time."""


def render(job: Job, cluster: ClusterConfig) -> str:
    """Render a job script. Pure."""
    in_chain = not (cluster.requeue or job.runs)
    folders = 'mkdir -p "$launch_dir" && ls -d ' + " ".join(map(shlex.quote, job.mounts))
    parts = [
        "#!/bin/bash",
        *script_parts.sbatch_lines(_options(job, cluster), requeue=cluster.requeue),
        "",
        script_parts.CLOCK.format(time_limit=cluster.time_limit_s),
        _TRAP.format(near_s=cluster.stop_before_end_s + _SIGNAL_EARLY_S),
        *([script_parts.CHAIN.format(again=EXIT_PREEMPTED)] if in_chain else []),
        *script_parts.setup_lines(cluster),
        *_run_dir(job),
        _VARIABLES.format(run_dir=RUN_DIR_VARIABLE, folder=FOLDER),
        *script_parts.function_lines(
            cluster,
            job.start,
            job.work_dir,
            folder="$launch_dir",
            excluded=f"$launch_dir/{EXCLUDED_FILE}",
            folders=f"{folders} >/dev/null",
            last_resort="  accuse\n",
            end="" if in_chain else f"exit {EXIT_PREEMPTED}",
        ),
        _ACCUSE,
        *_steps(job, cluster),
        _ORDERS.format(
            supervise=_supervise(job, cluster),
            patience=cluster.stop_before_end_s - _SECONDS_TO_REQUEUE,
            python=shlex.quote(cluster.python),
            unjudged=UNJUDGED_FILE,
            max_attempts=cluster.max_attempts_without_progress,
            max_restarts=cluster.max_restarts,
        ),
    ]
    return "\n".join(parts)


def _run_dir(job: Job) -> list[str]:
    if not job.runs:
        return [f"run_dir={shlex.quote(job.run_dir)}"]
    folders = [f"  {shlex.quote(folder)}" for folder in job.runs]
    return ["runs=(", *folders, ")", "run_dir=${runs[SLURM_ARRAY_TASK_ID]}"]


def _options(job: Job, cluster: ClusterConfig) -> dict[str, object]:
    array, log = "", "%j"
    if job.runs:
        array, log = f"0-{len(job.runs) - 1}%{job.at_once}", "%A_%a"
    elif not cluster.requeue:
        # An array with one job at a time: all starts have one id, and nothing has to submit the
        # next.
        # One log for the chain.
        array, log = f"0-{cluster.max_restarts}%1", "%A"
    return {
        "array": array,
        "job-name": shlex.quote(job.name),
        # By this `launch` knows its jobs: their ids are given to others after a crash of the
        # controller.
        "comment": shlex.quote(str(Path(job.work_dir) / job.run_dir)),
        "output": f"{script_parts.slurm_path(job.log_dir)}/slurm-{log}.log",
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.num_ranks_per_node,
        "cpus-per-task": cluster.cpus_per_rank,
        "time": cluster.time_limit,
        # B: to this script alone. To the ranks it can come a second after their start, and kills
        # them before they have handlers.
        "signal": f"B:USR1@{cluster.stop_before_end_s}",
        "mem": cluster.mem_per_node,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        **script_parts.sbatch_resources(cluster),
    }


def _has_preflight(job: Job, cluster: ClusterConfig) -> bool:
    return job.words[1] in (PRETRAIN, MULTITASK) and cluster.preflight.enabled


def _steps(job: Job, cluster: ClusterConfig) -> list[str]:
    """Write the functions that an order names: each becomes srun."""
    steps = []
    if _has_preflight(job, cluster):
        words = ["launch", "preflight", "check", *_config_words(job)]
        check = f'exec {_words(job, cluster, words, gpus=True)} --records "$1"'
        timeout = cluster.preflight.timeout_s + _SRUN_S
        steps.append(_CHECK.format(timeout=timeout, check=_step(job, cluster, check)))
    if _has_preflight(job, cluster) and cluster.preflight.bandwidth_gb_per_s:
        words = ["pipeline", "bandwidth", "--timeout", str(_BANDWIDTH_S)]
        command = f'{_words(job, cluster, words, gpus=True)} --records "$1" --nodes "$2"'
        step = _step(job, cluster, _RANK.format(command=command))
        measure = f"{script_parts.rank_options(cluster)} {step}"
        steps.append(_MEASURE.format(timeout=_BANDWIDTH_S + _SRUN_S, measure=measure.strip()))
    command = _words(job, cluster, job.words, gpus=True)
    ranks = (
        f"{script_parts.rank_options(cluster)} {_step(job, cluster, _RANK.format(command=command))}"
    )
    # Of a program one rank may have more to do when the others are done: 0 is for ever.
    wait_s = 0 if job.kind == PROGRAM else 60
    return [*steps, _RANKS.format(ranks=ranks.strip(), wait_s=wait_s)]


def _config_words(job: Job) -> list[str]:
    """List the config of the ranks and the profile, as preflight and the orders read them."""
    return [*job.words[2:], *(["--cluster", job.profile] if job.profile else [])]


def _supervise(job: Job, cluster: ClusterConfig) -> str:
    """Write shell text that runs the launcher on the first node, where the batch script is."""
    words = _config_words(job) if _has_preflight(job, cluster) else []
    words += ["--kind", job.kind, "--ranks", str(cluster.num_ranks)]
    words += ["--max-restarts", str(cluster.max_restarts)]
    words += ["--max-attempts", str(cluster.max_attempts_without_progress)]
    words += ["--max-excluded", str(cluster.max_excluded_nodes)]
    words += ["--time-limit", cluster.time_limit, "--patience", str(cluster.storage_patience_s)]
    verb = _words(job, cluster, ["launch", "supervise"], gpus=False)
    text = [verb, '"$run_dir"', *(_quoted(job, word) for word in words)]
    # At another node, which may not reach the run either.
    timeout, step = f"timeout --kill-after=10 {_AT_S}", "srun --nodes=1 --ntasks=1 --overlap"
    there = f'--chdir={shlex.quote(job.work_dir)} --nodelist="$at"'
    options = script_parts.srun_words(cluster, job.mounts, work_dir=job.work_dir)
    if options:  # only srun can start a pyxis container
        return " ".join([f"${{at:+{timeout}}} {step} ${{at:+{there}}}", *options, *text])
    return " ".join([f"${{at:+{timeout} {step} {there}}}", *text])


def _step(job: Job, cluster: ClusterConfig, text: str) -> str:
    """Write the words that srun runs for shell text, in the container if there is one."""
    words = script_parts.srun_words(cluster, job.mounts, work_dir=job.work_dir)
    return " ".join([*words, "bash", "-c", shlex.quote(text)])


def _words(job: Job, cluster: ClusterConfig, words: Sequence[str], *, gpus: bool) -> str:
    """Write shell text that runs a module, in the container if there is one."""
    plain = [_quoted(job, word) for word in (cluster.python, *job.start, *words)]
    return " ".join(
        script_parts.wrapped(cluster, job.mounts, plain, work_dir=job.work_dir, gpus=gpus)
    )


def _quoted(job: Job, word: str) -> str:
    return f'"{word}"' if job.runs and word.startswith(RUN) else shlex.quote(word)


# One task: map SLURM's variables to those of the process group, then become the trainer.
# Signals are ignored until Python has its handlers: by default they would kill the task.
_RANK = (
    "trap '' USR1 USR2; "
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    "OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}; exec {command}"
)

# Before the setup lines: SIGUSR1 without a trap ends the job.
_TRAP = """\
asked_to_stop=0 after=start code=0 step= asking= at= is_missing=
# 1: time is nearly up; 2: before that, by a preemption or a person.
trap 'asked_to_stop=$((end_s - $(date +%s) > {near_s} ? 2 : 1)); ask_ranks 2>/dev/null || :' USR1"""

# The port is below 32768, where Linux takes the ports of outgoing connections from.
_VARIABLES = """\
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' ') launch_dir=$run_dir/{folder}
export {run_dir}="$run_dir" MASTER_ADDR=${{nodes%% *}}
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))"""

# A path that another node reaches is this node's fault: that one notes this one.
_ACCUSE = """\
# Asks another node of the job: what that one reaches, it goes on without this one to.
accuse() {
  at=${nodes##* } after=storage
  [ "$at" != "$MASTER_ADDR" ] && order=$(supervise) || return
  [ "${order%% *}" != requeue ] || requeue "${order#requeue }"
}"""

# srun goes on without nodes that fail, as it is their missing records that are wanted.
_CHECK = """\
check() {{
  exec timeout --kill-after=10 {timeout} srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 \\
    --ntasks="$SLURM_JOB_NUM_NODES" {check} check "$launch_dir/preflight/$job.$restarts"
}}"""
_MEASURE = """\
measure() {{
  exec timeout --kill-after=10 {timeout} srun --no-kill --kill-on-bad-exit=0 \\
    {measure} bandwidth "$launch_dir/preflight/$job.$restarts" "$nodes"
}}"""
_RANKS = """\
ranks() {{
  trap '' USR1  # srun passes it on all the same; by default it would die before it can
  exec srun --kill-on-bad-exit=1 --wait={wait_s} --cpus-per-task="$SLURM_CPUS_PER_TASK" --label \\
    {ranks}
}}"""

# `wait` returns at each signal, and may not have seen the end of a process that is gone. A late
# SIGUSR1 may reach a later start (seen on a loaded machine): a restart, no step. A signal to ranks
# that still start is lost: it is repeated.
_ORDERS = """\
# Asks until the ranks have gone; if they hang, leaves time to requeue before the time limit.
ask_ranks() {{
  [ -n "$step" ] && [ -z "$asking" ] || return
  for ((left = {patience}; left > 0; left -= 5)); do kill -USR1 "$step" || exit; sleep 5; done &&
    echo "ranks do not stop: killing them" && kill -KILL "$step" &
  asking=$!
}}
# Prints lines for the log, and last the order: a step, requeue, or the end of the job.
supervise() {{
  {supervise} \\
    --job "$job" --restart "$restarts" --jobs-before "$before_this" --nodes "$nodes" \\
    --asked-to-stop "$asked_to_stop" --step-code "$code" --job-ends "$end_s" \\
    --after "$after" | tail -n 1
  return "${{PIPESTATUS[0]}}"
}}
while ready; order=$(supervise); verdict=$?; do
  case "$verdict $order" in
    "0 exit "*) exit "${{order#exit }}" ;;
    "0 requeue") requeue ;;
    "0 check" | "0 measure" | "0 ranks")
      "$order" & pid=$!
      [ "$order" != ranks ] || step=$pid
      [ "$asked_to_stop" = 0 ] || ask_ranks 2>/dev/null
      while wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null; do :; done
      wait "$pid" 2>/dev/null; again=$?; [ "$again" = 127 ] || code=$again; after=$order ;;
    12[67]" "*)
      [ -n "$is_missing" ] || {{ is_missing=1; continue; }}  # it may have gone just now
      echo "end: the launcher cannot be started (exit code $verdict), see above: correct python" \\
        "("{python}"), container or setup of the profile"; exit "$verdict" ;;
    *)
      ready eval 'echo "${{job%_*}}" >>"$launch_dir/{unjudged}"'
      times=$(grep -cxF "${{job%_*}}" "$launch_dir/{unjudged}")
      echo "no verdict (exit code $verdict), attempt $times of {max_attempts} in a row"
      [ "$times" -lt {max_attempts} ] && [ "$starts" -lt {max_restarts} ] && requeue
      echo "end: $times attempts in a row came to no verdict (max_attempts_without_progress)," \\
        "$starts restarts of {max_restarts}; see above"; exit 1 ;;
  esac
done
"""
