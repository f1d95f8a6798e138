"""The weights that a new run starts from instead of random ones: `init_from`."""

import hashlib
import logging
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.runs import RunConfig
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError
from pipeline.model.architecture import OBJECTIVE_PARTS
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.tokenizer.wordpiece import difference_of_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObjectiveParts:
    """What an objective trains beside the model; a run of the same objective goes on with it."""

    objective: dict[str, Any]
    """Its config in plain values."""
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class InitialWeights:
    """Weights for a new run, with the model and the tokenizer that they fit."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer | FastTokenizer | None
    """None if the model has none."""
    parts: ObjectiveParts | None = None


# Upper case, an accent, Chinese and a line break: options decide how these are split.
_PROBE_TEXT = "Tokenizers É 中文\nof two"
# Settings that change neither the place nor the meaning of a shared parameter. Pairs want a pooler,
# which a model of MLM alone does not have.
_FREE_TO_DIFFER = {"dropout", "attention_dropout", "embedding_dropout", "init", "pooler"}
_MAY_BE_NEW = (OBJECTIVE_PARTS, "encoder.pooler.")


def start_from(
    model: nn.Module, initial: InitialWeights, config: RunConfig, index: DatasetIndex
) -> None:
    """Check and load the weights that a new run starts from.

    Raises:
        ConfigError: they fit another architecture, or another tokenizer's ids.
    """
    theirs, ours = asdict(initial.config), asdict(config.timeline.stages[0].model)
    # Without a table of positions its size says nothing.
    free = _FREE_TO_DIFFER | (set() if ours["positions"] == "learned" else {"max_positions"})
    problems = [
        f"model.{name}: {theirs[name]} there, {value} here"
        for name, value in ours.items()
        if theirs[name] != value and name not in free
    ]
    other_ids, other_text = tokenizer_differences(initial.tokenizer, index)
    problems += [f"tokenizer: {text}" for text in other_ids]
    if problems:
        changes = [f"--vocab {index.folder}"] if other_ids else []
        if theirs["max_positions"] != ours["max_positions"] and config.model.longest_document:
            changes.append(f"--positions {config.model.longest_document}")
        if theirs["rotary_base"] != ours["rotary_base"]:
            changes.append(f"--rotary-base {ours['rotary_base']:g}")
        surgery = f"`postnorm convert {config.init_from} OUT {' '.join(changes)}` changes it"
        raise ConfigError(
            f"init_from={config.init_from} does not fit this run: {'; '.join(problems)}. Give the "
            "model the values that it has there, and use data made with its tokenizer"
            + (f"; or {surgery}, and init_from=OUT" if changes else "")
        )
    for text in other_text:
        logger.warning(
            "the tokenizers of %s and of the dataset give the same ids to the same pieces, but %s",
            config.init_from,
            text,
        )
    weights = initial.weights | _parts(model, initial, config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert all(name.startswith(_MAY_BE_NEW) for name in missing), missing
    logger.info("weights are those of %s", config.init_from)
    if missing:
        logger.info("not there, so drawn at random: %s", ", ".join(missing))
    if unexpected:
        logger.warning("left out, as this run's model has no such part: %s", ", ".join(unexpected))


def tokenizer_of(index: DatasetIndex) -> Tokenizer | FastTokenizer:
    """Load the tokenizer of a dataset."""
    path = index.folder / index.tokenizer_file
    return FastTokenizer(path) if path.suffix == ".json" else Tokenizer(path)


def _parts(model: nn.Module, initial: InitialWeights, config: RunConfig) -> dict[str, Tensor]:
    """Return what the source's objective trained beside the model, if this run's has the same."""
    if initial.parts is None:
        return {}
    kinds = [
        of.get("kind")
        for of in (initial.parts.objective, config.identity_at().get("objective", {}))
    ]
    theirs = {name: tuple(weight.shape) for name, weight in initial.parts.weights.items()}
    every = model.state_dict().items()
    ours = {name: tuple(of.shape) for name, of in every if name.startswith(OBJECTIVE_PARTS)}
    if kinds[0] == kinds[1] and theirs == ours:
        return initial.parts.weights
    logger.warning(
        "%s: %d parameters of its objective %s are left out, as this run's has others; to go on "
        "with them, give this run the same objective",
        config.init_from,
        len(theirs),
        kinds[0],
    )
    return {}


def tokenizer_differences(
    theirs: Tokenizer | FastTokenizer | None, index: DatasetIndex
) -> tuple[list[str], list[str]]:
    """Describe how a model's tokenizer differs from a dataset's.

    Returns:
        Why ids mean other tokens, and why the same text may get other ids; empty where they do not.
    """
    path = index.folder / index.tokenizer_file
    if theirs is None:
        return [f"none there, {path.name} in {index.folder}"], []
    # Equal files need no look inside; different ones may still be one vocabulary.
    if hashlib.sha256(theirs.content).hexdigest() == index.tokenizer_sha256:
        return [], []
    ours = tokenizer_of(index)
    # Piece by piece: a vocab.txt and the tokenizer.json made of it are one vocabulary, and so are a
    # sentencepiece model and its export for transformers.
    other_ids = difference_of_ids(theirs.pieces(), ours.pieces())
    if other_ids:
        return [f"{other_ids} ({theirs.path}, {path})"], []
    if isinstance(theirs, Tokenizer) and isinstance(ours, Tokenizer):
        if theirs.keeps_breaks != ours.keeps_breaks:
            return [], [f"line breaks are {_kind(ours)} in {path} alone (clean.newline)"]
        if theirs.definition() != ours.definition():
            return [], [f"the scores or rules of {theirs.path} and {path} differ"]
    elif theirs.encode(_PROBE_TEXT) != ours.encode(_PROBE_TEXT):
        return [], [
            f"split {_PROBE_TEXT!r} differently: check lowercase, strip_accents and split_chinese "
            f"of {theirs.path} and {path}"
        ]
    return [], []


def _kind(tokenizer: Tokenizer) -> str:
    return "tokens" if tokenizer.keeps_breaks else "spaces"
