"""`python -m pipeline evaluate`."""

import argparse
import json
import logging
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import (
    EXIT_FAILED_RETRY,
    EXIT_FINISHED,
    EXIT_PREEMPTED,
    LostRankError,
    PostnormError,
)
from pipeline.runtime import env, log
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import record_exit
from pipeline.train.stop import StopRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.use.evaluate import Evaluation
    from pipeline.use.evaluate_config import EvaluateRequest
    from pipeline.use.evaluate_report import Report

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Held-out loss and accuracy of a run's checkpoint or of a model folder, on one process or on many
ranks. Text, masks and precision are those of the run: with --sequences as monitor.eval_sequences
the numbers are its own. The run may go on meanwhile. Of a run, each result is also a line of
RUN/evaluations.jsonl."""
_EXAMPLES = """\
examples:
  python -m pipeline evaluate runs/demo/train
  python -m pipeline evaluate runs/demo/train --all --sequences 512
  python -m pipeline evaluate models/bert --data data/mine --seq-len 128 --json
  torchrun --standalone --nproc-per-node 8 -m pipeline evaluate runs/mine --step 100000
  python -m pipeline evaluate runs/other data.masking=token data.mask_prob=0.15
"""


def _evaluate(arguments: argparse.Namespace, signals: StopRequest | None) -> int:
    # Importing torch takes seconds.
    from pipeline.use.evaluate_config import EvaluateRequest

    signals = signals or StopRequest()
    process = env.process_info_or_alone()
    if not process.is_first:
        log.to_console(logging.WARNING, sys.stderr)
    launched, code = env.launched_run_dir(), EXIT_FAILED_RETRY
    try:
        names = vars(EvaluateRequest(arguments.source))
        values = {name: value for name, value in vars(arguments).items() if name in names}
        request = EvaluateRequest(**{**values, "overrides": tuple(arguments.overrides)})
        code = _run(request, process, signals, as_json=arguments.json)
    except PostnormError as error:
        code = error.exit_code
        raise
    finally:
        # A person's evaluation is not an attempt of the run, whose own record may lie there.
        if launched:
            record_exit(Path(launched), process, code)
    return code


def _run(
    request: "EvaluateRequest", process: ProcessInfo, signals: StopRequest, *, as_json: bool
) -> int:
    from pipeline.config.train import TrainConfig
    from pipeline.runtime import dist
    from pipeline.train.engine import close_process_group
    from pipeline.use.agreed_stop import AgreedStop, Stopped
    from pipeline.use.evaluate import Evaluator
    from pipeline.use.evaluate_report import Report

    code = EXIT_FINISHED
    try:
        device = dist.own_device(process)
        dist.open_group(process, device, TrainConfig.collective_timeout_s)
        try:
            evaluator = Evaluator(request, process, device, AgreedStop(signals))
            report = Report(evaluator)
            found = evaluator.evaluations(report.earlier_steps())
            if process.is_first:
                _show(report, found, as_json=as_json)
            else:
                deque(found, maxlen=0)  # this rank's part
        except Stopped as signal:
            logger.warning("stopped by %s; nothing is to be saved, start again", signal)
            code = EXIT_PREEMPTED
        close_process_group()
    except RuntimeError as error:
        if not dist.is_lost_rank(error):
            raise
        raise LostRankError(
            f"rank {process.rank} lost another rank: {str(error).splitlines()[0]}. That rank died, "
            f"or hung for {TrainConfig.collective_timeout_s:g} s; its own message says more. "
            "Nothing is damaged: start the evaluation again"
        ) from error
    return code


def _show(report: "Report", found: "Iterator[Evaluation]", *, as_json: bool) -> None:
    for number, evaluation in enumerate(found):
        record = report.record(evaluation)
        if as_json:
            print(json.dumps(record), flush=True)
        else:
            head = [] if number else report.head()
            print("\n".join([*head, *report.lines(evaluation)]), flush=True)
        report.append(record)


def add_evaluate(commands: Any, signals: StopRequest | None) -> None:
    """Adds the command to a command line.

    Args:
        commands: subparsers.
        signals: that came since the process started, if it looked out for them.
    """
    parser = commands.add_parser(
        "evaluate", help="held-out loss of checkpoints or of a model, on any number of ranks",
        description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", type=Path, metavar="SOURCE", help="run folder, or model folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N",
                       help="this checkpoint of the run; default: the newest good one")  # fmt: skip
    which.add_argument("--all", action="store_true", dest="every",
                       help="every kept checkpoint, oldest first")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help="other data of the same tokenizer; default: the run's")  # fmt: skip
    parser.add_argument("--sequences", type=int, metavar="N",
                        help="at most so many; default: all held-out text")  # fmt: skip
    parser.add_argument("--seq-len", type=int, metavar="N",
                        help="default: the run's; of a model folder at most 512")  # fmt: skip
    parser.add_argument("--micro-batch", type=int, metavar="N",
                        help="sequences of a forward pass; default: the run's, or 8")  # fmt: skip
    parser.add_argument("--precision", choices=("bf16", "fp32"),
                        help="default: the run's; of a model folder fp32")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line, no table")
    parser.add_argument("overrides", nargs="*", metavar="data.MASKS=VALUE",
                        help="other masks than the run's, such as data.mask_prob=0.15")  # fmt: skip
    parser.set_defaults(run=partial(_evaluate, signals=signals))
