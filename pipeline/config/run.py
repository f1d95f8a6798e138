"""The root config of `python -m pipeline pretrain`."""

from dataclasses import dataclass

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.schema import REQUIRED, param, section
from pipeline.config.train import CheckpointConfig, MonitorConfig, TrainConfig
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One pre-training run; the cluster it runs on is not part of it."""

    run_dir: str = param(REQUIRED, "folder for checkpoints, metrics and logs; resumed if it exists")
    seed: int = param(1, "of initialisation, order, masks and dropout", ge=0, le=2**32 - 1)
    init_from: str | None = param(
        None, "run or model folder whose weights a new run starts from; null starts at random"
    )
    model: ModelConfig = section(ModelConfig, "architecture")
    data: DataConfig = section(DataConfig, "dataset, packing and masking")
    train: TrainConfig = section(TrainConfig, "optimisation")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving")
    monitor: MonitorConfig = section(MonitorConfig, "logging and evaluation")

    def __post_init__(self) -> None:
        limit = self.model.longest_document
        if limit is not None and self.data.seq_len > limit:
            raise ConfigError(
                f"data.seq_len={self.data.seq_len} is longer than the {limit} learned positions of "
                "the model; shorten it, or raise model.max_positions"
            )
