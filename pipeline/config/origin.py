"""`continue_from`: the config of a run that goes on from a checkpoint of another one.

It becomes that of a run which had the other's stages before its own, so that nothing else needs to
know: order, masks, schedules and the check of a checkpoint are those of one run. Stages of the
other run have its checkpoint in `of`.
"""

import logging
from pathlib import Path
from typing import Any

from pipeline.config import schema, strict_yaml
from pipeline.config.load import plain_values
from pipeline.config.stages import MAY_CHANGE, RATE, Timeline
from pipeline.config.strict_yaml import YamlNode
from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime import env
from pipeline.runtime.checkpoints import at_step, folder_of, published, read_manifest, split_step

logger = logging.getLogger(__name__)
CONTINUE_FROM = (
    "run, RUN@STEP or RUN@best that this run goes on from, optimizer's state included; its "
    "sections and stages hold here, but for steps and schedule, and `stages` lists what comes next"
)
"""What the setting means."""
_WHOLE_RUN = ("num_steps", "schedule", "decay_steps", "decay_shape", "lr_points", "budget_hours")
"""Settings of train that are of the other run's length: the stages say it here."""
_NOT_ITS = ("run_dir", "continue_from")
IS_OTHER = ("stages", "init_from", *_NOT_ITS, *(f"train.{name}" for name in _WHOLE_RUN))
"""Settings that differ between any run and one that goes on from it."""


def continued(root: YamlNode, cls: type[Any]) -> YamlNode:
    """Put the other run's sections and stages below those of a config with `continue_from`.

    Args:
        root: of the config, with overrides.
        cls: class of the config.

    Raises:
        ConfigError: the config has no stages, changes what the other run was trained with, or
            names another checkpoint than the one that the run began from.
        CheckpointError: there is no such checkpoint.
        RunFolderError: this is not a run.
    """
    tree = root.plain()
    if not isinstance(tree, dict) or not tree.get("continue_from"):
        return root
    given, own = tree["continue_from"], tree.get("stages") or []
    if any(isinstance(stage, dict) and stage.get("of") for stage in own):
        return root  # the record of such a run
    if not own:
        raise ConfigError(
            f"continue_from={given} without stages: list what comes next, such as `stages: [{{name:"
            " decay, steps: 20_000, train: {decay: 1-sqrt}}]`"
        )
    if tree.get("init_from"):
        raise ConfigError(
            f"continue_from={given} and init_from={tree['init_from']}: the first keeps the "
            "optimizer's state, the second begins anew with weights alone; leave out one of them"
        )
    known = _recorded(tree, given, cls)
    source = known or _source(str(given), cls)
    own_train = tree.get("train") or {}
    each = [stage.get("steps") for stage in own if isinstance(stage, dict)]
    steps = sum(number for number in each if isinstance(number, int))
    for name in () if known else _WHOLE_RUN:
        fits = (source["train"].get(name), *([steps] if name == "num_steps" else []))
        if name in own_train and own_train[name] not in fits:
            raise ConfigError(
                f"train.{name}={own_train[name]} beside continue_from={given}: steps and rates are "
                "those of the stages; leave it out"
            )
    for name in _WHOLE_RUN if known else ():
        if name in own_train and own_train[name] not in (source["train"].get(name), steps):
            text = "train.%s=%s has no effect: the stages of a run with continue_from say it"
            logger.warning(text, name, own_train[name])
    theirs = source["train"].get("warmup_steps")
    if own_train.get("warmup_steps") not in (None, theirs):
        raise ConfigError(
            f"train.warmup_steps={own_train['warmup_steps']} beside continue_from={given}, whose "
            f"run has {theirs}: a warm-up is of a run's first stage, which is over; leave it out"
        )
    _require_same(source, tree, given)
    before, rate = source.pop("stages"), source.pop("rate")
    for name in _NOT_ITS:
        source.pop(name, None)
    merged = _overlaid(source, tree)
    for name in _WHOLE_RUN:
        merged.get("train", {}).pop(name, None)
    first = dict(own[0]) if isinstance(own[0], dict) else own[0]
    if isinstance(first, dict) and rate is not None:
        first["train"] = {"lr": rate, **(first.get("train") or {})}
        if first["train"]["lr"] == 0:
            raise ConfigError(
                f"continue_from={given}: the learning rate is 0 there, because a decay has ended, "
                "and nothing would be learned; give the first of stages a train.lr, or continue "
                "from a checkpoint before the decay"
            )
    merged["stages"] = [*before, first, *own[1:]]
    return strict_yaml.of_plain(merged, f"continue_from={given}", root)


def _recorded(tree: dict[str, Any], given: Any, cls: type[Any]) -> dict[str, Any] | None:
    """Return what the run has on record, if it has started: the other one may be gone since."""
    if not isinstance(tree.get("run_dir"), str):
        return None
    path = Path(env.expand(tree["run_dir"], "run_dir"), cls.RECORD)
    if not path.is_file():
        return None
    record = strict_yaml.read_file(path).plain()
    if record.get("continue_from") != env.expand(str(given), "continue_from"):
        raise ConfigError(
            f"continue_from={given}, and the run in {tree['run_dir']} began with "
            f"continue_from={record.get('continue_from')}: continue it with that, or choose "
            "another run_dir"
        )
    stages = record["stages"]
    record["stages"] = [stage for stage in stages if stage.get("of")]
    after = stages[len(record["stages"])]
    return {**record, "rate": after["train"].get("lr")}


def _source(given: str, cls: type[Any]) -> dict[str, Any]:
    """Return the other run's sections, and its stages up to its checkpoint."""
    run, step = split_step(env.expand(given, "continue_from"))
    path = published(folder_of(run))[0] if step is None else at_step(run, step)
    manifest = read_manifest(path)
    tree = manifest.config if cls.IN_MANIFESTS else {}
    record = run / cls.RECORD
    # Without them in manifests, or where an earlier version wrote it.
    if not tree:
        if not record.is_file():
            raise CheckpointError(
                f"continue_from={given}: {path} says nothing of its run's config, and {record} "
                "is missing; give the folder of the run"
            )
        tree = strict_yaml.read_file(record).plain()
    config = schema.build(cls, cls.completed(strict_yaml.of_plain(tree, str(path))))
    timeline: Timeline = config.timeline_of(manifest)
    last = timeline.trained(manifest.cursor)
    number = timeline.batches.at(manifest.cursor).number
    plain = plain_values(config)
    stages = plain["stages"] or [{"name": _word(run.resolve().name), "steps": 0, "of": None}]
    stages = [dict(stage) for stage in stages[: last.number + 1]]
    for stage, found in zip(stages, timeline.stages, strict=False):
        stage["steps"], stage["tokens"] = found.steps, None
        stage["of"] = stage["of"] or str(path.resolve())
    stages[-1]["steps"] = number - last.first_batch
    if not stages[-1]["steps"]:
        raise ConfigError(
            f"continue_from={given}: {path} is from before its first step; nothing goes on from "
            "it: set init_from"
        )
    rate = timeline.learning_rate(manifest.step - 1, last.number, manifest.elapsed_s)
    if timeline.by_stages and number == last.first_batch + last.steps:
        rate = last.last_lr  # as the next stage of that run has it, whatever batches were left out
    # What the other run began from is behind it; a mix takes its architecture from there.
    if cls.IN_MANIFESTS:
        plain["init_from"] = None
    return {**plain, "stages": stages, "rate": rate}


def _require_same(source: dict[str, Any], tree: dict[str, Any], given: Any) -> None:
    """Refuse a change of what the other run's stages were trained with."""
    for section, names in MAY_CHANGE.items():
        own = tree.get(section)
        for name, value in own.items() if isinstance(own, dict) else ():
            theirs = (source.get(section) or {}).get(name)
            is_free = name == "micro_batch" or name not in names or name in RATE[1:]
            if is_free or theirs == value or _same_number(theirs, value):
                continue
            raise ConfigError(
                f"{section}.{name}={value}, and the run of continue_from={given} has {theirs}: "
                f"its stages stay as they were; write it in the new stage, as {section}: "
                f"{{{name}: {value}}}"
            )


def _same_number(one: Any, other: Any) -> bool:
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return numbers and float(one) == float(other)


def _overlaid(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _overlaid(merged[name], value) if both else value
    return merged


def _word(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text) or "before"
