"""A run's newest checkpoint as a model folder.

Before the folder appears under its name, it is read back from disk and its logits are compared with
those of the trainer's model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoints.manifest import Manifest, newest_good, read_manifest
from pipeline.checkpoints.state import read_weights
from pipeline.checkpoints.table import A_RUN_OR_ITS_COPY, folder_of
from pipeline.data.format import NUM_SPECIAL
from pipeline.errors import CheckpointError
from pipeline.model.architecture import is_model_folder, read_config, tokenizer_path
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import Layout, rows
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder
from pipeline.train.initial import InitialWeights
from pipeline.use.folder import (
    TrainedModel,
    build_model,
    copy_tokenizer,
    load_model,
    publishing,
    read_tokenizer,
    write_config,
    write_model,
)

LARGEST_DIFFERENCE = 1e-3
"""Largest difference between exported and trained logits that is accepted."""
_PROBE_SEQUENCES = 4
_PROBE_LENGTH = 64


@dataclass(frozen=True)
class ExportReport:
    """How the comparison went."""

    max_abs_diff: float
    num_logits: int


def export(source: Path, out: Path) -> ExportReport:
    """Writes the newest good checkpoint of a run, or a copy of a model folder, to `out`.

    Raises:
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


def load_trained(source: Path) -> TrainedModel:
    """Loads a run's newest good checkpoint, at the alpha that its step has, or a model folder.

    Raises:
        CheckpointError: there is nothing to load.
    """
    if is_model_folder(source):
        return load_model(source)
    path, _ = _newest(source)
    model, manifest = load_checkpoint(path)
    facts = {
        "step": manifest.step,
        "data_fingerprint": manifest.fingerprint,
        "scores": _scores(source, manifest.step),
        "trained_with": manifest.provenance,
    }
    return TrainedModel(model, read_tokenizer(path), facts)


def require_full_alpha(trained: TrainedModel, source: Path, why: str) -> None:
    """Refuses a model in mid-warm-up where only its weights are kept.

    Raises:
        CheckpointError: its alpha is not 1.
    """
    alpha = float(trained.model.encoder.alpha)
    if alpha != 1.0:
        raise CheckpointError(
            f"{source}: alpha is {alpha:.3f}, and {why}, so that it would compute something else: "
            "train beyond train.alpha_warmup_steps"
        )


def load_checkpoint(path: Path) -> tuple[MaskedLanguageModel, Manifest]:
    """The model of one checkpoint, in fp32 and evaluation mode, at the checkpoint's alpha.

    Its files are not compared with the manifest.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit the architecture.
    """
    manifest = read_manifest(path)
    config = read_config(manifest.identity["model"], str(path))
    model = build_model(config, read_weights(path), str(path))
    model.encoder.set_alpha(manifest.alpha)
    return model, manifest


def initial_weights(source: Path) -> InitialWeights:
    """A run's newest good checkpoint, or a model folder, as the start of another run.

    Raises:
        CheckpointError: there is nothing to load.
    """
    trained = load_trained(source)
    require_full_alpha(trained, source, "a run that starts from it has an alpha of its own")
    path = tokenizer_path(tokenizer_folder(source))
    return InitialWeights(trained.model.config, dict(trained.model.state_dict()), path)


def tokenizer_folder(source: Path) -> Path:
    """Where the tokenizer of a run or model folder lies."""
    return source if is_model_folder(source) else _newest(source)[0]


def compare(
    trained: MaskedLanguageModel,
    exported: Callable[[Tensor, Layout, Tensor], Tensor],
) -> ExportReport:
    """Compares logits on random packed sequences, two documents in each.

    Args:
        trained: the trainer's model.
        exported: (B, S) ids, layout and (M,) masked_index to (M, V) logits.

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


def _newest(run_dir: Path) -> tuple[Path, Manifest]:
    path, rejected = newest_good(folder_of(run_dir, f"{A_RUN_OR_ITS_COPY}, or a model folder"))
    if path is None:
        raise CheckpointError(f"{run_dir} has no good checkpoint: {'; '.join(rejected)}")
    return path, read_manifest(path)


def _scores(run_dir: Path, step: int) -> dict[str, float]:
    """Find the last held-out evaluation up to a step; empty if there was none."""
    records = read_json_lines(RunFolder(run_dir).metrics)
    found = [record for record in records if record["kind"] == "eval" and record["step"] <= step]
    return {name: found[-1][name] for name in ("step", "loss", "accuracy")} if found else {}
