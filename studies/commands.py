"""`postnorm study`: runs what is missing of a study, and writes its page, JSON and figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import EXIT_FINISHED
from pipeline.runtime import cli
from pipeline.runtime.cli import argument, at_least, option, verb
from studies.config import HOME, PRESETS, StudyPlan, plan, read_study
from studies.cost import cost_lines

_KNOWN = ", ".join(sorted(path.stem for path in HOME.glob("*.yaml")))


@dataclass(frozen=True)
class StudyArguments:
    """The command line of `study`."""

    study: str = argument(f"a YAML file, or one of: {_KNOWN}", "STUDY")
    preset: str = option("size of the study (default small)", choices=PRESETS, default="small")
    out: Path | None = option("folder of runs; default runs/NAME-PRESET", "DIR")
    results: Path | None = option("folder of page and figures; default: OUT", "DIR")
    part: list[str] = option("only this part; repeatable", "NAME", action="append", default=[])
    seeds: int | None = option("at most N seeds", "N", type=at_least(1))
    local: bool = option("run here, which is the default", one_of="where")
    cluster: str | None = option("submit to SLURM with this profile", "FILE", one_of="where")
    jobs: int = option("runs at the same time (default 1)", "N", type=at_least(1), default=1)
    dry_run: bool = option("list runs and hours; change nothing", one_of="what")
    report: bool = option("start nothing; write the page from what is there", one_of="what")
    overrides: list[str] = cli.overrides(
        "of all runs, such as data.dir=data/mine; tasks.section.key=value is of all tasks"
    )


@verb(
    "study realformer --dry-run",
    "study realformer --local --jobs 2 --out runs/realformer",
    "study masks data.dir=data/mine --part units",
    "study realformer --preset gpu --cluster c.yaml --jobs 8",
    if_interrupted="runs keep their checkpoints; the same command continues the study",
)
def study(arguments: StudyArguments) -> int:
    """Run a study: what an architecture or a trick gives, with intervals.

    Runs what is missing of a study, and writes OUT/NAME.md, .json and figures; the same command
    resumes it.
    """
    name, read = read_study(arguments.study)
    out = (arguments.out or Path("runs", f"{name}-{arguments.preset}")).resolve()
    if read.kind == "speed":
        from studies.speed import speed

        return speed(name, read, arguments, out)

    def planned(preset: str) -> StudyPlan:
        return plan(
            name,
            read,
            preset,
            out=out,
            overrides=arguments.overrides,
            parts=arguments.part,
            most_seeds=arguments.seeds,
        )

    if arguments.dry_run:
        for preset in (*(each for each in PRESETS if each != arguments.preset), arguments.preset):
            if set(arguments.part) <= set(read.parts_of(preset)) or preset == arguments.preset:
                is_listed = preset == arguments.preset
                print("\n".join(cost_lines(planned(preset), listed=is_listed)))
        return EXIT_FINISHED
    return _run(planned(arguments.preset), arguments, out)


def _run(made: StudyPlan, arguments: StudyArguments, out: Path) -> int:
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


VERBS = (study,)
