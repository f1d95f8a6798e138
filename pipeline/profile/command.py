"""`python -m pipeline profile`."""

import argparse
import json
import logging
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.runtime import cli, env
from pipeline.runtime.files import write_atomic
from pipeline.runtime.log import to_console

_DESCRIPTION = """\
Where the time of a run's training steps goes on this machine: real steps with the run's own data,
from random weights. Times are means over the steps and ranks and add up to the step. Nothing is
read from or written to run_dir. As many steps are taken before without the profiler, which slows
the host down: what it adds is in "idle or host". Of the roofline: the least time in which the
device, by its data sheet, could do the products of the linear layers, or compute and move what
attention must (pipeline/profile/roofline.py), over the time taken."""
_EXAMPLES = """\
examples:
  python -m pipeline profile configs/demo.yaml --steps 20
  python -m pipeline profile run.yaml kernels.attention=reference --json profile.json
  torchrun --standalone --nproc-per-node 8 -m pipeline profile run.yaml --trace t.json.gz
"""


def add_profile(commands: Any) -> None:
    """Add `profile` to a command line."""
    profile = commands.add_parser(
        "profile", help="where the time of a run's training steps goes",
        description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cli.add_config_arguments(profile)
    profile.add_argument("--steps", type=int, default=20, metavar="N", help="default 20")
    profile.add_argument("--warm-up", type=int, default=5, metavar="N",
                         help="steps before, that compile kernels (default 5)")  # fmt: skip
    profile.add_argument("--json", type=Path, dest="json_file", metavar="FILE",
                         help="the numbers as JSON")  # fmt: skip
    profile.add_argument("--trace", type=Path, metavar="FILE",
                         help="rank 0's trace for ui.perfetto.dev; .gz packs it")  # fmt: skip
    profile.set_defaults(run=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    for name in ("steps", "warm_up"):
        number = getattr(arguments, name)
        if number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: expected 1 or more")
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    process = env.process_info_or_alone()
    if not process.in_group:
        env.be_the_only_rank(_free_port())
        process = env.process_info()
    if not process.is_first:
        to_console(logging.WARNING, sys.stderr)
    # Importing torch takes seconds.
    from pipeline.profile.step import profile_run, profile_text

    found = profile_run(
        config, process, steps=arguments.steps, warm_up=arguments.warm_up,
        trace_file=arguments.trace,
    )  # fmt: skip
    if process.is_first:
        print(profile_text(found))
        if arguments.json_file:
            write_atomic(arguments.json_file, (json.dumps(asdict(found)) + "\n").encode())
    return EXIT_FINISHED


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
