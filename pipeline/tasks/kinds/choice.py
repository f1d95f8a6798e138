"""choice, cloze: one of the texts that a row offers."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import DataError
from pipeline.tasks.cells import OTHER_LABEL, choices_of, holds_lists, name_of, text_of
from pipeline.tasks.formats import Row, TableFile, each_blank
from pipeline.tasks.kinds import base
from pipeline.tasks.rows import RowWriter, Tokens
from pipeline.tasks.scores import Floats, Tables, accuracy
from pipeline.tasks.types import Example, Gold, HeadSpec, PredictionRow, Span, TaskRows, TokenRow

_OTHER_BLANK = "[MASK]" * 4  # an idiom has four characters
# Not -inf: `assign` adds up scores.
_NO_CHOICE = -1e9


class TextChoice(base.Kind):
    """One of the choices of a row, each of which is a row of tokens with the texts."""

    has_one_answer: ClassVar = True
    masks_scores: ClassVar = True
    form: ClassVar[Any] = 0
    hugging_face: ClassVar = base.HuggingFace(
        "MultipleChoice",
        '["a text"] * 2, ["a choice", "another choice"]',
        "int(output.logits.argmax(-1))",
    )

    def choices(self, source: TableFile, row: Row) -> tuple[str, ...]:
        """Return the texts of the choices."""
        return tuple(map(str, choices_of(source, row)[0]))

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> Gold:
        """Find the index of the choice; of equal choices it is the first.

        An answer is a text, the file's own name of a choice, a letter, or an index from 0. Where a
        row has names beside its texts, one of them is nothing else.
        """
        given, names = choices_of(source, row)
        texts = tuple(map(str, given))
        name, own = name_of(value, row).casefold(), [str(own).casefold() for own in names]
        places = {name: place for place, name in enumerate(own)}
        letters = {chr(ord("a") + place): place for place in range(len(texts))}
        # A number may be that of a choice, too.
        same = [place for place, own in enumerate(given) if value in (own, str(own))]
        readings = {"the text of": same[0]} if same else {}
        is_nested = not isinstance(source.column("choices"), tuple)
        if name in places and is_nested and type(value) in map(type, names):
            readings = {"as a name": places[name]}
        elif source.format != "c3":  # which answers by texts alone: "2" would be a wrong one
            if name in (known := {**letters, **places}):
                readings["as a name"] = known[name]
            if name.isdecimal() and int(name) < len(texts):
                readings["as an index"] = int(name)
        meanings = {texts.index(texts[index]) for index in readings.values()}
        if len(meanings) == 1:
            return meanings.pop()
        meant = (
            "neither one of the choices, nor the name or letter of one, nor an index of them, "
            "from 0"
        )
        if meanings:
            meant = ", and ".join(f"{how} choice {index}" for how, index in readings.items())
        raise DataError(
            f"{row.where}: answer {value!r} is {meant}: {list(texts)}; write a text, a name, a "
            "letter (A for the first) or, without quotes, an index, whichever means one thing; or "
            f"{OTHER_LABEL}"
        )

    def encode(self, writer: RowWriter, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield a row for each choice; one with the text of an earlier one has none."""
        for part, is_first in enumerate(example.distinct):
            if is_first:
                yield self.row(writer, number, part, example)

    def row(self, writer: RowWriter, number: int, part: int, example: Example) -> TokenRow:
        """Put a choice behind the texts."""
        texts = [example.text, example.text_b, example.choices[part]]
        return writer.row(number, part, [writer.plain(text) for text in texts if text])

    def scoring_groups(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        """Return the rows of each example."""
        groups: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault(row.example, []).append(number)
        return list(groups.values())

    def outputs(self, spec: HeadSpec) -> tuple[str, ...]:
        """Return the only output, of each choice."""
        return ("score",)

    def inputs(self, batch: base.UnitBatch) -> base.Arrays:
        """Return `choices` (U, C) bool, true where an example has a choice with a row."""
        most = max(len(example.choices) for example in batch.examples)
        there = np.zeros((len(batch.units), most), np.bool_)
        for number, unit in enumerate(batch.units):
            there[number, [batch.data.rows[row].part for row in unit]] = True
        return {"choices": there}

    def targets(self, spec: HeadSpec, batch: base.UnitBatch) -> base.Arrays:
        """Return `labels` (U,) int64."""
        return {"labels": np.array(batch.golds, np.int64)}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the mean entropy of equal probabilities."""
        return float(np.mean([math.log(sum(row.distinct)) for row in data.examples]))

    def prediction(self, spec: HeadSpec, example: Example, decided: base.Decided) -> base.Answered:
        """Return the index of the choice with the highest score."""
        scores = decided[0][1]
        kept = scores[: len(example.choices)]
        return int(np.argmax(scores)), [
            base.short(score) if math.isfinite(score) else None for score in kept
        ]

    def problem(self, labels: base.Labels, row: PredictionRow) -> str:
        """Check that the prediction is a choice."""
        if row.scores is None:
            return "scores are missing, which tell how many choices there are"
        given = [i for i, score in enumerate(row.scores) if score is not None]
        return "" if row.prediction in given else f"prediction {row.prediction} has no score"

    def submission(self, text: str, prediction: Any) -> dict[str, Any] | None:
        """Return the index as text."""
        return {"label": str(prediction)}

    def tables(
        self, golds: base.Values, predictions: base.Values, labels: base.Labels, scorer: str
    ) -> Tables:
        """Return the accuracy."""
        return {"accuracy": accuracy(golds, predictions)}

    def constants(self, golds: base.Values, labels: base.Labels) -> list[int]:
        """Return the commonest index."""
        counts = Counter(golds)
        return [min(counts, key=lambda index: (-counts[index], str(index)))]

    def chance(
        self, golds: base.Values, labels: base.Labels, num_choices: base.Values = ()
    ) -> dict[str, float]:
        """Guess uniformly among the choices of a row."""
        return {"accuracy": float(np.mean([1 / num for num in num_choices]))}


class Cloze(TextChoice):
    """The candidate that belongs into a blank."""

    truncations: ClassVar = ("tail",)
    cut_problem: ClassVar = "its texts are cut around the blank"
    long_texts: ClassVar = "the run keeps what stands around the blank of long texts"
    hugging_face: ClassVar = TextChoice.hugging_face._replace(
        texts='["before the blank [SEP] " + each + " [SEP] after it" for each in ("one", "other")]'
    )

    def rows(self, source: TableFile, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield a row for each blank, with its own of the answers, and of lists of choices.

        Raises:
            DataError: there are several blanks, and not an answer or a list of choices for each.
        """
        return (part for row in rows for part in self._by_blank(source, row))

    def _by_blank(self, source: TableFile, row: Row) -> Iterator[Row]:
        if row.blanks:
            yield row
            return
        text = text_of(source, row, "text")
        blanks = each_blank(text, source.data.blank)
        if not blanks:
            raise DataError(
                f"{row.where}: no blank {source.data.blank!r} in {text[:80]!r}; set data.blank to "
                "the pattern of one"
            )
        keys = {field: source.column(field) for field in ("id", "label", "choices")}
        values: dict[str, Any] = {field: row.values.get(key) for field, key in keys.items()}
        has_own = isinstance(values["label"], list)
        has_own |= len(blanks) > 1 and values["label"] is not None
        own = ["label"] * has_own + ["choices"] * holds_lists(values["choices"])
        for field in own:
            if not isinstance(values[field], list) or len(values[field]) != len(blanks):
                raise DataError(
                    f"{row.where}: {len(blanks)} blanks, but {keys[field]!r} is "
                    f"{str(values[field])[:80]!r}; expected a list with one for each, in the order "
                    "of the text, or a data.blank that finds only the one that is asked for"
                )
        for number, places in enumerate(blanks):
            part = {keys[field]: values[field][number] for field in own}
            if len(blanks) > 1 and values["id"] is not None:
                part[keys["id"]] = f"{values['id']}-{number}"
            yield row._replace(values={**row.values, **part}, blanks=places)

    def marks(self, source: TableFile, row: Row, text: str) -> tuple[Span, ...]:
        """Return the blank that is asked for, then the others."""
        return tuple(Span("blank", *bounds) for bounds in row.blanks)

    def row(self, writer: RowWriter, number: int, part: int, example: Example) -> TokenRow:
        """Put a candidate into its blank between separators, in the middle of its window.

        As RoFormerV2's clue/chid.py does; other blanks are masks.
        """
        (_, start, end), *others = example.marks
        left, right = (
            writer.tokenizer.encode_with_masks(_masked(example.text, others, *bounds))
            for bounds in ((0, start), (end, len(example.text)))
        )
        # Four special tokens: [CLS] left [SEP] candidate [SEP] right [SEP].
        most = writer.input.max_length - 4
        candidate = writer.plain(example.choices[part])
        candidate = candidate.take(range(min(len(candidate.ids), most)))
        room = most - len(candidate.ids)
        before = min(len(left), max(room // 2, room - len(right)))
        sides = left[len(left) - before :], right[: room - before]
        is_cut = len(sides[0]) + len(sides[1]) < len(left) + len(right)
        writer.counts["rows that were cut"] += is_cut
        left_side, right_side = (Tokens(side, [(-1, -1)] * len(side)) for side in sides)
        return writer.joined(number, part, [left_side, candidate, right_side])

    def settle(self, examples: Sequence[Example], made: list[PredictionRow]) -> None:
        """Let the blanks of a group take distinct candidates: about 6 points more (kx8739)."""
        groups: dict[str, list[int]] = {}
        for number, example in enumerate(examples):
            if example.group:
                groups.setdefault(example.group, []).append(number)
        for numbers in groups.values():
            rows = [
                [_NO_CHOICE if score is None else score for score in made[number].scores or ()]
                for number in numbers
            ]
            if len(rows) < 2 or len(rows) > len(rows[0]):
                continue
            for number, choice in zip(numbers, assign(np.array(rows)), strict=True):
                made[number] = made[number]._replace(prediction=choice)

    def submission(self, text: str, prediction: Any) -> dict[str, Any]:
        """Return the index."""
        return {"answer": prediction}


def _masked(text: str, blanks: Sequence[Span], start: int, end: int) -> str:
    """Return text[start:end] with masks in place of the blanks in it."""
    parts, place = [], start
    for _, first, last in sorted(blanks, key=lambda blank: blank.start):
        if start <= first and last <= end:
            parts += [text[place:first], _OTHER_BLANK]
            place = last
    return "".join([*parts, text[place:end]])


def assign(scores: Floats) -> list[int]:
    """Return for each row (blank) a column (candidate) of its own, with the highest sum of scores.

    `scores` [rows, columns], with as many columns as rows at least. ChID's blanks of a group have
    distinct answers. Source: the Hungarian method by shortest augmenting paths (Jonker and
    Volgenant 1987).

    Raises:
        DataError: a score is infinite or NaN, or there are more rows than columns.
    """
    num_rows, num_columns = scores.shape
    if num_rows > num_columns or not np.isfinite(scores).all():
        raise DataError(
            f"{num_rows} blanks cannot take {num_columns} candidates once each by these scores: "
            "expected no more blanks than candidates, and finite scores"
        )
    costs = -scores
    row_price, column_price = np.zeros(num_rows), np.zeros(num_columns)
    owner = np.full(num_columns, -1)
    for new in range(num_rows):
        shortest, before = np.full(num_columns, np.inf), np.full(num_columns, -1)
        done = np.zeros(num_columns, dtype=bool)
        row, column, length = new, -1, 0.0
        while row >= 0:
            through = length + costs[row] - row_price[row] - column_price
            is_better = ~done & (through < shortest)
            shortest[is_better], before[is_better] = through[is_better], column
            column = int(np.argmin(np.where(done, np.inf, shortest)))
            length, row = shortest[column], owner[column]
            done[column] = True
        for taken in np.flatnonzero(done & (owner >= 0)):
            row_price[owner[taken]] += length - shortest[taken]
        row_price[new] += length
        column_price[done] -= length - shortest[done]
        while column >= 0:
            owner[column] = owner[before[column]] if before[column] >= 0 else new
            column = int(before[column])
    return [int(np.flatnonzero(owner == row)[0]) for row in range(num_rows)]


CHOICE = TextChoice(
    "choice", ("choices",), ("accuracy",), optional=("text", "text_b"), formats=("c3",)
)
CLOZE = Cloze("cloze", ("text", "choices"), ("accuracy",), formats=("chid",))
