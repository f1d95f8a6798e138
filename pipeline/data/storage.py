"""Reading byte ranges from network storage, which at times fails for a moment.

Files are read with `pread`, not mapped: an error of the storage is then an OSError that can be
tried again (a mapped file kills the process with SIGBUS), and a block comes in one request. No file
stays open, so that any number of shards can be read, and a new try opens the file anew, which is
what mends a stale handle.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.errors import StorageError

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""What NFS and Lustre give while a server restarts or a route is lost."""
PAUSES_S = (0.5, 2.0, 8.0, 30.0)
"""Before each new try."""


def read_range(
    path: Path, offset: int, length: int, what: Callable[[], str]
) -> npt.NDArray[np.uint8]:
    """Reads bytes of a file; tries again when the storage fails for a moment.

    Args:
        path: the file.
        offset: first byte.
        length: number of bytes.
        what: says what the range is, for messages.

    Returns:
        (length,) uint8, not writable; shorter if the file ends before.

    Raises:
        FileNotFoundError: the file does not exist.
        StorageError: the storage failed at every try.
        OSError: any other failure, at once.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return _read_once(path, offset, length)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            if pause_s is None:
                raise StorageError(
                    f"{what()} cannot be read: {error}, {len(PAUSES_S) + 1} times in "
                    f"{sum(PAUSES_S):g} s; expected storage that answers: check its state and "
                    "start again, nothing needs to be prepared anew"
                ) from error
            logger.warning("%s cannot be read: %s; next try in %g s", what(), error, pause_s)
            time.sleep(pause_s)
    raise AssertionError("unreachable")


def _read_once(path: Path, offset: int, length: int) -> npt.NDArray[np.uint8]:
    data = np.empty(length, np.uint8)
    view = data.data
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < length:
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if not count:
                break
            done += count
    finally:
        os.close(descriptor)
    data = data[:done]
    data.flags.writeable = False
    return data
