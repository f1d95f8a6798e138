"""The data of a run's stages: each one's index, and what its batches are made of. Without torch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from pipeline.config.data import TrainDataConfig
from pipeline.config.stages import RunStage, Timeline
from pipeline.data.dataset import Inputs
from pipeline.data.format import DataIdentity, DatasetIndex
from pipeline.data.masking import similar_tokens
from pipeline.data.objects import open_index
from pipeline.data.order import Ints
from pipeline.data.run_order import StageData
from pipeline.errors import ConfigError, DataError

logger = logging.getLogger(__name__)
Counts = Mapping[int, Ints]


@dataclass(frozen=True)
class PastData:
    """The `DataIdentity` of a stage that is over and whose data is no longer there."""

    location: str
    fingerprint: str
    content: bytes = b"{}"
    tokenizer_file: str = ""
    tokenizer_sha256: str = ""

    @property
    def folder(self) -> Path:
        """Where it was."""
        return Path(self.location)


def is_there(data: DataIdentity) -> TypeGuard[DatasetIndex]:
    """Return whether a stage's data can be read."""
    return isinstance(data, DatasetIndex)


def open_indexes(
    timeline: Timeline, current: int = 0, known: Sequence[str] = ()
) -> list[DataIdentity]:
    """Read the indexes of all stages' data.

    The data of stages that are over may be gone, where none that is to come goes on in it.

    Args:
        timeline: the stages.
        current: the stage that comes next.
        known: fingerprints of the stages that have begun.

    Raises:
        DataError: the data of a stage is missing or damaged.
        ConfigError: a stage to come has the data of the one before it under another name.
    """
    needed = first_needed(timeline, current)
    read, found = dict[str, DatasetIndex](), list[DataIdentity]()
    for stage in timeline.stages:
        try:
            if stage.data.dir not in read:
                read[stage.data.dir] = open_index(stage.data)
            found.append(read[stage.data.dir])
        except DataError as error:
            if stage.number < min(needed, len(known)):
                logger.warning("%s is over, and its data is gone: %s", stage.title, error)
                found.append(PastData(stage.data.dir, known[stage.number]))
                continue
            if not timeline.has_stages:
                raise
            raise DataError(f"{stage.title}: {error}") from error
        number, before = stage.number, timeline.stages[stage.number - 1]
        is_new = number >= max(1, len(known)) and not timeline.continues(number)
        if is_new and found[-1].fingerprint == found[-2].fingerprint:
            raise ConfigError(
                f"stages.{number}.data.dir={stage.data.dir} is the data of {before.title}, there "
                f"{before.data.dir}, and would be read again from its first sequence; give it one "
                "name in both, and the stage goes on where that one ends"
            )
    return found


def first_needed(timeline: Timeline, current: int) -> int:
    """Return the first stage whose data is read from: those to come may go on in earlier ones'."""
    while current and timeline.continues(current):
        current -= 1
    return current


def stage_data(
    timeline: Timeline,
    indexes: Sequence[DataIdentity],
    config_of: Callable[[RunStage], TrainDataConfig],
    inputs_of: Callable[[TrainDataConfig, DatasetIndex], Inputs],
    opened: Callable[[DatasetIndex, Sequence[int]], tuple[DatasetIndex, Counts]],
) -> list[StageData]:
    """Return what the batches of each stage are made of whose data is there.

    Args:
        timeline: the stages.
        indexes: of their data.
        config_of: gives the data config of a stage.
        inputs_of: makes the objective's inputs.
        opened: gives an index as it is read here, and its sequences at some lengths; called once a
            name of a dataset.
    """
    read, found = dict[str, tuple[DatasetIndex, Counts]](), list[StageData]()
    for stage, index in zip(timeline.stages, indexes, strict=True):
        if not is_there(index):
            continue
        # By the name in the config: by the folder, a second name's lengths would be missing.
        if stage.data.dir not in read:
            read[stage.data.dir] = opened(index, timeline.seq_lens(stage.data.dir))
        (here, counts), config = read[stage.data.dir], config_of(stage)
        if config.data.similar is not None:
            # Before the first step, not then.
            similar_tokens(config.data.similar, here.vocabulary, here.tokenizer_sha256)
        found.append(
            StageData(
                here,
                config,
                inputs_of(config, here),
                counts,
                number=stage.number,
                continues=bool(found) and timeline.continues(stage.number),
                same_mix=timeline.same_mix(stage.number),
                segments_before=timeline.segments_before(stage.number),
            )
        )
    return found
