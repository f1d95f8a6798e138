"""The job script of a run as pure text: config in, sbatch script out.

The script relies on these facts (measured on SLURM 22.05): the batch script hears SIGUSR1 only in a
background `wait` loop, and dies of it before it has a trap; ranks that are still starting do not
hear it, so it is repeated; srun's exit code says little, so files of this attempt decide
(`launch.decide`); SLURM truncates logs on requeue unless told to append; a node failure or
preemption requeues the job by itself, so the script starts the same way each time.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.cluster import ClusterConfig
from launch.decide import EXIT_FULL
from launch.records import EXCLUDED_FILE, FOLDER, MULTITASK, PRETRAIN
from launch.script_parts import (
    CHAIN,
    CLOCK,
    function_lines,
    rank_options,
    sbatch_lines,
    sbatch_resources,
    setup_lines,
    slurm_path,
    srun_words,
    wrapped,
)
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, EXIT_PREEMPTED, EXIT_STOPPED
from pipeline.runtime.env import RUN_DIR_VARIABLE

RUN = f"${RUN_DIR_VARIABLE}/"
"""The folder of a run that only the element of an array knows."""
_SECONDS_TO_REQUEUE = 30
"""Time before the limit that the script keeps for itself."""
_BANDWIDTH_S = 180
"""Time after which a measurement that hangs gives up."""
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
    start = _START.format(
        launcher=_launcher(job, cluster), mounts=" ".join(map(shlex.quote, job.mounts))
    )
    decide_options = (
        f"--kind {job.kind} --ranks {cluster.num_ranks} --max-restarts {cluster.max_restarts} "
        f"--max-attempts {cluster.max_attempts_without_progress} "
        f"--time-limit {cluster.time_limit} --patience {cluster.storage_patience_s}"
    )
    ranks = _RANKS.format(command=_words(job, cluster, job.words, gpus=True))
    attempt = _ATTEMPT.format(
        decide_options=decide_options,
        max_restarts=cluster.max_restarts,
        max_attempts=cluster.max_attempts_without_progress,
        full=EXIT_FULL,
        python=shlex.quote(cluster.python),
        finished=EXIT_FINISHED,
        do_not_retry=EXIT_FAILED_DO_NOT_RETRY,
        stopped=EXIT_STOPPED,
        again=EXIT_PREEMPTED,
        patience=cluster.stop_before_end_s - _SECONDS_TO_REQUEUE,
        ranks=f"{rank_options(cluster)} {_step(job, cluster, ranks)}".strip(),
    )
    folders = _FOLDERS.format(launch_folder=FOLDER, excluded=EXCLUDED_FILE)
    exclude = f"{cluster.exclude}," if cluster.exclude else ""
    accuse = _ACCUSE.format(
        exclude=exclude,
        max_excluded=cluster.max_excluded_nodes,
        max_restarts=cluster.max_restarts,
        work_dir=shlex.quote(job.work_dir),
        timeout=_SRUN_S,
    )
    in_chain = not (cluster.requeue or job.runs)
    parts = [
        "#!/bin/bash",
        *sbatch_lines(_options(job, cluster), requeue=cluster.requeue),
        "",
        _TRAP,
        *([CHAIN.format(again=EXIT_PREEMPTED)] if in_chain else []),
        CLOCK.format(time_limit=cluster.time_limit_s),
        *setup_lines(cluster),
        *_run_dir(job),
        f'export {RUN_DIR_VARIABLE}="$run_dir"',
        folders,
        accuse,
        *function_lines(
            cluster,
            job.start,
            job.work_dir,
            '  accuse "$1"\n',
            "" if in_chain else f"exit {EXIT_PREEMPTED}",
        ),
        start,
        *_preflight(job, cluster),
        attempt,
        _REQUEUE_WITHOUT.format(exclude=exclude),
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
        "output": f"{slurm_path(job.log_dir)}/slurm-{log}.log",
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
        **sbatch_resources(cluster),
    }


def _preflight(job: Job, cluster: ClusterConfig) -> list[str]:
    """Write the part that checks the nodes, for runs whose profile enables it."""
    preflight = cluster.preflight
    if job.words[1] not in (PRETRAIN, MULTITASK) or not preflight.enabled:
        return []
    profile = ["--cluster", job.profile] if job.profile else []
    options = [*job.words[2:], *profile]
    check = _words(job, cluster, ["launch", "preflight", "check", *options], gpus=True)
    measure = []
    if preflight.bandwidth_gb_per_s:
        command = _words(
            job, cluster, ["pipeline", "bandwidth", "--timeout", str(_BANDWIDTH_S)], gpus=True
        )
        inner = _RANKS.format(command=f'{command} --records "$1" --nodes "$2"')
        measure.append(
            _MEASURE.format(
                timeout=_BANDWIDTH_S + _SRUN_S,
                ranks=f"{rank_options(cluster)} {_step(job, cluster, inner)} bandwidth",
            )
        )
    return [
        _PREFLIGHT.format(
            timeout=preflight.timeout_s + _SRUN_S,
            check=_step(job, cluster, f'exec {check} --records "$1"') + " check",
            measure="".join(measure),
            options=" ".join(_quoted(job, word) for word in options),
            again=EXIT_PREEMPTED,
            do_not_retry=EXIT_FAILED_DO_NOT_RETRY,
            max_restarts=cluster.max_restarts,
        )
    ]


def _step(job: Job, cluster: ClusterConfig, text: str) -> str:
    """Write the words that srun runs for shell text, in the container if there is one."""
    words = srun_words(cluster, job.mounts, work_dir=job.work_dir)
    return " ".join([*words, "bash", "-c", shlex.quote(text)])


def _words(job: Job, cluster: ClusterConfig, words: Sequence[str], *, gpus: bool) -> str:
    """Write shell text that runs a module, in the container if there is one."""
    plain = [_quoted(job, word) for word in (cluster.python, *job.start, *words)]
    return " ".join(wrapped(cluster, job.mounts, plain, work_dir=job.work_dir, gpus=gpus))


def _quoted(job: Job, word: str) -> str:
    return f'"{word}"' if job.runs and word.startswith(RUN) else shlex.quote(word)


def _launcher(job: Job, cluster: ClusterConfig) -> str:
    """Write shell text that runs the launcher on the first node, where the batch script is."""
    words = _words(job, cluster, ["launch"], gpus=False)
    options = srun_words(cluster, job.mounts, work_dir=job.work_dir)
    if options:  # only srun can start a pyxis container
        words = " ".join(["srun", "--nodes=1", "--ntasks=1", "--overlap", *options, words])
    return words


# One task: map SLURM's variables to those of the process group, then become the trainer.
# Signals are ignored until Python has its handlers: by default they would kill the task.
_RANKS = (
    "trap '' USR1 USR2; "
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    "OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}; exec {command}"
)

# Before the setup lines: SIGUSR1 without a trap ends the job.
_TRAP = """\
asked_to_stop=0 go=1 step= asking=
trap 'asked_to_stop=1; ask_ranks 2>/dev/null || :' USR1"""

_FOLDERS = """\
launch_dir=$run_dir/{launch_folder}
excluded=$launch_dir/{excluded}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' ')"""

_ACCUSE = """\
# A path that another node of the job reaches is this node's fault: that one notes this one, which
# the job goes on without.
accuse() {{
  local this=${{SLURMD_NODENAME:-$(hostname -s)}} other= node bad
  for node in $nodes; do [ "$node" = "$this" ] || other=$node; done
  [ -n "$other" ] && [ "$starts" -lt {max_restarts} ] || return
  bad=$(timeout --kill-after=10 {timeout} srun --overlap --chdir=/ --nodes=1 --ntasks=1 \\
    --nodelist="$other" bash -c 'cd "$1" && ls -d "$2" >/dev/null && mkdir -p "${{3%/*}}" || exit
      [ "$4" -gt 0 ] || rm -f "$3"
      [ "$(cat "$3" 2>/dev/null | wc -l)" -lt {max_excluded} ] || exit
      echo "$5" >>"$3" && paste -sd, "$3"
    ' bash {work_dir} "$1" "$excluded" "$starts" "$this") || return
  echo "requeue: bad node $this: $1: $said; node $other reaches it"
  without={exclude}$bad
  requeue
}}"""

_START = """\
export MASTER_ADDR=${{nodes%% *}} MASTER_PORT
# Below 32768, where Linux takes the ports of outgoing connections from.
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
storage "$run_dir" mkdir -p "$launch_dir"
for folder in {mounts}; do storage "$folder" ls -d "$folder"; done
# Attempts of this job in a row of which no verdict is known: that is counted here, whatever fails.
unjudged=0
{{ read -r of count <"$launch_dir/unjudged"; }} 2>/dev/null
[ "${{of:-}}" = "${{job%_*}}" ] && [[ ${{count:-}} =~ ^[0-9]+$ ]] && unjudged=$count
storage "$launch_dir" put "${{job%_*}} $unjudged" "$launch_dir/unjudged"
# Submitted by a person: other nodes may be bad by now.
[ "$starts" -gt 0 ] || rm -f "$excluded"
before=$(cat "$run_dir/checkpoints/latest" 2>/dev/null)
echo "start: job $job, restart $restarts, nodes $nodes, checkpoint ${{before:-none}}"

launcher() {{
  {launcher} "$@"
}}
# `wait` returns at each signal, and may not have seen the end of a process that is gone.
await() {{
  while :; do
    wait "$1"; code=$?
    kill -0 "$1" 2>/dev/null || break
  done
  wait "$1" 2>/dev/null; again=$?
  [ "$again" = 127 ] || code=$again
  return "$code"
}}"""

# srun goes on without nodes that fail, as it is their missing records that are wanted.
_PREFLIGHT = """\
judge() {{
  launcher preflight judge {options} --records "$records" --nodes "$nodes" \\
    --job "$job" --restart "$restarts" "$@"
}}
preflight() {{
  records=$launch_dir/preflight/$SLURM_JOB_ID.$restarts
  mkdir -p "$records" && date +%s.%N >"$records/started" || return 1
  timeout --kill-after=10 {timeout} srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 \\
    --ntasks="$SLURM_JOB_NUM_NODES" {check} "$records"
  judge || return
{measure}}}
if [ "$asked_to_stop" = 0 ]; then
  preflight &
  await $!
  case $? in
    0) go=1 ;;
    {do_not_retry}) echo "end: no other node cures what preflight found"; exit {do_not_retry} ;;
    {again})
      go=0
      if [ "$starts" -ge {max_restarts} ]; then
        echo "end: bad nodes after $starts restarts (max_restarts)"; exit {do_not_retry}
      fi ;;
    *) go=1; echo "preflight came to no verdict: going on without" ;;
  esac
fi"""

_MEASURE = """\
  timeout --kill-after=10 {timeout} srun --no-kill --kill-on-bad-exit=0 \\
    {ranks} "$records" "$nodes"
  judge --bandwidth
"""

# `done.json` may be of an earlier, shorter run; `scontrol requeue` fails while the controller
# restarts; a signal to ranks that still start is lost. A late SIGUSR1 may reach a later start
# (seen on a loaded machine): a restart, no step.
_ATTEMPT = """\
run_ranks() {{
  trap '' USR1  # srun passes it on all the same; by default it would die before it can
  exec srun --kill-on-bad-exit=1 --wait=60 --cpus-per-task="$SLURM_CPUS_PER_TASK" --label \\
    {ranks}
}}
# Asks until the ranks have gone; if they hang, leaves time to requeue before the time limit.
ask_ranks() {{
  [ -n "$step" ] && [ -z "$asking" ] || return
  for ((left = {patience}; left > 0; left -= 5)); do
    kill -USR1 "$step" || exit
    sleep 5
  done && echo "ranks do not stop: killing them" && kill -KILL "$step" &
  asking=$!
}}
decide() {{
  launcher decide "$run_dir" {decide_options} \\
    --job "$job" --restart "$restarts" --jobs-before "$before_this" --nodes "$nodes" \\
    --before "$before" --asked-to-stop "$asked_to_stop" --step-code "$code" --job-ends "$end_s"
  verdict=$?
}}
if [ "$go" = 1 ]; then
  run_ranks &
  step=$!
  [ "$asked_to_stop" = 0 ] || ask_ranks 2>/dev/null
  await "$step"
  [ -z "$asking" ] || kill "$asking" 2>/dev/null
  ready; decide
  case $verdict in 126|127) ready; decide ;; esac
  case $verdict in
    {finished}|{do_not_retry}|{stopped}|{full}) exit "$verdict" ;;
    {again}) unjudged=0 ;;
    126|127)
      echo "end: the launcher cannot be started (exit code $verdict), see above:" {python} \\
        "is missing or may not be run; correct python, container or setup of the profile"
      exit "$verdict" ;;
    *)
      unjudged=$((unjudged + 1))
      echo "no verdict (exit code $verdict), attempt $unjudged of {max_attempts} in a row" ;;
  esac
  storage "$launch_dir" put "${{job%_*}} $unjudged" "$launch_dir/unjudged"
  if [ "$unjudged" -ge {max_attempts} ]; then
    echo "end: $unjudged attempts in a row came to no verdict (max_attempts_without_progress);" \\
      "the launcher's message is above"; exit 1
  elif [ "$unjudged" -gt 0 ] && [ "$starts" -ge {max_restarts} ]; then
    echo "end: not done after $starts restarts (max_restarts)"; exit 1
  fi
fi"""

# SLURM 22.05: a running job refuses excnodelist ("Job is no longer pending"), and after `scontrol
# requeue` nobody of the job is left but a script that traps SIGTERM. The job keeps its id.
_REQUEUE_WITHOUT = """\
without=$(paste -sd, "$excluded" 2>/dev/null)
[ -z "$without" ] || without={exclude}$without
requeue
"""
