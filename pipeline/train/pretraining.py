"""The work of a pre-training run: packed text, held-out text, and a look into the model."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from pipeline.checkpoints.state import TrainState
from pipeline.config.runs import PretrainConfig
from pipeline.config.stages import RunStage
from pipeline.data.format import DataIdentity, DatasetIndex
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.objects import open_index
from pipeline.data.run_order import DataRank
from pipeline.data.stages import is_there
from pipeline.errors import ConfigError, DataError
from pipeline.model.cost import flops_per_token
from pipeline.model.encoder import EncoderModel
from pipeline.objectives.choose import make_objective
from pipeline.runtime import dist
from pipeline.runtime.rank import Rank
from pipeline.sinks.base import find_sinks
from pipeline.tasks.task import probe_tasks
from pipeline.train.build import train_run, verify_at_start, where_shards_are_read
from pipeline.train.deepspeed import deepspeed_config
from pipeline.train.engine import Engine
from pipeline.train.evaluate import evaluate
from pipeline.train.initial import InitialWeights, start_from
from pipeline.train.look import Observer, heat_map
from pipeline.train.probes import Probes
from pipeline.train.run import HeldOutResult
from pipeline.train.run_logger import means_text
from pipeline.train.stages import held_out_loaders, open_stages, train_stages

logger = logging.getLogger(__name__)

_MANY_EPOCHS = 4
"""Above it a run is told to repeat its data: up to four epochs are nearly as good as new data
(Muennighoff et al. 2023, arXiv 2305.16264)."""


def pretrain(
    config: PretrainConfig, rank: Rank, initial: Callable[[], InitialWeights] | None = None
) -> int:
    """Run or resume a pre-training run on this rank.

    Args:
        config: of the run.
        rank: this process; its signals are looked at between steps.
        initial: gives the weights that a new run starts from; not called when a run resumes.

    Returns:
        An exit code of `pipeline.errors`.
    """
    config.batches.require_split(rank.process.world_size)
    # What is missing or in the way is found before anything is made.
    config.folder.refuse_foreign()
    deepspeed_config(config.train)
    find_sinks(config.monitor.sinks)
    indexes = open_stages(config)
    for index in filter(is_there, indexes):
        config = with_vocabulary(config, index)
    return train_run(config, rank, Pretraining(config, indexes, initial))


def with_vocabulary(config: PretrainConfig, index: DatasetIndex) -> PretrainConfig:
    """Fill in or check `model.vocab_size`.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    size = config.model.vocab_size or index.vocab_size
    if size < index.vocab_size:
        raise ConfigError(
            f"model.vocab_size={size} is below the {index.vocab_size} tokens of {index.folder}; "
            "raise it, or leave it out"
        )
    return replace(config, model=replace(config.model, vocab_size=size))


class Pretraining:
    """The `pipeline.train.run.Workload` of pre-training."""

    def __init__(
        self,
        config: PretrainConfig,
        indexes: Sequence[DataIdentity],
        initial: Callable[[], InitialWeights] | None,
    ) -> None:
        """`indexes` are those of the stages, of `open_stages`."""
        self.indexes = tuple(indexes)
        self.objective = make_objective(config.objective)
        # The first whose data is there: all have one tokenizer.
        self._index = next(filter(is_there, indexes))
        self.unigram_entropy: float | None = self._index.unigram_entropy_nats
        assert config.model.vocab_size, "filled in by with_vocabulary"
        self.uniform_guess: float | None = math.log(config.model.vocab_size)
        self._config = config
        self._initial = initial
        self._probed = probe_tasks(config.monitor)
        self._held_out: dict[str, EvalLoader]
        self._share: DataRank

    def open(self, share: DataRank) -> TrainLoader:
        """Open the dataset."""
        self._share, config = share, self._config
        where = partial(where_shards_are_read, config.data, share=share)
        stages = train_stages(config, self.indexes, self.objective, where)
        with dist.raise_on_all_ranks():
            first = stages[0]
            given = first.index, first.config, first.inputs, share, first.counts
            loader = TrainLoader(*given, stages=stages)
            self._held_out = held_out_loaders(config, stages, self.objective, share)
            splits = [*loader.steps.splits, *(each.split for each in self._held_out.values())]
            verify_at_start(config.data, splits, share)
        often = repetitions(config, loader)
        if often:
            logger.info("the whole run sees %s", ", ".join(often))
        return loader

    def begin(self, stage: RunStage) -> None:
        """Compare a stage's data with what was opened, weeks ago perhaps."""
        opened = self.indexes[stage.number].fingerprint

        def check() -> None:
            there = open_index(stage.data)
            if there.fingerprint != opened:
                raise DataError(
                    f"{stage.title} is to begin, and {there.location} has fingerprint "
                    f"{there.fingerprint}; it had {opened} when this run was started. Restore it, "
                    "or start the run again to go on with the data that is there now"
                )

        dist.on_first(check, "comparing a stage's data")

    def start(self, model: EncoderModel) -> None:
        """Load the weights of `init_from`."""
        if self._initial is not None:
            start_from(model, self._initial(), self._config, self._index)

    def flops_per_token(self, masked_share: float, document_len: float) -> float:
        """Count the FLOPs of the objective's models."""
        config = self._config
        longest = max(config.batches.seq_lens)
        given = (config.model, longest, masked_share, document_len, config.objective)
        return flops_per_token(*given).total

    def lr_scale(self, parameter: str) -> float:
        """Return 1: all parameters have the run's rate."""
        return 1.0

    def weighing(self, state: TrainState, batch: int) -> None:
        """Weigh nothing: there is one loss."""

    def evaluation(self, model: EncoderModel, engine: Engine) -> "HeldOut":
        """Take fixed sequences to look at, and the rows of probes."""
        watched = next(iter(self._held_out.values()))
        observer = Observer(
            model,
            watched,
            self._index,
            engine.device,
            sees_masks=self._config.objective.kind != "rtd",
        )
        given = self._config, self._probed, model, self._index, self._share, engine.device
        probes = Probes(*given) if self._probed else None
        return HeldOut(self._config, engine, self, self._held_out, observer, probes)

    def finish(self) -> None:
        """Do nothing more."""


@dataclass(frozen=True)
class HeldOut:
    """Evaluates held-out text: its loss, the model's attention, and words that it fills in."""

    config: PretrainConfig
    engine: Engine
    work: Pretraining
    loaders: Mapping[str, EvalLoader]
    """By stage; the first is the one that checkpoints are compared by."""
    observer: Observer
    probes: Probes | None

    def __call__(self, step: int, *, shows: bool) -> HeldOutResult:
        """Evaluate. Collective."""
        objective = self.work.objective
        results = {
            name: evaluate(self.engine.model, self.engine.device, objective, loader)
            for name, loader in self.loaders.items()
        }
        (_, result), *others = results.items()
        total = result.total
        counts = ", ".join(f"{count:,} {name}" for name, count in total.counts.items())
        text = f"held-out {means_text(total.loss, total.means)}  ({counts})"
        text += "".join(f"  {name} {other.total.loss:.4f}" for name, other in others)
        entropy = self.observer.attention().cpu().numpy()
        examples = self.observer.examples()
        probes = self.probes(step) if self.probes else {}
        if not shows:
            return HeldOutResult(total.loss, text, {})
        layers = {
            f"attention_entropy_layer_{number:02d}": float(of_heads.mean())
            for number, of_heads in enumerate(entropy)
        }
        more = {
            "perplexity": total.perplexity,
            **{f"loss_of_{name}": other.total.loss for name, other in others},
        }
        if self.work.unigram_entropy is not None:
            more["unigram_entropy"] = self.work.unigram_entropy
        if self.work.uniform_guess is not None:
            more["uniform_guess"] = self.work.uniform_guess
        longest = max(self.config.batches.seq_lens)
        return HeldOutResult(
            total.loss,
            text,
            result.values() | more | layers,
            {"layers/attention_entropy": _entropy_map(entropy, step, longest)},
            {"fill_mask": examples},
            probes,
        )


def repetitions(config: PretrainConfig, loader: TrainLoader) -> list[str]:
    """Say of each part of the data that a run sees often, how often; skipped batches count."""
    often = []
    for stage in config.timeline.stages:
        end = config.timeline.end(stage)
        if stage.of or (end is not None and config.timeline.continues(stage.number + 1)):
            continue  # it is another run's, or the next one goes on in its data
        last = config.batches.number(config.train.num_steps).cursor if end is None else end
        seen, whose = loader.epochs(last), f" of {stage.title}" if stage.name else ""
        often += [
            f"{name if len(seen) > 1 else 'the data'}{whose} {epochs:,.0f} times"
            for name, epochs in seen.items()
            if epochs > _MANY_EPOCHS
        ]
    return often


def _entropy_map(
    entropy: npt.NDArray[np.float32], step: int, longest: int
) -> npt.NDArray[np.uint8]:
    """Draw the heads side by side, the first layer on top, on a scale that fits all steps."""
    high = float(np.log(longest))
    return heat_map(
        entropy,
        0.0,
        high,
        title=(
            f"Attention entropy at step {step:,}",
            "0: attention to one token",
            f"{high:.2f}: equal attention to all {longest:,}",
        ),
        row_name="layer",
        column_name="head",
        unit="nats",
    )
