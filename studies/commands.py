"""`postnorm study`: runs what is missing of a study, and writes its page, JSON and figures."""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path

from launch.cluster import ClusterConfig, HardwareConfig
from launch.plan import plan as plan_run
from pipeline.config.model import ModelConfig
from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.model.cost import flops_per_token
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb
from pipeline.runtime.summary import table
from studies import config as configs
from studies.config import PRESETS, Plan, StudyRun, plan, read_study

logger = logging.getLogger(__name__)

_CPU_TFLOPS = 0.06
"""Of two shared cores: narrow models reach about that; 4 layers by 128 in bf16 reach 0.09."""
_START_S = 6.0
"""Of two cores, before a run's first step: two processes, which import torch."""
_VOCABULARY = 4096
_S_PER_HOUR = 3600
_LEFT = "runs keep their checkpoints; the same command continues the study"


def _arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(sorted(path.stem for path in configs.HOME.glob("*.yaml")))
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
        for preset in PRESETS:
            made = plan(
                name, study, preset, out=out, overrides=arguments.overrides,
                parts=_parts_of(study, preset, arguments.part), most_seeds=arguments.seeds,
            )  # fmt: skip
            print("\n".join(cost_lines(made, listed=preset == arguments.preset)))
        return EXIT_FINISHED
    made = plan(
        name, study, arguments.preset, out=out, overrides=arguments.overrides,
        parts=arguments.part, most_seeds=arguments.seeds,
    )  # fmt: skip
    return _run(made, arguments, out)


def _parts_of(study: configs.StudyConfig, preset: str, wanted: list[str]) -> list[str]:
    """Leave out wanted parts that another preset than the asked one lacks."""
    for part in wanted:
        configs.known_name("parts", study.parts, part, "--part")
    has = study.presets[preset].parts or tuple(study.parts)
    return [part for part in wanted if part in has]


def _run(made: Plan, arguments: argparse.Namespace, out: Path) -> int:
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
    body = page.write(made, readings, batches, folder, _more(made, readings))
    for line in body["verdicts"]:
        print(line)
    for run, each in readings.items():
        if each.outcome in ("diverged", "failed"):
            print(f"{run}: {each.outcome}, see {reading.runs_folder(out) / run / 'logs'}")
    state = "partial: " if body["partial"] else ""
    print(f"{state}{folder / made.name}.md")
    return code


def _more(made: Plan, readings: Mapping[str, "object"]) -> tuple[dict[str, object], list[str]]:
    """Let a study's own file of analysis add to the page."""
    return {}, []


def cost_lines(made: Plan, *, listed: bool) -> list[str]:
    """Estimate the time of a study, run by run where they are to be listed."""
    rows = [("run", "steps", "FLOP", "hours")]
    total = flops = tasks = 0.0
    for run in made.runs.values():
        seconds, of_run = _cost(run, made.preset)
        total, flops = total + seconds, flops + of_run
        rows.append((run.name, f"{run.config.train.num_steps:,}", f"{of_run:.2e}",
                     f"{seconds / _S_PER_HOUR:.3f}"))  # fmt: skip
    for run_name, task in made.fine_tunings:
        tasks += _task_seconds(made, made.runs[run_name], task)
    hours = (total + tasks) / _S_PER_HOUR
    device = "of two shared CPU cores" if made.preset == "small" else "of one H100 (40% of peak)"
    head = (
        f"{made.name}, preset {made.preset}: {len(made.runs)} pre-training runs, {flops:.2e} FLOP, "
        f"{hours:.2f} hours {device}, of which {tasks / _S_PER_HOUR:.2f} are fine-tunings at most; "
        "by FLOPs, without evaluations"
    )
    return [head, *(table(rows, right=(1, 2, 3)) if listed else [])]  # type: ignore[list-item]


def _hardware(preset: str) -> HardwareConfig:
    if preset == "small":
        return HardwareConfig(tflops=_CPU_TFLOPS, utilisation=1.0)
    return HardwareConfig(gpu="H100")


def _sized(config: ModelConfig) -> ModelConfig:
    from dataclasses import replace

    return replace(config, vocab_size=config.vocab_size or _VOCABULARY)


def _cost(run: StudyRun, preset: str) -> tuple[float, float]:
    """Return the seconds and FLOPs of a run, as `postnorm plan` has them."""
    from dataclasses import replace

    config = replace(run.config, model=_sized(run.config.model))
    found = plan_run(config, ClusterConfig(hardware=_hardware(preset)))
    return (found.train_s or 0.0) + _START_S, found.flops


def _task_seconds(made: Plan, run: StudyRun, task: str) -> float:
    """Bound the time of a fine-tuning: every row as long as the task allows."""
    config = made.tasks[task]
    of = flops_per_token(_sized(run.config.model), config.input.max_length, 0.0)
    rows = config.data.train_rows or 2000
    scored = (config.data.dev_rows or rows) * (config.train.epochs + 1)
    scored += config.data.test_rows or rows
    tokens = config.input.max_length
    work = tokens * (rows * config.train.epochs * of.total + scored * of.forward)
    hardware = _hardware(made.preset)
    return work / (hardware.flops_per_rank * hardware.utilisation) + _START_S


VERBS = (
    Verb(
        "study",
        "run a study: what an architecture or a trick gives, with intervals",
        _arguments,
        _study,
        "study realformer --dry-run\n"
        "study realformer --local --jobs 2 --out runs/realformer\n"
        "study packing data.dir=data/mine --part masks\n"
        "study realformer --preset gpu --cluster c.yaml --jobs 8",
        if_interrupted=_LEFT,
    ),
)
