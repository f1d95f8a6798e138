"""`postnorm multitask`: many tasks as one run of the trainer's.

The run is as that of pre-training: its checkpoints hold encoder, MLM head and all tasks' heads.
`finetune`, `encode` and `export` read them and leave the heads of tasks out.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.checkpoints.state import TrainState
from pipeline.config.data import BatchPlan, DataConfig, EvalDataConfig, TrainDataConfig
from pipeline.config.runs import TaskRunConfig
from pipeline.config.schema import as_recorded, walk
from pipeline.config.stages import RunStage
from pipeline.data.format import FORMAT_VERSION, DatasetIndex
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.objects import open_index
from pipeline.data.record import number_of_step, read_batches
from pipeline.data.run_order import DataRank
from pipeline.errors import ConfigError
from pipeline.finetune.batches import TaskIdentity, TaskStream
from pipeline.finetune.predict import Predictor
from pipeline.finetune.prepare import Prepared, hash_of, tokenizer_of
from pipeline.finetune.run import DevScores
from pipeline.model.architecture import TASK_HEADS
from pipeline.model.cost import flops_per_token
from pipeline.model.encoder import EncoderModel
from pipeline.multitask.balancer import Balancer, LossBaseline, StepWeighing
from pipeline.multitask.config import (
    MIX_FILE,
    MLM,
    OF_PRODUCTS,
    TaskMix,
    load_mix,
    mix_text,
    require_split,
)
from pipeline.multitask.data import Corruption, MixedStream, known_losses, prepare_mix, read_mix
from pipeline.multitask.draws import Draws, shares
from pipeline.multitask.model import MultiTaskModel, MultiTaskObjective
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist, env
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.runtime.rank import Rank
from pipeline.runtime.run_folder import RunFolder
from pipeline.tasks.task import RANDOM, TaskConfig
from pipeline.train.build import open_data, train_run
from pipeline.train.engine import Engine
from pipeline.train.evaluate import evaluate
from pipeline.train.initial import tokenizer_differences
from pipeline.train.look import heat_map
from pipeline.train.run import HeldOutResult
from pipeline.use.folder import MADE_NEW, TrainedModel, require_full_alpha, warn_of_optimizer
from pipeline.use.source import load_source

logger = logging.getLogger(__name__)

LEFT_OUT_FILE = "left-out.json"
_TOKENS = "tokens"
_DECIDES = ("head.", "task.metric", "task.scorer", "train.class_weights", "data.labels")
_TIMEOUT_S = 600.0
"""Timeout of the process group of one rank in which `inspect` opens text."""


def multitask(mix: TaskMix, rank: Rank) -> int:
    """Run or resume a multi-task run on this rank.

    Returns:
        An exit code of `pipeline.errors`.
    """
    require_split(mix, rank.process.world_size)
    folder = mix.config.folder.path
    mix.config.folder.refuse_foreign()
    folder.mkdir(parents=True, exist_ok=True)
    work, config = open_work(mix)
    if rank.process.is_first:
        write_atomic(folder / work.indexes[0].tokenizer_file, work.tokenizer)
    return train_run(config, rank, work)


def open_work(mix: TaskMix) -> tuple["MultiTaskWork", TaskRunConfig]:
    """Read the model and all tasks of a run, and say in the trainer's terms what it is.

    Raises:
        PostnormError: the model or a task cannot be read, or they do not fit each other.
    """
    config = mix.config
    for name in mix.tasks:
        if name in ("lr", "alpha", "fill", "tokens", "batch", "stage", "epoch", "mfu"):
            raise ConfigError(f"tasks.{name}: each log line has {name}; choose another name")
        if hasattr(nn.ModuleDict(), name):
            raise ConfigError(f"tasks.{name}: PyTorch has this name for itself; choose another")
        if f"{name}_accuracy" in mix.tasks:
            raise ConfigError(f"tasks.{name}_accuracy: the accuracy of tasks.{name} has this name")
    source = config.init_from.removeprefix(RANDOM)
    trained = load_source(source)
    require_full_alpha(trained, source, "multi-task training starts at alpha 1")
    index = None if config.data is None else open_index(config.data)
    if index is not None:
        _require_tokenizer(index, trained, config.init_from)
    read, left_out = read_mix(mix)
    prepared = prepare_mix(mix, read, trained, Path(config.run_dir, _TOKENS))
    own = run_config(mix, trained)
    return MultiTaskWork(mix, own, trained, prepared, index, left_out), own


def _require_tokenizer(index: DatasetIndex, trained: TrainedModel, name: str) -> None:
    other_ids, _ = tokenizer_differences(trained.tokenizer, index)
    if other_ids:
        raise ConfigError(
            f"data.dir={index.folder} was made with another tokenizer than {name} has: "
            f"{'; '.join(other_ids)}; prepare the text with the model's tokenizer"
        )


def run_config(mix: TaskMix, trained: TrainedModel) -> TaskRunConfig:
    """Translate a mix into the trainer's config; a sequence of its batches is a draw."""
    config = mix.config
    lengths = [task.input.max_length for task in mix.tasks.values()]
    # 8 is the least that `data.seq_len` may be.
    longest = max([*lengths, *([config.data.seq_len] if config.data else []), 8])
    return TaskRunConfig(
        run_dir=config.run_dir,
        seed=config.seed,
        init_from=config.init_from,
        model=trained.model.config,
        data=replace(config.data or DataConfig(dir=config.run_dir), seq_len=longest),
        train=config.train.single,
        stages=config.stages,
        kernels=config.kernels,
        spikes=config.spikes,
        checkpoint=config.checkpoint,
        monitor=config.monitor,
        notify=config.notify,
    )


class MultiTaskWork:
    """The `pipeline.train.run.Workload` of multi-task training."""

    unigram_entropy = None
    uniform_guess = None

    def __init__(
        self,
        mix: TaskMix,
        own: TaskRunConfig,
        trained: TrainedModel,
        prepared: Mapping[str, Prepared],
        index: DatasetIndex | None,
        left_out: dict[str, dict[str, int]],
    ) -> None:
        config = mix.config
        self.left_out = left_out
        """Training rows left out, by task and by the evaluated set that has their text."""
        self._mix, self._config, self._trained = mix, own, trained
        self._prepared, self._dataset = prepared, index
        self._names = list(mix.members)
        factors = {name: member.loss_scale for name, member in mix.members.items()}
        self._known = {name: self._known_of(name, factors[name]) for name in self._names}
        specs = {name: each.spec for name, each in prepared.items()}
        initial = {
            # Without the factor, as losses are logged; `known` has it, as they are weighed.
            name: known.initial and known.initial / factors[name]
            for name, known in self._known.items()
        }
        self.objective = MultiTaskObjective(specs, factors, initial)
        self._held_out: EvalLoader | None = None
        self._balancer: Balancer
        self._is_recorded = False
        file, self.tokenizer = tokenizer_of(trained.require_tokenizer())
        sha256 = hashlib.sha256(self.tokenizer).hexdigest()
        # Without what is so by default: runs from before keep their hash.
        settings = {name: its for name, task in mix.tasks.items() if (its := _settings(task))}
        content = {
            "format_version": FORMAT_VERSION,
            "tokenizer_file": file,
            "tokenizer_sha256": sha256,
            "vocab_size": trained.model.config.vocab_size,
            "text": index.fingerprint if index else None,
            "rows_sha256": {name: each.data_sha256 for name, each in prepared.items()},
            # So that a run is not continued with other draws, or other heads for them.
            "draws": {
                "sampling": asdict(config.sampling),
                "per_step": config.train.tasks_per_step,
                "tasks": {
                    name: [member.share, mix.batch_of(name), member.loss_scale]
                    for name, member in mix.members.items()
                },
                "corrupt": asdict(config.corrupt),
                "balance": as_recorded(config.balance),
                **({"settings": settings} if settings else {}),
            },
        }
        folder = config.folder.path
        # Not hashed: what the run trains is the same.
        told = json.dumps(content | self._head_made_new()).encode()
        identity = folder, hash_of(content), told, file, sha256
        self.indexes = (TaskIdentity(*identity),) * len(own.timeline.stages)

    def _head_made_new(self) -> dict[str, list[str]]:
        """Say that no task trains the MLM head, where it does not come with the weights."""
        if MLM in self._mix.members:
            return {}
        if self._mix.config.init_from.startswith(RANDOM):
            return {MADE_NEW: ["random weights"]}
        return {name: of for name, of in self._trained.facts.items() if name == MADE_NEW}

    def _known_of(self, name: str, factor: float) -> LossBaseline:
        if name != MLM:
            return known_losses(self._prepared[name], factor)
        assert self._dataset is not None, "checked by the config"
        vocab_size = self._trained.model.config.vocab_size or 0
        return LossBaseline(
            factor * math.log(vocab_size), factor * self._dataset.unigram_entropy_nats or None
        )

    def where(self, name: str, unit: int) -> str:
        """Return the place of a task's training example in its file; of text, its number."""
        if name == MLM:
            return f"sequence {unit}"
        rows = self._prepared[name].rows["train"]
        first = self._prepared[name].config.kind.scoring_groups(rows.rows)[unit][0]
        return rows.examples[rows.rows[first].example].where

    def piece(self, token: int) -> str:
        """Return the text of a token."""
        return str(self._trained.require_tokenizer().piece(token))

    def open(self, share: DataRank) -> MixedStream:
        """Open the data of all tasks. Collective."""
        mix, config, streams, plans = self._mix, self._config, {}, {}
        for number, name in enumerate(self._names):
            plans[name] = self._plan(name, share.world_size)
            stream: TaskStream | TrainLoader
            if name == MLM:
                stream, self._held_out = self._open_text(plans[name], share)
            else:
                stream = self._prepared[name].stream(
                    plans[name], share, mix.config.seed, self._corruption(number)
                )
            streams[name] = stream
        draws = Draws(self._probabilities(streams), config.train.global_batch, config.seed)
        self._balancer = Balancer(
            mix.config.balance,
            self._known,
            draws,
            seed=config.seed,
            num_layers=config.model.num_distinct_layers,
            world_size=share.world_size,
        )
        return MixedStream(streams, plans, draws, config.train.global_batch)

    def _plan(self, name: str, world_size: int) -> BatchPlan:
        mix = self._mix
        batch = mix.batch_of(name)
        seq_len = mix.config.data.seq_len if mix.config.data else 8
        length = seq_len if name == MLM else mix.tasks[name].input.max_length
        micro_batch = batch // world_size // mix.members[name].parts
        return BatchPlan((), seq_len=length, global_batch=batch, micro_batch=micro_batch)

    def _open_text(self, plan: BatchPlan, share: DataRank) -> tuple[TrainLoader, EvalLoader]:
        assert self._dataset is not None
        config, data = self._config, self._mix.config.data
        assert data is not None, "checked by the config"
        train = TrainDataConfig(seed=config.seed, data=data, batches=plan)
        sequences, micro_batch = config.monitor.eval_sequences, plan.at(0).micro_batch
        held_out = EvalDataConfig(data=data, sequences=sequences, micro_batch=micro_batch)
        objective = MaskedLanguageModeling()
        return open_data(train, held_out, config.run_dir, self._dataset, objective, share)

    def _corruption(self, number: int) -> Corruption | None:
        config = self._mix.config
        if config.corrupt.rule == "none":
            return None
        tokenizer = self._trained.require_tokenizer()
        return Corruption(
            config.corrupt.rule,
            config.corrupt.share,
            config.seed,
            number,
            tokenizer.mask_id,
            self._trained.model.config.vocab_size or 0,
            tuple(sorted(tokenizer.special_ids)),
        )

    def _probabilities(self, streams: Mapping[str, TaskStream | TrainLoader]) -> list[float]:
        """Return how often each task is drawn; all ranks have the same."""
        sampling = self._mix.config.sampling
        sizes = []
        for name, stream in streams.items():
            share = self._mix.members[name].share
            if sampling.by == "shares":
                sizes.append(1.0 if share is None else share)
                continue
            if share is not None:
                raise ConfigError(
                    f"tasks.{name}.share={share:g} has no meaning with sampling.by=size; leave it "
                    "out"
                )
            sizes.append(float(_size(stream)))
        found = shares(sizes, sampling.cap, sampling.temperature).tolist()
        shown = ", ".join(f"{name} {p:.2%}" for name, p in zip(streams, found, strict=True))
        logger.info("draws: %s", shown)
        return found  # type: ignore[no-any-return]

    def begin(self, stage: RunStage) -> None:
        """Do nothing: all stages have the same rows."""

    def start(self, model: EncoderModel) -> None:
        """Load the encoder and the MLM head; the heads of tasks are new."""
        source = self._mix.config.init_from
        if source.startswith(RANDOM):
            logger.info("random weights in the architecture of %s", source)
            return
        warn_of_optimizer(self._trained, source, self._config.train.optimizer)
        weights = self._trained.model.state_dict()
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected, unexpected
        assert all(name.startswith(TASK_HEADS) for name in missing), missing
        text = "all %d tensors of %s were loaded; new: the heads of %s"
        logger.info(text, len(weights), source, ", ".join(self._prepared))

    def flops_per_token(self, masked_share: float, document_len: float) -> float:
        """Count FLOPs as of masked language modelling, whose head is the largest."""
        longest = self._config.data.seq_len
        return flops_per_token(self._config.model, longest, masked_share, document_len).total

    def lr_scale(self, parameter: str) -> float:
        """Keep an MLM head as it is that no task trains."""
        trains_mlm = MLM in self._mix.members
        is_mlm = not parameter.startswith(("encoder.", TASK_HEADS))
        # Without a loss, weight decay would shrink it.
        return 0.0 if is_mlm and not trains_mlm else 1.0

    def weighing(self, state: TrainState, batch: int) -> StepWeighing:
        """Weigh the tasks of a step; before the first one what the run is goes on record."""
        # Here a checkpoint has been accepted: a start that is refused leaves the record as it was.
        if not self._is_recorded and env.process_info_or_alone().is_first:
            folder = self._config.folder.path
            write_atomic(folder / MIX_FILE, mix_text(self._mix).encode())
            write_json_atomic(folder / LEFT_OUT_FILE, self.left_out)
        self._is_recorded = True
        return self._balancer.at(state.weights, batch)

    def evaluation(self, model: EncoderModel, engine: Engine) -> "MixedScores":
        """Score dev of all tasks, and held-out text."""
        assert isinstance(model, MultiTaskModel)
        if self._mix.config.balance.norms == "output":
            model.measure_output()
            self._balancer.output = model.take_output
        scores = {
            name: DevScores(
                each,
                Predictor(model.tasks[name], engine.model, engine.device, each.pad_id, task=name),  # type: ignore[arg-type]
            )
            for name, each in self._prepared.items()
        }
        return MixedScores(scores, engine, self._held_out, self._balancer)

    def finish(self) -> None:
        """Do nothing more."""


def _settings(task: TaskConfig) -> dict[str, Any]:
    """Return what decides steps and scores of a task beside its rows, where it is no default."""
    leaves = ((path, value) for path, field, value in walk(task) if value != field.default)
    return {path: value for path, value in leaves if path.startswith(_DECIDES)}


def _size(stream: TaskStream | TrainLoader) -> int:
    if isinstance(stream, TaskStream):
        return stream.num_units
    steps = stream.steps
    return int(steps.split.counts[steps.plan.seq_lens[-1]].sum())


class MixedScores:
    """Scores dev of every task; one minus the mean score is what checkpoints are compared by."""

    def __init__(
        self,
        scores: Mapping[str, DevScores],
        engine: Engine,
        held_out: EvalLoader | None,
        balancer: Balancer,
    ) -> None:
        self._scores, self._engine = scores, engine
        self._held_out, self._balancer = held_out, balancer

    def __call__(self, step: int, *, shows: bool) -> HeldOutResult | None:
        """Score; None before the first step. Collective."""
        if step == 0:
            return None
        values: dict[str, float] = {}
        main: dict[str, float] = {}
        for name, score in self._scores.items():
            found = score(step, shows=shows)
            if found is None:
                continue  # a task without dev
            main[name] = 1.0 - found.loss
            values |= {f"{name}_{metric}": value for metric, value in found.values.items()}
        text = [f"{name} {value:.4f}" for name, value in main.items()]
        if self._held_out is not None:
            result = evaluate(
                self._engine.model, self._engine.device, MaskedLanguageModeling(), self._held_out
            )
            values |= {f"{MLM}_{name}": value for name, value in result.values().items()}
            text.append(f"{MLM} loss {result.total.loss:.4f}")
        mean = sum(main.values()) / len(main) if main else float("nan")
        values |= {f"dev_{name}": value for name, value in main.items()}
        loss = values["loss"] = 1.0 - mean if main else values.get(f"{MLM}_loss", 0.0)
        images = {}
        cosines = self._balancer.take_cosines()
        if shows and self._balancer.config.method in OF_PRODUCTS:
            names = self._balancer.names
            listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
            images["tasks/cosines"] = heat_map(
                cosines, -1.0, 1.0,
                title=(f"Cosines between the gradients of tasks, step {step:,}", listed),
                row_name="task", column_name="task", unit="cosine",
            )  # fmt: skip
        return HeldOutResult(loss, f"dev  {'  '.join(text)}", values, images)


def step_lines(
    folder: Path, step: int | None, batch: int | None, *, as_json: bool
) -> Iterator[str]:
    """Yield a line for each row of a step or batch, for `inspect`; nothing of the run changes.

    Raises:
        PostnormError: the folder is not that of a started run, or its data is not there any more.
    """
    RunFolder.started(folder)
    mix = load_mix(str(folder / MIX_FILE), (f"run_dir={json.dumps(str(folder))}",))
    records = read_batches(folder)
    number = batch
    if step is not None:
        number = number_of_step(step, mix.config.train.num_steps, records)
    assert number is not None, "one of the two is given"
    work, config = open_work(mix)
    with env.restored():
        # Text is opened by all ranks together: here by one.
        dist.open_group(env.process_info_or_alone(), torch.device("cpu"), _TIMEOUT_S)
        data = work.open(DataRank(0, 1))
        dist.close_group()
    place = config.batches.number(number)
    rows = (
        ids[seen].tolist()
        for micro in next(data.steps_from(place.cursor))
        for ids, seen in zip(micro.input_ids, micro.documents > 0, strict=True)
    )
    if not as_json:
        yield f"batch {number}: draws of {', '.join(data.tasks(place))}"
    for name, epoch, unit, num_rows in data.examples(place):
        where = work.where(name, unit)
        for ids in islice(rows, num_rows):
            tokens = [work.piece(token) for token in ids]
            if as_json:
                found = {"task": name, "epoch": epoch, "example": unit, "where": where}
                yield json.dumps({**found, "tokens": tokens}, ensure_ascii=False)
            else:
                yield f"{name}, epoch {epoch}, {where}: {' '.join(tokens)}"
