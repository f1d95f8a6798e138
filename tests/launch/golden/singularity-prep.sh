#!/bin/bash
#SBATCH --array=0-15
#SBATCH --job-name=prep-ingest
#SBATCH --comment=/shared/me/data/mine
#SBATCH --output=/shared/me/data/mine/work/logs/%x-%A_%a.log
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=4G
#SBATCH --time=4:00:00
#SBATCH --partition=gpu
#SBATCH --account=my_project
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes

first_rank=0
# SLURM says when the job ends from version 23.02 on; before, this is late by what its start took.
printf -v now '%(%s)T' -1
end_s=${SLURM_JOB_END_TIME:-$((now + 14400))}
export SLURM_EXPORT_ENV=ALL
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export NCCL_IB_HCA=mlx5_0,mlx5_1
export NCCL_DEBUG=WARN
export POSTNORM_SCRATCH="/scratch"
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
logs=/shared/me/data/mine/work/logs marks=/shared/me
rank=$((first_rank + SLURM_ARRAY_TASK_ID))
failures_file=$logs/ingest-$job.failures
echo "start: stage ingest, part $rank of 16, job $job, restart $restarts, node $(hostname)"
give_up() {
  put "part $rank of 16" "$marks/failed-ingest"
  exit "$1"
}
part() {
  singularity exec --bind=/shared/me --bind=/shared/me/data/mine --bind=/shared/my_project --bind=/data:/data:ro --bind="$POSTNORM_SCRATCH" --pwd=/shared/me /shared/my_project/images/postnorm.sif env NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_DEBUG=WARN python3 -m data_prep run prep.yaml workers=4 --stage ingest --world 16 --rank "$rank"
  code=$?
}
part
case $code in 126|127) ready; part ;; esac
if [ "$code" = 0 ]; then
  rm -f "$failures_file"
  echo "end: done"; exit 0
elif [ "$code" = 2 ]; then
  echo "end: stage ingest, part $rank of 16: trying again is no use, see the message" \
    "above; fix it and submit again"
  give_up 2
elif [ "$code" = 126 ] || [ "$code" = 127 ]; then
  echo "end: stage ingest, part $rank of 16: exit code $code: the interpreter cannot be" \
    "started, see above; correct python, container or setup of the profile"
  give_up "$code"
fi
# scancel, preemption and the time limit end this script too, a moment after what it started.
sleep 5
failures=$(( $(cat "$failures_file" 2>/dev/null || echo 0) + 1 ))
storage "$logs" put "$failures" "$failures_file"
if [ "$failures" -ge 3 ]; then
  echo "end: stage ingest, part $rank of 16: exit code $code, failure $failures of" \
    "3 (prep.max_failures); what is done stays, submit again to continue"
  give_up 1
fi
echo "requeue: exit code $code, failure $failures of 3"
requeue
