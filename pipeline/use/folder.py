"""Writing and loading the folder that models are exchanged in; its files: `model.architecture`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.config.load import provenance
from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError
from pipeline.model.architecture import (
    CONFIG_FILE,
    FORMAT,
    FORMAT_VERSION,
    SENTENCEPIECE_FILE,
    TOKENIZERS_FILE,
    WEIGHTS_FILE,
    read_architecture,
    tokenizer_path,
)
from pipeline.model.encoder import EncoderModel, without_storage
from pipeline.runtime import tensors
from pipeline.runtime.files import write_json_atomic
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer

_LISTED = 5


@dataclass(frozen=True)
class TrainedModel:
    """A model ready for use, in fp32 and evaluation mode, at the alpha of its step."""

    model: EncoderModel
    tokenizer: Tokenizer | FastTokenizer | None
    facts: dict[str, Any]
    """Step, dataset fingerprint, versions: what config.json holds beside the architecture."""

    def require_tokenizer(self) -> Tokenizer | FastTokenizer:
        """Return the tokenizer.

        Raises:
            CheckpointError: the model came without one.
        """
        if self.tokenizer is None:
            raise CheckpointError(
                "this model came without a tokenizer, so it cannot read text; put its "
                f"{TOKENIZERS_FILE} or vocab.txt beside the weights and convert it again"
            )
        return self.tokenizer


@contextmanager
def publishing(out: Path) -> Iterator[Path]:
    """Make a new folder that becomes `out` if the block succeeds, and is removed if it fails.

    Raises:
        CheckpointError: `out` is not empty, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; choose another folder or remove it")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_model(
    folder: Path, config: ModelConfig, weights: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Write weights and config.json; the caller adds the tokenizer."""
    tensors.write_file(weights, folder / WEIGHTS_FILE)
    write_config(folder, config, facts)


def write_config(folder: Path, config: ModelConfig, facts: dict[str, Any]) -> None:
    """Write config.json."""
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": asdict(config),
        **facts,
        "exported_with": provenance(),
    }
    write_json_atomic(folder / CONFIG_FILE, body)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of one model folder to another, if it has one."""
    path = tokenizer_path(source)
    if path is not None:
        shutil.copyfile(path, folder / path.name)


def load_model(folder: Path) -> TrainedModel:
    """Read a model folder.

    Raises:
        CheckpointError: a file is missing, damaged, or of another format.
    """
    config, facts = read_architecture(folder)
    model = build_model(config, tensors.read_file(folder / WEIGHTS_FILE), str(folder))
    return TrainedModel(model, read_tokenizer(folder), facts)


def read_tokenizer(folder: Path) -> Tokenizer | FastTokenizer | None:
    """Read the tokenizer of a model folder or checkpoint; None if it has none.

    Raises:
        DataError: its file is damaged.
    """
    path = tokenizer_path(folder)
    if path is None:
        return None
    return Tokenizer(path) if path.name == SENTENCEPIECE_FILE else FastTokenizer(path)


def build_model(config: ModelConfig, weights: dict[str, Tensor], origin: str) -> EncoderModel:
    """Build a model with these weights, in evaluation mode.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape; names them.
    """
    model = without_storage(config)
    require_fit(dict(model.state_dict()), weights, origin)
    model.load_state_dict({name: weights[name].float() for name in model.state_dict()}, assign=True)
    return model.eval()


def require_fit(wanted: dict[str, Tensor], found: dict[str, Tensor], origin: str) -> None:
    """Check that tensors are exactly those of a model.

    Raises:
        CheckpointError: they are not; names what differs, with numbers.
    """
    problems = []
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        problems.append(f"missing {_listed(missing)}")
    if unexpected:
        problems.append(f"not expected {_listed(unexpected)}")
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, the model has {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if problems:
        raise CheckpointError(
            f"{origin} does not fit the architecture: {'; '.join(problems)}. Check norm, "
            "norm_affine, bias, mlm_head, sizes and vocab_size against where the weights come from"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} tensors: {', '.join(names[:_LISTED])}{more}"
