"""Reads a checkpoint back from the disk in another process, as a later start of the run would.

`python -m pipeline.checkpoints.probe CHECKPOINT` prints one JSON object; exit code 0, or 2 with
"error" in it. `ProbeRunner` starts it as a separate interpreter, which shares nothing with the run
that wrote the files, and renames a checkpoint that fails.
"""

import json
import logging
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pipeline import errors
from pipeline.checkpoints.manifest import REJECTED, verify
from pipeline.checkpoints.state import SavedState
from pipeline.model.architecture import TASK_HEADS, read_config
from pipeline.objectives.choose import make_objective, read_objective
from pipeline.runtime import env
from pipeline.runtime.checkpoints import LATEST_FILE, MANIFEST_FILE, published, read_manifest
from pipeline.runtime.files import forget_cached, rename, sync_folder, write_atomic

logger = logging.getLogger(__name__)

_PROGRAM = "pipeline.checkpoints.probe"
_NICE = 10


@dataclass(frozen=True)
class ProbeReport:
    """The size of a good checkpoint, and the time of the probe."""

    num_parameters: int
    num_bytes: int
    took_s: float


def probe(path: Path) -> ProbeReport:
    """Read all of a checkpoint from the disk, not from the cache of the process that wrote it.

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
    objective = make_objective(read_objective(manifest.identity, str(path)))
    with torch.device("meta"):
        model = objective.make_model(read_config(manifest.identity["model"], str(path)))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    beside = {name: each for name, each in saved.shapes.items() if name.startswith(TASK_HEADS)}
    saved.require_shapes(shapes | beside)
    for text in saved.non_finite():
        raise errors.CheckpointError(text)
    elements = sum(math.prod(shape) for shape in saved.shapes.values())
    return ProbeReport(elements, manifest.num_bytes, time.perf_counter() - started)


class ProbeRunner:
    """Runs one probe of a checkpoint. Rank 0 uses it, from any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False

    def run(self, path: Path) -> float | None:
        """Start a probe, wait for its verdict, and hide a checkpoint that it finds unusable.

        Returns:
            Seconds that the probe took; None without a verdict, because the process was cancelled,
            was killed or did not start.

        Raises:
            RejectedError: the checkpoint is unusable and was renamed.
        """
        if self._cancelled:
            return None
        started = time.perf_counter()
        # Hide the GPU: the run needs all of its memory.
        # One thread, as the cores belong to the ranks.
        variables = env.child_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        self._process = subprocess.Popen(
            [*env.module_command(_PROGRAM), str(path)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # `cancel` may have come between the look above and the start.
        if self._cancelled:
            self._process.kill()
        output, complaints = self._process.communicate()
        took_s = time.perf_counter() - started
        if self._cancelled:
            logger.warning("the probe of %s was cancelled: the run stops", path)
            return None
        code = self._process.returncode
        report = _parsed(output)
        if code == errors.EXIT_FINISHED and "num_parameters" in report:
            logger.info(
                "probe: %s is good: %s parameters and their optimizer state, read by another "
                "process in %.1f s",
                path,
                f"{report['num_parameters']:,}",
                took_s,
            )
            return took_s
        # Both: Python itself ends with 2 where it cannot open a script, which says nothing of this
        # file.
        if code == errors.EXIT_FAILED_DO_NOT_RETRY and "error" in report:
            raise _rejection(path, str(report["error"]))
        logger.warning(
            "the probe of %s came to no verdict, exit code %s: %s", path, code, complaints[-2000:]
        )
        return None

    def cancel(self) -> None:
        """Kill a running probe; the checkpoint keeps its name."""
        self._cancelled = True
        if self._process is not None:
            self._process.kill()


def _rejection(path: Path, reason: str) -> errors.RejectedError:
    """Hide a checkpoint from every later start, and return the error to raise."""
    # With the time: the step is trained and saved again, and may be rejected again.
    hidden = path.with_name(f"{REJECTED}{path.name}-{time.time_ns() // 1_000_000}")
    rename(path, hidden)
    earlier = published(path.parent)
    latest = path.parent / LATEST_FILE
    if earlier:
        write_atomic(latest, f"{earlier[0].name}\n".encode())
    else:
        latest.unlink(missing_ok=True)
    sync_folder(path.parent)
    before = f"the one before is {earlier[0]}" if earlier else "no earlier checkpoint exists"
    return errors.RejectedError(
        f"checkpoint {path.name} was read back and rejected: {reason}. It was renamed to {hidden}; "
        f"delete it when you have examined it; {before}. Check storage and memory, then start the "
        "run again"
    )


def _parsed(output: str) -> dict[str, object]:
    try:
        report = json.loads(output)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _main(path: Path) -> int:
    os.nice(_NICE)
    try:
        sys.stdout.write(json.dumps(asdict(probe(path))))
    except errors.PostnormError as error:
        sys.stdout.write(json.dumps({"error": str(error)}))
        return errors.EXIT_FAILED_DO_NOT_RETRY
    return errors.EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
