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
#SBATCH --partition=h200
#SBATCH --account=my_project
#SBATCH --qos=normal
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes

first_rank=0
# SLURM says when the job ends from version 23.02 on; before, this is late by what its start took.
end_s=${SLURM_JOB_END_TIME:-$(($(date +%s) + 14400))}
export SLURM_EXPORT_ENV=ALL
export NCCL_SOCKET_IFNAME=eth0
export NCCL_IB_HCA=mlx5
export NCCL_DEBUG=WARN
export POSTNORM_SCRATCH="/raid/scratch"
logs=/shared/me/data/mine/work/logs marks=/shared/me
restarts=${SLURM_RESTART_COUNT:-0} before_this=0 job=${SLURM_JOB_ID:-}
starts=$((before_this + restarts)) excluded=
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
  cd /shared/me && "$@"
}
# The same here, in the work folder, again while storage fails.
ready() {
  for ((left = 600; ; left -= 10)); do
    said=$(export LC_ALL=C; look "$@" 2>&1) && cd /shared/me && return
    said=${said//$'\n'/; }
    [[ $said != *"No space left"* && $said != *"quota exceeded"* ]] ||
      { echo "end: $logs is full: $said; free space or inodes, submit again"; exit 28; }
    [ $((end_s - $(date +%s))) -ge 20 ] || [ "$starts" -ge 50 ] ||
      { echo "requeue: storage fails, and the time limit is near: $said"; requeue; }
    [ "$left" -gt 0 ] && echo "storage fails, trying again: $said" && sleep 10 || break
  done
  echo "end: storage failed for 600 s (storage_patience_s), submit later: $said"; exit 1
}
set -u +e
ready
rank=$((first_rank + SLURM_ARRAY_TASK_ID))
failures_file=$logs/ingest-$job.failures
echo "start: stage ingest, part $rank of 16, job $job, restart $restarts, node $(hostname)"
give_up() {
  echo "part $rank of 16" >"$marks/failed-ingest"
  exit "$1"
}
part() {
  srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --container-image=/lustre/my_project/postnorm.sqsh --container-mounts=/shared/me:/shared/me,/shared/me/data/mine:/shared/me/data/mine,/lustre/my_project:/lustre/my_project,"$POSTNORM_SCRATCH":"$POSTNORM_SCRATCH" --container-workdir=/shared/me --no-container-mount-home env NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 NCCL_DEBUG=WARN python3 -m data_prep run prep.yaml workers=4 --stage ingest --world 16 --rank "$rank"
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
if [ "$code" = 143 ] && [ "$restarts" -lt 50 ]; then  # of a longer GraceTime
  echo "requeue: ended by SIGTERM"; requeue
fi
failures=$(( $(cat "$failures_file" 2>/dev/null || echo 0) + 1 ))
ready eval 'echo "$failures" >"$failures_file"'
if [ "$failures" -ge 3 ]; then
  echo "end: stage ingest, part $rank of 16: exit code $code, failure $failures of" \
    "3 (prep.max_failures); what is done stays, submit again to continue"
  give_up 1
fi
echo "requeue: exit code $code, failure $failures of 3"
requeue
