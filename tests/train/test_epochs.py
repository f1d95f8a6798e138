"""A run that repeats its data often says so as it starts."""

from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.run_order import DataRank
from pipeline.train.pretraining import repetitions
from tests.support.ranks import CONFIG
from tests.support.steps import train_loader


@pytest.mark.parametrize(("epochs", "told"), [(3.9, []), (906.6, ["the data 907 times"])])
def test_many_epochs_are_told(
    tmp_path: Path, dataset: DatasetIndex, epochs: float, told: list[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)

    def read(num_steps: int) -> PretrainConfig:
        overrides = [f"run_dir={tmp_path}", f"data.dir={dataset.folder}",
                     f"train.num_steps={num_steps}"]  # fmt: skip
        return load(PretrainConfig, tmp_path / "config.yaml", overrides).config

    loader = train_loader(dataset, read(40), DataRank(0, 1))
    [seen] = loader.epochs(8 * 40).values()
    in_one_epoch = 8 * 40 / seen
    config = read(round(epochs * in_one_epoch / 8))
    assert repetitions(config, loader) == told
