#!/usr/bin/env bash
# A real training run of 10 minutes on one GPU: data wait, tokens/s, the loss curve in TensorBoard.
#
#   DATA=DIR OUT=results benchmarks/train_gpu.sh
#
# DATA      prepared dataset (needed)
# OUT       folder for training.json, gpu.md and the run's metrics (default benchmarks/results/gpu)
# PYTHON    as for run_gpu.sh, with deepspeed and tensorboard (default python3)
# HOURS     of training (default 0.14; start and compilation come on top)
# CONFIG    of the run (default benchmarks/train_gpu.yaml)
# DRY_RUN=1 prints the plan and starts nothing
# More arguments are overrides of the config, such as train.zero_stage=0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
TABLE=${TABLE:-${OUT:-benchmarks/results}/gpu.md}
OUT=${OUT:-benchmarks/results/gpu}
CONFIG=${CONFIG:-benchmarks/train_gpu.yaml}
DATA=${DATA:?set DATA to a prepared dataset: python -m data_prep run configs/prep/demo.yaml output_dir=DIR}
RUN=$(mktemp -d)/run
mkdir -p "$OUT"
command=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 -m pipeline pretrain
  "$CONFIG" "run_dir=$RUN" "data.dir=$DATA" "train.budget_hours=${HOURS:-0.14}" "$@")
echo "== ${command[*]}"
if [[ -n ${DRY_RUN:-} ]]; then exit 0; fi
code=0
"${command[@]}" || code=$?
# Also of a run that failed: its metrics say how far it came.
"$PYTHON" -m benchmarks.training_report "$RUN" "$OUT/training.json"
mkdir -p "$OUT/tensorboard"
cp "$RUN"/metrics.jsonl "$OUT/"
find "$RUN" -name 'events.out.tfevents*' -exec cp {} "$OUT/tensorboard/" \;
"$PYTHON" -m benchmarks.gpu_report "$OUT" --table "$TABLE"
exit "$code"
