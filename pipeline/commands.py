"""The verbs of `pipeline`.

Nothing here imports torch before a verb needs it: `config`, `model`, `status` and `--help` answer
at once.
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoints.commands import CHECKPOINT
from pipeline.config.runs import PretrainConfig, load_run
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, ConfigError
from pipeline.finetune.commands import TASKS
from pipeline.runtime import cli, env
from pipeline.runtime.checkpoints import asked_step
from pipeline.runtime.cli import (
    CONFIG,
    JSON,
    MODEL,
    OVERRIDES,
    RUN,
    Verb,
    argument,
    at_least,
    option,
    verb,
)
from pipeline.runtime.files import write_atomic
from pipeline.runtime.rank import Rank, run_as_rank
from pipeline.use.pretrain import train_as_rank
from pipeline.use.vector_commands import (
    MAX_LENGTH,
    POOLING,
    WHITENING,
    Pooling,
    encode,
    similar,
    sts,
    whiten,
)

_OUT: Any = argument("folder to write", "OUT", type=cli.new_path)


@verb(
    "multitask mix.yaml balance.method=gradient_norm train.num_steps=2000",
    if_interrupted="The same command continues it.",
)
def _multitask(
    config: str = argument("YAML file of the run, or the name of a shipped one"),
    overrides: list[str] = cli.overrides("such as balance.method=equal train.num_steps=5000"),
) -> int:
    """Train one model on many tasks together."""
    from pipeline.config.load import warn_of_unusual
    from pipeline.multitask.config import load_mix

    def work(rank: Rank) -> int:
        mix = load_mix(config, tuple(overrides))
        rank.run_dir = mix.config.folder.path
        if rank.process.is_first:
            warn_of_unusual(mix.config)
        from pipeline.multitask.run import multitask

        return multitask(mix, rank)

    return run_as_rank(work, env.process_info_or_alone(), env.launched_run_dir())


@verb(
    "evaluate runs/demo/train@best",
    "evaluate runs/demo/train --all --sequences 512",
    "evaluate models/bert --data data/mine --seq-len 128 --json",
    "torchrun --standalone --nproc-per-node 8 -m postnorm evaluate runs/mine --step 100000",
    "evaluate runs/other data.masking=token data.mask_prob=0.15",
)
def _evaluate(
    source: Path = MODEL,
    step: int | None = option(
        "this checkpoint of the run; default: newest good one", "N", one_of="which"
    ),
    every: bool = option("every kept checkpoint, oldest first", flag="--all", one_of="which"),
    data: str | None = option("other data of the same tokenizer", "DIR"),
    sequences: int | None = option("at most so many; default: all held-out text", "N"),
    seq_len: int | None = option("default: the run's; at most 512 for a model", "N"),
    micro_batch: int | None = option("of a forward pass; default: the run's, or 8", "N"),
    precision: Literal["bf16", "fp32"] | None = option("default: the run's; fp32 for a model"),
    as_json: bool = option("one JSON object a line in place of the table", flag="--json"),
    overrides: list[str] = cli.overrides(
        "other masks than the run's, such as data.mask_prob=0.15, or another data.stage_dir",
        "data.MASKS=VALUE",
    ),
) -> int:
    """Held-out loss of checkpoints or of a model, on any number of ranks.

    Held-out loss and accuracy of a run's checkpoint or of a model folder, on one process or on many
    ranks. Objective, text, masks and precision are the run's: with --sequences set to
    monitor.eval_sequences the numbers are those that the run logged. A model folder is evaluated at
    masked tokens. The run may go on training meanwhile. Each result of a run is also appended to
    RUN/evaluations.jsonl.
    """

    def work(rank: Rank) -> int:
        # Importing torch takes seconds.
        from pipeline.use.evaluate import EvaluateArguments, evaluate_as_rank

        run, step_asked = asked_step(source, step, every)
        asked = EvaluateArguments(
            run, step_asked, every, data, sequences, seq_len, micro_batch, precision, overrides
        )
        return evaluate_as_rank(asked, rank, partial(print, flush=True), as_json=as_json)

    # An evaluation that a person starts is not an attempt of the run, whose own exit record may
    # lie there.
    return run_as_rank(work, env.process_info_or_alone(), env.launched_run_dir())


@verb('fill-mask runs/demo/train "The function returns a [MASK] of strings."')
def _fill_mask(
    source: Path = MODEL,
    text: list[str] = argument('such as "the [MASK] of a list"', nargs="+"),
    top: int = option("candidates shown (default 5)", default=5),
) -> None:
    """Most likely tokens at each [MASK] of a text."""
    from pipeline.use.model import load as load_model

    model = load_model(source)
    for each in text:
        for number, candidates in enumerate(model.fill_mask(each, top), start=1):
            shown = "  ".join(f"{token!r} {probability:.3f}" for token, probability in candidates)
            print(f"[MASK] {number}: {shown}")


@verb("export runs/demo/train runs/demo/hf --format hf")
def _export(
    source: Path = MODEL,
    out: Path = _OUT,
    format: Literal["postnorm", "hf", "onnx", "sentence-transformers"] = option(
        "for this project (default), for transformers, with a graph for ONNX Runtime besides, or "
        "for sentence-transformers, which alone takes the options below",
        default="postnorm",
    ),
    pooling: Pooling | None = POOLING,
    max_length: int | None = MAX_LENGTH,
    whiten: Path | None = WHITENING,
    license: str | None = option("for the model card, as hubs name it, such as apache-2.0", "ID"),
    push: str | None = option(
        "upload the folder to Hugging Face's hub, private if it is new; @REVISION is a branch, "
        "such as step-40000",
        "ORG/NAME[@REVISION]",
    ),
) -> None:
    """Write a run's model as a folder."""
    from pipeline.finetune.export import export_hf
    from pipeline.use.export import export
    from pipeline.use.hf import NO_LICENSE, hub_name
    from pipeline.use.hf import push as push_to_hub
    from pipeline.use.onnx import export_onnx
    from pipeline.use.sentences import export_sentence_transformers

    if push is not None:
        hub_name(push)  # refused before anything is written
    license_id = license or NO_LICENSE
    if format == "sentence-transformers":
        report = export_sentence_transformers(source, out, pooling, max_length, whiten, license_id)
    elif (push or license) and format == "postnorm":
        raise ConfigError("--push and --license are for folders that others load: --format hf")
    elif pooling or max_length or whiten:
        raise ConfigError(
            "--pooling, --max-length and --whiten are of --format sentence-transformers; leave "
            f"them out of --format {format}"
        )
    elif format == "postnorm":
        report = export(source, out)
    else:
        report = (export_hf if format == "hf" else export_onnx)(source, out, license_id)
    print(
        f"{out}: largest difference of logits {report.max_abs_diff:.2e} over {report.num_logits:,}"
    )
    if report.note:
        print(report.note)
    if push is not None:
        print(push_to_hub(out, push))


@verb(
    "convert bert-base-chinese/ models/bert",
    "convert ckpt/ models/realformer --family realformer norm_eps=1e-7",
    "convert models/bert models/medical --vocab data/medical",
)
def _convert(
    source: Path = MODEL,
    out: Path = _OUT,
    vocab: Path | None = option(
        "new vocabulary: vocab.txt, tokenizer.json, sentencepiece model, or a dataset's folder; "
        "rows follow their pieces, a new piece gets the mean of the rows of its parts",
        "FILE",
    ),
    positions: int | None = option(
        "learned positions of a document; more than there are begin by decomposition",
        "N",
        type=at_least(1),
    ),
    rotary_base: float | None = option("base of the rotary angles", "B"),
    family: Literal["bert", "realformer", "roberta", "roformer", "roformer_v2"] | None = option(
        "needed for TensorFlow checkpoints of BERT and RealFormer, whose names are the same"
    ),
    ignore: list[str] = option(
        "a key of the config that is not known and changes nothing; may be repeated",
        "KEY",
        action="append",
        default=[],
    ),
    overrides: list[str] = cli.overrides(
        "of the architecture, such as norm_eps=1e-7", "field=value"
    ),
) -> None:
    """Read a published checkpoint, and change vocabulary or positions of any model.

    SRC is a Hugging Face folder, a TensorFlow checkpoint, or any other model, of which a folder
    with the changes is written.
    """
    from pipeline.use.surgery import Surgery, convert

    done = convert(
        source,
        out,
        family=family,
        overrides=overrides,
        ignored=ignore,
        surgery=Surgery(vocab, positions, rotary_base),
    )
    read = done.read
    number = sum(parameter.numel() for parameter in read.trained.model.parameters())
    print(f"{out}: {read.family or 'our own'}, {number:,} parameters")
    for kind, keys in read.keys.items():
        if keys:
            print(f"config keys {kind}: {', '.join(sorted(keys))}")
    for text in read.assumed:
        print(f"assumed {text}")
    if read.left_out:
        print(f"left out: {', '.join(read.left_out)}")
    if read.made_new:
        print(f"made new, so that fill-mask needs training first: {', '.join(read.made_new)}")
    if read.no_tokenizer:
        print(f"no tokenizer, so the model reads no text: {read.no_tokenizer}")
    for text in done.changes:
        print(text)


@verb("average models/mean runs/mine --last 3", "average models/soup runs/a@best runs/b@best")
def _average(
    out: Path = _OUT,
    sources: list[Path] = argument(
        "models of one architecture and tokenizer, that come from one start", "MODEL", nargs="+"
    ),
    last: int | None = option("of one run, the newest N checkpoints", "N", type=at_least(2)),
) -> None:
    """Write the mean of the weights of several models."""
    from pipeline.use.average import average

    report = average(sources, out, last=last)
    print(
        f"{out}: mean of {len(report.sources)} models, {report.num_parameters:,} parameters; they "
        f"are {report.distance:.2%} of its norm away from it"
    )
    for name in report.sources:
        print(f"  {name}")


@verb("grow runs/demo/train models/wide --width 2 --noise 0.01")
def _grow(
    source: Path = MODEL,
    out: Path = _OUT,
    width: int = option("factor, a power of 2; changes no logit", default=1),
    depth: int | None = option("layers, a multiple of those there are; changes logits"),
    noise: float = option("share of each matrix' deviation that is added (default 0)", default=0.0),
    seed: int = option("of the noise (default 0)", default=0),
) -> None:
    """A wider or deeper model that starts from this one."""
    from pipeline.use.grow import grow

    report = grow(source, out, width=width, depth=depth, noise=noise, seed=seed)
    print(
        f"{out}: {report.config.num_layers} layers of {report.config.hidden_size}, "
        f"{report.num_parameters_before:,} parameters before, {report.num_parameters:,} now"
    )
    for note in report.notes:
        print(note)


@verb(
    "profile configs/demo.yaml --steps 20",
    "profile run.yaml kernels.attention=reference --json profile.json",
    "torchrun --standalone --nproc-per-node 8 -m postnorm profile run.yaml --trace t.json.gz",
)
def _profile(
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
    steps: int = option("default 20", "N", type=at_least(1), default=20),
    warm_up: int = option(
        "steps before them, in which kernels are compiled (default 5)",
        "N",
        type=at_least(1),
        default=5,
    ),
    json_file: Path | None = option(
        "write the numbers as JSON", "FILE", flag="--json", type=cli.new_file
    ),
    trace: Path | None = option(
        "write rank 0's trace for ui.perfetto.dev; .gz compresses it", "FILE", type=cli.new_file
    ),
) -> int:
    """Show where the time of a run's training steps goes.

    Show where the time of a run's training steps goes on this machine: real steps with the run's
    own data, from random weights. Times are means over the steps and ranks and add up to the step.
    run_dir is neither read nor written. The profiler slows the host down, which shows in "idle or
    host", so the same number of steps runs without it first. Of the roofline: the least time in
    which the device, by its data sheet, could compute the products of the linear layers, or compute
    and move the data of attention (attention_work in pipeline/profile/step.py), divided by the time
    taken.
    """

    def work(rank: Rank) -> int:
        loaded = load_run(config, overrides).config
        # Importing torch takes seconds.
        from pipeline.profile.step import profile_run, profile_text

        profile = profile_run(loaded, rank.process, steps=steps, warm_up=warm_up, trace_file=trace)
        if rank.process.is_first:
            print(profile_text(profile))
            if json_file:
                write_atomic(json_file, (json.dumps(asdict(profile)) + "\n").encode())
        return EXIT_FINISHED

    return run_as_rank(work, env.process_info_or_alone())


@verb("torchrun --standalone --nproc-per-node 8 -m postnorm bandwidth --records /tmp/records")
def _bandwidth(
    records: Path = option("folder to write NODE.bandwidth.json to", "DIR", required=True),
    nodes: str = option("names of all nodes in order, to name missing ones", "'A B'", default=""),
    megabytes: float = option("size of each rank's tensor (default 256)", default=256.0),
    timeout: float = option("time limit for everything (default 180)", "S", default=180.0),
) -> int:
    """Measure all-reduce between nodes, for preflight (run on every rank)."""

    def work(rank: Rank) -> int:
        from pipeline.profile.bandwidth import measure_bandwidth

        rank.if_lost = f"The records in {records} say more"
        return measure_bandwidth(
            rank.process, records, nodes=nodes.split(), megabytes=megabytes, timeout_s=timeout
        )

    # It measures between ranks, so a single process is a mistake.
    return run_as_rank(work, env.process_info())


@verb("coverage configs/demo.yaml train.num_steps=2000")
def _coverage(as_json: bool = JSON, config: str = CONFIG, overrides: list[str] = OVERRIDES) -> int:
    """What a run would see: epochs, fill and tokens, each token once."""
    from pipeline.inspect.coverage import coverage, coverage_text

    loaded = load_run(config, overrides).config
    report = coverage(loaded)
    if as_json:
        print(json.dumps(report.plain()))
    else:
        for line in coverage_text(report):
            print(line)
        if loaded.objective.pairs == "nsp":
            print("mlm_nsp then replaces the second part of about half of the pieces")
    return EXIT_FINISHED if report.is_exact else EXIT_FAILED_DO_NOT_RETRY


@verb(
    "inspect runs/demo/train --step 12 --rank 1 | less",
    "inspect runs/demo/train --find python/bisect.rst",
)
def _inspect(
    run_dir: Path = RUN,
    step: int | None = option("optimizer step, from 1", "N", one_of="what", required=True),
    batch: int | None = option("batch, from 0, skipped ones included", "N", one_of="what"),
    find: str | None = option("the steps in which a document is seen", "ID", one_of="what"),
    skip: bool = option("the batches that were skipped", one_of="what"),
    rank: int | None = option("only this rank's part of the step", "R"),
    world_size: int | None = option("ranks; default: of the run's newest start", "W"),
    as_json: bool = option("one JSON object a sequence", flag="--json"),
    overrides: list[str] = cli.overrides(
        "where the dataset is, if it was moved", "data.dir=FOLDER"
    ),
) -> None:
    """Documents, packing and masks of any step of a run, past or to come."""
    from pipeline.inspect.run import find_text, open_run, skipped_text, step_text
    from pipeline.multitask.config import MIX_FILE

    if (run_dir / MIX_FILE).is_file():
        if find is not None or skip:
            raise ConfigError(
                f"{run_dir} is a multi-task run, which --find and --skip do not know: use "
                "--step N or --batch N; ledger.jsonl in it lists what was skipped"
            )
        from pipeline.multitask.run import step_lines

        lines = step_lines(run_dir, step, batch, as_json=as_json)
    else:
        run = open_run(run_dir, overrides)
        if find is not None:
            lines = find_text(run, find)
        elif skip:
            lines = skipped_text(run)
        else:
            place = run.batch(batch or 0) if step is None else run.batch_of_step(step)
            lines = step_text(run, place, rank, world_size, as_json=as_json)
    for line in lines:
        print(line)


@verb("compare runs/one runs/two", "compare runs/one runs/two runs/three --plot losses.html")
def _compare(
    run_dirs: list[Path] = argument("run folders; the first is the base", "RUN", nargs="+"),
    plot: Path | None = option("draw the losses, as FILE.svg or FILE.html", "FILE"),
    as_json: bool = JSON,
) -> None:
    """Where runs differ: config, batches, loss and speed."""
    from pipeline.inspect.compare import compare, comparison_text, read_runs, write_plot

    runs = read_runs(run_dirs)
    comparison = compare(runs)
    if plot:
        write_plot(plot, runs, comparison)
    lines = [json.dumps(asdict(comparison))] if as_json else comparison_text(comparison)
    for line in lines:
        print(line)


@verb("model configs/model/roformer_v2-base.yaml --seq-len 128 vocab_size=21128")
def _model(
    config: str = argument("YAML file of a model or of a run"),
    overrides: list[str] = cli.overrides(
        "such as bias=true; in a run: model.bias=true", "field=value"
    ),
    seq_len: int | None = option("default: the run's, or 512", "N"),
    document_len: int | None = option(
        "tokens of a document, for attention of variable length", "N"
    ),
    micro_batch: int | None = option("default: the run's, or 8", "N"),
    ranks: int = option("default 1", "N", default=1),
) -> None:
    """Parameters, FLOPs and memory of a model."""
    from pipeline.model.describe import describe, read_plan

    plan = read_plan(
        config,
        overrides,
        seq_len=seq_len,
        micro_batch=micro_batch,
        num_ranks=ranks,
        document_len=document_len,
    )
    print(describe(plan))


@verb(
    "pretrain configs/demo.yaml train.num_steps=200",
    "torchrun --standalone --nproc-per-node 2 -m postnorm pretrain configs/demo.yaml",
)
def _pretrain(config: str = CONFIG, overrides: list[str] = OVERRIDES) -> int:
    """Run or resume a pre-training run: one process, or one rank of a launcher's."""
    return train_as_rank(config, overrides)[0]


_CONFIG = cli.config_verb(PretrainConfig, "config configs/demo.yaml --explain train.lr=1e-3")
_RUNS = (_CONFIG, _model, _coverage, _pretrain, _inspect, _compare)
GROUPS: dict[str, tuple[Verb, ...]] = {
    "train": (*_RUNS, CHECKPOINT, _profile, _bandwidth, _multitask),
    "tasks": TASKS,
    "use": (
        _evaluate,
        _fill_mask,
        encode,
        whiten,
        similar,
        sts,
        _export,
        _convert,
        _average,
        _grow,
    ),
}
VERBS: tuple[Verb, ...] = tuple(verb for verbs in GROUPS.values() for verb in verbs)
