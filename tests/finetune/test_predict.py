"""From decisions about tokens to what stands in a file, without a model that was trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.load import build
from pipeline.data.run_order import DataRank
from pipeline.errors import DataError
from pipeline.finetune.batches import collate, tokenised
from pipeline.finetune.model import TaskModel
from pipeline.finetune.predict import Predictor, predictions
from pipeline.model.heads import TypedSpan, best_answers
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.readers import read_file
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import Answer, Example, TaskRows
from pipeline.use.model import load
from tests.support.tiny_tasks import write_task


def _predicted(config: TaskConfig, model: Any, examples: list[Example],
               decide: Callable[[Any], list[Any]], folder: Path) -> list[Any]:  # fmt: skip
    """Make predictions of what `decode` returns for the inputs of all rows."""
    for _ in range(2):  # the second time from the file of the first
        tokens = tokenised(config, model.tokenizer, "", examples, folder / "tokens")
    spec = config.head_spec("t", ("ORG",))
    units, pad_id = KINDS[spec.kind].scoring_groups(tokens.rows), model.tokenizer.pad_id
    batch = collate(spec, tokens, units, pad_id=pad_id, with_gold=True)
    decided = dict(enumerate(decide(batch.inputs)))
    return [row.prediction for row in predictions(spec, tokens, decided)]


@pytest.mark.parametrize(("content", "golds"), [
    # A token of several characters that are words of the file, each on a line.
    ("北 O\n京 B-ORG\ng M-ORG\no M-ORG\no M-ORG\nd E-ORG\n\nf S-ORG\n", [[1, 6], [0, 1]]),
    ("good B-ORG\nfine I-ORG\n\nthe O\nboooks B-ORG\n", [[0, 9], [4, 10]]),
])  # fmt: skip
def test_gold_tags_become_the_gold_entities(
    tiny_model: Path, tmp_path: Path, content: str, golds: list[list[int]]
) -> None:
    (tmp_path / "a.bmes").write_text(content)
    config = build(TaskConfig, {"task": {"kind": "tag"}, "data": {"root": str(tmp_path)}}, "t")
    examples = read_file(config, "a.bmes", needs_gold=True)
    found = _predicted(
        config, load(tiny_model), examples, lambda each: each["tags"].tolist(), tmp_path
    )
    assert found == [[["ORG", *bounds]] for bounds in golds]


def test_gold_spans_of_words_become_the_gold_entities(tiny_model: Path, tmp_path: Path) -> None:
    """A word of several tokens ends an entity: the loss is finite, and the whole word is meant."""
    (tmp_path / "a.bio").write_text("the O\nfilms B-ORG\nreds I-ORG\n\nthe O\nboooks B-ORG\n")
    task = {"task": {"kind": "spans"}, "data": {"root": str(tmp_path)}}
    config, source = build(TaskConfig, task, "t"), load(tiny_model)
    examples = read_file(config, "a.bio", needs_gold=True)

    def decide(inputs: Any) -> list[Any]:
        gold = [TypedSpan(kind, start, last + 1) for _, kind, start, last in inputs["spans"]]
        return [[span] for span in gold]

    found = _predicted(config, source, examples, decide, tmp_path)
    assert found == [[["ORG", 4, 14]], [["ORG", 4, 10]]]
    spec = config.head_spec("t", ("ORG",))
    model = TaskModel(source.config, spec)
    rows = tokenised(config, source.tokenizer, "", examples, None)
    predictor = Predictor(model.task, model, torch.device("cpu"), source.tokenizer.pad_id)
    assert predictor.decode(rows, DataRank(0, 1))[1] < float("inf")


def test_answer_comes_from_the_window_of_most_context(tiny_model: Path, tmp_path: Path) -> None:
    task = {"task": {"kind": "qa"}, "input": {"max_length": 12, "stride": 2, "max_question": 2}}
    text = "good bad fine poor film book red green blue what who where"
    example = Example(id="0", where="", text=text, text_b="the", gold=(Answer("red", 29),))

    def decide(inputs: Any) -> list[Any]:
        # Words 0 to 7 and 2 to 9. The first window is surest, of a word close to its end, which
        # has more context in the second: that one is asked about it, and about "book".
        scores = torch.zeros(*inputs["mask"].shape, 2)
        scores[0, 3 + 6] = 9.0
        scores[1, 3 + 5 - 2] = 5.0
        starts, text = (torch.tensor(inputs[name]) for name in ("starts", "text"))
        every = best_answers(scores, starts, text, 3)
        return list(zip(*(each.tolist() for each in every), strict=True))

    config = build(TaskConfig, task, "t")
    assert _predicted(config, load(tiny_model), [example], decide, tmp_path) == ["book"]


def test_model_that_gives_nan_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = load_task(str(write_task(tmp_path, "spans")))
    source = load(tiny_model)
    examples = read_file(config, "spans.jsonl", needs_gold=True)[:3]
    tokens: TaskRows = tokenised(config, source.tokenizer, "", examples, None)
    model = TaskModel(source.config, config.head_spec("t", ("all", "name", "place")))
    torch.nn.init.constant_(model.task.pointer.query_key.bias, float("nan"))
    predictor = Predictor(model.task, model, torch.device("cpu"), source.tokenizer.pad_id)
    with pytest.raises(DataError, match="scores are NaN: it has diverged"):
        predictor.decode(tokens, DataRank(0, 1))
