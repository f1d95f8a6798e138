"""Runs a module of the code that this file belongs to, whatever the current folder holds.

    python CODE/pipeline/runtime/start.py pipeline pretrain config.yaml

`python -m` looks into the current folder first: a job with a copy of the code as it was submitted
would run the checkout that it was submitted from.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    _HERE = Path(__file__).resolve()
    # Python puts this file's folder first, whose modules are not meant to be imported by their
    # last names; with PYTHONSAFEPATH it does not.
    sys.path = [str(_HERE.parents[2]), *(path for path in sys.path if path != str(_HERE.parent))]
    del sys.argv[0]
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
