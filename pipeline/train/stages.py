"""The data of a pre-training run's stages: opened at its start, compared, and made into loaders."""

import logging
from collections.abc import Callable, Sequence

from pipeline.checkpoints.manifest import newest_of
from pipeline.config.runs import PretrainConfig
from pipeline.config.stages import RunStage, Timeline
from pipeline.data.counts import sequences_at
from pipeline.data.format import DataIdentity, DatasetIndex
from pipeline.data.loader import EvalLoader
from pipeline.data.run_order import DataRank, StageData
from pipeline.data.stages import Counts, first_needed, is_there, open_indexes, stage_data
from pipeline.errors import ConfigError
from pipeline.objectives.base import TextObjective
from pipeline.runtime import dist
from pipeline.train.initial import tokenizer_differences, tokenizer_of

logger = logging.getLogger(__name__)


def open_stages(config: PretrainConfig) -> list[DataIdentity]:
    """Read the indexes of all stages' data, so that none is found wrong weeks later.

    Raises:
        DataError: the data of a stage that is not over is missing or damaged.
        ConfigError: two stages' tokenizers differ.
    """
    newest = newest_of(config)
    if newest is None:
        found = open_indexes(config.timeline)
    else:
        current = config.timeline.at(newest.cursor).number
        known = [*newest.fingerprints, newest.fingerprint]
        found = open_indexes(config.timeline, current, known)
    _require_one_tokenizer(config.timeline, found)
    return found


def _require_one_tokenizer(timeline: Timeline, found: Sequence[DataIdentity]) -> None:
    there = [(s, i) for s, i in zip(timeline.stages, found, strict=True) if is_there(i)]
    (_, first), *others = there
    for stage, index in others:
        if index.tokenizer_sha256 == first.tokenizer_sha256:
            continue
        other_ids, other_text = tokenizer_differences(tokenizer_of(first), index)
        if other_ids:
            raise ConfigError(
                f"{stage.title}: {stage.data.dir} was made with another tokenizer than "
                f"{first.location}: {other_ids[0]}. Prepare it with that tokenizer"
            )
        for text in other_text:
            alike = "%s: its tokenizer gives the same ids to the same pieces, but %s"
            logger.warning(alike, stage.title, text)


def train_stages(
    config: PretrainConfig,
    indexes: Sequence[DataIdentity],
    objective: TextObjective,
    where_read: Callable[[DatasetIndex], DatasetIndex],
) -> list[StageData]:
    """Return what the batches of each stage are made of. Collective.

    `where_read` returns an index whose shards are where this node reads them. Of data that no stage
    to come reads only the held-out text is looked at, where it lies.
    """
    timeline = config.timeline

    def find_needed() -> int:
        newest = newest_of(config)
        return first_needed(timeline, timeline.at(newest.cursor).number) if newest else 0

    needed = dist.on_first(find_needed, "finding the stage")
    to_come = indexes[needed:]

    def opened(index: DatasetIndex, lengths: Sequence[int]) -> tuple[DatasetIndex, Counts]:
        here = where_read(index) if any(index is each for each in to_come) else index
        return here, dist.on_first(
            lambda: sequences_at(here, lengths, config.run_dir, config.objective),
            "counting sequences",
        )

    given = config.train_data_of, objective.train_inputs, opened
    return stage_data(timeline, indexes, *given)


def held_out_stages(timeline: Timeline) -> list[RunStage]:
    """Return the stages whose held-out text is looked at: each data and length once.

    The first is the one that checkpoints are compared by.
    """
    found: dict[tuple[str, int], RunStage] = {}
    for stage in timeline.stages:
        found.setdefault((stage.data.dir, stage.data.seq_len), stage)
    return list(found.values())


def held_out_loaders(
    config: PretrainConfig, stages: Sequence[StageData], objective: TextObjective, share: DataRank
) -> dict[str, EvalLoader]:
    """Open the text of `held_out_stages` whose data is there, by name of the stage."""
    by_number, found = {stage.number: stage for stage in stages}, {}
    first = config.timeline.stages[0]
    if first.number not in by_number and not first.of:
        text = "the data of %s is gone: `loss`, which compares checkpoints, is of other text now"
        logger.warning(text, first.title)
    for stage in held_out_stages(config.timeline):
        if stage.number in by_number:
            of, given = by_number[stage.number], config.eval_data_of(stage)
            inputs = objective.eval_inputs(given, of.index)
            found[stage.name] = EvalLoader(of.index, given, inputs, share, of.counts)
    return found
