"""A copy of the code in the run's folder, so that a job that waits runs what was submitted."""

import hashlib
import shutil
from pathlib import Path

from pipeline.config.load import REVISION_FILE, git_revision
from pipeline.errors import PostnormError
from pipeline.runtime.files import temporary_beside

_FOLDERS = ("data_prep", "launch", "pipeline", "postnorm", "postnorm/configs", "experiments")
"""`postnorm/configs` is a link in a checkout, which `rglob` does not follow."""
_ROOT = Path(__file__).resolve().parents[1]
_HASH_LETTERS = 16


class SnapshotError(PostnormError):
    """The copy of the code differs from its original."""


def code_hash(root: Path) -> str:
    """Compute the sha256 of the packages' files with their names, shortened."""
    digest = hashlib.sha256()
    for path in _files(root):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:_HASH_LETTERS]


def start_file(folder: Path) -> Path:
    """Name the file that runs modules of the copy that `snapshot` makes of the code now."""
    return folder / code_hash(_ROOT) / "pipeline" / "runtime" / "start.py"


def snapshot(folder: Path, root: Path = _ROOT) -> Path:
    """Copy the packages to `folder/HASH`, with the git revision in `REVISION`; return that folder.

    An existing copy is verified and kept.

    Raises:
        SnapshotError: a copy does not match its name: files were changed, in the checkout during
            the copy or in an earlier copy.
    """
    expected = code_hash(root)
    target = folder / expected
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy = temporary_beside(target)
        try:
            # numba's machine code, which holds for files of this content, saves each start 15 s.
            for path in (*_files(root), *_machine_code(root)):
                to = copy / path.relative_to(root)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)
            (copy / REVISION_FILE).write_text(f"{git_revision()}\n", encoding="utf-8")
            copy.rename(target)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    actual = code_hash(target)
    if actual != expected:
        raise SnapshotError(
            f"{target} holds code of hash {actual}: a file in it was changed, or the checkout was "
            "changed while it was copied; remove that folder and submit again"
        )
    return target


def snapshot_for(start: Path, folder: Path) -> None:
    """Make the copy that a job runs, unless the code was edited since `start_file` was asked."""
    if snapshot(folder) not in start.parents:
        raise SnapshotError("the code was edited while it was being submitted; submit again")


def _files(root: Path) -> list[Path]:
    """List the files of the packages in a fixed order, without Python's compiled ones."""
    every = {path for folder in _FOLDERS for path in (root / folder).rglob("*")}
    return sorted(path for path in every if path.is_file() and "__pycache__" not in path.parts)


def _machine_code(root: Path) -> list[Path]:
    """List what numba compiled of the packages, if anything."""
    return [path for folder in _FOLDERS for path in (root / folder).rglob("__pycache__/*.nb?")]
