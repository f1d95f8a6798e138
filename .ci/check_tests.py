"""Checks a run's summary: `python .ci/check_tests.py TARGET SUMMARY`, TARGET as in the Makefile.

Prints what did not run. Fails if a test failed, if one was skipped for a reason that is not in
_MAY_SKIP, such as a Python package that is not installed, or if a folder took longer than
tests/budget.json allows: 2.5 times what it took on 2 quiet cores when the budget was written. On a
machine where most folders take longer than they did then, all budgets are longer by as much.
"""

import json
import re
import statistics
import sys
from pathlib import Path

_MAY_SKIP = re.compile(
    "needs (unshare|the right|iproute2|SLURM|a Python 3.12|a package index)|no Chromium in PATH"
    "|root reads every folder|nodes share a network|torch without MKL"
)
"""What a machine may lack. What constraints.txt has must be there."""
_SPARE = 2.5
"""A budget over the time that was measured when it was written."""


def slowness(seconds: dict[str, float], budget: dict[str, int]) -> float:
    """How many times longer than when the budgets were written most folders took; at least 1.

    It is the median over folders, so a folder that grew alone does not raise it. Folders with the
    smallest budget do not count: theirs is a round number that was not measured.
    """
    smallest = min(budget.values())
    ratios = [
        took * _SPARE / budget[folder]
        for folder, took in seconds.items()
        if budget.get(folder, smallest) > smallest
    ]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def main() -> None:
    """Exits with a message if something is wrong."""
    target, file = sys.argv[1:]
    summary = json.loads(Path(file).read_text())
    for folder, number in summary["left_out"].items():
        print(f"make {target} left out {number} tests of {folder}")
    budget = json.loads((Path(__file__).parents[1] / "tests/budget.json").read_text())[target]
    wrong = [f"{test} failed" for test in summary["failed"]]
    for test, reason in summary["skipped"].items():
        print(f"make {target}: {test} was skipped: {reason}")
        if not _MAY_SKIP.match(reason):
            wrong.append(f"{test} was skipped ({reason}): add what it needs to the extra dev")
    slow = slowness(summary["seconds"], budget)
    print(f"make {target}: {slow:.2f} times as slow as when tests/budget.json was written")
    for folder, seconds in summary["seconds"].items():
        if folder not in budget:
            wrong.append(f"{folder} has no budget in tests/budget.json")
            continue
        allowed = slow * budget[folder]
        print(f"make {target}: {folder} took {seconds:.0f} s of {allowed:.0f} s")
        if seconds > allowed:
            wrong.append(f"{folder} took {seconds:.0f} s of {allowed:.0f} s: see tests/budget.json")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
