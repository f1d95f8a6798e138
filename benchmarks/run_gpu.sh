#!/usr/bin/env bash
# Measures everything on one GPU in less than nine minutes: what is right, what is fast, and why.
#
#   benchmarks/run_gpu.sh KIT [OUT] [--only PART,PART...]
#
# KIT   folder made by `make gpu-kit`: packages that this machine lacks, and a prepared dataset
# OUT   folder for JSON files, the trace, the log and gpu.md (default benchmarks/results/gpu)
# PART  checks     every kernel against float64, dropout and long documents among them; the fastest
#                  tiles, which the parts behind it use
#       attention  one layer's attention, all kinds
#       steps      training steps: ours eager and compiled, ZeRO 0 and 1, and Hugging Face's best
#       few        the same with 16,384 and 4,096 tokens: does launching kernels take the time?
#       profile    where the time of a step goes, with a trace for ui.perfetto.dev
#
# Variables: PYTHON (default python3), BUDGET_S for everything (default 500), DATA instead of the
# kit's dataset, DRY_RUN=1 to print the commands alone, TINY=1 for a machine without a GPU: small
# sizes, and our kernels in Triton's interpreter.
#
# Each part has a share of the time that is left and writes its JSON as it goes. A part that fails
# says so, the others go on, and the exit code is 1. No network is used.
set -uo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() { sed -n '4s/^# *//p' "$0" >&2; exit 2; }

ALL=checks,attention,steps,few,profile
KIT='' OUT='' ONLY=$ALL
while (($#)); do
  case $1 in
    --only) ONLY=${2:-}; shift ;;
    -*) usage ;;
    *) if [[ -z $KIT ]]; then KIT=$1; elif [[ -z $OUT ]]; then OUT=$1; else usage; fi ;;
  esac
  shift
done
[[ -n $KIT && -n $ONLY ]] || usage
for part in ${ONLY//,/ }; do
  [[ ,$ALL, == *,$part,* ]] || { echo "--only $part: expected some of $ALL" >&2; exit 2; }
done
BUDGET_S=${BUDGET_S:-500}
TINY=${TINY:-}
. benchmarks/gpu/prepare.sh

# Options of each part: as measured, or as small as they get.
declare -A OPTIONS=([checks]='' [attention]='' [steps]='--subjects goals --at-once 5'
  [few]='--subjects few --seq-len 512 --tokens 16384 4096' [profile]='--steps 10')
if [[ -n $TINY ]]; then
  small='--tiny --seq-len 32 --batches 2 --rounds 2 --seconds 0.01 --at-once 1'
  subjects='--subjects ours/roformer_v2-base/auto/plain/zero0 hf/roberta-base/autocast/plain'
  OPTIONS=([checks]='--tiny'
    [attention]='--tiny --models base --seq-len 16 --tokens 32 --rounds 2'
    [steps]="$subjects $small --tokens 128" [few]="$subjects $small --tokens 64 32"
    [profile]='--steps 2 --warm-up 1 data.seq_len=32 train.global_batch=2 train.micro_batch=2
      train.compile=false train.zero_stage=0 model.num_layers=2 model.hidden_size=64
      model.num_heads=2 model.ffn_size=128')
fi
declare -A INTERPRETED=()
[[ -z $TINY ]] || INTERPRETED=([checks]='env TRITON_INTERPRET=1' [attention]='env TRITON_INTERPRET=1')
declare -A SHARES=([checks]=7 [attention]=3 [steps]=12 [few]=4 [profile]=3)

command_of() {
  local out=$OUT/$1.json limit=$2
  case $1 in
    checks) echo "benchmarks.gpu_checks --out $out" ;;
    attention) echo "benchmarks.attention --data $DATA --out $out --budget-s $limit" ;;
    steps | few) echo "benchmarks.step --data $DATA --out $out --budget-s $limit" ;;
    profile) echo "pipeline profile benchmarks/gpu/profile.yaml data.dir=$DATA --json $out" \
      "--trace $OUT/trace.json.gz" ;;
  esac
}

install_kit
failed=()
for part in ${ALL//,/ }; do
  [[ ,$ONLY, == *,$part,* ]] || continue
  shares=0
  for other in ${ONLY//,/ }; do
    if [[ ${done_parts:-} != *,$other,* ]]; then shares=$((shares + SHARES[$other])); fi
  done
  done_parts=${done_parts:-},$part,
  limit=$(((BUDGET_S - SECONDS) * SHARES[$part] / shares))
  ((limit >= 10)) || { failed+=("$part: no time was left"); continue; }
  # What watches its own budget gets a little more before it is stopped.
  # shellcheck disable=SC2046,SC2086 # words
  run "$part" $((limit + 15)) ${INTERPRETED[$part]:-} "$PYTHON" -m \
    $(command_of "$part" "$limit") ${OPTIONS[$part]} || failed+=("$part: see $OUT/run.log")
done
summary
