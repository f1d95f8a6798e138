"""tag, spans: typed stretches of a text, flat or nested."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import DataError
from pipeline.tasks import scores
from pipeline.tasks.cells import require_text
from pipeline.tasks.formats import Row, TableFile
from pipeline.tasks.kinds import base
from pipeline.tasks.rows import RowWriter, labelled, slots_of, text_spans, without_space
from pipeline.tasks.types import (
    IGNORED,
    Example,
    Gold,
    HeadSpec,
    Span,
    TaskRows,
    TokenRow,
    TokenSpan,
)


class Entities(base.Kind):
    """Typed stretches of a text, which may nest: the head scores every span of every type."""

    gold: ClassVar = "spans"
    has_labels: ClassVar = True
    has_offsets: ClassVar = True
    has_words: ClassVar = True
    truncations: ClassVar = ("tail", "head")
    cut_problem: ClassVar = "an entity could lie over the gap"
    decoders: ClassVar[tuple[str, ...]] = ("pointer",)
    decoder: ClassVar[str] = "pointer"
    head: ClassVar[str] = "pointer"
    batch_rows: ClassVar = 16  # scores of spans grow with the square of the length
    form: ClassVar = [("type", 0, 1)]
    not_in_hugging_face: ClassVar = {
        "pointer": "scores of spans (GlobalPointer); fine-tune a task of kind tag",
        "crf": "a CRF; fine-tune with head.decoder=softmax",
    }
    baseline: ClassVar = "dictionary"

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> Gold:
        """Read lists of type, start and end, mappings with these keys, or CLUENER's mapping."""
        spans = set()
        try:
            for span, part in _written_spans(value, int(source.data.span_ends == "inclusive")):
                require_text(row, example.text, part, span.start)
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
                f"{row.where}: {str(value)[:80]!r} is not a list of [type, start, end] or [start, "
                "end, type], of which the type is a text, or of mappings with type, start and end, "
                "nor {type: {text: [[start, last], ...]}}; tags need their words as a list, too. "
                "Correct it, or name the key of the entities in data.fields.spans"
            ) from None
        return tuple(sorted(spans, key=lambda span: (span.start, span.end, span.type)))

    def types(self, labels: base.Labels) -> tuple[str, ...]:
        """Return the types; of tags such as O, B-ORG, I-ORG those behind their prefixes."""
        types = [scores.split_tag(label)[1] for label in labels if label != "O"]
        is_tags = "O" in labels and all(types)
        return tuple(dict.fromkeys(types) if is_tags else labels)

    def labels_in(self, value: Any) -> list[str]:
        """Return the types."""
        return [item[0] for item in value or ()]

    def encode(self, writer: RowWriter, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield the text, with the entities that its tokens can express."""
        row = writer.row(number, 0, [writer.located(example.text)])
        spans = []
        gold: Any = example.gold or ()
        for item in gold:
            exact = slots_of(row, example.text, item.start, item.end, exact=True)
            if exact is not None:
                spans.append(TokenSpan(item.type, *exact))
                bounds = without_space(example.text, item.start, item.end)
                writer.counts["entities with white space at an end"] += bounds != item[1:]
            elif slots_of(row, example.text, item.start, item.end, exact=False) is None:
                writer.counts["entities behind the cut"] += 1
            else:
                writer.counts["entities that begin or end inside a token"] += 1
        yield replace(row, spans=tuple(self.expressible(writer, spans)))

    def expressible(self, writer: RowWriter, spans: list[TokenSpan]) -> list[TokenSpan]:
        """Return the spans that the head can give together, and count the others."""
        return spans

    def inputs(self, batch: base.UnitBatch) -> base.Arrays:
        """Return `text` (B, S) bool, true at the slots that may be labelled."""
        return {"text": batch.text}

    def targets(self, spec: HeadSpec, batch: base.UnitBatch) -> base.Arrays:
        """Return `spans` (N, 4) int64: row, type, first and last slot of each entity."""
        places = base.place_of(spec)
        spans = []
        for number, row in enumerate(batch.rows):
            # The last token of a word has no score where only the first one may be labelled.
            slots = labelled(row, batch.data.examples[row.example])
            for span in row.spans:
                last = slots[np.searchsorted(slots, span.end) - 1]
                spans.append((number, places[span.type], span.start, last))
        return {"spans": np.array(spans, np.int64).reshape(-1, 4)}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the mean of what `span_losses` gives for zeros."""
        losses = []
        for row, size in zip(data.rows, base.text_sizes(data), strict=True):
            of_type = Counter(span.type for span in row.spans)
            for label in spec.labels:
                spans = size * (size + 1) // 2
                losses.append(math.log1p(spans - of_type[label]) + math.log1p(of_type[label]))
        return float(np.mean(losses))

    def prediction(self, spec: HeadSpec, example: Example, decided: base.Decided) -> base.Answered:
        """Return [type, start, end] of each span."""
        [(row, spans)] = decided
        typed = [TokenSpan(spec.labels[span.type], span.start, span.end) for span in spans]
        return [list(span) for span in text_spans(row, typed, example.words)], None

    def submission(self, text: str, prediction: Any) -> dict[str, Any]:
        """Return spans as CLUENER has them: {type: {entity: [[first, last], ...]}}."""
        of_type: dict[str, dict[str, list[list[int]]]] = {}
        for kind, start, end in prediction:
            of_type.setdefault(kind, {}).setdefault(text[start:end], []).append([start, end - 1])
        return {"text": text, "label": of_type}

    def tables(
        self, golds: base.Values, predictions: base.Values, labels: base.Labels, scorer: str
    ) -> scores.Tables:
        """Return F1 of all entities, and its mean over the types."""
        counts = scores.class_counts(golds, predictions, labels)
        return {"f1": scores.micro_f1(counts), "macro_f1": scores.macro_f1(counts)}

    def constants(self, golds: base.Values, labels: base.Labels) -> list[Any]:
        """Return no entity."""
        return [[]]


class Tags(Entities):
    """Typed stretches that do not overlap: the head gives each token a tag."""

    scores_tokens: ClassVar = True
    decoders: ClassVar[tuple[str, ...]] = ("softmax", "crf")
    decoder: ClassVar[str] = "softmax"
    head: ClassVar[str] = "tags"
    batch_rows: ClassVar = base.Kind.batch_rows
    hugging_face: ClassVar = base.HuggingFace(
        "TokenClassification",
        answer="[model.config.id2label[i] for i in output.logits[0].argmax(-1).tolist()]",
    )

    def expressible(self, writer: RowWriter, spans: list[TokenSpan]) -> list[TokenSpan]:
        """Keep the longest of spans that overlap."""
        flat: list[TokenSpan] = []
        for span in sorted(spans, key=lambda span: (span.start - span.end, span.start)):
            if all(span.end <= kept.start or kept.end <= span.start for kept in flat):
                flat.append(span)
        writer.counts["entities inside others, which tags cannot hold"] += len(spans) - len(flat)
        return sorted(flat, key=lambda span: span.start)

    def outputs(self, spec: HeadSpec) -> tuple[str, ...]:
        """Return the tags: `O`, then those of each type."""
        prefixes = "BIES" if spec.scheme == "bioes" else "BI"
        return ("O", *(f"{prefix}-{label}" for label in spec.labels for prefix in prefixes))

    def targets(self, spec: HeadSpec, batch: base.UnitBatch) -> base.Arrays:
        """Return `tags` (B, S) int64, `IGNORED` at slots without one."""
        tags = np.full(batch.shape, IGNORED, np.int64)
        number_of = {tag: number for number, tag in enumerate(self.outputs(spec))}
        for number, row in enumerate(batch.rows):
            slots = labelled(row, batch.data.examples[row.example])
            # From slots of the row to places among those that have a label.
            spans = [
                Span(span.type, *np.searchsorted(slots, (span.start, span.end)).tolist())
                for span in row.spans
            ]
            there = [span for span in spans if span.start < span.end]
            names = scores.encode_tags(there, len(slots), spec.scheme)
            assert names is not None, "encode keeps no overlapping spans"
            tags[number, slots] = [number_of[name] for name in names]
        return {"tags": tags}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the entropy of equal probabilities."""
        # Of a CRF all tags of a row together are one choice.
        weight = float(np.mean(base.text_sizes(data))) if spec.decoder == "crf" else 1.0
        return weight * math.log(len(self.outputs(spec)))

    def prediction(self, spec: HeadSpec, example: Example, decided: base.Decided) -> base.Answered:
        """Read entities from tags of slots; an end is that of the word, or token of several."""
        [(row, tags)] = decided
        slots = labelled(row, example).tolist()
        outputs = self.outputs(spec)
        names = [outputs[tags[slot]] if tags[slot] != IGNORED else "O" for slot in slots]
        ends = dict(example.words)
        bounds = []
        for slot in slots:
            start, end = row.offsets[slot].tolist()
            bounds.append((start, max(end, ends.get(start, end))))
        return [
            [kind, bounds[first][0], bounds[last - 1][1]]
            for kind, first, last in scores.decode_tags(names)
        ], None


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
            kind = (item.get("type") or item["label"]).strip()
            start, end = (
                int(item[name] if name in item else item[f"{name}_offset"])
                for name in ("start", "end")
            )
            yield Span(kind, start, end + after), item.get("text", "")
        else:
            kinds = [part for part in item if isinstance(part, str)]
            if len(kinds) > 1:
                # Files with numbers in quotes have several texts; the type is the one that is not a
                # number.
                kinds = [part for part in kinds if not part.isdecimal()]
            [kind] = kinds
            start, end = (int(part) for part in item if part is not kind)
            yield Span(kind, start, end + after), ""


_METRICS = ("f1", "macro_f1")
TAG = Tags("tag", ("text",), _METRICS, formats=("conll",))
SPANS = Entities("spans", ("text",), _METRICS, formats=("conll",))
