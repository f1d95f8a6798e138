"""Files of named tensors: safetensors, and PyTorch's pickles, whose code is never run."""

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.runtime.files import flush_file, refuse_pointer, retry_storage

_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OS_ERROR = re.compile(r"os error (\d+)")
"""How Rust writes an error of the system."""
_open: Any = safe_open  # without type hints
# In the order in which transformers looks for them.
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_WEIGHTS = ("state_dict", "model_state_dict", "model", "module")
"""What training loops call the weights beside their optimizer."""
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a model folder, from one file or from those that an index names.

    Raises:
        CheckpointError: no file is there, one cannot be read, or the index is damaged or names a
            file outside the folder.
    """
    for name in _SINGLE:
        if (folder / name).is_file():
            return read_file(folder / name)
    for name in _INDEX:
        if (folder / name).is_file():
            tensors: dict[str, Tensor] = {}
            for part in _parts(folder / name):
                tensors |= read_file(folder / part)
            return tensors
    raise CheckpointError(f"{folder} holds none of {', '.join((*_SINGLE, *_INDEX))}")


def _parts(index: Path) -> list[str]:
    """List the files that an index of tensors names."""
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values()
        parts = sorted(set(listed))
        # What `..` or an absolute path leads to is not a part of what was downloaded here.
        outside = [part for part in parts if Path(part).is_absolute() or ".." in Path(part).parts]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} has no readable weight_map ({error!r}), expected one file name a tensor; "
            "download it again"
        ) from error
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, expected files of {index.parent} alone; do not use it"
        )
    return parts


def read_file(path: Path) -> dict[str, Tensor]:
    """Tensors of one file (CheckpointError: it is missing, damaged, or holds more than tensors)."""
    refuse_pointer(path)
    try:
        if path.suffix == ".safetensors":
            loaded: dict[str, Tensor] = load_file(path)
            return loaded
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises to run the code that the file may hold.
        raise CheckpointError(
            f"{path} cannot be read: it is damaged, or holds pickled code, which is never run; "
            "download it again, or save its tensors as safetensors"
        ) from error
    except (
        # A damaged pickle raises whatever its next instruction runs into.
        *(OSError, RuntimeError, EOFError, SafetensorError),
        *(ValueError, LookupError, TypeError, AttributeError),
    ) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(tensors, dict):
        raise CheckpointError(
            f"{path} holds a {type(tensors).__name__}, expected tensors by name (a state_dict)"
        )
    return _named(tensors) or _inner(tensors, path)


def _named(values: dict[Any, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in values.items() if isinstance(value, Tensor)}


def _inner(values: dict[Any, Any], path: Path) -> dict[str, Tensor]:
    """Return the one state dict of weights that a training loop saved beside other things.

    Raises:
        CheckpointError: there is none, or more than one that may be meant.
    """
    inner = {name: _named(values[name]) for name in _WEIGHTS if isinstance(values.get(name), dict)}
    found = {name: tensors for name, tensors in inner.items() if tensors}
    if len(found) == 1:
        return next(iter(found.values()))
    raise CheckpointError(
        f"{path} holds {', '.join(map(repr, values)) or 'nothing'}, expected tensors by name, or "
        f"one of {', '.join(_WEIGHTS)} with them"
        + (f", not {' and '.join(found)}" if found else "")
        + "; save the state_dict of the model alone"
    )


def require_weights(tensors: dict[str, Tensor], origin: str) -> None:
    """Check that all values are numbers that fp32 holds.

    Raises:
        CheckpointError: a tensor has another dtype, or values that are infinite or NaN; names it.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise CheckpointError(
                f"{origin}: {name} holds {tensor.dtype}, expected fp32, bf16, fp16 or fp64; the "
                "values of quantised weights mean nothing without their scales: take the model "
                "that was quantised"
            )
        finite = torch.isfinite(tensor.float())
        if not bool(finite.all()):
            count = tensor.numel() - int(finite.sum())
            raise CheckpointError(
                f"{origin}: {count:,} of the {tensor.numel():,} values of {name} are infinite or "
                "NaN in fp32: training has diverged, or the file is damaged; take an earlier "
                "checkpoint, or copy it again"
            )


def write_file(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write safetensors that transformers accepts, with texts in the header, and flush the file.

    Tried again while storage fails in passing.

    Raises:
        OSError: the disk is full or not writable.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}

    def write() -> None:
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(whole, path, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:
            raise _of_system(error, path) from error
        # safetensors makes a new file that only its owner may read.
        path.chmod(mode)
        flush_file(path)

    retry_storage(write, lambda: f"writing {path}")


def _of_system(error: SafetensorError, path: Path) -> OSError:
    """Return the system's error that safetensors tells of in words."""
    found = _OS_ERROR.search(str(error))
    if found is None:
        return OSError(f"{path}: {error}")
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path))


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
