"""Files of named tensors: safetensors, and PyTorch's pickles, whose code is never run."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import CheckpointError

_open: Any = safe_open  # without type hints
# In the order in which transformers looks for them.
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a model folder, from one file or from those that an index names.

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
    """Tensors of one file (CheckpointError: it is missing, damaged, or holds more than tensors)."""
    try:
        if path.suffix == ".safetensors":
            loaded: dict[str, Tensor] = load_file(path)
            return loaded
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}


def write_file(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write safetensors that transformers accepts, with texts in the header.

    Raises:
        OSError: the disk is full or not writable.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(whole, path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    # safetensors makes a new file that only its owner may read.
    path.chmod(mode)


class SlicedFile:
    """A safetensors file whose tensors are read in part."""

    def __init__(self, path: Path) -> None:
        """Read the header (CheckpointError: the file is missing or damaged)."""
        self.path = path
        try:
            self._file = _open(path, framework="pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
            names: list[str] = self._file.keys()
            self.shapes = {
                name: tuple[int, ...](self._file.get_slice(name).get_shape()) for name in names
            }
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Element `start` to `stop` along the first dimension."""
        part: Tensor = self._file.get_slice(name)[start:stop]
        return part
