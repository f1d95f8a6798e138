"""The checks of `data_prep verify`: reads a whole dataset and compares it with its index."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from pipeline.data.format import MEMBERS, DatasetIndex, read_index
from pipeline.data.reader import BlockReader, refuse_unlisted
from pipeline.errors import DataError
from pipeline.runtime.files import sha256_file
from pipeline.runtime.summary import progress
from pipeline.tokenizer.wordpiece import load_tokenizer


def verify(folder: Path) -> list[str]:
    """Check sizes, hashes, counts and contents of all files of a dataset.

    Returns:
        One line for every problem; empty if the dataset is as it was written.

    Raises:
        DataError: the index is missing or not readable.
    """
    index = read_index(folder)
    problems = list(_tokenizer_problems(index))
    try:
        refuse_unlisted(index)
    except DataError as error:
        problems.append(str(error))
    with progress("verify", len(index.shards), "shard") as advance:
        for shard in range(len(index.shards)):
            problems += _shard_problems(index, shard)
            advance(1)
    return problems


def _tokenizer_problems(index: DatasetIndex) -> Iterator[str]:
    path = index.folder / index.tokenizer_file
    if not path.is_file():
        yield f"tokenizer {path} does not exist"
        return
    digest = sha256_file(path)
    if digest != index.tokenizer_sha256:
        yield f"tokenizer {path} is damaged: sha256 {digest}, expected {index.tokenizer_sha256}"
    elif (vocabulary := load_tokenizer(path).vocabulary) != index.vocabulary:
        yield f"tokenizer {path} is {vocabulary}, the index says {index.vocabulary}"


def _shard_problems(index: DatasetIndex, shard: int) -> Iterator[str]:
    """Yield the problems of one shard: first in its bytes, then in its contents."""
    rows = np.flatnonzero(index.blocks.shard == shard)
    damaged = False
    try:
        reader = BlockReader(index, shards=[shard])
        reader.check_end(shard)
    except DataError as error:
        yield str(error)
        return
    for row in rows:
        try:
            reader.check(int(row))
        except DataError as error:
            damaged = True
            yield str(error)
    info = index.shards[shard]
    path = index.shard_path(shard)
    digest = sha256_file(path)
    if digest != info.sha256 and not damaged:
        yield f"shard {path} is damaged: sha256 {digest}, expected {info.sha256}"
    if digest == info.sha256:
        yield from _content_problems(index, rows.tolist(), path)


def _content_problems(index: DatasetIndex, rows: list[int], path: Path) -> Iterator[str]:
    """Read the shard with webdataset, as other programs would, and check its contents."""
    try:
        samples = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    except (OSError, tarfile.TarError, ValueError) as error:
        yield f"shard {path} cannot be read by webdataset: {error}"
        return
    if len(samples) != len(rows):
        yield f"shard {path} holds {len(samples)} blocks, the index has {len(rows)}"
        return
    for row, sample in zip(rows, samples, strict=True):
        for text in _block_problems(index, row, sample):
            yield f"{index.where(row)}: {text}"


def _block_problems(index: DatasetIndex, row: int, sample: dict[str, Any]) -> Iterator[str]:
    if sample["__key__"] != index.block_key(row):
        yield f"is stored under the key {sample['__key__']}"
    for member, name in enumerate(MEMBERS):
        digest = hashlib.sha256(sample[name]).digest()
        if digest != index.blocks.member_sha256[row, member].tobytes():
            yield f"{name} differs from the one in the index"
    tokens, ends, words = (np.load(io.BytesIO(sample[name])) for name in MEMBERS[:3])
    meta = json.loads(sample["meta.json"])
    expected = int(index.blocks.num_tokens[row]), int(index.blocks.num_documents[row])
    if (len(tokens), len(ends)) != expected:
        yield f"has {len(tokens)} tokens and {len(ends)} documents, the index says {expected}"
    if len(tokens) and int(tokens.max()) >= index.vocab_size:
        yield f"has token id {tokens.max()}, the vocabulary ends at {index.vocab_size - 1}"
    vocabulary = index.vocabulary
    for token in (vocabulary.pad, vocabulary.cls, vocabulary.sep, vocabulary.mask):
        if (tokens == token).any():
            yield f"has the special token {token} in text"
    if not len(ends) or ends[-1] != len(tokens) or (np.diff(ends, prepend=0) <= 0).any():
        yield "its document ends do not rise to its number of tokens"
    if len(words) != -(-len(tokens) // 8):
        yield f"has {len(words)} bytes of word bits for {len(tokens)} tokens"
    if len(meta["document_ids"]) != len(ends):
        yield f"names {len(meta['document_ids'])} documents, holds {len(ends)}"
