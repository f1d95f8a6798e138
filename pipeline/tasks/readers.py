"""From the files of a task to examples, and from examples to rows of tokens.

A format makes rows, a kind makes examples of them. Offsets are in characters (code points) of the
text as it stands in the file, ends are exclusive. No tokenizer is needed before `encode`, so what
is gold does not depend on one.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ConfigError, DataError
from pipeline.tasks import formats
from pipeline.tasks.cells import name_of, text_of
from pipeline.tasks.kinds.base import Kind
from pipeline.tasks.kinds.table import kinds_of_format
from pipeline.tasks.rows import Codec, RowWriter
from pipeline.tasks.task import TaskConfig, missing_fields
from pipeline.tasks.types import Example, Gold, TokenRow

_LABEL_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


@dataclass(frozen=True)
class TaskData:
    """All examples of a task."""

    splits: dict[str, tuple[Example, ...]]
    labels: tuple[str, ...]
    """Classes or types in order; empty for kinds without."""
    counts: dict[str, dict[str, int]]
    """Number of rows, and of those dropped, changed or suspect, by split and reason."""
    joiner: str | None = None
    """What joins the words of its files; None for formats without words."""

    def in_train(self, split: str) -> list[bool]:
        """Whether each example's texts stand in train, too."""
        seen = {example.texts for example in self.splits.get("train", ())}
        return [example.texts in seen for example in self.splits[split]]


def read_task(config: TaskConfig, splits: Iterable[str] = ("train", "dev", "test")) -> TaskData:
    """Read the files of a task.

    Raises:
        DataError: a file is missing, empty or damaged, or a row does not fit the task; names the
            file and the line.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in splits}
    config = _with_joiner(config)
    read: dict[str, list[Example]] = {}
    for name, counter in counts.items():
        files, _ = config.data.splits[name]
        read[name] = [
            example
            for file in files
            for example in read_file(config, file, needs_gold=name != "test", counts=counter)
        ]
    # Before any row is left out: models of a learning curve have the same classes.
    labels = _labels(config, read)
    if config.data.hold_out and "dev" in read and "train" in read:
        read["train"], read["dev"] = _held_out(read["train"], config.data.hold_out)
        if not read["train"]:
            raise DataError(
                f"data.hold_out={config.data.hold_out} leaves train without a text; name files in "
                "data.dev"
            )
    for name, examples in read.items():
        read[name] = limited(examples, config.data.splits[name][1], counts[name])
        counts[name]["rows"] = len(read[name])
        _count_repeats(read[name], counts[name])
    rows_of = {name: tuple(rows) for name, rows in read.items()}
    data = TaskData(rows_of, labels, {}, config.data.joiner)
    for name, counter in counts.items():
        if name != "train":
            counter["texts that are in train, too"] = sum(data.in_train(name))
    return replace(data, counts={name: dict(+counter) for name, counter in counts.items()})


def read_file(
    config: TaskConfig, file: str | Path, *, needs_gold: bool, counts: Counter[str] | None = None
) -> list[Example]:
    """Read one file of a task; relative paths start at `data.root`.

    Raises:
        DataError: see `read_task`; also that a row has no gold where `needs_gold`.
    """
    source = _source(config, file, Counter() if counts is None else counts, needs_gold=needs_gold)
    missing = [name for name in config.kind.fields if source.column(name) is None]
    if missing:
        raise ConfigError(f"{missing_fields(config.task.kind, missing)} (to read {source.path})")
    examples = []
    kind = config.kind
    for number, row in enumerate(kind.rows(source, formats.read_rows(source))):
        example = _example(kind, source, number, row)
        if example is not None:
            examples.append(example)
    if not examples:
        raise DataError(
            f"{source.path} holds no row to use: {dict(source.counts) or 'it has none'}"
        )
    return examples


def _with_joiner(config: TaskConfig) -> TaskConfig:
    """Decide for all files how words are joined: by the first one, of train if there is one."""
    given = config.data
    first = [file for name in ("train", "dev", "test") for file in given.splits[name][0]][:1]
    if given.joiner is not None or not first:
        return config
    source = _source(config, first[0], Counter(), needs_gold=False)
    return replace(config, data=replace(given, joiner=formats.joiner_of(source)))


def _source(
    config: TaskConfig, file: str | Path, counter: Counter[str], *, needs_gold: bool
) -> formats.TableFile:
    """Look at a file: it is there, and its format goes with the task."""
    path = Path(config.data.root or ".") / file
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; put the files of the task there, or set data.root to the "
            "folder that holds them"
        )
    kind = config.kind
    form: str = config.data.format
    if form == "auto":
        form = formats.detect(path, has_words=kind.has_words)
    if form != "parquet" and not formats.head_of(path):
        raise DataError(f"{path} is empty; take it out of the task, or get the file again")
    if form in formats.FIXED_FORMATS and form not in kind.formats:
        raise DataError(
            f"{path} looks like {form}, which is for task.kind {kinds_of_format(form)}, not "
            f"{kind.name}; set data.format if that is wrong"
        )
    return formats.TableFile(
        path, form, config.data, kind.gold, kind.has_words, needs_gold, counter
    )


def _held_out(train: list[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Split train by the digest of its texts (passages)."""
    # By passages, so that none stands on both sides.
    passages = sorted({row.text for row in train}, key=_digest)
    held = set(passages[: max(1, round(len(passages) * share))])
    return (
        [row for row in train if row.text not in held],
        [row for row in train if row.text in held],
    )


def _count_repeats(examples: list[Example], counts: Counter[str]) -> None:
    golds: dict[tuple[str, ...], set[Gold]] = {}
    for row in examples:
        golds.setdefault(row.texts, set()).add(row.gold)
    counts["texts that stand before"] = len(examples) - len(golds)
    counts["texts with several golds"] = sum(len(each) > 1 for each in golds.values())
    counts["ids that stand before"] = len(examples) - len({row.id for row in examples})


def limited(
    examples: list[Example], most: int | None, counts: Counter[str] | None = None
) -> list[Example]:
    """Take a sample in the order of the file; a smaller one is part of every larger one."""
    if most is None or len(examples) <= most:
        return examples
    order = sorted(range(len(examples)), key=lambda i: (_digest(examples[i].group or str(i)), i))
    if counts is not None:
        counts["left out by the limit of rows"] += len(examples) - most
    return [examples[i] for i in sorted(order[:most])]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


# Classes


def _labels(config: TaskConfig, read: dict[str, list[Example]]) -> tuple[str, ...]:
    """Take the classes from train, or as they are given, and check every row against them."""
    kind = config.kind
    if not kind.has_labels:
        return ()
    if config.data.labels == "auto":
        first = read.get("train") or [row for rows in read.values() for row in rows]
        names = {name for row in first for name in kind.labels_in(row.gold)}
        labels = tuple(sorted(names, key=_label_order))
        origin = "data.train"
    else:
        labels, origin = kind.types(config.data.labels), "data.labels"
    known = set(labels)
    for rows in read.values():
        for row in rows:
            for name in kind.labels_in(row.gold):
                if name not in known:
                    raise DataError(
                        f"{row.where}: label {name!r} is not one of the {len(labels)} of {origin}: "
                        f"{', '.join(labels[:20])}{', ...' * (len(labels) > 20)}; correct the "
                        "row, list the labels in data.labels, or drop such rows by data.drop_labels"
                    )
    return labels


def _label_order(name: str) -> tuple[bool, float, str]:
    """Sort numbers by value, and before words."""
    is_number = _LABEL_NUMBER.fullmatch(name) is not None
    return (not is_number, float(name) if is_number else 0, name)


# A row to an example


def _example(
    kind: Kind, source: formats.TableFile, number: int, row: formats.Row
) -> Example | None:
    """Make an example of a row, or count it as dropped and return None."""
    texts, joins = {}, not kind.has_offsets
    for field in ("text", "text_b"):
        if field in (*kind.fields, *kind.optional):
            texts[field] = text_of(source, row, field, required=field in kind.fields, joins=joins)
    gold_key = source.column(kind.gold)
    value = None if gold_key is None else row.values.get(gold_key)
    if not isinstance(value, (list, dict)) and value is not None:
        name = name_of(value, row)
        if name in source.data.drop_labels:
            source.counts[f"dropped: label {name!r}"] += 1
            return None
        # NaN is what pandas writes for nothing. No text is no label, but may be no labels.
        if value != value or (name == "" and not kind.may_be_empty):
            value = None
    if value is None and source.needs_gold:
        raise DataError(
            f"{row.where}: no {gold_key!r} (or an empty one), the gold of task.kind="
            f"{kind.name}; keys: {', '.join(row.values)}; name it in data.fields.{kind.gold}"
        )
    id_key = source.column("id") or "id"
    # CLUEWSC names it idx in train and id in test.
    id_ = row.values.get(id_key, row.values.get("id"))
    if id_ is None and id_key != "id":
        raise DataError(f"{row.where}: neither {id_key!r}, named by data.fields.id, nor 'id'")
    example = Example(
        id=str(number if id_ is None else id_),
        where=row.where,
        choices=kind.choices(source, row),
        marks=kind.marks(source, row, texts.get("text", "")),
        words=row.words,
        group=str(row.values.get("group", "")) if source.format in formats.FIXED_FORMATS else "",
        **texts,
    )
    # Last, as kinds look for the gold in texts and choices.
    gold = None if value is None else kind.read_gold(source, row, example, value)
    return replace(example, gold=gold)


# An example to rows of tokens


def encode(
    config: TaskConfig, tokenizer: Codec, examples: Sequence[Example]
) -> tuple[list[TokenRow], dict[str, int]]:
    """Return the rows of all examples in order, and counts of what was cut or cannot be expressed.

    Raises:
        ConfigError: the windows of qa have no room, or leave out parts of a passage.
    """
    kind = config.kind
    writer = RowWriter(config.input, config.head.max_answer, tokenizer)
    rows = [
        row
        for number, example in enumerate(examples)
        for row in kind.encode(writer, number, example)
    ]
    return rows, dict(+writer.counts)
