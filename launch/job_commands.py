"""Commands that look after jobs: `status`, `logs`, `cancel`, `requeue`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import control, logs
from launch.records import prep_jobs, require_run
from launch.status import prep_report, queue_reports, run_report
from launch.status_text import prep_text, queue_text, report_text
from pipeline.errors import EXIT_FINISHED


def add_commands(commands: Any) -> None:
    """Adds the four to the launcher's subcommands."""
    status = commands.add_parser(
        "status", help="how a run or data preparation stands; without one, all in the queue"
    )
    status.add_argument("folder", nargs="?", type=Path, metavar="RUN", help="run or dataset folder")
    status.add_argument("--json", action="store_true", help="one JSON object, or a list of them")
    status.add_argument("--watch", type=_at_least_0, metavar="SECONDS", help="again and again")
    status.set_defaults(run=_status)
    logs_ = commands.add_parser("logs", help="the log of a run's job, or of one rank")
    _add_run(logs_)
    which = logs_.add_mutually_exclusive_group()
    which.add_argument("--job", help="id; default: the newest")
    which.add_argument("--rank", type=int, metavar="N", help="the log of rank N, of all its starts")
    logs_.add_argument("--lines", type=_at_least_0, default=50, help="the last ones (default 50)")
    logs_.add_argument("--follow", action="store_true", help="go on until the job has ended")
    logs_.set_defaults(run=_logs)
    cancel = commands.add_parser("cancel", help="end all jobs of a run or data preparation")
    _add_run(cancel)
    cancel.add_argument("--save", action="store_true", help="let the run save before")
    cancel.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for --save (default 600)"
    )
    cancel.set_defaults(run=_cancel)
    requeue = commands.add_parser("requeue", help="send a running job back into the queue, saved")
    _add_run(requeue)
    requeue.add_argument("--now", action="store_true", help="without saving")
    requeue.set_defaults(run=_requeue)


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="RUN", help="run folder")


def _at_least_0(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return number


def _status(arguments: argparse.Namespace) -> int:
    tell = _status_json if arguments.json else _status_text
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not arguments.json else ""
    with contextlib.suppress(KeyboardInterrupt):
        while arguments.watch is not None:
            print(f"{clear}{tell(arguments.folder)}", flush=True)
            time.sleep(arguments.watch)
        print(tell(arguments.folder))
    return EXIT_FINISHED


def _status_text(folder: Path | None) -> str:
    if folder is None:
        return "\n".join(queue_text(queue_reports()))
    prep = prep_report(folder.resolve())
    return "\n".join(prep_text(prep) if prep else report_text(run_report(require_run(folder))))


def _status_json(folder: Path | None) -> str:
    if folder is None:
        return json.dumps([asdict(report) for report in queue_reports()])
    return json.dumps(asdict(prep_report(folder.resolve()) or run_report(require_run(folder))))


def _logs(arguments: argparse.Namespace) -> int:
    run_dir = require_run(arguments.folder)
    path = logs.find_log(run_dir, arguments.job, arguments.rank)
    if not arguments.follow:
        logs.show(path, arguments.lines)
        return EXIT_FINISHED
    job = arguments.job or logs.newest_job(run_dir)

    def why_over() -> str:
        return logs.why_job_is_over(run_dir, job) if job else logs.why_local_run_is_over(run_dir)

    with contextlib.suppress(KeyboardInterrupt):
        print(logs.follow(path, arguments.lines, why_over), file=sys.stderr)
    return EXIT_FINISHED


def _cancel(arguments: argparse.Namespace) -> int:
    folder = arguments.folder.resolve()
    stages = prep_jobs(folder)
    if stages is not None:
        return _say(control.cancel_prep(folder, stages))
    run_dir = require_run(arguments.folder)
    return _say(control.cancel(run_dir, save=arguments.save, save_s=arguments.timeout))


def _requeue(arguments: argparse.Namespace) -> int:
    return _say(control.requeue(require_run(arguments.folder), now=arguments.now))


def _say(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return EXIT_FINISHED
