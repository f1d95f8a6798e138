#!/usr/bin/env bash
# Correctness, then attention, then training steps and their profile, on one GPU, below 9 minutes.
#
#   DATA=DIR OUT=results benchmarks/run_gpu.sh
#
# DATA      prepared dataset; without it, the documentation that Python brings along is prepared
# OUT       folder for JSON files and gpu.md (default benchmarks/results/gpu, and the page beside it)
# PYTHON    with torch, Triton, transformers and what pyproject.toml lists (default python3)
# BUDGET_S  for everything (default 520); what does not fit is listed, goals come first
# SUBJECTS  of benchmarks/step.py (default goals; all; or names)
# DRY_RUN=1 prints the plan and starts nothing
# CHECK_OPTIONS, ATTENTION_OPTIONS, STEP_OPTIONS  more options of each program
#
# No network is used. Exit code 1: something is wrong; then nothing was timed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
TABLE=${TABLE:-${OUT:-benchmarks/results}/gpu.md}
OUT=${OUT:-benchmarks/results/gpu}
BUDGET_S=${BUDGET_S:-520}
SUBJECTS=${SUBJECTS:-goals}
DATA=${DATA:-}
mkdir -p "$OUT"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

left() { echo $((BUDGET_S - SECONDS)); }

# Says a command, and runs it unless DRY_RUN; its JSON line is in OUT already.
step() {
  echo "== $(left) s left: $*"
  if [[ -z ${DRY_RUN:-} ]]; then "$@" >>"$OUT/run.log" 2> >(tee -a "$OUT/run.log" | tail -n 5 >&2); fi
}

report() { step "$PYTHON" -m benchmarks.gpu_report "$OUT" --table "$TABLE" && tail -n 20 "$OUT/run.log" | grep -E '^(reached|missed|not measured)' || true; }

: >"$OUT/run.log"
step "$PYTHON" -m benchmarks.machine "$OUT/machine.json"
grep '^missing:' "$OUT/run.log" || true

if [[ -z $DATA ]]; then
  DATA=$(mktemp -d)/data
  step "$PYTHON" -m data_prep run configs/prep/demo.yaml "output_dir=$DATA" ||
    echo "no dataset: prepare one elsewhere (python -m data_prep run ...) and set DATA; see $OUT/run.log"
fi
data=()
if [[ -n ${DRY_RUN:-} || -f $DATA/index.json ]]; then data=(--data "$DATA"); fi

# shellcheck disable=SC2086 # options are words
if ! step timeout 180 "$PYTHON" -m benchmarks.gpu_checks --out "$OUT/correctness.json" ${CHECK_OPTIONS:-}; then
  echo "not correct, so nothing is timed: see $OUT/correctness.json and $OUT/run.log"
  report
  exit 1
fi

# A fifth of the time; steps get what is left.
# shellcheck disable=SC2086
step timeout $((BUDGET_S / 5 + 60)) "$PYTHON" -m benchmarks.attention "${data[@]}" \
  --out "$OUT/attention.json" --budget-s $((BUDGET_S / 5)) ${ATTENTION_OPTIONS:-} ||
  echo "attention.py failed: see $OUT/run.log"

if ((${#data[@]})); then
  # shellcheck disable=SC2086
  step timeout $(($(left) > 20 ? $(left) : 20)) "$PYTHON" -m benchmarks.step "${data[@]}" \
    --out "$OUT/step.json" --subjects $SUBJECTS --budget-s $(($(left) - 15)) ${STEP_OPTIONS:-} ||
    echo "step.py failed or was cut off: what it wrote counts; see $OUT/run.log"
fi
report
echo "== $TABLE after $SECONDS s"
