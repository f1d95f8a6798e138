"""What the runs of a task's seeds share: its rows as tokens, and the model that they start from."""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.data import BatchPlan
from pipeline.data.run_order import DataRank
from pipeline.errors import ConfigError, DataError
from pipeline.finetune.batches import Corrupt, TaskStream, class_weights, tokenised
from pipeline.finetune.result import SPLITS
from pipeline.model.architecture import SENTENCEPIECE_FILE, TOKENIZERS_FILE
from pipeline.tasks.readers import TaskData, read_task
from pipeline.tasks.task import RANDOM, TaskConfig
from pipeline.tasks.types import HeadSpec, TaskRows
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.use.folder import TrainedModel, require_full_alpha
from pipeline.use.source import load_source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A task's data and the model that it starts from, shared by the runs of all seeds."""

    name: str
    config: TaskConfig
    """The task's config, with the labels read from its data."""
    source: str
    trained: TrainedModel
    data: TaskData
    rows: dict[str, TaskRows]
    tokenizer_file: str
    tokenizer: bytes

    @property
    def is_random(self) -> bool:
        """Whether only the architecture and the tokenizer are the source's."""
        return self.source.startswith(RANDOM)

    @cached_property
    def spec(self) -> HeadSpec:
        """The head."""
        spec = self.config.head_spec(self.name, self.data.labels)
        has_none = any(example.gold == () for example in self.data.splits.get("train", ()))
        # Where every question has an answer, none may stay without.
        return spec if has_none else replace(spec, null_threshold=None)

    @cached_property
    def num_units(self) -> int:
        """Number of units of train: examples, or windows of passages."""
        return len(self.config.kind.scoring_groups(self.rows["train"].rows))

    @property
    def pad_id(self) -> int:
        """Token of padding."""
        return int(self.trained.require_tokenizer().pad_id)

    def stream(
        self, plan: BatchPlan, share: DataRank, seed: int, corrupt: Corrupt | None = None
    ) -> TaskStream:
        """Return the batches of train; see `TaskStream`."""
        weights = None
        if self.config.train.class_weights == "balanced":
            weights = class_weights(self.data.splits["train"], self.data.labels)
        return TaskStream(
            self.spec, self.rows["train"], plan, share, seed, self.pad_id, weights, corrupt
        )

    @cached_property
    def data_sha256(self) -> str:
        """Hash of all rows of all splits."""
        return hash_of({name: rows.digest for name, rows in self.rows.items()})

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the encoder's weights that a run starts from; of random ones, of nothing."""
        total = hashlib.sha256()
        if not self.is_random:
            for name, tensor in sorted(self.trained.model.encoder.state_dict().items()):
                total.update(name.encode())
                total.update(tensor.contiguous().numpy().tobytes())
        return total.hexdigest()


def prepare(config: TaskConfig, name: str, source: str, tokens: Path | None) -> Prepared:
    """Read a task's data and the model.

    Raises:
        DataError: the data does not fit the task.
        ConfigError: the model cannot take the task's rows.
        PostnormError: the model cannot be read.
    """
    if not config.data.train:
        raise ConfigError("data.train names no file; a model needs rows to train on")
    data = read_task(config)
    if all(row.gold is None for split in SPLITS for row in data.splits[split]):
        raise DataError(
            "neither data.dev nor data.test has a row with gold, so that nothing could be scored; "
            "name a dev file, or take dev from train by data.hold_out=0.1"
        )
    trained = load_source(source.removeprefix(RANDOM))
    return prepare_rows(config, name, source, trained, data, tokens)


def prepare_rows(
    config: TaskConfig,
    name: str,
    source: str,
    trained: TrainedModel,
    data: TaskData,
    tokens: Path | None,
) -> Prepared:
    """Tokenise a task's data for a model that was read from `source`; see `prepare`."""
    if len(data.labels) < (least := 2 if config.kind.has_classes else int(config.kind.has_labels)):
        raise DataError(
            f"the rows of data.train have {len(data.labels)} classes ({', '.join(data.labels)}); "
            f"a model of task.kind={config.task.kind} cannot learn of fewer than {least}"
        )
    if data.labels and config.data.labels == "auto":  # tags that are numbers keep their names
        config = replace(config, data=replace(config.data, labels=data.labels))
    if data.joiner is not None:  # so that other files are joined as these were
        config = replace(config, data=replace(config.data, joiner=data.joiner))
    folder = source.removeprefix(RANDOM)
    require_full_alpha(trained, folder, "fine-tuning starts at alpha 1")
    limit = trained.model.config.longest_document
    if limit is not None and config.input.max_length > limit:
        raise ConfigError(
            f"input.max_length={config.input.max_length} is above the {limit} positions of "
            f"{folder}; lower it"
        )
    if config.head.pool == "pooler" and not trained.model.config.pooler:
        raise ConfigError(f"head.pool=pooler, but {folder} has no pooler; take cls or mean")
    tokenizer: Any = trained.require_tokenizer()
    file, content = tokenizer_of(tokenizer)
    sha256 = hashlib.sha256(content).hexdigest()
    rows = {}
    for split, examples in data.splits.items():
        if examples:
            rows[split] = tokenised(config, tokenizer, sha256, examples, tokens)
            for what, count in rows[split].counts.items():
                logger.info("%s: %s: %d", split, what, count)
    return Prepared(name, config, source, trained, data, rows, file, content)


def tokenizer_of(tokenizer: Tokenizer | FastTokenizer) -> tuple[str, bytes]:
    """Return the name and content of the tokenizer's file in the model's folder."""
    if isinstance(tokenizer, Tokenizer):
        return SENTENCEPIECE_FILE, tokenizer.content
    return TOKENIZERS_FILE, tokenizer.to_json().encode()


def hash_of(values: Any) -> str:
    """Return the sha256 of values as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
