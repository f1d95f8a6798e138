"""A model as a folder, whose logits are compared with those of the model that it was made of."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.data.format import NUM_SPECIAL
from pipeline.errors import CheckpointError
from pipeline.model.encoder import EncoderModel
from pipeline.model.layout import Layout, rows
from pipeline.use.folder import (
    LARGEST_DIFFERENCE,
    TrainedModel,
    copy_head,
    load_model,
    publishing,
    require_full_alpha,
    write_config,
    write_model,
    write_tokenizer,
)
from pipeline.use.source import load_source

_PROBE_SEQUENCES = 4
_PROBE_LENGTH = 64


@dataclass(frozen=True)
class ExportReport:
    """The comparison of the exported model with the trained one."""

    max_abs_diff: float
    num_logits: int
    note: str = ""
    """What the user should know of the form."""


def load_for_export(source: str | Path) -> TrainedModel:
    """Load a model of any form (PostnormError: as `load_source`, or its alpha is not 1)."""
    trained = load_source(source)
    require_full_alpha(trained, source, "an exported model has alpha 1")
    return trained


def export(source: str | Path, out: Path) -> ExportReport:
    """Write a model of any form as a model folder; of a fine-tuned one with its head.

    Raises:
        RunFolderError: the source is not a model.
        CheckpointError: there is nothing good to export, `out` is not empty, or the exported logits
            differ from the trainer's; nothing is left behind then.
    """
    trained = load_for_export(source)
    weights = dict(trained.model.state_dict())
    with publishing(out) as folder:
        write_tokenizer(trained, folder)
        copy_head(source, folder)
        write_model(folder, trained.model.config, weights, trained.facts)
        exported = load_model(folder).model
        report = compare(trained.model, exported)
        facts = {**trained.facts, "max_abs_diff": report.max_abs_diff}
        write_config(folder, trained.model.config, facts, exported)
    return report


def compare(
    trained: EncoderModel, exported: Callable[[Tensor, Layout, Tensor], Tensor]
) -> ExportReport:
    """Compare logits on random packed sequences, two documents in each.

    `exported` maps (B, S) ids, layout and (M,) numbers of tokens to (M, V) logits.

    Raises:
        CheckpointError: they differ by more than `LARGEST_DIFFERENCE`.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(_PROBE_LENGTH, 2 * (trained.config.longest_document or _PROBE_LENGTH))
    shape = (_PROBE_SEQUENCES, length)
    # Not the id that RoBERTa's positions leave out as padding.
    lowest = max(NUM_SPECIAL, trained.config.position_offset)
    ids = torch.randint(lowest, trained.config.vocab_size or 0, shape, generator=generator)
    half = torch.arange(length).expand(shape)
    layout = rows(half * 2 // length + 1, half % (length // 2))
    every = torch.arange(ids.numel())
    with torch.no_grad():
        expected = trained(ids, layout, every)
        found = exported(ids, layout, every)
    return require_equal(expected, found)


def require_equal(expected: Tensor, found: Tensor) -> ExportReport:
    """Compare logits of the same shape.

    Raises:
        CheckpointError: they differ by more than `LARGEST_DIFFERENCE`.
    """
    difference = float((expected - found).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise CheckpointError(
            f"exported logits differ from the trainer's by {difference:.3g}, at most "
            f"{LARGEST_DIFFERENCE} is accepted; please report this with the run's resolved.yaml"
        )
    return ExportReport(difference, expected.numel())
