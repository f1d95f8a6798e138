"""Held-out evaluation of checkpoints and models apart from training, on any number of ranks.

Text, masks, alpha and precision are those of the trainer's own evaluation, which takes the first
`monitor.eval_sequences`: for as many sequences the numbers are the same. A run is evaluated with
its own objective, a model folder as masked language modelling. The run may go on meanwhile: an
evaluation does not take its lock and does not write to its metrics.
"""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from pipeline import errors
from pipeline.checkpoints.manifest import verify
from pipeline.config.data import DataConfig, EvalDataConfig
from pipeline.config.load import build, provenance
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.config.runs import load_run
from pipeline.config.schema import param, section
from pipeline.config.train import TrainConfig
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader
from pipeline.data.objects import open_index
from pipeline.data.run_order import DataRank
from pipeline.model.architecture import is_model_folder, read_architecture
from pipeline.objectives.choose import make_objective
from pipeline.runtime import dist
from pipeline.runtime.checkpoints import at_step, folder_of, published, step_of
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import append_json, read_json_lines
from pipeline.runtime.rank import AgreedStop, Rank, Stopped
from pipeline.runtime.run_folder import A_STARTED_RUN, RunFolder
from pipeline.runtime.summary import duration
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.train.evaluate import EvalResult, EvalScore, local_sums, reduce_sums
from pipeline.train.initial import tokenizer_differences
from pipeline.use.folder import load_objective, read_tokenizer
from pipeline.use.source import is_run, load_source

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TELL_EVERY_S = 10.0
MASK_FIELDS = (
    "masking",
    "mask_selection",
    "mask_prob",
    "at_least_one",
    "replace_mask_prob",
    "replace_random_prob",
    "ngram_weights",
    "similar",
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
    """What is asked for; where it is None, the run or a default decides."""

    source: Path
    step: int | None = None
    every: bool = False
    data: str | None = None
    sequences: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    precision: Literal["bf16", "fp32"] | None = None
    overrides: Sequence[str] = ()


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
            raise errors.ConfigError(
                f"override {text!r}: an evaluation takes only {', '.join(known)}; for dataset, "
                "length and batch see --help"
            )
    source = arguments.source
    values: dict[str, Any]
    if not is_run(source):
        origin, model = source, _model_to_evaluate(arguments)
        # In fp32, as fill-mask and encode use the model.
        longest = min(_SEQ_LEN, model.longest_document or _SEQ_LEN)
        values = {"data": {"dir": str(arguments.data), "seq_len": longest}}
    else:
        origin = RunFolder.started(source, f"{A_STARTED_RUN}, or a model folder").resolved
        run = load_run(origin).config
        model, train = run.model, run.train
        values = {"micro_batch": train.micro_batch, "precision": train.precision}
        held_out = run.eval_data.data
        data = asdict(held_out) | {"dir": RunFolder(source).as_started(held_out.dir)}
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
        raise errors.ConfigError(
            f"data.seq_len={config.data.seq_len} is longer than the {limit} learned positions of "
            f"the model; give --seq-len {limit} or less"
        )
    return config


def _model_to_evaluate(arguments: EvaluateArguments) -> ModelConfig:
    folder = arguments.source
    if arguments.step is not None or arguments.every:
        raise errors.CheckpointError(
            f"{folder} is a model folder, of one model; leave out --step, --all"
        )
    if arguments.data is None:
        raise errors.CheckpointError(
            f"{folder} is a model folder, which does not know its dataset; give its folder with "
            "--data"
        )
    if is_model_folder(folder):
        return read_architecture(folder)[0]  # the weights are read later
    return load_source(folder).model.config


@dataclass(frozen=True)
class TextEvaluation:
    """One model on the held-out text."""

    path: Path
    """The checkpoint, or the model folder."""
    step: int | None
    """Applied optimizer steps; None: the model folder does not say."""
    alpha: float
    """Scale of the residual branches, as the checkpoint's next step would use it."""
    result: EvalResult


class Evaluator:
    """The held-out text of a dataset, ready for one model after another."""

    def __init__(
        self,
        config: EvalDataConfig,
        precision: str,
        run: Path | None,
        process: ProcessInfo,
        device: torch.device,
        stop: AgreedStop,
    ) -> None:
        """Open the data. Collective.

        Numbers of sequences are cached in the dataset's folder, or in that of the `run`. `stop` is
        looked at between batches and checkpoints.

        Raises:
            PostnormError: on all ranks, if one finds that something is wrong.
        """
        self._objective, self._dtype = make_objective(config.objective), _DTYPES[precision]
        self._device, self._stop = device, stop
        self.index: DatasetIndex = open_index(config.data)
        seq_len = config.data.seq_len
        counts = dist.on_first(
            lambda: sequences_at(self.index, [seq_len], run, config.objective), "counting sequences"
        )
        with dist.raise_on_all_ranks():
            share = DataRank(process.rank, process.world_size)
            inputs = self._objective.eval_inputs(config, self.index)
            self._loader = EvalLoader(self.index, config, inputs, share, counts)

    @property
    def num_sequences(self) -> int:
        """Sequences that are evaluated, of all ranks."""
        return self._loader.num_sequences

    @property
    def sources(self) -> tuple[str, ...]:
        """Names in the dataset's order, also of sources without held-out text."""
        return self._loader.sources

    def evaluations(
        self,
        source: Path,
        *,
        step: int | None = None,
        every: bool = False,
        passed_over: frozenset[int] = frozenset(),
        other_data: bool = False,
    ) -> Iterator[TextEvaluation]:
        """Evaluate a model folder, or checkpoints of a run, oldest first. Collective.

        Without a `step` it is the newest good checkpoint, or `every` one but those `passed_over`.
        Data other than the run's must be asked for.

        Raises:
            CheckpointError: there is no such checkpoint, none that verifies, or the head for masked
                tokens was never trained.
            DataError: the model does not fit the data.
            Stopped: a rank is to stop.
        """
        if not is_run(source):
            trained = load_source(source)
            trained.require_head()
            self._require_fit(source, (), trained.tokenizer, other_data=True)
            result = self._result(trained.model)
            yield TextEvaluation(source, trained.facts.get("step"), 1.0, result)
            return
        for path in _good_checkpoints(source, step, every, passed_over):
            self._stop.check()
            with dist.raise_on_all_ranks():
                try:
                    model, manifest = load_objective(path, self._objective)
                except (errors.CheckpointError, OSError) as error:
                    raise _reading_error(path, error) from error
            tokenizer = read_tokenizer(path)
            seen = [manifest.fingerprint, *manifest.fingerprints]
            self._require_fit(path, seen, tokenizer, other_data=other_data)
            result = self._result(model)
            yield TextEvaluation(path, manifest.step, manifest.alpha, result)

    def _require_fit(
        self,
        path: Path,
        seen: Sequence[str],
        tokenizer: Tokenizer | FastTokenizer | None,
        *,
        other_data: bool,
    ) -> None:
        """Check that the model's ids mean the dataset's tokens.

        `seen` are the fingerprints of the data that it was trained on, where they are known.
        """
        folder = self.index.folder
        if self.index.fingerprint in seen:
            return
        if seen and not other_data:
            raise errors.DataError(
                f"{folder} has fingerprint {self.index.fingerprint}, {path} was trained on "
                f"{' and '.join(seen)}; name the folder of that dataset with --data, or this one "
                "if you mean it"
            )
        other_ids, other_text = tokenizer_differences(tokenizer, self.index)
        if other_ids:
            raise errors.DataError(
                f"{folder} was made with another tokenizer than {path} has: "
                f"{'; '.join(other_ids)}; losses of other tokens cannot be compared: give a "
                "dataset made with the model's tokenizer"
            )
        for text in other_text:
            same = "the tokenizers of %s and %s give the same ids to the same pieces, but %s"
            logger.warning(same, path, folder, text)

    def _result(self, model: nn.Module) -> EvalResult:
        """Evaluate one model. Collective."""
        # As both engines have it: weights rounded to bf16, and all passes in bf16; no autocast.
        model = model.to(self._device, self._dtype)
        loader, objective = self._loader, self._objective
        batches = self._stop.until(
            _with_progress(loader.batches(), loader.num_batches, loader.num_sequences)
        )
        sums = local_sums(model, self._device, objective, batches, len(loader.sources))
        self._stop.check()
        return reduce_sums(sums, objective, loader.sources)


def _with_progress(items: Iterable[T], num_items: int, num_sequences: int) -> Iterator[T]:
    """Give the items on, with a line in the log every ten seconds."""
    start_s = told_s = time.monotonic()
    for number, item in enumerate(items):
        now_s = time.monotonic()
        if number and now_s - told_s >= _TELL_EVERY_S:
            told_s, done = now_s, number / num_items
            logger.info(
                "evaluated about %s of %s sequences (%.0f%%), %s left",
                f"{done * num_sequences:,.0f}",
                f"{num_sequences:,}",
                100 * done,
                duration((now_s - start_s) * (1 - done) / done),
            )
        yield item


def _good_checkpoints(
    run: Path, step: int | None, every: bool, passed_over: frozenset[int]
) -> Iterator[Path]:
    """Give the checkpoints to evaluate, each verified just before. Collective."""
    paths: list[Path] = dist.on_first(
        lambda: published(folder_of(run)) if step is None else [at_step(run, step)],
        "listing checkpoints",
    )
    rejected = []
    for path in reversed(paths) if every else paths:
        if every and step_of(path) in passed_over:
            continue
        find_problem = partial(_problem, path, tell=step is None)
        problem = dist.on_first(find_problem, "verifying checkpoints")
        if problem is None:
            yield path
            if not every:
                return
            continue
        if step is not None:
            raise errors.CheckpointError(
                f"{problem}: step {step} cannot be evaluated; give another --step, or none for "
                "the newest good checkpoint"
            )
        rejected.append(problem)
    if len(rejected) == len(paths):
        raise errors.CheckpointError(
            f"none of the {len(paths)} checkpoints of {run} verifies: {'; '.join(rejected)}"
        )


def _problem(path: Path, *, tell: bool) -> str | None:
    try:
        verify(path, lambda _: dist.heartbeat_all("verifying checkpoints"))
    except errors.CheckpointError as error:
        if tell:
            logger.warning("checkpoint rejected: %s", error)
        return str(error)
    return None


def _reading_error(path: Path, found: Exception) -> errors.PostnormError:
    if not path.exists():
        return errors.CheckpointError(
            f"{path} was removed while it was read, by the retention of the run, which goes on "
            "(checkpoint.keep); evaluate again, or ask for a checkpoint that is kept"
        )
    return (
        found
        if isinstance(found, errors.PostnormError)
        else errors.CheckpointError(f"{path} cannot be read: {found}")
    )


class Report:
    """What rank 0 prints, and the lines of RUN/evaluations.jsonl."""

    def __init__(
        self, source: Path, config: EvaluateConfig, evaluator: Evaluator, process: ProcessInfo
    ) -> None:
        self._source, self._config, self._process = source, config, process
        self._sources = evaluator.sources
        self._path = RunFolder(source).evaluations if is_run(source) else None
        self._provenance = provenance()
        masks = {name: value for name, value in asdict(config.data).items() if name in MASK_FIELDS}
        setting = {
            "data": config.data.dir,
            "fingerprint": evaluator.index.fingerprint,
            "sequences": evaluator.num_sequences,
            "seq_len": config.data.seq_len,
            "precision": config.precision,
            "masks": masks,
        }
        self._setting: dict[str, Any] = json.loads(json.dumps(setting))  # as it is read again
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

    def record(self, found: TextEvaluation) -> dict[str, Any]:
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
            append_json(self._path, record)

    def head(self, found: TextEvaluation) -> list[str]:
        """Describe the setting, above the first line of the table."""
        setting = self._setting
        about = (
            f"{self._source}: {setting['sequences']:,} held-out sequences of "
            f"{setting['seq_len']} from {setting['data']}, {setting['precision']}"
        )
        others = _others(found.result.total)
        names = ("step", "source", "loss", "perplexity", "accuracy", *others, "masked tokens")
        return [about, self._line(*names)]

    def lines(self, found: TextEvaluation) -> Iterator[str]:
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


def _others(score: EvalScore) -> list[str]:
    """Name the means of an objective that are not those of masked tokens."""
    return [name for name in score.means if name not in ("loss", "accuracy")]


def _numbers(score: EvalScore) -> dict[str, float | None]:
    # JSON has no NaN and no infinity.
    return {name: value if math.isfinite(value) else None for name, value in _values(score).items()}


def _values(score: EvalScore) -> dict[str, float]:
    loss, *others = score.means.items()
    return dict([loss, ("perplexity", score.perplexity), *others]) | score.counts


def evaluate_as_rank(
    arguments: EvaluateArguments, rank: Rank, show: Callable[[str], None], *, as_json: bool
) -> int:
    """Evaluate on one rank of a group, of which rank 0 shows lines; return the exit code."""
    rank.if_lost = "Its own message says more. Nothing is damaged: start the evaluation again"
    device = dist.own_device(rank.process)
    dist.open_group(rank.process, device, TrainConfig.collective_timeout_s)
    code = errors.EXIT_FINISHED
    try:
        source, config, process = arguments.source, evaluate_config(arguments), rank.process
        run, stop = source if is_run(source) else None, AgreedStop(rank.stop)
        evaluator = Evaluator(config.eval_data, config.precision, run, process, device, stop)
        report = Report(source, config, evaluator, process)
        earlier = report.earlier_steps() if arguments.every else frozenset()
        evaluations = evaluator.evaluations(
            source,
            step=arguments.step,
            every=arguments.every,
            # Rank 0's: another node may see the file as it was, and all ranks take the same
            # checkpoints.
            passed_over=dist.from_first(earlier),
            other_data=arguments.data is not None,
        )
        if rank.process.is_first:
            _report(report, evaluations, show, as_json=as_json)
        else:
            deque(evaluations, maxlen=0)  # this rank's part
    except Stopped as signal:
        logger.warning("stopped by %s; there is nothing to save, start again", signal)
        code = errors.EXIT_PREEMPTED
    dist.close_group()
    return code


def _report(
    report: Report, found: Iterator[TextEvaluation], show: Callable[[str], None], *, as_json: bool
) -> None:
    for number, evaluation in enumerate(found):
        record = report.record(evaluation)
        if as_json:
            show(json.dumps(record))
        else:
            head = [] if number else report.head(evaluation)
            show("\n".join([*head, *report.lines(evaluation)]))
        report.append(record)
