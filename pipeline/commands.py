"""The verbs of `pipeline`, put together from those of its packages.

Nothing here imports torch before a verb needs it: `config`, `model`, `status` and `--help` answer
at once.
"""

import argparse
from functools import partial
from pathlib import Path

from pipeline.checkpoints.commands import CHECKPOINT
from pipeline.config.load import explain, load, to_yaml
from pipeline.config.runs import PretrainConfig
from pipeline.inspect.commands import COVERAGE, INSPECT, STATUS
from pipeline.profile.commands import BANDWIDTH, PROFILE
from pipeline.runtime import cli, env
from pipeline.runtime.cli import Verb
from pipeline.runtime.rank import Rank, run_as_rank
from pipeline.use.commands import VERBS as USE


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--explain", action="store_true", help="with units, meanings and origins")
    cli.add_config_arguments(parser)


def _config(arguments: argparse.Namespace) -> None:
    loaded = load(PretrainConfig, arguments.config, arguments.overrides)
    print(explain(loaded) if arguments.explain else to_yaml(loaded.config))


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file of a model or of a run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="field=value",
        help="such as bias=true; in a run's config model.bias=true",
    )
    parser.add_argument("--seq-len", type=int, metavar="N", help="default: the run's, or 512")
    parser.add_argument(
        "--document-len",
        type=int,
        metavar="N",
        help="tokens of a document, for attention of variable length",
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="default: the run's, or 8")
    parser.add_argument("--ranks", type=int, metavar="N", default=1, help="default 1")


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
    # The config may be unreadable; what launched this rank knows the folder of the run.
    return run_as_rank(
        partial(_pretrain_on, arguments), env.process_info_or_alone(), env.launched_run_dir()
    )


def _pretrain_on(arguments: argparse.Namespace, rank: Rank) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    rank.run_dir = Path(config.run_dir)
    from pipeline.train.build import pretrain
    from pipeline.use.trained import initial_weights

    source = config.init_from
    return pretrain(config, rank, partial(initial_weights, Path(source)) if source else None)


CONFIG = Verb(
    "config",
    "check a config and print it in full",
    _config_arguments,
    _config,
    "config configs/demo.yaml --explain train.lr=1e-3",
)
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
TRAIN = (CONFIG, MODEL, COVERAGE, PRETRAIN, STATUS, INSPECT, CHECKPOINT, PROFILE, BANDWIDTH)
GROUPS: dict[str, tuple[Verb, ...]] = {"train": TRAIN, "use": USE}
VERBS: tuple[Verb, ...] = TRAIN + USE
