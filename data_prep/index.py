"""Stage index: gathers what is in all shards into `index.json` and `index.npz`, written last."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config import SourceConfig
from data_prep.stage import Done, replacing
from pipeline.data import format as dataset_format
from pipeline.data.format import MEMBERS, SPLITS, Blocks, ShardInfo, Source
from pipeline.errors import DataError
from pipeline.runtime.files import sha256_file, write_atomic
from pipeline.tokenizer.wordpiece import load_tokenizer

SHARD_FOLDER = "shards"


def write(
    output: Path, tokenizer_path: Path, sharded: list[Done], sources: Sequence[SourceConfig]
) -> None:
    """Writes tokenizer, `index.npz` and `index.json`, in this order.

    Raises:
        DataError: one of the splits is empty.
    """
    totals = {
        split: {
            name: sum(done.result["totals"][split][name] for done in sharded)
            for name in ("tokens", "documents", "text_bytes")
        }
        for split in SPLITS
    }
    for split in SPLITS:
        if not totals[split]["documents"]:
            raise DataError(
                f"the {split} split is empty ({totals['train']['documents']} documents for "
                f"training, {totals['eval']['documents']} held out); "
                "give more text or change shards.eval_fraction"
            )
    tars = [tar for split in SPLITS for done in sharded for tar in done.result["tars"]
            if tar["split"] == split]  # fmt: skip
    infos = [
        ShardInfo(
            file=f"{SHARD_FOLDER}/{tar['file']}",
            split=tar["split"],
            num_bytes=tar["bytes"],
            sha256=tar["sha256"],
            keys=tuple(block["key"] for block in tar["blocks"]),
        )
        for tar in tars
    ]
    rows = [_row(number, block) for number, tar in enumerate(tars) for block in tar["blocks"]]
    blocks = Blocks.from_rows(rows)
    numbers = {source.name: number for number, source in enumerate(sources)}
    with replacing(output / tokenizer_path.name) as temporary:
        shutil.copyfile(tokenizer_path, temporary)
    with replacing(output / "index.npz") as temporary, temporary.open("wb") as file:
        np.savez(file, **vars(blocks))
    frequencies = sum(
        np.load(output / SHARD_FOLDER / name)
        for done in sharded
        for name in done.files
        if name.endswith(".frequencies.npy")
    )
    write_atomic(
        output / "index.json",
        dataset_format.index_bytes(
            vocabulary=load_tokenizer(tokenizer_path).vocabulary,
            tokenizer_file=tokenizer_path.name,
            tokenizer_sha256=sha256_file(tokenizer_path),
            unigram_entropy_nats=_entropy_nats(np.asarray(frequencies)),
            totals=totals,
            shards=infos,
            blocks=blocks,
            sources=(
                [Source(source.name, source.weight) for source in sources],
                [numbers[block["source"]] for tar in tars for block in tar["blocks"]],
            ),
        ),
    )


def _row(shard: int, block: dict[str, Any]) -> dict[str, Any]:
    members = [block["members"][name] for name in MEMBERS]
    return {
        "shard": shard,
        "offset": block["offset"],
        "length": block["length"],
        "sha256": block["sha256"],
        "member_offset": [member["offset"] for member in members],
        "member_length": [member["length"] for member in members],
        "member_sha256": [member["sha256"] for member in members],
        "num_tokens": block["num_tokens"],
        "num_documents": block["num_documents"],
    }


def _entropy_nats(frequencies: np.ndarray[Any, Any]) -> float:
    """Shannon entropy of a table of counts, rounded: it must be the same on every processor."""
    share = frequencies[frequencies > 0] / frequencies.sum()
    return round(float(-(share * np.log(share)).sum()), 6)
