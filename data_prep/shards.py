"""Stage shards: kept documents become token blocks in webdataset tars, train and eval apart.

A task takes consecutive pieces and writes one tar per split, or several of a piece that is far
larger than a tar. Its record describes the tars for the index.
"""

import hashlib
import io
import itertools
import json
import math
import mmap
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep import stage
from data_prep.config import ShardsConfig
from data_prep.corpus import SHARD_FOLDER, Progress
from data_prep.pieces import Pieces, batches, hash_share, read_documents
from data_prep.word_boundaries import Words, word_starts_of
from pipeline.data.format import MEMBERS, SPLITS, token_dtype
from pipeline.tokenizer.load import DatasetTokenizer, load_tokenizer
from pipeline.tokenizer.sentencepiece import Spelling

# Measured on Chinese and English text: 2 bytes a token and 1 bit for words over 3 to 4.5 bytes of
# text a token.
_TAR_BYTES_PER_TEXT_BYTE = 0.6
_TAR_RECORD = 512
_BATCH_CHARS = 1 << 20


@dataclass(frozen=True)
class ShardJob:
    """Pieces that become one tar per split, or several."""

    pieces: Pieces
    tokenizer_path: Path
    config: ShardsConfig
    words: Words
    max_tar_bytes: int | None
    """Size at which another tar begins; None: all goes into one."""


@dataclass(frozen=True)
class _Tokenised:
    """One tokenised document."""

    id: str
    source: str
    tokens: npt.NDArray[np.unsignedinteger]
    spelling: Spelling


_Block = list[_Tokenised]
"""Documents of one source."""


def plan(kept_bytes: list[int], shard_mb: int) -> list[list[int]]:
    """Group consecutive pieces, by the text left of each, so that a tar is about `shard_mb`."""
    target = _text_bytes(shard_mb)
    groups: list[list[int]] = []
    size = 0
    for i, num_bytes in enumerate(kept_bytes):
        if not groups or size + num_bytes / 2 > target:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += num_bytes
    return groups


def _text_bytes(shard_mb: int) -> float:
    return shard_mb * 1_000_000 / _TAR_BYTES_PER_TEXT_BYTE


def tasks(progress: Progress, folder: Path) -> list[stage.StageTask[ShardJob]]:
    """Make one task per group of `plan`; shards belong to the dataset, not to work/."""
    pieces, words = progress.pieces, progress.corpus.words
    config = _holding_out_one(progress.corpus.config.shards, pieces)
    kept_bytes = [int(pieces.kept_sizes(name).sum()) for name in pieces.names]
    made = []
    for number, group in enumerate(plan(kept_bytes, config.shard_mb)):
        names = tuple(pieces.names[i] for i in group)
        is_large = sum(kept_bytes[i] for i in group) > 2 * _text_bytes(config.shard_mb)
        key = stage.make_key(
            number,
            [progress.written[i].digest for i in group],
            [progress.kept.files[f"{name}.keep.npy"] for name in names],
            progress.records["tokenizer"][0].digest,
            asdict(config),
            *filter(None, [words.sha256]),
            *["several tars"] * is_large,
        )
        most = config.shard_mb * 1_000_000 if is_large else None
        job = ShardJob(replace(pieces, names=names), progress.tokenizer_path, config, words, most)
        output = progress.corpus.output / SHARD_FOLDER
        made.append(stage.StageTask(stage.task_name(number, 6), output, key, job))
    return made


def _holding_out_one(config: ShardsConfig, pieces: Pieces) -> ShardsConfig:
    """Raise the share of held-out documents, so that a small corpus of two or more has one."""
    rows = {name: set(pieces.kept_rows(name).tolist()) for name in pieces.names}
    # With more documents than this, the chance that none is held out is below 1e-9.
    if sum(map(len, rows.values())) > 20 / config.eval_fraction:
        return config
    # Documents are drawn by their ids, each by itself: of few, all may be drawn for training.
    draws = sorted(
        hash_share(text, "split")
        for name in pieces.names
        for row, text in enumerate(pieces.ids(name))
        if row in rows[name]
    )
    if len(draws) < 2 or draws[0] < config.eval_fraction:
        return config
    return replace(config, eval_fraction=math.nextafter(draws[0], 1))


def run(task: stage.StageTask[ShardJob]) -> stage.Result:
    """Tokenise one group and write its tars."""
    job = task.payload
    tokenizer = load_tokenizer(job.tokenizer_path)
    counts = stage.StageCounts()
    sources: dict[str, dict[str, Counter[str]]] = {split: {} for split in SPLITS}
    frequencies = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    tars: list[dict[str, Any]] = []
    paths = []
    held_out: list[dict[str, str]] = []
    # The order matters: writing the training split fills the list of held-out documents.
    for split, texts in (("train", _documents(job, held_out)), ("eval", iter(held_out))):
        documents = _counted(texts, tokenizer, counts, sources[split])
        blocks = _blocks(documents, job.config.block_tokens)
        for path in _tar_paths(task.marker.parent, split, Path(task.name).name):
            tar = _write_tar(path, blocks, tokenizer.vocab_size, job)
            for block in tar:
                sources[split][block[0].source]["blocks"] += 1
                if split == "train":
                    frequencies += np.bincount(_tokens(block), minlength=len(frequencies))
            described = describe(path)
            if not described["blocks"]:
                path.unlink()
                break
            file = path.relative_to(task.folder).as_posix()
            tars.append({"split": split, "file": file, **described})
            paths.append(path)
            if job.max_tar_bytes is None:
                break
    frequency_path = task.path(".frequencies.npy")
    stage.save_array(frequency_path, frequencies)
    totals = {
        split: {
            name: sum(counted[name] for counted in of_sources.values())
            for name in ("tokens", "documents", "text_bytes")
        }
        for split, of_sources in sources.items()
    }
    by_split = {split: dict(sorted(counted.items())) for split, counted in sources.items()}
    result = {"shards": counts.to_json(), "tars": tars, "totals": totals, "sources": by_split}
    return result, [*paths, frequency_path]


def estimates(size: stage.Size) -> dict[str, stage.Estimate]:
    """Estimate the cost of this stage."""
    pieces = [int(size.text_bytes / size.pieces)] * size.pieces
    groups = plan(pieces, size.config.shards.shard_mb)
    cpu_s, disk_bytes = size.text_bytes / 1e6 / 10, 0.6 * size.text_bytes
    return {"shards": stage.Estimate(len(groups), cpu_s, disk_bytes, 500e6, 4 * len(groups))}


def _tar_paths(folder: Path, split: str, number: str) -> Iterator[Path]:
    """Name the tars of a task: train-000012.tar, train-000012-01.tar and so on."""
    yield folder / f"{split}-{number}.tar"
    for more in itertools.count(1):
        yield folder / f"{split}-{number}-{more:02d}.tar"


def _write_tar(
    path: Path, blocks: Iterator[_Block], vocab_size: int, job: ShardJob
) -> Iterator[_Block]:
    """Write blocks to a tar until it is full, and yield each; closes it after the last."""
    # Not webdataset's TarWriter: that of 1.0.2 imports torch and ignores `format`.
    with (
        stage.replacing(path) as temporary,
        tarfile.open(temporary, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number, block in enumerate(blocks):
            for name, content in _members(block, vocab_size, job.words).items():
                # Headers hold neither times nor owners, so that a rebuilt shard is the same.
                info = tarfile.TarInfo(f"{path.stem}-{number:04d}.{name}")
                info.size = len(content)
                info.mode = 0o444
                tar.addfile(info, io.BytesIO(content))
            yield block
            if job.max_tar_bytes is not None and tar.offset >= job.max_tar_bytes:
                return


def describe(path: Path) -> dict[str, Any]:
    """Read a tar back: size, hash, and offset, length and sha256 of blocks and members."""
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    blocks: dict[str, dict[str, Any]] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:

        def located(offset: int, length: int) -> dict[str, Any]:
            digest = hashlib.sha256(data[offset : offset + length]).hexdigest()
            return {"offset": offset, "length": length, "sha256": digest}

        for member in members:
            key, _, suffix = member.name.partition(".")
            block = blocks.setdefault(key, {"key": key, "offset": member.offset, "members": {}})
            end = member.offset_data + -(-member.size // _TAR_RECORD) * _TAR_RECORD
            block["length"] = end - block["offset"]
            block["members"][suffix] = located(member.offset_data, member.size)
            if suffix == "meta.json":
                meta = json.loads(data[member.offset_data : member.offset_data + member.size])
                names = ("num_tokens", "num_documents", "source")
                block.update({name: meta[name] for name in names})
        for block in blocks.values():
            block["sha256"] = located(block["offset"], block["length"])["sha256"]
        digest = hashlib.sha256(data).hexdigest()
        return {"bytes": len(data), "sha256": digest, "blocks": list(blocks.values())}


def _documents(job: ShardJob, held_out: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield documents for training, and add the others to `held_out`: so all are read once."""
    for name in job.pieces.names:
        rows = set(job.pieces.kept_rows(name).tolist())
        for document in read_documents(job.pieces.documents_path(name), rows):
            if hash_share(document["id"], "split") < job.config.eval_fraction:
                held_out.append(document)
            else:
                yield document


def _counted(
    documents: Iterator[dict[str, str]],
    tokenizer: DatasetTokenizer,
    counts: stage.StageCounts,
    sources: dict[str, Counter[str]],
) -> Iterator[_Tokenised]:
    """Tokenise documents and add them to the counts of the stage and of their source."""
    dtype = token_dtype(tokenizer.vocab_size)
    for document, (encoded, spelling) in _spelt(documents, tokenizer):
        num_bytes = len(document["text"].encode())
        counts.take(num_bytes)
        ids: npt.NDArray[Any] = np.array(encoded, dtype=dtype)
        if not len(ids):
            counts.reject("no tokens", num_bytes)
            continue
        counts.give(num_bytes)
        sources.setdefault(document["source"], Counter(blocks=0)).update(
            tokens=len(ids),
            documents=1,
            text_bytes=num_bytes,
            characters=len(document["text"]),
            unknown=int(np.count_nonzero(ids == tokenizer.unk_id)),
            byte_pieces=int(np.count_nonzero(tokenizer.is_byte[ids])),
        )
        yield _Tokenised(document["id"], document["source"], ids, spelling)


def _spelt(
    documents: Iterator[dict[str, str]], tokenizer: DatasetTokenizer
) -> Iterator[tuple[dict[str, str], tuple[Any, Spelling]]]:
    """Yield documents with their tokens and spelling."""
    # Many are read, then tokenised: by turns, reading and the tokenizer would push each other's
    # tables out of the processor's cache, and the tokenizer would take a quarter longer.
    for batch in batches(documents, _BATCH_CHARS):
        spelt = [tokenizer.spell(document["text"]) for document in batch]
        yield from zip(batch, spelt, strict=True)


def _blocks(documents: Iterator[_Tokenised], block_tokens: int) -> Iterator[_Block]:
    """Fill blocks document by document; a block holds one source."""
    block: _Block = []
    size = 0
    for document in documents:
        too_large = size + len(document.tokens) > block_tokens
        if block and (too_large or block[0].source != document.source):
            yield block
            block, size = [], 0
        block.append(document)
        size += len(document.tokens)
    if block:
        yield block


def _tokens(block: _Block) -> npt.NDArray[np.unsignedinteger]:
    return np.concatenate([document.tokens for document in block])


def _members(block: _Block, vocab_size: int, words: Words) -> dict[str, bytes]:
    """Return the contents of a block's members, by name."""
    tokens = _tokens(block)
    meta = {
        "source": block[0].source,
        "num_tokens": len(tokens),
        "num_documents": len(block),
        "document_ids": [document.id for document in block],
    }
    contents = (
        _npy(tokens.astype(token_dtype(vocab_size))),
        _npy(np.cumsum([len(document.tokens) for document in block], dtype=np.int64)),
        _npy(np.packbits(word_starts_of([(d.spelling, d.tokens) for d in block], words))),
        json.dumps(meta, ensure_ascii=False).encode(),
    )
    return dict(zip(MEMBERS, contents, strict=True))


def _npy(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0))
    return buffer.getvalue()
