"""`postnorm evaluate`: what to evaluate, as a small config, and its table or JSON."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config.data import DataConfig, EvalDataConfig
from pipeline.config.load import build, provenance
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.config.runs import load_run
from pipeline.config.schema import param, section
from pipeline.config.train import TrainConfig
from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED, CheckpointError, ConfigError
from pipeline.model.architecture import is_model_folder, read_architecture
from pipeline.runtime import cli, env
from pipeline.runtime.cli import argument, option, verb
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import AppendedFile, read_json_lines
from pipeline.runtime.rank import AgreedStop, Rank, Stopped, run_as_rank
from pipeline.runtime.run_folder import A_STARTED_RUN, RunFolder

if TYPE_CHECKING:
    from pipeline.train.evaluate import EvalScore
    from pipeline.use.evaluate import Evaluator, TextEvaluation

logger = logging.getLogger(__name__)

MASK_FIELDS = (
    "masking",
    "mask_selection",
    "mask_prob",
    "at_least_one",
    "replace_mask_prob",
    "replace_random_prob",
)
"""Fields of `DataConfig` that decide what is predicted."""
_SEQ_LEN = 512
_ALL = 2**62


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """All that the numbers depend on besides the model."""

    data: DataConfig = section(DataConfig, "dataset, packing and masking")
    objective: ObjectiveConfig = section(ObjectiveConfig, "what is predicted")
    sequences: int = param(_ALL, "at most so many, of all ranks", unit="sequences", ge=1)
    micro_batch: int = param(
        TrainConfig.micro_batch, "of a forward pass of one rank", unit="sequences", ge=1
    )
    precision: Literal["bf16", "fp32"] = param("fp32", "of the weights and of all passes")

    @property
    def eval_data(self) -> EvalDataConfig:
        """What a loader of held-out text needs of this config."""
        return EvalDataConfig(
            data=self.data,
            objective=self.objective,
            sequences=self.sequences,
            micro_batch=self.micro_batch,
        )


@dataclass(frozen=True)
class EvaluateArguments:
    """The command line of `evaluate`."""

    source: Path = argument("run folder, or model folder", "SOURCE")
    step: int | None = option(
        "this checkpoint of the run; default: newest good one", "N", one_of="which"
    )
    every: bool = option("every kept checkpoint, oldest first", flag="--all", one_of="which")
    data: str | None = option("other data of the same tokenizer", "DIR")
    sequences: int | None = option("at most so many; default: all held-out text", "N")
    seq_len: int | None = option("default: the run's; at most 512 for a model", "N")
    micro_batch: int | None = option("of a forward pass; default: the run's, or 8", "N")
    precision: Literal["bf16", "fp32"] | None = option("default: the run's; fp32 for a model")
    as_json: bool = option("one JSON object a line in place of the table", flag="--json")
    overrides: list[str] = cli.overrides(
        "other masks than the run's, such as data.mask_prob=0.15, or another data.stage_dir",
        "data.MASKS=VALUE",
    )


def evaluate_config(arguments: EvaluateArguments) -> EvaluateConfig:
    """Fill in what the command line leaves open: the run's values, or defaults.

    Raises:
        ConfigError: a value is out of range, or an override is not about masks.
        RunFolderError: the source is not a started run.
        CheckpointError: the arguments do not fit a model folder.
    """
    known = sorted(f"data.{name}" for name in (*MASK_FIELDS, "stage_dir", "stage_gb"))
    for text in arguments.overrides:
        if text.partition("=")[0].strip() not in known:
            raise ConfigError(
                f"override {text!r}: an evaluation takes only {', '.join(known)}; for dataset, "
                "length and batch see --help"
            )
    source = arguments.source
    values: dict[str, Any]
    if is_model_folder(source):
        origin, model = source, _model_to_evaluate(arguments)
        # In fp32, as fill-mask and encode use the model.
        longest = min(_SEQ_LEN, model.longest_document or _SEQ_LEN)
        values = {"data": {"dir": str(arguments.data), "seq_len": longest}}
    else:
        origin = RunFolder.started(source, f"{A_STARTED_RUN}, or a model folder").resolved
        run = load_run(origin).config
        model, train = run.model, run.train
        values = {"micro_batch": train.micro_batch, "precision": train.precision}
        data = asdict(run.data) | {"dir": RunFolder(source).as_started(run.data.dir)}
        values |= {"data": data, "objective": asdict(run.objective)}
    # Options as overrides, so that their ranges are checked as in a config.
    options = {
        "data.dir": None if arguments.data is None else json.dumps(str(arguments.data)),
        "data.seq_len": arguments.seq_len,
        "sequences": arguments.sequences,
        "micro_batch": arguments.micro_batch,
        "precision": arguments.precision,
    }
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    config = build(EvaluateConfig, values, str(origin), [*arguments.overrides, *given])
    limit = model.longest_document
    if limit is not None and config.data.seq_len > limit:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is longer than the {limit} learned positions of "
            f"the model; give --seq-len {limit} or less"
        )
    return config


def _model_to_evaluate(arguments: EvaluateArguments) -> ModelConfig:
    folder = arguments.source
    if arguments.step is not None or arguments.every:
        raise CheckpointError(f"{folder} is a model folder, of one model; leave out --step, --all")
    if arguments.data is None:
        raise CheckpointError(
            f"{folder} is a model folder, which does not know its dataset; give its folder with "
            "--data"
        )
    return read_architecture(folder)[0]


class Report:
    """What rank 0 prints, and the lines of RUN/evaluations.jsonl."""

    def __init__(
        self, source: Path, config: EvaluateConfig, evaluator: "Evaluator", process: ProcessInfo
    ) -> None:
        self._source, self._config, self._process = source, config, process
        self._sources = evaluator.sources
        self._path = None if is_model_folder(source) else RunFolder(source).evaluations
        self._provenance = provenance()
        masks = {name: value for name, value in asdict(config.data).items() if name in MASK_FIELDS}
        self._setting: dict[str, Any] = {
            "data": config.data.dir,
            "fingerprint": evaluator.index.fingerprint,
            "sequences": evaluator.num_sequences,
            "seq_len": config.data.seq_len,
            "precision": config.precision,
            "masks": masks,
        }
        """What the numbers depend on besides the model; they compare where it is equal."""

    def earlier_steps(self) -> frozenset[int]:
        """Find the steps that `--all` need not evaluate again.

        This SLURM job has evaluated them before it was preempted and started again.
        """
        process = self._process
        if self._path is None or process.job == "local":
            return frozenset()
        job = process.job.partition(".")[0]
        steps = frozenset(
            record["step"]
            for record in read_json_lines(self._path)
            if record["job"].partition(".")[0] == job and record["setting"] == self._setting
        )
        if process.is_first and steps:
            shown = ", ".join(map(str, sorted(steps)))
            logger.info("job %s has evaluated steps %s before, see %s", job, shown, self._path)
        return steps

    def record(self, found: "TextEvaluation") -> dict[str, Any]:
        """Collect all that is known of an evaluation, in plain values."""
        sources = {name: _numbers(score) for name, score in found.result.by_source.items()}
        return {
            "step": found.step,
            "model": str(found.path),
            **_numbers(found.result.total),
            "sources": sources,
            "alpha": found.alpha,
            "setting": self._setting,
            "micro_batch": self._config.micro_batch,
            "world_size": self._process.world_size,
            "unix_s": time.time(),
            "host": self._process.host,
            "job": self._process.job,
            **self._provenance,
        }

    def append(self, record: dict[str, Any]) -> None:
        """Add a line to the run's file; a model folder has none (OSError: it cannot be written)."""
        if self._path is not None:
            AppendedFile(self._path).append((json.dumps(record) + "\n").encode(), end=b"\n")

    def head(self, found: "TextEvaluation") -> list[str]:
        """Describe the setting, above the first line of the table."""
        setting = self._setting
        about = (
            f"{self._source}: {setting['sequences']:,} held-out sequences of "
            f"{setting['seq_len']} from {setting['data']}, {setting['precision']}"
        )
        others = _others(found.result.total)
        names = ("step", "source", "loss", "perplexity", "accuracy", *others, "masked tokens")
        return [about, self._line(*names)]

    def lines(self, found: "TextEvaluation") -> Iterator[str]:
        """Show one evaluation: all sources together, then each where there are several."""
        scores = {"all": found.result.total}
        if len(found.result.by_source) > 1:
            scores |= found.result.by_source
        step = "-" if found.step is None else f"{found.step:,}"
        for source, score in scores.items():
            values = _values(score)
            names = ("loss", "accuracy", *_others(score))
            loss, *means = (f"{values[key]:.5f}" for key in names)
            targets = f"{values['num_masked']:,.0f}"
            yield self._line(step, source, loss, f"{score.perplexity:,.2f}", *means, targets)

    def _line(self, step: str, name: str, *numbers: str) -> str:
        width = max(map(len, ("source", *self._sources)))
        widths = (9, 12, 9, *[16] * (len(numbers) - 4), 14)
        cells = [text.rjust(size) for text, size in zip(numbers, widths, strict=True)]
        return "  ".join([step.rjust(10), name.ljust(width), *cells])


def _others(score: "EvalScore") -> list[str]:
    """Name the means of an objective that are not those of masked tokens."""
    return [name for name in score.means if name not in ("loss", "accuracy")]


def _numbers(score: "EvalScore") -> dict[str, float | None]:
    # JSON has no NaN and no infinity.
    return {name: value if math.isfinite(value) else None for name, value in _values(score).items()}


def _values(score: "EvalScore") -> dict[str, float]:
    loss, *others = score.means.items()
    return dict([loss, ("perplexity", score.perplexity), *others]) | score.counts


@verb(
    "evaluate runs/demo/train",
    "evaluate runs/demo/train --all --sequences 512",
    "evaluate models/bert --data data/mine --seq-len 128 --json",
    "torchrun --standalone --nproc-per-node 8 -m postnorm evaluate runs/mine --step 100000",
    "evaluate runs/other data.masking=token data.mask_prob=0.15",
)
def evaluate(arguments: EvaluateArguments) -> int:
    """Held-out loss of checkpoints or of a model, on any number of ranks.

    Held-out loss and accuracy of a run's checkpoint or of a model folder, on one process or on many
    ranks. Objective, text, masks and precision are the run's: with --sequences set to
    monitor.eval_sequences the numbers are those that the run logged. A model folder is evaluated at
    masked tokens. The run may go on training meanwhile. Each result of a run is also appended to
    RUN/evaluations.jsonl.
    """
    # An evaluation that a person starts is not an attempt of the run, whose own exit record may
    # lie there.
    return run_as_rank(
        lambda rank: _evaluate_on(arguments, rank),
        env.process_info_or_alone(),
        env.launched_run_dir(),
    )


def _evaluate_on(arguments: EvaluateArguments, rank: Rank) -> int:
    # Importing torch takes seconds.
    from pipeline.runtime import dist
    from pipeline.use.evaluate import Evaluator

    rank.if_lost = "Its own message says more. Nothing is damaged: start the evaluation again"
    device = dist.own_device(rank.process)
    dist.open_group(rank.process, device, TrainConfig.collective_timeout_s)
    code = EXIT_FINISHED
    try:
        source, config, process = arguments.source, evaluate_config(arguments), rank.process
        run, stop = None if is_model_folder(source) else source, AgreedStop(rank.stop)
        evaluator = Evaluator(config.eval_data, config.precision, run, process, device, stop)
        report = Report(source, config, evaluator, process)
        earlier = report.earlier_steps() if arguments.every else frozenset()
        evaluations = evaluator.evaluations(
            source,
            step=arguments.step,
            every=arguments.every,
            passed_over=dist.from_first(earlier),
            other_data=arguments.data is not None,
        )
        if rank.process.is_first:
            _show(report, evaluations, as_json=arguments.as_json)
        else:
            deque(evaluations, maxlen=0)  # this rank's part
    except Stopped as signal:
        logger.warning("stopped by %s; there is nothing to save, start again", signal)
        code = EXIT_PREEMPTED
    dist.close_group()
    return code


def _show(report: Report, found: "Iterator[TextEvaluation]", *, as_json: bool) -> None:
    for number, evaluation in enumerate(found):
        record = report.record(evaluation)
        if as_json:
            print(json.dumps(record), flush=True)
        else:
            head = [] if number else report.head(evaluation)
            print("\n".join([*head, *report.lines(evaluation)]), flush=True)
        report.append(record)
