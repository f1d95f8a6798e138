"""`python -m pipeline export`: a run's newest checkpoint as a model folder.

Before the folder appears under its name, it is read back from disk and its logits are compared with
those of the trainer's model.
"""

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
    copy_tokenizer,
    load_model,
    publishing,
    write_config,
    write_model,
)
from pipeline.use.trained import load_trained, require_full_alpha, tokenizer_folder

LARGEST_DIFFERENCE = 1e-3
"""Largest difference between exported and trained logits that is accepted."""
_PROBE_SEQUENCES = 4
_PROBE_LENGTH = 64


@dataclass(frozen=True)
class ExportReport:
    """The comparison of the exported model with the trained one."""

    max_abs_diff: float
    num_logits: int


def export(source: Path, out: Path) -> ExportReport:
    """Write the newest good checkpoint of a run, or a copy of a model folder, to `out`.

    Raises:
        RunFolderError: the source is neither a run, nor its copy, nor a model folder.
        CheckpointError: there is nothing good to export, `out` is not empty, or the exported logits
            differ from the trainer's; nothing is left behind then.
    """
    trained = load_trained(source)
    require_full_alpha(trained, source, "an exported model has alpha 1")
    weights = dict(trained.model.state_dict())
    with publishing(out) as folder:
        write_model(folder, trained.model.config, weights, trained.facts)
        copy_tokenizer(tokenizer_folder(source), folder)
        exported = load_model(folder).model
        report = compare(trained.model, exported)
        facts = {**trained.facts, "max_abs_diff": report.max_abs_diff}
        write_config(folder, trained.model.config, facts)
    return report


def compare(
    trained: EncoderModel,
    exported: Callable[[Tensor, Layout, Tensor], Tensor],
) -> ExportReport:
    """Compare logits on random packed sequences, two documents in each.

    Args:
        trained: the trainer's model.
        exported: (B, S) ids, layout and (M,) numbers of tokens to (M, V) logits.

    Raises:
        CheckpointError: they differ by more than `LARGEST_DIFFERENCE`.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (_PROBE_SEQUENCES, _PROBE_LENGTH)
    # Not the id that RoBERTa's positions leave out as padding.
    lowest = max(NUM_SPECIAL, trained.config.position_offset)
    ids = torch.randint(lowest, trained.config.vocab_size or 0, shape, generator=generator)
    half = torch.arange(_PROBE_LENGTH).expand(shape)
    layout = rows(half * 2 // _PROBE_LENGTH + 1, half % (_PROBE_LENGTH // 2))
    every = torch.arange(ids.numel())
    with torch.no_grad():
        expected = trained(ids, layout, every)
        found = exported(ids, layout, every)
    difference = float((expected - found).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise CheckpointError(
            f"exported logits differ from the trainer's by {difference:.3g}, at most "
            f"{LARGEST_DIFFERENCE} is accepted; please report this with the run's resolved.yaml"
        )
    return ExportReport(difference, expected.numel())
