"""`postnorm study`: runs what is missing of a study, and writes its page, JSON and figures."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb
from studies.config import HOME, PRESETS, StudyConfig, StudyPlan, plan, read_study
from studies.cost import cost_lines

_LEFT = "runs keep their checkpoints; the same command continues the study"


def _arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(sorted(path.stem for path in HOME.glob("*.yaml")))
    parser.description = (
        "Runs what is missing of a study, and writes OUT/NAME.md, .json and figures; the same "
        f"command resumes it.\nA study is a YAML file, or one of: {known}."
    )
    parser.add_argument("study", metavar="STUDY", help="name of a study, or a YAML file")
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="size of the study (default small)")
    add("--out", type=Path, metavar="DIR", help="folder of runs; default runs/NAME-PRESET")
    add("--results", type=Path, metavar="DIR", help="folder of page and figures; default: OUT")
    add("--part", action="append", default=[], metavar="NAME", help="only this part; repeatable")
    add("--seeds", type=int, metavar="N", help="at most N seeds")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="run here, which is the default")
    where.add_argument("--cluster", metavar="FILE", help="submit to SLURM with this profile")
    add("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default 1)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="list runs and hours; change nothing")
    what.add_argument(
        "--report", action="store_true", help="start nothing; write the page from what is there"
    )
    text = "of all runs, such as data.dir=data/mine; tasks.section.key=value is of all tasks"
    cli.add_overrides(parser, text)


def _study(arguments: argparse.Namespace) -> int:
    if arguments.jobs < 1 or (arguments.seeds is not None and arguments.seeds < 1):
        raise ConfigError(
            f"--jobs {arguments.jobs}, --seeds {arguments.seeds}: expected whole numbers from 1"
        )
    name, study = read_study(arguments.study)
    out: Path = (arguments.out or Path("runs", f"{name}-{arguments.preset}")).resolve()
    if study.kind == "speed":
        from studies.speed import speed

        return speed(name, study, arguments, out)
    if arguments.dry_run:
        for preset in (*(each for each in PRESETS if each != arguments.preset), arguments.preset):
            if set(arguments.part) <= set(study.parts_of(preset)) or preset == arguments.preset:
                made = _plan(name, study, preset, out, arguments)
                print("\n".join(cost_lines(made, listed=preset == arguments.preset)))
        return EXIT_FINISHED
    return _run(_plan(name, study, arguments.preset, out, arguments), arguments, out)


def _plan(
    name: str, study: StudyConfig, preset: str, out: Path, arguments: argparse.Namespace
) -> StudyPlan:
    return plan(
        name,
        study,
        preset,
        out=out,
        overrides=arguments.overrides,
        parts=arguments.part,
        most_seeds=arguments.seeds,
    )


def _run(made: StudyPlan, arguments: argparse.Namespace, out: Path) -> int:
    from studies import page, reading
    from studies.run import Where, run_missing

    code = EXIT_FINISHED
    if not arguments.report:
        code = run_missing(made, out, Where(arguments.jobs, arguments.cluster))
    readings: Mapping[str, reading.Reading] = {
        run.name: reading.read(made, run, out) for run in made.runs.values()
    }
    batches = reading.check_batches(made, out)
    folder = (arguments.results or out).resolve()
    body = page.write(made, readings, batches, folder)
    for line in body["verdicts"]:
        print(line)
    for run, each in readings.items():
        if each.outcome in ("diverged", "failed"):
            print(f"{run}: {each.outcome}, see {reading.runs_folder(out) / run / 'logs'}")
    state = "partial: " if body["partial"] else ""
    print(f"{state}{folder / made.name}.md")
    return code


VERBS = (
    Verb(
        "study",
        "run a study: what an architecture or a trick gives, with intervals",
        _arguments,
        _study,
        "study realformer --dry-run\n"
        "study realformer --local --jobs 2 --out runs/realformer\n"
        "study masks data.dir=data/mine --part units\n"
        "study realformer --preset gpu --cluster c.yaml --jobs 8",
        if_interrupted=_LEFT,
    ),
)
