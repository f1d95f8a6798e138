"""A run in stages: what each one changes, where it begins, and its learning rate.

A stage begins with a batch, skipped ones counted, so that data, model and batches change at one
place that follows from the config alone. Its learning rate goes by the updates that were applied.
"""

import json
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from pipeline.config import schedule, schema, strict_yaml
from pipeline.config.data import BatchPlan, DataConfig, PhaseConfig, StageBatches
from pipeline.config.model import ModelConfig
from pipeline.config.schema import REQUIRED, param, section
from pipeline.config.strict_yaml import YamlNode
from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError
from pipeline.runtime import env

T = TypeVar("T")

RATE = ("lr", "decay", "min_lr")
"""What a stage says of its learning rate; `decay` and `min_lr` are of stages alone."""
DECAYS = ("none", "linear", "cosine", "1-sqrt")
BY_STAGES = "stages"
"""The `train.schedule` of a run whose stages say how the learning rate goes."""
MAY_CHANGE: Mapping[str, Sequence[str]] = {
    "data": (
        *("dir", "mix", "seq_len", "masking", "ngram_weights", "similar", "mask_selection"),
        *("mask_prob", "mask_prob_end", "mask_prob_steps", "mask_versions", "at_least_one"),
        *("replace_mask_prob", "replace_random_prob"),
    ),
    "model": ("rotary_base", "dropout", "attention_dropout"),
    "train": (*RATE, "global_batch", "micro_batch", "grad_clip", "weight_decay"),
}
"""By section of a run: the settings that a stage may have of its own."""
_REASONS = {
    "model.score_residual": "whether a model that learned with carried scores can go on without "
    "them is not known; memory at long sequences is what `postnorm plan` counts"
}


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A part of a run; it holds what differs from the run's own sections."""

    name: str = param(REQUIRED, "word for logs, tables and TensorBoard")
    steps: int | None = param(
        None, "batches of the stage, skipped ones included", unit="steps", ge=1
    )
    tokens: float | None = param(
        None, "in place of steps: batches until sequences x seq_len reach this", unit="slots", gt=0
    )
    data: dict[str, Any] = section(dict, f"of data: {', '.join(MAY_CHANGE['data'])}")
    model: dict[str, Any] = section(dict, f"of model: {', '.join(MAY_CHANGE['model'])}")
    train: dict[str, Any] = section(
        dict,
        f"of train: {', '.join(MAY_CHANGE['train'])}; the rate goes from lr (else from where it "
        "stands) to min_lr (else train.min_lr_ratio x train.lr) at the stage's last step, by "
        f"decay: {', '.join(DECAYS)} (the default)",
    )
    of: str | None = param(
        None, "checkpoint of another run in which the stage ended; written by continue_from"
    )

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ConfigError(
                f"stage {self.name!r}: steps={_shown(self.steps)} and tokens={_shown(self.tokens)}"
                "; expected one of the two"
            )
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name):
            raise ConfigError(
                f"stage name {self.name!r}: expected letters, digits, `-`, `_` and `.` alone"
            )
        for name in ("dir", "similar"):  # as the run's own: filled in where they are read
            if isinstance(text := self.data.get(name), str):
                self.data[name] = env.expand(text, f"stage {self.name}: data.{name}")


@dataclass(frozen=True, kw_only=True)
class RunStage:
    """A stage with its sections in full."""

    number: int
    """Its place in `stages`, from 0."""
    name: str
    """Empty in a run without stages."""
    first_batch: int
    cursor: int
    """Sequences in the batches before it."""
    steps: int
    """Its batches; what a run has left after skipped ones comes on top in the last stage."""
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    decay: str = "none"
    first_lr: float = 0.0
    """Learning rate of its first step, after the warm-up if it is the run's first stage."""
    last_lr: float = 0.0
    """Learning rate of its last step."""
    says_lr: bool = False
    """Whether the config gives it a learning rate of its own."""
    of: str | None = None
    """As in `StageConfig`."""

    @property
    def title(self) -> str:
        """Its name and number for people."""
        return f"stage {self.number} ({self.name})"


class Timeline:
    """The stages of a run in order; one for a run that has none."""

    def __init__(
        self,
        data: DataConfig,
        model: ModelConfig,
        train: TrainConfig,
        *,
        stages: Sequence[StageConfig] = (),
        phases: tuple[PhaseConfig, ...] = (),
    ) -> None:
        """Lay out the stages.

        Raises:
            ConfigError: a stage changes what it must not, or its values do not fit each other.
        """
        self._train = train
        sections = [_sections(data, model, train, stage, k) for k, stage in enumerate(stages)]
        sections = sections or [(data, model, train)]
        sizes = [
            StageBatches(
                stage.steps or _until(stage.tokens or 0, of_data.seq_len, *_batch(of_train), first),
                of_data.seq_len,
                *_batch(of_train),
            )
            for stage, (of_data, _, of_train), first in zip(
                stages, sections, (phases, *[()] * len(stages)), strict=False
            )
        ]
        first, _, first_train = sections[0]
        self.batches = BatchPlan(
            phases,
            seq_len=first.seq_len,
            stages=sizes,
            global_batch=first_train.global_batch,
            micro_batch=first_train.micro_batch,
        )
        self.by_stages = bool(stages) and train.schedule == BY_STAGES
        if stages:
            self._require_schedule(stages)
        self.stages: list[RunStage] = []
        for number, ((of_data, of_model, of_train), place) in enumerate(
            zip(sections, self.batches.firsts_of_stages, strict=True)
        ):
            config = stages[number] if stages else None
            self.stages.append(
                RunStage(
                    number=number,
                    name=config.name if config else "",
                    first_batch=place.number,
                    cursor=place.cursor,
                    steps=sizes[number].steps if sizes else train.num_steps,
                    data=of_data,
                    model=of_model,
                    train=of_train,
                    of=config.of if config else None,
                    **(self._rates(config, number) if config and self.by_stages else {}),
                )
            )
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"stages: {name!r} names two of them; rename one")
        total = sum(size.steps for size in sizes)
        if stages and train.num_steps != total:
            raise ConfigError(
                f"train.num_steps={train.num_steps}, and the stages have {total} steps together; "
                "leave out train.num_steps, or change the steps of a stage"
            )
        begins = self.stages[0]
        if self.by_stages and sizes[1:] and not begins.of and train.warmup_steps > begins.steps:
            raise ConfigError(
                f"train.warmup_steps={train.warmup_steps} ends after the {begins.steps} steps of "
                f"stage {begins.name}: the rate would jump; shorten it, or lengthen the stage"
            )

    def at_home(self, stages: Sequence[RunStage]) -> "Timeline":
        """Return the same timeline with stages whose data lies elsewhere."""
        moved = copy(self)
        moved.stages = list(stages)
        return moved

    @property
    def has_stages(self) -> bool:
        """Whether the config has any."""
        return bool(self.stages[0].name)

    @property
    def borders(self) -> list[int]:
        """The cursors at which a stage ends and another begins."""
        return [stage.cursor for stage in self.stages[1:]]

    def at(self, cursor: int) -> RunStage:
        """Return the stage of the batch that starts at a cursor."""
        return self.stages[self.batches.at(cursor).stage]

    def trained(self, cursor: int) -> RunStage:
        """Return the stage of the last batch before a cursor: whose model the weights are of."""
        begun = [stage for stage in self.stages if stage.cursor < cursor]
        return begun[-1] if begun else self.stages[0]

    def step(self, step: int) -> RunStage:
        """Return the stage of the update after some, if no batch is skipped."""
        return self.stages[self.batches.number(step).stage]

    def end(self, stage: RunStage) -> int | None:
        """Return the cursor at which a stage ends; None: it is the last."""
        after = self.stages[stage.number + 1 :]
        return after[0].cursor if after else None

    def learning_rate(self, step: int, stage: int, elapsed_s: float = 0.0) -> float:
        """Learning rate of the update after `step` applied ones, in a batch of a stage."""
        if not self.by_stages:
            return schedule.learning_rate(step, self._train, elapsed_s)
        of, warmup = self.stages[stage], 0
        if stage == 0:
            warmup = self._train.warmup_steps
            if step < warmup:
                return of.first_lr * (step + 1) / warmup
        # Batches that were skipped before let the border come some updates early.
        into = max(0, step - of.first_batch - warmup)
        return _decayed(of, min(1.0, into / max(1, of.steps - warmup - 1)))

    def continues(self, number: int) -> bool:
        """Return whether a stage goes on in the data of the one before it."""
        stage, before = self.stages[number], self.stages[number - 1]
        return number > 0 and stage.data.dir == before.data.dir

    def seq_lens(self, data_dir: str) -> list[int]:
        """Return the lengths of sequences that are made of a dataset."""
        places = self.batches.stretches
        found = [p.seq_len for p in places if self.stages[p.stage].data.dir == data_dir]
        return list(dict.fromkeys([*found, self.stages[0].data.seq_len]))

    def same_mix(self, number: int) -> bool:
        """Return whether a stage mixes the sources as the one before it, in the same data."""
        return self.continues(number) and (
            self.stages[number].data.mix == self.stages[number - 1].data.mix
        )

    def same_losses(self, number: int) -> bool:
        """Return whether a stage's losses can be compared with those of the one before it: same
        data and masks, of whatever length."""
        before, stage = (replace(self.stages[n].data, seq_len=1) for n in (number - 1, number))
        return before == stage

    def segments_before(self, number: int) -> int:
        """Count the stretches of one order of sequences before a stage: see `data.run_order`."""
        count, last = 0, None
        for place in self.batches.stretches:
            if place.stage >= number:
                break
            is_border = last is not None and place.stage != last.stage
            if (
                last is None
                or place.seq_len != last.seq_len
                or (is_border and not self.same_mix(place.stage))
            ):
                count += 1
            last = place
        return count

    def changes(self, number: int) -> list[str]:
        """Return what a stage has other than the one before it, with both values."""
        if number == 0:
            return []
        before, stage = self.stages[number - 1], self.stages[number]
        found = []
        for of in MAY_CHANGE:
            old, new = asdict(getattr(before, of)), asdict(getattr(stage, of))
            found += [
                f"{of}.{name} {_shown(old[name])} -> {_shown(value)}"
                for name, value in new.items()
                if old[name] != value and (of, name) != ("train", "lr")
            ]
        if self.by_stages:
            found.append(
                f"learning rate {stage.first_lr:.3g}"
                + (f", {stage.decay} to {stage.last_lr:.3g}" if stage.decay != "none" else "")
            )
        return found

    def warnings(self) -> list[str]:
        """Describe what is allowed, but more often a slip than meant."""
        found = []
        for stage in self.stages:
            where = f"{stage.title}: " if self.has_stages else ""
            if stage.data.ngram_weights is not None and stage.data.masking != "ngram":
                found.append(
                    f"{where}data.ngram_weights has no effect with data.masking="
                    f"{stage.data.masking}"
                )
            base = self.stages[0].model.rotary_base
            if stage.model.rotary_base != base and stage.model.positions != "rotary":
                found.append(
                    f"{where}model.rotary_base={stage.model.rotary_base:g} has no effect with "
                    f"model.positions={stage.model.positions}"
                )
        for before, stage in zip(self.stages, self.stages[1:], strict=False):
            base = self.stages[0].model.rotary_base
            if stage.model.rotary_base == base != before.model.rotary_base:
                found.append(
                    f"{stage.title} goes back to model.rotary_base={base:g}, {before.title} has "
                    f"{before.model.rotary_base:g}: a stage holds what differs from the run, not "
                    "from the stage before; write it there, too, if that is not meant"
                )
        return found

    def _rates(self, config: StageConfig, number: int) -> dict[str, Any]:
        """Find how a stage's learning rate goes."""
        before = self.stages[-1].last_lr if self.stages else self._train.lr
        first = float(config.train.get("lr", before))
        if first <= 0:
            raise ConfigError(
                f"stages.{number}: the learning rate is 0 where the stage before ends, and nothing "
                f"would be learned; set stages.{number}.train.lr, or the train.min_lr of the stage "
                "before"
            )
        decay, says = config.train.get("decay", "none"), "lr" in config.train
        least = float(config.train.get("min_lr", self._train.lr * self._train.min_lr_ratio))
        if decay == "none":
            if "min_lr" in config.train:
                raise ConfigError(
                    f"stages.{number}.train.min_lr={least:g} has no meaning without a decay; set "
                    f"stages.{number}.train.decay to one of {', '.join(DECAYS[1:])}, or leave it "
                    "out"
                )
            return {"decay": decay, "first_lr": first, "last_lr": first, "says_lr": says}
        if first <= least:
            raise ConfigError(
                f"stages.{number}.train.decay={decay} goes from {first:g} to {least:g}, which is "
                f"no decay; lower stages.{number}.train.min_lr, or give the stage a train.lr"
            )
        return {"decay": decay, "first_lr": first, "last_lr": least, "says_lr": says}

    def _require_schedule(self, stages: Sequence[StageConfig]) -> None:
        for number, stage in enumerate(stages):
            own = [name for name in RATE if name in stage.train]
            if own and not self.by_stages:
                raise ConfigError(
                    f"stages.{number}.train.{own[0]}={stage.train[own[0]]}, and train.schedule="
                    f"{self._train.schedule} is that of the whole run: leave out train.schedule, "
                    "or leave the rate out of the stages"
                )


def completed(root: YamlNode) -> YamlNode:
    """Fill in what follows from the stages that a run's config names: steps and schedule."""
    tree = root.value
    if not isinstance(tree, dict) or "stages" not in tree or not tree["stages"].value:
        return root
    stages = tree["stages"]
    train = tree.get("train", YamlNode({}, stages.origin))
    if not isinstance(stages.value, list) or not isinstance(train.value, dict):
        return root  # building the config says what is wrong with it
    own = dict(train.value)
    own.setdefault("schedule", YamlNode(BY_STAGES, stages.origin))
    if "num_steps" not in own:
        total = _total_steps(stages.plain(), root.plain())
        if total is not None:
            own["num_steps"] = YamlNode(total, stages.origin)
    return YamlNode({**tree, "train": YamlNode(own, train.origin)}, root.origin)


def _total_steps(stages: list[Any], root: dict[str, Any]) -> int | None:
    """Add up the steps of raw stages; None where one of them is wrong, which building it says."""
    total = 0
    for stage in stages:
        try:
            config = StageConfig(**{name: stage[name] for name in stage if name != "of"})
            sizes = [
                {**(root.get(of) or {}), **(stage.get(of) or {})}.get(name, default)
                for of, name, default in (
                    ("data", "seq_len", DataConfig.seq_len),
                    ("train", "global_batch", TrainConfig.global_batch),
                    ("train", "micro_batch", TrainConfig.micro_batch),
                )
            ]
            first = root.get("phases") or () if stage is stages[0] else ()
            phases = tuple(PhaseConfig(**phase) for phase in first)
            seq_len, whole, micro = sizes
            total += config.steps or _until(config.tokens or 0, seq_len, whole, micro, phases)
        except (ConfigError, TypeError, AttributeError, ZeroDivisionError):
            return None
    return total


def _until(
    tokens: float,
    seq_len: int,
    global_batch: int,
    micro_batch: int,
    phases: tuple[PhaseConfig, ...] = (),
) -> int:
    """Count the batches until so many slots are reached; phases come first, with their own."""
    batches = 0
    if phases:
        firsts = BatchPlan(
            phases, seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch
        ).stretches
        batches = firsts[-1].number
        for one, after in pairwise(firsts):
            tokens -= (after.number - one.number) * one.size * one.seq_len
    return max(1, batches + math.ceil(tokens / (seq_len * global_batch)))


def _batch(train: TrainConfig) -> tuple[int, int]:
    return train.global_batch, train.micro_batch


def _sections(
    data: DataConfig, model: ModelConfig, train: TrainConfig, stage: StageConfig, number: int
) -> tuple[DataConfig, ModelConfig, TrainConfig]:
    """Return a run's sections with what a stage changes in them."""
    for of, allowed in MAY_CHANGE.items():
        where, given = f"stages.{number}.{of}", getattr(stage, of)
        for name in given:
            if name in allowed:
                continue
            reason = _REASONS.get(f"{of}.{name}", "")
            raise ConfigError(
                f"{where}.{name} = {given[name]!r}: a stage cannot change it"
                f"{': ' + reason if reason else ''}; it may change {', '.join(allowed)}"
            )
    decay = stage.train.get("decay", "none")
    if decay not in DECAYS:
        raise ConfigError(
            f"stages.{number}.train.decay = {decay!r}: expected one of {', '.join(DECAYS)}"
        )
    _require_rate(stage, number)
    of_train = {name: value for name, value in stage.train.items() if name not in RATE[1:]}
    return (
        _with(data, stage.data, f"stages.{number}.data"),
        _with(model, stage.model, f"stages.{number}.model"),
        _with(train, of_train, f"stages.{number}.train"),
    )


def _require_rate(stage: StageConfig, number: int) -> None:
    value = stage.train.get("min_lr", 0.0)
    if type(value) not in (int, float) or value < 0:
        raise ConfigError(f"stages.{number}.train.min_lr = {value!r}: expected a number from 0")


def _with(section: T, changes: Mapping[str, Any], where: str) -> T:
    """Return a section with some settings changed, checked as where a file says them."""
    if not changes:
        return section
    values = json.loads(json.dumps(asdict(section)))  # type: ignore[call-overload]
    text = json.dumps({**values, **changes})
    node = strict_yaml.parse(text, where, with_lines=False)
    return schema.build(type(section), node, where)


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _decayed(stage: RunStage, done: float) -> float:
    """Learning rate of a stage of whose decay a share is done; 1-sqrt: arXiv 2405.18392."""
    if stage.decay == "none":
        return stage.first_lr
    left = {
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "1-sqrt": 1.0 - math.sqrt(done),
    }[stage.decay]
    return stage.last_lr + (stage.first_lr - stage.last_lr) * left
