"""Embed a million lines: one text a line from a file or standard input, one row each of an .npy.

    python examples/embed_lines.py runs/own/model lines.txt vectors.npy
    zstd -dc lines.zst | python examples/embed_lines.py runs/own/model - vectors.npy --batch-size 64

Neither the lines nor the vectors are held in memory, an empty line has a vector too, and
vectors.npy is complete or absent. `postnorm encode` does the same without the progress.

Expected output (the model of own_corpus.py, one thread of a busy machine, 20,000 lines of 76
characters):

    <Postnorm model: 2 layers of 128, 2,000 tokens, alpha 1, on cpu>
    10,240 lines read, 851 a second
    18,432 lines read, 732 a second
    20,000 lines, 740 a second; 0 were cut
    vectors.npy: (20000, 128) float32
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

import postnorm


def main() -> None:
    """Encode with progress."""
    parser = argparse.ArgumentParser(description="embed a million lines")
    parser.add_argument("model", help="run, model folder, export or Hugging Face folder")
    parser.add_argument("lines", help="text file, or - for standard input")
    parser.add_argument("out", type=Path, help=".npy file")
    parser.add_argument("--batch-size", type=int, default=64, help="lines at once (default 64)")
    parser.add_argument("--max-length", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="default fp32")
    arguments = parser.parse_args()

    model = postnorm.load(arguments.model, dtype=arguments.dtype)
    print(model)
    start_s = time.perf_counter()
    count = model.encode_to(
        arguments.out,
        _with_progress(_lines(arguments.lines)),
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
    )
    rate = count / (time.perf_counter() - start_s)
    print(f"{count:,} lines, {rate:,.0f} a second; {model.num_cut:,} were cut")
    vectors = np.load(arguments.out, mmap_mode="r")
    print(f"{arguments.out}: {vectors.shape} {vectors.dtype}")


def _lines(name: str) -> Iterator[str]:
    """Yield lines without their ends."""
    # Lines end with \n alone, as for `postnorm encode`: a bare \r may stand within a text.
    with open(sys.stdin.fileno() if name == "-" else name, encoding="utf-8", newline="\n") as file:
        yield from (line.rstrip("\r\n") for line in file)


def _with_progress(texts: Iterable[str]) -> Iterator[str]:
    """Say every ten seconds how far the reading is; vectors follow within 32 batches."""
    start_s = told_s = time.perf_counter()
    for number, text in enumerate(texts):
        now_s = time.perf_counter()
        if now_s - told_s >= 10:
            told_s = now_s
            print(f"{number:,} lines read, {number / (now_s - start_s):,.0f} a second", flush=True)
        yield text


if __name__ == "__main__":
    main()
