"""`python -m launch VERB`: the verbs of this package alone; `postnorm` has those of all."""

import sys
from typing import NoReturn

from pipeline.runtime import stop


def main() -> NoReturn:
    """Run the verb that was asked for."""
    stop.listen_early(sys.argv[1:])  # before all other imports
    from launch.commands import VERBS
    from pipeline.runtime import cli

    in_jobs = tuple(verb for verb in VERBS if verb.summary.startswith("for job scripts"))
    for_people = tuple(verb for verb in VERBS if verb not in in_jobs)
    description = "Start runs, on SLURM or on this machine."
    groups = {"launch": for_people, "in jobs": in_jobs}
    cli.main(cli.parser_of("python -m launch", description, groups))


if __name__ == "__main__":
    main()
