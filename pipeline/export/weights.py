"""A run's newest checkpoint as one folder: weights, config and tokenizer.

    OUT/model.safetensors    fp32 master weights by parameter name; the MLM head is the embedding
    OUT/config.json          architecture, step, dataset fingerprint, versions
    OUT/tokenizer.model      sentencepiece

Before the folder appears under its name, it is read back from disk and its logits are compared with
those of the trainer's model.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.config.load import provenance
from pipeline.config.model import ModelConfig
from pipeline.data.shards import NUM_SPECIAL
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import CheckpointError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.runtime.files import write_json_atomic
from pipeline.train.checkpoint import FOLDER, TOKENIZER_FILE, Manifest, newest_good, read_manifest
from pipeline.train.engine import read_weights

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
FORMAT = "postnorm-encoder"
FORMAT_VERSION = 1
LARGEST_DIFFERENCE = 1e-3
"""Largest difference between exported and trained logits that is accepted."""
_PROBE_SEQUENCES = 4
_PROBE_LENGTH = 64


@dataclass(frozen=True)
class TrainedModel:
    """A model ready for use, in fp32 and evaluation mode, alpha = 1."""

    model: MaskedLanguageModel
    tokenizer: Tokenizer
    step: int


@dataclass(frozen=True)
class ExportReport:
    """How the comparison went."""

    step: int
    max_abs_diff: float
    num_logits: int


def export(run_dir: Path, out: Path) -> ExportReport:
    """Writes the newest good checkpoint of a run to `out`.

    Raises:
        CheckpointError: there is no good checkpoint, `out` is not empty, or the exported logits
            differ from the trainer's; nothing is left behind then.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; choose another folder or remove it")
    path, manifest = _newest(run_dir)
    config = ModelConfig(**manifest.identity["model"])
    weights = _checked_weights(path)
    unfinished = out.with_name(f".{out.name}.exporting")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        save_file(weights, unfinished / WEIGHTS_FILE)
        shutil.copyfile(path / TOKENIZER_FILE, unfinished / TOKENIZER_FILE)
        body = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "model": asdict(config),
            "step": manifest.step,
            "data_fingerprint": manifest.fingerprint,
            "trained_with": manifest.provenance,
            "exported_with": provenance(),
        }
        write_json_atomic(unfinished / CONFIG_FILE, body)
        report = _compare(_build(config, weights), manifest, load_exported(unfinished))
        body["max_abs_diff"] = report.max_abs_diff
        write_json_atomic(unfinished / CONFIG_FILE, body)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return report


def load_exported(folder: Path) -> TrainedModel:
    """Reads a folder that `export` wrote.

    Raises:
        CheckpointError: a file is missing, damaged, or of another format.
    """
    try:
        body = json.loads((folder / CONFIG_FILE).read_bytes())
        if (body["format"], body["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{folder} has format {body['format']} {body['format_version']}, expected "
                f"{FORMAT} {FORMAT_VERSION}"
            )
        weights = load_file(folder / WEIGHTS_FILE)
        model = _build(ModelConfig(**body["model"]), weights)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is no complete export: {error}") from error
    return TrainedModel(model, Tokenizer(folder / TOKENIZER_FILE), body["step"])


def load_run(run_dir: Path) -> TrainedModel:
    """Loads a run's newest good checkpoint, or a folder that `export` wrote.

    Raises:
        CheckpointError: there is nothing to load.
    """
    if (run_dir / CONFIG_FILE).is_file():
        return load_exported(run_dir)
    path, manifest = _newest(run_dir)
    model = _build(ModelConfig(**manifest.identity["model"]), _checked_weights(path))
    return TrainedModel(model, Tokenizer(path / TOKENIZER_FILE), manifest.step)


def _newest(run_dir: Path) -> tuple[Path, Manifest]:
    path, rejected = newest_good(run_dir / FOLDER)
    if path is None:
        raise CheckpointError(
            f"{run_dir} has no good checkpoint: {'; '.join(rejected) or 'nothing was saved yet'}"
        )
    return path, read_manifest(path)


def _checked_weights(path: Path) -> dict[str, Tensor]:
    """fp32 master weights, each checked against the weights that forward passes used."""
    masters, used = read_weights(path)
    for name, weight in used.items():
        if name not in masters or not torch.equal(masters[name].to(weight.dtype), weight):
            raise CheckpointError(
                f"{path}: {name} of the optimizer is not what the model was trained with"
            )
    return {name: masters[name].contiguous() for name in used}


def _build(config: ModelConfig, weights: dict[str, Tensor]) -> MaskedLanguageModel:
    model = MaskedLanguageModel(config)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def _compare(
    trained: MaskedLanguageModel, manifest: Manifest, exported: TrainedModel
) -> ExportReport:
    """Logits of both models on random packed sequences, two documents in each."""
    generator = torch.Generator().manual_seed(0)
    shape = (_PROBE_SEQUENCES, _PROBE_LENGTH)
    vocab_size = exported.model.encoder.config.vocab_size or 0
    ids = torch.randint(NUM_SPECIAL, vocab_size, shape, generator=generator)
    half = torch.arange(_PROBE_LENGTH).expand(shape)
    batch = (
        ids,
        half * 2 // _PROBE_LENGTH + 1,
        half % (_PROBE_LENGTH // 2),
        torch.arange(ids.numel()),
    )
    with torch.no_grad():
        expected = trained(*batch, alpha=torch.tensor(manifest.alpha))
        found = exported.model(*batch)
    difference = float((expected - found).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        why = (
            f"alpha is {manifest.alpha:.3f} at step {manifest.step}, and an exported model has "
            "alpha 1: train beyond train.alpha_warmup_steps"
            if manifest.alpha != 1.0
            else "please report this with the run's resolved.yaml"
        )
        raise CheckpointError(
            f"exported logits differ from the trainer's by {difference:.3g}, at most "
            f"{LARGEST_DIFFERENCE} is accepted; {why}"
        )
    return ExportReport(manifest.step, difference, expected.numel())
