"""Checks a run's summary: `python .ci/check_tests.py TARGET SUMMARY`, TARGET as in the Makefile.

Prints what did not run. Fails if a test failed, if one was skipped for a reason that is not in
_MAY_SKIP, such as a Python package that is not installed, or if a folder took longer than
tests/budget.json allows: about two and a half times what it took on 2 quiet cores when the budget
was written.
"""

import json
import re
import sys
from pathlib import Path

_MAY_SKIP = re.compile(
    "needs (unshare|the right|iproute2|SLURM|a Python 3.12|a package index)|no Chromium in PATH"
    "|root reads every folder|nodes share a network|torch without MKL"
)
"""What a machine may lack. What constraints.txt has must be there."""


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
    for folder, seconds in summary["seconds"].items():
        allowed = budget.get(folder)
        print(f"make {target}: {folder} took {seconds:.0f} s of {allowed} s")
        if allowed is None:
            wrong.append(f"{folder} has no budget in tests/budget.json")
        elif seconds > allowed:
            wrong.append(f"{folder} took {seconds:.0f} s, tests/budget.json allows {allowed} s")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
