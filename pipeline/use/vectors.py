"""What is done with vectors of texts: a stream of lines, pairs with a gold similarity, tokens.

`encode_lines` writes the vectors of lines to an .npy file that grows; a killed command goes on
where it was:

    OUT.partial        the .npy file so far; its header says how many rows only at the end
    OUT.partial.json   lines and rows so far, a sha256 of those lines, and what the vectors are of

`evaluate_pairs` is Spearman's correlation of the cosine of two vectors with a gold similarity, by
the protocol of Reimers and Gurevych 2019 (arXiv 1908.10084) and of kexue.fm/archives/8069, where
the gold may be 0 or 1: whether two questions mean the same.

`write_similar` finds tokens whose embeddings are near each other: what MacBERT-like masking puts in
place of [MASK]. MacBERT (Cui et al. 2020, section 3.2) took similar words from word2vec, by the
toolkit Synonyms; here they come from a model's own embeddings, token by token.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.load import build
from pipeline.data.format import read_index
from pipeline.errors import ConfigError, DataError
from pipeline.model.heads import Pool
from pipeline.runtime.files import rename, write_json_atomic
from pipeline.runtime.summary import table
from pipeline.tasks.formats import without_compression
from pipeline.tasks.readers import read_task
from pipeline.tasks.scores import correlations, ranks
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import Example
from pipeline.train.initial import tokenizer_differences
from pipeline.use.model import Model, write_header
from pipeline.use.source import load_source
from pipeline.use.whiten import TRANSDUCTIVE, Floats, Vectors, Whitening, fit

logger = logging.getLogger(__name__)

_NAMED = 10
"""Lines that are named each; of more only the number is told."""
_SAVE_EVERY_S, _TELL_EVERY_S = 5.0, 30.0
_BOM = b"\xef\xbb\xbf"
_DATA_FILES = (".json", ".jsonl", ".csv", ".tsv", ".txt")
_NO_HEADER = (".tsv", ".txt")
_FIELDS = {"text": "sentence1", "text_b": "sentence2", "label": "label"}
_MARKS = ("##", " ")
"""Beginnings of pieces that continue a word (WordPiece), or begin one (all others)."""
_TOKENS_AT_ONCE = 1024
"""Tokens that are compared with all others at once."""


class TextLines:
    """Texts of a stream of bytes, one a line. Lines that are not UTF-8 are named, and counted.

    Args:
        stream: lines with their ends.
        skip_bad: whether such lines are left out; otherwise they are empty texts, whose vectors
            `vectors_of` makes NaN.
    """

    def __init__(self, stream: Iterable[bytes], *, skip_bad: bool) -> None:
        self._stream = iter(stream)
        self.skip_bad = skip_bad
        self._bad_rows: list[int] = []
        self.digest = hashlib.sha256()
        """SHA-256 of the lines so far."""
        self.num_lines = self.num_rows = self.num_bad = 0

    def pass_over(self, num_lines: int, num_rows: int, num_bad: int) -> None:
        """Read lines that were done before, without their texts."""
        for line in islice(self._stream, num_lines):
            self.digest.update(line)
            self.num_lines += 1
        self.num_rows, self.num_bad = num_rows, num_bad

    def __iter__(self) -> Iterator[str]:
        for line in self._stream:
            self.digest.update(line)
            self.num_lines += 1
            try:
                first = self.num_lines == 1
                text = (line.removeprefix(_BOM) if first else line).decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                self._count_bad(error)
                if self.skip_bad:
                    continue
                self._bad_rows.append(self.num_rows)
                text = ""
            self.num_rows += 1
            yield text

    def vectors_of(self, blocks: Iterable[Vectors]) -> Iterator[Vectors]:
        """Yield blocks of vectors of these texts, NaN where a line was bad.

        A block is made of all texts read so far that no block before it has.
        """
        start = self.num_rows
        for block in blocks:
            block[[row - start for row in self._bad_rows]] = np.nan
            start += len(block)
            self._bad_rows.clear()
            yield block

    def _count_bad(self, error: UnicodeDecodeError) -> None:
        self.num_bad += 1
        done = "left out" if self.skip_bad else "its vector is NaN"
        if self.num_bad <= _NAMED:
            byte = error.object[error.start]
            place = f"byte 0x{byte:02x} at {error.start}"
            logger.warning("line %d is not UTF-8 (%s): %s", self.num_lines, place, done)
        elif self.num_bad == _NAMED + 1:
            logger.warning("further lines that are not UTF-8 are counted alone")


def encode_lines(
    model: Model,
    lines: TextLines,
    out: Path,
    pooling: Pool,
    batch_size: int,
    max_length: int,
    whitening: Whitening | None,
) -> int:
    """Write the vectors of lines to an .npy file; return how many there are.

    What another process wrote of the same lines before it was killed is kept.

    Raises:
        DataError: there is no line, or OUT.partial is of other lines, another model or setting.
        PostnormError: as `Model.encode`.
    """
    partial, record = (out.with_name(f"{out.name}.partial{end}") for end in ("", ".json"))
    width = model.config.hidden_size if whitening is None else whitening.size
    of = {
        "model": model.fingerprint,
        "pooling": pooling,
        "max_length": max_length,
        "whitening": None if whitening is None else _digest(whitening),
        "bad_lines": "skip" if lines.skip_bad else "nan",
    }
    model.num_cut += _resume(partial, record, lines, of, width)
    # Its rows are counted from here on, because the file may have more than the record knows.
    with partial.open("r+b" if partial.exists() else "w+b") as file:
        write_header(file, 0, width)
        file.truncate(file.tell() + 4 * width * lines.num_rows)
        file.seek(0, 2)
        blocks = model.iter_encode(lines, pooling, batch_size, max_length, whitening)
        progress = _Progress(record, lines, model, of, file)
        try:
            for block in lines.vectors_of(blocks):
                block.tofile(file)
                progress.tell()
        finally:
            progress.save()
        file.seek(0)
        write_header(file, lines.num_rows, width)
    if not lines.num_rows:
        record.unlink()
        partial.unlink()
        raise DataError("no text to encode; give one a line on standard input")
    rename(partial, out)
    record.unlink()  # after it: without its record the work of hours would be done again
    return lines.num_rows


def _resume(partial: Path, record: Path, lines: TextLines, of: dict[str, Any], width: int) -> int:
    """Pass over the lines whose vectors are there already; return how many of them were cut."""
    if not record.is_file() or not partial.is_file():
        return 0
    remedy = f"remove {partial} and {record.name} to start over"
    try:
        found = json.loads(record.read_bytes())
        done = [int(found[name]) for name in ("lines", "rows", "bad")]
        known, digest = found["of"], found["sha256"]
        num_cut = int(found.get("cut", 0))  # which earlier versions did not write
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{record} is damaged ({error}); {remedy}") from error
    if differing := [name for name, value in of.items() if known.get(name, value) != value]:
        raise DataError(f"{partial} has vectors of another {', '.join(differing)}; {remedy}")
    lines.pass_over(*done)
    if lines.digest.hexdigest() != digest or partial.stat().st_size < 4 * width * done[1]:
        raise DataError(
            f"{partial} has vectors of {done[0]:,} lines that are not the first ones given now; "
            f"give the same lines, or {remedy}"
        )
    logger.info("%s: goes on after line %d", partial, done[0])
    return num_cut


class _Progress:
    """Keeps the record of what a file has, and tells how fast it grows."""

    def __init__(
        self, record: Path, lines: TextLines, model: Model, of: dict[str, Any], file: Any
    ) -> None:
        self._record, self._lines, self._model = record, lines, model
        self._of, self._file = of, file
        self._start_s = self._saved_s = self._told_s = time.monotonic()
        self._first, self._state = lines.num_rows, self._now()

    def tell(self) -> None:
        """Count a block that was written."""
        self._state, now_s = self._now(), time.monotonic()
        if now_s - self._saved_s >= _SAVE_EVERY_S:
            self.save()
            self._saved_s = now_s
        if now_s - self._told_s >= _TELL_EVERY_S:
            rate = (self._lines.num_rows - self._first) / (now_s - self._start_s)
            logger.info("%d texts, %.0f a second", self._lines.num_rows, rate)
            self._told_s = now_s

    def save(self) -> None:
        """Write the record of the last whole block."""
        # Vectors before their record: rows that it does not know are computed again.
        self._file.flush()
        write_json_atomic(self._record, self._state)

    def _now(self) -> dict[str, Any]:
        lines = self._lines
        counts = {"lines": lines.num_lines, "rows": lines.num_rows, "bad": lines.num_bad}
        counts["cut"] = self._model.num_cut
        return {**counts, "sha256": lines.digest.hexdigest(), "of": self._of}


def _digest(whitening: Whitening) -> str:
    return hashlib.sha256(whitening.mean.tobytes() + whitening.weight.tobytes()).hexdigest()


@dataclass(frozen=True)
class TextPairs:
    """Pairs of texts with their gold similarity."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    gold: Floats

    @property
    def is_binary(self) -> bool:
        """Whether the gold has two values."""
        return len(np.unique(self.gold)) == 2


def read_pairs(source: str, split: str | None = None, overrides: Sequence[str] = ()) -> TextPairs:
    """Read pairs of a task of kind pair or regress, or of a plain file.

    Args:
        source: a task file or the name of a shipped task; or a file of data: .json, .jsonl and
            .csv have the names sentence1, sentence2 and label, .tsv and .txt these three columns
            without a header.
        split: of a task; None takes test where it has gold, else dev.
        overrides: of the task, such as data.fields.text=question1.

    Raises:
        ConfigError: the task has no pairs, or see `load_task`.
        DataError: see `read_task`; also that a gold is not a number, or all are the same.
    """
    suffix = without_compression(Path(source)).suffix
    if suffix in _DATA_FILES:
        if split is not None:
            raise ConfigError(f"{source} is one file, without splits; leave out split={split}")
        columns = list(_FIELDS.values()) if suffix in _NO_HEADER else []
        data = {"fields": _FIELDS, "columns": columns, "test": [source]}
        # As numbers: the labels 0 and 1 are numbers, too.
        values = {"task": {"kind": "regress"}, "data": data}
        config, split = build(TaskConfig, values, source, overrides), "test"
    else:
        config = load_task(source, tuple(overrides))
    if config.task.kind not in ("pair", "regress") or config.data.fields.text_b is None:
        raise ConfigError(
            f"{source}: task.kind={config.task.kind} without pairs; expected pair, or regress with "
            "data.fields.text_b"
        )
    for name in (split,) if split else ("test", "dev"):
        rows = read_task(config, [name]).splits[name]
        if rows and all(row.gold is not None for row in rows):
            return _pairs(source if name == "test" else f"{source} ({name})", rows)
    raise DataError(
        f"{source}: {split or 'neither test nor dev'} has gold for all rows; choose another --split"
    )


def _pairs(name: str, rows: Sequence[Example]) -> TextPairs:
    gold = np.array([_number(row) for row in rows])
    if gold.min() == gold.max():
        raise DataError(
            f"{name}: the gold of all {len(gold):,} pairs is {gold[0]:g}; a correlation needs "
            "different ones"
        )
    return TextPairs(name, tuple(row.text for row in rows), tuple(row.text_b for row in rows), gold)


def _number(row: Example) -> float:
    try:
        number = float(row.gold)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{row.where}: gold {row.gold!r} is not a number; similarity needs numbers, such as 0 "
            "and 1 (entailment is not similarity)"
        )
    return number


@dataclass(frozen=True)
class StsScore:
    """One line of the table."""

    pooling: Pool
    whitening: str | None
    """What it was fit on; None: vectors as they are."""
    size: int
    spearman: float
    auc: float | None
    """Share of (similar, other) pairs ranked right by cosine; None unless gold is binary."""
    num_zero: int
    """Pairs with a vector of zeros; their cosine counts as 0."""


def _score(
    pairs: TextPairs, first: Vectors, second: Vectors, pooling: Pool, whitening: str | None
) -> StsScore:
    cosine, num_zero = cosines(first, second)
    spearman = correlations(list(pairs.gold), list(cosine))["spearman"].score
    auc = None
    if pairs.is_binary:
        similar = pairs.gold == pairs.gold.max()
        ones, zeros = int(similar.sum()), int((~similar).sum())
        above = ranks(cosine)[similar].sum() - ones * (ones + 1) / 2
        auc = float(above / (ones * zeros))
    return StsScore(pooling, whitening, first.shape[1], spearman, auc, num_zero)


def cosines(first: Vectors, second: Vectors) -> tuple[Floats, int]:
    """Compute the (N,) cosines of two (N, D) vectors, and how many have a vector of zeros."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    dots: Floats = (one * other).sum(1)
    # Pairs of equal texts tie at 1, which rounding would leave a bit above or below.
    cosines = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0).round(12)
    return cosines, int((norms == 0).sum())


@dataclass(frozen=True)
class StsEvaluation:
    """Scores of one model on one file of pairs."""

    pairs: str
    num_pairs: int
    num_cut: int
    """Different texts that were longer than `max_length` tokens."""
    max_length: int
    scores: tuple[StsScore, ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Show it as a table."""
        yield (
            f"{self.pairs}: {self.num_pairs:,} pairs; {self.num_cut:,} texts were cut at "
            f"{self.max_length} tokens"
        )
        auc = ("auc",) if self.scores[0].auc is not None else ()
        rows = [("pooling", "whitening", "size", "spearman", *auc)]
        for each in self.scores:
            numbers = (f"{value:.4f}" for value in (each.spearman, each.auc) if value is not None)
            rows.append((each.pooling, each.whitening or "-", str(each.size), *numbers))
        yield from table(rows, right=(2, 3, 4))
        yield from self.notes

    def json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def evaluate_pairs(
    model: Model,
    pairs: TextPairs,
    poolings: Sequence[Pool | None] = (None,),
    *,
    whitening: Whitening | None = None,
    own_size: int | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
) -> StsEvaluation:
    """Score a model's vectors as they are, and whitened.

    Args:
        model: to evaluate.
        pairs: see `read_pairs`.
        poolings: each of them in turn; None is the whitening's, or the mean.
        whitening: applied to the vectors of its pooling.
        own_size: of a whitening of each pooling that is fit on the pairs' own texts.
        batch_size: texts of a forward pass.
        max_length: as in `Model.encode`.

    Raises:
        PostnormError: as `Model.encode`.
    """
    if whitening is not None:
        _, max_length = model.setting(None, max_length, whitening)
        poolings = [pooling or whitening.pooling for pooling in poolings]
        if whitening.pooling not in poolings:
            model.setting(poolings[0], max_length, whitening)  # which names what differs
    different = list(dict.fromkeys((*pairs.first, *pairs.second)))
    number = {text: n for n, text in enumerate(different)}
    first, second = ([number[text] for text in side] for side in (pairs.first, pairs.second))
    scores: list[StsScore] = []
    notes: list[str] = []
    for given in poolings:
        pooling, length = model.setting(given, max_length)
        before = model.num_cut
        vectors = model.encode(different, pooling, batch_size, length)
        num_cut = model.num_cut - before
        seen: dict[str | None, Vectors] = {None: vectors}
        if whitening is not None and whitening.pooling == pooling:
            seen[whitening.texts] = whitening(vectors)
        if own_size is not None:
            about = {"texts": "these pairs", "fingerprint": model.fingerprint}
            own = fit(
                [vectors[first + second]], own_size, pooling=pooling, max_length=length, **about
            )
            seen[own.texts] = own(vectors)
            if own.size < own_size:
                notes.append(f"{pooling}: size {own_size} was cut to the rank {own.size}")
        for fit_on, each in seen.items():
            scores.append(_score(pairs, each[first], each[second], pooling, fit_on))
    notes += [
        f"{each.pooling}: {each.num_zero:,} pairs have a vector of zeros, cosine 0"
        for each in scores
        if each.num_zero
    ]
    if own_size is not None:
        notes.append(f"whitening on these pairs: {TRANSDUCTIVE}")
    return StsEvaluation(pairs.name, len(pairs.gold), num_cut, length, tuple(scores), tuple(notes))


def write_similar(source: Path, dataset: str, out: Path, top: int) -> int:
    """Write the nearest tokens of each token that text can have; return how many those are.

    Args:
        source: run folder, or model folder.
        dataset: folder of the dataset whose vocabulary the model has.
        out: file to write, for `data.similar`.
        top: tokens a token.

    Raises:
        ConfigError: the model is of another vocabulary, or `top` is not 1 or more.
        PostnormError: the model or the dataset cannot be read.
    """
    trained, index = load_source(source), read_index(dataset)
    vocabulary, tokenizer = index.vocabulary, trained.require_tokenizer()
    other_ids, _ = tokenizer_differences(tokenizer, index)
    if other_ids or top < 1:
        raise ConfigError(
            f"--top {top}, {source} beside {dataset}: {'; '.join(other_ids) or 'one vocabulary'}; "
            "expected 1 or more, and the model of that vocabulary"
        )
    nearest_tokens = nearest(
        trained.model.encoder.token_embedding.weight.detach().numpy(),
        [str(tokenizer.piece(token)) for token in range(vocabulary.size)],
        vocabulary.in_text,
        top,
    )
    with out.open("wb") as file:
        np.savez(file, similar=nearest_tokens, tokenizer_sha256=index.tokenizer_sha256)
    return len(vocabulary.in_text)


def nearest(
    vectors: npt.NDArray[np.float32], pieces: Sequence[str], ids: npt.NDArray[np.int64], top: int
) -> npt.NDArray[np.int32]:
    """Return the `top` nearest of `ids` for each of them, (pieces, top); -1 in all other rows.

    Tokens that begin a word are compared with such tokens only, and those within words likewise.

    Args:
        vectors: (V, E) embeddings, of which the mean is taken away.
        pieces: text of each token, with the mark of its place in a word.
        ids: (n,) tokens that are compared.
        top: at most so many; rows of smaller groups end with -1.
    """
    near = np.full((len(pieces), top), -1, np.int32)
    centred = vectors[ids] - vectors[ids].mean(0)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    marked = np.array([pieces[token].startswith(_MARKS) for token in ids])
    for group in (np.flatnonzero(marked), np.flatnonzero(~marked)):
        count = min(top, len(group) - 1)
        if count < 1:
            continue
        for at in range(0, len(group), _TOKENS_AT_ONCE):
            rows = group[at : at + _TOKENS_AT_ONCE]
            cosines = centred[rows] @ centred[group].T
            cosines[np.arange(len(rows)), at + np.arange(len(rows))] = -np.inf  # itself
            best = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
            near[ids[rows], :count] = ids[group[best]]
    return near
