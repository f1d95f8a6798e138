"""Stage index: writes the dataset's tokenizer, index, report and datasheet, and removes old shards.

`report.json` is written after the index: without it the folder is not a finished dataset.
"""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config import SourceConfig
from data_prep.corpus import SHARD_FOLDER, Progress
from data_prep.datasheet import gather, page
from data_prep.stage import Done, Estimate, Result, Size, StageTask, make_key, replacing
from pipeline.data import format as dataset_format
from pipeline.data.format import MEMBERS, SPLITS, Blocks, ShardInfo, Source
from pipeline.errors import DataError
from pipeline.runtime.files import sha256_file, write_atomic, write_json_atomic
from pipeline.tokenizer.load import load_tokenizer

logger = logging.getLogger(__name__)


def tasks(progress: Progress, folder: Path) -> list[StageTask[Progress]]:
    """Make the one task of this stage; its files belong to the dataset, not to work/."""
    corpus, records = progress.corpus, progress.results
    digests = {stage: [done.digest for done in made] for stage, made in records.items()}
    return [StageTask("dataset", corpus.output, make_key(corpus.key, digests), progress)]


def run(task: StageTask[Progress]) -> Result:
    """Write index, report and datasheet, and remove shards of an earlier plan."""
    progress, output = task.payload, task.folder
    sharded = progress.records["shards"]
    _write_index(output, progress.tokenizer_path, sharded, progress.corpus.config.sources)
    _remove_stale(output / SHARD_FOLDER, {name for done in sharded for name in done.files})
    report = gather.gather(progress)
    write_json_atomic(output / gather.REPORT_FILE, report)
    try:
        page.write(output)
    # Last, and no error: the dataset is complete without a datasheet, which can be made again.
    except Exception:
        # A failing page must not cost a dataset that took days.
        text = (
            "the datasheet could not be made; the dataset is complete, and "
            "`postnorm prep datasheet %s` tries again"
        )
        logger.exception(text, output)
    names = (progress.tokenizer_path.name, "index.npz", "index.json", gather.REPORT_FILE)
    return {"fingerprint": report["fingerprint"]}, [output / name for name in names]


def estimates(size: Size) -> dict[str, Estimate]:
    """Estimate the cost of this stage."""
    text_bytes = size.text_bytes
    return {"index": Estimate(1, 5 + text_bytes / 1e9, 0.001 * text_bytes, 500e6, 1)}


def _remove_stale(folder: Path, current: set[str]) -> None:
    """Remove all but `current`, names with their folders, and the records of their tasks."""
    ending = ".frequencies.npy"  # of each task
    markers = {f"{name.removesuffix(ending)}.done.json" for name in current if ending in name}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        if path.relative_to(folder).as_posix() not in current | markers:
            logger.info("removing %s: it belongs to an earlier plan of shards", path)
            path.unlink()


def _write_index(
    output: Path, tokenizer_path: Path, sharded: list[Done], sources: Sequence[SourceConfig]
) -> None:
    """Write tokenizer, `index.npz` and `index.json`, in this order."""
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
                "give more text or change shards.eval_fraction; if a document is a line of a .txt "
                "file, set the source's txt_documents to line"
            )
    tars = [tar for done in sharded for tar in done.result["tars"]]
    tars.sort(key=lambda tar: SPLITS.index(tar["split"]))  # stable: else in the order of the tasks
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
            unigram_entropy_nats=entropy_nats(np.asarray(frequencies)),
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
    names = ("offset", "length", "sha256")
    of_block = {name: block[name] for name in (*names, "num_tokens", "num_documents")}
    of_members = {f"member_{name}": [member[name] for member in members] for name in names}
    return {"shard": shard, **of_block, **of_members}


# Part of the fingerprint, which must be the same on every node: hence the rounding.
def entropy_nats(frequencies: np.ndarray[Any, Any]) -> float:
    """Compute the Shannon entropy of counts, rounded to be the same on every processor."""
    share = frequencies[frequencies > 0] / frequencies.sum()
    return round(float(-(share * np.log(share)).sum()), 6)
