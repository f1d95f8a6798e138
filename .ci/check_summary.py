"""Checks the demo's summary: `python .ci/check_summary.py runs/demo/summary.json`."""

import json
import sys
from pathlib import Path


def main() -> None:
    """Exits with a message if a number is missing or not what it must be."""
    summary = json.loads(Path(sys.argv[1]).read_text())
    checks = {
        "corpus_bytes of at least 10 MB": summary["corpus_bytes"] >= 10_000_000,
        "more tokens than documents": summary["tokens"] > summary["documents"] > 0,
        "vocab_size as configured": summary["vocab_size"] == 4096,
        "resumed before the kill, not from scratch": (
            0 < summary["resumed_from_step"] <= summary["killed_at_step"] < summary["steps"]
        ),
        "loss fell": summary["loss_last"] < summary["loss_first"],
        "eval_loss 1.5 nats below unigram_entropy": (
            summary["eval_loss"] <= summary["unigram_entropy"] - 1.5
        ),
        "eval_accuracy above 0.2": summary["eval_accuracy"] > 0.2,
        "tokens_per_s measured": summary["tokens_per_s"] > 0,
        "exported logits within 1e-3": 0 <= summary["export_max_abs_diff"] <= 1e-3,
    }
    failed = [name for name, good in checks.items() if not good]
    if failed:
        sys.exit(f"{sys.argv[1]}: not true: {'; '.join(failed)}\n{json.dumps(summary, indent=1)}")


if __name__ == "__main__":
    main()
