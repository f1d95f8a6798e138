"""qa: the stretch of a passage that answers a question, or none."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.config import HeadConfig, InputConfig
from pipeline.tasks.formats import Row, TableFile
from pipeline.tasks.kinds import base
from pipeline.tasks.rows import RowWriter, slots_of
from pipeline.tasks.scores import Tables, mean_table
from pipeline.tasks.types import Answer, Example, Gold, HeadSpec, TaskRows, TokenRow, TokenSpan

_STEPS_BACK = 3  # characters that CMRC's reference code steps back for an answer to match
_NUM_SPECIAL = 3


class Answers(base.Kind):
    """The stretch of a passage that answers a question, or none; windows cover long passages."""

    gold: ClassVar = "answers"
    has_offsets: ClassVar = True
    scores_tokens: ClassVar = True
    truncations: ClassVar = ("tail",)
    cut_problem: ClassVar = "its texts are cut into windows"
    decoder: ClassVar = "pointer"
    head: ClassVar = "answer"
    form: ClassVar = "answer"
    gold_form: ClassVar = ["answer"]
    long_texts: ClassVar = "the run reads long passages in windows, {stride} tokens apart"
    hugging_face: ClassVar = base.HuggingFace(
        "QuestionAnswering",
        '"a question", "a passage"',
        "output.start_logits.argmax(-1), output.end_logits.argmax(-1)",
        truncation='"only_second"',
    )
    baseline: ClassVar = ""

    def check(self, given: InputConfig, head: HeadConfig) -> None:
        """Refuse windows that would leave out parts of a passage."""
        super().check(given, head)
        if given.stride >= given.max_length:
            raise ConfigError(
                f"input.stride={given.stride} must be below input.max_length={given.max_length}: "
                "windows would leave out parts of a passage"
            )

    def stride(self, given: InputConfig) -> int:
        """Return half of a short window, so that every part of a passage is in some window."""
        room = given.max_length - _NUM_SPECIAL - given.max_question
        return max(1, min(super().stride(given), room // 2))

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> Gold:
        """Read the answers as they stand; one not at its offset is looked for just before it.

        Scores use the text alone, so an answer without a place still counts as gold.
        """
        answers = []
        try:
            if isinstance(value, dict):  # the columns of Hugging Face's datasets
                columns = zip(value["text"], value["answer_start"], strict=True)
                value = [{"text": text, "answer_start": start} for text, start in columns]
            items = [
                (x, None) if isinstance(x, str) else (x["text"], x.get("answer_start"))
                for x in value
            ]
            items = [(text, at if at is None else int(at)) for text, at in items]
        except (AttributeError, KeyError, TypeError, ValueError):
            items = [(None, None)]
        for text, stated in items:
            if not isinstance(text, str) or isinstance(value, str):
                raise DataError(
                    f"{row.where}: {str(value)[:80]!r} is not a list of {{text, answer_start}} or "
                    "texts; correct it, or name the key of one in data.fields.answers"
                )
            if text.strip():  # an empty one says that there is none
                answers.append(Answer(text, _place(source, example.text, text.strip(), stated)))
        if answers and all(answer.start is None for answer in answers):
            source.counts["questions whose answers are not in their text"] += 1
        return tuple(answers)

    def encode(self, writer: RowWriter, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield [CLS] question [SEP] window [SEP]; every token of the passage is in some window."""
        config, counts = writer.input, writer.counts
        question = writer.plain(example.text_b)
        counts["questions that were cut"] += len(question.ids) > config.max_question
        question = question.take(range(min(len(question.ids), config.max_question)))
        passage = writer.located(example.text)
        room = config.max_length - _NUM_SPECIAL - len(question.ids)
        if len(passage.ids) > room and config.stride > room:
            raise ConfigError(
                f"{example.where}: windows have room for {room} tokens of the passage and start "
                f"every input.stride={config.stride}: parts of it would be left out; lower "
                "input.stride or input.max_question, or raise input.max_length"
            )
        gold: Any = example.gold or ()
        answers = [
            (item.start, item.start + len(item.text.strip()))
            for item in gold
            if item.start is not None
        ]
        longest = 0
        # Slots of the passage begin behind [CLS] question [SEP].
        first = len(question.ids) + 2
        for part, (start, end, *best) in enumerate(_windows(len(passage.ids), room, config.stride)):
            row = writer.joined(number, part, [question, passage.take(range(start, end))])
            places = (slots_of(row, example.text, *bounds, exact=False) for bounds in answers)
            slots = next((place for place in places if place is not None), None)
            spans = () if slots is None else (TokenSpan("answer", *slots),)
            longest = max(longest, slots[1] - slots[0] if slots else 0)
            starts = first + best[0] - start, first + best[1] - start
            yield replace(row, spans=spans, starts=starts)
        counts["answers that no window holds"] += bool(answers) and not longest
        counts["answers longer than head.max_answer"] += longest > writer.max_answer

    def outputs(self, spec: HeadSpec) -> tuple[str, ...]:
        """Return both ends."""
        return ("start", "end")

    def inputs(self, batch: base.UnitBatch) -> base.Arrays:
        """Return `text` and `starts` (B, S) bool: slots an answer may end and may begin at."""
        starts = np.zeros(batch.shape, np.bool_)
        for number, row in enumerate(batch.rows):
            starts[number, slice(*row.starts)] = True
        return {"text": batch.text, "starts": starts}

    def targets(self, spec: HeadSpec, batch: base.UnitBatch) -> base.Arrays:
        """Return `start` and `last` (B,) int64; both 0, [CLS], in a window without the answer."""
        rows = batch.rows
        bounds = [row.spans[0][1:] if row.spans else (0, 1) for row in rows]
        start, end = np.array(bounds, np.int64).T
        return {"start": start, "last": end - 1}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the mean entropy of equal probabilities, [CLS] among them."""
        return float(np.mean(np.log1p(base.text_sizes(data))))

    def prediction(self, spec: HeadSpec, example: Example, decided: base.Decided) -> base.Answered:
        """Take the best answer over all windows, or none if its margin is too small.

        Source: google-research/bert `run_squad.py`, write_predictions.
        """
        row, (first, last, score, _) = max(decided, key=lambda pair: pair[1][2])
        # The least over the windows: one that sees an answer is enough.
        null = min(scores[3] for _, scores in decided)
        if not math.isfinite(score):
            return "", None
        # Only of tasks with unanswerable questions: else no question is left without an answer.
        if spec.null_threshold is not None and null - score > spec.null_threshold:
            return "", None
        return example.text[int(row.offsets[first, 0]) : int(row.offsets[last, 1])], None

    def tables(
        self, golds: base.Values, predictions: base.Values, labels: base.Labels, scorer: str
    ) -> Tables:
        """Return exact matches and f1 by the rules of a scorer."""
        pairs = [_SCORERS[scorer](g, p) for g, p in zip(golds, predictions, strict=True)]
        return {
            "em": mean_table([em for em, _ in pairs]),
            "f1": mean_table([f1 for _, f1 in pairs]),
        }

    def constants(self, golds: base.Values, labels: base.Labels) -> list[str]:
        """Return no answer."""
        return [""]


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


def _windows(length: int, room: int, stride: int) -> list[tuple[int, int, int, int]]:
    """Return each window's tokens, and those of which it has the most context; ends are exclusive.

    The context of a token is what stands on its smaller side, and a hundredth of the window; of
    equal windows the first has it. Source: google-research/bert `run_squad.py`.
    """
    starts = range(0, max(1, length - room + stride), stride)
    owner, most = np.full(length, -1), np.full(length, -1.0)
    for number, start in enumerate(starts):
        size = min(room, length - start)
        right = np.arange(size)[::-1]
        context = np.minimum(np.arange(size), right) + 0.01 * size
        part = slice(start, start + size)
        owner[part][context > most[part]] = number
        most[part] = np.maximum(most[part], context)
    bounds = np.searchsorted(owner, np.arange(len(starts) + 1)).tolist()
    return [
        (start, min(start + room, length), bounds[number], bounds[number + 1])
        for number, start in enumerate(starts)
    ]


_CMRC_SIGNS = set("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
# As nltk's word_tokenize, with which the official CMRC scorer splits what is not Chinese. A full
# stop is a word at the end, also before marks that close something.
_OPENS_QUOTE = re.compile(r'(?:^|(?<=[\s(\[{<]))"')
_APART = (
    r"\.{2,}|--|[,:](?!\d)|(?<=[^.])\.(?=[\])}>\"'»\s]*$)|n't\b|'(?:s|m|d|ll|re|ve)\b|``|''"
    r"|'(?=\s|$)|[?!;@#$%&()\[\]{}<>‒–—―«»]"
)
_WORDS = re.compile(rf"{_APART}|(?:(?!{_APART})\S)+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_SIGNS = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def squad_words(text: str) -> list[str]:
    """Return the words that SQuAD compares: lower case, without punctuation and articles.

    After `normalize_answer` of https://rajpurkar.github.io/SQuAD-explorer (evaluate-v2.0.py).
    """
    plain = "".join(char for char in text.lower() if char not in _ASCII_SIGNS)
    return _ARTICLES.sub(" ", plain).split()


def cmrc_plain(text: str) -> str:
    """Return the text that CMRC 2018 compares for equality: lower case, without its signs."""
    return "".join(char for char in text.lower().strip() if char not in _CMRC_SIGNS)


def cmrc_segments(text: str) -> list[str]:
    """Return the segments that CMRC 2018 compares: Chinese characters, and words between them.

    After `mixed_segmentation` of the official cmrc2018_evaluate.py; words without nltk.
    """
    segments, run = [], ""
    for char in [*cmrc_plain(text), ""]:
        if char and not "\u4e00" <= char <= "\u9fa5":
            run += char
            continue
        segments += _WORDS.findall(_OPENS_QUOTE.sub(" `` ", run).replace('"', " '' "))
        segments += [char] if char else []
        run = ""
    return segments


def longest_common_run(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest contiguous run that stands in both."""
    best, above = 0, [0] * (len(other) + 1)
    for item in one:
        row = [0] * (len(other) + 1)
        for j, each in enumerate(other):
            if item == each:
                row[j + 1] = above[j] + 1
                best = max(best, row[j + 1])
        above = row
    return best


def _overlap_f1(common: int, predicted: int, gold: int) -> float:
    return 2 * common / (predicted + gold) if common else 0.0


def squad_scores(answers: Sequence[str], prediction: str) -> tuple[float, float]:
    """Return (em, f1) of one question by SQuAD's rules; no answers: "" is right."""
    words = squad_words(prediction)
    best = (0.0, 0.0)
    # As officially, an answer of which nothing is left counts only where all are so.
    for gold in [gold for answer in answers if (gold := squad_words(answer))] or [[]]:
        common = (Counter(gold) & Counter(words)).total()
        f1 = _overlap_f1(common, len(words), len(gold)) if gold and words else float(gold == words)
        best = (max(best[0], float(gold == words)), max(best[1], f1))
    return best


def cmrc_scores(answers: Sequence[str], prediction: str) -> tuple[float, float]:
    """Return (em, f1) of one question by CMRC 2018's rules: f1 of the longest common run.

    CMRC has an answer to each question; of other sets' without one "" is right, as by SQuAD's.
    """
    plain, segments = cmrc_plain(prediction), cmrc_segments(prediction)
    best = (0.0, 0.0)
    for answer in answers or [""]:
        gold = cmrc_segments(answer)
        common = longest_common_run(gold, segments)
        f1 = _overlap_f1(common, len(segments), len(gold)) if answers else float(not segments)
        best = (max(best[0], float(cmrc_plain(answer) == plain)), max(best[1], f1))
    return best


_SCORERS = {"squad": squad_scores, "cmrc": cmrc_scores}
QA = Answers("qa", ("text", "text_b"), ("f1", "em"), formats=("squad", "cmrc"))
