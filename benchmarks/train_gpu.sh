#!/usr/bin/env bash
# Trains for six minutes on one GPU: data wait, loss against the CPU's, memory against the plan.
#
#   benchmarks/train_gpu.sh KIT [OUT] [field=value...]
#
# KIT, OUT and the variables are those of `run_gpu.sh`; fields are of benchmarks/gpu/train.yaml. First
# the 30 steps of benchmarks/gpu/first_steps.yaml on the GPU and on the CPU, side by side; then the
# run, for six minutes or what is left of BUDGET_S (default 570), start and compilation included.
set -uo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() { sed -n '4s/^# *//p' "$0" >&2; exit 2; }

KIT=${1:-} OUT=''
[[ -n $KIT && $KIT != -* ]] || usage
shift
if (($#)) && [[ $1 != *=* ]]; then OUT=$1; shift; fi
BUDGET_S=${BUDGET_S:-570}
RUNS=$(mktemp -d)
. benchmarks/gpu/prepare.sh

first=(train.compile=true) long=()
if [[ -n ${TINY:-} ]]; then
  first=(data.seq_len=32 train.zero_stage=0 train.num_steps=3 train.warmup_steps=1
    checkpoint.every_steps=3 model.num_layers=2 model.hidden_size=64
    model.num_heads=2 model.ffn_size=128)
  long=("${first[@]}" train.num_steps=20 train.schedule=linear train.budget_hours=null
    train.compile=false train.global_batch=2 train.micro_batch=2 monitor.log_every_steps=2)
fi

# pretrain NAME LIMIT CONFIG [field=value...]
pretrain() {
  local name=$1 limit=$2 config=$3
  shift 3
  run "$name" "$limit" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 \
    -m pipeline pretrain "benchmarks/gpu/$config.yaml" "run_dir=$RUNS/$name" "data.dir=$DATA" "$@"
}

install_kit
failed=()
pretrain gpu 150 first_steps "${first[@]}" &
on_gpu=$!
CUDA_VISIBLE_DEVICES='' pretrain cpu 150 first_steps "${first[@]}" train.precision=fp32 \
  train.zero_stage=0 train.compile=false kernels.attention=reference \
  kernels.residual_norm=reference kernels.loss=reference ||
  failed+=("the CPU's first steps: see $OUT/run.log")
wait "$on_gpu" || failed+=("the GPU's first steps: see $OUT/run.log")
left=$((BUDGET_S - SECONDS - 20))
trained=$((left - 80 < 360 ? left - 80 : 360))
((trained > 0)) || { echo "FAILED: $left s are left for the run, expected more than 80" >&2; exit 1; }
hours=$(printf '0.%04d' $((trained * 10000 / 3600)))
pretrain run "$left" train "train.budget_hours=$hours" "${long[@]}" "$@" ||
  failed+=("the run: see $OUT/run.log")
# Also of a run that failed: its metrics say how far it came.
run report 60 "$PYTHON" -m benchmarks.training_report "$RUNS" "$OUT/training.json" ||
  failed+=("the report: see $OUT/run.log")
cp "$RUNS/run/metrics.jsonl" "$OUT/" 2>/dev/null || true
rm -rf "$RUNS"
summary
