#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --comment=/shared/me/runs/mine
#SBATCH --output=/shared/me/slurm-%j.log
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --mem=480G
#SBATCH --partition=gpu
#SBATCH --account=my_project
#SBATCH --gres=gpu:a100:4
#SBATCH --constraint=ib
#SBATCH --exclusive
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes

asked_to_stop=0 go=1 step= asking=
trap 'asked_to_stop=1; ask_ranks 2>/dev/null || :' USR1
# SLURM says when the job ends from version 23.02 on; before, this is late by what its start took.
printf -v now '%(%s)T' -1
end_s=${SLURM_JOB_END_TIME:-$((now + 86400))}
export SLURM_EXPORT_ENV=ALL
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export NCCL_IB_HCA=mlx5_0,mlx5_1
export NCCL_DEBUG=WARN
export POSTNORM_SCRATCH="/scratch"
run_dir=runs/mine
export POSTNORM_RUN_DIR="$run_dir"
launch_dir=$run_dir/launch
excluded=$launch_dir/excluded
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' ')
# A path that another node of the job reaches is this node's fault: that one notes this one, which
# the job goes on without.
accuse() {
  local this=${SLURMD_NODENAME:-$(hostname -s)} other= node bad
  for node in $nodes; do [ "$node" = "$this" ] || other=$node; done
  [ -n "$other" ] && [ "$starts" -lt 50 ] || return
  bad=$(timeout --kill-after=10 60 srun --overlap --chdir=/ --nodes=1 --ntasks=1 \
    --nodelist="$other" bash -c 'cd "$1" && ls -d "$2" >/dev/null && mkdir -p "${3%/*}" || exit
      [ "$4" -gt 0 ] || rm -f "$3"
      [ "$(cat "$3" 2>/dev/null | wc -l)" -lt 4 ] || exit
      echo "$5" >>"$3" && paste -sd, "$3"
    ' bash /shared/me "$1" "$excluded" "$starts" "$this") || return
  echo "requeue: bad node $this: $1: $said; node $other reaches it"
  without=$bad
  requeue
}
restarts=${SLURM_RESTART_COUNT:-0} before_this=0
starts=$((before_this + restarts))
job=${SLURM_JOB_ID:-} without=
# An element of an array is requeued by its own name: the last one's id is the whole array's.
[ -n "${SLURM_ARRAY_JOB_ID:-}" ] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
# Sends the job back to the queue, never to start on nodes $without, and ends this script. SLURM
# ends it, too, once the job is requeued, and changes the excluded nodes only of a job that does not
# run: the script lives on until it has named them.
requeue() {
  ended=
  trap 'ended=1' TERM
  # The controller may be restarting.
  for try in 1 2 3 4 5 6 7 8 9 10; do
    if scontrol requeue "$job" || [ -n "$ended" ]; then
      # Leaving before SLURM says so would count as the end of the job.
      for ((left = 300; left > 0; left--)); do [ -z "$ended" ] || break; sleep 1; done
      for ((left = 10; left > 0; left--)); do
        [ -n "$without" ] || break
        scontrol update jobid="$job" excnodelist="$without" && break
        sleep 1
      done
      exit 0
    fi
    sleep 30
  done
  echo "end: the job could not be requeued, submit it again"; exit 1
}
# Runs a command on a path, again while storage fails. A full disk, which waiting does not cure, and
# storage that stays away end the job here, since nothing else could tell. A wait that would not end
# before the job's time does goes on in its next start.
storage() {
  for ((wait = 600; ; wait -= 10)); do
    said=$(export LC_ALL=C; "${@:2}" 2>&1) && return
    case $said in *"No space left"* | *"quota exceeded"*)
      echo "end: $1 is full: $said; free space or inodes there, then submit again"; exit 28 ;;
    esac
    printf -v now '%(%s)T' -1
    if [ $((end_s - now)) -lt 20 ] && [ "$starts" -lt 50 ]; then
      echo "requeue: storage fails, and the time limit is near: $1: $said"; requeue
    fi
    [ "$wait" -gt 0 ] || break
    echo "storage fails, trying again: $1: $said"
    sleep 10
  done
  accuse "$1"
  echo "end: $1: storage failed for 600 s (storage_patience_s): $said;" \
    "submit again later"
  exit 1
}
put() { printf '%s\n' "$1" >"$2"; }
# A path can be read, or is missing from a folder that can: then waiting for storage is no use.
reach() {
  if [ -r "$1" ] || [ -x "$1" ]; then return; fi
  if [ -e "$1" ] || [ -L "$1" ]; then echo "it cannot be read"; return 1; fi
  ls "${1%/*}/" >/dev/null
}
# Waits for what starts a command, the interpreter or the image and the code: a mount that is gone
# for a while hides them. Enters the work folder, anew if it was gone, too.
ready() {
  local file
  for file in /shared/my_project/images/postnorm.sif; do storage "$file" reach "$file"; done
  storage /shared/me cd /shared/me
  cd /shared/me || exit 1
}
set -u +e
ready
export MASTER_ADDR=${nodes%% *} MASTER_PORT
# Below 32768, where Linux takes the ports of outgoing connections from.
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
storage "$run_dir" mkdir -p "$launch_dir"
for folder in /shared/me; do storage "$folder" ls -d "$folder"; done
# Attempts of this job in a row of which no verdict is known: that is counted here, whatever fails.
unjudged=0
{ read -r of count <"$launch_dir/unjudged"; } 2>/dev/null
[ "${of:-}" = "${job%_*}" ] && [[ ${count:-} =~ ^[0-9]+$ ]] && unjudged=$count
storage "$launch_dir" put "${job%_*} $unjudged" "$launch_dir/unjudged"
# Submitted by a person: other nodes may be bad by now.
[ "$starts" -gt 0 ] || rm -f "$excluded"
before=$(cat "$run_dir/checkpoints/latest" 2>/dev/null)
echo "start: job $job, restart $restarts, nodes $nodes, checkpoint ${before:-none}"

launcher() {
  singularity exec --bind=/shared/me --bind=/shared/my_project --bind=/data:/data:ro --bind="$POSTNORM_SCRATCH" --pwd=/shared/me /shared/my_project/images/postnorm.sif env NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_DEBUG=WARN python3 -m launch "$@"
}
# `wait` returns at each signal, and may not have seen the end of a process that is gone.
await() {
  while :; do
    wait "$1"; code=$?
    kill -0 "$1" 2>/dev/null || break
  done
  wait "$1" 2>/dev/null; again=$?
  [ "$again" = 127 ] || code=$again
  return "$code"
}
judge() {
  launcher preflight judge train.yaml train.lr=3e-4 --cluster configs/cluster/singularity.yaml --records "$records" --nodes "$nodes" \
    --job "$job" --restart "$restarts" "$@"
}
preflight() {
  records=$launch_dir/preflight/$SLURM_JOB_ID.$restarts
  mkdir -p "$records" && date +%s.%N >"$records/started" || return 1
  timeout --kill-after=10 180 srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 \
    --ntasks="$SLURM_JOB_NUM_NODES" bash -c 'exec singularity exec --nv --bind=/shared/me --bind=/shared/my_project --bind=/data:/data:ro --bind="$POSTNORM_SCRATCH" --pwd=/shared/me /shared/my_project/images/postnorm.sif env NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_DEBUG=WARN python3 -m launch preflight check train.yaml train.lr=3e-4 --cluster configs/cluster/singularity.yaml --records "$1"' check "$records"
  judge || return
}
if [ "$asked_to_stop" = 0 ]; then
  preflight &
  await $!
  case $? in
    0) go=1 ;;
    2) echo "end: no other node cures what preflight found"; exit 2 ;;
    75)
      go=0
      if [ "$starts" -ge 50 ]; then
        echo "end: bad nodes after $starts restarts (max_restarts)"; exit 2
      fi ;;
    *) go=1; echo "preflight came to no verdict: going on without" ;;
  esac
fi
run_ranks() {
  trap '' USR1  # srun passes it on all the same; by default it would die before it can
  exec srun --kill-on-bad-exit=1 --wait=60 --cpus-per-task="$SLURM_CPUS_PER_TASK" --label \
    --cpu-bind=cores --distribution=block:block bash -c 'trap '"'"''"'"' USR1 USR2; export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}; exec singularity exec --nv --bind=/shared/me --bind=/shared/my_project --bind=/data:/data:ro --bind="$POSTNORM_SCRATCH" --pwd=/shared/me /shared/my_project/images/postnorm.sif env NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_DEBUG=WARN python3 -m pipeline pretrain train.yaml train.lr=3e-4'
}
# Asks until the ranks have gone; if they hang, leaves time to requeue before the time limit.
ask_ranks() {
  [ -n "$step" ] && [ -z "$asking" ] || return
  for ((left = 570; left > 0; left -= 5)); do
    kill -USR1 "$step" || exit
    sleep 5
  done && echo "ranks do not stop: killing them" && kill -KILL "$step" &
  asking=$!
}
decide() {
  launcher decide "$run_dir" --kind pretrain --ranks 16 --max-restarts 50 --max-attempts 2 --time-limit 1-00:00:00 --patience 600 \
    --job "$job" --restart "$restarts" --jobs-before "$before_this" --nodes "$nodes" \
    --before "$before" --asked-to-stop "$asked_to_stop" --step-code "$code" --job-ends "$end_s"
  verdict=$?
}
if [ "$go" = 1 ]; then
  run_ranks &
  step=$!
  [ "$asked_to_stop" = 0 ] || ask_ranks 2>/dev/null
  await "$step"
  [ -z "$asking" ] || kill "$asking" 2>/dev/null
  ready; decide
  case $verdict in 126|127) ready; decide ;; esac
  case $verdict in
    0|2|3|28) exit "$verdict" ;;
    75) unjudged=0 ;;
    126|127)
      echo "end: the launcher cannot be started (exit code $verdict), see above:" python3 \
        "is missing or may not be run; correct python, container or setup of the profile"
      exit "$verdict" ;;
    *)
      unjudged=$((unjudged + 1))
      echo "no verdict (exit code $verdict), attempt $unjudged of 2 in a row" ;;
  esac
  storage "$launch_dir" put "${job%_*} $unjudged" "$launch_dir/unjudged"
  if [ "$unjudged" -ge 2 ]; then
    echo "end: $unjudged attempts in a row came to no verdict (max_attempts_without_progress);" \
      "the launcher's message is above"; exit 1
  elif [ "$unjudged" -gt 0 ] && [ "$starts" -ge 50 ]; then
    echo "end: not done after $starts restarts (max_restarts)"; exit 1
  fi
fi
without=$(paste -sd, "$excluded" 2>/dev/null)
[ -z "$without" ] || without=$without
requeue
