"""Datasets that differ from one another in one thing, each really prepared."""

import json
import shutil
from pathlib import Path

import numpy as np

from data_prep.config import PrepConfig
from data_prep.pieces import hash_share
from data_prep.run import run
from pipeline.config.load import load
from pipeline.data.format import DatasetIndex, read_index

# Each file becomes a piece, and with it a shard of both splits.
_CONFIG = """
output_dir: unset
workers: 1
piece_mb: 2
sources: [{name: unset, inputs: [unset]}]
shards: {block_tokens: 50000, shard_mb: 1, eval_fraction: 0.05}
"""
_OVERRIDES = {
    "base": "sources=[{name: one, inputs: [TEXTS/a.jsonl, TEXTS/b.jsonl]}]",
    "extra": "sources=[{name: one, inputs: [TEXTS/a.jsonl, TEXTS/b.jsonl, TEXTS/c.jsonl]}]",
    "changed": "sources=[{name: one, inputs: [TEXTS/a.jsonl, TEXTS/changed/b.jsonl]}]",
    "weighted": "sources=[{name: one, weight: 2, inputs: [TEXTS/a.jsonl, TEXTS/b.jsonl]}]",
    "two sources": "sources=[{name: one, inputs: [TEXTS/a.jsonl]}, "
    "{name: two, weight: 0.5, inputs: [TEXTS/b.jsonl]}]",
    "tokenizer": "tokenizer={vocab_size: 600}",
    "split": "shards.eval_fraction=0.2",
}


class Variants:
    """Prepares a dataset when it is first asked for by name; tests must not change it.

    In "changed", the words of one training document of b.jsonl stand in another order.
    """

    def __init__(self, folder: Path, tokenizer: Path, words: list[str]) -> None:
        """Writes texts: documents of words drawn from `words`."""
        self._folder = folder
        (folder / "changed").mkdir(parents=True)
        self._config = folder / "prep.yaml"
        self._config.write_text(f"{_CONFIG}tokenizer: {{file: {tokenizer}}}\n")
        rng, every = np.random.default_rng(0), np.array(words)  # a list is converted in each call
        for name in "abc":
            documents = {f"{name}{i}": rng.choice(every, 300).tolist() for i in range(500)}
            _write(folder / f"{name}.jsonl", documents)
            if name == "b":
                chosen = next(id for id in documents if hash_share(f"one/{id}", "split") > 0.5)
                documents[chosen].reverse()
                _write(folder / "changed" / "b.jsonl", documents)

    def __getitem__(self, name: str) -> DatasetIndex:
        folder = self._folder / f"data-{name.replace(' ', '-')}"
        if not folder.exists():
            if name != "base":
                # With its work/: what is the same is not done again.
                of_training = shutil.ignore_patterns("packing-*.npz")
                shutil.copytree(self["base"].folder, folder, ignore=of_training)
            both = (_OVERRIDES["base"], _OVERRIDES[name])
            overrides = [text.replace("TEXTS", str(self._folder)) for text in both]
            config = load(PrepConfig, self._config, [*overrides, f"output_dir={folder}"]).config
            run(config, replace=True)
        return read_index(folder)


def _write(path: Path, documents: dict[str, list[str]]) -> None:
    records = ({"id": id, "text": " ".join(words)} for id, words in documents.items())
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
