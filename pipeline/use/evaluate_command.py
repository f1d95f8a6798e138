"""`python -m pipeline evaluate`."""

import argparse
import json
import logging
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED
from pipeline.runtime import env
from pipeline.runtime.cli import Verb
from pipeline.runtime.rank import AgreedStop, Rank, Stopped, run_as_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.use.evaluate import Evaluation
    from pipeline.use.evaluate_report import Report

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Held-out loss and accuracy of a run's checkpoint or of a model folder, on one process or on many
ranks. Text, masks and precision are those of the run: with --sequences as monitor.eval_sequences
the numbers are its own. The run may go on meanwhile. Of a run, each result is also a line of
RUN/evaluations.jsonl."""


def _evaluate(arguments: argparse.Namespace) -> int:
    # A person's evaluation is not an attempt of the run, whose own record may lie in its folder.
    return run_as_rank(
        partial(_evaluate_on, arguments), env.process_info_or_alone(), env.launched_run_dir()
    )


def _evaluate_on(arguments: argparse.Namespace, rank: Rank) -> int:
    # Importing torch takes seconds.
    from pipeline.config.train import TrainConfig
    from pipeline.runtime import dist
    from pipeline.train.engine import close_process_group
    from pipeline.use.evaluate import Evaluator
    from pipeline.use.evaluate_config import EvaluateRequest
    from pipeline.use.evaluate_report import Report

    names = vars(EvaluateRequest(arguments.source))
    values = {name: value for name, value in vars(arguments).items() if name in names}
    request = EvaluateRequest(**{**values, "overrides": tuple(arguments.overrides)})
    rank.if_lost = "Its own message says more. Nothing is damaged: start the evaluation again"
    device = dist.own_device(rank.process)
    dist.open_group(rank.process, device, TrainConfig.collective_timeout_s)
    code = EXIT_FINISHED
    try:
        evaluator = Evaluator(request, rank.process, device, AgreedStop(rank.stop))
        report = Report(evaluator)
        evaluations = evaluator.evaluations(report.earlier_steps())
        if rank.process.is_first:
            _show(report, evaluations, as_json=arguments.json)
        else:
            deque(evaluations, maxlen=0)  # this rank's part
    except Stopped as signal:
        logger.warning("stopped by %s; nothing is to be saved, start again", signal)
        code = EXIT_PREEMPTED
    close_process_group()
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


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
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


EVALUATE = Verb(
    "evaluate",
    "held-out loss of checkpoints or of a model, on any number of ranks",
    _arguments,
    _evaluate,
    """\
evaluate runs/demo/train
evaluate runs/demo/train --all --sequences 512
evaluate models/bert --data data/mine --seq-len 128 --json
torchrun --standalone --nproc-per-node 8 -m postnorm evaluate runs/mine --step 100000
evaluate runs/other data.masking=token data.mask_prob=0.15""",
)
