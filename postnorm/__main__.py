"""`postnorm VERB`: the verbs of all packages behind one door."""

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from postnorm import __version__

if TYPE_CHECKING:
    from pipeline.runtime.cli import Parser, Verb

_IN_JOBS = ("render", "preflight", "bandwidth", "rank", "supervise")
"""Verbs that job scripts call; a person seldom does."""


def groups() -> "dict[str, tuple[Verb, ...]]":
    """Merge the tables of the packages; settle here whose verb wins where two have one name.

    - `data_prep` has `run`, `plan`, `status` and `config`, as others have: its verbs stand behind
      `prep`. They are about a dataset, all others about a run or a model.
    - `status`, `submit` and `cancel` are those of `launch`, widened by sweeps, which it does not
      know, and `status` by datasets.
    """
    from data_prep import commands as prep
    from experiments import commands as many
    from launch import commands as launch
    from pipeline.commands import GROUPS
    from pipeline.runtime.cli import family

    taken = {verb.name for verb in launch.VERBS}
    train = [*(verb for verb in GROUPS["train"] if verb.name not in taken), *launch.VERBS]
    wider = (
        many.submit,
        launch.status_verb(prep.dataset_status, many.sweep_look),
        launch.cancel_verb(many.sweep_cancel),
    )
    by_name = {verb.name: verb for verb in wider}
    train = [by_name.get(verb.name, verb) for verb in train]
    return {
        "prepare": (family("prep", "raw text to a tokenised dataset", prep.VERBS),),
        "train": tuple(verb for verb in train if verb.name not in _IN_JOBS),
        "tasks": (*GROUPS["tasks"], *many.TASKS),
        "use": GROUPS["use"],
        "study": many.STUDY,
        "in jobs": tuple(verb for verb in train if verb.name in _IN_JOBS),
    }


def main() -> NoReturn:
    """Run the verb that was asked for."""
    if sys.path[0] != str(Path(__file__).resolve().parents[1]):
        # `python -m` puts the current folder first: a user's own pipeline.py would be imported.
        sys.path.append(sys.path.pop(0))
    from pipeline.runtime import stop

    stop.listen_early(sys.argv[1:])  # before all other imports
    from pipeline.runtime import cli

    cli.main(_parser())


def _parser() -> "Parser":
    from pipeline.runtime import cli

    parser = cli.parser_of("postnorm", "Pre-trains Post-LN encoders, from raw text.", groups())
    version = f"postnorm {__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=version)
    return parser


if __name__ == "__main__":
    main()
