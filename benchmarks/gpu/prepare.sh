# What run_gpu.sh and train_gpu.sh share; they set KIT, OUT, PYTHON and BUDGET_S first.

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

# run NAME LIMIT COMMAND...: everything it says goes to the log, its last lines here as well.
run() {
  local name=$1 limit=$2 begun=$SECONDS code=0 log
  shift 2
  echo "== $name, $((BUDGET_S - SECONDS)) s left, $limit s at most: $*" | tee -a "$OUT/run.log"
  [[ -z ${DRY_RUN:-} ]] || return 0
  log=$(mktemp)
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 || code=$?
  # Results are in files: lines of JSON are left out.
  tr '\r' '\n' <"$log" | grep -v '^{' >"$log.lines"
  cat "$log.lines" >>"$OUT/run.log"
  cut -c1-160 "$log.lines" | tail -n "$((code ? 15 : 6))"
  rm -f "$log" "$log.lines"
  ((code == 0)) || echo "FAILED: $name, exit code $code after $((SECONDS - begun)) s"
  return "$code"
}

# Says what failed, and ends with 1 if something did.
summary() {
  echo "== $SECONDS s, $OUT/gpu.md and $(cd "$OUT" && echo *.json)"
  if ((${#failed[@]})); then printf 'FAILED: %s\n' "${failed[@]}"; exit 1; fi
}
