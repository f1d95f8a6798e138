"""A run's data as its files describe it, opened without torch, a GPU or its number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline.config.batches import BatchPlace
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.record import BATCHES_FILE, BatchRecord, read_batches
from pipeline.data.steps import TrainSteps
from pipeline.errors import DataError
from pipeline.objectives.inputs import train_steps
from pipeline.runtime.files import ATTEMPTS_FILE, RESOLVED_FILE, read_json_lines
from pipeline.tokenizer.wordpiece import DatasetTokenizer, load_tokenizer


@dataclass(frozen=True)
class OpenedRun:
    """A run folder and the dataset that it is trained on."""

    folder: Path
    config: PretrainConfig
    index: DatasetIndex
    records: list[BatchRecord]
    """Batches that were computed, as far as the run has logged them."""
    world_size: int | None
    """Ranks of the newest start, if one is recorded."""

    @cached_property
    def steps(self) -> TrainSteps:
        """Its batches."""
        counts = sequences_at(self.index, self.config.batches.seq_lens, self.folder)
        return train_steps(self.index, self.config.train_data, counts)

    @cached_property
    def tokenizer(self) -> DatasetTokenizer:
        """That of the dataset."""
        return load_tokenizer(self.index.folder / self.index.tokenizer_file)

    def batch_of_step(self, step: int) -> BatchPlace:
        """The batch of an optimizer step, 1 for the first.

        Of a step to come it is the one with which no further step is skipped.

        Raises:
            DataError: there is no such step.
        """
        if not 1 <= step <= self.config.train.num_steps:
            raise DataError(
                f"--step {step}: the run has steps 1 to {self.config.train.num_steps} "
                "(train.num_steps)"
            )
        number = step - 1
        for record in reversed(self.records):
            if record.step is not None and record.step <= step:
                number = record.batch + step - record.step
                if record.step < step:
                    # Skipped batches behind the last step that was applied are no steps.
                    number += sum(r.step is None and r.batch > record.batch for r in self.records)
                break
        return self.config.batches.number(number)

    def batch(self, number: int) -> BatchPlace:
        """A batch by its number, 0 for the first.

        Raises:
            DataError: the number is negative.
        """
        if number < 0:
            raise DataError(f"--batch {number}: batches are counted from 0")
        return self.config.batches.number(number)

    def record(self, batch: int) -> BatchRecord | None:
        """What the run logged about a batch; None if it did not, or not yet."""
        # Lines of the log follow one another without a gap.
        place = batch - self.records[0].batch if self.records else -1
        return self.records[place] if 0 <= place < len(self.records) else None

    def num_batches(self) -> int:
        """Batches of the whole run, if none is skipped but those that were."""
        skipped = sum(record.step is None for record in self.records)
        return self.config.train.num_steps + skipped


def open_run(folder: Path, overrides: Sequence[str] = ()) -> OpenedRun:
    """Opens a run folder.

    Args:
        folder: of the run.
        overrides: such as `data.dir=...`, where the dataset lies elsewhere on this machine.

    Raises:
        DataError: the folder holds no run, or the dataset is not the one that the run was started
            with.
    """
    attempts = read_json_lines(folder / ATTEMPTS_FILE)
    if not attempts:
        raise DataError(
            f"{folder} is no run folder: it has no {ATTEMPTS_FILE} with a start; expected the "
            "run_dir of a config that `python -m pipeline pretrain` has started"
        )
    newest = attempts[-1]
    config = load(PretrainConfig, folder / RESOLVED_FILE, overrides).config
    index = read_index(config.data.dir)
    expected = newest.get("fingerprint", index.fingerprint)
    if expected != index.fingerprint:
        raise DataError(
            f"{index.folder} has fingerprint {index.fingerprint}, the run was started with "
            f"{expected}; give the folder of that dataset as data.dir=FOLDER"
        )
    logged = (folder / BATCHES_FILE).is_file()
    records = read_batches(folder) if logged else []
    return OpenedRun(folder, config, index, records, newest.get("world_size"))
