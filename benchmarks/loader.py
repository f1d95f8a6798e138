"""Batches ready for the model: speed of the training loader beside others, on the same text.

    python -m benchmarks.loader DATASET [--seq-len 512] [--batch 32] [--rounds 3]
        [--peers runs/peers] [--table benchmarks/results/loader.md]

DATASET is a folder written by `python -m data_prep run`. Speeds are millions of tokens of text,
which are neither padding nor [CLS] nor [SEP], a second of CPU time of all threads, and a wall-clock
second. Every measurement is a process of its own with one torch thread, its start, imports and
compiling not counted; all of them take turns, `--rounds` times. The page cache is warm.

"ours" is `TrainLoader.step_batches` for one cursor after the other, each a step of 8 micro-batches:
tar files, packing without
crossing documents, whole-word masks as a function of (seed, epoch, sample), all tensors of a
`MicroBatch`. A pass opens the dataset afresh, so that every block is read, hashed and packed in it.
"no hashes" is the same with `check_blocks=never`, "rank 0 of 8" one of eight ranks, each of which
reads and packs all blocks.

The peers read the same documents, written beforehand as rows of seq_len tokens: `[CLS] text [SEP]`
one after the other, cut anywhere. They are not timed from a pass's start, but from its second batch
on.
- "collator": `DataCollatorForLanguageModeling` as documented, in a DataLoader without workers over
  memory maps of the fields of an example: input_ids, special_tokens_mask and, for whole words,
  offset_mapping, made beforehand from our word starts (a word begins where it does not touch the
  token before).
- "arrays": the same with arrays of numbers in place of lists.
- "memmap": a batch of random rows of the map at once, then the collator's `torch_mask_tokens`
  called on the tensor: the cheapest way to use it, and no loader that anybody ships.
- "webdataset": one .npy member a row, `.shuffle(1000).decode().to_tuple().batched()`.
- "litdata" (TokensLoader, chunks of 64 MiB) and "streaming" (mosaicml, default shuffle).
The last three with and without `torch_mask_tokens` for single tokens; for whole words they would
have to carry the word starts, too. Each reader runs with the first Python, of this one and of the
environments of `benchmarks.peers`, that can write its files.

"open" is from `benchmarks.loading`: the start in the middle of 280 GB.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import loading
from benchmarks.loader_subjects import Spec
from benchmarks.peers import PEERS_HELP, pythons_of
from pipeline.config.load import git_revision
from pipeline.data.counts import packing_counts
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.reader import BlockReader
from pipeline.tokenizer.load import load_tokenizer
from pipeline.use.hf_tokenizer import write_hf_tokenizer

ROOT = Path(__file__).parents[1]
OURS = ("ours", "whole_word")
DOCUMENTED = ("collator", "whole_word")
SUBJECTS = (
    OURS, ("ours", "whole_word, no hashes"), ("ours", "whole_word, rank 0 of 8 ranks"),
    DOCUMENTED, ("collator", "token"), ("arrays", "whole_word"), ("arrays", "token"),
    ("memmap", "whole_word"), ("memmap", "token"), ("memmap", "none"),
    ("webdataset", "token"), ("webdataset", "none"),
    ("litdata", "token"), ("litdata", "none"),
    ("streaming", "token"), ("streaming", "none"),
)  # fmt: skip
_TIMEOUT_S = 300
_GOALS = (
    ("ours_mtokens_per_cpu_s", 30), ("times_collator_whole_word", 10), ("times_fastest_masked", 3)
)  # fmt: skip

_UNFAIR = """\
What is not the same for all:

- The peers know no documents: attention crosses them, and there are no positions, document numbers
  or padding to be made. Ours makes all that, and loses the slots that packing leaves empty.
- Only "collator", "arrays" and "memmap" mask whole words, and then every one becomes [MASK]: the
  collator has no random tokens there. Its word boundaries were worked out before, and read as 8
  bytes a token.
- The peers' masks depend on the order of calls. Ours are a function of seed, epoch and sample.
- Ours compares each block with its sha256 when it is first read; the peers check nothing.
- The peers' first batch is not counted, with it webdataset's filling of its buffer and the orders
  that litdata and streaming draw. Of ours all is counted from opening the dataset on.
- A corpus that fits into the page cache, and into one window of blocks, says nothing about cold
  storage. Ours reads a block once an epoch, in each rank: "rank 0 of 8" has that cost.
- Outside "collator" and "arrays", the length of the tokenizer is worked out once: transformers
  4.57, which streaming needs, counts the vocabulary at each batch, 8 ms for 32,000 pieces.
- litdata keeps its tokens as int32, the others as uint16. "streaming" imports torchvision, which it
  does not use here; where the wheel does not fit the build of torch, empty modules will do.
- Collecting Python's garbage between passes is not counted, for any.
"""


def write_rows(index: DatasetIndex, spec: Spec) -> float:
    """Writes the peers' sequences of the train split; returns tokens of text in one of them.

    Files, N rows of S slots: tokens (N, S) uint16 or uint32, special (N, S) uint8, offsets
    (N, S, 2) int32, and a tokenizer for the collator. What does not fill a row is left out.
    """
    reader = BlockReader(index)
    cls_id, sep_id = spec.special_ids
    tokens, starts = [], []
    for row in index.split_blocks("train").tolist():
        block = reader.block(row)
        begins = np.concatenate(([0], block.doc_ends[:-1]))
        # The places of [CLS] and [SEP] of each document, in pairs, and what stands there.
        places = np.stack((begins, block.doc_ends), axis=1).reshape(-1)
        specials = np.tile(np.array([cls_id, sep_id], block.tokens.dtype), len(begins))
        tokens.append(np.insert(block.tokens, places, specials))
        starts.append(np.insert(block.word_starts(0, len(block.tokens)), places, values=True))
    shape = (sum(map(len, tokens)) // spec.seq_len, spec.seq_len)
    if not shape[0]:
        raise SystemExit(f"{index.folder} has not one sequence of {spec.seq_len} tokens")
    used = shape[0] * shape[1]
    rows = np.concatenate(tokens)[:used].reshape(shape)
    word_starts = np.concatenate(starts)[:used].reshape(shape)
    special = (rows == cls_id) | (rows == sep_id)
    ends = 2 * np.arange(1, spec.seq_len + 1, dtype=np.int32)
    offsets = np.stack((ends - 2 + word_starts, np.broadcast_to(ends, shape)), axis=-1)
    kept = {"tokens": rows, "special": special.astype(np.uint8), "offsets": offsets}
    for name, array in kept.items():
        np.save(spec.file(f"{name}.npy"), array)
    return float((~special).sum() / shape[0])


def _start(python: str, reader: str, masking: str, spec_file: Path, *options: str) -> Any:
    """What one process measured, or why it did not, as text."""
    command = [python, "-m", "benchmarks.loader_subjects", reader, masking, str(spec_file)]
    try:
        done = subprocess.run(
            [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def _prepare(reader: str, pythons: list[str], spec_file: Path) -> tuple[str | None, str]:
    """The first Python that has the reader, None and the reasons if there is none."""
    reasons = []
    for python in pythons:
        found = _start(python, reader, "token", spec_file, "--prepare")
        if not isinstance(found, str):
            return python, ""
        reasons.append(found)
    return None, "; ".join(dict.fromkeys(reasons))


def compare(
    index: DatasetIndex, spec: Spec, rounds: int, pythons: list[str],
    subjects: tuple[tuple[str, str], ...] = SUBJECTS,
) -> dict[str, Any]:  # fmt: skip
    """Measures all subjects in turns; a dict by "reader, masking" for each, and ratios of ours."""
    counts = packing_counts(index, spec.seq_len, None).sequences
    text = {
        "ours": index.totals["train"]["tokens"] / int(counts[index.split_blocks("train")].sum())
    }
    of_peers = write_rows(index, spec)
    write_hf_tokenizer(load_tokenizer(index.folder / index.tokenizer_file), spec.file("tokenizer"))
    spec_file = spec.file("spec.json")
    spec_file.write_text(json.dumps(asdict(spec)))
    readers = dict.fromkeys(reader for reader, _ in subjects)
    chosen = {
        reader: (sys.executable, "") if reader == "ours" else _prepare(reader, pythons, spec_file)
        for reader in readers
    }  # fmt: skip
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for reader, masking in subjects:
            python, reason = chosen[reader]
            one = _start(python, reader, masking, spec_file) if python else reason
            name = f"{reader}, {masking}"
            if isinstance(one, str):
                found[name] = {"not measured": one}
            if "not measured" in found.setdefault(name, {"cpu": [], "wall": []}):
                continue
            tokens = one["batches"] * spec.batch * text.get(reader, of_peers)
            for clock in ("cpu", "wall"):
                found[name][clock].append(round(tokens / one[f"{clock}_s"] / 1e6, 2))
            memory = {key: round(value) for key, value in one.items() if key.endswith("_mib")}
            found[name] |= memory | {"versions": one["versions"]}
    return {"text_tokens_per_sequence": {"ours": round(text["ours"], 2),
            "peers": round(of_peers, 2)}, "subjects": found, **_ratios(found)}  # fmt: skip


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Ours over others: medians of the rounds' ratios of tokens a CPU-second."""
    if (why := found[", ".join(OURS)].get("not measured")) is not None:
        raise SystemExit(f"our own loader was not measured: {why}")
    ours = found[", ".join(OURS)]["cpu"]
    measured = {name: rates["cpu"] for name, rates in found.items() if "cpu" in rates}
    ratios: dict[str, Any] = {"ours_mtokens_per_cpu_s": statistics.median(ours)}
    others = {"times_collator_whole_word": ", ".join(DOCUMENTED)}
    for kind, endings in (("masked", ("token", "whole_word")), ("whole_word", ("whole_word",))):
        medians = {
            name: statistics.median(rates) for name, rates in measured.items()
            if not name.startswith("ours") and name.endswith(endings)
        }  # fmt: skip
        if medians:
            fastest = max(medians, key=medians.__getitem__)
            ratios[f"fastest_{kind}"] = others[f"times_fastest_{kind}"] = fastest
    for name, other in others.items():
        if other in measured:
            pairs = zip(ours, measured[other], strict=True)
            ratios[name] = round(statistics.median(a / b for a, b in pairs), 2)
    ratios["goals"] = {
        f"{name} >= {goal}": bool(ratios[name] >= goal) if name in ratios else "not measured"
        for name, goal in _GOALS
    }
    return ratios


def _table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    lines = [
        "# Loader", "",
        f"`python -m benchmarks.loader DATASET --batch {result['batch']} --rounds "
        f"{result['rounds']} --seq-len {' '.join(map(str, result['seq_len']))} "
        f"--peers runs/peers`, {result['tokens']:,} tokens of text in {result['documents']:,} "
        f"documents; {versions}. Millions of tokens of text a second, "
        "median and best of the rounds; what is compared is said in `benchmarks/loader.py`.",
    ]  # fmt: skip
    for seq_len, found in result["seq_len"].items():
        lines += [
            "", f"## {seq_len} slots a sequence", "",
            "| loader | masks | CPU-second: median | best | wall second: median | best "
            "| peak MiB | of it torch |", "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for name, one in found["subjects"].items():
            cells = name.split(", ", 1)
            if "not measured" in one:
                cells += [f"not measured: {one['not measured']}", *["-"] * 5]
            else:
                for clock in ("cpu", "wall"):
                    cells += [statistics.median(one[clock]), max(one[clock])]
                cells += [one["peak_mib"], one["torch_mib"]]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        lines += [
            "", "Ours over the collator as documented, whole words: "
            f"{found.get('times_collator_whole_word', '-')}; over the fastest peer with masks "
            f"({found.get('fastest_masked', '-')}): {found.get('times_fastest_masked', '-')}; over "
            f"the fastest that masks whole words ({found.get('fastest_whole_word', '-')}): "
            f"{found.get('times_fastest_whole_word', '-')}.", "",
            "; ".join(f"{goal}: {met}" for goal, met in found["goals"].items()) + ".",
        ]  # fmt: skip
        ours = found["subjects"][", ".join(OURS)]
        lines += [
            "", f"Memory of the process of ours: {ours['torch_mib']} MiB with torch, "
            f"{ours['torch_numba_mib']} with numba, {ours['peak_mib']} at its peak.",
        ]  # fmt: skip
    readers: dict[str, dict[str, None]] = {}
    for found in result["seq_len"].values():
        for name, one in found["subjects"].items():
            if "versions" in one:
                text = ", ".join(
                    f"{package} {number}" for package, number in one["versions"].items()
                )
                readers.setdefault(text, {})[name.split(",")[0]] = None
    lines += ["", "Versions:", ""]
    lines += [f"- {', '.join(names)}: {text}" for text, names in readers.items()]
    if opened := result.get("open"):
        lines += [
            "", f"Start in the middle of {opened['sequences']:,} sequences in 80,000 blocks: "
            f"{opened['cpu_s']} CPU-seconds, {opened['grown_mib']} MiB.",
        ]  # fmt: skip
    return "\n".join([*lines, "", _UNFAIR])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[512])
    parser.add_argument("--batch", type=int, default=32, help="sequences")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds of a measurement")
    parser.add_argument("--peers", type=Path, help=PEERS_HELP)
    parser.add_argument("--table", type=Path, help="file for the figures as Markdown")
    arguments = parser.parse_args()
    index = read_index(arguments.dataset)
    pythons = [sys.executable, *pythons_of(("litdata", "streaming"), arguments.peers)]
    special_ids = [index.vocabulary.cls, index.vocabulary.sep]
    result: dict[str, Any] = {
        "batch": arguments.batch, "rounds": arguments.rounds,
        "tokens": index.totals["train"]["tokens"], "documents": index.totals["train"]["documents"],
        "versions": {"revision": git_revision(), "python": platform.python_version(),
                     "machine": platform.machine(),
                     "torch": torch.__version__, "numpy": np.__version__},
        "seq_len": {},
    }  # fmt: skip
    for seq_len in arguments.seq_len:
        with tempfile.TemporaryDirectory() as folder:
            spec = Spec(
                str(arguments.dataset.resolve()), folder, seq_len, arguments.batch,
                arguments.seconds, special_ids,
            )  # fmt: skip
            result["seq_len"][seq_len] = compare(index, spec, arguments.rounds, pythons)
    with tempfile.TemporaryDirectory() as folder:
        result["open"] = loading.opening(Path(folder, "large"))
    if arguments.table:
        arguments.table.write_text(_table(result), encoding="utf-8")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
