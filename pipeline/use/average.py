"""`postnorm average`: the mean of several models' weights as one model.

Means of the last checkpoints of a run at a high rate come near to what a decay of the rate gives
(Sanyal et al. 2023, "Early Weight Averaging meets High Learning Rates"; Izmailov et al. 2018,
"Averaging Weights Leads to Wider Optima"); means of fine-tunings are model soups (Wortsman et al.
2022), here of their encoders alone. The models must come from one start: weights of two random
starts have nothing in common.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.architecture import HEAD_FILE
from pipeline.runtime.checkpoints import folder_of, published, split_step, step_of
from pipeline.tokenizer.wordpiece import difference_of_ids
from pipeline.use.export import load_for_export
from pipeline.use.folder import (
    MADE_NEW,
    OPTIMIZER,
    TrainedModel,
    fine_tuned,
    publishing,
    write_model,
    write_tokenizer,
)
from pipeline.use.foreign_config import SENTENCES

logger = logging.getLogger(__name__)

_FREE_TO_DIFFER = ("dropout", "attention_dropout", "embedding_dropout", "init")
"""Settings that a model in use does not have."""


@dataclass(frozen=True)
class AverageReport:
    """What a mean was made of."""

    sources: list[str]
    num_parameters: int
    distance: float
    """Root mean square of the models' distances from the mean, as a share of the mean's norm."""


def average(sources: Sequence[str | Path], out: Path, *, last: int | None = None) -> AverageReport:
    """Write the mean of models as a model folder.

    Args:
        sources: models as `load_source` takes them; with `last`, one run.
        out: folder to write.
        last: the newest checkpoints of that run to take.

    Raises:
        ConfigError: there are fewer than two models, or `last` does not go with them.
        CheckpointError: they differ in architecture or tokenizer, or one cannot be read.
    """
    names = _names(sources, last)
    first: TrainedModel | None = None
    sums, squares, made_of = dict[str, Tensor](), 0.0, list[dict[str, Any]]()
    made_new = set[str]()
    for name in names:
        trained = load_for_export(name)
        first = first or trained
        if (fine_tuned(split_step(name)[0]) / HEAD_FILE).is_file():
            logger.warning("%s: the head of its task is left out of the mean", name)
        if trained.facts.get(SENTENCES) != first.facts.get(SENTENCES):
            logger.warning("%s: other pooling or length than %s, whose are kept", name, names[0])
        if trained.parts is not None:
            logger.warning("%s: parts of its objective beside the encoder are left out", name)
        _require_same(first, trained, (names[0], name))
        for key, tensor in trained.model.state_dict().items():
            # In double precision: the mean of equal weights is these weights, to the bit.
            exact = tensor.double()
            sums[key] = sums[key] + exact if key in sums else exact
            squares += float(exact.square().sum())
        made_of.append({"path": str(name), "step": trained.facts.get("step")})
        made_new |= set(trained.facts.get(MADE_NEW, ()))
    assert first is not None
    means = {key: total / len(names) for key, total in sums.items()}
    norm = sum(float(mean.square().sum()) for mean in means.values())
    facts: dict[str, Any] = {"averaged_from": made_of, OPTIMIZER: first.facts.get(OPTIMIZER)}
    if made_new:
        facts[MADE_NEW] = sorted(made_new)
    if SENTENCES in first.facts:
        facts[SENTENCES] = first.facts[SENTENCES]
    with publishing(out) as folder:
        write_tokenizer(first, folder)
        weights = {key: mean.float() for key, mean in means.items()}
        write_model(folder, first.model.config, weights, facts)
    spread = max(0.0, squares / len(names) - norm)
    return AverageReport(
        [str(name) for name in names],
        sum(mean.numel() for mean in means.values()),
        (spread / norm) ** 0.5,
    )


def _names(sources: Sequence[str | Path], last: int | None) -> list[str | Path]:
    if last is None:
        if len(sources) < 2:
            raise ConfigError(
                f"{len(sources)} model was given, and a mean needs 2 or more; name others, or "
                "--last N for the newest checkpoints of a run"
            )
        return list(sources)
    if len(sources) != 1 or last < 2:
        raise ConfigError(
            f"--last {last} with {len(sources)} models: expected one run, and 2 checkpoints or more"
        )
    [run] = sources
    # Not those of step 0 (checkpoint.keep_first): nothing is learned in them.
    steps = [step for path in published(folder_of(Path(run))) if (step := step_of(path))]
    if len(steps) < last:
        raise ConfigError(
            f"--last {last}: {run} has {len(steps)} checkpoints, of steps "
            f"{', '.join(map(str, sorted(steps)))}; take fewer, or keep more (checkpoint.keep)"
        )
    return [f"{run}@{step}" for step in sorted(steps[:last])]


def _require_same(first: TrainedModel, other: TrainedModel, names: tuple[Any, Any]) -> None:
    """Check that two models have the same architecture and vocabulary.

    Raises:
        CheckpointError: they have not; names what differs.
    """
    ours, theirs = (asdict(trained.model.config) for trained in (first, other))
    problems = [
        f"model.{name} is {value} and {theirs[name]}"
        for name, value in ours.items()
        if theirs[name] != value and name not in _FREE_TO_DIFFER
    ]
    pieces = [trained.tokenizer.pieces() if trained.tokenizer else [] for trained in (first, other)]
    if different := difference_of_ids(*pieces):
        problems.append(f"tokenizer: {different}")
    if problems:
        raise CheckpointError(
            f"{names[0]} and {names[1]} have no mean: {'; '.join(problems)}; average models of one "
            "architecture and tokenizer"
        )
