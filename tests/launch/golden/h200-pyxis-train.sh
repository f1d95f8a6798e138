#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --comment=/shared/me/runs/mine
#SBATCH --output=/shared/me/slurm-%j.log
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=24
#SBATCH --time=2-00:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --partition=h200
#SBATCH --account=my_project
#SBATCH --qos=normal
#SBATCH --gres=gpu:h200:8
#SBATCH --exclusive
#SBATCH --switches=1
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes

# SLURM says when the job ends from version 23.02 on; before, this is late by what its start took.
end_s=${SLURM_JOB_END_TIME:-$(($(date +%s) + 172800))}
asked_to_stop=0 after=start code=0 step= asking= at= is_missing=
# 1: time is nearly up; 2: before that, by a preemption or a person.
trap 'asked_to_stop=$((end_s - $(date +%s) > 1200 ? 2 : 1)); ask_ranks 2>/dev/null || :' USR1
export SLURM_EXPORT_ENV=ALL
export NCCL_SOCKET_IFNAME=eth0
export NCCL_IB_HCA=mlx5
export NCCL_DEBUG=WARN
export POSTNORM_SCRATCH="/raid/scratch"
run_dir=runs/mine
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' ') launch_dir=$run_dir/launch
export POSTNORM_RUN_DIR="$run_dir" MASTER_ADDR=${nodes%% *}
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
restarts=${SLURM_RESTART_COUNT:-0} before_this=0 job=${SLURM_JOB_ID:-}
starts=$((before_this + restarts)) excluded=$launch_dir/excluded
# An element of an array is requeued by its own name: the last one's id is the whole array's.
[ -n "${SLURM_ARRAY_JOB_ID:-}" ] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
# Sends the job back to the queue, never to start on excluded nodes, and waits for SLURM to end it.
try() { for ((n = 0; n < $1; n++)); do "${@:3}" && return; sleep "$2"; done; return 1; }
requeue() {
  without=${1:-$(paste -sd, "$excluded" 2>/dev/null)} ended=
  trap 'ended=1' TERM
  try 10 30 eval 'scontrol requeue "$job" || [ -n "$ended" ]' ||
    { echo "end: the job could not be requeued, submit it again"; exit 1; }
  try 300 1 eval '[ -n "$ended" ]'
  [ -z "$without" ] || try 10 1 scontrol update jobid="$job" excnodelist="$without"; exit 0
}
# Runs a command where storage shows what starts Python, and the folders of the job.
look() {
  for file in /lustre/my_project/postnorm.sqsh; do
    [ -r "$file" ] || [ -x "$file" ] || { [ ! -e "$file" ] && [ ! -L "$file" ] &&
      ls "${file%/*}/" >/dev/null; } || { echo "$file cannot be read"; return 1; }
  done
  cd /shared/me && mkdir -p "$launch_dir" && ls -d /shared/me >/dev/null && "$@"
}
# The same here, in the work folder, again while storage fails.
ready() {
  for ((left = 600; ; left -= 10)); do
    said=$(export LC_ALL=C; look "$@" 2>&1) && cd /shared/me && return
    said=${said//$'\n'/; }
    [[ $said != *"No space left"* && $said != *"quota exceeded"* ]] ||
      { echo "end: $launch_dir is full: $said; free space or inodes, submit again"; exit 28; }
    [ $((end_s - $(date +%s))) -ge 20 ] || [ "$starts" -ge 50 ] ||
      { echo "requeue: storage fails, and the time limit is near: $said"; requeue; }
    [ "$left" -gt 0 ] && echo "storage fails, trying again: $said" && sleep 10 || break
  done
  accuse
  echo "end: storage failed for 600 s (storage_patience_s), submit later: $said"; exit 1
}
set -u +e
# Asks another node of the job: what that one reaches, it goes on without this one to.
accuse() {
  at=${nodes##* } after=storage
  [ "$at" != "$MASTER_ADDR" ] && order=$(supervise) || return
  [ "${order%% *}" != requeue ] || requeue "${order#requeue }"
}
check() {
  exec timeout --kill-after=10 180 srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 \
    --ntasks="$SLURM_JOB_NUM_NODES" --container-image=/lustre/my_project/postnorm.sqsh --container-mounts=/shared/me:/shared/me,/lustre/my_project:/lustre/my_project,"$POSTNORM_SCRATCH":"$POSTNORM_SCRATCH" --container-workdir=/shared/me --no-container-mount-home bash -c 'exec env NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 NCCL_DEBUG=WARN python3 -m launch preflight check train.yaml train.lr=3e-4 --cluster configs/cluster/h200-pyxis.yaml --records "$1"' check "$launch_dir/preflight/$job.$restarts"
}
ranks() {
  trap '' USR1  # srun passes it on all the same; by default it would die before it can
  exec srun --kill-on-bad-exit=1 --wait=60 --cpus-per-task="$SLURM_CPUS_PER_TASK" --label \
    --cpu-bind=cores --distribution=block:block --container-image=/lustre/my_project/postnorm.sqsh --container-mounts=/shared/me:/shared/me,/lustre/my_project:/lustre/my_project,"$POSTNORM_SCRATCH":"$POSTNORM_SCRATCH" --container-workdir=/shared/me --no-container-mount-home bash -c 'trap '"'"''"'"' USR1 USR2; export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}; exec env NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 NCCL_DEBUG=WARN python3 -m pipeline pretrain train.yaml train.lr=3e-4'
}
# Asks until the ranks have gone; if they hang, leaves time to requeue before the time limit.
ask_ranks() {
  [ -n "$step" ] && [ -z "$asking" ] || return
  for ((left = 870; left > 0; left -= 5)); do kill -USR1 "$step" || exit; sleep 5; done &&
    echo "ranks do not stop: killing them" && kill -KILL "$step" &
  asking=$!
}
# Prints lines for the log, and last the order: a step, requeue, or the end of the job.
supervise() {
  ${at:+timeout --kill-after=10 120} srun --nodes=1 --ntasks=1 --overlap ${at:+--chdir=/shared/me --nodelist="$at"} --container-image=/lustre/my_project/postnorm.sqsh --container-mounts=/shared/me:/shared/me,/lustre/my_project:/lustre/my_project,"$POSTNORM_SCRATCH":"$POSTNORM_SCRATCH" --container-workdir=/shared/me --no-container-mount-home env NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 NCCL_DEBUG=WARN python3 -m launch supervise "$run_dir" train.yaml train.lr=3e-4 --cluster configs/cluster/h200-pyxis.yaml --kind pretrain --ranks 64 --max-restarts 50 --max-attempts 2 --max-excluded 4 --time-limit 2-00:00:00 --patience 600 \
    --job "$job" --restart "$restarts" --jobs-before "$before_this" --nodes "$nodes" \
    --asked-to-stop "$asked_to_stop" --step-code "$code" --job-ends "$end_s" \
    --after "$after" | tail -n 1
  return "${PIPESTATUS[0]}"
}
while ready; order=$(supervise); verdict=$?; do
  case "$verdict $order" in
    "0 exit "*) exit "${order#exit }" ;;
    "0 requeue") requeue ;;
    "0 check" | "0 measure" | "0 ranks")
      "$order" & pid=$!
      [ "$order" != ranks ] || step=$pid
      [ "$asked_to_stop" = 0 ] || ask_ranks 2>/dev/null
      while wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null; do :; done
      wait "$pid" 2>/dev/null; again=$?; [ "$again" = 127 ] || code=$again; after=$order ;;
    12[67]" "*)
      [ -n "$is_missing" ] || { is_missing=1; continue; }  # it may have gone just now
      echo "end: the launcher cannot be started (exit code $verdict), see above: correct python" \
        "("python3"), container or setup of the profile"; exit "$verdict" ;;
    *)
      ready eval 'echo "${job%_*}" >>"$launch_dir/unjudged"'
      times=$(grep -cxF "${job%_*}" "$launch_dir/unjudged")
      echo "no verdict (exit code $verdict), attempt $times of 2 in a row"
      [ "$times" -lt 2 ] && [ "$starts" -lt 50 ] && requeue
      echo "end: $times attempts in a row came to no verdict (max_attempts_without_progress)," \
        "$starts restarts of 50; see above"; exit 1 ;;
  esac
done
