# What run_gpu.sh and train_gpu.sh share; they set CALLED_FROM, KIT, OUT and BUDGET_S first.

absolute() { [[ $1 == /* ]] && echo "$1" || echo "$CALLED_FROM/$1"; }

KIT=$(absolute "$KIT")
if [[ -n $OUT ]]; then
  OUT=$(absolute "$OUT") TABLE=$(absolute "$OUT")/gpu.md
else
  OUT=$PWD/benchmarks/results/gpu TABLE=$PWD/benchmarks/results/gpu.md
fi
PYTHON=${PYTHON:-python3}
DATA=${DATA:-$KIT/data}

# Names what is missing before anything starts; a part that needs it will then fail by itself.
install_kit() {
  [[ -f $KIT/kit.json ]] || { echo "$KIT/kit.json is not there: run \`make gpu-kit\`" >&2; exit 2; }
  mkdir -p "$OUT"
  : >"$OUT/run.log"
  local site
  site=${TMPDIR:-/tmp}/postnorm-kit-$(cksum <"$KIT/kit.json" | tr ' ' -)
  run kit 120 "$PYTHON" -m benchmarks.kit install "$KIT" "$site" ||
    echo "not everything is there: parts that need it will fail"
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
}

# run NAME LIMIT COMMAND...: what it says goes to the log as it comes, its last lines here at the end.
run() {
  local name=$1 limit=$2 begun=$SECONDS code=0 said
  shift 2
  echo "== $name, $((BUDGET_S - SECONDS)) s left, $limit s at most: $*" | tee -a "$OUT/run.log"
  [[ -z ${DRY_RUN:-} ]] || return 0
  said=$(wc -c <"$OUT/run.log")
  # No pipe: a process that outlives a command that was killed would hold it open.
  timeout --kill-after=20 "$limit" "$@" >>"$OUT/run.log" 2>&1 || code=$?
  # Results are in files: lines of JSON are not shown.
  tail -c "+$((said + 1))" "$OUT/run.log" | tr '\r' '\n' | grep -v '^{' | cut -c1-160 | tail -n 12
  ((code == 0)) || echo "FAILED: $name, exit code $code after $((SECONDS - begun)) s"
  return "$code"
}

# Writes the page, says what failed, and ends with 1 if something did.
summary() {
  run page 60 "$PYTHON" -m benchmarks.gpu_report "$OUT" --table "$TABLE" || failed+=("the page")
  echo "== $SECONDS s, $TABLE and $(cd "$OUT" && echo *.json)"
  if ((${#failed[@]})); then printf 'FAILED: %s\n' "${failed[@]}"; exit 1; fi
}
