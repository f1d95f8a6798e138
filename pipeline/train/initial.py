"""The weights that a new run starts from instead of random ones: `init_from`."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.runs import RunConfig
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError
from pipeline.model.architecture import OBJECTIVE_PARTS
from pipeline.runtime.files import sha256_file
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.tokenizer.wordpiece import difference_of_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitialWeights:
    """Weights for a new run, with the model and the tokenizer that they fit."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Path | None
    """File of the model's tokenizer; None if it has none."""


# Upper case, an accent and Chinese: BERT's options decide how these are split.
_PROBE_TEXT = "Tokenizers É 中文 of two"
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
    theirs, ours = asdict(initial.config), asdict(config.model)
    problems = [
        f"model.{name}: {theirs[name]} there, {value} here"
        for name, value in ours.items()
        if theirs[name] != value and name not in _FREE_TO_DIFFER
    ]
    other_ids, other_text = tokenizer_differences(initial.tokenizer, index)
    problems += [f"tokenizer: {text}" for text in other_ids]
    if problems:
        raise ConfigError(
            f"init_from={config.init_from} does not fit this run: {'; '.join(problems)}. Give the "
            "model the values that it has there, and use data made with its tokenizer"
        )
    for text in other_text:
        logger.warning(
            "the tokenizers of %s and of the dataset give the same ids to the same pieces, but %s",
            config.init_from,
            text,
        )
    missing, unexpected = model.load_state_dict(initial.weights, strict=False)
    assert all(name.startswith(_MAY_BE_NEW) for name in missing), missing
    logger.info("weights are those of %s", config.init_from)
    if missing:
        logger.info("not there, so drawn at random: %s", ", ".join(missing))
    if unexpected:
        logger.warning("left out, as this run's model has no such part: %s", ", ".join(unexpected))


def tokenizer_differences(theirs: Path | None, index: DatasetIndex) -> tuple[list[str], list[str]]:
    """Describe how a model's tokenizer differs from a dataset's.

    Returns:
        Why ids mean other tokens, and why the same text may get other ids; empty where they do not.
    """
    path = index.folder / index.tokenizer_file
    if theirs is None:
        return [f"none there, {path.name} in {index.folder}"], []
    # Equal files need no look inside; different ones may still be one vocabulary.
    if sha256_file(theirs) == index.tokenizer_sha256:
        return [], []
    if theirs.suffix == path.suffix == ".model":
        one, other = Tokenizer(theirs).definition(), Tokenizer(path).definition()
        if (one.pieces, one.scores) == (other.pieces, other.scores) and (
            one.keeps_breaks != other.keeps_breaks
        ):
            kind = "tokens" if other.keeps_breaks else "spaces"
            return [], [f"line breaks are {kind} in {path} alone (clean.newline)"]
    if theirs.suffix != ".json" or path.suffix != ".json":
        return [f"{theirs} there, {path} here, which are not the same"], []
    pair = FastTokenizer(theirs), FastTokenizer(path)
    # Piece by piece: a vocab.txt and the tokenizer.json made of it are one vocabulary.
    other_ids = difference_of_ids(*pair)
    other_text = []
    if pair[0].encode(_PROBE_TEXT) != pair[1].encode(_PROBE_TEXT):
        other_text.append(
            f"split {_PROBE_TEXT!r} differently: check lowercase, strip_accents and split_chinese "
            f"of {theirs} and {path}"
        )
    return [f"{other_ids} ({theirs}, {path})"] if other_ids else [], other_text
