"""`postnorm export DIR OUT --format hf` of a fine-tuned model: its head in transformers' class.

Before the folder gets its name, transformers' logits are compared with those of the head that was
trained, on rows of the task where its files are still there.

Shapes: U examples of at most C choices (1 where the task has none), S slots, X rows of text, D
hidden size, K outputs.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.data.format import NUM_SPECIAL
from pipeline.errors import CheckpointError, DataError
from pipeline.finetune.answer import FineTuned, load_fine_tuned
from pipeline.finetune.result import RESULT, read_result
from pipeline.model.architecture import is_model_folder, read_architecture
from pipeline.model.layout import rows
from pipeline.runtime.checkpoints import split_step
from pipeline.runtime.files import write_atomic
from pipeline.tasks.readers import encode, read_file
from pipeline.tasks.task import TaskConfig
from pipeline.use import hf
from pipeline.use.export import ExportReport, require_equal
from pipeline.use.folder import TrainedModel, fine_tuned, publishing
from pipeline.use.hf_tokenizer import write_hf_tokenizer

_TAGS = {
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
    "MultipleChoice": "multiple-choice",
}
_PROBE_ROWS = 16
_PROBE_LENGTH = 32
_PROTOCOL = ("model", "max_length", "truncate", "steps", "batch", "lr", "head_lr", "selected_on")


def export_hf(source: str | Path, out: Path, license_id: str = hf.NO_LICENSE) -> ExportReport:
    """Write a model for transformers; a fine-tuned one with the head of its task.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        CheckpointError: transformers has no class for the head, or what it computes from the folder
            differs; nothing is left behind then. Or as `pipeline.use.hf.export_hf`.
    """
    folder = fine_tuned(split_step(source)[0])
    if not is_model_folder(folder) or "task" not in read_architecture(folder)[1]:
        return hf.export_hf(source, out, license_id)
    hf.require_transformers()
    tuned = load_fine_tuned(folder)
    spec, config = tuned.model.task.spec, tuned.model.config
    kind = tuned.config.kind
    if spec.decoder in kind.not_in_hugging_face:
        problem, _, remedy = kind.not_in_hugging_face[spec.decoder].partition("; ")
        raise CheckpointError(
            f"{source} has a head with {problem}, for which transformers has no class; {remedy}, "
            f"or let `postnorm predict {source}` answer"
        )
    auto, trained = kind.hugging_face.auto, TrainedModel(tuned.model, tuned.tokenizer, {})
    # A pooler decides by the head: classes of tokens and of questions read none.
    family = hf.native_family(replace(config, pooler=False), tuned.tokenizer)
    note = f"for transformers' AutoModelFor{auto}"
    if family and not hf.native_head(family, auto, spec.pool):
        note += (
            ", with trust_remote_code=True: between encoder and last matrix "
            f"{hf.native_class(family, auto)} has a layer that head.pool={spec.pool} does not have"
        )
        family = None
    cut = _cut(tuned.config)
    note += f"; {cut}" if cut else ""
    with publishing(out) as unfinished:
        weights = tuned.model.state_dict()
        encoder = {name: each for name, each in weights.items() if name.startswith("encoder.")}
        hf.write_files(unfinished, trained, encoder, family, _head(tuned))
        write_hf_tokenizer(
            tuned.tokenizer,
            unfinished,
            max_length=spec.max_length,
            one_segment=True,
            # transformers names the side that is cut off, as `input.truncate` does.
            cut="left" if tuned.config.input.truncate == "head" else "right",
        )
        units, origin = _probe_rows(tuned)
        report = _compare(
            tuned, units, lambda *batch: hf.transformers_logits(unfinished, auto, *batch)
        )
        run = folder.parent  # the run that a model's folder stands in, if it does
        result = read_result(run) if (run / RESULT).is_file() else {}
        card = _card(tuned, hf.loading(out.name, family), result)
        text = hf.model_card(out.name, trained, family, report.max_abs_diff, card, license_id)
        write_atomic(unfinished / "README.md", text.encode())
    return ExportReport(report.max_abs_diff, report.num_logits, f"{note}; compared on {origin}")


def _cut(task: TaskConfig) -> str:
    """Note on how the run read long texts, if a tokenizer alone reads them otherwise; else ""."""
    read = task.kind.long_texts.format(stride=task.input.stride)
    if task.input.truncate == "head_tail":
        read = f"the run keeps {task.input.head_share:g} of long texts from the head, the rest tail"
    return read and f"{read}; the tokenizer keeps their beginning"


def _head(tuned: FineTuned) -> hf.HFTaskHead:
    task: Any = tuned.model.task
    spec, output = task.spec, task.linear.output
    form = tuned.config.kind.hugging_face
    auto = form.auto
    name = "qa_outputs" if auto == "QuestionAnswering" else "classifier"
    settings: dict[str, Any] = {"classifier_dropout": spec.dropout, "pool": spec.pool}
    labels = tuned.config.kind.outputs(spec)
    if auto == "SequenceClassification":
        settings["problem_type"] = form.problem_type
    if auto in ("SequenceClassification", "TokenClassification"):
        settings["id2label"] = {str(number): label for number, label in enumerate(labels)}
        settings["label2id"] = {label: number for number, label in enumerate(labels)}
    weights = {f"{name}.weight": output.weight.detach(), f"{name}.bias": output.bias.detach()}
    return hf.HFTaskHead(auto, weights, settings)


# The comparison


def _probe_rows(tuned: FineTuned) -> tuple[list[list[Tensor]], str]:
    """Return ids of the rows of some examples, and where they come from."""
    task, spec = tuned.config, tuned.model.task.spec
    for file in (*task.data.dev, *task.data.train)[:1]:
        try:
            examples = read_file(task, file, needs_gold=False)[:_PROBE_ROWS]
        except DataError:  # the files are elsewhere by now
            break
        rows_read, _ = encode(task, tuned.tokenizer, examples)
        units = task.kind.scoring_groups(rows_read)[:_PROBE_ROWS]
        ids = [[torch.from_numpy(rows_read[row].ids).long() for row in unit] for unit in units]
        return ids, f"rows of {file}"
    generator = torch.Generator().manual_seed(0)
    config = tuned.model.config
    lowest, highest = max(NUM_SPECIAL, config.position_offset), config.vocab_size or 0
    longest = min(_PROBE_LENGTH, spec.max_length)
    choices = 3 if task.kind.hugging_face.auto == "MultipleChoice" else 1
    made = [
        [torch.randint(lowest, highest, (longest - unit % 8,), generator=generator)] * choices
        for unit in range(_PROBE_ROWS)
    ]
    return made, "random rows, as the task's files are not there"


def _compare(
    tuned: FineTuned, units: list[list[Tensor]], exported: Callable[[Tensor, Tensor], Tensor]
) -> ExportReport:
    """Compare logits with those of the trained head.

    `exported` maps ids and mask, (X, S), or (U, C, S) of choices, to logits.

    Raises:
        CheckpointError: they differ.
    """
    model, kind = tuned.model, tuned.config.kind
    longest = max(len(ids) for unit in units for ids in unit)
    shape = len(units), max(map(len, units)), longest
    ids_UCS = torch.full(shape, int(tuned.tokenizer.pad_id))
    mask_UCS = torch.zeros(shape, dtype=torch.bool)
    for number, unit in enumerate(units):
        for choice, ids in enumerate(unit):
            ids_UCS[number, choice, : len(ids)] = ids
            mask_UCS[number, choice, : len(ids)] = True
    choices_UC = mask_UCS.any(-1)
    ids_XS, mask_XS = ids_UCS[choices_UC], mask_UCS[choices_UC]
    positions_XS = torch.arange(longest) * mask_XS
    has_choices = kind.hugging_face.auto == "MultipleChoice"
    inputs = {"mask": mask_XS, **({"choices": choices_UC} if has_choices else {})}
    with torch.no_grad():
        expected, _ = model(ids_XS, rows(mask_XS.int(), positions_XS), inputs, with_losses=False)
    if has_choices:
        found, kept = exported(ids_UCS, mask_UCS), choices_UC
    else:
        found = exported(ids_XS, mask_XS)
        kept = mask_XS if kind.scores_tokens else torch.ones(len(units), dtype=torch.bool)
    return require_equal(expected[kept], found[kept])


# The card


_USAGE = """\
import torch
from transformers import AutoModelFor{auto}, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({folder})
model = AutoModelFor{auto}.from_pretrained({folder}).eval()
{batch}
with torch.no_grad():
    output = model(**batch)
print({answer})
"""
_BATCH = 'batch = tokenizer({texts}, truncation={truncation}, return_tensors="pt")'
_CHOICES = """\
rows = tokenizer({texts}, padding=True, truncation={truncation}, return_tensors="pt")
batch = {{key: value[None] for key, value in rows.items()}}"""


def _card(tuned: FineTuned, folder: str, result: dict[str, Any]) -> hf.Card:
    spec, sep = tuned.model.task.spec, tuned.tokenizer.piece(tuned.tokenizer.sep_id)
    rows = {"task": f"{spec.name} ({spec.kind})"}
    if cut := _cut(tuned.config):
        rows["long texts"] = cut
    if spec.labels:
        rows["labels"] = ", ".join(spec.labels).replace("|", "\\|")
    if result:
        rows |= {split: _scores(result[split]) for split in ("dev", "test") if result.get(split)}
        majority = f"{result['majority']:.4f} by majority, {result['chance']:.4f} by chance"
        protocol = dict(result["protocol"])
        rows["without a model"] = f"{result['metric']} {majority}, on {protocol['scored_on']}"
        protocol["model"] = re.sub("[^:]*/", "", protocol["model"])  # not the whole path
        values = (f"{name} {protocol[name]}" for name in _PROTOCOL if protocol.get(name))
        seeds = ", ".join(map(str, result["seeds"]))
        rows["protocol"] = "; ".join((*values, f"seed {seeds}"))
    form = tuned.config.kind.hugging_face
    batch = _CHOICES if form.auto == "MultipleChoice" else _BATCH
    batch = batch.format(texts=form.texts, truncation=form.truncation).replace("[SEP]", sep)
    usage = _USAGE.format(folder=folder, auto=form.auto, batch=batch, answer=form.answer)
    text = f"A bidirectional encoder, fine-tuned on {spec.name}."
    intended = f"For rows as those of {spec.name}; scores on others are not known."
    return hf.Card(hf.METADATA.format(_TAGS[form.auto]), text, rows, usage, intended)


def _scores(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
