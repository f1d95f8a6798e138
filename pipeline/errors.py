"""Errors a user can cause, and the exit codes that `launch` and job scripts read.

Every message says what was wrong, the value found, what was expected and what to change.
An `assert` elsewhere marks a bug of ours; these classes mark something the user can fix.
"""

import errno
from typing import Any

EXIT_FINISHED = 0
"""The work is done; nothing is left to do."""
EXIT_FAILED_RETRY = 1
"""An unforeseen failure (also what an uncaught exception gives): trying again may help."""
EXIT_FAILED_DO_NOT_RETRY = 2
"""The input is wrong (also what argparse gives): trying again changes nothing."""
EXIT_STOPPED = 3
"""Stopped by a person's STOP file: not to be started again until it is removed."""
EXIT_PREEMPTED = 75
"""Stopped on request after saving (EX_TEMPFAIL in sysexits.h): start again to continue."""
EXIT_INTERRUPTED = 130
"""A person pressed Ctrl-C (128 + SIGINT, as shells count); training and evaluation give 75."""


class PostnormError(Exception):
    """A failure with a message meant for the person who started the command."""

    exit_code = EXIT_FAILED_DO_NOT_RETRY

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks and workers send errors to one another. Exceptions are rebuilt by a call with the
        # message alone, which a class that takes more would answer with a TypeError.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[PostnormError], args: tuple[Any, ...], values: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.__dict__.update(values)
    return error


class ConfigError(PostnormError):
    """A config file, an override or an environment variable is wrong."""


class DataError(PostnormError):
    """Input text, a shard or an index is missing, damaged or unusable."""


class RunFolderError(PostnormError):
    """A folder that was given as a run's is missing, another kind of folder, or not started."""


class CheckpointError(PostnormError):
    """A checkpoint could not be written, or does not fit what it is loaded into."""


class NotSavedError(CheckpointError):
    """Storage failed while a checkpoint was written; the one before it can be gone on from."""

    exit_code = EXIT_FAILED_RETRY


class NewerFormatError(CheckpointError):
    """A newer version wrote it: older things beside it must not be taken in its place."""


class RejectedError(CheckpointError):
    """A checkpoint that was just written cannot be read; the one before it can be gone on from."""

    exit_code = EXIT_FAILED_RETRY


class UnsoundStateError(CheckpointError):
    """What was to be saved is not finite, on some rank; raised on all ranks."""

    def __init__(self, message: str, cursor: int, found: list[str]) -> None:
        super().__init__(message)
        self.cursor = cursor
        """Data cursor of the state."""
        self.found = found
        """Rank and tensor of each value, for people."""


class DivergedError(PostnormError):
    """Ranks hold different bits of what they have copies of; raised on all ranks.

    Which ranks are sound is not certain, so nothing is saved; a start loads the same on all.
    """

    exit_code = EXIT_FAILED_RETRY

    def __init__(self, message: str, found: list[str]) -> None:
        super().__init__(message)
        self.found = found
        """Ranks and tensors, for people."""


class TrainingError(PostnormError):
    """Training cannot go on, such as too many skipped steps in a row."""


class PreemptedError(PostnormError):
    """A signal ended the work after it saved: the same command goes on."""

    exit_code = EXIT_PREEMPTED


class StoppedError(PostnormError):
    """A person wants the run to stand still."""

    exit_code = EXIT_STOPPED


class LostRankError(PostnormError):
    """Another rank died, or did not answer in time."""

    exit_code = EXIT_FAILED_RETRY


class BusyError(PostnormError):
    """Another process holds what is needed; it may be gone when this is tried again."""

    exit_code = EXIT_FAILED_RETRY


class StorageError(PostnormError):
    """Storage failed to give what it has, for longer than a moment."""

    exit_code = EXIT_FAILED_RETRY


PASSING = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN}
    | {errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH}
)
"""Errors of NFS, Lustre and FUSE while a server restarts or a route is lost."""
LASTING = {
    errno.ENOSPC: "free space or inodes there",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EROFS: "have it mounted writable, or choose another folder",
}
"""What cures an error of a write that no other try does."""
_WRONG_PATH = {
    errno.ENOENT: "correct the path, or make the folder first",
    errno.ENOTDIR: "a part of the path is a file: correct the path",
    errno.EISDIR: "it is a folder: give a file",
    errno.EEXIST: "it is a file, or exists already: choose another name",
    errno.EACCES: "make it readable and writable for you, or choose another one",
    errno.EPERM: "make it readable and writable for you, or choose another one",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "a link leads to itself: correct it",
}


def not_written(error: OSError, said: str) -> PostnormError:
    """Return the error of a file of a run that cannot be written; `said` names it and the error.

    Another start helps, unless the disk is full or read-only.
    """
    if remedy := LASTING.get(error.errno or 0):
        return PostnormError(f"{said}. To go on {remedy}; then start again")
    return StorageError(
        f"{said}. Storage failed, also when it was tried again: look at its state, then start again"
    )


def explained(error: OSError) -> PostnormError:
    """Return the error that says what to do about one of the system."""
    text = str(error)
    if remedy := LASTING.get(error.errno or 0):
        return PostnormError(f"{text}: {remedy}; then the same command continues")
    if remedy := _WRONG_PATH.get(error.errno or 0):
        return PostnormError(f"{text}: {remedy}")
    if error.errno in PASSING:
        return StorageError(
            f"{text}: storage failed, also when it was tried again; look at its state, then the "
            "same command continues"
        )
    return StorageError(
        f"{text}; what was finished before is untouched, the same command continues"
    )


class WorkerError(PostnormError):
    """A process that makes batches is gone or broken."""

    exit_code = EXIT_FAILED_RETRY


_EXTRAS = {
    "torch": "train",
    "deepspeed": "train",
    "tensorboard": "train",
    "PIL": "train",
    "safetensors": "train",
    "google_crc32c": "train",
    "sklearn": "tables",
    "scipy": "tables",
    "matplotlib": "studies",
    "transformers": "hf",
    "onnx": "onnx",
    "onnxruntime": "onnx",
}
"""By module that is not among the base dependencies: what installs it."""


def missing_extra(error: ModuleNotFoundError) -> PostnormError | None:
    """Return the error that says what to install; None if no extra has the missing module."""
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    if extra is None:
        return None
    return PostnormError(
        f"this needs {module}, which is not installed: run `pip install 'postnorm[{extra}]'`, in a "
        "checkout `make setup`"
    )
