"""Entropy and likeness of attention, on cases whose answer is known."""

import math

import torch

from pipeline.config.model import ModelConfig
from pipeline.model.encoder import Encoder
from pipeline.model.layout import packed, padded, rows
from pipeline.train.look import attention_entropy, entropy_of

CONFIG = ModelConfig(vocab_size=40, num_layers=3, hidden_size=24, num_heads=3, ffn_size=40)


def test_entropy_of_known_distributions() -> None:
    share = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]])[None, None]
    expected = torch.tensor([0.0, math.log(4), math.log(2)])
    torch.testing.assert_close(entropy_of(share)[0, 0], expected)


def test_even_attention_has_the_entropy_of_its_documents_lengths() -> None:
    encoder = Encoder(CONFIG).eval()
    with torch.no_grad():
        for layer in encoder.layers:
            layer.attention.qkv.weight.zero_()  # type: ignore[union-attr]
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
