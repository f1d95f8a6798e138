"""Vectors of texts: each pooling by hand, one text at a time."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from pipeline.data.format import CLS_ID, SEP_ID
from pipeline.errors import ConfigError
from pipeline.model.layers import Trace
from pipeline.model.layout import padded
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.use.encode import Pooling, TextEncoder
from pipeline.use.folder import load_trained

TEXTS = ["The assert statement.", "", "A class is a kind of object, and functions are objects too."]


@pytest.mark.parametrize("pooling", get_args(Pooling))
def test_batches_equal_single_texts(pooling: Pooling, straight_run: Path) -> None:
    encoder = TextEncoder(straight_run, pooling=pooling)
    vectors = encoder.encode(TEXTS)
    trained = load_trained(straight_run)
    assert isinstance(trained.tokenizer, Tokenizer)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([[CLS_ID, *trained.tokenizer.encode(text), SEP_ID]])
        trace = Trace()
        with torch.no_grad():
            layout = padded(torch.tensor([ids.shape[1]]), ids.shape[1])
            last = trained.model.encoder(ids, layout, trace=trace)[0]
        first = trace.hidden[1][0]
        expected = {
            "cls": last[0], "mean": last.mean(0), "first_last_avg": ((first + last) / 2).mean(0)
        }[pooling]  # fmt: skip
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)
    parts = torch.cat(list(encoder.encode_all(iter(TEXTS), batch_size=2)))
    torch.testing.assert_close(parts, vectors, rtol=1e-4, atol=1e-5)


def test_long_texts_are_cut_and_counted(straight_run: Path) -> None:
    encoder = TextEncoder(straight_run, pooling="mean", max_length=5)
    cut = encoder.encode(TEXTS)
    assert encoder.num_cut == 2
    ids = encoder._tokenizer.encode(TEXTS[2])[:3]
    encoder.max_length = 6
    encoder._ids = lambda _: [CLS_ID, *ids, SEP_ID]  # type: ignore[method-assign]
    torch.testing.assert_close(encoder.encode([TEXTS[2]])[0], cut[2], rtol=1e-4, atol=1e-5)


def test_impossible_length_is_refused(straight_run: Path) -> None:
    with pytest.raises(ConfigError, match="max_length=2 must be at least 3"):
        TextEncoder(straight_run, pooling="mean", max_length=2)
