"""Command line of the training pipeline."""

import argparse
import sys
from pathlib import Path

from pipeline.config.load import explain, load, to_yaml
from pipeline.config.run import PretrainConfig
from pipeline.errors import EXIT_FAILED_RETRY, PostnormError
from pipeline.runtime import cli, env
from pipeline.runtime.files import record_exit
from pipeline.train.stop import StopRequest

_EXAMPLES = """\
  python -m pipeline config configs/demo.yaml --explain train.lr=1e-3
  torchrun --standalone --nproc-per-node 2 -m pipeline pretrain configs/demo.yaml
  python -m pipeline fill-mask runs/demo/train "The function returns a [MASK] of strings."
  python -m pipeline export runs/demo/train runs/demo/export
"""


def _config(arguments: argparse.Namespace) -> int:
    loaded = load(PretrainConfig, arguments.config, arguments.overrides)
    print(explain(loaded) if arguments.explain else to_yaml(loaded.config))
    return 0


# The other commands import torch, and DeepSpeed with it, only when they are run: `config` and
# `--help` answer at once.


def _pretrain(arguments: argparse.Namespace) -> int:
    stop = StopRequest()
    process = env.process_info()
    run_dir, code = env.launched_run_dir(), EXIT_FAILED_RETRY
    try:
        config = load(PretrainConfig, arguments.config, arguments.overrides).config
        run_dir = config.run_dir
        from pipeline.train.build import pretrain

        code = pretrain(config, process, stop)
    except PostnormError as error:
        code = error.exit_code
        raise
    finally:
        if run_dir:
            record_exit(Path(run_dir), process, code)
    return code


def _fill_mask(arguments: argparse.Namespace) -> int:
    from pipeline.export.fill_mask import fill_mask, text_table

    for text in arguments.text:
        print(text_table(fill_mask(arguments.run_dir, text, top=arguments.top)))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from pipeline.export.weights import export

    report = export(arguments.run_dir, arguments.out)
    print(
        f"{arguments.out}: step {report.step}, largest difference of logits "
        f"{report.max_abs_diff:.2e} over {report.num_logits:,}"
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
    pretrain = commands.add_parser("pretrain", help="run or resume a pre-training run (one rank)")
    pretrain.set_defaults(run=_pretrain)
    for command in (config, pretrain):
        cli.add_config_arguments(command)
    fill = commands.add_parser("fill-mask", help="most likely tokens at each [MASK] of a text")
    fill.add_argument("run_dir", type=Path, metavar="RUN", help="run folder, or an exported one")
    fill.add_argument("text", nargs="+", help='such as "the [MASK] of a list"')
    fill.add_argument("--top", type=int, default=5, help="candidates shown (default 5)")
    fill.set_defaults(run=_fill_mask)
    export = commands.add_parser("export", help="write weights, config and tokenizer of a run")
    export.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    export.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    export.set_defaults(run=_export)
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(_parser()))
