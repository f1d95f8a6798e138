"""`postnorm encode`, `whiten` and `sts`: vectors of sentences; `similar`: of tokens."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pipeline.errors import DataError
from pipeline.runtime import cli
from pipeline.runtime.cli import JSON, MODEL, argument, option, verb

if TYPE_CHECKING:
    from pipeline.use.whiten import Whitening

Pooling = Literal["cls", "pooler", "mean", "first_last_avg"]
# How a text becomes a vector.
POOLING: Any = option("default: the whitening's, that of sentence-transformers' folder, or mean")
MAX_LENGTH: Any = option("tokens of a text; longer ones are cut", "N")
WHITENING: Any = option("that `postnorm whiten` wrote for this model", "FILE")
_BATCH_SIZE: Any = option("texts at once (default 32)", "N", default=32)


def _whitening(path: Path | None) -> "Whitening | None":
    from pipeline.use.whiten import Whitening

    return None if path is None else Whitening.load(path)


@verb(
    "encode models/bert --pooling mean --out vectors.npy < texts.txt",
    if_interrupted="with --out, OUT.partial holds what is done; the same command goes on from "
    "there",
)
def encode(
    source: Path = MODEL,
    out: Path | None = option(".npy file; default: a JSON list a line", type=cli.new_file),
    bad_lines: Literal["nan", "skip"] = option(
        "lines that are not UTF-8 get a vector of NaN (default; null as JSON), or none",
        default="nan",
    ),
    pooling: Pooling | None = POOLING,
    max_length: int | None = MAX_LENGTH,
    whiten: Path | None = WHITENING,
    batch_size: int = _BATCH_SIZE,
) -> None:
    """Vectors of texts on standard input, one a line.

    Write a vector of each line of standard input. Texts of similar length are computed together. A
    line that is not UTF-8 is named and ends nothing. With --out, rows are written as they come; the
    same command on the same lines goes on after a kill.
    """
    from pipeline.use.model import load
    from pipeline.use.vectors import TextLines, encode_lines

    model, whitening = load(source), _whitening(whiten)
    # An empty line is a text too, so that line N has vector N.
    lines = TextLines(sys.stdin.buffer, skip_bad=bad_lines == "skip")
    chosen, length = model.setting(pooling, max_length, whitening)
    if out is not None:
        encode_lines(model, lines, out, chosen, batch_size, length, whitening)
    else:
        found = model.iter_encode(lines, chosen, batch_size, length, whitening)
        for vectors in lines.vectors_of(found):
            for vector in vectors.tolist():
                is_bad = vector[0] != vector[0]  # NaN, which JSON has no word for
                print(json.dumps(None if is_bad else [float(f"{each:.6g}") for each in vector]))
            sys.stdout.flush()
        if not lines.num_rows:
            raise DataError("no text to encode; give one a line on standard input")
    bad = f"; {lines.num_bad:,} lines were not UTF-8" if lines.num_bad else ""
    print(
        f"{lines.num_rows:,} texts, vectors of "
        f"{whitening.size if whitening else model.config.hidden_size}; {model.num_cut:,} were cut "
        f"at {length} tokens{bad}",
        file=sys.stderr,
    )


@verb("whiten models/bert --texts texts.txt --size 256 --out whitening.npz")
def whiten(
    source: Path = MODEL,
    texts: str = option("one text a line; - is standard input", "FILE", required=True),
    size: int | None = option("of whitened vectors; default: the texts' rank", "K"),
    out: Path = option("file to write", "FILE.npz", required=True, type=cli.new_file),
    pooling: Pooling | None = option("default: that of sentence-transformers' folder, or mean"),
    max_length: int | None = MAX_LENGTH,
    batch_size: int = _BATCH_SIZE,
) -> None:
    """Fit BERT-whitening on a model's vectors of texts.

    Fit BERT-whitening on the vectors of texts: mean 0, covariance 1, and the directions of largest
    variance alone. Texts are read once and not held. Where they are those that are evaluated
    afterwards, even without gold, the result is transductive: say so.
    """
    from pipeline.use.model import load

    model = load(source)
    name = "standard input" if texts == "-" else Path(texts).name
    whitening = model.fit_whitening(_lines(texts), size, pooling, batch_size, max_length, name)
    whitening.save(out)
    if size and whitening.size < size:
        print(
            f"size {size} was cut to {whitening.size}, the rank of these texts' vectors",
            file=sys.stderr,
        )
    print(
        f"{out}: {model.config.hidden_size} to {whitening.size} dimensions, fit on "
        f"{whitening.num_texts:,} texts, pooling {whitening.pooling}, at most "
        f"{whitening.max_length} tokens ({model.num_cut:,} texts were cut)"
    )


def _lines(source: str) -> Iterator[str]:
    """Yield the lines of a file that are not blank."""
    try:
        # File descriptor 0 is standard input.
        where = 0 if source == "-" else source
        with open(where, encoding="utf-8-sig", newline="\n", closefd=source != "-") as file:
            yield from (line.rstrip("\r\n") for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        name = "standard input" if source == "-" else source
        raise DataError(f"{name} cannot be read as UTF-8 text: {error}") from None


@verb(
    "sts models/bert fewclue-bustm data.root=data --pooling all",
    "sts models/bert pairs.tsv --whiten whitening.npz --json",
)
def sts(
    source: Path = MODEL,
    pairs: str = argument("task file, name of a shipped task, or file of pairs", "PAIRS"),
    overrides: list[str] = cli.overrides(
        "of the task, such as data.root=DIR or data.fields.text=question1"
    ),
    pooling: Literal[Pooling, "all"] | None = POOLING,
    max_length: int | None = MAX_LENGTH,
    whiten: Path | None = WHITENING,
    whiten_on_pairs: int | None = option(
        "also whiten to K dimensions, fit on the pairs' own texts (transductive)", "K"
    ),
    split: Literal["train", "dev", "test"] | None = option(
        "default: test where it has gold, or dev"
    ),
    batch_size: int = _BATCH_SIZE,
    as_json: bool = JSON,
) -> None:
    """How well cosines of vectors rank pairs of sentences (Spearman).

    Spearman's correlation of the cosine of two vectors with a gold similarity, for binary gold the
    area under the ROC curve (auc), too. PAIRS is a task of kind pair or regress, such as
    fewclue-bustm; a .json, .jsonl or .csv file with sentence1, sentence2 and label; or a .tsv or
    .txt file of these three columns without a header.
    """
    from pipeline.use.model import load
    from pipeline.use.vectors import evaluate_pairs, read_pairs

    read = read_pairs(pairs, split, overrides)
    model = load(source)
    poolings: list[Pooling | None] = []
    if pooling == "all":
        poolings += [each for each in get_args(Pooling) if each != "pooler" or model.config.pooler]
    else:
        poolings.append(pooling)
    evaluation = evaluate_pairs(
        model,
        read,
        poolings,
        whitening=_whitening(whiten),
        own_size=whiten_on_pairs,
        batch_size=batch_size,
        max_length=max_length,
    )
    if as_json:
        print(json.dumps({"model": str(source), **evaluation.json()}))
    else:
        print("\n".join(evaluation.lines()))


@verb("similar runs/mine --data data/mine --out similar.npz")
def similar(
    source: Path = MODEL,
    data: str = option("whose vocabulary says what text can have", "DATASET", required=True),
    out: Path = option("such as similar.npz", "FILE", required=True, type=cli.new_file),
    top: int = option("tokens a token (default 5)", default=5),
) -> None:
    """A table of similar tokens, for masking as MacBERT does.

    For each token that text can have, those whose embeddings are nearest by cosine: what
    `data.similar` puts in place of [MASK]. Tokens that begin a word are compared with such tokens
    only, and pieces within words with such pieces.
    """
    from pipeline.use.vectors import write_similar

    num = write_similar(source, data, out, top)
    print(f"{out}: {top} tokens for each of {num:,}")
