"""`python -m pipeline.use.probe CHECKPOINT`: whether a checkpoint can really be loaded.

Started by `train.probe` as an interpreter of its own, which shares nothing with the run that wrote
the files. Prints one JSON object; exit code 0, or 2 with "error" in it.
"""

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pipeline.checkpoints.manifest import MANIFEST_FILE, read_manifest, verify
from pipeline.checkpoints.state import KINDS, MOMENTS, SavedState
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, CheckpointError, PostnormError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.runtime.files import forget_cached
from pipeline.use.folder import read_config

_NICE = 10
_CHUNK = 1 << 24
"""Elements looked at in one go: 64 MiB."""


@dataclass(frozen=True)
class ProbeReport:
    """What was looked at."""

    num_parameters: int
    """Elements of the model."""
    num_bytes: int
    took_s: float


def probe(path: Path) -> ProbeReport:
    """Reads all of a checkpoint from the disk, not from the cache of who wrote it.

    Raises:
        CheckpointError: a hash, a name, a shape or a value is wrong; says which.
    """
    started = time.perf_counter()
    manifest = read_manifest(path)
    for name in (MANIFEST_FILE, *manifest.files):
        if (path / name).is_file():
            forget_cached(path / name)
    verify(path)
    saved = SavedState(path)
    with torch.device("meta"):
        model = MaskedLanguageModel(read_config(manifest.identity["model"], str(path)))
    saved.require_shapes({name: tuple(p.shape) for name, p in model.named_parameters()})
    for name, shape in saved.shapes.items():
        for kind in KINDS:
            _require_sound(saved, kind, name, math.prod(shape))
    elements = sum(math.prod(shape) for shape in saved.shapes.values())
    return ProbeReport(elements, manifest.num_bytes, time.perf_counter() - started)


def _require_sound(saved: SavedState, kind: str, name: str, numel: int) -> None:
    """Every value is a number, and averages of squares are not negative."""
    for start in range(0, numel, _CHUNK):
        values = saved.read(kind, name, start, min(start + _CHUNK, numel))
        wrong = ~values.isfinite()
        if kind == MOMENTS[1]:
            wrong |= values < 0
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise CheckpointError(
                f"{saved.folder}: element {start + place} of {kind}/{name} is "
                f"{values[place].item()}"
            )


def _main(path: Path) -> int:
    os.nice(_NICE)
    try:
        sys.stdout.write(json.dumps(asdict(probe(path))))
    except PostnormError as error:
        sys.stdout.write(json.dumps({"error": str(error)}))
        return EXIT_FAILED_DO_NOT_RETRY
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
