"""One loader, measured in a process of its own; `benchmarks.loader` starts it.

    PYTHON -m benchmarks.loader_subjects READER MASKING SPEC.json [--prepare]

Runs with any Python that has torch, numpy and the reader's package: only "ours" needs this project
installed. `--prepare` writes the files of a reader instead, and so shows whether it is there.

A reader is a function that gives a function that starts a pass over the data. A pass yields
batches: of ours `MicroBatch`es, of the others (B, S) int64 ids or what masking makes of them.
"""

import argparse
import gc
import io
import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.timing import peak_mib

_SHUFFLED_SAMPLES = 1000
_TAR_SAMPLES = 5000
_SEED = 1
_MICRO_BATCHES = 8
"""Of a step of ours: a loader lays out all sequences of its step at once."""
_CHUNK_BYTES = 1 << 26
_PACKAGES = ("torch", "numpy", "numba", "transformers", "webdataset", "litdata",
             "mosaicml-streaming")  # fmt: skip

Pass = Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Spec:
    """What is measured; the files of the peers are in `folder`."""

    dataset: str
    folder: str
    seq_len: int
    batch: int
    seconds: float
    """CPU seconds after which a measurement ends."""
    special_ids: list[int]
    """[CLS] and [SEP], the special tokens of the peers' sequences."""

    def file(self, name: str) -> Path:
        """A file or folder of the peers."""
        return Path(self.folder, name)

    def rows(self, name: str = "tokens") -> npt.NDArray[Any]:
        """A map of the peers' sequences, or of what is kept beside them."""
        mapped: npt.NDArray[Any] = np.load(self.file(f"{name}.npy"), mmap_mode="r")
        return mapped


def ours(spec: Spec, masking: str) -> Pass:
    """`TrainLoader`, from the tar files to tensors. A pass opens the dataset afresh."""
    from pipeline.config.data import DataConfig
    from pipeline.config.runs import PretrainConfig
    from pipeline.config.train import TrainConfig
    from pipeline.data.counts import sequences_at
    from pipeline.data.format import read_index
    from pipeline.data.loader import TrainLoader
    from pipeline.data.run_order import DataRank
    from pipeline.objectives.inputs import train_inputs

    index = read_index(spec.dataset)
    ranks = 8 if masking.endswith("8 ranks") else 1
    check = "never" if masking.endswith("no hashes") else "first_touch"
    config = PretrainConfig(
        run_dir="unused",
        data=DataConfig(dir=spec.dataset, seq_len=spec.seq_len, check_blocks=check),
        train=TrainConfig(global_batch=spec.batch * _MICRO_BATCHES * ranks, micro_batch=spec.batch),
    )
    inputs = train_inputs(config.train_data, index)
    counts = sequences_at(index, [spec.seq_len], None)
    sequences = int(counts[spec.seq_len][index.split_blocks("train")].sum())
    step = config.train.global_batch
    if sequences < step:
        raise SystemExit(f"{sequences} sequences make no step of {step}: take a smaller --batch")

    def batches() -> Iterator[Any]:
        loader = TrainLoader(index, config.train_data, inputs, DataRank(0, ranks), counts)
        for cursor in range(0, sequences - step + 1, step):
            yield from loader.step_batches(cursor)

    next(batches())  # compiles
    return batches


def memmap(spec: Spec, masking: str) -> Pass:
    """Random rows of a map, a batch at once."""
    rows = spec.rows()
    offsets = spec.rows("offsets") if masking == "whole_word" else None
    mask = _masking(spec, masking)

    def batches() -> Iterator[Any]:
        order = np.random.default_rng(_SEED).permutation(len(rows))
        for at in range(0, len(order) - spec.batch + 1, spec.batch):
            # Rising, since the order within a batch does not matter.
            chosen = np.sort(order[at : at + spec.batch])
            ids = torch.from_numpy(rows[chosen].astype(np.int64))
            yield mask(ids, None if offsets is None else offsets[chosen])

    return batches


class _Examples(torch.utils.data.Dataset[dict[str, Any]]):
    """What a Hugging Face tokenizer gives for a sequence, kept ready in maps."""

    def __init__(self, spec: Spec, *, whole_word: bool, arrays: bool) -> None:
        self.arrays = arrays
        names = {"input_ids": "tokens", "special_tokens_mask": "special"}
        if whole_word:
            names["offset_mapping"] = "offsets"
        self.maps = {field: spec.rows(name) for field, name in names.items()}

    def __len__(self) -> int:
        return len(self.maps["input_ids"])

    def __getitem__(self, number: int) -> dict[str, Any]:
        rows = {field: rows[number] for field, rows in self.maps.items()}
        if self.arrays:
            return {field: row.astype(np.int64) for field, row in rows.items()}
        return {field: row.tolist() for field, row in rows.items()}


def collator(spec: Spec, masking: str, *, arrays: bool = False) -> Pass:
    """Hugging Face's collator in a DataLoader over maps: of lists, as its documentation has them,
    or of arrays.
    """
    examples = _Examples(spec, whole_word=masking == "whole_word", arrays=arrays)
    collate = _collator(spec, masking)
    return lambda: torch.utils.data.DataLoader(
        examples, batch_size=spec.batch, shuffle=True, drop_last=True, collate_fn=collate
    )


def webdataset(spec: Spec, masking: str) -> Pass:
    """A stock pipeline over tars with one member a sequence."""
    import webdataset as wds

    tars = sorted(str(path) for path in spec.file("webdataset").glob("*.tar"))
    mask = _masking(spec, masking)

    def batches() -> Iterator[Any]:
        samples = wds.WebDataset(tars, shardshuffle=False).shuffle(_SHUFFLED_SAMPLES, seed=_SEED)
        for (rows,) in samples.decode().to_tuple("tokens.npy").batched(spec.batch, partial=False):
            yield mask(torch.from_numpy(np.asarray(rows).astype(np.int64)), None)

    return batches


def _write_webdataset(spec: Spec) -> None:
    folder = spec.file("webdataset")
    folder.mkdir()
    rows = spec.rows()
    for first in range(0, len(rows), _TAR_SAMPLES):
        with tarfile.open(folder / f"{first:08d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, row in enumerate(rows[first : first + _TAR_SAMPLES], start=first):
                data = io.BytesIO()
                np.save(data, row)
                info = tarfile.TarInfo(f"{number:08d}.tokens.npy")
                info.size = data.tell()
                data.seek(0)
                tar.addfile(info, data)


def litdata(spec: Spec, masking: str) -> Pass:
    """StreamingDataset of one long row of tokens, shuffled by sequence."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    mask = _masking(spec, masking)
    dataset = StreamingDataset(
        str(spec.file("litdata")), item_loader=TokensLoader(block_size=spec.seq_len), shuffle=True,
        drop_last=True, seed=_SEED,
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        for ids in StreamingDataLoader(dataset, batch_size=spec.batch, num_workers=0):
            yield mask(ids.to(torch.int64), None)

    return batches


def _write_litdata(spec: Spec) -> None:
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    folder = spec.file("litdata")
    folder.mkdir()
    writer = BinaryWriter(
        str(folder), chunk_bytes=_CHUNK_BYTES, item_loader=TokensLoader(block_size=spec.seq_len)
    )
    for number, row in enumerate(spec.rows()):
        writer[number] = torch.from_numpy(row.astype(np.int32))
    writer.done()
    writer.merge()


def streaming(spec: Spec, masking: str) -> Pass:
    """mosaicml's StreamingDataset, shuffled in its default way."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # what a killed run left stops the next one
    mask = _masking(spec, masking)
    dataset = StreamingDataset(
        local=str(spec.file("streaming")), shuffle=True, shuffle_seed=_SEED, batch_size=spec.batch
    )

    def stack(samples: list[dict[str, Any]]) -> torch.Tensor:
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    def batches() -> Iterator[Any]:
        for ids in torch.utils.data.DataLoader(
            dataset, batch_size=spec.batch, collate_fn=stack, drop_last=True
        ):
            yield mask(ids, None)

    return batches


def _write_streaming(spec: Spec) -> None:
    from streaming import MDSWriter

    rows = spec.rows()
    columns = {"tokens": f"ndarray:{rows.dtype}:{spec.seq_len}"}
    out = str(spec.file("streaming"))
    with MDSWriter(out=out, columns=columns, size_limit=_CHUNK_BYTES) as writer:
        for row in rows:
            writer.write({"tokens": np.array(row)})


READERS: dict[str, Callable[[Spec, str], Pass]] = {
    "ours": ours, "collator": collator, "arrays": partial(collator, arrays=True),
    "memmap": memmap, "webdataset": webdataset, "litdata": litdata, "streaming": streaming,
}  # fmt: skip
_WRITERS = {
    "webdataset": _write_webdataset, "litdata": _write_litdata, "streaming": _write_streaming
}  # fmt: skip


def _collator(spec: Spec, masking: str) -> Any:
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(spec.file("tokenizer")))
    return DataCollatorForLanguageModeling(tokenizer, whole_word_mask=masking == "whole_word")


def _masking(spec: Spec, masking: str) -> Callable[[torch.Tensor, Any], Any]:
    """The collator's masking of a batch that is a tensor already, without its slower way there."""
    if masking == "none":
        return lambda ids, offsets: ids
    collate = _collator(spec, masking)
    kind, size = type(collate.tokenizer), len(collate.tokenizer)
    # transformers 4.57 counts the vocabulary at each batch, which takes longer than all the rest.
    collate.tokenizer.__class__ = type(kind.__name__, (kind,), {"__len__": lambda _: size})
    mask_tokens = collate.torch_mask_tokens
    cls_id, sep_id = spec.special_ids

    def mask(ids: torch.Tensor, offsets: Any) -> Any:
        special = (ids == cls_id) | (ids == sep_id)
        return mask_tokens(ids, special_tokens_mask=special, offset_mapping=offsets)

    return mask


def measure(make: Pass, seconds: float, *, first_batch: bool) -> dict[str, float]:
    """CPU and wall seconds of as many passes as are begun within `seconds` of CPU time.

    Args:
        make: starts a pass.
        seconds: after which no batch is asked for any more.
        first_batch: whether a pass is timed from its start on, or from behind its first batch.
    """
    batches, cpu_s, wall_s = 0, 0.0, 0.0
    while cpu_s < seconds:
        gc.collect()  # what the pass before kept in cycles
        cpu, wall = time.process_time(), time.perf_counter()
        current = iter(make())
        if not first_batch:
            next(current, None)
            cpu, wall = time.process_time(), time.perf_counter()
        before = batches
        for _ in current:
            batches += 1
            if cpu_s + time.process_time() - cpu > seconds:
                break
        cpu_s += time.process_time() - cpu
        wall_s += time.perf_counter() - wall
        if batches == before:
            raise SystemExit("a pass has no batch to be timed: take a smaller --batch")
    return {"batches": batches, "cpu_s": cpu_s, "wall_s": wall_s}


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measures or prepares one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("masking")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--prepare", action="store_true")
    arguments = parser.parse_args()
    spec = Spec(**json.loads(arguments.spec.read_bytes()))
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch_mib": peak_mib()}
    if arguments.reader == "ours":
        import numba  # noqa: F401

        found["torch_numba_mib"] = peak_mib()
    if arguments.prepare and arguments.reader in _WRITERS:
        _WRITERS[arguments.reader](spec)
    make = READERS[arguments.reader](spec, arguments.masking)
    if not arguments.prepare:
        found |= measure(make, spec.seconds, first_batch=arguments.reader == "ours")
    found |= {"peak_mib": peak_mib(), "versions": _versions()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
