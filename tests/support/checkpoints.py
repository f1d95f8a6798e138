"""Checkpoints made without training: real files of state, a real manifest."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.manifest import state_file
from pipeline.checkpoints.state import KINDS, Checkpointable, TensorShard, write_part
from pipeline.runtime import checkpoints, dist
from pipeline.runtime.checkpoints import FOLDER, MANIFEST_FILE
from pipeline.runtime.files import sha256_file

SHAPES = {"matrix": (3, 4), "gain": (5,)}


def make_checkpoint(run: Path, step: int, *, world_size: int = 1, seed: int = 0,
                    held_out_loss: float | None = None,
                    identity: dict[str, Any] | None = None) -> Path:  # fmt: skip
    """Writes one; ranks hold equal stretches, as far as they go."""
    folder = run / FOLDER / checkpoints.name_of(step)
    generator = torch.Generator().manual_seed(seed)
    whole = {
        (kind, name): torch.rand(shape, generator=generator).flatten()
        for kind in KINDS
        for name, shape in SHAPES.items()
    }
    counters = {"updates": step, "global_steps": step, "skipped_steps": 0}
    for rank in range(world_size):
        parts = []
        for name, shape in SHAPES.items():
            numel = len(whole[KINDS[0], name])
            start, stop = rank * numel // world_size, (rank + 1) * numel // world_size
            tensors = {kind: whole[kind, name][start:stop] for kind in KINDS}
            parts.append(TensorShard(name, shape, start, tensors))
        write_part(folder, rank, world_size, parts, counters)
    write_manifest(folder, step, world_size, held_out_loss, identity or {"seed": 1})
    return folder


def write_manifest(folder: Path, step: int, world_size: int, held_out_loss: float | None,
                   identity: dict[str, Any]) -> None:  # fmt: skip
    files = {
        state_file(rank, world_size): {
            "bytes": (folder / state_file(rank, world_size)).stat().st_size,
            "sha256": sha256_file(folder / state_file(rank, world_size)),
        }
        for rank in range(world_size)
    }
    body = checkpoints.Manifest(
        step=step, cursor=8 * step, skipped=0, alpha=1.0, fingerprint="f", identity=identity,
        config_sha256="c", world_size=world_size, created_unix_s=1e9 + step, provenance={},
        files=files, zero_stage=world_size, held_out_loss=held_out_loss,
        held_out_step=None if held_out_loss is None else step, contents=checkpoints.CONTENTS,
    )  # fmt: skip
    (folder / MANIFEST_FILE).write_text(json.dumps(checkpoints.signed(asdict(body))))


def save_state(engine: Checkpointable, folder: Path) -> None:
    """Write the state that all ranks' engines hold, without a manifest. Collective."""
    parts, counters = engine.state_parts()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    write_part(folder, rank, world_size, parts, counters)
    dist.barrier()
