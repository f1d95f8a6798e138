"""Files of named tensors: safetensors, and PyTorch's pickles, whose code is never run."""

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import CheckpointError

# In the order in which transformers looks for them.
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder, from one file or from those that an index names.

    Raises:
        CheckpointError: no file is there, or one cannot be read.
    """
    for name in _SINGLE:
        if (folder / name).is_file():
            return read_file(folder / name)
    for name in _INDEX:
        if (folder / name).is_file():
            parts = json.loads((folder / name).read_bytes())["weight_map"].values()
            tensors: dict[str, Tensor] = {}
            for part in sorted(set(parts)):
                tensors |= read_file(folder / part)
            return tensors
    raise CheckpointError(f"{folder} holds none of {', '.join((*_SINGLE, *_INDEX))}")


def read_file(path: Path) -> dict[str, Tensor]:
    """Tensors of one file.

    Raises:
        CheckpointError: it is missing, damaged, or holds more than tensors.
    """
    try:
        if path.suffix == ".safetensors":
            loaded: dict[str, Tensor] = load_file(path)
            return loaded
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes safetensors that transformers accepts.

    Raises:
        OSError: the disk is full or not writable.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
