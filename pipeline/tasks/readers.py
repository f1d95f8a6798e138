"""Files of any supported format to examples: a format makes rows, a kind makes examples of them.
Offsets are in characters (code points) of the text as it stands in the file, ends are exclusive.
Nothing here knows a tokenizer, so what is gold does not depend on one.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.formats import (
    TABLES,
    Row,
    TableFile,
    detect,
    each_blank,
    head_of,
    joiner_of,
    read_rows,
)
from pipeline.tasks.scores import Span, types_of
from pipeline.tasks.task import FIXED_FORMATS, TaskConfig, missing_fields

_LIST_JOINER, _LABEL_JOINER = "；", ","
_OFFSET_KINDS = ("tag", "spans", "qa", "coref")
"""Kinds whose gold or marks are characters of the text, so that it cannot be a list."""
_OTHER_LABEL = "correct it, or name the key of another in data.fields.label"
_STEPS_BACK = 3  # characters that CMRC's reference code steps back for an answer to match


class Answer(NamedTuple):
    """An answer to a question, and the character that it starts at; None if it is not there."""

    text: str
    start: int | None


Gold = str | int | float | tuple[str, ...] | tuple[Span, ...] | tuple[Answer, ...] | None
"""By kind: a label, the index of a choice, a number, labels, spans, answers; None: unlabelled."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of a task, in the terms of its file."""

    id: str
    where: str
    """File and line, or the place in the file, for messages."""
    text: str = ""
    text_b: str = ""
    choices: tuple[str, ...] = ()
    marks: tuple[Span, ...] = ()
    """coref: span1 and span2; cloze: the blank that is asked for, then the other blanks."""
    words: tuple[tuple[int, int], ...] = ()
    """Bounds of the words of a file that has its text in words; empty elsewhere."""
    gold: Gold = None
    group: str = ""
    """Rows of one group share a passage (qa), or candidates that are each used once (ChID)."""

    @property
    def distinct(self) -> tuple[bool, ...]:
        """Whether a choice is the first with its text: others are masked, so one index wins."""
        return tuple(self.choices.index(text) == i for i, text in enumerate(self.choices))

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a model sees of the row but its place: rows with equal texts are repeats."""
        return (self.text, self.text_b, *self.choices, *map(str, self.marks))


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
    rows = (part for row in read_rows(source) for part in _by_blank(source, row))
    for number, row in enumerate(rows):
        example = _example(source, number, row)
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
    return replace(config, data=replace(given, joiner=joiner_of(source)))


def _source(
    config: TaskConfig, file: str | Path, counter: Counter[str], *, needs_gold: bool
) -> TableFile:
    """Look at a file: it is there, and its format goes with the task."""
    path = Path(config.data.root or ".") / file
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; put the files of the task there, or set data.root to the "
            "folder that holds them"
        )
    form = config.data.format if config.data.format != "auto" else detect(path, config)
    if form != "parquet" and not head_of(path):
        raise DataError(f"{path} is empty; take it out of the task, or get the file again")
    source = TableFile(path, form, config, needs_gold, counter)
    kinds = FIXED_FORMATS.get(form, (config.task.kind,))
    if config.task.kind not in kinds:
        raise DataError(
            f"{path} looks like {form}, which is for task.kind {' or '.join(kinds)}, not "
            f"{config.task.kind}; set data.format if that is wrong"
        )
    return source


def _held_out(train: list[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Split train by the digest of its texts (passages), so that none stands on both sides."""
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
    kind = config.task.kind
    if kind in ("qa", "regress", "choice", "cloze"):
        return ()
    if config.data.labels == "auto":
        first = read.get("train") or [row for rows in read.values() for row in rows]
        names = {name for row in first for name in _names(row.gold)}
        labels = tuple(sorted(names, key=_label_order))
        origin = "data.train"
    else:
        labels, origin = types_of(kind, config.data.labels), "data.labels"
    known = set(labels)
    for rows in read.values():
        for row in rows:
            for name in _names(row.gold):
                if name not in known:
                    raise DataError(
                        f"{row.where}: label {name!r} is not one of the {len(labels)} of {origin}: "
                        f"{_some(labels)}; correct the row, list the labels in data.labels, or "
                        "drop such rows by data.drop_labels"
                    )
    return labels


def _names(gold: Gold) -> list[str]:
    if isinstance(gold, str):
        return [gold]
    if not isinstance(gold, tuple):
        return []
    return [item.type if isinstance(item, Span) else str(item) for item in gold]


def _label_order(name: str) -> tuple[bool, int, str]:
    """Sort numbers by value, and before words."""
    is_number = name.isdecimal()
    return (not is_number, int(name) if is_number else 0, name)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:20]) + (", ..." if len(every) > 20 else "")


# Kinds: a row to an example


def _by_blank(source: TableFile, row: Row) -> Iterator[Row]:
    """Yield a row for each blank of a cloze, with its own of the answers, and of lists of choices.

    Raises:
        DataError: there are several blanks, and not an answer or a list of choices for each.
    """
    if source.config.task.kind != "cloze" or row.blanks:
        yield row
        return
    text = _text(source, row, "text", required=True)
    blanks = each_blank(text, source.data.blank)
    if not blanks:
        raise DataError(
            f"{row.where}: no blank {source.data.blank!r} in {text[:80]!r}; set data.blank to the "
            "pattern of one"
        )
    keys = {field: source.column(field) for field in ("id", "label", "choices")}
    values: dict[str, Any] = {field: row.values.get(key) for field, key in keys.items()}
    has_own = isinstance(values["label"], list) or (len(blanks) > 1 and values["label"] is not None)
    own = ["label"] * has_own + ["choices"] * _holds_lists(values["choices"])
    for field in own:
        if not isinstance(values[field], list) or len(values[field]) != len(blanks):
            raise DataError(
                f"{row.where}: {len(blanks)} blanks, but {keys[field]!r} is "
                f"{str(values[field])[:80]!r}; expected a list with one for each, in the order of "
                "the text, or a data.blank that finds only the one that is asked for"
            )
    for number, places in enumerate(blanks):
        part = {keys[field]: values[field][number] for field in own}
        if len(blanks) > 1 and values["id"] is not None:
            part[keys["id"]] = f"{values['id']}-{number}"
        yield row._replace(values={**row.values, **part}, blanks=places)


def _holds_lists(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, list) for part in value)


def _example(source: TableFile, number: int, row: Row) -> Example | None:
    """Make an example of a row, or count it as dropped and return None."""
    config, kind = source.config, source.config.kind
    texts = {}
    for field in ("text", "text_b"):
        if field in kind.fields or field in kind.optional:
            texts[field] = _text(source, row, field, required=field in kind.fields)
    gold_key = source.column(kind.gold)
    value = None if gold_key is None else row.values.get(gold_key)
    if not isinstance(value, (list, dict)) and value is not None:
        name = _name(value, row)
        if name in config.data.drop_labels:
            source.counts[f"dropped: label {name!r}"] += 1
            return None
        # NaN is what pandas writes for nothing. No text is no label, but may be no labels.
        if value != value or (name == "" and config.task.kind != "multilabel"):
            value = None
    if value is None and source.needs_gold:
        raise DataError(
            f"{row.where}: no {gold_key!r} (or an empty one), the gold of task.kind="
            f"{config.task.kind}; keys: {', '.join(row.values)}; name it in data.fields.{kind.gold}"
        )
    id_key = source.column("id") or "id"
    # CLUEWSC names it idx in train and id in test.
    id_ = row.values.get(id_key, row.values.get("id"))
    if id_ is None and id_key != "id":
        raise DataError(f"{row.where}: neither {id_key!r}, named by data.fields.id, nor 'id'")
    example = Example(
        id=str(number if id_ is None else id_),
        where=row.where,
        choices=_choices(source, row)[0] if "choices" in kind.fields else (),
        marks=_marks(source, row, texts.get("text", "")),
        words=row.words,
        group=str(row.values.get("group", "")) if source.format in FIXED_FORMATS else "",
        **texts,
    )
    gold = None if value is None else _GOLD[config.task.kind](source, row, example, value)
    return replace(example, gold=gold)


def _text(source: TableFile, row: Row, field: str, *, required: bool) -> str:
    key = source.column(field)
    value = row.values.get(key) if key is not None else ""
    if value is None:
        if not required and source.format in FIXED_FORMATS:
            return ""
        raise DataError(
            f"{row.where}: no {key!r}, named by data.fields.{field}; keys: {', '.join(row.values)}"
            + ("; a table without a header needs data.columns" if source.format in TABLES else "")
        )
    if isinstance(value, list) and source.config.task.kind not in _OFFSET_KINDS:
        joiner = _LIST_JOINER if source.data.joiner is None else source.data.joiner
        return joiner.join(map(str, value))
    if isinstance(value, (list, dict)):
        raise DataError(
            f"{row.where}: {key!r} must be a text, got {str(value)[:80]!r}; name the key of one in "
            f"data.fields.{field}"
        )
    source.counts["texts that are empty"] += key is not None and not str(value).strip()
    return str(value)


def _choices(source: TableFile, row: Row) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the choices of a row, and the names that the file has for them; () if it has none."""
    key = source.column("choices")
    names: Any = ()
    value: Any = row.values.get(key) if isinstance(key, str) else None
    if isinstance(key, tuple):
        names, value = key, [row.values.get(name) for name in key]
        while value and (value[-1] in (None, "") or value[-1] != value[-1]):
            value.pop()  # a row may have fewer
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value, names = ([part.get(name) for part in value] for name in ("text", "label"))
    elif isinstance(value, dict):
        value, names = value.get("text"), value.get("label") or ()
    if not isinstance(value, list) or len(value) < 2 or None in value or _holds_lists(value):
        raise DataError(
            f"{row.where}: {key} is {str(value)[:80]!r} (keys: {', '.join(row.values)}); expected "
            "two choices or more: a list of texts, or {text: [...], label: [...]}, or set "
            "data.fields.choices to the list of the keys or columns that have one each"
        )
    return tuple(map(str, value)), tuple(names)[: len(value)]


def _marks(source: TableFile, row: Row, text: str) -> tuple[Span, ...]:
    kind = source.config.task.kind
    if kind == "cloze":
        return tuple(Span("blank", *bounds) for bounds in row.blanks)
    if kind != "coref":
        return ()
    target: Any = row.values.get(source.column("target") or "")
    marks = []
    for name in ("span1", "span2"):
        try:
            part, start = str(target[f"{name}_text"]), int(target[f"{name}_index"])
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"{row.where}: expected {name}_text and {name}_index, got {target!r}; name the key "
                "of the mapping with both spans in data.fields.target"
            ) from None
        _require_text(row, text, part, start)
        marks.append(Span(name, start, start + len(part)))
    return tuple(marks)


def _require_text(row: Row, text: str, part: str, start: int) -> None:
    if start < 0 or text[start : start + len(part)] != part:
        there = text[max(start, 0) : start + len(part)]
        raise DataError(
            f"{row.where}: character {start} should start {part!r}, but {there!r} is there; "
            "correct the offset (in characters, from 0)"
        )


def _name(value: Any, row: Row) -> str:
    if isinstance(value, (dict, list)):
        raise DataError(f"{row.where}: label {value!r} must be a text or a number; {_OTHER_LABEL}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1 and 1.0 are one number, and one class
    return json.dumps(value) if isinstance(value, bool) else str(value).strip()


def _class_gold(source: TableFile, row: Row, example: Example, value: Any) -> str:
    return _name(value, row)


def _choice_gold(source: TableFile, row: Row, example: Example, value: Any) -> int:
    """Find the index of the choice; of equal choices it is the first.

    An answer is a text, the file's own name of a choice, a letter, or an index from 0. Where a row
    has names beside its texts, one of them is nothing else.
    """
    texts, names = _choices(source, row)
    name, own = _name(value, row).casefold(), [str(each).casefold() for each in names]
    places = {each: place for place, each in enumerate(own)}
    letters = {chr(ord("a") + place): place for place in range(len(texts))}
    readings = {"the text of": texts.index(value)} if value in texts else {}
    is_nested = not isinstance(source.column("choices"), tuple)
    if name in places and is_nested and type(value) in map(type, names):
        readings = {"as a name": places[name]}
    elif source.format != "c3":  # which answers by texts alone: "2" would be a wrong one
        if name in (known := {**letters, **places}):
            readings["as a name"] = known[name]
        if name.isdecimal() and int(name) < len(texts):
            readings["as an index"] = int(name)
    found = {texts.index(texts[index]) for index in readings.values()}
    if len(found) == 1:
        return found.pop()
    meant = (
        "neither one of the choices, nor the name or letter of one, nor an index of them, from 0"
    )
    if found:
        meant = ", and ".join(f"{how} choice {index}" for how, index in readings.items())
    raise DataError(
        f"{row.where}: answer {value!r} is {meant}: {list(texts)}; write a text, a name, a letter "
        "(A for the first) or, without quotes, an index, whichever means one thing; or "
        f"{_OTHER_LABEL}"
    )


def _labels_gold(source: TableFile, row: Row, example: Example, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(source.data.joiner or _LABEL_JOINER) if part]
    if not isinstance(value, list):
        value = [value]
    names = [_name(item, row) for item in value]
    if _is_multi_hot(names, source.data.labels):
        names = [label for label, on in zip(source.data.labels, names, strict=True) if on in _ON]
    elif len(set(names)) < len(names):
        if set(names) <= _ON | _OFF:
            raise DataError(
                f"{row.where}: {value!r} has a 0 or 1 for each label, so the labels need names: "
                f"list all {len(names)} of them, in this order, in data.labels"
            )
        source.counts["rows with a label twice"] += 1
    return tuple(sorted(set(names)))


_ON, _OFF = {"1", "true"}, {"0", "false"}


def _is_multi_hot(names: list[str], labels: tuple[str, ...] | str) -> bool:
    """Whether a row has a 0 or 1 for each of the labels, which have other names."""
    if isinstance(labels, str) or len(names) != len(labels) or set(labels) <= _ON | _OFF:
        return False
    return set(names) <= _ON | _OFF


def _number_gold(source: TableFile, row: Row, example: Example, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise DataError(f"{row.where}: {value!r} is not a number; {_OTHER_LABEL}") from None
    if number - number != 0:  # infinite, or NaN
        raise DataError(f"{row.where}: {value!r} is not a finite number; {_OTHER_LABEL}")
    return number


def _spans_gold(source: TableFile, row: Row, example: Example, value: Any) -> tuple[Span, ...]:
    """Read lists of type, start and end, mappings with these keys, or CLUENER's mapping."""
    spans = set()
    try:
        for span, part in _written_spans(value, int(source.data.span_ends == "inclusive")):
            _require_text(row, example.text, part, span.start)
            if part and span.end - span.start != len(part):
                raise DataError(
                    f"{row.where}: {part!r} has {len(part)} characters, but its place has "
                    f"{span.end - span.start}; see data.span_ends"
                )
            if not 0 <= span.start < span.end <= len(example.text):
                raise DataError(
                    f"{row.where}: {span.type} at [{span.start}, {span.end}) is not inside the "
                    f"text of {len(example.text)} characters, or is empty; see data.span_ends"
                )
            spans.add(span)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(
            f"{row.where}: {str(value)[:80]!r} is not a list of [type, start, end] or [start, end, "
            "type], of which the type is a text, or of mappings with type, start and end, nor "
            "{type: {text: [[start, last], ...]}}; tags need their words as a list, too. Correct "
            "it, or name the key of the entities in data.fields.spans"
        ) from None
    return tuple(sorted(spans, key=lambda span: (span.start, span.end, span.type)))


def _written_spans(value: Any, after: int) -> Iterator[tuple[Span, str]]:
    """Yield the spans as a file writes them, and their text where it has that; else ""."""
    if isinstance(value, dict):
        for kind, entities in value.items():
            for part, places in entities.items():
                for start, last in places:
                    yield Span(kind, start, last + 1), part
        return
    for item in value:
        if isinstance(item, Span):  # of tags: exclusive already
            yield item, ""
        elif isinstance(item, dict):
            kind = item.get("type") or item["label"]
            start, end = (
                int(item[name] if name in item else item[f"{name}_offset"])
                for name in ("start", "end")
            )
            yield Span(kind, start, end + after), item.get("text", "")
        else:
            kinds = [part for part in item if isinstance(part, str)]
            if len(kinds) > 1:
                kinds = [part for part in kinds if not part.isdecimal()]
            [kind] = kinds
            start, end = (int(part) for part in item if part is not kind)
            yield Span(kind, start, end + after), ""


def _answers_gold(source: TableFile, row: Row, example: Example, value: Any) -> tuple[Answer, ...]:
    """Read the answers as they stand; one that is not at its offset is looked for just before it.

    Scores use the text alone, so an answer without a place still counts as gold.
    """
    answers = []
    try:
        if isinstance(value, dict):  # the columns of Hugging Face's datasets
            columns = zip(value["text"], value["answer_start"], strict=True)
            value = [{"text": text, "answer_start": start} for text, start in columns]
        items = [
            (x, None) if isinstance(x, str) else (x["text"], x.get("answer_start")) for x in value
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        items = [(None, None)]
    for text, stated in items:
        if not isinstance(text, str) or isinstance(value, str):
            raise DataError(
                f"{row.where}: {str(value)[:80]!r} is not a list of {{text, answer_start}} or texts"
                "; correct it, or name the key of one in data.fields.answers"
            )
        answers.append(Answer(text, _place(source, example.text, text.strip(), stated)))
    if answers and all(answer.start is None for answer in answers):
        source.counts["questions whose answers are not in their text"] += 1
    return tuple(answers)


def _place(source: TableFile, context: str, answer: str, stated: int | None) -> int | None:
    if stated is None:  # a file without offsets: the first place
        place = context.find(answer)
        return place if place >= 0 else None
    for start in range(stated, stated - _STEPS_BACK - 1, -1):
        if start >= 0 and context.startswith(answer, start):
            source.counts["answers moved to where their text is"] += start != stated
            return start
    # Outer white space is stripped from the answer, not from the context.
    if stated >= 0 and context[stated:].lstrip().startswith(answer):
        return context.index(answer, stated)
    return None


_GOLD: dict[str, Callable[[TableFile, Row, Example, Any], Gold]] = {
    **dict.fromkeys(("classify", "pair", "coref"), _class_gold),
    **dict.fromkeys(("choice", "cloze"), _choice_gold),
    "multilabel": _labels_gold,
    "regress": _number_gold,
    **dict.fromkeys(("tag", "spans"), _spans_gold),
    "qa": _answers_gold,
}
