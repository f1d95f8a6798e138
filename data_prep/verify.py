"""The checks of `data_prep verify`: reads a whole dataset and compares it with its index.

What index and report claim of the whole is derived from the tokens again: sums, the entropy, that
no document is in both splits. The report's counts of documents must add up from stage to stage.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import webdataset

from data_prep.datasheet.gather import REPORT_FILE
from data_prep.index import entropy_nats
from data_prep.pieces import Hashes, id_hash
from data_prep.stage import StageCounts
from pipeline.data.format import MEMBERS, SPLITS, DatasetIndex, read_index
from pipeline.data.reader import BlockReader, refuse_unlisted
from pipeline.errors import DataError
from pipeline.runtime.files import sha256_file
from pipeline.runtime.summary import progress
from pipeline.tokenizer.load import load_tokenizer


def verify(folder: Path) -> list[str]:
    """Check sizes, hashes, counts and contents of all files of a dataset.

    Returns:
        One line for every problem; empty if the dataset is as it was written.

    Raises:
        DataError: the index is missing or not readable.
    """
    index = read_index(folder)
    problems = list(_tokenizer_problems(index))
    derived = _Derived(index)
    try:
        refuse_unlisted(index)
    except DataError as error:
        problems.append(str(error))
    with progress("verify", len(index.shards), "shard") as advance:
        for shard in range(len(index.shards)):
            problems += _shard_problems(index, shard, derived)
            advance(1)
    # Of what is damaged nothing can be derived.
    return [*problems, *([] if problems else derived.problems()), *_report_problems(index)]


class _Derived:
    """What the blocks say of the whole dataset."""

    def __init__(self, index: DatasetIndex) -> None:
        self._index = index
        self._frequencies = np.zeros(index.vocab_size, dtype=np.int64)
        self._tokens = dict.fromkeys(SPLITS, 0)
        self._ids: dict[str, list[Hashes]] = {split: [] for split in SPLITS}

    def add(self, split: str, tokens: npt.NDArray[np.uint16], document_ids: list[str]) -> None:
        """Take a block."""
        self._tokens[split] += len(tokens)
        self._ids[split].append(np.array([id_hash(each) for each in document_ids], dtype=np.uint64))
        if split == "train":
            counts = np.bincount(tokens, minlength=len(self._frequencies))
            self._frequencies += counts[: len(self._frequencies)]

    def problems(self) -> Iterator[str]:
        """Compare with what the index claims."""
        index = self._index
        # Without a block a split has no array, and concatenate needs one.
        ids = {split: np.concatenate([*parts, _NO_IDS]) for split, parts in self._ids.items()}
        for split, total in index.totals.items():
            found = {"tokens": self._tokens[split], "documents": len(ids[split])}
            for name, count in found.items():
                if count != total[name]:
                    yield f"{split}: {count:,} {name}, the index says {total[name]:,}"
        both = np.intersect1d(ids["train"], ids["eval"])
        if len(both):
            yield f"{len(both):,} documents are in both splits"
        entropy = entropy_nats(self._frequencies)
        if entropy != index.unigram_entropy_nats:
            said = index.unigram_entropy_nats
            yield f"the training tokens have an entropy of {entropy} nats, the index says {said}"


_NO_IDS = np.zeros(0, dtype=np.uint64)


def _report_problems(index: DatasetIndex) -> Iterator[str]:
    """Yield what does not add up in the report."""
    path = index.folder / REPORT_FILE
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        yield f"{path} cannot be read: {error}"
        return
    for name in ("fingerprint", "totals", "unigram_entropy_nats"):
        if report[name] != getattr(index, name):
            yield f"{path}: {name} is {report[name]}, the index says {getattr(index, name)}"
    came: int | None = None
    for stage, counts in report["stages"].items():
        total = StageCounts.total([counts])
        if not total.add_up(came):
            yield (
                f"{path}: documents do not add up in stage {stage}: {total.documents_in:,} in, "
                f"{total.documents_rejected:,} rejected, {total.documents_out:,} out; the stage "
                f"before gave {came if came is not None else total.documents_in:,}"
            )
        came = total.documents_out
    kept = sum(total["documents"] for total in index.totals.values())
    if came != kept:
        yield f"{path}: the last stage gave {came} documents, the index has {kept:,}"


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


def _shard_problems(index: DatasetIndex, shard: int, derived: _Derived) -> Iterator[str]:
    """Yield the problems of one shard: first in its bytes, then in its contents."""
    rows = np.flatnonzero(index.blocks.shard == shard).tolist()
    path, expected = index.shard_path(shard), index.shards[shard].sha256
    try:
        reader = BlockReader(index, shards=[shard])
        reader.check_end(shard)
    except DataError as error:
        yield str(error)
        return
    digest = sha256_file(path)
    if digest == expected:
        yield from _content_problems(index, rows, path, derived)
        return
    # Which blocks are damaged; none where it is between them.
    is_told = False
    for row in rows:
        try:
            reader.check(row)
        except DataError as error:
            is_told = True
            yield str(error)
    if not is_told:
        yield f"shard {path} is damaged: sha256 {digest}, expected {expected}"


def _content_problems(
    index: DatasetIndex, rows: list[int], path: Path, derived: _Derived
) -> Iterator[str]:
    """Read the shard with webdataset, as other programs would, and check its contents."""
    try:
        # On every dataset, not in tests alone: it must stay readable by the stock reader.
        samples = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    except (OSError, tarfile.TarError, ValueError) as error:
        yield f"shard {path} cannot be read by webdataset: {error}"
        return
    if len(samples) != len(rows):
        yield f"shard {path} holds {len(samples)} blocks, the index has {len(rows)}"
        return
    for row, sample in zip(rows, samples, strict=True):
        for text in _block_problems(index, row, sample, derived):
            yield f"{index.where(row)}: {text}"


def _block_problems(
    index: DatasetIndex, row: int, sample: dict[str, Any], derived: _Derived
) -> Iterator[str]:
    if sample["__key__"] != index.block_key(row):
        yield f"is stored under the key {sample['__key__']}"
    for member, name in enumerate(MEMBERS):
        digest = hashlib.sha256(sample[name]).digest()
        if digest != index.blocks.member_sha256[row, member].tobytes():
            yield f"{name} differs from the one in the index"
    tokens, ends, words = (np.load(io.BytesIO(sample[name])) for name in MEMBERS[:3])
    meta = json.loads(sample["meta.json"])
    split = index.shards[int(index.blocks.shard[row])].split
    derived.add(split, tokens, meta["document_ids"])
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
