"""Verbs that use what was trained: evaluate, fill-mask, encode, export, convert and grow."""

import argparse
import sys
from pathlib import Path

from pipeline.runtime.cli import Verb
from pipeline.use.evaluate_command import EVALUATE


def _fill_mask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder, or an exported one")
    parser.add_argument("text", nargs="+", help='such as "the [MASK] of a list"')
    parser.add_argument("--top", type=int, default=5, help="candidates shown (default 5)")


def _fill_mask(arguments: argparse.Namespace) -> None:
    from pipeline.use.fill_mask import fill_mask, text_table

    for text in arguments.text:
        print(text_table(fill_mask(arguments.run_dir, text, top=arguments.top)))


def _encode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="MODEL", help="run folder, or model folder")
    parser.add_argument(
        "--pooling", choices=("cls", "mean", "first_last_avg"), default="mean", help="default mean"
    )
    parser.add_argument("--out", type=Path, help=".npy file; default: a JSON list a line")
    parser.add_argument("--batch-size", type=int, default=32, help="texts at once (default 32)")
    parser.add_argument("--max-length", type=int, help="tokens of a text; longer ones are cut")


def _encode(arguments: argparse.Namespace) -> None:
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


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN", help="run folder, or model folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--format",
        choices=("postnorm", "hf"),
        default="postnorm",
        help="for this project (default), or for transformers",
    )


def _export(arguments: argparse.Namespace) -> None:
    from pipeline.use.export import export
    from pipeline.use.hf import export_hf

    report = (export_hf if arguments.format == "hf" else export)(arguments.source, arguments.out)
    print(
        f"{arguments.out}: largest difference of logits {report.max_abs_diff:.2e} over "
        f"{report.num_logits:,}"
    )


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, metavar="SRC", help="Hugging Face folder, or TensorFlow checkpoint"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--family",
        choices=("bert", "realformer", "roberta", "roformer", "roformer_v2"),
        help="needed for TensorFlow checkpoints of BERT and RealFormer, whose names are the same",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="field=value",
        help="of the architecture, such as norm_eps=1e-7",
    )


def _convert(arguments: argparse.Namespace) -> None:
    from pipeline.use.convert import convert

    report = convert(
        arguments.checkpoint,
        arguments.out,
        family=arguments.family,
        overrides=arguments.overrides,
    )
    print(f"{arguments.out}: {report.family}, {report.num_parameters:,} parameters")
    if report.left_out:
        print(f"left out: {', '.join(report.left_out)}")
    if report.no_tokenizer:
        print(f"no tokenizer, so the model reads no text: {report.no_tokenizer}")


def _grow_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="run folder, or model folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--width", type=int, default=1, help="factor, a power of 2; changes no logit"
    )
    parser.add_argument("--depth", type=int, help="layers, a multiple of those there are")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="share of each matrix' deviation that is added (default 0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")


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


VERBS: tuple[Verb, ...] = (
    EVALUATE,
    Verb(
        "fill-mask",
        "most likely tokens at each [MASK] of a text",
        _fill_mask_arguments,
        _fill_mask,
        'fill-mask runs/demo/train "The function returns a [MASK] of strings."',
    ),
    Verb(
        "encode",
        "vectors of texts on standard input, one a line",
        _encode_arguments,
        _encode,
        "encode models/bert --pooling mean --out vectors.npy < texts.txt",
    ),
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
        "convert bert-base-chinese/ models/bert",
    ),
    Verb(
        "grow",
        "a wider or deeper model that starts from this one",
        _grow_arguments,
        _grow,
        "grow runs/demo/train models/wide --width 2 --noise 0.01",
    ),
)
