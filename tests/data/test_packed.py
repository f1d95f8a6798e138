"""A batch without padding: the same documents, and the same logits."""

import numpy as np
import pytest
import torch

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.run import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data.dataset import Batch
from pipeline.data.packed import packed
from pipeline.data.shards import DatasetIndex
from pipeline.data.steps import Share
from pipeline.model import layout
from pipeline.model.encoder import MaskedLanguageModel
from tests.support.steps import open_steps


@pytest.fixture(scope="module")
def batches(dataset: DatasetIndex) -> list[Batch]:
    config = PretrainConfig(
        run_dir="unused", data=DataConfig(dir=str(dataset.folder), seq_len=64),
        train=TrainConfig(global_batch=160, micro_batch=16),
    )  # fmt: skip
    return open_steps(dataset, config).micro_batches(160, Share(0, 1))


def test_documents_stand_end_to_end(batches: list[Batch]) -> None:
    assert any((batch.documents == 0).any() for batch in batches)
    for batch in batches:
        found = packed(batch)
        targets, masked = [], []
        documents = [
            ids[numbers == number]
            for ids, numbers in zip(batch.input_ids, batch.documents, strict=True)
            for number in range(1, int(numbers.max()) + 1)
        ]
        assert found.cu_seqlens[0] == 0
        assert found.cu_seqlens.dtype == np.int32
        parts = np.split(found.tokens, found.cu_seqlens[1:-1])
        assert [part.tolist() for part in parts] == [part.tolist() for part in documents]
        assert found.cu_seqlens[-1] == len(found.tokens) == batch.num_tokens
        lengths = np.diff(found.cu_seqlens)
        assert found.max_seqlen == lengths.max()
        expected = np.concatenate([np.arange(length) for length in lengths])
        np.testing.assert_array_equal(found.positions, expected)
        place = {slot: token for token, slot in enumerate(np.flatnonzero(batch.documents))}
        for slot, target in zip(batch.masked_index.tolist(), batch.targets.tolist(), strict=True):
            masked.append(place[slot])
            targets.append(target)
        assert found.masked_index.tolist() == masked
        assert found.targets.tolist() == targets


@pytest.mark.parametrize("score_residual", ["none", "sum"])
def test_the_model_gives_the_same_logits(batches: list[Batch], score_residual: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=1000, num_layers=2, hidden_size=32, num_heads=2, ffn_size=64,
        score_residual=score_residual,  # type: ignore[arg-type]
    )  # fmt: skip
    model = MaskedLanguageModel(config).double().eval()
    batch, one = batches[0], packed(batches[0])
    rows = layout.rows(torch.from_numpy(batch.documents), torch.from_numpy(batch.positions))
    ends = torch.from_numpy(one.cu_seqlens)
    flat = layout.packed(ends, one.max_seqlen, len(one.tokens))
    assert torch.equal(flat.positions, torch.from_numpy(one.positions))
    alpha = torch.ones((), dtype=torch.float64)
    with torch.no_grad():
        expected = model(
            torch.from_numpy(batch.input_ids), rows, torch.from_numpy(batch.masked_index), alpha
        )
        found = model(torch.from_numpy(one.tokens), flat, torch.from_numpy(one.masked_index), alpha)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
