"""Entropy and likeness of attention, on cases whose answer is known."""

import math
from dataclasses import replace

import pytest
import torch

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.run_order import DataRank
from pipeline.model.encoder import Encoder, MaskedLanguageModel
from pipeline.model.layout import packed, padded, rows
from pipeline.train import look
from pipeline.train.look import attention_entropy, entropy_of
from tests.support.steps import eval_loader

CONFIG = ModelConfig(vocab_size=40, num_layers=3, hidden_size=24, num_heads=3, ffn_size=40)


def _even(encoder: Encoder) -> Encoder:
    """Let each token attend alike to all of its document."""
    with torch.no_grad():
        for layer in encoder.layers:
            layer.attention.qkv.weight.zero_()  # type: ignore[union-attr]
    return encoder.eval()


def test_entropy_of_known_distributions() -> None:
    share = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]])[None, None]
    expected = torch.tensor([0.0, math.log(4), math.log(2)])
    torch.testing.assert_close(entropy_of(share)[0, 0], expected)


def test_even_attention_has_the_entropy_of_its_documents_lengths() -> None:
    encoder = _even(Encoder(CONFIG))
    documents = torch.tensor([[1] * 4 + [2] * 2 + [0] * 3])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0, 0]])
    ids = torch.randint(40, (1, 9))
    found = attention_entropy(encoder, ids, rows(documents, positions), documents > 0)
    expected = (4 * math.log(4) + 2 * math.log(2)) / 6
    torch.testing.assert_close(found, torch.full((3, 3), expected))


def test_packed_and_padded_are_alike() -> None:
    torch.manual_seed(0)
    encoder = Encoder(CONFIG).eval()
    lengths, ids = torch.tensor([5, 2]), torch.randint(40, (7,))
    flat = attention_entropy(
        encoder, ids, packed(torch.tensor([0, 5, 7]), 5, 7), torch.ones(7, dtype=torch.bool)
    )
    real = torch.arange(5) < lengths[:, None]
    grid = torch.zeros(2, 5, dtype=torch.int64).masked_scatter(real, ids)
    side_by_side = attention_entropy(encoder, grid, padded(lengths, 5), real)
    torch.testing.assert_close(flat, side_by_side)


def test_of_sequences_too_long_for_memory_the_beginning_is_seen(
    dataset: DatasetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PretrainConfig(run_dir="unused", data=DataConfig(dir=str(dataset.folder), seq_len=64))
    loader = eval_loader(dataset, config, DataRank(0, 1))
    model = MaskedLanguageModel(replace(CONFIG, vocab_size=dataset.vocabulary.size))
    _even(model.encoder)
    for length in (20, 33):
        monkeypatch.setattr(look, "_MOST_PROBABILITIES", 3 * 3 * length**2)
        observer = look.Observer(model, loader, dataset, torch.device("cpu"), sees_masks=True)
        documents = loader.spread(1).documents[0, :length]
        lengths = documents[documents > 0].unique(return_counts=True)[1]
        expected = (lengths * lengths.log()).sum() / lengths.sum()
        torch.testing.assert_close(observer.attention(), expected.expand(3, 3))


def test_a_discriminator_is_looked_at_without_masks(dataset: DatasetIndex) -> None:
    data = DataConfig(dir=str(dataset.folder), seq_len=64, mask_prob=0.5)
    loader = eval_loader(dataset, PretrainConfig(run_dir="unused", data=data), DataRank(0, 1))
    clean = replace(data, replace_mask_prob=0.0, replace_random_prob=0.0)
    unmasked = eval_loader(dataset, PretrainConfig(run_dir="unused", data=clean), DataRank(0, 1))
    model = MaskedLanguageModel(replace(CONFIG, vocab_size=dataset.vocabulary.size))
    found = [
        look.Observer(model, of, dataset, torch.device("cpu"), sees_masks=sees).attention()
        for of, sees in ((loader, False), (unmasked, True), (loader, True))
    ]
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
