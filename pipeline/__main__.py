"""`python -m pipeline VERB`: the verbs of this package alone; `postnorm` has those of all."""

import sys
from typing import NoReturn

from pipeline.runtime import stop


def main() -> NoReturn:
    """Run the verb that was asked for."""
    stop.listen_early(sys.argv[1:])  # before all other imports
    from pipeline.commands import GROUPS
    from pipeline.runtime import cli

    description = "Pre-trains Post-LN encoders and makes use of them."
    cli.main(cli.parser_of("python -m pipeline", description, GROUPS))


if __name__ == "__main__":
    main()
