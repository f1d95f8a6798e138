"""`postnorm encode`, `whiten` and `sts`: vectors of sentences; `similar`: of tokens."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import DataError
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb

if TYPE_CHECKING:
    from pipeline.model.heads import Pool
    from pipeline.use.whiten import Whitening

_POOLINGS: "tuple[Pool, ...]" = ("cls", "pooler", "mean", "first_last_avg")


def add_vector_options(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add the options that say how a text becomes a vector; `others` are more poolings."""
    add = parser.add_argument
    add("--pooling", choices=(*_POOLINGS, *others), help="default: the whitening's, or mean")
    add("--max-length", type=int, metavar="N", help="tokens of a text; longer ones are cut")
    add("--whiten", type=Path, metavar="FILE", help="that `postnorm whiten` wrote for this model")


def _add_batch_size(parser: argparse.ArgumentParser) -> None:
    help_text = "texts at once (default 32)"
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help=help_text)


def _whitening(path: Path | None) -> "Whitening | None":
    from pipeline.use.whiten import Whitening

    return None if path is None else Whitening.load(path)


def _encode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="MODEL", help="run folder, or model folder")
    parser.add_argument("--out", type=Path, help=".npy file; default: a JSON list a line")
    parser.add_argument(
        "--bad-lines",
        choices=("nan", "skip"),
        default="nan",
        help="lines that are not UTF-8 get a vector of NaN (default; null as JSON), or none",
    )
    add_vector_options(parser)
    _add_batch_size(parser)
    parser.description = (
        "Write a vector of each line of standard input. Texts of similar length are computed "
        "together. A line that is not UTF-8 is named and ends nothing. With --out, rows are "
        "written as they come; the same command on the same lines goes on after a kill."
    )


def _encode(arguments: argparse.Namespace) -> None:
    from pipeline.use.encode_lines import TextLines, encode_lines
    from pipeline.use.model import load

    model, whitening = load(arguments.source), _whitening(arguments.whiten)
    # An empty line is a text too, so that line N has vector N.
    lines = TextLines(sys.stdin.buffer, skip_bad=arguments.bad_lines == "skip")
    pooling, length = model.setting(arguments.pooling, arguments.max_length, whitening)
    if arguments.out is not None:
        size = arguments.batch_size
        encode_lines(model, lines, arguments.out, pooling, size, length, whitening)
    else:
        chosen = pooling, arguments.batch_size, length, whitening
        for vectors in lines.vectors_of(model.iter_encode(lines, *chosen)):
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


def _whiten_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fit BERT-whitening on the vectors of texts: mean 0, covariance 1, and the directions of "
        "largest variance alone. Texts are read once and not held. Where they are those that "
        "are evaluated afterwards, even without gold, the result is transductive: say so."
    )
    add = parser.add_argument
    add("source", type=Path, metavar="MODEL", help="run folder, or model folder")
    add("--texts", required=True, metavar="FILE", help="one text a line; - is standard input")
    add("--size", type=int, metavar="K", help="of whitened vectors; default: the texts' rank")
    add("--out", type=Path, required=True, metavar="FILE.npz", help="file to write")
    add("--pooling", choices=_POOLINGS, help="default mean")
    add("--max-length", type=int, metavar="N", help="tokens of a text; longer ones are cut")
    _add_batch_size(parser)


def _whiten(arguments: argparse.Namespace) -> None:
    from pipeline.use.model import load

    model, size = load(arguments.source), arguments.size
    chosen = arguments.pooling, arguments.batch_size, arguments.max_length
    name = "standard input" if arguments.texts == "-" else Path(arguments.texts).name
    whitening = model.fit_whitening(_lines(arguments.texts), size, *chosen, name)
    whitening.save(arguments.out)
    if size and whitening.size < size:
        print(
            f"size {size} was cut to {whitening.size}, the rank of these texts' vectors",
            file=sys.stderr,
        )
    print(
        f"{arguments.out}: {model.config.hidden_size} to {whitening.size} dimensions, fit on "
        f"{whitening.num_texts:,} texts, pooling {whitening.pooling}, at most "
        f"{whitening.max_length} tokens ({model.num_cut:,} texts were cut)"
    )


def _lines(source: str) -> Iterator[str]:
    """Yield the lines of a file that are not blank."""
    if source == "-":
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        return
    try:
        with Path(source).open(encoding="utf-8-sig", newline="\n") as file:
            yield from (line.rstrip("\r\n") for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read as UTF-8 text: {error}") from None


def _sts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Spearman's correlation of the cosine of two vectors with a gold similarity, for binary "
        "gold the area under the ROC curve (auc), too. PAIRS is a task of kind pair or regress, "
        "such as fewclue-bustm; a .json, .jsonl or .csv file with sentence1, sentence2 and label; "
        "or a .tsv or .txt file of these three columns without a header."
    )
    add = parser.add_argument
    add("source", type=Path, metavar="MODEL", help="run folder, or model folder")
    add("pairs", metavar="PAIRS", help="task file, name of a shipped task, or file of pairs")
    cli.add_overrides(parser, "of the task, such as data.root=DIR or data.fields.text=question1")
    add_vector_options(parser, "all")
    add(
        "--whiten-on-pairs",
        type=int,
        metavar="K",
        help="also whiten to K dimensions, fit on the pairs' own texts (transductive)",
    )
    add("--split", choices=("train", "dev", "test"), help="default: test where it has gold, or dev")
    _add_batch_size(parser)
    add("--json", action="store_true", help="one JSON object")


def _sts(arguments: argparse.Namespace) -> None:
    from pipeline.use.model import load
    from pipeline.use.sts import evaluate, read_pairs

    pairs = read_pairs(arguments.pairs, arguments.split, arguments.overrides)
    model = load(arguments.source)
    poolings: list[Pool | None] = [arguments.pooling]
    if arguments.pooling == "all":
        poolings = [each for each in _POOLINGS if each != "pooler" or model.config.pooler]
    evaluation = evaluate(
        model,
        pairs,
        poolings,
        whitening=_whitening(arguments.whiten),
        own_size=arguments.whiten_on_pairs,
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
    )
    if arguments.json:
        print(json.dumps({"model": str(arguments.source), **evaluation.json()}))
    else:
        print("\n".join(evaluation.lines()))


def _similar_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "For each token that text can have, those whose embeddings are nearest by cosine: what "
        "`data.similar` puts in place of [MASK]. Tokens that begin a word are compared with such "
        "tokens only, and pieces within words with such pieces."
    )
    add = parser.add_argument
    add("source", type=Path, metavar="MODEL", help="run folder, or model folder")
    add("--data", required=True, metavar="DATASET", help="whose vocabulary says what text can have")
    add("--out", type=Path, required=True, metavar="FILE", help="such as similar.npy")
    add("--top", type=int, default=5, help="tokens a token (default 5)")


def _similar(arguments: argparse.Namespace) -> None:
    from pipeline.use.similar import write_table

    num = write_table(arguments.source, arguments.data, arguments.out, arguments.top)
    print(f"{arguments.out}: {arguments.top} tokens for each of {num:,}")


ENCODE = Verb(
    "encode",
    "vectors of texts on standard input, one a line",
    _encode_arguments,
    _encode,
    "encode models/bert --pooling mean --out vectors.npy < texts.txt",
    "with --out, OUT.partial holds what is done; the same command goes on from there",
)
WHITEN = Verb(
    "whiten",
    "fit BERT-whitening on a model's vectors of texts",
    _whiten_arguments,
    _whiten,
    "whiten models/bert --texts texts.txt --size 256 --out whitening.npz",
)
SIMILAR = Verb(
    "similar",
    "a table of similar tokens, for masking as MacBERT does",
    _similar_arguments,
    _similar,
    "similar runs/mine --data data/mine --out similar.npy",
)
STS = Verb(
    "sts",
    "how well cosines of vectors rank pairs of sentences (Spearman)",
    _sts_arguments,
    _sts,
    """\
sts models/bert fewclue-bustm data.root=data --pooling all
sts models/bert pairs.tsv --whiten whitening.npz --json""",
)
