"""`python -m launch VERB`: the verbs of this package alone; `postnorm` has those of all."""

import sys
from typing import NoReturn

from pipeline.runtime import stop


def main() -> NoReturn:
    """Run the verb that was asked for."""
    stop.listen_early(sys.argv[1:])  # before all other imports
    from launch.commands import FOR_PEOPLE, IN_JOBS
    from pipeline.runtime import cli

    description = "Start runs, on SLURM or on this machine."
    groups = {"launch": FOR_PEOPLE, "in jobs": IN_JOBS}
    cli.main(cli.parser_of("python -m launch", description, groups))


if __name__ == "__main__":
    main()
