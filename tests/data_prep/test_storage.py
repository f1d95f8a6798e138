"""What a dataset costs on disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.run import run
from pipeline.data.format import read_index
from tests.support import near_texts
from tests.support.prepare import config_of


@pytest.mark.long
def test_tars_are_hardly_larger_than_their_tokens(prep_config: Path, tmp_path: Path) -> None:
    """Chinese documents of about 1,500 tokens, as real ones have (1,900)."""
    parts = near_texts.chinese(np.random.default_rng(0), 480)
    lines = [
        json.dumps({"id": f"{i:012x}", "text": "\n".join(parts[i : i + 3])})
        for i in range(0, len(parts), 3)
    ]
    source = tmp_path / "chinese.jsonl"
    source.write_text("\n".join(lines))
    overrides = ("tokenizer.vocab_size=2500", "tokenizer.model_type=bpe",
                 "shards.block_tokens=1000000")  # fmt: skip
    run(config_of(prep_config, tmp_path / "data", source, *overrides))
    total = read_index(tmp_path / "data").totals["train"]
    [tar] = (tmp_path / "data").glob("shards/train-*.tar")
    assert total["tokens"] > 100_000
    assert tar.stat().st_size <= 1.10 * 2 * total["tokens"]
