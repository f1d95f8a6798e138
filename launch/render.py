"""sbatch scripts as pure text: config in, script out.

What the script relies on (measured on SLURM 22.05): the batch script hears SIGUSR1 only in a
background `wait` loop, and dies of it before it has a trap; ranks that are still starting do not
hear it, so it is repeated; srun's exit code says little, so marker files of this attempt decide;
SLURM truncates logs on requeue unless told to append; a node failure or preemption requeues the
job by itself, so the script starts the same way each time.
"""

import shlex
from pathlib import Path

from launch.cluster import ClusterConfig
from launch.script import REQUEUE, sbatch_lines, slurm_path
from pipeline.config.run import PretrainConfig
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, EXIT_STOPPED
from pipeline.runtime.env import RUN_DIR_VARIABLE

_SECONDS_TO_REQUEUE = 20
"""What the script keeps for itself of the time before the limit."""


def render(
    config: PretrainConfig,
    cluster: ClusterConfig,
    *,
    config_path: str,
    overrides: list[str],
    work_dir: str,
) -> str:
    """Text of a job script for one pre-training run.

    Args:
        config: the run; checked here so that a wrong one never waits in a queue.
        cluster: where it runs.
        config_path: the run's YAML file, given to the trainer.
        overrides: `section.key=value` texts, given to the trainer.
        work_dir: folder that relative paths start at.

    Raises:
        ConfigError: the batch does not split over the ranks, or SLURM cannot use `work_dir`.
    """
    config.batches.require_split(cluster.nodes * cluster.num_ranks_per_node)
    run_dir = config.run_dir
    command = shlex.join([cluster.python, "-m", "pipeline", "pretrain", config_path, *overrides])
    parts = [
        "#!/bin/bash",
        *sbatch_lines(_options(config, cluster, work_dir)),
        "",
        _TRAP,
        *cluster.setup,
        "set -u +e",
        f"cd {shlex.quote(work_dir)} || exit 1",
        f"run_dir={shlex.quote(run_dir)}",
        f'export {RUN_DIR_VARIABLE}="$run_dir"',
        _BODY.format(
            max_restarts=cluster.max_restarts,
            max_attempts=cluster.max_attempts_without_progress,
            finished=EXIT_FINISHED,
            do_not_retry=EXIT_FAILED_DO_NOT_RETRY,
            stopped=EXIT_STOPPED,
            patience=cluster.stop_before_end_s - _SECONDS_TO_REQUEUE,
            inner=shlex.quote(_RANK_COMMAND.format(command=command)),
        )
        + REQUEUE,
    ]
    return "\n".join(parts)


def _options(config: PretrainConfig, cluster: ClusterConfig, work_dir: str) -> dict[str, object]:
    return {
        "job-name": shlex.quote(Path(config.run_dir).name or "pretrain"),
        # A folder that exists: SLURM makes none, and a job without a log fails without a word.
        "output": f"{slurm_path(work_dir)}/slurm-%j.log",
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.num_ranks_per_node,
        "cpus-per-task": cluster.cpus_per_rank,
        "time": cluster.time_limit,
        "signal": f"B:USR1@{cluster.stop_before_end_s}",
        "gpus-per-node": cluster.gpus_per_node or "",
        "mem": cluster.mem_per_node,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
    }


# One task: SLURM's names to those of the process group, then the trainer in its place.
# Signals are ignored until Python has its handlers: by default they would kill the task.
_RANK_COMMAND = (
    "trap '' USR1 USR2; RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    "OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}} exec {command}"
)

# Before the setup lines: SIGUSR1 without a trap ends the job.
_TRAP = """\
asked_to_stop=0 step= asking=
trap 'asked_to_stop=1; ask_ranks 2>/dev/null || :' USR1"""

_BODY = """\
restarts=${{SLURM_RESTART_COUNT:-0}}
job=$SLURM_JOB_ID
# An element of an array is requeued by its own name: the last one's id is the whole array's.
[ -n "${{SLURM_ARRAY_JOB_ID:-}}" ] && job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
export MASTER_ADDR MASTER_PORT
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Below 32768, where Linux takes the ports of outgoing connections from.
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))

newest() {{ cat "$run_dir/checkpoints/latest" 2>/dev/null; }}
before=$(newest)
mkdir -p "$run_dir"
misses_file=$run_dir/attempts-without-progress
# Submitted by a person, who may have mended what stopped the last job.
[ "$restarts" -gt 0 ] || rm -f "$misses_file"
echo "start: job $job, restart $restarts, nodes $SLURM_JOB_NODELIST, checkpoint ${{before:-none}}"

run_ranks() {{
  trap '' USR1  # srun passes it on all the same; by default it would die before it can
  exec srun --kill-on-bad-exit=1 --wait=60 --cpus-per-task="$SLURM_CPUS_PER_TASK" --label \\
    bash -c {inner}
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
run_ranks &
step=$!
[ "$asked_to_stop" = 0 ] || ask_ranks 2>/dev/null
# `wait` returns at each signal; the step is over when its process is.
code=0
while :; do
  wait "$step"; code=$?
  kill -0 "$step" 2>/dev/null || break
done
[ -z "$asking" ] || kill "$asking" 2>/dev/null

after=$(newest)
exits=$run_dir/exit/$SLURM_JOB_ID.$restarts
misses=0
[ "$after" = "$before" ] && misses=$(( $(cat "$misses_file" 2>/dev/null || echo 0) + 1 ))
echo "$misses" >"$misses_file"
state="stopped=$asked_to_stop, srun exit code $code, checkpoint ${{after:-none}}"
# done.json alone may be of an earlier, shorter run.
if [ -e "$run_dir/done.json" ] && grep -qsx {finished} "$exits/rank-00000"; then
  echo "end: done"; exit 0
elif grep -qsx {do_not_retry} "$exits"/*; then
  echo "end: a rank says that trying again is no use, see its message above; $state"
  exit {do_not_retry}
elif grep -qsx {stopped} "$exits"/*; then
  echo "end: stopped by $run_dir/STOP; remove it and submit again to continue; $state"
  exit {stopped}
elif [ "$restarts" -ge {max_restarts} ]; then
  echo "end: not done after $restarts restarts (max_restarts); $state"; exit 1
elif [ "$misses" -ge {max_attempts} ]; then
  echo "end: $misses attempts without a new checkpoint (max_attempts_without_progress); $state"
  exit 1
fi
echo "requeue: $state"
"""
