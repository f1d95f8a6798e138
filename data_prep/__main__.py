"""`python -m data_prep VERB`: the verbs of this package alone; `postnorm prep` has them too."""

import sys
from typing import NoReturn

from pipeline.runtime import stop


def main() -> NoReturn:
    """Run the verb that was asked for."""
    stop.listen_early(sys.argv[1:])  # before all other imports
    from data_prep.commands import VERBS
    from pipeline.runtime import cli

    description = "Raw text to tokenised webdataset shards."
    cli.main(cli.parser_of("python -m data_prep", description, {"prepare": VERBS}))


if __name__ == "__main__":
    main()
