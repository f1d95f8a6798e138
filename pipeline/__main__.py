"""Command line of the training pipeline."""

import sys

from pipeline.train.stop import StopRequest

# Before all other imports, which take 0.2 s, and torch 2 s: by default these signals kill.
if __name__ == "__main__" and sys.argv[1:2] in (["pretrain"], ["evaluate"]):
    _signals: StopRequest | None = StopRequest()
else:
    _signals = None

import argparse
import json
import logging
import os
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pipeline.checkpoints.commands import add_checkpoint
from pipeline.config.load import explain, load, to_yaml
from pipeline.config.runs import PretrainConfig
from pipeline.errors import (
    EXIT_FAILED_DO_NOT_RETRY,
    EXIT_FAILED_RETRY,
    EXIT_FINISHED,
    PostnormError,
)
from pipeline.profile.command import add_profile
from pipeline.runtime import cli, env
from pipeline.runtime.run_folder import record_exit
from pipeline.use.evaluate_command import add_evaluate

_EXAMPLES = """\
  python -m pipeline config configs/demo.yaml --explain train.lr=1e-3
  python -m pipeline model configs/model/roformer_v2-base.yaml --seq-len 128 vocab_size=21128
  torchrun --standalone --nproc-per-node 2 -m pipeline pretrain configs/demo.yaml
  python -m pipeline status runs/demo/train
  python -m pipeline checkpoint list runs/demo/train
  python -m pipeline evaluate runs/demo/train --all
  python -m pipeline profile configs/demo.yaml --steps 20
  python -m pipeline coverage configs/demo.yaml train.num_steps=2000
  python -m pipeline inspect runs/demo/train --step 12 --rank 1 | less
  python -m pipeline inspect runs/demo/train --find python/bisect.rst
  python -m pipeline fill-mask runs/demo/train "The function returns a [MASK] of strings."
  python -m pipeline export runs/demo/train runs/demo/hf --format hf
  python -m pipeline convert bert-base-chinese/ models/bert
  python -m pipeline encode models/bert --pooling mean --out vectors.npy < texts.txt
  python -m pipeline grow runs/demo/train models/wide --width 2 --noise 0.01
"""


def _config(arguments: argparse.Namespace) -> int:
    loaded = load(PretrainConfig, arguments.config, arguments.overrides)
    print(explain(loaded) if arguments.explain else to_yaml(loaded.config))
    return 0


def _model(arguments: argparse.Namespace) -> int:
    from pipeline.model.describe import describe, read_plan

    plan = read_plan(
        arguments.config, arguments.overrides,
        seq_len=arguments.seq_len, micro_batch=arguments.micro_batch, num_ranks=arguments.ranks,
        document_len=arguments.document_len,
    )  # fmt: skip
    print(describe(plan))
    return 0


def _coverage(arguments: argparse.Namespace) -> int:
    from pipeline.inspect.coverage import coverage, coverage_text

    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    found = coverage(config.train_data, config.train.num_steps)
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        for line in coverage_text(found):
            print(line)
    return EXIT_FINISHED if found.is_exact else EXIT_FAILED_DO_NOT_RETRY


def _status(arguments: argparse.Namespace) -> int:
    from pipeline.inspect.status import run_status, status_text

    status = run_status(arguments.run_dir)
    if arguments.json:
        print(json.dumps(asdict(status)))
    else:
        print("\n".join(status_text(arguments.run_dir, status)))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from pipeline.inspect.run import find_text, open_run, skipped_text
    from pipeline.inspect.step import Ranks, step_text

    run = open_run(arguments.run_dir, arguments.overrides)
    if arguments.find is not None:
        lines = find_text(run, arguments.find)
    elif arguments.skip:
        lines = skipped_text(run)
    else:
        place = run.batch(arguments.batch) if arguments.step is None else run.batch_of_step(
            arguments.step
        )  # fmt: skip
        ranks = Ranks(arguments.rank, arguments.world_size)
        lines = step_text(run, place, ranks, as_json=arguments.json)
    for line in lines:
        print(line)
    return 0


# The other commands import torch, and DeepSpeed with it, only when they are run: `config`, `model`
# and `--help` answer at once.


def _pretrain(arguments: argparse.Namespace) -> int:
    stop = _signals or StopRequest()
    process = env.process_info()
    run_dir, code = env.launched_run_dir(), EXIT_FAILED_RETRY
    try:
        config = load(PretrainConfig, arguments.config, arguments.overrides).config
        run_dir = config.run_dir
        from pipeline.train.build import pretrain
        from pipeline.use.export import initial_weights

        source = config.init_from
        initial = partial(initial_weights, Path(source)) if source is not None else None
        code = pretrain(config, process, stop, initial)
    except PostnormError as error:
        code = error.exit_code
        raise
    finally:
        if run_dir:
            record_exit(Path(run_dir), process, code)
    return code


def _bandwidth(arguments: argparse.Namespace) -> int:
    from pipeline.profile.bandwidth import measure_bandwidth

    return measure_bandwidth(
        env.process_info(), arguments.records, nodes=arguments.nodes.split(),
        megabytes=arguments.megabytes, timeout_s=arguments.timeout,
    )  # fmt: skip


def _fill_mask(arguments: argparse.Namespace) -> int:
    from pipeline.use.fill_mask import fill_mask, text_table

    for text in arguments.text:
        print(text_table(fill_mask(arguments.run_dir, text, top=arguments.top)))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from pipeline.use.export import export
    from pipeline.use.hf import export_hf

    report = (export_hf if arguments.format == "hf" else export)(arguments.source, arguments.out)
    print(
        f"{arguments.out}: largest difference of logits {report.max_abs_diff:.2e} over "
        f"{report.num_logits:,}"
    )
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from pipeline.use.convert import convert

    report = convert(
        arguments.checkpoint, arguments.out,
        family=arguments.family, overrides=arguments.overrides,
    )  # fmt: skip
    print(f"{arguments.out}: {report.family}, {report.num_parameters:,} parameters")
    if report.left_out:
        print(f"left out: {', '.join(report.left_out)}")
    if report.no_tokenizer:
        print(f"no tokenizer, so the model reads no text: {report.no_tokenizer}")
    return 0


def _grow(arguments: argparse.Namespace) -> int:
    from pipeline.use.grow import grow

    report = grow(
        arguments.source, arguments.out,
        width=arguments.width, depth=arguments.depth, noise=arguments.noise, seed=arguments.seed,
    )  # fmt: skip
    config = report.config
    print(
        f"{arguments.out}: {config.num_layers} layers of {config.hidden_size}, "
        f"{report.num_parameters_before:,} parameters before, {report.num_parameters:,} now"
    )
    return 0


def _encode(arguments: argparse.Namespace) -> int:
    from pipeline.use.encode import TextEncoder, write_vectors

    encoder = TextEncoder(
        arguments.source, pooling=arguments.pooling, max_length=arguments.max_length
    )
    count = write_vectors(encoder, sys.stdin, arguments.batch_size, arguments.out)
    print(
        f"{count:,} texts, vectors of {encoder.size}; {encoder.num_cut:,} were cut at "
        f"{encoder.max_length} tokens",
        file=sys.stderr,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "pipeline", "Pre-trains Post-LN encoders and makes use of them.", _EXAMPLES
    )
    commands = parser.add_subparsers(required=True)
    config = commands.add_parser("config", help="check a config and print it in full")
    config.add_argument("--explain", action="store_true", help="with units, meanings and origins")
    config.set_defaults(run=_config)
    _add_model(commands)
    pretrain = commands.add_parser("pretrain", help="run or resume a pre-training run (one rank)")
    pretrain.set_defaults(run=_pretrain)
    coverage = commands.add_parser(
        "coverage", help="what a run would see: epochs, fill and tokens, each token once"
    )
    coverage.add_argument("--json", action="store_true", help="one JSON object")
    coverage.set_defaults(run=_coverage)
    for command in (config, pretrain, coverage):
        cli.add_config_arguments(command)
    status = commands.add_parser("status", help="how a run is doing, from the files in its folder")
    status.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    status.add_argument("--json", action="store_true", help="one JSON object")
    status.set_defaults(run=_status)
    add_checkpoint(commands)
    add_evaluate(commands, _signals)
    add_profile(commands)
    _add_inspect(commands)
    fill = commands.add_parser("fill-mask", help="most likely tokens at each [MASK] of a text")
    fill.add_argument("run_dir", type=Path, metavar="RUN", help="run folder, or an exported one")
    fill.add_argument("text", nargs="+", help='such as "the [MASK] of a list"')
    fill.add_argument("--top", type=int, default=5, help="candidates shown (default 5)")
    fill.set_defaults(run=_fill_mask)
    _add_bandwidth(commands)
    _add_exchange(commands)
    return parser


def _add_model(commands: Any) -> None:
    model = commands.add_parser("model", help="parameters, FLOPs and memory of a model")
    model.add_argument("config", help="YAML file of a model or of a run")
    model.add_argument("overrides", nargs="*", metavar="field=value",
                       help="such as bias=true; in a run's config model.bias=true")  # fmt: skip
    model.add_argument("--seq-len", type=int, metavar="N", help="default: the run's, or 512")
    model.add_argument("--document-len", type=int, metavar="N",
                       help="tokens of a document, for attention of variable length")  # fmt: skip
    model.add_argument("--micro-batch", type=int, metavar="N", help="default: the run's, or 8")
    model.add_argument("--ranks", type=int, metavar="N", default=1, help="default 1")
    model.set_defaults(run=_model)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect", help="documents, packing and masks of any step of a run, past or to come"
    )
    inspect.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    what = inspect.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="optimizer step, from 1")
    what.add_argument("--batch", type=int, metavar="N", help="batch, from 0, skipped ones included")
    what.add_argument("--find", metavar="ID", help="the steps in which a document is seen")
    what.add_argument("--skip", action="store_true", help="the batches that were skipped")
    inspect.add_argument("--rank", type=int, metavar="R", help="only this rank's part of the step")
    inspect.add_argument("--world-size", type=int, metavar="W",
                         help="number of ranks; default: of the run's newest start")  # fmt: skip
    inspect.add_argument("--json", action="store_true", help="one JSON object a sequence")
    inspect.add_argument("overrides", nargs="*", metavar="data.dir=FOLDER",
                         help="where the dataset is, if it was moved")  # fmt: skip
    inspect.set_defaults(run=_inspect)


def _add_bandwidth(commands: Any) -> None:
    bandwidth = commands.add_parser(
        "bandwidth", help="speed of all-reduce between nodes, for preflight (one rank)"
    )
    bandwidth.add_argument("--records", type=Path, required=True, metavar="DIR",
                           help="folder to write NODE.bandwidth.json to")  # fmt: skip
    bandwidth.add_argument("--nodes", default="", metavar="'A B'",
                           help="names of all nodes in order, to name missing ones")  # fmt: skip
    bandwidth.add_argument("--megabytes", type=float, default=256.0,
                           help="that each rank has (default 256)")  # fmt: skip
    bandwidth.add_argument("--timeout", type=float, default=180.0, metavar="S",
                           help="for all of it (default 180)")  # fmt: skip
    bandwidth.set_defaults(run=_bandwidth)


def _add_exchange(commands: Any) -> None:
    """Commands that read and write models."""
    export = commands.add_parser("export", help="write a run's model as a folder")
    export.add_argument("source", type=Path, metavar="RUN", help="run folder, or model folder")
    export.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    export.add_argument(
        "--format", choices=("postnorm", "hf"), default="postnorm",
        help="for this project (default), or for transformers",
    )  # fmt: skip
    export.set_defaults(run=_export)
    convert = commands.add_parser("convert", help="read a published checkpoint")
    convert.add_argument("checkpoint", type=Path, metavar="SRC",
                         help="Hugging Face folder, or TensorFlow checkpoint")  # fmt: skip
    convert.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    convert.add_argument(
        "--family", choices=("bert", "realformer", "roberta", "roformer", "roformer_v2"),
        help="needed for TensorFlow checkpoints of BERT and RealFormer, whose names are the same",
    )  # fmt: skip
    convert.add_argument("overrides", nargs="*", metavar="field=value",
                         help="of the architecture, such as norm_eps=1e-7")  # fmt: skip
    convert.set_defaults(run=_convert)
    grow = commands.add_parser("grow", help="a wider or deeper model that starts from this one")
    grow.add_argument("source", type=Path, metavar="SRC", help="run folder, or model folder")
    grow.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    grow.add_argument("--width", type=int, default=1, help="factor, a power of 2; changes no logit")
    grow.add_argument("--depth", type=int, help="layers, a multiple of those there are")
    grow.add_argument("--noise", type=float, default=0.0,
                      help="share of each matrix' deviation that is added (default 0)")  # fmt: skip
    grow.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    grow.set_defaults(run=_grow)
    encode = commands.add_parser("encode", help="vectors of texts on standard input, one a line")
    encode.add_argument("source", type=Path, metavar="MODEL", help="run folder, or model folder")
    encode.add_argument("--pooling", choices=("cls", "mean", "first_last_avg"), default="mean",
                        help="default mean")  # fmt: skip
    encode.add_argument("--out", type=Path, help=".npy file; default: a JSON list a line")
    encode.add_argument("--batch-size", type=int, default=32, help="texts at once (default 32)")
    encode.add_argument("--max-length", type=int, help="tokens of a text; longer ones are cut")
    encode.set_defaults(run=_encode)


def _leave(code: int) -> NoReturn:
    """Ends the process, at once if it failed within its process group.

    Python's way out would run into gloo's threads, which abort it with another exit code now and
    then. Children see their pipes closed.
    """
    if _signals is not None:
        _signals.ignore_from_now()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        _code = cli.run(_parser())
    except Exception:  # noqa: BLE001 - Python would print it as well, then end in its own way
        traceback.print_exc()
        _code = EXIT_FAILED_RETRY
    _leave(_code)
