"""The verbs of `pipeline`: their arguments, and what they call.

Nothing here imports torch before a verb needs it: `config`, `model`, `status` and `--help` answer
at once.
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pipeline.checkpoints.commands import CHECKPOINT
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, ConfigError
from pipeline.finetune.commands import TASKS
from pipeline.multitask.commands import MULTITASK, TRANSFER
from pipeline.runtime import cli, env
from pipeline.runtime.cli import Verb
from pipeline.runtime.files import write_atomic
from pipeline.runtime.rank import Rank, run_as_rank
from pipeline.use.evaluate_command import EVALUATE
from pipeline.use.pretrain import train_as_rank
from pipeline.use.vector_commands import ENCODE, SIMILAR, STS, WHITEN, add_vector_options


def _fill_mask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder, or an exported one")
    parser.add_argument("text", nargs="+", help='such as "the [MASK] of a list"')
    parser.add_argument("--top", type=int, default=5, help="candidates shown (default 5)")


def _fill_mask(arguments: argparse.Namespace) -> None:
    from pipeline.use.model import load as load_model

    model = load_model(arguments.run_dir)
    for text in arguments.text:
        for number, candidates in enumerate(model.fill_mask(text, arguments.top), start=1):
            shown = "  ".join(f"{token!r} {probability:.3f}" for token, probability in candidates)
            print(f"[MASK] {number}: {shown}")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="RUN", help="run folder, or model folder")
    add("out", type=Path, metavar="OUT", help="folder to write")
    add(
        "--format",
        choices=("postnorm", "hf", "sentence-transformers"),
        default="postnorm",
        help="for this project (default), for transformers, or for sentence-transformers, which "
        "alone takes the options below",
    )
    add_vector_options(parser)


def _export(arguments: argparse.Namespace) -> None:
    from pipeline.finetune.export import export_hf
    from pipeline.use.folder import export
    from pipeline.use.sentences import export_sentence_transformers

    chosen = arguments.pooling, arguments.max_length, arguments.whiten
    if arguments.format == "sentence-transformers":
        report = export_sentence_transformers(arguments.source, arguments.out, *chosen)
    elif any(chosen):
        raise ConfigError(
            "--pooling, --max-length and --whiten are of --format sentence-transformers; leave "
            f"them out of --format {arguments.format}"
        )
    else:
        write = export_hf if arguments.format == "hf" else export
        report = write(arguments.source, arguments.out)
    print(
        f"{arguments.out}: largest difference of logits {report.max_abs_diff:.2e} over "
        f"{report.num_logits:,}"
    )
    if report.note:
        print(report.note)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoint", type=Path, metavar="SRC", help="Hugging Face folder, or TensorFlow checkpoint"
    )
    add("out", type=Path, metavar="OUT", help="folder to write")
    add(
        "--family",
        choices=("bert", "realformer", "roberta", "roformer", "roformer_v2"),
        help="needed for TensorFlow checkpoints of BERT and RealFormer, whose names are the same",
    )
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="KEY",
        help="a key of the config that is not known and changes nothing; may be repeated",
    )
    cli.add_overrides(parser, "of the architecture, such as norm_eps=1e-7", "field=value")


def _convert(arguments: argparse.Namespace) -> None:
    from pipeline.use.convert import convert

    report = convert(
        arguments.checkpoint,
        arguments.out,
        family=arguments.family,
        overrides=arguments.overrides,
        ignored=arguments.ignore,
    )
    print(f"{arguments.out}: {report.family}, {report.num_parameters:,} parameters")
    for kind, keys in report.keys.items():
        if keys:
            print(f"config keys {kind}: {', '.join(sorted(keys))}")
    for text in report.assumed:
        print(f"assumed {text}")
    if report.left_out:
        print(f"left out: {', '.join(report.left_out)}")
    if report.made_new:
        print(f"made new, so that fill-mask needs training first: {', '.join(report.made_new)}")
    if report.no_tokenizer:
        print(f"no tokenizer, so the model reads no text: {report.no_tokenizer}")


def _grow_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="run folder, or model folder")
    add("out", type=Path, metavar="OUT", help="folder to write")
    add("--width", type=int, default=1, help="factor, a power of 2; changes no logit")
    add("--depth", type=int, help="layers, a multiple of those there are; changes logits")
    noise = "share of each matrix' deviation that is added (default 0)"
    add("--noise", type=float, default=0.0, help=noise)
    add("--seed", type=int, default=0, help="of the noise (default 0)")


def _grow(arguments: argparse.Namespace) -> None:
    from pipeline.use.grow import grow

    report = grow(
        arguments.source,
        arguments.out,
        width=arguments.width,
        depth=arguments.depth,
        noise=arguments.noise,
        seed=arguments.seed,
    )
    print(
        f"{arguments.out}: {report.config.num_layers} layers of {report.config.hidden_size}, "
        f"{report.num_parameters_before:,} parameters before, {report.num_parameters:,} now"
    )
    for note in report.notes:
        print(note)


USE: tuple[Verb, ...] = (
    EVALUATE,
    Verb(
        "fill-mask",
        "most likely tokens at each [MASK] of a text",
        _fill_mask_arguments,
        _fill_mask,
        'fill-mask runs/demo/train "The function returns a [MASK] of strings."',
    ),
    ENCODE,
    WHITEN,
    SIMILAR,
    STS,
    Verb(
        "export",
        "write a run's model as a folder",
        _export_arguments,
        _export,
        "export runs/demo/train runs/demo/hf --format hf",
    ),
    Verb(
        "convert",
        "read a published checkpoint",
        _convert_arguments,
        _convert,
        """\
convert bert-base-chinese/ models/bert
convert ckpt/ models/realformer --family realformer norm_eps=1e-7""",
    ),
    Verb(
        "grow",
        "a wider or deeper model that starts from this one",
        _grow_arguments,
        _grow,
        "grow runs/demo/train models/wide --width 2 --noise 0.01",
    ),
)


_DESCRIPTION = """\
Show where the time of a run's training steps goes on this machine: real steps with the run's own
data, from random weights. Times are means over the steps and ranks and add up to the step. run_dir
is neither read nor written. The profiler slows the host down, which shows in "idle or host", so the
same number of steps runs without it first. Of the roofline: the least time in which the device, by
its data sheet, could compute the products of the linear layers, or compute and move the data of
attention (attention_work in pipeline/profile/step.py), divided by the time taken."""


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = _DESCRIPTION
    cli.add_config_arguments(parser)
    add("--steps", type=int, default=20, metavar="N", help="default 20")
    add(
        "--warm-up",
        type=int,
        default=5,
        metavar="N",
        help="steps before them, in which kernels are compiled (default 5)",
    )
    add("--json", type=Path, dest="json_file", metavar="FILE", help="write the numbers as JSON")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write rank 0's trace for ui.perfetto.dev; .gz compresses it",
    )


def _profile(arguments: argparse.Namespace) -> int:
    for name in ("steps", "warm_up"):
        number = getattr(arguments, name)
        if number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: expected 1 or more")
    return run_as_rank(partial(_profile_on, arguments), env.process_info_or_alone())


def _profile_on(arguments: argparse.Namespace, rank: Rank) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    # Importing torch takes seconds.
    from pipeline.profile.step import profile_run, profile_text

    profile = profile_run(
        config,
        rank.process,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        trace_file=arguments.trace,
    )
    if rank.process.is_first:
        print(profile_text(profile))
        if arguments.json_file:
            write_atomic(arguments.json_file, (json.dumps(asdict(profile)) + "\n").encode())
    return EXIT_FINISHED


def _bandwidth_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--records",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to write NODE.bandwidth.json to",
    )
    add(
        "--nodes",
        default="",
        metavar="'A B'",
        help="names of all nodes in order, to name missing ones",
    )
    add("--megabytes", type=float, default=256.0, help="size of each rank's tensor (default 256)")
    add(
        "--timeout",
        type=float,
        default=180.0,
        metavar="S",
        help="time limit for everything (default 180)",
    )


def _bandwidth(arguments: argparse.Namespace) -> int:
    # It measures between ranks, so a single process is a mistake.
    return run_as_rank(partial(_bandwidth_on, arguments), env.process_info())


def _bandwidth_on(arguments: argparse.Namespace, rank: Rank) -> int:
    from pipeline.profile.bandwidth import measure_bandwidth

    rank.if_lost = f"The records in {arguments.records} say more"
    return measure_bandwidth(
        rank.process,
        arguments.records,
        nodes=arguments.nodes.split(),
        megabytes=arguments.megabytes,
        timeout_s=arguments.timeout,
    )


PROFILE = Verb(
    "profile",
    "show where the time of a run's training steps goes",
    _profile_arguments,
    _profile,
    """\
profile configs/demo.yaml --steps 20
profile run.yaml kernels.attention=reference --json profile.json
torchrun --standalone --nproc-per-node 8 -m postnorm profile run.yaml --trace t.json.gz""",
)
BANDWIDTH = Verb(
    "bandwidth",
    "measure all-reduce between nodes, for preflight (run on every rank)",
    _bandwidth_arguments,
    _bandwidth,
    "torchrun --standalone --nproc-per-node 8 -m postnorm bandwidth --records /tmp/records",
)


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _status(arguments: argparse.Namespace) -> None:
    from pipeline.inspect.status import run_status, summary

    status = run_status(arguments.run_dir)
    if arguments.json:
        print(json.dumps(asdict(status)))
    else:
        print(summary(arguments.run_dir, status).text())


def _coverage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    cli.add_config_arguments(parser)


def _coverage(arguments: argparse.Namespace) -> int:
    from pipeline.inspect.coverage import coverage, coverage_text

    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    report = coverage(config.train_data, config.train.num_steps)
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        for line in coverage_text(report):
            print(line)
        if config.objective.pairs == "nsp":
            print("mlm_nsp then replaces the second part of about half of the pieces")
    return EXIT_FINISHED if report.is_exact else EXIT_FAILED_DO_NOT_RETRY


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="run folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="optimizer step, from 1")
    what.add_argument("--batch", type=int, metavar="N", help="batch, from 0, skipped ones included")
    what.add_argument("--find", metavar="ID", help="the steps in which a document is seen")
    what.add_argument("--skip", action="store_true", help="the batches that were skipped")
    add("--rank", type=int, metavar="R", help="only this rank's part of the step")
    add("--world-size", type=int, metavar="W", help="ranks; default: of the run's newest start")
    add("--json", action="store_true", help="one JSON object a sequence")
    cli.add_overrides(parser, "where the dataset is, if it was moved", "data.dir=FOLDER")


def _inspect(arguments: argparse.Namespace) -> None:
    from pipeline.inspect.run import find_text, open_run, skipped_text, step_text
    from pipeline.multitask.config import MIX_FILE

    if (arguments.run_dir / MIX_FILE).is_file():
        _inspect_mix(arguments)
        return
    run = open_run(arguments.run_dir, arguments.overrides)
    if arguments.find is not None:
        lines = find_text(run, arguments.find)
    elif arguments.skip:
        lines = skipped_text(run)
    else:
        by_step = arguments.step is not None
        place = run.batch_of_step(arguments.step) if by_step else run.batch(arguments.batch)
        lines = step_text(run, place, arguments.rank, arguments.world_size, as_json=arguments.json)
    for line in lines:
        print(line)


def _inspect_mix(arguments: argparse.Namespace) -> None:
    if arguments.find is not None or arguments.skip:
        raise ConfigError(
            f"{arguments.run_dir} is a multi-task run, which --find and --skip do not know: use "
            "--step N or --batch N; ledger.jsonl in it lists what was skipped"
        )
    from pipeline.multitask.run import step_lines

    step, batch = arguments.step, arguments.batch
    for line in step_lines(arguments.run_dir, step, batch, as_json=arguments.json):
        print(line)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN", help="run folders; the first is the base")
    add("--plot", type=Path, metavar="FILE", help="draw the losses, as FILE.svg or FILE.html")
    add("--json", action="store_true", help="one JSON object")


def _compare(arguments: argparse.Namespace) -> None:
    from pipeline.inspect.compare import compare, comparison_text, read_runs, write_plot

    runs = read_runs(arguments.run_dirs)
    comparison = compare(runs)
    if arguments.plot:
        write_plot(arguments.plot, runs, comparison)
    if arguments.json:
        print(json.dumps(asdict(comparison)))
        return
    for line in comparison_text(comparison):
        print(line)


STATUS = Verb(
    "status",
    "how a run is doing, from the files in its folder",
    _status_arguments,
    _status,
    "status runs/demo/train",
)
COVERAGE = Verb(
    "coverage",
    "what a run would see: epochs, fill and tokens, each token once",
    _coverage_arguments,
    _coverage,
    "coverage configs/demo.yaml train.num_steps=2000",
)
COMPARE = Verb(
    "compare",
    "where runs differ: config, batches, loss and speed",
    _compare_arguments,
    _compare,
    """\
compare runs/one runs/two
compare runs/one runs/two runs/three --plot losses.html""",
)
INSPECT = Verb(
    "inspect",
    "documents, packing and masks of any step of a run, past or to come",
    _inspect_arguments,
    _inspect,
    """\
inspect runs/demo/train --step 12 --rank 1 | less
inspect runs/demo/train --find python/bisect.rst""",
)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", help="YAML file of a model or of a run")
    cli.add_overrides(parser, "such as bias=true; in a run: model.bias=true", "field=value")
    add("--seq-len", type=int, metavar="N", help="default: the run's, or 512")
    add(
        "--document-len",
        type=int,
        metavar="N",
        help="tokens of a document, for attention of variable length",
    )
    add("--micro-batch", type=int, metavar="N", help="default: the run's, or 8")
    add("--ranks", type=int, metavar="N", default=1, help="default 1")


def _model(arguments: argparse.Namespace) -> None:
    from pipeline.model.describe import describe, read_plan

    plan = read_plan(
        arguments.config,
        arguments.overrides,
        seq_len=arguments.seq_len,
        micro_batch=arguments.micro_batch,
        num_ranks=arguments.ranks,
        document_len=arguments.document_len,
    )
    print(describe(plan))


def _pretrain(arguments: argparse.Namespace) -> int:
    code, _ = train_as_rank(arguments.config, arguments.overrides)
    return code


CONFIG = cli.config_verb(PretrainConfig, "config configs/demo.yaml --explain train.lr=1e-3")
MODEL = Verb(
    "model",
    "parameters, FLOPs and memory of a model",
    _model_arguments,
    _model,
    "model configs/model/roformer_v2-base.yaml --seq-len 128 vocab_size=21128",
)
PRETRAIN = Verb(
    "pretrain",
    "run or resume a pre-training run: one process, or one rank of a launcher's",
    cli.add_config_arguments,
    _pretrain,
    """\
pretrain configs/demo.yaml train.num_steps=200
torchrun --standalone --nproc-per-node 2 -m postnorm pretrain configs/demo.yaml""",
)
TRAIN = (
    CONFIG, MODEL, COVERAGE, PRETRAIN, STATUS, INSPECT, COMPARE, CHECKPOINT, PROFILE, BANDWIDTH
)  # fmt: skip
GROUPS: dict[str, tuple[Verb, ...]] = {
    "train": (*TRAIN, MULTITASK),
    "tasks": (*TASKS, TRANSFER),
    "use": USE,
}
VERBS: tuple[Verb, ...] = tuple(verb for verbs in GROUPS.values() for verb in verbs)
